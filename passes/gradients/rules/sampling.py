"""Differentiate sampling between pixels: gather the pixels around a position and weight them.

Jaderberg et al., Spatial Transformer Networks, https://arxiv.org/abs/1506.02025. Each row contains all channels of one
pixel, so that one Gather reads all pixels and its gradient is one ScatterND. The weights have gradients too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import like, rank
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.convolution import window_of
from passes.gradients.rules.elementwise import mask
from passes.gradients.rules.expansion import expansion
from passes.gradients.rules.shape import constant_size, reshape_like

_Number = Value | float

# For each mode: the first pixel relative to the one before the position, and for each pixel the coefficients of its
# weight, a polynomial of the distance from the pixel before the position.
# Cubic: Keys, https://doi.org/10.1109/TASSP.1981.1163711, a = -0.75.
TAPS: dict[str, tuple[int, list[list[float]]]] = {
    "nearest": (0, [[1]]),
    "linear": (0, [[1, -1], [0, 1]]),
    "cubic": (
        -1,
        [[0, -0.75, 1.5, -0.75], [1, 0, -2.25, 1.25], [0, 0.75, 1.5, -1.25], [0, 0, -0.75, 0.75]],
    ),
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

    Args:
        x: the image, with axes batch, channels and space.
        batch: the batch index of each position.
        at: the positions along each spatial axis, in pixels. They broadcast with `batch`.
        padding: the value outside the image: `zeros`, the pixel at the `border`, or a `reflection` between `borders`.
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


def _numbers(op: Emitter, count: Value, *, axes: int) -> Value:
    """Return 0, 1, 2, ... up to a count, with trailing axes of size 1."""
    row: Value = op.Range(0, count, 1)
    return op.Unsqueeze(row, [*range(1, 1 + axes)]) if axes else row


def one_size(op: Emitter, x: Value, axis: int) -> Value:
    """Return the size of an axis as a scalar."""
    return op.Squeeze(op.shape_of(x, axis, axis + 1))


def elements_along(op: Emitter, x: Value, count: int, axis: int) -> list[Value]:
    """Return the elements of an axis."""
    parts = op.Split(x, num_outputs=count, axis=axis, _outputs=count)
    return [op.Squeeze(part, [axis]) for part in ([parts] if count == 1 else parts)]


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
    batch = _numbers(op, one_size(op, x, 0), axes=1)
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
    op: Emitter,
    x: Value,
    rois: Value,
    batch: Value,
    *,
    mode: str,
    coordinate_transformation_mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> list[Value]:
    """Average, or take the maximum of, the samples of each bin (He et al., Mask R-CNN, https://arxiv.org/abs/1703.06870).

    As in ONNX, the maximum is over weighted pixels. Without a sampling ratio, each region has as many samples as a bin
    has pixels. Regions with fewer samples repeat the last one with weight 0.
    """
    aligned = coordinate_transformation_mode == "half_pixel"
    corners = op.Split(rois * spatial_scale - (0.5 if aligned else 0.0), num_outputs=4, axis=1, _outputs=4)
    at, shares, bins = [], [], (output_height, output_width)
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
    where = op.Unsqueeze(op.Cast(batch, to=ir.DataType.INT64), [1, 2])
    terms = sampled(op, x, where, at) * op.CastLike(op.Unsqueeze(shares[0] * shares[1], [-1]), x)
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
def max_roi_pool(
    op: Emitter, x: Value, rois: Value, *, pooled_shape: list[int], spatial_scale: float
) -> list[Value]:
    """Take the maximum of each bin, one axis at a time (Girshick, Fast R-CNN, https://arxiv.org/abs/1504.08083)."""
    assert x.dtype is not None
    batch, *corners = op.Split(rois, num_outputs=5, axis=1, _outputs=5)
    largest = op.Gather(x, op.Squeeze(op.Cast(batch, to=ir.DataType.INT64), [1]), axis=0)
    empty = op.constant(x.dtype.min, like=x)
    for i, bins in ((1, pooled_shape[1]), (0, pooled_shape[0])):
        begin, end = (nearest(op, corner * spatial_scale) for corner in (corners[1 - i], corners[3 - i]))
        step = op.Max(end - begin + 1, 1.0) / bins
        number = op.constant(np.arange(bins)[None], like=rois)
        first, last = begin + op.Floor(number * step), begin + op.Ceil((number + 1) * step)
        pixel = op.Cast(op.Range(0, one_size(op, x, 2 + i), 1), to=rois.dtype)
        first, last = op.Unsqueeze(first, [2]), op.Unsqueeze(last, [2])
        inside = op.And(op.GreaterOrEqual(pixel, first), op.Less(pixel, last))
        spread_over, axis = ([1, 2], 3) if i else ([1, 4], 2)
        values = op.Where(op.Unsqueeze(inside, spread_over), op.Unsqueeze(largest, [axis]), empty)
        largest = op.ReduceMax(values, [4 if i else 3], keepdims=0)
    return [op.Where(op.Equal(largest, empty), op.CastLike(0.0, x), largest)]


def nearest(op: Emitter, x: Value) -> Value:
    """Round halves up, as C does."""
    return op.Floor(x + 0.5)


@expansion("DeformConv")
def deform_conv(
    op: Emitter,
    x: Value,
    w: Value,
    offset: Value,
    bias: Input = None,
    weights: Input = None,
    *,
    y: Value,
    node: Node,
    group: int,
    offset_group: int,
) -> list[Value]:
    """Compute the product of sampled pixels (Dai et al., Deformable Convolutional Networks, https://arxiv.org/abs/1703.06211)."""
    count, window = rank(x) - 2, window_of(x, node, w)
    taps, out = math.prod(window.kernel), op.shape_of(offset, 2)
    constant_size(count, taps)
    steps = np.indices(window.kernel).reshape(count, taps, *[1] * count)
    parts = elements_along(op, op.Reshape(offset, op.Concat([-1, taps, count], out, axis=0)), count, 2)
    at = []
    for i, part in enumerate(parts):
        first = window.strides[i] * _numbers(op, one_size(op, offset, 2 + i), axes=count - 1 - i)
        start = first + op.constant(steps[i] * window.dilations[i] - window.begin[i])
        at.append(part + op.Cast(start, to=offset.dtype))
    channels = op.Concat([-1], op.shape_of(x, 1, 2) / offset_group, op.shape_of(x, 2), axis=0)
    groups = op.Reshape(x, channels)
    batch = _numbers(op, one_size(op, groups, 0), axes=1 + count)
    pixels = op.ReduceSum(sampled(op, groups, batch, at, padding="zeros"), [*range(count)], keepdims=0)
    if weights is not None:
        pixels = pixels * op.Reshape(weights, op.Concat([-1, taps], out, [1], axis=0))
    columns = op.Reshape(
        op.Transpose(pixels, perm=[0, count + 2, *range(1, count + 2)]),
        op.Concat(op.shape_of(x, 0, 1), [group], op.shape_of(w, 1, 2) * taps, [-1], axis=0),
    )
    rows = op.Reshape(w, op.Concat([group, -1], op.shape_of(w, 1, 2) * taps, axis=0))
    total = reshape_like(op, op.MatMul(rows, columns), y)
    return [total if bias is None else total + op.Unsqueeze(bias, [*range(1, 1 + count)])]
