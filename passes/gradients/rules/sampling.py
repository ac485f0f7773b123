"""Differentiate sampling between pixels: gather the pixels around a position and weight them.

Jaderberg et al., Spatial Transformer Networks, https://arxiv.org/abs/1506.02025. Each row contains all channels of one
pixel, so that one Gather reads all pixels, and one ScatterElements adds their gradients. The weights have gradients
too. A Resize multiplies each axis by one matrix, obtained by resizing an identity matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import constant_of, dims_of, dtype_of, like, rank
from graphopt.graph.windows import window_of
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.elementwise import mask
from passes.gradients.rules.linear import identity, transpose
from passes.gradients.rules.shape import constant_size, elements_along, indices_along, reshape_like
from passes.gradients.rules.windows import taps_of
from passes.gradients.walk import expansion

_Number = Value | float

# For each mode: the first pixel relative to the one before the position, and for each pixel the coefficients of its
# weight, a polynomial of the distance from the pixel before the position.
# Cubic: Keys, https://doi.org/10.1109/TASSP.1981.1163711, a = -0.75.
TAPS: dict[str, tuple[int, list[list[float]]]] = {
    "nearest": (0, [[1]]),
    "linear": (0, [[1, -1], [0, 1]]),
    "cubic": (-1, [[0, -0.75, 1.5, -0.75], [1, 0, -2.25, 1.25], [0, 0.75, 1.5, -1.25], [0, 0, -0.75, 0.75]]),
}


def sampled(
    op: Emitter,
    x: Value,
    batch: Value,
    at: Sequence[Value],
    mode: str = "linear",
    padding: str = "border",
    borders: Sequence[tuple[_Number, _Number]] = (),
) -> Value:
    """Return the weighted pixels of `x` around positions, of shape (pixels along each axis, positions, channels).

    The positions `at` along each spatial axis, in pixels, broadcast with their indices in the batch. Outside the image,
    `padding` is `zeros`, the pixel at the `border`, or a `reflection` between `borders`.
    """
    axes = [0, *range(2, rank(x)), 1]
    rows = op.Reshape(op.Transpose(x, perm=axes), op.Concat([-1], op.shape_of(x, 1, 2), axis=0))
    if mode not in TAPS:
        raise GraphoptError(unknown("mode", mode, TAPS))
    first, coefficients = TAPS[mode]
    row, weight = batch, None
    for i, position in enumerate(at):
        start = op.Round(position) if mode == "nearest" else op.Floor(position)
        shape = [-1, *[1] * (rank(position) + i)]
        steps = np.arange(first, first + len(coefficients)).reshape(shape)
        pixel = _spread(op, start, i) + op.constant(steps, like=position)
        share = polynomial(op, _spread(op, position - start, i), np.array(coefficients), shape)
        if padding == "zeros":
            last = extent(op, x, i, position) - 1
            inside = mask(op, op.And(op.GreaterOrEqual(pixel, 0.0), op.LessOrEqual(pixel, last)), position)
            share = inside if share is None else share * inside
        elif padding == "reflection":
            pixel = reflected(op, pixel, *borders[i])
        size = op.shape_of(x, 2 + i, 3 + i)
        index = op.Max(op.Min(op.Cast(pixel, to=ir.DataType.INT64), size - 1), 0)
        row = row * size + index
        weight = share if weight is None or share is None else weight * share
    pixels: Value = op.Gather(rows, row, axis=0)
    return pixels if weight is None else pixels * op.Unsqueeze(op.CastLike(weight, x), [-1])


def _spread(op: Emitter, value: Value, axes: int) -> Value:
    """Insert axes before those of `value`."""
    return op.Unsqueeze(value, [*range(axes)]) if axes else value


def polynomial(op: Emitter, t: Value, coefficients: np.ndarray, shape: Sequence[int]) -> Value | None:
    """Return polynomials of `t` stacked along a first axis, lowest degree first, or None if all are 1."""
    if coefficients.shape[1] == 1:
        return None
    *lower, total = (op.constant(column.reshape(shape), like=t) for column in coefficients.T)
    for column in reversed(lower):
        total = total * t + column
    return total


def extent(op: Emitter, x: Value, axis: int, position: Value) -> _Number:
    """Return the number of pixels of `x` along a spatial axis, in the precision of positions."""
    count = op.count(x, [2 + axis])
    return op.Cast(count, to=position.dtype) if isinstance(count, Value) else count


def reflected(op: Emitter, position: Value, low: _Number, high: _Number) -> Value:
    """Reflect positions at both borders until they lie inside: a triangle wave."""
    span = high - low
    turn = op.Abs(op.Mod(position - low, 2 * span, fmod=1))
    return low + span - op.Abs(turn - span)


@expansion("GridSample")
def grid_sample(
    op: Emitter, x: Value, grid: Value, *, y: Value, mode: str, padding_mode: str, align_corners: int
) -> list[Value]:
    """Map positions from [-1, 1], last axis first, to pixels, and differentiate the sampling there."""
    count = rank(x) - 2
    at, borders = [], []
    for i, part in enumerate(reversed(elements_along(op, op.Reshape(grid, [0, -1, count]), count, -1))):
        size = extent(op, x, i, grid)
        low, high = (0.0, size - 1) if align_corners else (-0.5, size - 0.5)
        position = low + (part + 1) * ((high - low) / 2)
        if padding_mode == "reflection" and mode != "nearest":
            position = reflected(op, position, low, high)
        at.append(position)
        borders.append((low, high))
    batch = indices_along(op, x, 0, 1)
    terms = sampled(op, x, batch, at, mode, padding_mode, borders)
    total = op.Transpose(op.ReduceSum(terms, [*range(count)], keepdims=0), perm=[0, 2, 1])
    return [reshape_like(op, total, y)]


@rule("AffineGrid")
def affine_grid(op: Emitter, dy: Value, theta: Value, size: Value, *, align_corners: int) -> Gradients:
    """Differentiate y = (p 1) theta' for each grid position p, which AffineGrid returns for the identity."""
    count = rank(dy) - 2
    identity = op.constant(np.eye(count, count + 1)[None], like=theta)
    single = op.Concat([1], op.Slice(size, [1], [2 + count]), axis=0)
    grid = op.Reshape(op.AffineGrid(identity, single, align_corners=align_corners), [-1, count])
    rows = op.Reshape(dy, op.Concat(op.shape_of(dy, 0, 1), [-1, count], axis=0))
    shift = op.Unsqueeze(op.ReduceSum(rows, [1], keepdims=0), [2])
    linear = op.MatMul(op.Transpose(rows, perm=[0, 2, 1]), grid)
    return [like(op.Concat(linear, shift, axis=2), theta)]


@expansion("RoiAlign")
def roi_align(
    op: Emitter, x: Value, rois: Value, batch: Value, *, mode: str, sampling_ratio: int, **where: Any
) -> list[Value]:
    """Average, or take the maximum of, the samples of each bin (He et al., Mask R-CNN, https://arxiv.org/abs/1703.06870).

    As in ONNX, the maximum is over weighted pixels. Without a sampling ratio, each region has as many samples as a bin
    has pixels. Regions with fewer samples repeat the last one with weight 0.
    """
    aligned = where["coordinate_transformation_mode"] == "half_pixel"
    scaled = rois * where["spatial_scale"] - (0.5 if aligned else 0.0)
    corners = op.Split(scaled, num_outputs=4, axis=1, _outputs=4)
    at, shares, bins = [], [], (where["output_height"], where["output_width"])
    for i in range(2):
        begin, end = corners[1 - i], corners[3 - i]
        length = end - begin if aligned else op.Max(end - begin, 1.0)
        step = op.Unsqueeze(length / bins[i], [2])
        if sampling_ratio:
            count: _Number = float(sampling_ratio)
            sample = op.constant(np.arange(constant_size(sampling_ratio))[None, None], like=rois)
            share = None
        else:
            count = op.Ceil(step)
            most = op.Cast(op.ReduceMax(count, keepdims=0), to=ir.DataType.INT64)
            sample = op.Cast(_spread(op, op.Range(0, op.Max(most, 1), 1), 2), to=rois.dtype)
            share = mask(op, op.Less(sample, count), rois)
            count = op.Max(count, 1.0)
            sample = op.Min(sample, count - 1)
        number = op.constant(np.arange(bins[i])[None, :, None], like=rois)
        position = op.Unsqueeze(begin, [2]) + (number + (sample + 0.5) / count) * step
        size = extent(op, x, i, rois)
        inside = mask(op, op.And(op.GreaterOrEqual(position, -1.0), op.LessOrEqual(position, size)), rois)
        if mode == "avg":
            inside = inside / count if share is None else inside * (share / count)
        elif share is not None:
            inside = inside * op.ReduceMax(share, [2])
        flat = op.Concat(op.Shape(rois, start=0, end=1), [-1, 1] if i == 0 else [1, -1], axis=0)
        at.append(op.Reshape(op.Clip(position, 0.0, size - 1), flat))
        shares.append(op.Reshape(inside, flat))
    image = op.Unsqueeze(op.Cast(batch, to=ir.DataType.INT64), [1, 2])
    terms = sampled(op, x, image, at) * op.CastLike(op.Unsqueeze(shares[0] * shares[1], [-1]), x)
    reduce = op.ReduceSum if mode == "avg" else op.ReduceMax
    split = op.Concat(
        op.Shape(rois, start=0, end=1),
        [bins[0], -1, bins[1]],
        op.Shape(sample, start=2),
        op.shape_of(x, 1, 2),
        axis=0,
    )
    pixels = op.Reshape(reduce(terms, [0, 1], keepdims=0), split)
    return [op.Transpose(reduce(pixels, [2, 4], keepdims=0), perm=[0, 3, 1, 2])]


@expansion("MaxRoiPool")
def max_roi_pool(op: Emitter, x: Value, rois: Value, *, pooled_shape: list[int], spatial_scale: float) -> list[Value]:
    """Take the first maximum of each bin, one axis at a time (Girshick, Fast R-CNN, https://arxiv.org/abs/1504.08083)."""
    batch, *corners = op.Split(rois, num_outputs=5, axis=1, _outputs=5)
    largest = op.Gather(x, op.Squeeze(op.Cast(batch, to=ir.DataType.INT64), [1]), axis=0)
    empty = op.constant(dtype_of(x).min, like=x)
    for i, bins in ((1, pooled_shape[1]), (0, pooled_shape[0])):
        ends = corners[1 - i], corners[3 - i]
        begin, end = (op.Floor(corner * spatial_scale + 0.5) for corner in ends)  # halves round up, as in C
        step = op.Max(end - begin + 1, 1.0) / bins
        number = op.constant(np.arange(bins)[None], like=rois)
        first, last = begin + op.Floor(number * step), begin + op.Ceil((number + 1) * step)
        pixel = op.Cast(indices_along(op, x, 2 + i), to=rois.dtype)
        first, last = op.Unsqueeze(first, [2]), op.Unsqueeze(last, [2])
        inside = op.And(op.GreaterOrEqual(pixel, first), op.Less(pixel, last))
        spread_over, axis = ([1, 2], 3) if i else ([1, 4], 2)
        values = op.Where(op.Unsqueeze(inside, spread_over), op.Unsqueeze(largest, [axis]), empty)
        axis = 4 if i else 3
        largest = op.Squeeze(op.GatherElements(values, op.ArgMax(values, axis=axis), axis=axis), [axis])
    return [op.Where(op.Equal(largest, empty), op.CastLike(0.0, x), largest)]


@expansion("DeformConv")
def deform_conv(
    op: Emitter, x: Value, w: Value, offset: Value, *optional: Input, y: Value, node: Node, **groups: object
) -> list[Value]:
    """Compute the product of sampled pixels (Dai et al., Deformable Convolutional Networks, https://arxiv.org/abs/1703.06211)."""
    group = groups["group"]
    bias, weights = (*optional, None, None)[:2]
    count, window = rank(x) - 2, window_of(node, taps_of(x, node, w))
    taps, out = math.prod(window.kernel), op.shape_of(offset, 2)
    constant_size(count, taps)
    steps = np.indices(window.kernel).reshape(count, taps, *[1] * count)
    parts = elements_along(op, op.Reshape(offset, op.Concat([-1, taps, count], out, axis=0)), count, 2)
    at = []
    for i, part in enumerate(parts):
        first = window.strides[i] * indices_along(op, offset, 2 + i, count - 1 - i)
        start = first + op.constant(steps[i] * window.dilations[i] - window.begin[i])
        at.append(part + op.Cast(start, to=offset.dtype))
    channels = op.Concat([-1], op.shape_of(x, 1, 2) / groups["offset_group"], op.shape_of(x, 2), axis=0)
    grouped = op.Reshape(x, channels)
    batch = indices_along(op, grouped, 0, 1 + count)
    pixels = op.ReduceSum(sampled(op, grouped, batch, at, padding="zeros"), [*range(count)], keepdims=0)
    if weights is not None:
        pixels = pixels * op.Reshape(weights, op.Concat([-1, taps], out, [1], axis=0))
    columns = op.Reshape(
        op.Transpose(pixels, perm=[0, count + 2, *range(1, count + 2)]),
        op.Concat(op.shape_of(x, 0, 1), [group], op.shape_of(w, 1, 2) * taps, [-1], axis=0),
    )
    rows = op.Reshape(w, op.Concat([group, -1], op.shape_of(w, 1, 2) * taps, axis=0))
    total = reshape_like(op, op.MatMul(rows, columns), y)
    return [total if bias is None else total + op.Unsqueeze(bias, [*range(1, 1 + count)])]


@rule("Resize")
def resize(
    op: Emitter, dy: Value, x: Value, *optional: Input, y: Value, node: Node, keep_aspect_ratio_policy: str
) -> Gradients:
    """Differentiate y = A x B' along every two axes: dx = A' dy B."""
    left_out = ("axes", "extrapolation_value", "keep_aspect_ratio_policy")
    attributes = {name: value for name, value in node.attributes.items() if name not in left_out}
    roi, scales, sizes = ((*optional, None, None)[i] for i in range(3))
    roi, scales, axes = _present(roi), _present(scales), node.attributes.get_ints("axes", [*range(rank(x))])
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
    op: Emitter, square: Value, roi: Input, scale: Input, size: Input, copies: Value, **attributes: object
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
    op: Emitter, square: Value, x: Value, sizes: Value, i: int, axes: Sequence[int], **attributes: object
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
