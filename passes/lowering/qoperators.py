"""Lower operators on integers with constant scales, of files in the QOperator format, to floats between quantizers.

Each operand is dequantized, the operator of floats computes, and a QuantizeLinear rounds its result. Weights and biases
of integers train by float32 masters, as those of any DequantizeLinear. See
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md and ONNX's QLinearConv and QLinearMatMul.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.operators import LAYOUT, MICROSOFT
from graphopt.graph.postprocessing import DEQUANTIZE
from graphopt.graph.values import constant_of, dtype_of, given, name_of, rank, redirect
from passes.lowering.registry import lowers, stored


@dataclass(frozen=True)
class _Form:
    """Describe the inputs of an operator on integers.

    Args:
        op_type: the operator that computes the same of floats.
        operands: the places of the integers, whose scale and zero point follow; all from 2 on if there are none.
        result: the place of the result's scale, which its zero point follows.
        bias: the place of a bias of int32, whose scale is the product of the operands'.
    """

    op_type: str
    operands: tuple[int, ...]
    result: int
    bias: int | None = None


FORMS = {
    "QLinearConv": _Form("Conv", (0, 3), 6, bias=8),
    "QLinearMatMul": _Form("MatMul", (0, 3), 6),
    "QGemm": _Form("Gemm", (0, 3), 7, bias=6),
    **{f"QLinear{name}": _Form(name, (0, 3), 6) for name in ("Add", "Mul")},
    **{f"QLinear{name}": _Form(name, (0,), 3) for name in ("AveragePool", "GlobalAveragePool", "LeakyRelu")},
    **{f"QLinear{name}": _Form(name, (0,), 3) for name in ("Sigmoid", "Softmax")},
    "QLinearReduceMean": _Form("ReduceMean", (0,), 3),
    "QLinearConcat": _Form("Concat", (), 0),
    "QLinearWhere": _Form("Where", (1, 4), 7),
}
_OF_ONNX = ("QLinearConv", "QLinearMatMul")
# Operators that move numbers of their first input, which compute the same of integers and of what these stand for
_MOVING = LAYOUT | {"Gather", "MaxPool", "Pad", "Resize"}


@lowers(*_OF_ONNX, domain="")
@lowers(*(FORMS.keys() - _OF_ONNX), domain=MICROSOFT)
def in_floats(
    op: Emitter, *inputs: Input, node: ir.Node, channels_last: int = 0, opset: int = 13, **attributes: Any
) -> Value:
    """Emit the operator of floats between quantizers."""
    if channels_last:
        raise GraphoptError("its attribute channels_last=1 is not covered: quantize a model with channels first")
    form = FORMS[node.op_type]
    places = form.operands or range(2, len(inputs), 3)
    axis = _axis_of_weight(form.op_type, attributes)
    scales = [_scale(inputs[place + 1]) for place in places]
    floats = [_dequantized(op, *[*inputs, None][place : place + 3], axis=axis) for place in places]
    if form.op_type == "Where":
        floats.insert(0, given(inputs[0]))
    if form.bias is not None and (bias := [*inputs, None][form.bias]) is not None:
        steps = np.float32(attributes.get("alpha", 1)) * scales[0] * scales[1]
        floats.append(op.DequantizeLinear(bias, op.constant(steps.astype(np.float32)), axis=rank(bias) - 1))
    x = floats[0]
    if form.op_type == "ReduceMean":  # an operator that ONNX Runtime describes, and does not compute
        floats.append(op.constant(np.array(attributes.pop("axes", range(rank(x))), np.int64)))
    if form.op_type == "Softmax" and opset < 13:  # over all axes from this one on
        floats = [op.Flatten(x, axis=attributes.pop("axis", 1))]
    y: Value = op.call_op(form.op_type, floats, attributes)  # type: ignore[assignment]
    if form.op_type == "Softmax" and opset < 13:
        y = op.Reshape(y, op.shape_of(x))
    scale, zero = [*inputs, None, None][form.result : form.result + 2]
    if scale is None:  # of a QGemm with a result of floats
        return y
    _scale(scale)
    return op.QuantizeLinear(y, single(op, scale), _zero(op, zero, given(inputs[places[0]])))


def scale_moved(node: ir.Node) -> tuple[Value, Input] | None:
    """Return the scale and the zero point of integers that a node moves, of which no gradient passes; None for others.

    A QuantizeLinear has made them, or they are a table, and a DequantizeLinear behind tells its scale.
    """
    x = node.inputs[0] if node.domain == "" and node.op_type in _MOVING and node.inputs else None
    if x is None or any(y.is_graph_output() for y in node.outputs):
        return None
    if node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") != "nearest":
        return None  # it rounds between two numbers
    quantizer = x.producer()
    found = None
    if quantizer is not None and (quantizer.domain, quantizer.op_type) == ("", "QuantizeLinear"):
        found = quantizer
    elif x.is_initializer() and not x.is_graph_input() and x.dtype in (ir.DataType.INT8, ir.DataType.UINT8):
        found = _dequantizer(node)
    scale, zero = [None, None] if found is None else [*found.inputs, None][1:3]
    known = all(y is None or ((number := constant_of(y)) is not None and number.size == 1) for y in (scale, zero))
    return (scale, zero) if scale is not None and known else None


def _dequantizer(node: ir.Node) -> ir.Node | None:
    """Return the first DequantizeLinear behind a node and others that move its output."""
    for reader in node.outputs[0].consumers():
        if reader.domain == "" and reader.op_type in (DEQUANTIZE, *_MOVING):
            found = reader if reader.op_type == DEQUANTIZE else _dequantizer(reader)
            if found is not None:
                return found
    return None


def move_floats(op: Emitter, node: ir.Node, scale: Value, zero: Input) -> None:
    """Let a node move the numbers that integers of a scale stand for, in place of the integers."""
    q = given(node.inputs[0])
    scale, zero = single(op, scale), None if zero is None else single(op, zero)
    node.replace_input_with(0, op.DequantizeLinear(q, scale, zero))
    if node.op_type == "Pad":
        fill = node.inputs[2] if len(node.inputs) > 2 else None
        node.resize_inputs(max(3, len(node.inputs)))
        fill = op.constant(np.zeros((), dtype_of(q).numpy())) if fill is None else fill
        node.replace_input_with(2, op.DequantizeLinear(fill, scale, zero))
    moved = node.outputs if node.op_type == "Split" else node.outputs[:1]
    for y in moved:
        y.type = None
    op.infer(node)
    zero = op.constant(np.zeros((), dtype_of(q).numpy())) if zero is None else zero
    for y in moved:
        readers = list(y.uses())
        redirect(readers, op.QuantizeLinear(y, scale, zero))


def single(op: Emitter, x: Value) -> Value:
    """Return a scale or a zero point of all elements as a number of rank 0; others as they are."""
    numbers = constant_of(x)
    return op.constant(numbers.reshape(())) if numbers is not None and numbers.size == 1 and rank(x) else x


def _dequantized(op: Emitter, x: Input, by: Input, zero: Input, *, axis: int | None) -> Value:
    q, scale = given(x), given(by)
    many = _scale(scale).size > 1
    if many and (axis is None or rank(scale) != 1 or not q.is_initializer()):
        raise GraphoptError(
            f"its scale {name_of(scale)!r} is not covered: expected one number, or one for each output of a weight"
        )
    layout = {"axis": axis % rank(q)} if many and axis is not None else {}
    return op.DequantizeLinear(q, single(op, scale), None if zero is None else single(op, zero), **layout)


def _scale(scale: Input) -> np.ndarray:
    numbers = stored(given(scale), "scale")
    if not (np.isfinite(numbers) & (numbers != 0)).all():
        raise GraphoptError(f"its scale {name_of(given(scale))!r}: expected finite numbers other than 0, found others")
    return numbers


def _zero(op: Emitter, zero: Input, q: Value) -> Value:
    return op.constant(np.zeros((), dtype_of(q).numpy())) if zero is None else single(op, zero)


def _axis_of_weight(op_type: str, attributes: dict[str, Any]) -> int | None:
    """Return the axis of the second operand along which it may have several scales."""
    if op_type == "Gemm" and attributes.get("transB"):
        return 0
    return {"Conv": 0, "Gemm": 1, "MatMul": -1}.get(op_type)
