"""Differentiate Resize by one matrix per axis, obtained by resizing an identity matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import constant_of, dims_of, like, rank
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.linear import identity, transpose


@rule("Resize")
def resize(
    op: Emitter,
    dy: Value,
    x: Value,
    roi: Input = None,
    scales: Input = None,
    sizes: Input = None,
    *,
    y: Value,
    node: Node,
    axes: list[int] | None = None,
    keep_aspect_ratio_policy: str,
) -> Gradients:
    """Differentiate y = A x B' along every two axes: dx = A' dy B."""
    left_out = ("axes", "extrapolation_value", "keep_aspect_ratio_policy")
    attributes = {name: value for name, value in node.attributes.items() if name not in left_out}
    roi, scales, axes = _present(roi), _present(scales), list(axes or range(rank(x)))
    known = constant_of(scales)
    in_proportion = keep_aspect_ratio_policy != "stretch"
    cropped = "coordinate_transformation_mode" in attributes and roi is not None
    for i, axis in enumerate(axes):
        if not cropped and not in_proportion and _is_unchanged(x, scales, sizes, i, axis):
            continue
        square = identity(op, x, axis)
        if in_proportion and sizes is not None:
            policy = {"keep_aspect_ratio_policy": keep_aspect_ratio_policy}
            matrix = _in_proportion(op, square, x, sizes, i, axes, **attributes | policy)
        else:
            part = roi and op.Gather(roi, [i, i + len(axes)])
            size = op.shape_of(y, axis, axis + 1) if scales is None else None
            scale = scales and (op.Gather(scales, [i]) if known is None else op.constant(known[i : i + 1]))
            matrix = _along(op, square, part, scale, size, _copies(op, x, y), **attributes)
        matrix.shape = ir.Shape([dims_of(x)[axis], None])
        dy = contracted(op, dy, matrix, axis)
    return [like(dy, x)]


def _present(x: Input) -> Value | None:
    """Return an optional input, or None if it is an empty tensor."""
    return None if x is None or (x.shape is not None and x.shape == (0,)) else x


def _is_unchanged(x: Value, scales: Input, sizes: Input, i: int, axis: int) -> bool:
    """Return whether an axis is known to keep its size."""
    known = constant_of(sizes if scales is None else scales)
    return known is not None and bool(known[i] == (dims_of(x)[axis % rank(x)] if scales is None else 1))


def _copies(op: Emitter, x: Value, y: Value) -> Value:
    """Return how many times each row of a matrix is repeated: twice if any axis changes its size, otherwise once."""
    if all(isinstance(dim, int) for dim in (*dims_of(x), *dims_of(y))):
        return op.constant([1 + (dims_of(x) != dims_of(y))])
    changed = op.Cast(op.Not(op.Equal(op.Shape(x), op.Shape(y))), to=ir.DataType.INT64)
    return op.Unsqueeze(op.ReduceMax(changed, keepdims=0), [0]) + 1


def _along(
    op: Emitter, square: Value, roi: Input, scale: Input, size: Input, copies: Value, **attributes: Any
) -> Value:
    """Resize a matrix along its second axis.

    ONNX Runtime copies its input if the output has the same shape, even if a scale is not 1. The rows get a second
    axis, whose size changes exactly if the model's own Resize computes instead of copying.
    """
    rows = op.Unsqueeze(square, [1, 2])
    if roi is not None:
        begin, end = op.Split(roi, num_outputs=2, _outputs=2)
        roi = op.Concat(op.CastLike([0.0], roi), begin, op.CastLike([1.0], roi), end, axis=0)
    if scale is not None:
        first, second = constant_of(copies), constant_of(scale)
        if first is not None and second is not None:
            scale = op.constant(np.concatenate([first, second]), like=scale)
        else:
            scale = op.Concat(op.CastLike(copies, scale), scale, axis=0)
    if size is not None:
        size = op.Concat(copies, size, axis=0)
    resized = op.Resize(rows, roi, scale, size, axes=[2, 3], **attributes)
    return op.Squeeze(op.Slice(resized, [0], [1], [2]), [1, 2])


def _in_proportion(
    op: Emitter, square: Value, x: Value, sizes: Value, i: int, axes: Sequence[int], **attributes: Any
) -> Value:
    """Resize a matrix along its second axis if all axes share one scale."""
    others = [1 + j for j in range(len(axes)) if j != i]
    counts = op.Concat([-1], op.Gather(op.shape_of(x), list(axes)), axis=0)
    whole = op.Expand(op.Unsqueeze(square, others), op.Max(counts, 1))
    resized = op.Resize(whole, None, None, sizes, axes=[*range(1, 1 + len(axes))], **attributes)
    first = [0] * len(others)
    return op.Squeeze(op.Slice(resized, first, [1] * len(others), others), others)


def contracted(op: Emitter, dy: Value, matrix: Value, axis: int) -> Value:
    """Multiply an axis of `dy` by a matrix from the right."""
    last = rank(dy) - 1
    axis %= last + 1
    if axis == last:
        return op.MatMul(dy, transpose(op, matrix))
    swap = [*range(last + 1)]
    swap[axis], swap[last] = last, axis
    return op.Transpose(op.MatMul(op.Transpose(dy, perm=swap), transpose(op, matrix)), perm=swap)
