"""Graphs with bfloat16 numbers on the CPU: kernels compute them, and ONNX Runtime in float32 what kernels do not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from builders import model as model_of
from steps import exported
from twins import descended

import graphopt
import passes
from graphopt import models
from graphopt.compiler import standard
from graphopt.graph.loading import load
from graphopt.inspection.report import report
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.targets.bfloat16 import MOVING, compute_bfloat16_in_float32, computes_bfloat16
from graphopt.targets.native import precision, products
from graphopt.targets.native.lowering import Kernels, lower_to_kernels
from graphopt.targets.native.toolchain import compiler

NARROW = passes.MixedPrecision("bfloat16")
RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray]
NETWORKS: dict[str, tuple[ir.Model, passes.Loss, np.ndarray, np.ndarray]] = {
    "mlp": (
        models.mlp(64, 10, hidden=(100, 72)),
        passes.CrossEntropy(),
        RNG.standard_normal((96, 64)).astype(np.float32),
        RNG.integers(0, 10, 96),
    ),
    "cnn": (
        models.cnn((3, 12, 12), 10),
        passes.CrossEntropy(),
        RNG.standard_normal((16, 3, 12, 12)).astype(np.float32),
        RNG.integers(0, 10, 16),
    ),
    "transformer": (
        models.transformer((12,), 17, layers=1),
        passes.CrossEntropy(axis=-1),
        *RNG.integers(0, 17, (2, 8, 12)),
    ),
}
OPTIMIZERS: dict[str, passes.Optimizer] = {
    "sgd": passes.SGD(0.05),
    "momentum": passes.SGD(0.05, momentum=0.9, nesterov=True),
    "adamw": passes.AdamW(1e-3),
    "rmsprop": passes.RMSprop(1e-3),
    "lion": passes.Lion(1e-4),
}
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler: install gcc or clang")
needs_products = pytest.mark.skipif(not precision.multiplies_bfloat16(), reason=str(precision.obstacle("medium")))


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    for name in ("GRAPHOPT_NATIVE", "GRAPHOPT_MATMUL_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def step_of(network: str, **steps: Any) -> ir.Model:
    proto, loss, _, _ = NETWORKS[network]
    return graphopt.compile(proto, loss=loss, **{"optimizer": passes.AdamW(1e-3), "precision": NARROW, **steps})


def losses(step: ir.Model, network: str, count: int, **options: Any) -> list[float]:
    executor = graphopt.Executor(step, **options)
    feeds = dict(zip(executor.inputs, NETWORKS[network][2:], strict=True))
    return [float(executor.step(feeds)["loss"]) for _ in range(count)]


def graph(text: str) -> onnx.ModelProto:
    """Return a graph of opset 21 with all shapes."""
    head = '<ir_version: 10, opset_import: ["": 21]>\n'
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(head + text))


def lowered(proto: onnx.ModelProto, feeds: Arrays, threads: int = 1) -> tuple[Arrays, ir.Model]:
    """Return what a graph with kernels computes, and the graph."""
    found = lower_to_kernels(load(proto), threads=threads)
    assert found is not None
    session = Session(Device("cpu", threads=threads, native=False), found.model, library=found.library)
    return session.compute_arrays(feeds), found.model


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the nearest bfloat16 numbers, as ml_dtypes finds them."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


# --- What ONNX Runtime has ---


def test_the_cpu_provider_moves_bfloat16_numbers() -> None:
    proto = graph(
        """g (float[3,4] x, int64[2] i) => (float[8,3] y, int64[2] size) {
            a = Cast<to=16>(x)
            b = Transpose(a)
            c, d = Split<axis=0, num_outputs=2>(b)
            e = Concat<axis=0>(d, c)
            f = Gather(e, i)
            axes = Constant<value_ints=[0]>()
            zero = Constant<value_ints=[0]>()
            two = Constant<value_ints=[2]>()
            g = Slice(e, zero, two, axes)
            h = Unsqueeze(g, axes)
            k = Squeeze(h, axes)
            size = Shape(k)
            index = Constant<value = int64[2,1] {0, 1}>()
            m = ScatterND(e, index, f)
            wide = Constant<value = int64[2,3] {0, 0, 0, 1, 1, 1}>()
            n = ScatterElements(e, wide, k)
            same = Identity(n)
            flat = Flatten(same)
            sizes = Constant<value_ints=[4, 3]>()
            r = Reshape(flat, sizes)
            t = Concat<axis=0>(m, r)
            y = Cast<to=1>(t)
        }"""
    )
    assert {node.op_type for node in proto.graph.node} | {"Size"} == MOVING
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    y, size = Session(Device("cpu", native=False), load(proto)).run({"x": x, "i": np.array([2, 3])})
    e = np.concatenate([rounded(x).T[2:], rounded(x).T[:2]])
    np.testing.assert_array_equal(y, np.concatenate([e[2:], e[2:], e]))
    np.testing.assert_array_equal(size, [2, 3])


@pytest.mark.parametrize("network", NETWORKS)
def test_a_graph_for_its_kernels_computes_in_float32_alone(network: str) -> None:
    step = step_of(network)
    assert any(map(computes_bfloat16, step.graph.all_nodes()))
    fused = graphopt.lower(step, "onnxruntime")
    assert not any(map(computes_bfloat16, fused.graph.all_nodes()))
    onnxruntime.InferenceSession(ir.to_proto(fused).SerializeToString(), providers=["CPUExecutionProvider"])
    assert any(map(computes_bfloat16, graphopt.lower(step, "cuda").graph.all_nodes()))


# --- Kernels ---

EXACT = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Max": np.maximum,
    "Min": np.minimum,
    "Neg": np.negative,
    "Abs": np.abs,
    "Relu": lambda x: np.maximum(x, 0),
    "Identity": lambda x: x,
}
NEAR = {
    "Div": np.divide,
    "Tanh": np.tanh,
    "Exp": np.exp,
    "Sqrt": lambda x: np.sqrt(np.maximum(x, 0)),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "Softplus": lambda x: np.log1p(np.exp(x)),
}


@needs_compiler
@pytest.mark.parametrize("shape", [(37, 65), (5, 3), (1, 1000)], ids=str)
@pytest.mark.parametrize("op_type", [*EXACT, *NEAR])
def test_an_operator_rounds_its_result_once(op_type: str, shape: tuple[int, int]) -> None:
    """The operands go through memory in 16 bits, and so does the result."""
    function = {**EXACT, **NEAR}[op_type]
    two = function in (np.add, np.subtract, np.multiply, np.maximum, np.minimum, np.divide)
    before = "Relu(a)" if op_type == "Sqrt" else "Identity(a)"
    rows, columns = shape
    proto = graph(
        f"""g (float[{rows},{columns}] x, float[{columns}] z) => (float[{columns},{rows}] y) {{
            a = Cast<to=16>(x)  c = Cast<to=16>(z)  turned = Transpose(a)  back = Transpose(turned)
            b = {before.replace("(a)", "(back)")}  r = {op_type}({"b, c" if two else "b"})
            t = Transpose(r)  y = Cast<to=1>(t)
        }}"""
    )
    x, z = (RNG.standard_normal(s).astype(np.float32) * 3 for s in (shape, shape[1:]))
    found, _ = lowered(proto, {"x": x, "z": z})
    operands = [rounded(v).astype(np.float32) for v in (x, z)[: 1 + two]]
    exact = function(*(v.astype(np.float64) for v in operands))
    expected = rounded(exact.astype(np.float32)).T
    if op_type in EXACT:
        np.testing.assert_array_equal(found["y"], expected)
    else:  # the last bit of float32 may decide a tie
        assert (np.abs(found["y"] - expected) <= 2.0**-7 * np.abs(expected) + 1e-6).all()
        large = np.abs(expected) > 0.05  # beside cancellation
        assert np.mean((found["y"] != expected)[large]) < 0.01


@needs_compiler
def test_extreme_numbers_are_rounded_as_ml_dtypes_rounds_them() -> None:
    bits = np.array([0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0, 0x80000000], "u4")
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000, 0x00010000, 0x00018000, 0x007FFFFF], "u4")
    x = np.tile(np.concatenate([bits, ties, RNG.integers(0, 2**32, 977, np.uint32)]).view(np.float32), 2)
    proto = graph("g (float[1984] x) => (float[1984] y) { a = Cast<to=16>(x) b = Neg(a) y = Cast<to=1>(b) }")
    found, _ = lowered(proto, {"x": x})
    expected = -x.astype(ml_dtypes.bfloat16).astype(np.float32)
    tiny = np.abs(expected) < np.finfo(np.float32).tiny  # a session may flush them
    np.testing.assert_array_equal(found["y"][~tiny], expected[~tiny])
    assert (np.abs(found["y"][tiny]) <= np.abs(expected[tiny])).all()


@needs_compiler
@pytest.mark.parametrize(("axes", "keeps"), [([0], 1), ([1], 0), ([0, 1], 1)], ids=str)
def test_sums_are_of_float32(axes: list[int], keeps: int) -> None:
    proto = graph(
        f"""g (float[300,70] x) => (float[] y) {{
            a = Cast<to=16>(x)  axes = Constant<value_ints={axes}>()
            s = ReduceSum<keepdims={keeps}>(a, axes)  y = Cast<to=1>(s)
        }}""".replace("float[] y", f"float{'[1,70]' if axes == [0] else '[300]' if axes == [1] else '[1,1]'} y")
    )
    x = RNG.standard_normal((300, 70)).astype(np.float32)
    found, _ = lowered(proto, {"x": x})
    exact = rounded(x).sum(tuple(axes), keepdims=bool(keeps))
    size = np.abs(rounded(x)).sum(tuple(axes), keepdims=bool(keeps))
    assert (np.abs(found["y"] - exact) <= 2.0**-8 * np.abs(exact) + 1e-6 * size).all()


def product_case(rng: np.random.Generator) -> tuple[str, list[tuple[int, ...]]]:
    """Return a product of bfloat16 numbers as text, perhaps transposed, and the shapes of its operands."""
    m, n, k = (int(rng.choice([1, 3, 8, 16, 31, 33, 64, 100, 130])) for _ in range(3))
    if rng.random() < 0.1:
        m, n, k = [(300, 1100, 40), (40, 600, 1100), (513, 20, 600)][rng.integers(3)]
    batches = [(), (2,), (2, 3)][rng.integers(3)]
    turned = [bool(rng.integers(2)) for _ in range(3)]
    shapes = [(*batches, m, k), (*batches, k, n), (*batches, m, n)]
    stored = [(*s[:-2], s[-1], s[-2]) if t else s for s, t in zip(shapes, turned, strict=True)]
    rank, perm = len(batches) + 2, list(range(len(batches)))
    perm += [rank - 1, rank - 2]
    turn = [f"Transpose<perm={perm}>({x})" if t else f"Identity({x})" for x, t in zip("abp", turned, strict=True)]
    declared = [f"float[{','.join(map(str, s))}]" for s in stored]
    return (
        f"""g ({declared[0]} x, {declared[1]} z) => ({declared[2]} y) {{
            a1 = Cast<to=16>(x)  a = Neg(a1)  b = Cast<to=16>(z)
            a2 = {turn[0]}  b2 = {turn[1]}  p = MatMul(a2, b2)  q = {turn[2]}  y = Cast<to=1>(q)
        }}""",
        stored[:2],
    )


@needs_compiler
@needs_products
@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(60))
def test_random_products_against_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text, shapes = product_case(rng)
    x, z = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    proto = graph(text)
    one, kernels = lowered(proto, {"x": x, "z": z})
    assert not [node for node in kernels.graph if node.op_type == "MatMul"]
    two, _ = lowered(proto, {"x": x, "z": z}, threads=3)
    np.testing.assert_array_equal(one["y"], two["y"])
    a, b = -rounded(x), rounded(z)
    turn = functools.partial(np.swapaxes, axis1=-1, axis2=-2)
    nodes = {node.output[0]: node.op_type for node in proto.graph.node}
    a, b = (turn(v) if nodes[name] == "Transpose" else v for v, name in ((a, "a2"), (b, "b2")))
    exact, size = a @ b, np.abs(a) @ np.abs(b)
    if nodes["q"] == "Transpose":
        exact, size = turn(exact), turn(size)
    bound = 2.0**-8 * 1.01 * np.abs(exact) + (a.shape[-1] + 2) * 2.0**-23 * size
    assert (np.abs(one["y"] - exact) <= bound).all()


@needs_compiler
@needs_products
def test_products_round_parameters_themselves() -> None:
    step = step_of("mlp")
    lowered_step = graphopt.lower(step, "native")
    casts = [node for node in lowered_step.graph if node.op_type == "Cast"]
    assert not casts
    parameters = {x.name for x in step.graph.inputs if str(x.name).endswith("weight")}
    readers = {use.node.op_type[0] for x in lowered_step.graph.inputs if x.name in parameters for use in x.uses()}
    assert readers == {"p", "k"}  # products, and the update


# --- Training ---


@needs_compiler
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", ["mlp", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cnn", "transformer"))])
def test_kernels_train_as_the_plain_step_does(network: str, optimizer: str) -> None:
    step = step_of(network, optimizer=OPTIMIZERS[optimizer])
    plain = losses(step, network, 8, native=False)
    one, two = (losses(step, network, 8, native=True, verify=True, threads=n) for n in (1, 2))
    assert one == two
    np.testing.assert_allclose(one, plain, rtol=0.02)
    assert one[-1] < one[0]


class Attention(torch.nn.Module):
    """Classify sequences of tokens by the mean of what an encoder layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(17, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (
        lambda: torch.nn.Sequential(
            *(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 72), torch.nn.ReLU()),
            torch.nn.Linear(72, 10),
        ),
        lambda: torch.randn(64, 64),
    ),
    "cnn": (
        lambda: torch.nn.Sequential(
            *(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Flatten(), torch.nn.Linear(32 * 9, 10)),
        ),
        lambda: torch.randn(64, 3, 12, 12),
    ),
    "transformer": (Attention, lambda: torch.randint(0, 17, (64, 12))),
}
RULES: dict[str, tuple[passes.Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (passes.SGD(0.1), functools.partial(torch.optim.SGD, lr=0.1)),
    "momentum": (
        passes.SGD(0.05, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adamw": (
        passes.AdamW(1e-3, weight_decay=0.01),
        functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01),
    ),
}


@needs_compiler
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.slow
def test_it_trains_as_pytorchs_autocast_does(name: str, rule: str) -> None:
    """Twenty steps of an exported module on two batches."""
    torch.manual_seed(0)
    make, draw = MODULES[name]
    module, batches = make(), [(draw(), torch.randint(0, 10, (64,))) for _ in range(2)]
    own, of_torch = RULES[rule]
    found, single = (trained(module, batches, own, precision) for precision in (NARROW, None))
    optimizer, expected = of_torch(module.parameters()), []
    for x, labels in batches * 10:
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(module(x).float(), labels)
        expected.append(descended(loss, optimizer))
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    np.testing.assert_allclose(found, single, rtol=2e-3)
    assert found != single
    assert expected[-1] < expected[0]


def trained(
    module: torch.nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    optimizer: passes.Optimizer,
    precision: passes.MixedPrecision | None,
) -> list[float]:
    """Return the losses of twenty steps of a module that is exported."""
    training = torch.onnx.TrainingMode.TRAINING
    proto = exported(module, batches[0][0], dynamo=False, training=training, do_constant_folding=False)
    step = graphopt.compile(
        proto,
        **{"loss": passes.CrossEntropy(), "optimizer": optimizer, "precision": precision},
    )
    executor = graphopt.Executor(step, native=True)
    return [float(executor.step(x=x.numpy(), target=labels.numpy())["loss"]) for x, labels in batches * 10]


@needs_compiler
@pytest.mark.parametrize(
    ("native", "options"),
    [
        (True, {"in_place": True}),
        *(
            (native, options)
            for native in (True, False)
            for options in ({"static_shapes": True}, {"steps_per_call": 3})
        ),
    ],
    ids=str,
)
def test_it_trains_with_options(native: bool, options: dict[str, Any]) -> None:
    step = step_of("mlp")
    expected = losses(step, "mlp", 6, native=native)
    executor = graphopt.Executor(step, native=native, verify=True, **options)
    batch = dict(zip(executor.inputs, NETWORKS["mlp"][2:], strict=True))
    found = [reported["loss"] for reported in executor.run([batch] * 6)]
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@needs_compiler
def test_auto_trains_and_evaluates() -> None:
    step = step_of("mlp")
    executor = graphopt.Executor(step, native="auto")
    feeds = dict(zip(executor.inputs, NETWORKS["mlp"][2:], strict=True))
    assert np.isfinite(executor.step(feeds)["loss"])
    assert executor.evaluate(feeds)["loss"] > 0


# --- Without kernels ---


@needs_compiler
def test_without_instructions_products_run_in_float32(monkeypatch) -> None:
    expected = losses(step_of("mlp"), "mlp", 6, native=False)
    for module in (precision, products):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr("graphopt.targets.native.lowering.multiplies_bfloat16", lambda: False)
    found = losses(step_of("mlp"), "mlp", 6, native=True, verify=True)
    np.testing.assert_allclose(found, expected, rtol=0.01)
    steps = {"loss": passes.CrossEntropy(), "precision": NARROW, "optimizer": passes.SGD(0.1)}
    text = report(NETWORKS["mlp"][0], standard(**steps)).summary()
    assert "; in float32, between casts: Gemm " in text


@pytest.mark.parametrize("leave_out", ["products", "kernels"])
def test_what_kernels_leave_out_runs_in_float32(leave_out: str) -> None:
    step = Kernels(leave_out=(leave_out,))(step_of("mlp")).model
    assert not any(map(computes_bfloat16, step.graph.all_nodes()))


def test_the_report_names_what_runs_in_float32() -> None:
    proto = model_of(
        """g (float[N,8] x) => (float[N,3] y) {
            a = MatMul(x, u)
            b = Expand(a, size)
            t = Tanh(b)
            y = MatMul(t, w)
        }""",
        u=RNG.standard_normal((8, 8)),
        w=RNG.standard_normal((8, 3)),
        size=np.array([4, 8]),
    )
    steps = {"loss": passes.MeanSquaredError(), "precision": NARROW, "optimizer": passes.SGD(0.1)}
    text = report(proto, standard(**steps)).summary()
    assert "; in float32, between casts: Expand " in text
    step = graphopt.compile(proto, **steps)
    feeds = {"x": np.ones((4, 8), np.float32), "target": np.zeros((4, 3), np.float32)}
    one, other = (graphopt.Executor(step, native=native).step(feeds)["loss"] for native in (True, False))
    assert one == pytest.approx(other, rel=0.01)


def test_bodies_are_rewritten_too() -> None:
    proto = graph(
        """g (float[3] x, bool c) => (float[3] y) {
            a = Cast<to=16>(x)
            b = If (c) <
                then_branch = t () => (bfloat16[3] p) { p = Exp(a) },
                else_branch = e () => (bfloat16[3] q) { q = Neg(a) }
            >
            y = Cast<to=1>(b)
        }"""
    )
    model = load(proto)
    assert len(compute_bfloat16_in_float32(model)) == 2
    x = np.array([1, -2, 0.5], np.float32)
    session = Session(Device("cpu", native=False), model)
    for condition, expected in ((True, np.exp(x)), (False, -x)):
        (y,) = session.run({"x": x, "c": np.array(condition)})
        np.testing.assert_array_equal(y, rounded(expected.astype(np.float32)))
