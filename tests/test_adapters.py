"""Adapters: every kind of weight against PyTorch's autograd, on the model with the changed weight written out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch_oracle
from builders import attention, mlp, model
from steps import outputs, weights

import graphopt
import passes
from graphopt import GraphoptError, models
from graphopt.graph.classified import labels_in, set_labels
from graphopt.graph.merging import MERGES, Adapted, adapted, merged_weights
from graphopt.graph.roles import Role, with_role
from graphopt.inspection.report import report

STEPS = 20
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Hold a model, the weight to adapt, and what the adapter changes in it, in the layout of the file."""

    text: str
    weight: str
    shape: tuple[int, ...]
    change: Change
    outputs: int  # the axis of the outputs in the weight
    feeds: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (5, 6)})
    more: dict[str, tuple[int, ...]] = field(default_factory=dict)
    normed: tuple[int, ...] = ()  # the axes over which norms sum
    rows: int = 0  # of an embedding

    def build(self) -> onnx.ModelProto:
        rng = np.random.default_rng(0)
        weights = {
            name: rng.standard_normal(shape) / 2 for name, shape in {self.weight: self.shape, **self.more}.items()
        }
        return model(self.text, **weights)

    def data(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        if self.rows:
            return {name: rng.integers(0, self.rows, shape) for name, shape in self.feeds.items()}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in self.feeds.items()}


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).transpose(-1, -2)


def filters(groups: int) -> Change:
    """Mix the filters of each group, as PEFT's convolutions do."""

    def change(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pairs = zip(a.chunk(groups), b.chunk(groups), strict=True)
        return torch.cat([torch.einsum("or,ri...->oi...", y.flatten(1), x) for x, y in pairs])

    return change


def transposed_filters(groups: int) -> Change:
    def change(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pairs = zip(a.chunk(groups), b.chunk(groups), strict=True)
        return torch.cat([torch.einsum("or,ir...->io...", y.flatten(1), x) for x, y in pairs])

    return change


def convolution(kind: str, attributes: str, dims: str, out: str = "N,C,D,E,F") -> str:
    axes = ",".join(out.split(",")[: dims.count(",") + 1])
    return f"g (float[{dims}] x) => (float[{axes}] y) {{ y = {kind}<{attributes}>(x, w, b) }}"


CASES = {
    "matmul": Case("g (float[N,6] x) => (float[N,5] y) { y = MatMul(x, w) }", "w", (6, 5), product, 1),
    "matmul and bias": Case(
        "g (float[N,T,6] x) => (float[N,T,5] y) { p = MatMul(x, w)\n y = Add(b, p) }",
        "w", (6, 5), product, 1, {"x": (2, 3, 6)}, {"b": (5,)},
    ),
    "matmul, left": Case(
        "g (float[N,6,3] x) => (float[N,5,3] y) { y = MatMul(w, x) }", "w", (5, 6), transposed, 0, {"x": (4, 6, 3)}
    ),
    "matmul of matrices": Case(
        "g (float[N,2,3,6] x) => (float[N,2,3,5] y) { y = MatMul(x, w) }",
        "w", (2, 6, 5), product, 2, {"x": (4, 2, 3, 6)}, normed=(1,),
    ),
    "matmul of matrices, left": Case(
        "g (float[N,2,6,3] x) => (float[N,2,5,3] y) { y = MatMul(w, x) }",
        "w", (2, 5, 6), transposed, 1, {"x": (4, 2, 6, 3)}, normed=(2,),
    ),
    "gemm": Case(
        "g (float[N,6] x) => (float[N,5] y) { y = Gemm<alpha=0.5, beta=2.0>(x, w, b) }",
        "w", (6, 5), product, 1, more={"b": (5,)},
    ),
    "gemm, transB": Case(
        "g (float[N,6] x) => (float[N,5] y) { y = Gemm<transB=1>(x, w, b) }",
        "w", (5, 6), transposed, 0, more={"b": (1, 5)},
    ),
    "gemm, transA": Case(
        "g (float[6,N] x) => (float[N,5] y) { y = Gemm<transA=1>(x, w) }", "w", (6, 5), product, 1, {"x": (6, 5)}
    ),
    "gemm, transA, transB": Case(
        "g (float[6,N] x) => (float[N,5] y) { y = Gemm<transA=1, transB=1, alpha=3.0>(x, w, b) }",
        "w", (5, 6), transposed, 0, {"x": (6, 5)}, {"b": (5,)},
    ),
    "gemm, left": Case(
        "g (float[6,N] x) => (float[5,N] y) { y = Gemm<alpha=2.0>(w, x, b) }",
        "w", (5, 6), transposed, 0, {"x": (6, 4)}, {"b": (5, 1)},
    ),
    "gemm, left, transA": Case(
        "g (float[6,N] x) => (float[5,N] y) { y = Gemm<transA=1>(w, x) }", "w", (6, 5), product, 1, {"x": (6, 4)}
    ),
    "gemm, left, transB": Case(
        "g (float[N,6] x) => (float[5,N] y) { y = Gemm<transB=1>(w, x) }", "w", (5, 6), transposed, 0, {"x": (4, 6)}
    ),
    "gemm, left, transA, transB": Case(
        "g (float[N,6] x) => (float[5,N] y) { y = Gemm<transA=1, transB=1>(w, x) }",
        "w", (6, 5), product, 1, {"x": (4, 6)},
    ),
    "transpose": Case(
        """g (float[N,T,6] x) => (float[N,T,5] y) {
            i = Identity(w)
            t = Transpose<perm=[1,0]>(i)
            y = MatMul(x, t)
        }""",
        "w", (5, 6), transposed, 0, {"x": (2, 3, 6)},
    ),
    "reshape": Case(
        """g (float[N,6] x) => (float[N,5] y) {
            size = Constant<value_ints = [6, 5]>()
            t = Reshape(w, size)
            y = MatMul(x, t)
        }""",
        "w", (2, 3, 5), lambda a, b: (a @ b).reshape(2, 3, 5), 2, normed=(0, 1),
    ),
    "two readers": Case(
        """g (float[N,6] x) => (float[N,6] y) {
            h = MatMul(x, w)
            a = Tanh(h)
            y = MatMul(a, w)
        }""",
        "w", (6, 6), product, 1,
    ),
    "conv": Case(
        convolution("Conv", "pads=[1,0,1,2], strides=[2,1]", "N,4,7,6"),
        "w", (6, 4, 3, 2), filters(1), 0, {"x": (3, 4, 7, 6)}, {"b": (6,)},
    ),
    "conv, 1x1": Case(
        convolution("Conv", "group=1", "N,4,3,3"), "w", (6, 4, 1, 1), filters(1), 0, {"x": (3, 4, 3, 3)}, {"b": (6,)}
    ),
    "conv, one axis, dilated": Case(
        convolution("Conv", "dilations=[2]", "N,4,9"), "w", (6, 4, 3), filters(1), 0, {"x": (3, 4, 9)}, {"b": (6,)}
    ),
    "conv, three axes": Case(
        convolution("Conv", 'auto_pad="SAME_UPPER"', "N,2,3,4,3"),
        "w", (4, 2, 2, 3, 2), filters(1), 0, {"x": (2, 2, 3, 4, 3)}, {"b": (4,)},
    ),
    "conv, groups": Case(
        convolution("Conv", "group=2", "N,4,5,5"), "w", (6, 2, 3, 3), filters(2), 0, {"x": (3, 4, 5, 5)}, {"b": (6,)}
    ),
    "conv transpose": Case(
        convolution("ConvTranspose", "strides=[2,2], output_padding=[1,0]", "N,4,3,3"),
        "w", (4, 5, 2, 3), transposed_filters(1), 1, {"x": (3, 4, 3, 3)}, {"b": (5,)},
    ),
    "conv transpose, groups": Case(
        convolution("ConvTranspose", "group=2, pads=[1,1]", "N,4,6"),
        "w", (4, 3, 3), transposed_filters(2), 1, {"x": (3, 4, 6)}, {"b": (6,)}, normed=(),
    ),
    "embedding": Case(
        "g (int64[N,T] ids) => (float[N,T,5] y) { y = Gather(w, ids) }",
        "w", (9, 5), product, 1, {"ids": (4, 3)}, rows=9,
    ),
    "rnn": Case(
        'g (float[4,N,3] x) => (float[4,2,N,5] y) { y = RNN<hidden_size=5, direction="bidirectional">(x, w, r, b) }',
        "w", (2, 5, 3), transposed, 1, {"x": (4, 2, 3)}, {"r": (2, 5, 5), "b": (2, 10)}, normed=(2,),
    ),
    "gru, recurrence": Case(
        "g (float[4,N,3] x) => (float[4,1,N,5] y) { y = GRU<hidden_size=5>(x, w, r) }",
        "r", (1, 15, 5), transposed, 1, {"x": (4, 2, 3)}, {"w": (1, 15, 3)}, normed=(2,),
    ),
    "lstm": Case(
        "g (float[4,N,3] x) => (float[4,1,N,5] y) { y = LSTM<hidden_size=5>(x, w, r, b) }",
        "w", (1, 20, 3), transposed, 1, {"x": (4, 2, 3)}, {"r": (1, 20, 5), "b": (1, 40)}, normed=(2,),
    ),
    "scan": Case(
        """g (float[4,6] x) => (float[4,6] y) {
            start = Constant<value = float[6] {0, 0, 0, 0, 0, 0}>()
            last, y = Scan<num_scan_inputs=1, body = turn (float[6] h, float[6] e) => (float[6] next, float[6] out) {
                m = MatMul(h, w)
                s = Add(m, e)
                next = Tanh(s)
                out = Identity(next)
            }>(start, x)
        }""",
        "w", (6, 6), product, 1, {"x": (4, 6)},
    ),
}  # fmt: skip

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2, "alpha": 3.0},
    "rank-stabilized": {"rank": 2, "alpha": 1.0, "scaling": "rank_stabilized"},
    "dora": {"rank": 2, "alpha": 3.0, "dora": True},
}
SCALES = {"lora": 1.5, "rank-stabilized": 1 / 2**0.5, "dora": 1.5}


def norm(case: Case, w: torch.Tensor) -> torch.Tensor:
    """Return the norms of a weight's outputs, so that they broadcast with it."""
    axes = [axis for axis in case.normed or range(w.ndim) if axis != case.outputs]
    return (w * w).sum(axes, keepdim=True).sqrt()


def twin(case: Case, method: str, executor: graphopt.Executor, target: np.ndarray) -> list[float]:
    """Train the same adapter in PyTorch, in float64, and return the losses."""
    graph = graphopt.load(case.build())
    passes.Normalize()(graph)
    values = {name.rpartition(".")[2]: torch.tensor(x.astype(np.float64)) for name, x in executor.parameters.items()}
    w = torch.tensor(graph.graph.initializers[case.weight].const_value.numpy().astype(np.float64))
    a, b, *magnitude = (
        values[name].requires_grad_() for name in ("lora_A", "lora_B", "lora_magnitude") if name in values
    )
    optimizer = torch.optim.SGD([a, b, *magnitude], 0.05, momentum=0.5)
    losses = []
    feeds = {name: torch.tensor(x.astype(np.float64) if x.dtype.kind == "f" else x) for name, x in case.data().items()}
    for _ in range(STEPS):
        changed = w + SCALES[method] * case.change(a, b)
        if magnitude:
            norms = norm(case, changed.detach())
            changed = changed * magnitude[0].reshape(norms.shape) / norms
        (y,) = torch_oracle.outputs_of(graph, {**feeds, case.weight: changed}).values()
        loss = ((y - torch.tensor(target.astype(np.float64))) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(40)
def test_losses_and_merged_weights_equal_pytorch_s(name: str, method: str) -> None:
    case = CASES[name]
    if name == "conv transpose, groups" and method == "dora":
        pytest.skip("norms of a group's outputs are not sums along axes of the weight")
    feeds, base = case.data(), outputs(case.build(), case.data())["y"]
    target = np.random.default_rng(2).standard_normal(base.shape).astype(np.float32)
    step = graphopt.compile(
        case.build(),
        adapter=passes.LoRA(case.weight, **METHODS[method]),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.05, momentum=0.5),
    )
    executor = graphopt.Executor(step, native=False)
    expected = twin(case, method, executor, target)
    batch = {**feeds, "target": target}
    results = [executor.step(batch) for _ in range(STEPS)]
    if method == "dora" or name == "scan":  # in a body, the kernel of a constant weight differs from that of a value
        assert np.allclose(results[0]["y"], base, rtol=1e-5, atol=1e-6)
    else:
        assert np.array_equal(results[0]["y"], base)
    assert np.allclose([float(x["loss"]) for x in results], expected, rtol=1e-6, atol=1e-6)
    assert expected[-1] < expected[0]
    merged = executor.trained()
    kept = [node.op_type for node in case.build().graph.node if node.op_type not in ("Constant", "Identity")]
    assert [node.op_type for node in merged.graph.node] == kept
    (y,) = executor.predict(feeds).values()
    assert np.allclose(outputs(merged, feeds)["y"], y, rtol=1e-5, atol=1e-5)
    assert not np.allclose(y, base, atol=1e-5)


def written_out(values: dict[str, np.ndarray], scale: float) -> onnx.ModelProto:
    """Return `mlp()` with the nodes of LoRA in both products, as a user would write them."""
    base = mlp()
    return model(
        f"""g (float[N,4] x) => (float[N,3] y) {{
            scale = Constant<value_float = {scale}>()
            h = Gemm<transB=1>(x, "fc0.weight", "fc0.bias")
            a = MatMul(x, "fc0.lora_A")
            b = Mul(scale, a)
            c = MatMul(b, "fc0.lora_B")
            d = Add(h, c)
            t = Tanh(d)
            z = Gemm<transB=1>(t, "fc1.weight", "fc1.bias")
            e = MatMul(t, "fc1.lora_A")
            f = Mul(scale, e)
            i = MatMul(f, "fc1.lora_B")
            y = Add(z, i)
        }}""",
        **weights(base),
        **{name.replace(".weight", ""): array for name, array in values.items()},
    )


CLASSES = {"loss": passes.CrossEntropy()}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "adam": {**CLASSES, "optimizer": passes.AdamW(1e-2)},
    "sgd": {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1, momentum=0.9, nesterov=True)},
    "lion, huber": {"loss": passes.Huber(), "optimizer": passes.Lion(1e-2)},
    "adagrad, absolute": {"loss": passes.MeanAbsoluteError(), "optimizer": passes.Adagrad(0.1)},
    "rmsprop, schedule, clip": {
        **CLASSES,
        "optimizer": passes.RMSprop(1e-2),
        "schedule": passes.Cosine(steps=10, warmup=2),
        "clip": passes.ClipGlobalNorm(0.1),
    },
    "penalty": {**CLASSES, "regularizer": passes.L2(0.1, parameters="*lora_?"), "optimizer": passes.SGD(0.5)},
    "accumulate": {**CLASSES, "optimizer": passes.Adam(1e-2), "accumulate": passes.Accumulate(2)},
    "recompute": {**CLASSES, "optimizer": passes.Adam(1e-2), "recompute": passes.Recompute()},
    "standardize": {
        **CLASSES,
        "optimizer": passes.Adam(1e-2),
        "standardize": passes.Standardize([1.0, 2, 3, 4], [2.0, 1, 2, 1]),
    },
    "float16": {
        **CLASSES,
        "optimizer": passes.Adam(1e-2),
        "precision": passes.MixedPrecision(),
        "loss_scale": passes.DynamicLossScale(),
    },
    "bfloat16": {**CLASSES, "optimizer": passes.Adam(1e-2), "precision": passes.MixedPrecision("bfloat16")},
    "fuse": {**CLASSES, "optimizer": passes.Adam(1e-2), "fuse": passes.Fuse()},
}
RATE = passes.LoRA("fc*", rank=2, alpha=3)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["runtime", "native"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_equal_those_of_nodes_that_a_user_writes(name: str, native: bool) -> None:
    native = native and name not in ("float16", "fuse")  # which are not lowered to kernels
    steps = COMBINATIONS[name]
    step = graphopt.compile(mlp(), adapter=RATE, **steps)
    values = initial(step)
    parameters = passes.Parameters("*.lora_?")
    plain = graphopt.compile(written_out(values, 1.5), parameters=parameters, **steps)
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((8, 4), np.float32), rng.integers(0, 3, 8)
    target = labels if steps["loss"] == CLASSES["loss"] else rng.standard_normal((8, 3), np.float32)
    rounding = 1e-2 if name == "bfloat16" else 1e-6
    one, other = (graphopt.Executor(x, native=native, threads=1) for x in (step, plain))
    for _ in range(10):
        found, expected = (executor.step(x=x, target=target) for executor in (one, other))
        assert found["loss"] == pytest.approx(expected["loss"], rel=rounding)
    for key, array in one.parameters.items():
        other_array = other.parameters[key.replace(".weight", "")]
        assert np.allclose(array, other_array, rtol=10 * rounding, atol=rounding), key


def initial(step: ir.Model) -> dict[str, np.ndarray]:
    return {str(x.name): x.const_value.numpy() for x in with_role(step, Role.PARAMETER)}


def names(step: ir.Model) -> set[str]:
    return {str(x.name) for x in with_role(step, Role.PARAMETER)}


def test_only_adapters_have_gradients_and_state_of_an_optimizer() -> None:
    """A product with the shape of a frozen weight, or of its transpose, would be its gradient."""
    step = graphopt.compile(
        models.transformer((6,), 9, width=16, heads=2, layers=2),
        adapter=passes.LoRA(rank=2),
        loss=passes.CrossEntropy(axis=-1),
        optimizer=passes.AdamW(1e-3),
    )
    state = {str(x.name) for x in with_role(step, Role.PARAMETER, Role.SLOT)}
    assert state
    assert all(".lora_" in name for name in state)
    frozen = {
        tuple(x.shape.numpy()) for x in step.graph.initializers.values() if len(x.shape) == 2 and ".weight" in x.name
    }
    adapters = {tuple(x.shape.numpy()) for x in with_role(step, Role.PARAMETER)}
    made = {tuple(y.shape) for node in step.graph if node.op_type in ("Gemm", "MatMul") for y in node.outputs}
    assert frozen
    assert not made & {size for shape in frozen - adapters for size in (shape, shape[::-1])}
    assert not any(
        name in step.graph.initializers and name in state for name in step.graph.initializers if ".lora_" not in name
    )


def test_workers_average_gradients_of_adapters_alone() -> None:
    pipeline = graphopt.standard(adapter=RATE, **COMBINATIONS["adam"])
    halves = graphopt.split_step(pipeline, mlp())
    gradients = [str(x.name) for x in with_role(halves.grad[0], Role.GRADIENT)]
    assert sorted(gradients) == sorted(f"{name}.grad" for name in names(halves.step))
    assert names(halves.apply) == names(halves.step) == set(initial(pipeline(mlp())))


def test_a_layer_has_gradients_of_adapters_and_of_inputs() -> None:
    layer = graphopt.ForwardBackward(mlp(), adapter=RATE)
    x = np.random.default_rng(0).standard_normal((2, 4), np.float32)
    gradients = layer.forward(x).backward(np.ones((2, 3), np.float32))
    assert set(gradients) == {"x", *(f"fc{i}.weight.lora_{letter}" for i in range(2) for letter in "AB")}
    assert not gradients["fc1.weight.lora_A"].any()
    assert gradients["fc1.weight.lora_B"].any()


def test_several_adapters_add_up_and_merge() -> None:
    """The second LoRA of a weight has a number in its name; a new head trains as a whole."""
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.AdamW(1e-1)}
    adapters = [passes.LoRA("fc0*", 2), passes.LoRA("fc0*", 1, dora=True), passes.Head(classes=5)]
    executor = graphopt.Executor(graphopt.compile(mlp(), adapter=adapters, **steps), native=False)
    assert sorted(executor.parameters) == [
        *("fc0.weight.1.lora_A", "fc0.weight.1.lora_B", "fc0.weight.1.lora_magnitude"),
        *("fc0.weight.lora_A", "fc0.weight.lora_B", "fc1.bias", "fc1.weight"),
    ]
    x = np.random.default_rng(0).standard_normal((8, 4), np.float32)
    losses = [executor.step(x=x, target=np.arange(8) % 5)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    (y,) = executor.predict(x=x).values()
    np.testing.assert_allclose(next(iter(outputs(executor.trained(), {"x": x}).values())), y, rtol=1e-4, atol=1e-4)


def test_a_head_keeps_the_names_of_classes_that_it_keeps() -> None:
    named = mlp()
    set_labels(named, ["a", "b", "c"])
    for head, names in (
        (passes.Head(classes=3), None),
        (passes.Head(classes=4, grow=True), None),
        (passes.Head(classes=3, grow=True), ["a", "b", "c"]),
    ):
        assert labels_in(graphopt.compile(named, adapter=head, **CLASSES)) == names


def test_unfrozen_weights_train_beside_adapters() -> None:
    """As PEFT's modules_to_save do."""
    parameters = passes.Parameters(unfreeze="fc1.*")
    step = graphopt.compile(mlp(), adapter=passes.LoRA("fc0*", 2), parameters=parameters, **COMBINATIONS["adam"])
    assert set(initial(step)) == {"fc0.weight.lora_A", "fc0.weight.lora_B", "fc1.bias", "fc1.weight"}
    only = passes.Parameters("*.lora_B")
    step = graphopt.compile(mlp(), adapter=passes.LoRA("fc0*", 2), parameters=only, **COMBINATIONS["adam"])
    executor = graphopt.Executor(step, native=False)
    assert set(executor.parameters) == {"fc0.weight.lora_B"}
    x = np.random.default_rng(0).standard_normal((8, 4), np.float32)
    executor.step(x=x, target=np.zeros(8, np.int64))
    assert np.allclose(outputs(executor.trained(), {"x": x})["y"], executor.predict({"x": x})["y"], atol=1e-6)


def test_a_trainer_takes_adapters_and_merges_them() -> None:
    trainer = graphopt.Trainer(
        mlp(), adapter=RATE, loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-2), max_iter=3
    )
    x = np.random.default_rng(0).standard_normal((20, 4), np.float32)
    trainer.fit(x, np.arange(20) % 3)
    first, *_ = outputs(trainer.to_onnx(), {"x": x}).values()
    assert np.allclose(trainer.predict(x), first, atol=1e-5)
    trainer.set_params(adapter__rank=1).fit(x, np.arange(20) % 3)


def packed(parts: Any, **options: Any) -> ir.Model:
    rng = np.random.default_rng(0)
    base = model(
        "g (float[N,T,6] x) => (float[N,T,8] y) { p = MatMul(x, qkv)\n y = Add(p, b) }",
        qkv=rng.standard_normal((6, 8)),
        b=rng.standard_normal(8),
    )
    adapter = passes.LoRA("qkv", 2, 4, parts=parts, **options)
    return graphopt.compile(base, adapter=adapter, loss=passes.MeanSquaredError(), optimizer=passes.Adam(0.1))


@pytest.mark.parametrize("dora", [False, True])
def test_parts_of_packed_projections_have_adapters_of_their_own(dora: bool) -> None:
    """The columns of a part without an adapter stay as they are."""
    executor = graphopt.Executor(packed({"q": 4, "_k": 2, "v": 2}, dora=dora), native=False)
    shapes = {name: array.shape for name, array in executor.parameters.items() if "magnitude" not in name}
    assert shapes == {
        **{"qkv.q.lora_A": (6, 2), "qkv.q.lora_B": (2, 4)},
        **{"qkv.v.lora_A": (6, 2), "qkv.v.lora_B": (2, 2)},
    }
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((2, 3, 6), np.float32)}
    before = executor.predict(feeds)["y"]
    for _ in range(5):
        executor.step(feeds, target=rng.standard_normal((2, 3, 8), np.float32))
    y, merged = executor.predict(feeds)["y"], executor.trained()
    assert np.allclose(outputs(merged, feeds)["y"], y, atol=1e-5)
    assert np.array_equal(y[..., 4:6], before[..., 4:6])
    assert not np.isclose(y, before).all(axis=(0, 1))[[0, 3, 6, 7]].any()
    w = weights(merged)["qkv"]
    state, original = executor.parameters, np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    for part, columns in {"q": slice(0, 4), "v": slice(6, 8)}.items():
        changed = original[:, columns] + 2 * state[f"qkv.{part}.lora_A"] @ state[f"qkv.{part}.lora_B"]
        if dora:
            changed *= state[f"qkv.{part}.lora_magnitude"] / np.linalg.norm(changed, axis=0)
        assert np.allclose(w[:, columns], changed, atol=1e-6)


def test_parts_of_one_size_are_named_alone() -> None:
    assert set(initial(packed(("k", "_")))) == {"qkv.k.lora_A", "qkv.k.lora_B"}


def test_initial_values_depend_on_the_seed_and_the_name_alone() -> None:
    def start(**options: Any) -> dict[str, np.ndarray]:
        return initial(graphopt.compile(mlp(), adapter=passes.LoRA(**{"rank": 2, **options}), **CLASSES))

    one, same, other = start(pattern="fc*"), start(pattern=["fc1*", "fc0*"]), start(pattern="fc*", seed=1)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["fc0.weight.lora_A"], other["fc0.weight.lora_A"])
    assert not np.array_equal(one["fc0.weight.lora_A"][:3], one["fc1.weight.lora_A"][:3])
    assert abs(one["fc0.weight.lora_A"]).max() <= 1 / 2
    assert abs(start(pattern="fc*", init="gaussian", rank=2)["fc1.weight.lora_A"].std() - 1 / 2) < 0.2


def test_dropout_is_of_training_alone() -> None:
    steps = {**COMBINATIONS["sgd"], "training": passes.TrainingMode(as_exported=True, seed=3)}
    executor = graphopt.Executor(graphopt.compile(mlp(), adapter=passes.LoRA("fc*", 2, dropout=0.5), **steps))
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((8, 4), np.float32), rng.standard_normal((8, 3), np.float32)
    assert np.array_equal(executor.step(x=x, target=target)["y"], outputs(mlp(), {"x": x})["y"])
    seen = [executor.step(x=x, target=target)["y"] for _ in range(4)]
    assert not np.allclose(seen[1], seen[2])
    assert np.allclose(executor.predict({"x": x})["y"], outputs(executor.trained(), {"x": x})["y"], atol=1e-6)


def test_halves_of_float16_files_train_float32_adapters() -> None:
    base = mlp(dtype=np.float16)
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.Adam(1e-2)}
    executor = graphopt.Executor(graphopt.compile(base, adapter=RATE, **steps))
    assert {x.dtype for x in executor.parameters.values()} == {np.dtype(np.float32)}
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16)
    assert np.array_equal(executor.step(x=x, target=np.zeros((8, 3), np.float16))["y"], outputs(base, {"x": x})["y"])
    merged = executor.trained()
    assert {x.data_type for x in merged.graph.initializer} == {onnx.TensorProto.FLOAT16}
    assert np.allclose(outputs(merged, {"x": x})["y"], executor.predict({"x": x})["y"], atol=1e-2)


def quantized() -> onnx.ModelProto:
    """Return a product with a weight of 4-bit integers, and one with another."""
    rng = np.random.default_rng(0)
    proto = model(
        """g (float[N,8] x) => (float[N,4] y) {
            w = DequantizeLinear<axis=0, block_size=4>(q, scale)
            h = MatMul(x, w)
            t = Tanh(h)
            y = MatMul(t, v)
        }""",
        scale=rng.uniform(0.1, 0.2, (2, 6)),
        v=rng.standard_normal((6, 4)),
    )
    q = onnx.helper.make_tensor("q", onnx.TensorProto.INT4, (8, 6), rng.integers(-8, 8, 48).tolist())
    proto.graph.initializer.append(q)
    return proto


FITTED = {"loss": passes.MeanSquaredError(), "optimizer": passes.Adam(1e-2)}


@pytest.mark.parametrize("dora", [False, True])
def test_integers_stay_as_they_are_below_an_adapter(dora: bool) -> None:
    step = graphopt.compile(quantized(), adapter=passes.LoRA("q", 2, dora=dora), **FITTED)
    executor = graphopt.Executor(step, native=False)
    rng = np.random.default_rng(1)
    x, target = rng.standard_normal((5, 8), np.float32), rng.standard_normal((5, 4), np.float32)
    results = [executor.step(x=x, target=target) for _ in range(10)]
    assert np.allclose(results[0]["y"], outputs(quantized(), {"x": x})["y"], atol=1e-6 if dora else 0)
    assert results[-1]["loss"] < results[0]["loss"]
    assert {name.partition(".")[0] for name in executor.parameters} == {"q"}
    trained = executor.trained()
    assert {"q", "q.lora_A", "q.lora_B"} <= {tensor.name for tensor in trained.graph.initializer}
    assert np.allclose(outputs(trained, {"x": x})["y"], executor.predict(x=x)["y"], atol=1e-6)
    into = executor.trained(into=quantized())
    assert np.allclose(outputs(into, {"x": x})["y"], executor.predict(x=x)["y"], atol=1e-6)


TIED = """g (int64[N,T] ids) => (float[N,T,9] y) {
    e = Gather(w, ids)
    t = Transpose<perm=[1,0]>(w)
    y = MatMul(e, t)
}"""


def tied() -> onnx.ModelProto:
    return model(TIED, w=np.random.default_rng(0).standard_normal((9, 4)))


def test_tied_weights_take_an_adapter_for_each_use_once_they_are_copied() -> None:
    steps = {"loss": passes.CrossEntropy(axis=-1), "optimizer": passes.Adam(0.1)}
    adapter = [passes.Untie("w"), passes.LoRA(["w", "w.1"], 2)]
    executor = graphopt.Executor(graphopt.compile(tied(), adapter=adapter, **steps))
    assert set(executor.parameters) == {f"{name}.lora_{letter}" for name in ("w", "w.1") for letter in "AB"}
    ids = np.arange(6).reshape(2, 3)
    executor.step(ids=ids, target=ids)
    assert np.allclose(outputs(executor.trained(), {"ids": ids})["y"], executor.predict({"ids": ids})["y"], atol=1e-5)


def test_a_gate_of_one_output_gets_no_adapter_by_default() -> None:
    """As that of shared experts, of which no rank but 1 is possible."""
    text = """g (float[N,4] x) => (float[N,3] y) {
        a = MatMul(x, u)\n s = MatMul(x, g)\n t = Sigmoid(s)\n b = Mul(a, t)\n y = MatMul(b, v)
    }"""
    network = model(text, u=np.ones((4, 4)), g=np.ones((4, 1)), v=np.ones((4, 3)))
    adapters = {rank: passes.LoRA(rank=rank) for rank in (1, 2)}
    found = {}
    for rank, adapter in adapters.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # operators read the gate as any other weight
            step = graphopt.compile(network, adapter=adapter, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
        found[rank] = {name.partition(".")[0] for name in graphopt.Executor(step, native=False).parameters}
    assert found == {1: {"u", "g"}, 2: {"u"}}


WRONG: dict[str, tuple[Any, Any, str]] = {
    "typing error": (mlp, lambda: passes.LoRA("fc0.wieght"), "'fc0.wieght'.*found none: did you mean 'fc"),
    "a bias": (
        mlp,
        lambda: passes.LoRA("*.bias"),
        r"found 'fc0.bias', which Gemm reads; the model has: fc0.weight",
    ),
    "left out": (mlp, lambda: passes.LoRA(leave_out="x"), "leave_out='x': expected the name of a weight"),
    "all left out": (
        mlp,
        lambda: passes.LoRA("fc0*", leave_out="fc0*"),
        "expected weights to adapt, found none",
    ),
    "rank": (
        mlp,
        lambda: passes.LoRA("fc0*", rank=5),
        "weight 'fc0.weight': expected at most 4, the rank of 4x8",
    ),
    "scaling": (
        mlp,
        lambda: passes.LoRA(scaling="root"),
        "expected 'standard' or 'rank_stabilized', found 'root'",
    ),
    "tied": (tied, lambda: passes.LoRA("w", 2), r"Gather node .* and MatMul node .*Untie\('w'\)"),
    "parts": (
        mlp,
        lambda: passes.LoRA("fc0*", 2, parts={"q": 4, "k": 5}),
        "expected parts of the 8 outputs.*found 9",
    ),
    "a part without outputs": (
        mlp,
        lambda: passes.LoRA("fc0*", 2, parts={"q": 8, "k": 0}),
        "parts=.*: expected numbers of outputs, found 0",
    ),
    "after dora": (
        mlp,
        lambda: [passes.LoRA("fc0*", 2, dora=True), passes.LoRA("fc0*", 1)],
        "'fc0.weight': expected DoRA as the last adapter of a weight, found one after 'fc0.weight.lora_magnitude'",
    ),
    "one output": (
        lambda: models.mlp((8,), 1, hidden=[]),
        lambda: passes.LoRA(rank=4),
        "'layers.0.weight': expected at most 1, the rank of 8x1 numbers",
    ),
    "one input": (
        lambda: models.mlp((1,), 3, hidden=[16, 16]),
        lambda: passes.LoRA(rank=4),
        "'layers.0.weight': expected at most 1, the rank of 1x16 numbers",
    ),
    "half a part": (mlp, lambda: passes.LoRA("fc0*", 2, parts={"q": 8.0}), "numbers of outputs, found 8.0"),
    "a flag": (mlp, lambda: passes.LoRA(rank=True), r"LoRA\(rank=True\): expected a whole number in"),
    "no names": (mlp, lambda: passes.LoRA([]), r"LoRA: pattern=\[\]: expected names of weights, found none"),
    "a number": (mlp, lambda: passes.LoRA(["fc0*", 1]), r"LoRA\(pattern=.*\): expected words, found 1"),
    "groups": (
        CASES["conv, groups"].build,
        lambda: passes.LoRA("w", rank=3),
        "weight 'w': expected a multiple of the 2 groups of its convolution, found 3",
    ),
    "dropout": (
        CASES["lstm"].build,
        lambda: passes.LoRA("w", rank=2, dropout=0.1),
        "expected no dropout for a recur",
    ),
    "classes": (mlp, lambda: passes.Head(), "Head: expected the number of classes, found none"),
    "output": (mlp, lambda: passes.Head("z", 3), "Head: unknown output 'z'"),
    "no head": (
        attention,
        lambda: passes.Head(classes=3),
        "a weight that alone leads to output 'y', found none",
    ),
    "a class": (mlp, lambda: passes.LoRA, "write adapter=passes.LoRA"),
    "a word": (mlp, lambda: "lora", "write adapter=passes.LoRA"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_to_do(name: str) -> None:
    source, adapter, message = WRONG[name]
    with pytest.raises(GraphoptError, match=message):
        graphopt.compile(source(), adapter=adapter(), **CLASSES, optimizer=passes.SGD(0.1))


def test_a_pattern_that_leaves_out_the_adapters_is_an_error() -> None:
    with pytest.raises(GraphoptError, match="set unfreeze to train more than them"):
        graphopt.compile(mlp(), adapter=RATE, parameters=passes.Parameters("*.bias"), **CLASSES)


def test_by_default_the_head_and_embeddings_have_no_adapter() -> None:
    model_of_text = models.transformer((6,), 9, width=16, heads=2, layers=1)
    step = graphopt.compile(model_of_text, adapter=passes.LoRA(rank=2), loss=passes.CrossEntropy(axis=-1))
    adapted = {name.removesuffix(".weight.lora_A") for name in initial(step) if name.endswith("A")}
    assert adapted == {
        *(f"blocks.0.attention.{name}" for name in ("query", "key", "value", "output")),
        *("blocks.0.hidden", "blocks.0.output"),
    }


def test_a_step_with_an_adapter_is_no_model_to_train() -> None:
    step = graphopt.compile(mlp(), adapter=passes.LoRA(rank=2), **CLASSES, optimizer=passes.SGD(0.1))
    for adapter in (None, passes.LoRA(rank=2)):
        with pytest.raises(GraphoptError, match="expected an inference model, found a training graph"):
            graphopt.compile(step, adapter=adapter, **CLASSES, optimizer=passes.SGD(0.1))


def test_by_default_convolutions_whose_groups_do_not_fit_have_no_adapter() -> None:
    text = "g (float[N,6,5] x) => (float[N,4] y) { h = Conv<group=6>(x, depth, b)\n k = Conv(h, wide)\n"
    text += "c = Conv(k, point)\n p = ReduceMean<keepdims=0>(c, axes)\n y = MatMul(p, head) }"
    shapes = {"depth": (6, 1, 3), "b": (6,), "point": (16, 16, 1), "head": (16, 4), "wide": (16, 6, 1)}
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    for rank, names in ((4, {"wide", "point"}), (6, {"depth", "wide", "point"})):
        base = model(text, **weights, axes=np.array([2]))
        step = graphopt.compile(base, adapter=passes.LoRA(rank=rank), **CLASSES)
        assert {name.partition(".")[0] for name in initial(step)} == names


def test_a_head_of_packed_weights_says_what_to_leave_out() -> None:
    quantize = passes.QuantizeWeights(block=16)
    with pytest.raises(
        GraphoptError, match=r"of packed weights: leave them out of quantize, by leave_out='fc1.weight'"
    ):
        graphopt.compile(mlp(), quantize=quantize, adapter=passes.Head(classes=3), **CLASSES)


def test_a_head_has_the_initial_values_of_the_exporter_s_framework() -> None:
    base = mlp()
    one = initial(graphopt.compile(base, adapter=passes.Head(classes=50), **CLASSES))
    assert set(one) == {"fc1.weight", "fc1.bias"}
    assert 0.9 / 8**0.5 < abs(one["fc1.weight"]).max() <= 1 / 8**0.5
    base.producer_name = "tf2onnx"
    other = initial(graphopt.compile(base, adapter=passes.Head(classes=50), **CLASSES))
    assert not other["fc1.bias"].any()
    assert 0.8 * (6 / 58) ** 0.5 < abs(other["fc1.weight"]).max() <= (6 / 58) ** 0.5


def test_a_head_that_grows_keeps_the_rows_of_old_classes() -> None:
    base = mlp()
    old = {x.name: onnx.numpy_helper.to_array(x) for x in base.graph.initializer}
    classes = old["fc1.bias"].size
    found = initial(graphopt.compile(base, adapter=passes.Head(classes=classes + 4, grow=True), **CLASSES))
    axis = found["fc1.weight"].shape.index(classes + 4)
    np.testing.assert_array_equal(
        np.moveaxis(found["fc1.weight"], axis, 0)[:classes], np.moveaxis(old["fc1.weight"], axis, 0)
    )
    np.testing.assert_array_equal(found["fc1.bias"][:classes], old["fc1.bias"])
    with pytest.raises(GraphoptError, match=rf"expected at least the {classes} classes of the file, found 2"):
        graphopt.compile(base, adapter=passes.Head(classes=2, grow=True), **CLASSES)


@pytest.mark.parametrize("grow", [False, True])
def test_a_head_trains_on_centred_and_scaled_features_as_pytorch_does(grow: bool) -> None:
    base, rng = mlp(), np.random.default_rng(0)
    x, target = 1e-3 * rng.standard_normal((40, 4), np.float32), rng.integers(3, size=40)
    base.graph.output.append(onnx.helper.make_tensor_value_info("a0", onnx.TensorProto.FLOAT, ["n", 8]))
    h = torch.tensor(outputs(base, {"x": x})["a0"])
    del base.graph.output[1:]
    head = passes.Head(classes=3, grow=grow, standardize=True)
    pipeline = graphopt.standard(adapter=head, loss=passes.CrossEntropy(), optimizer=passes.AdamW(0.005))
    pipeline = graphopt.adapt(pipeline, base, {"x": x, "target": target}, validation=None)
    executor = graphopt.Executor(pipeline(base), native=False)
    scale = float(h.var(0, correction=0).mean() ** 0.5)  # fewer than 100 features
    features = (h - (0 if grow else h.mean(0))) / scale
    if grow:  # the file's own function
        assert np.allclose(executor.predict({"x": x})["y"], outputs(base, {"x": x})["y"], atol=1e-6)

    layer = torch.nn.Linear(8, 3)
    with torch.no_grad():
        for name, value in executor.parameters.items():
            own = layer.weight if name.endswith("weight") else layer.bias
            own.copy_(torch.tensor(value.T if value.shape == own.shape[::-1] else value))
    optimizer = torch.optim.AdamW(layer.parameters(), 0.005)
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(layer(features), torch.tensor(target))
        loss.backward()
        optimizer.step()
        assert np.isclose(float(executor.step(x=x, target=target)["loss"]), float(loss), rtol=1e-5)
    assert np.allclose(outputs(executor.trained(), {"x": x})["y"], layer(features).detach(), atol=1e-4)


def test_a_step_with_an_adapter_of_another_program_names_it(tmp_path: Any) -> None:
    class Shift(passes.Adapter):
        def initial(self, target: Any, generator: np.random.Generator) -> dict[str, np.ndarray]:
            return {"shift": np.zeros(target.outputs)}

        def delta(self, op: Any, target: Any, x: ir.Value, *values: ir.Value) -> ir.Value:
            return target.spread(op, values[0]) * target.product(op)

        @staticmethod
        def merge(w: np.ndarray, scale: float, *values: np.ndarray) -> np.ndarray:
            return w * (1 + values[0])

    step = graphopt.compile(mlp(), adapter=Shift(["fc0*", "fc1*"]), **COMBINATIONS["sgd"])
    executor = graphopt.Executor(step)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 4), np.float32)
    for _ in range(3):
        executor.step(x=x, target=rng.standard_normal((8, 3), np.float32))
    assert np.allclose(outputs(executor.trained(), {"x": x})["y"], executor.predict({"x": x})["y"], atol=1e-6)
    (name,) = {note.adapter for note in adapted(executor.model)}
    assert name == f"{__name__}.{Shift.__qualname__}"
    merge = MERGES.pop(name)
    with pytest.raises(GraphoptError, match=f"expected a known adapter, found '{name}': import the module"):
        executor.trained()
    assert merge is Shift.merge


def test_a_report_says_what_adapters_change() -> None:
    pipeline = graphopt.standard(adapter=passes.LoRA(["fc0*", "fc1*"], 2), **COMBINATIONS["adam"])
    text = report(mlp(), pipeline).summary()
    assert "adapters   LoRA of 2 weights: 46 numbers, 68.66% of the model's" in text
    assert "fc0.weight.lora_A  float[4,2]   8  of an adapter of fc0.weight" in text
    assert "fc0.weight  float[8,4]  32  frozen beside adapters; unfreeze trains it" in text


MALFORMED = r"metadata 'graphopt\.adapter': expected an adapter"
NO_FIT = "expected an adapter that fits it"


@pytest.mark.parametrize(
    ("field_name", "value", "message"),
    [
        ("kind", "tree", MALFORMED),
        ("groups", 0, MALFORMED),
        ("moves", (("reverse", (1, 0)),), MALFORMED),
        ("values", (), MALFORMED),
        ("scale", float("inf"), MALFORMED),
        ("groups", 3, NO_FIT),
        ("moves", (("reshape", (7, 1)),), NO_FIT),
        ("columns", (2, 9), NO_FIT),
        ("weight", "nothing", "expected the value 'nothing', found none"),
        ("values", ("a", "b"), "expected the value 'a', found none"),
    ],
)
def test_notes_that_are_malformed_or_do_not_fit_are_refused(field_name: str, value: Any, message: str) -> None:
    case = CASES["conv"] if field_name == "groups" else CASES["matmul"]
    step = graphopt.compile(case.build(), adapter=passes.LoRA("w", 2), **COMBINATIONS["sgd"])
    holder, note = next(Adapted.of_values(step))
    state = initial(step)
    replace(note, **{field_name: value}).write(holder)
    with pytest.raises(GraphoptError, match=message):
        merged_weights(step, state)


def test_a_product_that_leads_to_an_output_and_to_another_product_is_no_head() -> None:
    """Keys and values of a decoder are outputs, too."""
    rng = np.random.default_rng(0)
    decoder = model(
        """g (float[N,6] x) => (float[N,5] y, float[N,4] present) {
            k = MatMul(x, keys)
            present = Identity(k)
            h = Tanh(k)
            y = MatMul(h, head)
        }""",
        keys=rng.standard_normal((6, 4)),
        head=rng.standard_normal((4, 5)),
    )
    loss = passes.CrossEntropy(output="y")
    assert set(initial(graphopt.compile(decoder, adapter=passes.LoRA(rank=2), loss=loss))) == {
        "keys.lora_A",
        "keys.lora_B",
    }
