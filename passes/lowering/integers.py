"""Lower products of integers that `onnxruntime.quantization.quantize_dynamic` writes, beside which adapters train.

The input is rounded to 8 bits by its own range, the weight is stored in 8 bits, and their product is scaled. The file's
numbers come from DequantizeLinear here, and the gradient passes the rounding straight through: dx = dy (w s)^T.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import IN_INTEGERS, STOP_GRADIENT
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.values import given, rank
from passes.lowering.registry import freeze, lowers, plus

_DYNAMIC = "DynamicQuantizeLinear"


@lowers("MatMulInteger", domain="")
def mat_mul_integer(
    op: Emitter, a: Value, b: Value, a_zero_point: Input = None, b_zero_point: Input = None, *, node: ir.Node
) -> Value:
    scale = _scale_of(node)
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
    scale = _scale_of(node)
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


def _scale_of(node: ir.Node) -> Value:
    """Return the scale of the weight of a node, by which the Mul behind it multiplies; that Mul becomes a copy."""
    dynamic, behind = given(node.inputs[0]).producer(), [node]
    for op_type in ("Cast", "Mul"):
        readers = list(behind[-1].outputs[0].consumers())
        if [reader.op_type for reader in readers] != [op_type] or behind[-1].outputs[0].is_graph_output():
            raise _unexpected(node, f"one {op_type} behind it")
        behind += readers
    _, cast, mul = behind
    scales = [x.producer() for x in mul.inputs if x is not None and x is not cast.outputs[0]]
    product = scales[0] if scales and scales[0] is not None and scales[0].op_type == "Mul" else None
    if cast.attributes.get_int("to", 0) != ir.DataType.FLOAT:
        raise _unexpected(node, "a Cast to float32 behind it")
    own = [x for x in (product.inputs if product else ()) if dynamic is None or x is not dynamic.outputs[1]]
    if len(own) != 1 or own[0] is None:
        raise _unexpected(node, "the product of both scales")
    mul.op_type = "Identity"
    mul.resize_inputs(1)
    mul.replace_input_with(0, node.outputs[0])
    return own[0]


def _rounded(op: Emitter, q: Value, zero_point: Input, by: Input = None) -> Value:
    """Return what the 8 bits of a DynamicQuantizeLinear stand for; the gradient of its range is left out.

    Args:
        q: the 8 bits.
        zero_point, by: the zero point and the scale with which the product reads them.
    """
    node = q.producer()
    x = None if node is None or node.op_type != _DYNAMIC else node.inputs[0]
    if node is None or x is None:
        raise GraphoptError(f"its input {q.name!r} is not covered: expected the output of a {_DYNAMIC}")
    _, scale, zero = node.outputs
    if zero_point is not zero or by not in (None, scale):
        raise GraphoptError(
            f"its input {q.name!r} is not covered: expected it with the scale and the zero point of its {_DYNAMIC}"
        )
    for reader in x.consumers():
        if reader.op_type == "QuantizeLinear" and reader.inputs[2] is zero:
            return reader.outputs[0].consumers()[0].outputs[0]
    fixed = STOP_GRADIENT.mark(op.Identity(scale))
    return op.DequantizeLinear(op.QuantizeLinear(x, fixed, zero), fixed, zero)


def _weight(op: Emitter, w: Value, scale: Value, zero: Input, axis: int) -> Value:
    if not w.is_initializer() or w.is_graph_input():
        raise GraphoptError(
            f"its input {w.name!r} is not covered: expected an initializer, found a computed value"
        )
    IN_INTEGERS.set(freeze(w))
    one = scale.const_value is not None and scale.const_value.size == 1
    if one and rank(scale):
        scale, zero = op.Squeeze(freeze(scale)), zero and op.Squeeze(zero)
    return op.DequantizeLinear(w, freeze(scale), zero, axis=axis)


def _unexpected(node: ir.Node, expected: str) -> GraphoptError:
    return GraphoptError(
        f"expected {expected}, as quantize_dynamic writes it, found another use of {node.outputs[0].name!r}"
    )
