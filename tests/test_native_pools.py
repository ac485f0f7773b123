"""Pools, their gradients and Resize in compiled kernels: the runtime's numbers, and PyTorch's gradients."""

from __future__ import annotations

import itertools
import platform

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from builders import model
from test_native_convolutions import session

import graphopt
import passes
from graphopt.graph.loading import load
from graphopt.targets.native import toolchain
from graphopt.targets.native.lowering import lower_to_kernels, plan

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")

PLAIN = ["kernels", "products", "convolutions"]  # the lowerings that are not tested here
NEAREST = 'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'

# The gradient of a maximum; `_` is replaced by a number.
GRADIENT = """u_ = Resize<{nearest}>(y_, , scales_)  e_ = Equal({x}, u_)  c_ = Cast<to = 1>(e_)
    k_ = Mul(c_, scores_)  a_ = MaxPool<kernel_shape = {window}, strides = {window}>({score})
    q_ = Resize<{nearest}>(a_, , scales_)  f_ = Equal({ranked}, q_)  m_ = Cast<to = 1>(f_)  {gating}
    r_ = Resize<{nearest}>({share}, , scales_)  dx_ = Mul(m_, r_)"""
GATING = "h_ = HardSigmoid<alpha = 1e30, beta = -1e-30>(y_)  s_ = Mul(dy_, h_)"
FORM = {
    **{"nearest": NEAREST, "window": "[2,2]", "x": "x_", "score": "k_", "ranked": "k_"},
    **{"gating": GATING, "share": "s_"},
}


def scores(window, counts):
    """Return numbers that fall in each window from its first element to its last."""
    taps = np.arange(np.prod(window), 0, -1, dtype=np.float32).reshape(1, 1, *window)
    return np.tile(taps, [1, 1, *counts])


def ints(numbers):
    return f"[{', '.join(map(str, numbers))}]"


def shapes_of(rng, i):
    """Return the window and the sizes of the large and the small tensor; the first ones are common windows."""
    axes = int(rng.choice([1, 2, 2, 3])) if i >= 12 else 2
    window = rng.integers(1, 6, axes) if i >= 12 else np.array([2, 2])
    small = rng.integers(1, [60, 40, 9][axes - 1], axes)
    return window, [int(rng.integers(1, 4)), *small * window], [*small]


def numbers(rng, shape, special):
    """Return numbers with ties and, if wanted, NaN and infinities."""
    x = rng.integers(-3, 4, shape) / 2 if rng.random() < 0.5 else rng.standard_normal(shape)
    if special:
        where = rng.random(shape)
        x = np.where(where < 0.05, np.nan, np.where(where < 0.1, np.inf, np.where(where < 0.2, -np.inf, x)))
    return x.astype(np.float32)


@pytest.fixture(scope="module")
def random_pools():
    """Return a graph of pools, gradients and repeats, and the sizes of its inputs."""
    rng = np.random.default_rng(0)
    inputs, outputs, statements, shapes, weights = [], [], [], {}, {}
    for i in range(72):
        window, large, small = shapes_of(rng, i)
        small = [large[0], *small]
        kind = ("MaxPool", "AveragePool", "Resize", "gradient")[i % 4]
        names, y, axes = {f"x{i}": large}, f"y{i}", len(window)
        factors = {f"scales{i}": np.array([1, 1, *window], np.float32)}
        if kind == "Resize":
            names, weights = {f"x{i}": small}, weights | factors
            text = f"y{i} = Resize<{NEAREST}>(x{i}, , scales{i})"
        elif kind == "gradient":
            names, y = names | {f"y{i}": small, f"dy{i}": small}, f"dx{i}"
            weights |= factors | {f"scores{i}": scores(window, small[1:])}
            form = FORM | {"window": ints(window)} | ({"share": f"dy{i}", "gating": ""} if i % 3 else {})
            text = GRADIENT.format(**form).replace("_ ", f"{i} ").replace("_,", f"{i},").replace("_)", f"{i})")
        else:
            large[-1] += int(rng.integers(0, window[-1]))  # what no window reaches
            text = f"y{i} = {kind}<kernel_shape = {ints(window)}, strides = {ints(window)}>(x{i})"
        statements.append(text)
        inputs += [f"float[N, {', '.join(map(str, sizes))}] {name}" for name, sizes in names.items()]
        outputs.append(f"float[{', '.join('ABCDE'[: axes + 2])}] {y}")
        shapes |= names
    proto = model(f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(statements)} }}", **weights)
    return load(onnx.shape_inference.infer_shapes(proto)), shapes


def fed(rng, shapes, batch, special=False):
    """Return inputs; the maximum of a gradient is that of its input."""
    feeds = {name: numbers(rng, [batch, *sizes], special) for name, sizes in shapes.items()}
    for name in [name for name in feeds if name.startswith("y")]:
        x, small = feeds[f"x{name[1:]}"], shapes[name]
        window = [a // b for a, b in zip(x.shape[2:], small[1:], strict=True)]
        axes = itertools.chain.from_iterable(zip(small[1:], window, strict=True))
        split = x.reshape(*x.shape[:2], *axes)
        feeds[name] = split.max(axis=tuple(range(3, split.ndim, 2)))
    return feeds


def assert_same(found, expected):
    """Compare all bits but those of NaN and signs of 0, and averages within rounding."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        is_average = name.startswith("y") and int(name[1:]) % 4 == 1
        np.testing.assert_allclose(found[name], values, rtol=0, atol=2e-6 if is_average else 0, err_msg=name)


@pytest.mark.slow
def test_random_pools_are_the_runtimes(random_pools):
    graph, shapes = random_pools
    rng = np.random.default_rng(1)
    lowered = {threads: lower_to_kernels(graph, PLAIN, threads) for threads in (1, 2)}
    assert all(node.domain == "ai.graphopt" for node in lowered[1].model.graph)
    sessions = {threads: session(graph, threads, found) for threads, found in lowered.items()}
    plain = session(graph, 1)
    for batch in 0, 1, 5:
        feeds = fed(rng, shapes, batch)
        found = {threads: each.compute_arrays(feeds) for threads, each in sessions.items()}
        if batch:
            assert_same(found[1], plain.compute_arrays(feeds))
        for name, values in found[1].items():
            assert np.array_equal(values, found[2][name]), name


def test_random_pools_of_nan_and_infinities(random_pools):
    """A maximum is NaN where PyTorch's is; which NaN the runtime drops depends on widths and layouts."""
    graph, shapes = random_pools
    feeds = fed(np.random.default_rng(2), shapes, 3, special=True)
    found = session(graph, 1, lower_to_kernels(graph, PLAIN, 1)).compute_arrays(feeds)
    expected = session(graph, 1).compute_arrays(feeds)
    for node in graph.graph:
        if node.op_type == "MaxPool" and node.inputs[0].name in feeds:
            x = torch.tensor(feeds[node.inputs[0].name])
            pool = getattr(torch.nn.functional, f"max_pool{x.ndim - 2}d")
            expected[node.outputs[0].name] = pool(x, node.attributes.get_ints("kernel_shape")).numpy()
    assert_same(found, expected)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 processor")
@pytest.mark.parametrize("fewer", [["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2"]], ids=["avx2", "baseline"])
def test_random_pools_on_older_processors(random_pools, fewer, monkeypatch):
    graph, shapes = random_pools
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, *fewer))
    monkeypatch.setattr(toolchain, "_environment", toolchain._environment.__wrapped__)
    feeds = fed(np.random.default_rng(3), shapes, 2)
    found = session(graph, 1, lower_to_kernels(graph, PLAIN, 1)).compute_arrays(feeds)
    assert_same(found, session(graph, 1).compute_arrays(feeds))


CHANGED = {
    "another x": {"x": "v_"},
    "another window": {"window": "[2,1]"},
    "a maximum of others": {"score": "x_"},
    "another score": {"ranked": "c_"},
    "another rounding": {"nearest": NEAREST.replace("floor", "ceil")},
    "another share": {"share": "a_"},
}


def gradient(outputs="float[N,3,8,6] dx_", ranks=None, **form):
    text = GRADIENT.format(**FORM | form)
    inputs = "float[N,3,8,6] x_, float[1,3,8,6] v_, float[N,3,4,3] y_, float[N,3,4,3] dy_"
    ranks = scores([2, 2], [4, 3]) if ranks is None else ranks
    weights = {"scales_": np.array([1, 1, 2, 2], np.float32), "scores_": ranks}
    if ranks.shape[2:] != (8, 6):
        text = text.replace("scores_", "tiled_", 1)
        text, weights = f"tiled_ = Tile(scores_, many_) {text}", weights | {"many_": np.array([1, 1, 4, 3])}
    return plan(load(onnx.shape_inference.infer_shapes(model(f"g ({inputs}) => ({outputs}) {{ {text} }}", **weights))))


def gradients(found):
    return sum(kernel.name.startswith("u") for kernel in found.kernels)


@pytest.mark.parametrize("name", CHANGED)
def test_another_formula_is_no_gradient(name):
    assert gradients(gradient()) == 1
    assert gradients(gradient(**CHANGED[name])) == 0


def test_another_gate_stays_beside_the_gradient():
    found = gradient(gating=GATING.replace("(y_)", "(dy_)"))
    (kernel,) = [kernel for kernel in found.kernels if kernel.name.startswith("u")]
    assert [x.name.split("/")[0] for x in kernel.inputs] == ["x_", "y_", "s_"]


@pytest.mark.parametrize("name", ["u_", "c_", "a_", "k_", "q_", "f_", "m_", "h_", "s_", "r_"])
def test_a_gradient_whose_parts_are_read_elsewhere_stays(name):
    kind = "bool" if name == "f_" else "float"
    assert gradients(gradient(f"float[N,3,8,6] dx_, {kind}[A,B,C,D] {name}")) == 0


def test_a_gradient_of_other_scores_stays():
    ranks = scores([2, 2], [4, 3])
    taps = ranks[:, :, :2, :2]
    assert gradients(gradient(ranks=ranks)) == gradients(gradient(ranks=taps)) == 1
    swapped = np.where(np.arange(8).reshape(1, 1, 8, 1) < 2, 5 - ranks, ranks)
    for others in (ranks[..., ::-1], ranks + 1, swapped, taps + 1):
        assert gradients(gradient(ranks=np.ascontiguousarray(others))) == 0


STAYS = [
    "MaxPool<kernel_shape = [2,2], strides = [2,1]>(x)",
    "MaxPool<kernel_shape = [2,2]>(x)",
    "MaxPool<kernel_shape = [2,2], strides = [2,2], pads = [0,1,0,0]>(x)",
    "MaxPool<kernel_shape = [2,2], strides = [2,2], dilations = [2,1]>(x)",
    "AveragePool<kernel_shape = [2,2], strides = [2,2], ceil_mode = 1>(x)",
    'AveragePool<kernel_shape = [2,2], strides = [2,2], auto_pad = "SAME_UPPER">(x)',
    f"AveragePool<kernel_shape = [{2**40},2], strides = [{2**40},2]>(x)",
    "AveragePool<kernel_shape = [0,2], strides = [0,2]>(x)",
    "MaxPool<kernel_shape = [-2,-2], strides = [-2,-2]>(x)",
    "MaxPool<kernel_shape = [2], strides = [2]>(x)",
    f"Resize<{NEAREST}>(x, , half)",
    f"Resize<{NEAREST}>(x, , images)",
    f"Resize<{NEAREST}>(x, , endless)",
    f"Resize<{NEAREST}>(x, , none)",
    f"Resize<{NEAREST}>(x, , short)",
    f"Resize<{NEAREST}>(x, , , sizes)",
    'Resize<mode = "linear", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(x, , two)',
    'Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric">(x, , two)',
    'Resize<mode = "nearest", nearest_mode = "floor">(x, , two)',
]


@pytest.mark.parametrize("text", STAYS)
def test_other_windows_are_left_to_the_runtime(text):
    scales = {
        **{
            "half": [1, 1, 1.5, 1],
            "images": [2, 1, 2, 2],
            "endless": [1, 1, np.inf, np.nan],
            "none": [1, 1, 0, 2],
        },
        **{"short": [1, 1, 2], "two": [1, 1, 2, 2]},
    }
    weights = {name: np.array(numbers, np.float32) for name, numbers in scales.items()}
    proto = model(
        f"g (float[N,4,8,8] x) => (float[N,A,B,C] y) {{ y = {text} }}",
        **weights,
        sizes=np.array([1, 4, 16, 16]),
    )
    assert plan(ir.from_proto(proto)).counts["pools"] == 0


def test_positions_are_left_to_the_runtime():
    text = "y, i = MaxPool<kernel_shape = [2,2], strides = [2,2]>(x)"
    proto = model(f"g (float[N,4,8,8] x) => (float[N,4,4,4] y, int64[N,4,4,4] i) {{ {text} }}")
    assert plan(ir.from_proto(proto)).counts["pools"] == 0


def test_an_input_of_another_size_than_declared():
    text = "t = Neg(x)  y = MaxPool<kernel_shape = [3,2], strides = [3,2]>(t)"
    proto = model(f"g (float[N,2,A,B] x) => (float[N,2,C,D] y) {{ {text} }}")
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("t", 1, [1, 2, 6, 6]))
    graph = ir.from_proto(proto)
    native = session(graph, 1, lower_to_kernels(graph, PLAIN, 1))
    for shape in ((2, 2, 10, 7), (1, 2, 3, 2)):
        x = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        np.testing.assert_array_equal(native.compute_arrays(x)["y"], session(graph, 1).compute_arrays(x)["y"])


@pytest.mark.parametrize("relu", [False, True])
def test_gradients_of_a_step_are_pytorchs(relu):
    rng = np.random.default_rng(0)
    w, x, target = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((5, 3, 3, 3), (4, 3, 18, 12), (4, 5, 9, 6))
    )
    text = "c = Conv<pads = [1,1,1,1]>(x, w)  r = Relu(c)  y = MaxPool<kernel_shape = [2,2], strides = [2,2]>"
    proto = model(f"g (float[N,3,18,12] x) => (float[N,5,9,6] y) {{ {text}({'r' if relu else 'c'}) }}", w=w)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(1.0))
    assert gradients(plan(step)) == 1
    executor = graphopt.Executor(step, threads=1, native=True)
    executor.step({"x": x, "target": target})
    weights = torch.tensor(w, requires_grad=True)
    c = torch.nn.functional.conv2d(torch.tensor(x), weights, padding=1)
    y = torch.nn.functional.max_pool2d(torch.relu(c) if relu else c, 2)
    torch.nn.functional.mse_loss(y, torch.tensor(target)).backward()
    np.testing.assert_allclose(executor.state["w"], w - weights.grad.numpy(), rtol=1e-4, atol=1e-5)
