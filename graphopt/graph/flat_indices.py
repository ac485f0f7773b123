"""Emit flat indices: the position of each element in the array read as one axis."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.emitter import Emitter


def flat_indices(op: Emitter, shape: ir.Value) -> ir.Value:
    """Emit the flat index of each element of an array of a shape, in this shape."""
    index: ir.Value = op.Reshape(op.Range(0, op.ReduceProd(shape, keepdims=0), 1), shape)
    return index


def flat_indices_of_rows(op: Emitter, shape: ir.Value, rows: ir.Value, axes: int, rank: int) -> ir.Value:
    """Emit the flat indices of the elements of some rows, [rows, elements of a row].

    If a row is one element, this is the row's own index.

    Args:
        shape: the shape of the array, of `rank` axes.
        rows: int64, any shape: the index of each row among the rows, which the first `axes` axes count.
    """
    index: ir.Value = op.Reshape(rows, [-1, 1])
    if axes < rank:
        width = op.ReduceProd(op.Slice(shape, [axes], [rank]), keepdims=0)
        index = op.Add(op.Mul(index, width), op.Range(0, width, 1))
    return index
