"""Lower products of integers that `onnxruntime.quantization.quantize_dynamic` writes.

The input is rounded to 8 bits by its own range, the weight is stored in 8 bits, and their product is scaled. The file's
numbers come from DequantizeLinear here, and the gradient passes the rounding straight through: dx = dy (w s)^T. Weights
train by float32 masters, whose scales follow them, or stay as they are beside adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import STOP_GRADIENT, Flag
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.values import dims_of, given, rank, redirect
from passes.gradients.rules.recurrent import steps_of
from passes.lowering.qoperators import single
from passes.lowering.registry import lowers, plus, stored

_DYNAMIC = "DynamicQuantizeLinear"

FOLLOWS = Flag("graphopt.follows")  # a DequantizeLinear whose scale follows the largest numbers of its weight


@lowers("MatMulInteger", domain="")
def mat_mul_integer(
    op: Emitter, a: Value, b: Value, a_zero_point: Input = None, b_zero_point: Input = None, *, node: ir.Node
) -> Value:
    scale = _scale_of(op, node)
    return op.MatMul(_rounded(op, a, a_zero_point), _weight(op, b, scale, b_zero_point, rank(b) - 1))


@lowers("ConvInteger", domain="")
def conv_integer(
    op: Emitter,
    x: Value,
    w: Value,
    x_zero_point: Input = None,
    w_zero_point: Input = None,
    *,
    node: ir.Node,
    **window: object,
) -> Value:
    scale = _scale_of(op, node)
    if scale.const_value is None or scale.const_value.size != 1:
        raise _unexpected(node, "one scale for all filters")
    return op.Conv(_rounded(op, x, x_zero_point), _weight(op, w, scale, w_zero_point, 0), **window)


@lowers("MatMulIntegerToFloat", domain=MICROSOFT)
def mat_mul_integer_to_float(
    op: Emitter,
    a: Value,
    b: Value,
    a_scale: Value,
    b_scale: Value,
    a_zero_point: Input = None,
    b_zero_point: Input = None,
    bias: Input = None,
) -> Value:
    return plus(
        op.MatMul(_rounded(op, a, a_zero_point, a_scale), _weight(op, b, b_scale, b_zero_point, rank(b) - 1)),
        bias,
    )


@lowers("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_mat_mul(
    op: Emitter, a: Value, b: Value, b_scale: Value, b_zero_point: Input = None, bias: Input = None
) -> Value:
    q, _, zero = op.DynamicQuantizeLinear(a, _outputs=3)
    return plus(op.MatMul(_rounded(op, q, zero), _weight(op, b, b_scale, b_zero_point, rank(b) - 1)), bias)


@lowers("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(
    op: Emitter,
    x: Value,
    w: Value,
    r: Value,
    b: Input,
    lengths: Input,
    h: Input,
    c: Input,
    peepholes: Input,
    w_scale: Value,
    w_zero_point: Value,
    r_scale: Value,
    r_zero_point: Value,
    *,
    node: ir.Node,
    **attributes: Any,
) -> Sequence[Value]:
    """Emit an LSTM whose input is rounded, and whose states are in each step before they are multiplied."""
    q, _, zero = op.DynamicQuantizeLinear(x, _outputs=3)
    read = _of_gates(op, w, w_scale, w_zero_point), _of_gates(op, r, r_scale, r_zero_point)

    def rounded(op: Emitter, state: Value) -> Value:
        q, _, zero = op.DynamicQuantizeLinear(state, _outputs=3)
        return _rounded(op, q, zero)

    like = ir.node("LSTM", [], attributes)
    return steps_of(op, _rounded(op, q, zero), [*read, b, peepholes], lengths, [h, c], like, read=rounded)


def _of_gates(op: Emitter, w: Value, scale: Value, zero: Value) -> Value:
    """Return weights [directions, inputs, 4 hidden], with a scale for each direction or each row, as LSTM has them."""
    directions, size, rows = ir.Shape(dims_of(w)).numpy()
    numbers = [stored(each, "scale") for each in (scale, zero)]
    shape, layout = [-1], {"axis": 0}
    if numbers[0].size == directions * rows:
        layout = {"axis": 2} if directions == 1 else {"axis": 1, "block_size": size}
        shape = [-1] if directions == 1 else [directions, 1, rows]
    scale, zero = (single(op, op.constant(each.reshape(shape))) for each in numbers)
    return op.Transpose(op.DequantizeLinear(_initializer(w), scale, zero, **layout), perm=[0, 2, 1])


def _scale_of(op: Emitter, node: ir.Node) -> Value:
    """Return the scale of the weight of a node, by which the Mul behind it multiplies; that Mul becomes a copy."""
    behind = [node, *_adding_floats(op, node)]
    for op_type in ("Cast", "Mul"):
        readers = list(behind[-1].outputs[0].consumers())
        if [reader.op_type for reader in readers] != [op_type] or behind[-1].outputs[0].is_graph_output():
            raise _unexpected(node, f"one {op_type} behind it")
        behind += readers
    *before, cast, mul = behind
    scales = [x.producer() for x in mul.inputs if x is not None and x is not cast.outputs[0]]
    product = scales[0] if scales and scales[0] is not None and scales[0].op_type == "Mul" else None
    if cast.attributes.get_int("to", 0) != ir.DataType.FLOAT:
        raise _unexpected(node, "a Cast to float32 behind it")
    known = _rounding(node.inputs[0])[1]
    own = [x for x in (product.inputs if product else ()) if x is not known]
    if len(own) != 1 or own[0] is None:
        raise _unexpected(node, "the product of both scales")
    mul.op_type = "Identity"
    mul.resize_inputs(1)
    mul.replace_input_with(0, before[-1].outputs[0])
    return own[0]


def _adding_floats(op: Emitter, node: ir.Node) -> list[ir.Node]:
    """Return the Add of a bias to integers behind a node, if there is one, which adds floats from now on.

    Files of 2021 have it, such as that of ddddocr 1.0.6: the bias is divided by both scales and rounded down, which its
    gradient passes.
    """
    readers = list(node.outputs[0].consumers())
    if [reader.op_type for reader in readers] != ["Add"]:
        return []
    add, (x,) = readers[0], [x for x in readers[0].inputs if x is not node.outputs[0]] or [None]
    made = list[ir.Node]()
    for op_type in ("Reshape", "Cast", "Floor", "Div"):
        before = None if x is None else x.producer()
        if before is not None and before.op_type == op_type:
            made.append(before)
            x = before.inputs[0]
    *reshape, cast, floor, divide = made if len(made) > 2 else [node, node, node]
    if divide.op_type != "Div" or floor.op_type != "Floor":
        raise _unexpected(node, "a bias behind it that is divided by both scales and rounded down")
    bias, scale = map(given, divide.inputs)
    fixed = STOP_GRADIENT.mark(op.Identity(scale))
    rounded = op.Floor(bias / fixed) * fixed
    floats = bias + STOP_GRADIENT.mark(op.Identity(rounded - bias))
    redirect(cast.outputs[0].uses(), floats)
    for changed in (*reshape, add):
        changed.outputs[0].type = None
        op.infer(changed)
    return [add]


def _rounding(q: Input) -> tuple[Input, Input, Input]:
    """Return what is rounded to integers, and their scale and zero point, if a node of quantization makes them."""
    node = None if q is None else q.producer()
    if node is None or node.domain or node.op_type not in (_DYNAMIC, "QuantizeLinear"):
        return None, None, None
    if node.op_type == _DYNAMIC:
        return node.inputs[0], node.outputs[1], node.outputs[2]
    return node.inputs[0], node.inputs[1], [*node.inputs, None][2]


def _rounded(op: Emitter, q: Value, zero_point: Input, by: Input = None) -> Value:
    """Return what the 8 bits of a quantizer stand for; the gradient of a range that it computes is left out.

    Args:
        q: the 8 bits.
        zero_point, by: the zero point and the scale with which the product reads them.
    """
    x, scale, zero = _rounding(q)
    if x is None or scale is None:
        raise GraphoptError(f"its input {q.name!r} is not covered: expected the output of a {_DYNAMIC}")
    if zero_point is not zero or by not in (None, scale):
        raise GraphoptError(
            f"its input {q.name!r} is not covered: expected it with the scale and the zero point of its {_DYNAMIC}"
        )
    if scale.producer() is not q.producer():
        return op.DequantizeLinear(q, scale, zero)
    for reader in x.consumers():
        if reader.op_type == "QuantizeLinear" and reader.inputs[2] is zero:
            return reader.outputs[0].consumers()[0].outputs[0]
    fixed = STOP_GRADIENT.mark(op.Identity(scale))
    return op.DequantizeLinear(op.QuantizeLinear(x, fixed, zero), fixed, zero)


def _weight(op: Emitter, w: Value, scale: Value, zero: Input, axis: int) -> Value:
    if _rounding(w)[0] is not None:  # a product of two inputs
        return _rounded(op, w, zero, scale)
    by = single(op, scale), zero and single(op, zero)
    weight = op.DequantizeLinear(_initializer(w), *by, axis=axis)
    return FOLLOWS.mark(weight) if by == (scale, zero) else weight


def _initializer(w: Value) -> Value:
    if not w.is_initializer() or w.is_graph_input():
        raise GraphoptError(f"its input {w.name!r} is not covered: expected an initializer, found a computed value")
    return w


def _unexpected(node: ir.Node, expected: str) -> GraphoptError:
    return GraphoptError(
        f"expected {expected}, as quantize_dynamic writes it, found another use of {node.outputs[0].name!r}"
    )
