"""Gather packed rows of frozen tables, and dequantize these, in place of rows of the whole table in full precision."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.packed import gathered
from graphopt.graph.postprocessing import DEQUANTIZE
from graphopt.graph.values import (
    bytes_of,
    constant_of,
    dims_of,
    dtype_of,
    given,
    is_read,
    producer_of,
    rank,
    swap,
)

SMALL = 1024  # bytes of a weight in full precision that need not be saved
_BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT8: 8, ir.DataType.UINT8: 8}


def dequantizes_frozen(node: ir.Node) -> bool:
    """Return whether a node dequantizes a frozen weight that is not small."""
    x = node.inputs[0] if node.op_type == DEQUANTIZE and node.domain == "" else None
    if x is None or not x.is_initializer() or x.is_graph_input():
        return False
    return bytes_of(node.outputs[0]) > SMALL


def gather_packed_rows(model: ir.Model) -> bool:
    """Replace each Gather of rows of a dequantized table by one of its integers; return whether there is one.

    The numbers are the same.
    """
    gathers = [node for node in model.graph if _gathers_packed(node)]
    for node in gathers:
        source = producer_of(given(node.inputs[0]))
        with Emitter(model) as op, op.before(node):
            rows = _rows(op, node, source)
        if (last := rows.producer()) is not None:
            metadata.copy(node, last)
        swap(node.outputs[0], rows)
        model.graph.remove(node, safe=True)
        if not is_read(source.outputs[0]):
            model.graph.remove(source, safe=True)
    return bool(gathers)


def _gathers_packed(node: ir.Node) -> bool:
    """Return whether a node gathers from a frozen table of 4 or 8 bits, along an axis that cuts no bytes or blocks."""
    source = node.inputs[0].producer() if node.op_type == "Gather" and node.inputs[0] is not None else None
    if node.domain or source is None or not dequantizes_frozen(source) or "output_dtype" in source.attributes:
        return False
    table, scale, zeros = given(source.inputs[0]), given(source.inputs[1]), source.inputs[2:]
    bits, axis = _BITS.get(dtype_of(table)), _axis(node, table, 0)
    if bits is None or scale.shape is None or any(constant_of(x) is None for x in zeros if x is not None):
        return False
    if bits < 8 and axis == rank(table) - 1:
        return False
    return not _block(source) or axis != _axis(source, table, 1)


def _rows(op: Emitter, node: ir.Node, source: ir.Node) -> ir.Value:
    """Emit (x - zero) * scale for the rows of a table, in the type of the scale, as DequantizeLinear does."""
    table, scale, indices = given(source.inputs[0]), given(source.inputs[1]), given(node.inputs[1])
    zero = constant_of(source.inputs[2]) if len(source.inputs) > 2 else None
    axis, along, dtype = _axis(node, table, 0), _axis(source, table, 1), dtype_of(table)

    def beside(x: ir.Value) -> ir.Value:
        """Return scales or zero points of the rows, in a shape that broadcasts with them."""
        if rank(x) == 0 or list(dims_of(x)) == [1]:
            return x
        if block := _block(source):
            blocks = op.constant(np.arange(table.shape.numpy()[along]) // block)  # type: ignore[union-attr]
            place = along + (rank(indices) - 1) * (along > axis)
            return op.Gather(op.Gather(x, indices, axis=axis), blocks, axis=place)
        if along == axis:
            x = op.Gather(x, indices, axis=0)
        after = rank(table) - 1 - along + (rank(indices) - 1) * (along < axis)
        return op.Unsqueeze(x, [*range(rank(x), rank(x) + after)]) if after else x

    is_packed = _BITS[dtype] < 8
    rows = gathered(op, table, indices, axis, 4) if is_packed else op.Gather(table, indices, axis=axis)
    numbers = op.Cast(rows, to=scale.dtype)
    if dtype is ir.DataType.INT4:  # which come as numbers from 0 to 15, whose middle is 8
        numbers = numbers - 8.0
    if zero is not None and zero.any():
        numbers = numbers - beside(op.constant(zero.astype(dtype_of(scale).numpy())))
    return numbers * beside(scale)


def _axis(node: ir.Node, table: ir.Value, default: int) -> int:
    return node.attributes.get_int("axis", default) % max(1, rank(table))


def _block(source: ir.Node) -> int:
    return source.attributes.get_int("block_size", 0)
