"""Write rounding to integers and back as arithmetic that clusters compute together with what is around it."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import dtype_of, like, rank, swap

_INTEGERS = (ir.DataType.INT4, ir.DataType.INT8, ir.DataType.UINT4, ir.DataType.UINT8)


def write_out_rounding(model: ir.Model) -> None:
    """Replace each QuantizeLinear of float32 and the DequantizeLinear that reads it by arithmetic of floats.

    All numbers are whole and less than 2^24 once they are clipped, so that float32 has them exactly.
    """
    with Emitter(model) as op:
        for node in list(model.graph):
            quantizer = _quantizer(node)
            if quantizer is None:
                continue
            x, scale, zero = [*quantizer.inputs, None][:3]
            assert x is not None and scale is not None
            dtype = dtype_of(quantizer.outputs[0])
            steps = _along(op, quantizer, x, scale)
            numbers = op.Round(x / steps)
            if zero is None:
                numbers = op.Clip(numbers, float(dtype.min), float(dtype.max))
            else:
                point = _along(op, quantizer, x, op.Cast(zero, to=ir.DataType.FLOAT))
                numbers = op.Clip(numbers + point, float(dtype.min), float(dtype.max)) - point
            y = node.outputs[0]
            swap(y, like(numbers * steps, y))
            model.graph.remove([quantizer, node], safe=True)
    model.graph.sort()


def _quantizer(node: ir.Node) -> ir.Node | None:
    """Return the QuantizeLinear whose integers a DequantizeLinear alone reads, by the same scale."""
    if node.op_type != "DequantizeLinear" or node.domain or node.inputs[0] is None:
        return None
    integers, before = node.inputs[0], node.inputs[0].producer()
    if before is None or before.op_type != "QuantizeLinear" or before.domain or before.graph is not node.graph:
        return None
    x = before.inputs[0]
    same = [*before.inputs[1:]] == [*node.inputs[1:]]
    axes = [each.attributes.get_int("axis", 1) for each in (before, node)]
    is_plain = not before.attributes.get_int("block_size", 0) and axes[0] == axes[1]
    if not (same and is_plain) or x is None or x.dtype is not ir.DataType.FLOAT or x.shape is None:
        return None
    alone = len(integers.uses()) == 1 and not integers.is_graph_output()
    return before if alone and integers.dtype in _INTEGERS and before.inputs[1].shape is not None else None  # type: ignore[union-attr]


def _along(op: Emitter, quantizer: ir.Node, x: ir.Value, numbers: ir.Value) -> ir.Value:
    """Emit a scale or a zero point in a form that broadcasts to what is rounded."""
    if rank(numbers) == 0:
        return numbers
    axis = quantizer.attributes.get_int("axis", 1) % rank(x)
    following = range(1, rank(x) - axis)
    return op.Unsqueeze(numbers, [*following]) if following else numbers
