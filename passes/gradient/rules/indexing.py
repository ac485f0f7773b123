"""Operators that choose elements by their positions: each gradient is added where its element came from."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.emitter import Emitter, like
from passes.gradient.registry import Gradients, rule
from passes.gradient.walk import constant_of, zeros


def positions(op: Emitter, x: Value) -> Value:
    """Return the position of each element of `x` in its flat order, in the shape of `x`."""
    shape = op.shape_of(x)
    numbers = op.Range(0, op.ReduceProd(shape, keepdims=0), 1)
    where: Value = op.Reshape(numbers, shape)
    where.shape = x.shape
    return where


def scatter_back(op: Emitter, dy: Value, where: Value, x: Value) -> Value:
    """Return the gradient of `x` where each element of `dy` belongs to the element at a flat position of `x`."""
    shape = op.shape_of(x)
    flat = op.ConstantOfShape(op.ReduceProd(shape, keepdims=1), value=ir.tensor([0], dtype=x.dtype))
    summed = op.ScatterElements(flat, op.Reshape(where, [-1]), op.Reshape(dy, [-1]), reduction="add")
    return like(op.Reshape(summed, shape), x)


@rule("Gather")
def gather(op: Emitter, dy: Value, x: Value, indices: Value, *, axis: int) -> Gradients:
    """Add rows of `dy` to rows of zeros, the gathered axis in front; one row at a known place is only padded."""
    assert x.shape is not None and indices.shape is not None
    rank, width, size, index = len(x.shape), len(indices.shape), x.shape[axis], constant_of(indices)
    axis %= rank
    if width < 2 and index is not None and index.size == 1 and isinstance(size, int):
        before = index.item() % size
        row = dy if width else op.Unsqueeze(dy, [axis])
        return [like(op.Pad(row, [before, size - 1 - before], None, [axis]), x)]
    rows: Value = op.Unsqueeze(indices, [-1])
    if axis == 0:
        return [like(op.ScatterND(zeros(op, x), rows, dy, reduction="add"), x)]
    front = [axis, *range(axis), *range(axis + 1, rank)]
    there = [*range(axis, axis + width), *range(axis), *range(axis + width, rank - 1 + width)]
    nothing = op.Transpose(zeros(op, x), perm=front)
    summed = op.ScatterND(nothing, rows, op.Transpose(dy, perm=there), reduction="add")
    return [like(op.Transpose(summed, perm=[*range(1, axis + 1), 0, *range(axis + 1, rank)]), x)]


@rule("GatherElements")
def gather_elements(op: Emitter, dy: Value, x: Value, indices: Value, *, axis: int) -> Gradients:
    return [like(op.ScatterElements(zeros(op, x), indices, dy, axis=axis, reduction="add"), x)]


@rule("GatherND")
def gather_nd(op: Emitter, dy: Value, x: Value, indices: Value, *, batch_dims: int) -> Gradients:
    if batch_dims == 0:
        return [like(op.ScatterND(zeros(op, x), indices, dy, reduction="add"), x)]
    return [scatter_back(op, dy, op.GatherND(positions(op, x), indices, batch_dims=batch_dims), x)]


@rule("TopK")
def top_k(op: Emitter, dy: Value, x: Value, k: Value, *, axis: int, node: Node) -> Gradients:
    return [like(op.ScatterElements(zeros(op, x), node.outputs[1], dy, axis=axis), x)]


@rule("Compress")
def compress(op: Emitter, dy: Value, x: Value, condition: Value, *, axis: int | None = None) -> Gradients:
    where = positions(op, x)
    return [
        scatter_back(op, dy, op.Compress(where, condition, **({} if axis is None else {"axis": axis})), x)
    ]


@rule("ScatterElements")
def scatter_elements(
    op: Emitter, dy: Value, x: Value, indices: Value, updates: Value, *, y: Value, axis: int, reduction: str
) -> Gradients:
    def scatter(base: Value, values: Value, reduction: str = "none") -> Value:
        return like(op.ScatterElements(base, indices, values, axis=axis, reduction=reduction), x)

    def gather(values: Value) -> Value:
        return like(op.GatherElements(values, indices, axis=axis), updates)

    return scattered(op, dy, x, updates, y, reduction, scatter, gather)


@rule("ScatterND")
def scatter_nd(
    op: Emitter, dy: Value, x: Value, indices: Value, updates: Value, *, y: Value, reduction: str
) -> Gradients:
    def scatter(base: Value, values: Value, reduction: str = "none") -> Value:
        return like(op.ScatterND(base, indices, values, reduction=reduction), x)

    def gather(values: Value) -> Value:
        return like(op.GatherND(values, indices), updates)

    return scattered(op, dy, x, updates, y, reduction, scatter, gather)


def scattered(
    op: Emitter,
    dy: Value,
    x: Value,
    updates: Value,
    y: Value,
    reduction: str,
    scatter: Callable[..., Value],
    gather: Callable[[Value], Value],
) -> Gradients:
    """Differentiate a scatter: what an update replaces gets nothing; equal extremes share; no factor of mul may be 0."""
    if reduction == "none":
        return [scatter(dy, zeros(op, updates)), gather(dy)]
    if reduction == "add":
        return [dy, gather(dy)]
    if reduction == "mul":
        product = dy * y
        return [product / x, gather(product) / updates]
    kept, taken = op.Cast(op.Equal(x, y), to=x.dtype), op.Cast(op.Equal(updates, gather(y)), to=x.dtype)
    share = dy / op.Max(scatter(kept, taken, "add"), 1.0)
    return [share * kept, gather(share) * taken]
