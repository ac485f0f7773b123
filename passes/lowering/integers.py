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
from graphopt.graph.values import rank
from passes.lowering.registry import freeze, lowers, plus

_DYNAMIC = "DynamicQuantizeLinear"


@lowers("MatMulInteger", domain="")
def mat_mul_integer(
    op: Emitter, a: Value, b: Value, a_zero_point: Input = None, b_zero_point: Input = None, *, node: ir.Node
) -> Value:
    scale = _scale_of(node)
    return op.MatMul(_rounded(op, a), _weight(op, b, scale, b_zero_point, rank(b) - 1))


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
    return op.Conv(_rounded(op, x), _weight(op, w, scale, w_zero_point, 0), **window)


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
    return plus(op.MatMul(_rounded(op, a), _weight(op, b, b_scale, b_zero_point, rank(b) - 1)), bias)


@lowers("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_mat_mul(
    op: Emitter, a: Value, b: Value, b_scale: Value, b_zero_point: Input = None, bias: Input = None
) -> Value:
    q, *_ = op.DynamicQuantizeLinear(a, _outputs=3)
    return plus(op.MatMul(_rounded(op, q), _weight(op, b, b_scale, b_zero_point, rank(b) - 1)), bias)


def _scale_of(node: ir.Node) -> Value:
    """Return the scale of the weight of a node, by which the Mul behind it multiplies; that Mul becomes a copy."""
    y = node.outputs[0]
    for op_type in ("Cast", "Mul"):
        readers = list(y.consumers())
        if len(readers) != 1 or readers[0].op_type != op_type or y.is_graph_output():
            raise _unexpected(node, f"one {op_type} behind it")
        y = readers[0].outputs[0]
    (scales,) = [
        x for x in readers[0].inputs if x is None or x.producer() is None or x.producer().op_type != "Cast"
    ] or [None]  # type: ignore[union-attr]
    product = None if scales is None else scales.producer()
    dynamic = node.inputs[0].producer()  # type: ignore[union-attr]
    parts = [] if product is None or product.op_type != "Mul" else list(product.inputs)
    own = [x for x in parts if dynamic is None or x is not dynamic.outputs[1]]
    if len(parts) != 2 or len(own) != 1 or own[0] is None:
        raise _unexpected(node, "the product of both scales")
    mul = readers[0]
    mul.op_type = "Identity"
    mul.resize_inputs(1)
    mul.replace_input_with(0, node.outputs[0])
    return own[0]


def _rounded(op: Emitter, q: Value) -> Value:
    """Return what 8 bits of the output of a DynamicQuantizeLinear stand for; the gradient of its range is left out."""
    node = q.producer()
    x = None if node is None or node.op_type != _DYNAMIC else node.inputs[0]
    if node is None or x is None:
        raise GraphoptError(f"its input {q.name!r} is not covered: expected the output of a {_DYNAMIC}")
    _, scale, zero = node.outputs
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
