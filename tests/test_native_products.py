"""Matrix products of our own: the runtime's results, however operands and results are stored."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
from builders import model

from graphopt.graph.loading import load
from graphopt.native import toolchain
from graphopt.native.lowering import lower
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")

# The text of a graph, and the shapes of its inputs a, b and c.
GRAPHS = {
    "plain": ("y = MatMul(a, b)", (5, 7), (7, 3)),
    "large": ("y = MatMul(a, b)", (150, 300), (300, 77)),
    "batches": ("y = MatMul(a, b)", (2, 3, 5, 7), (2, 3, 7, 4)),
    "one right": ("y = MatMul(a, b)", (2, 3, 5, 7), (7, 4)),
    "one left": ("y = MatMul(a, b)", (5, 7), (2, 3, 7, 4)),
    "broadcast": ("y = MatMul(a, b)", (2, 1, 5, 7), (1, 3, 7, 4)),
    "one right, transposed": (
        "s = Transpose<perm=[1,0,2]>(a) t = Transpose<perm=[1,0]>(b) y = MatMul(s, t)",
        (6, 9, 20),
        (37, 20),
    ),
    "transposed left": ("t = Transpose<perm=[0,1,3,2]>(a) y = MatMul(t, b)", (2, 3, 7, 5), (2, 3, 7, 4)),
    "heads": (
        "q = Transpose<perm=[0,2,1,3]>(a) k = Transpose<perm=[0,2,3,1]>(b) y = MatMul(q, k)",
        (2, 6, 3, 5),
        (2, 7, 3, 5),
    ),
    "joined": ("p = MatMul(a, b) y = Transpose<perm=[0,2,1,3]>(p)", (2, 3, 5, 7), (2, 3, 7, 4)),
    "last axis moves": ("p = MatMul(a, b) y = Transpose<perm=[0,1,3,2]>(p)", (2, 3, 5, 7), (2, 3, 7, 4)),
    "read twice": (
        "p = MatMul(a, b) t = Transpose<perm=[1,0]>(p) u = MatMul(p, t) y = Add(u, u)",
        (5, 7),
        (7, 5),
    ),
    "default transpose": ("t = Transpose(a) y = MatMul(t, b)", (7, 5), (7, 3)),
    "gemm": ("y = Gemm(a, b)", (5, 7), (7, 3)),
    "both transposed": ("y = Gemm<transA=1, transB=1>(a, b)", (7, 5), (3, 7)),
    "bias of columns": ("y = Gemm(a, b, c)", (5, 7), (7, 3), (3,)),
    "bias of rows": ("y = Gemm(a, b, c)", (5, 7), (7, 3), (5, 1)),
    "bias of one": ("y = Gemm(a, b, c)", (5, 7), (7, 3), ()),
    "bias of all": ("y = Gemm<transB=1>(a, b, c)", (5, 7), (3, 7), (5, 3)),
    "nothing inside": ("y = MatMul(a, b)", (5, 0), (0, 3)),
    "no rows": ("y = Gemm(a, b, c)", (0, 7), (7, 3), (3,)),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_product_is_the_runtimes(name, symbolic):
    text, *shapes = GRAPHS[name]
    arrays = [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]
    dims = itertools.count()
    names = [[f"D{next(dims)}" if symbolic else str(d) for d in shape] for shape in shapes]
    inputs = ", ".join(
        f"float[{','.join(axes)}] {x}" if axes else f"float {x}"
        for x, axes in zip("abc", names, strict=False)
    )
    proto = model(f"g ({inputs}) => (float y) {{ {text} }}")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    proto = onnx.shape_inference.infer_shapes(proto)
    compare(proto, dict(zip("abc", arrays, strict=False)), lowers=not symbolic)


def compare(proto, feeds, lowers=True):
    device = Device("cpu", threads=2, native=False)
    graph = load(proto)
    plain = Session(device, graph).compute_arrays(feeds)
    lowered = lower(graph, without=["kernels"], threads=2)
    if lowered is None:
        assert not lowers
        return
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
    for output, expected in plain.items():
        assert found[output].shape == expected.shape
        np.testing.assert_allclose(found[output], expected, rtol=1e-5, atol=1e-4)


def test_scaled_products_stay():
    proto = model("g (float[2,3] a, float[3,2] b) => (float[2,2] y) { y = Gemm<alpha=0.5>(a, b) }")
    assert lower(load(proto)) is None


def test_a_wrong_inner_dimension_is_an_error():
    proto = model("g (float[M,K] a, float[L,N] b) => (float[M,N] y) { y = MatMul(a, b) }")
    lowered = lower(load(proto))
    session = Session(Device("cpu", native=False), lowered.model, library=lowered.library)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="another shape"):
        session.compute_arrays({"a": np.ones((2, 3), np.float32), "b": np.ones((4, 2), np.float32)})
