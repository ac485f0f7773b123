"""Types and shapes of single nodes are those that ONNX infers in a whole model, also of nodes that are alike."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

from graphopt.graph.node_inference import infer_outputs
from graphopt.graph.rules import rule_set

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N,4] x, float[N,4] y, float16[N,4] h, float[4,4] w) => (float[?,?] z)
<int64[2] to = {2, -1}, int64[2] rows = {-1, 8}, int64[1] axes = {0}> {
    a = Add(x, y)
    b = Add(y, x)
    c = Add(h, h)
    d = Reshape(x, to)
    e = Reshape(x, rows)
    f = Cast<to=10>(x)
    g = Cast<to=1>(x)
    h0, h1 = Split<axis=1, num_outputs=2>(x)
    i = Gemm<transA=1>(x, y)
    j = Gemm<transB=1>(x, y)
    k = Unsqueeze(x, axes)
    l = Mul(w, w)
    m = Mul(w, a)
    s = SequenceConstruct(x, y)
    z = Add(a, b)
}"""


def test_nodes_one_by_one_have_the_types_of_the_whole_model() -> None:
    proto = onnx.parser.parse_model(MODEL)
    whole = ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True))
    for _ in range(2):  # the second time, all are known
        for node in whole.graph:
            for y, (kind, shape) in zip(node.outputs, infer_outputs(node, 21), strict=True):
                assert kind == y.type
                if isinstance(kind, ir.TensorType):
                    assert y.shape is not None and shape is not None and len(shape) == len(y.shape)
                    known = [dim for dim in y.shape if isinstance(dim, int) or not str(dim).startswith("unk__")]
                    assert [dim for dim in shape if isinstance(dim, int) or dim.value is not None] == known


def test_what_is_inferred_for_one_node_may_change_without_another() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(MODEL)).graph
    first, second = graph.node(0), graph.node(1)
    ((kind, shape),) = infer_outputs(first, 21)
    assert isinstance(kind, ir.TensorType) and shape is not None
    assert shape.frozen
    kind.dtype = ir.DataType.INT8
    assert infer_outputs(second, 21) == [(ir.TensorType(ir.DataType.FLOAT), ir.Shape(["N", 4]))]


def test_constants_are_told_apart_by_their_numbers_and_types() -> None:
    def shape_of(numbers: np.ndarray) -> ir.Shape | None:
        x = ir.val("x", ir.DataType.FLOAT, [2, 3, 4])
        to = ir.val("to", const_value=ir.tensor(numbers))
        return infer_outputs(ir.node("Reshape", [x, to], outputs=[ir.val("y")]), 21)[0][1]

    assert shape_of(np.array([4, 6])) == [4, 6]
    assert shape_of(np.array([6, 4])) == [6, 4]
    assert shape_of(np.array([24])) == [24]


def test_the_rule_that_matches_first_replaces_a_node() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y, float[2] z) '
            "{ a = Abs(x) y = Neg(a) z = Exp(x) }"
        )
    )
    rules = [
        RewriteRule(lambda op, x: op.Neg(op.Exp(x)), lambda op, x: op.Log(x)),
        RewriteRule(lambda op, x: op.Neg(op.Abs(x)), lambda op, x: op.Cos(x)),
        RewriteRule(lambda op, x: op.Neg(x), lambda op, x: op.Sin(x)),
        RewriteRule(lambda op, x: op.Exp(x), lambda op, x: op.Tan(x), lambda context, x: False),
        RewriteRule(lambda op, x: op.Exp(x), lambda op, x: op.Sqrt(x)),
    ]
    assert rule_set(rules).apply_to_model(model) == 2
    assert sorted(node.op_type for node in model.graph) == ["Cos", "Sqrt"]
