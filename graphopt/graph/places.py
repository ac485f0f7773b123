"""Emit the flat places of elements: their numbers in an array that is read as one axis."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.emitter import Emitter


def flat_places(op: Emitter, shape: ir.Value) -> ir.Value:
    """Emit the place of each element of an array of a shape, in this shape."""
    where: ir.Value = op.Reshape(op.Range(0, op.ReduceProd(shape, keepdims=0), 1), shape)
    return where


def flat_places_of_rows(op: Emitter, shape: ir.Value, rows: ir.Value, axes: int, rank: int) -> ir.Value:
    """Emit the places of the elements of rows, [rows, elements of a row]; of single elements, their numbers.

    Args:
        shape: the shape of the array, of `rank` axes.
        rows: int64, any shape: the number of each row among the rows, which the first `axes` axes count.
    """
    where: ir.Value = op.Reshape(rows, [-1, 1])
    if axes < rank:
        width = op.ReduceProd(op.Slice(shape, [axes], [rank]), keepdims=0)
        where = op.Add(op.Mul(where, width), op.Range(0, width, 1))
    return where
