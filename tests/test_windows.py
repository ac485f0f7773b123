"""Windows are where ONNX Runtime has them: at odd geometries, its outputs and their gradients follow from the facts."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from steps import outputs

import graphopt
import passes
from graphopt.errors import GraphoptError

pytestmark = pytest.mark.skipif(onnxruntime.__version__.startswith("1.19."), reason="onnxruntime 1.19 has no opset 22")

ONE = [(1,), (2,), (4,), (7,)]  # sizes of inputs along the axes of space
AVERAGES = [("MaxPool", ""), ("AveragePool", ""), ("AveragePool", ", count_include_pad=1")]
WINDOWS = [  # kernel, stride, dilation, pads, ceil_mode
    (2, 2, 1, "0,0", 0),  # larger than an input
    (2, 3, 1, "1,0", 0),
    (3, 2, 2, "0,2", 0),  # pads that the last window does not need
    (3, 2, 1, "1,2", 1),  # a last window in the padding
    (2, 3, 2, "0,1", 1),
    (2, 4, 1, "0,1", 1),
    (3, 3, 1, "0,0", 1),
]
MODES = [
    (3, 2, "SAME_UPPER"),
    (3, 2, "SAME_LOWER"),
    (2, 1, "SAME_LOWER"),
    (2, 3, "VALID"),
    (4, 3, "SAME_LOWER"),
]
GEOMETRIES = [
    *(
        (
            f"{pool}<kernel_shape=[{k}], strides=[{s}], dilations=[{d}], pads=[{pads}], ceil_mode={ceil}{count}>",
            ONE,
        )
        for k, s, d, pads, ceil in WINDOWS
        for pool, count in [*AVERAGES, ("LpPool", ", p=1")]
    ),
    *(
        (f'{pool}<kernel_shape=[{k}], strides=[{s}], ceil_mode={ceil}, auto_pad="{mode}"{count}>', ONE)
        for k, s, mode in MODES
        for ceil in (0, 1)
        for pool, count in AVERAGES
    ),
    *(
        (f"{pool}<kernel_shape=[2,3], strides=[2,2], pads=[1,0,0,2], ceil_mode={ceil}{count}>", sizes)
        for ceil in (0, 1)
        for pool, count in AVERAGES
        for sizes in [[(1, 6), (5, 1), (4, 4)]]
    ),
    *(
        (f"{pool}<kernel_shape=[2,2], strides=[2,2]>", [(1, 6), (3, 1), (1, 1), (4, 4)])
        for pool in ("MaxPool", "AveragePool")
    ),
    ("AveragePool<kernel_shape=[2,1,3], strides=[2,1,2], pads=[0,0,1,0,0,1]>", [(1, 2, 5), (3, 1, 1)]),
    ('MaxPool<kernel_shape=[2,1,3], strides=[1,1,2], auto_pad="SAME_UPPER">', [(1, 2, 5), (3, 1, 1)]),
    ("Conv<pads=[3,0], strides=[3], dilations=[2]>", [(4,), (7,)]),
    ("Conv<pads=[0,3], strides=[2]>", [(4,), (7,)]),
    ("Conv<pads=[1,2], strides=[4]>", [(4,), (7,)]),
    ('Conv<auto_pad="SAME_LOWER">', ONE),
    ('Conv<strides=[2], auto_pad="SAME_LOWER">', ONE),
    ('Conv<strides=[5], auto_pad="SAME_UPPER">', ONE),
    ('Conv<auto_pad="SAME_LOWER", strides=[2,3]>', [(4, 5), (1, 1)]),
    ("Conv<pads=[1,0,2,0,1,0], strides=[2,1,2]>", [(2, 2, 5)]),
]
CASES = [(node, sizes) for node, table in GEOMETRIES for sizes in table]
KERNELS = {1: (2,), 2: (3, 2), 3: (2, 1, 3)}  # of convolutions, by the axes of space


def file(node: str, sizes: str, axes: int, scale: np.ndarray | None = None) -> onnx.ModelProto:
    """Return a model of one operator and one channel, which may scale each element of an image first."""
    first = "v = Identity(x)" if scale is None else "r = Shape(x) t = Reshape(s, r) v = Mul(x, t)"
    w = ", w" if node.startswith("Conv") else ""
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 22]> g (float[N,1,{sizes}] x) => '
        f"(float[A,{','.join('BCDE'[: axes + 1])}] y) {{ {first} y = {node}(v{w}) }}"
    )
    kernel = np.random.default_rng(1).uniform(0.5, 1.5, (1, 1, *KERNELS[axes])).astype(np.float32)
    for name, array in {"w": kernel, "s": scale}.items():
        if array is not None and (name == "s" or w):
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def run(proto: onnx.ModelProto, x: np.ndarray, name: str = "y") -> np.ndarray:
    return outputs(proto, {"x": x}, optimize=False)[name]


def derivatives(node: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the runtime's output, and how it depends on each element: [elements of the output, elements of x]."""
    plain = file(node, ",".join("HWD"[: x.ndim - 2]), x.ndim - 2)
    y = run(plain, x)
    if node.startswith("MaxPool"):
        plain.graph.node[-1].output.append("at")
        plain.graph.output.append(onnx.helper.make_tensor_value_info("at", onnx.TensorProto.INT64, None))
        return y, np.eye(x.size)[run(plain, x, "at").ravel()]
    images = np.eye(x.size, dtype=np.float32).reshape(x.size, *x.shape[1:])
    return y, run(plain, images).reshape(x.size, -1).T


@pytest.mark.sample(60)
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(("node", "sizes"), CASES)
def test_the_gradient_reaches_what_the_runtime_reads(node: str, sizes: tuple[int, ...], is_open: bool) -> None:
    count = math.prod(sizes)
    x = np.random.default_rng(0).permutation(count).reshape(1, 1, *sizes).astype(np.float32) + 1
    y, depends = derivatives(node, x)
    if not y.size:
        pytest.skip("no window fits")
    target = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    names = "HWD"[: len(sizes)] if is_open else map(str, sizes)
    scaled = file(node, ",".join(names), len(sizes), np.ones(count, np.float32))
    graph = graphopt.compile(scaled, loss=passes.MeanSquaredError(reduction="sum"))
    found = graphopt.run(graph, {"x": x, "target": target})
    want = depends.T @ (2 * (y - target)).ravel() * x.ravel()
    np.testing.assert_allclose(found["s.grad"], want, rtol=1e-4, atol=1e-5 * abs(want).max())
    step = next(value for value in graph.graph.outputs if value.name == "y")
    assert is_open or tuple(step.shape)[1:] == y.shape[1:]


MISPLACED = [  # that ONNX Runtime reads elsewhere than the standard, with a size, and one at which it does not
    ("AveragePool<kernel_shape=[1], strides=[4]", 8, 5),
    ("AveragePool<kernel_shape=[2], strides=[5]", 5, 7),
    ("LpPool<kernel_shape=[1], strides=[5]", 10, 6),
    ("AveragePool<kernel_shape=[2], dilations=[2]", 7, None),
    ("MaxPool<kernel_shape=[3], strides=[2], dilations=[2]", 7, None),
]


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("node", "size", "fine"), MISPLACED)
def test_same_pads_that_the_runtime_places_elsewhere_are_refused(node, size, fine, mode):
    node, scale = f'{node}, auto_pad="{mode}">', np.ones(size, np.float32)
    for sizes in (str(size), "H"):
        with pytest.raises(GraphoptError, match=f"auto_pad='{mode}'.*write the pads that you mean"):
            graphopt.compile(file(node, sizes, 1, scale), loss=passes.MeanSquaredError())
    if fine is not None:
        fitting = file(node, str(fine), 1, np.ones(fine, np.float32))
        graphopt.compile(fitting, loss=passes.MeanSquaredError())


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["MaxPool", "AveragePool"])
def test_kernels_leave_windows_larger_than_the_input_to_the_runtime(pool):
    scaled = file(f"{pool}<kernel_shape=[2,2], strides=[2,2]>", "1,6", 2, np.ones(6, np.float32))
    step = graphopt.compile(scaled, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    x, target = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 1, 6), np.ones((1, 1, 1, 3), np.float32)
    losses = [
        [graphopt.Executor(step, native=native).step(x=x, target=target)["loss"] for _ in range(3)]
        for native in (False, True)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
