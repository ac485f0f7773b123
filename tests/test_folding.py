"""Constants are folded to what the installed runtime computes, bit for bit; weights are not folded at all."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders import model
from onnx import helper

import graphopt
import passes
from graphopt.graph.folding import EXACT, EXACT_INTEGERS, SMALL_CONSTANT, fold
from graphopt.graph.inference import extract
from graphopt.graph.inference_form import InferenceForm
from graphopt.runtime.executor import run
from graphopt.testing.reference import evaluator

FLOATS = np.array(
    [
        [-2.5, -1.5, -0.5, -0.0, 0.0, 0.5, 1.5, 2.5, 100],
        [1e-40, np.inf, -np.inf, np.nan, 3, -7, 1 / 3, 1e30, 0.1],
    ]
)
OTHERS = np.array([[-0.5, 2, 1, -0.0, 0.0, 3, 7, -7, 3], [np.inf, 1, 1, 5, np.nan, 2, 3, 1e10, -0.1]])
INTS = np.array([[-7, -1, 0], [1, 7, 100]])
DIVISORS = np.array([[2, -3, 5], [-7, 3, 9]])
BOOLS = np.array([[True, False, True], [False, False, True]])


def ints(*numbers):
    return np.array(numbers, np.int64)


def of(op, *inputs, **attributes):
    return op, inputs, attributes


FLOATING_TYPES = (np.float32, np.float64, np.float16)
FLOATING = [
    *(of(op, "x") for op in ("Abs", "Neg", "Reciprocal", "NonZero")),
    *(of(op, "x", "y") for op in ("Add", "Sub", "Mul", "Div")),
    *(of(op, "x", "row") for op in ("Add", "Sub", "Mul", "Div")),
    *(of(op, "x", "y") for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    of("Where", FLOATS > 0, "x", "y"),
    *(of(op, "x") for op in ("IsInf", "IsNaN")),
    of("IsInf", "x", detect_negative=0),
    *(of("Cast", "x", to=to) for to in (1, 9, 10, 11)),
    *(of("Cast", "row", to=to) for to in (6, 7)),
]
MOVING = [
    of("Concat", "x", "x", axis=1),
    of("Flatten", "x", axis=0),
    of("Gather", "x", ints(1, -1), axis=1),
    of("Gather", "x", np.array(-2)),
    of("GatherND", "x", ints([1, -1], [0, 2])),
    of("GatherND", "x", ints([1], [-1]), batch_dims=1),
    of("Identity", "x"),
    of("Reshape", "x", ints(0, -1, 1)),
    of("Shape", "x", start=-1),
    of("Size", "x"),
    of("Slice", "x", ints(-1), ints(-100), ints(1), ints(-2)),
    of("Slice", "x", ints(0, 1), ints(100, -1)),
    of("Slice", "x", ints(100), ints(np.iinfo(np.int64).min), ints(0), ints(-1)),
    of("Squeeze", "row", ints(0)),
    of("Squeeze", "row"),
    of("Transpose", "x"),
    of("Transpose", "x", perm=[1, 0]),
    of("Unsqueeze", "x", ints(0, -1)),
]
INTEGERS = [
    *(of(op, "x") for op in ("Abs", "Neg", "Sign", "NonZero")),
    *(of(op, "x", "y") for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Mod")),
    of("Mod", "x", "y", fmod=1),
    *(of(op, "x", "y") for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    *(of(op, BOOLS, ~BOOLS[:1]) for op in ("And", "Or", "Xor", "Equal")),
    of("Not", BOOLS),
    of("Where", BOOLS, "x", "y"),
    *(of("Cast", "x", to=to) for to in (1, 6, 7, 9, 10, 11)),
    of("Cast", BOOLS, to=7),
    of("Clip", "x", "low", "high"),
    of("Clip", "x", "high", "low"),
    of("ConstantOfShape", ints(2, 3), value=helper.make_tensor("", 7, [1], [4])),
    *(of("CumSum", "x", np.array(1), exclusive=a, reverse=b) for a in (0, 1) for b in (0, 1)),
    of("Expand", "x", ints(2, 1, 3)),
    of("Range", "high", "low", "low"),
    *(of(op, "x", ints(-1), keepdims=0) for op in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum")),
    *(of(op, "x") for op in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum")),
    of("ReduceSum", "x", ints(), noop_with_empty_axes=1),
    of("ScatterND", "x", ints([0], [-1]), "y"),
    of("ScatterND", "x", ints([0, 1], [0, 1]), "few", reduction="add"),
    of("Tile", "x", ints(1, 2)),
]


def cases():
    """Yield an operator, the arrays that it reads and its attributes."""
    numbers = {
        "x": INTS,
        "y": DIVISORS,
        "row": INTS[:1],
        "few": ints(3, 4),
        "low": np.array(-2),
        "high": np.array(5),
    }
    tables = [
        *((FLOATING + MOVING, {"x": FLOATS, "y": OTHERS, "row": FLOATS[:1]}, t) for t in FLOATING_TYPES),
        *((INTEGERS + MOVING, numbers, t) for t in (np.int64, np.int32)),
        (MOVING, {"x": BOOLS, "row": BOOLS[:1]}, bool),
    ]
    for table, named, dtype in tables:
        for op, inputs, attributes in table:
            yield op, [named[x].astype(dtype) if isinstance(x, str) else x for x in inputs], attributes


def of_one_node(op, inputs, attributes):
    """Return a model of one node that reads constants, and one that reads inputs of the same numbers."""
    names = [f"x{i}" for i in range(len(inputs))]
    constants = [
        helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(x))
        for name, x in zip(names, inputs, strict=True)
    ]
    node = helper.make_node(op, names, ["y"], **attributes)
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in zip(names, inputs, strict=True)
    ]

    def built(nodes, inputs):
        graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name="y")])
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)

    return built([*constants, node], []), built([node], typed)


def in_onnxruntime(proto, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - the bindings of two versions raise types of their own
        return None
    return session.run(None, feeds)[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_folded_is_what_the_runtime_computes_bit_for_bit():
    compared = set()
    for op, inputs, attributes in cases():
        constant, fed = of_one_node(op, inputs, attributes)
        folded = ir.from_proto(constant)
        fold(folded)
        found = ir.convenience.get_const_tensor(folded.graph.outputs[0])
        where = f"{op}({', '.join(f'{x.dtype}{list(x.shape)}' for x in inputs)}) {attributes}"
        assert found is not None, f"{where}: not folded"
        expected = in_onnxruntime(fed, {f"x{i}": x for i, x in enumerate(inputs)})
        if expected is None:
            continue
        found = found.numpy()
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        np.testing.assert_array_equal(found, expected, where)
        if found.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(found), np.signbit(expected), where)
        compared.add((op, inputs[0].dtype.kind))
    assert {op for op, _ in compared} == EXACT_INTEGERS
    assert {op for op, kind in compared if kind == "f"} >= EXACT - {"And", "Not", "Or", "Xor", "Where"}


RNG = np.random.default_rng(11)
IMAGE = RNG.standard_normal((1, 2, 5, 6))
GRID = RNG.uniform(-1.4, 1.4, (1, 3, 4, 2))
THETA = np.array([[[0.9, 0.2, -0.1], [-0.3, 1.1, 0.25]]])

# A node that reads constants alone, of what ONNX's reference evaluator computes otherwise than the runtime.
FROZEN = {
    "MaxPool with uneven pads": ("MaxPool<kernel_shape=[3,2], pads=[1,0,1,1]>(c)", IMAGE),
    "LpNormalization of p=1": ("LpNormalization<p=1, axis=1>(c)", IMAGE),
    "GlobalMaxPool": ("GlobalMaxPool(c)", IMAGE),
    "GlobalMaxPool of one axis": ("GlobalMaxPool(c)", IMAGE[0]),
    "LRN": ("LRN<size=3, alpha=0.3>(c)", IMAGE),
    "Resize align_corners": (
        'Resize<mode="linear", coordinate_transformation_mode="align_corners">(c, , , sizes)',
        IMAGE,
    ),
    "GridSample cubic, border": ('GridSample<mode="cubic", padding_mode="border">(c, grid)', IMAGE),
    "AffineGrid": ("AffineGrid(c, size)", THETA),
    "Exp": ("Exp(c)", IMAGE),
    "ReduceSum": ("ReduceSum(c)", IMAGE),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_counts_in_training_and_in_the_trained_model_as_in_the_users_model(name, dtype):
    expression, c = FROZEN[name]
    t = {np.float32: "float", np.float64: "double"}[dtype]
    given = {"sizes": ints(1, 2, 8, 7), "size": ints(1, 1, 3, 4), "grid": GRID}
    proto = model(
        f"g ({t}[1] x) => ({t}[M] y) {{ f = {expression}\n e = Reshape(f, all)\n s = Mul(e, w)\n y = Mul(s, x) }}",
        dtype=dtype,
        c=c,
        w=np.ones(1),
        all=ints(-1),
        **{name: array for name, array in given.items() if name in expression},
    )
    feeds = {"x": np.ones(1, dtype)}
    try:
        expected = run(proto, feeds)["y"]
    except graphopt.GraphoptError as error:
        pytest.skip(str(error))
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters(pattern="w"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.0),
    )
    executor = graphopt.Executor(step)
    found = executor.step(feeds, target=np.zeros_like(expected))["y"]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(run(executor.trained(), feeds)["y"], expected)


def test_a_large_result_of_small_constants_stays_a_node():
    _, inputs, _ = of("Range", np.array(0), np.array(SMALL_CONSTANT + 1), np.array(1))
    constant, _ = of_one_node("Range", inputs, {})
    folded = ir.from_proto(constant)
    fold(folded)
    assert "Range" in [node.op_type for node in folded.graph]


def test_weights_are_not_folded_before_parameters_are_chosen_nor_those_that_are_frozen():
    proto = model(
        "g (float[N,3] x) => (float[N,2] y) { a = Transpose(w)\n b = Transpose(v)\n"
        " p = MatMul(x, a)\n q = MatMul(x, b)\n y = Add(p, q) }",
        w=RNG.standard_normal((2, 3)),
        v=RNG.standard_normal((2, 3)),
    )
    passes.Simplify()(untrained := graphopt.load(proto))
    frozen = graphopt.compile(
        proto,
        parameters=passes.Parameters(freeze="v"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(),
    )
    for found in (untrained, frozen):
        assert {"v", "w"} <= {*found.graph.initializers}


def noted(lines, *forms):
    """Return a graph whose values `a`, `b` have other forms in inference: those of the named inputs."""
    proto = model(f"g (float[N,3] x, float[N,3] z) => (float[N,3] y) {{ {lines} }}")
    loaded = graphopt.load(proto)
    for node in loaded.graph:
        if node.outputs[0].name in forms:
            InferenceForm({0: "z" if node.outputs[0].name == "a" else "x"}).write(node.outputs[0])
    return loaded


@pytest.mark.parametrize(
    ("lines", "forms", "training", "inference"),
    [
        ("a = Identity(x) y = Neg(a)", "a", [-1], [-2]),
        ("a = Identity(x) y = Identity(a)", "a", [1], [2]),
        ("a = Neg(x) b = Neg(x) y = Add(a, b)", "ab", [-2], [-3]),
        ("a = Neg(x) c = Neg(x) y = Add(a, c)", "a", [-2], [-3]),
        ("a = Identity(x) y = Dropout(a)", "a", [1], [2]),
    ],
)
def test_simplify_keeps_what_has_another_form_in_inference(lines, forms, training, inference):
    simplified = noted(lines, *forms)
    passes.Simplify()(simplified)
    feeds = {"x": np.full((1, 3), 1, np.float32), "z": np.full((1, 3), 2, np.float32)}
    (found,) = evaluator(simplified).run(None, feeds)
    np.testing.assert_array_equal(found, np.full((1, 3), training, np.float32))
    extracted = extract(simplified, simplified.graph.outputs)
    read = {name: x for name, x in feeds.items() if name in {v.name for v in extracted.graph.inputs}}
    (found,) = evaluator(extracted).run(None, read)
    np.testing.assert_array_equal(found, np.full((1, 3), inference, np.float32))


def test_rows_of_a_transposed_frozen_weight_are_its_columns():
    """As of a tied embedding: a step copies no weight."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (int64[N,3] ids) => (float[N,3,5] y) {
        table = Transpose<perm = [1, 0]>(w) rows = Gather(table, ids) x = Mul(rows, scale) y = MatMul(x, w) }"""
    )
    w = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    scale = np.array([1, 2, 3, 4], np.float32)
    for name, array in {"w": w, "scale": scale}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters("scale", freeze="w"),
        loss=passes.CrossEntropy(axis=-1),
        optimizer=passes.SGD(0.1),
    )
    assert not [node for node in step.graph if node.op_type == "Transpose" and node.inputs[0].name == "w"]
    feeds = {"ids": ints([0, 4, 2], [1, 1, 3]), "target": ints([0, 1, 2], [3, 4, 0])}
    logits = (w.T[feeds["ids"]] * scale) @ w
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(logits, feeds["target"][..., None], axis=-1).mean()
    assert graphopt.Executor(step).step(feeds)["loss"] == pytest.approx(expected, rel=1e-5)
