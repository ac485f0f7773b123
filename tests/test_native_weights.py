"""Products of our own with weights in 4 and 8 bits: the same as with NumPy's dequantized weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from precisions import UNIT, assert_equal_in_float32, assert_near

import graphopt
import passes
from graphopt import models
from graphopt.graph.checking import KERNELS
from graphopt.graph.loading import load
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.targets.native import toolchain
from graphopt.targets.native.lowering import lower_to_kernels, plan

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")

RANGES = {
    TensorProto.INT4: (-8, 8),
    TensorProto.UINT4: (0, 16),
    TensorProto.INT8: (-128, 128),
    TensorProto.UINT8: (0, 256),
}
LAYOUTS = ["rows", "cut rows", "blocks of rows", "blocks of columns", "each row", "each column", "one"]
SIZES = [(1, 1), (7, 3), (33, 31), (64, 96), (300, 77), (32, 600)]


def quantized(layout, dtype, rows, columns, *, has_zero, rng):
    """Return the tensors and nodes that make a matrix, by ONNX's rules, and the matrix by NumPy."""
    block, attributes, cut = 16, {"axis": 0}, layout == "cut rows"
    pitch = -(-columns // block) * block if layout in ("rows", "cut rows") else columns
    columns = pitch if layout == "rows" else columns
    stored, scales = (rows, pitch), (rows,)
    if layout in ("rows", "cut rows"):
        stored = scales = (rows * pitch // block, block)
        scales = scales[:1]
    elif layout == "blocks of rows":
        attributes["block_size"], scales = block, (-(-rows // block), columns)
    elif layout == "blocks of columns":
        attributes, scales = {"axis": 1, "block_size": block}, (rows, -(-columns // block))
    elif layout == "each column":
        attributes, scales = {"axis": 1}, (columns,)
    elif layout == "one":
        attributes, scales = {}, ()
    low, high = RANGES[dtype]
    q, zero = (rng.integers(low, high, shape) for shape in (stored, scales))
    scale = rng.uniform(0.01, 0.1, scales).astype(np.float32)
    spread = [x if layout != "each column" and x.ndim == 1 else x[None] for x in (scale, zero * has_zero)]
    spread = [x[:, None] if layout in ("rows", "cut rows", "each row") else x for x in spread]
    if "block_size" in attributes:
        axis = attributes["axis"]
        spread = [np.repeat(x, block, axis).take(range(stored[axis]), axis) for x in (scale, zero * has_zero)]
    matrix = ((q - spread[1]).astype(np.float32) * spread[0]).reshape(rows, pitch)[:, :columns]
    tensors = [packed(name, dtype, x) for name, x in (("q", q), ("z", zero))[: 1 + has_zero]]
    tensors += [numpy_helper.from_array(scale, "s"), numpy_helper.from_array(np.array([rows, -1]), "shape")]
    tensors += [numpy_helper.from_array(np.array([x]), f"i{x}") for x in sorted({0, 1, columns})]
    nodes = [helper.make_node("DequantizeLinear", ["q", "s", "z"][: 2 + has_zero], ["d"], **attributes)]
    last = "d"
    if layout in ("rows", "cut rows"):
        nodes.append(helper.make_node("Reshape", ["d", "shape"], [last := "r"]))
    if cut:
        nodes.append(helper.make_node("Slice", [last, "i0", f"i{columns}", "i1"], [last := "cut"]))
    nodes.append(helper.make_node("Identity", [last], ["w"]))
    return tensors, nodes, matrix


def packed(name, dtype, x):
    if dtype in (TensorProto.INT8, TensorProto.UINT8):
        return helper.make_tensor(name, dtype, x.shape, x.astype(np.uint8).tobytes(), raw=True)
    flat = np.append(x.ravel() & 15, 0)[: x.size + x.size % 2].astype(np.uint8)
    return helper.make_tensor(name, dtype, x.shape, (flat[::2] | flat[1::2] << 4).tobytes(), raw=True)


def products(nodes, tensors, matrix, *, is_fed):
    """Return a graph of products with a matrix, and with its transpose and a bias."""
    rows, columns = matrix.shape
    float32 = TensorProto.FLOAT
    inputs = [("a", ["M", rows]), ("b", ["M", columns]), ("c", [rows])]
    if is_fed:
        inputs, nodes, tensors = [*inputs, ("w", [rows, columns])], [], []
    nodes = [*nodes, helper.make_node("MatMul", ["a", "w"], ["x"])]
    nodes.append(helper.make_node("Gemm", ["b", "w", "c"], ["y"], transB=1))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, float32, shape) for name, shape in inputs],
        [helper.make_tensor_value_info(name, float32, ["M", n]) for name, n in (("x", columns), ("y", rows))],
        initializer=tensors,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(proto, data_prop=True)


def session_of(proto, threads):
    lowered = lower_to_kernels(load(proto), threads=threads)
    return Session(Device("cpu", threads=threads, native=False), lowered.model, library=lowered.library)


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_dequantize_weights(layout, dtype, has_zero):
    rng = np.random.default_rng(LAYOUTS.index(layout))
    for sizes in SIZES:
        tensors, nodes, matrix = quantized(layout, dtype, *sizes, has_zero=has_zero, rng=rng)
        frozen, fed = (products(nodes, tensors, matrix, is_fed=is_fed) for is_fed in (False, True))
        assert {node.domain for node in plan(load(frozen)).model.graph} == {KERNELS}
        sessions = [session_of(frozen, 1), session_of(frozen, 2), session_of(fed, 1)]
        for m in (1, 5, 600):
            shapes = {"a": (m, matrix.shape[0]), "b": (m, matrix.shape[1]), "c": matrix.shape[:1]}
            feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            one, two, plain = (x.compute_arrays({**feeds, "w": matrix}) for x in sessions)
            exact = {"x": feeds["a"].astype(np.float64) @ matrix}
            exact["y"] = feeds["b"].astype(np.float64) @ matrix.T + feeds["c"]
            for name, expected in exact.items():
                assert_near(one[name], expected)
                assert_equal_in_float32(one[name], plain[name], "fed weights have no panels for any number of rows")
                np.testing.assert_array_equal(two[name], one[name])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"symmetric": False}, {"bits": 8}, {"block": 16}, {"bits": 2}])
@pytest.mark.sample(3)
def test_steps_over_a_base_of_few_bits_are_the_runtimes(options):
    model = models.transformer((6,), 50, width=48, heads=2, layers=1)
    step = graphopt.compile(
        model,
        quantize=passes.QuantizeWeights(**options),
        adapter=passes.LoRA(rank=2),
        loss=passes.CrossEntropy(axis=-1),
        optimizer=passes.AdamW(0.01),
    )
    assert not any(node.op_type == "DequantizeLinear" for node in plan(step).model.graph)
    x = np.random.default_rng(0).integers(0, 50, (4, 6))
    native, plain = (graphopt.Executor(step, native=native, threads=2) for native in (True, False))
    for _ in range(5):
        feeds = {name: x for name in native.inputs}
        assert native.step(feeds)["loss"] == pytest.approx(plain.step(feeds)["loss"], rel=max(1e-5, UNIT))
