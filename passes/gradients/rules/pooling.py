"""Differentiate pooling: pass gradients to the largest element or to all averaged elements."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import dims_of, like, rank
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.convolution import Window, transposed, window_of
from passes.gradients.rules.elementwise import mask, nonzero
from passes.gradients.rules.indexing import positions, scatter_back
from passes.gradients.rules.reduction import Along, extreme, spread
from passes.gradients.rules.shape import constant_size, reshape_like
from passes.gradients.walk import further_output


@rule("MaxPool")
def max_pool(op: Emitter, dy: Value, x: Value, *, y: Value, node: Node, ceil_mode: int) -> Gradients:
    """Compare elements with their maximum if windows tile the input, and otherwise find the position of each maximum.

    The first form takes half the time on the CPU, where MaxPool is slow when it returns positions. It is not used for
    float64, because ONNX Runtime has no such ConvTranspose, nor for 16 bits: the CPU provider computes them in
    float32, so that some readers see rounded numbers and others do not.
    """
    sized = all(isinstance(size, int) for size in dims_of(x)[2:])
    if sized and not ceil_mode and x.dtype == ir.DataType.FLOAT:
        window = window_of(x, node)
        if window.tiles:
            chosen = mask(op, op.Equal(x, repeat_window(op, window, y, x)), x)
            share = dy / (average(op, window, chosen) * float(np.prod(window.kernel)))
            return [chosen * repeat_window(op, window, share, x)]
    return [scatter_back(op, dy, maxima(op, node, x), x)]


def maxima(op: Emitter, node: Node, x: Value) -> Value:
    """Return the position in `x` of each maximum, the second output of MaxPool in row-major order."""
    attributes = {name: value for name, value in node.attributes.items() if name != "storage_order"}
    if len(attributes) == len(node.attributes) or not node.attributes["storage_order"].as_int():
        return further_output(node, 1, ir.DataType.INT64, node.outputs[0].shape)
    positions: Value = op.MaxPool(x, **attributes, _outputs=2)[1]
    return positions


def average(op: Emitter, window: Window, x: Value) -> Value:
    """Return the average of each window including pads."""
    return op.AveragePool(x, kernel_shape=window.kernel, **window.geometry, count_include_pad=1)


@rule("AveragePool")
def average_pool(
    op: Emitter, dy: Value, x: Value, *, node: Node, ceil_mode: int, count_include_pad: int
) -> Gradients:
    """Treat an average as a convolution with equal weights, divided by the number of counted elements."""
    window = window_of(x, node)
    share = dy / divisor(op, window, x, dy, ceil_mode, count_include_pad)
    return [spread_window(op, window, share, x)]


def spread_window(op: Emitter, window: Window, dy: Value, x: Value) -> Value:
    """Add each element of `dy` to all elements of `x` in its window."""
    planes = op.Reshape(dy, op.Concat([-1, 1], op.shape_of(dy, 2), axis=0))
    planes.shape = ir.Shape([None, 1, *dims_of(dy)[2:]])
    constant_size(*window.kernel)
    ones = op.constant(np.ones([1, 1, *window.kernel]).tolist(), like=dy)
    return reshape_like(op, transposed(op, window, planes, ones, x), x)


def repeat_window(op: Emitter, window: Window, y: Value, x: Value) -> Value:
    """Return for each element of `x` the element of `y` whose window contains it, and 0 outside windows that tile `x`.

    This copies elements exactly. A convolution on a GPU may round.
    """
    scales = op.constant(np.array([1, 1, *window.strides], np.float32))
    up: Value = op.Resize(
        y, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    sizes, windows = ([size for size in dims_of(value)[2:] if isinstance(size, int)] for value in (x, y))
    spans = [count * stride for count, stride in zip(windows, window.strides, strict=True)]
    ends = [begin + size for begin, size in zip(window.begin, sizes, strict=True)]
    if any(window.begin) or any(end < span for end, span in zip(ends, spans, strict=True)):
        up = op.Slice(up, window.begin, ends, list(range(2, rank(x))))
    missing = [max(end - span, 0) for end, span in zip(ends, spans, strict=True)]
    if any(missing):
        up = op.Pad(up, [0] * (rank(x) + 2) + missing)
    return like(up, x)


def divisor(
    op: Emitter, window: Window, x: Value, dy: Value, ceil_mode: int, count_include_pad: int
) -> Value | float:
    """Return the number of elements that each average counts."""
    taps = float(np.prod(window.kernel))
    if not ceil_mode and (count_include_pad or not any(window.begin + window.end)):
        return taps
    counts = []
    for i, (size, windows) in enumerate(zip(dims_of(x)[2:], dims_of(dy)[2:], strict=True)):
        if not isinstance(size, int) or not isinstance(windows, int):
            return taps * _share_inside(op, window, x, ceil_mode)
        before, after = (window.begin[i], window.end[i]) if count_include_pad else (0, 0)
        constant_size(windows, window.kernel[i])
        first = np.arange(windows)[:, None] * window.strides[i] - window.begin[i]
        at = first + np.arange(window.kernel[i]) * window.dilations[i]
        counts.append(((at >= -before) & (at < size + after)).sum(axis=1))
    constant_size(*map(len, counts))
    return op.constant(functools.reduce(np.multiply.outer, counts).tolist(), like=dy)


def _share_inside(op: Emitter, window: Window, x: Value, ceil_mode: int) -> Value:
    """Return the share of each window that lies inside `x`, whose sizes are only known at run time."""
    if ceil_mode:
        raise GraphoptError(
            f"AveragePool with ceil_mode needs known spatial sizes, found {x.name!r} of shape {x.shape}: declare "
            f"its shape"
        )
    ones = op.Expand(op.constant(1.0, like=x), op.Concat([1, 1], op.shape_of(x, 2), axis=0))
    return average(op, window, ones)


@rule("LpPool")
def lp_pool(op: Emitter, dy: Value, x: Value, *, y: Value, node: Node, p: int) -> Gradients:
    """Differentiate y = (sum |x|^p)^(1/p): dx = sign(x) |x|^(p-1) y^(1-p) dy, and 0 if all elements are 0."""
    window = window_of(x, node)
    return [signed_power(op, x, p - 1.0) * spread_window(op, window, _per_norm(op, dy, y, p), x)]


@rule("GlobalLpPool")
def global_lp_pool(op: Emitter, dy: Value, x: Value, *, y: Value, p: int) -> Gradients:
    return [signed_power(op, x, p - 1.0) * _per_norm(op, dy, y, p)]


def _per_norm(op: Emitter, dy: Value, y: Value, p: int) -> Value:
    """Return dy y^(1-p)."""
    return dy * op.Pow(nonzero(op, y), op.constant(1.0 - p, like=y))


def signed_power(op: Emitter, x: Value, exponent: float) -> Value:
    """Return sign(x) |x|^exponent."""
    return op.Sign(x) * op.Pow(op.Abs(x), op.constant(exponent, like=x))


@rule("GlobalAveragePool")
def global_average_pool(op: Emitter, dy: Value, x: Value) -> Gradients:
    return [spread(op, dy / op.count(x, range(2, rank(x))), x)]


@rule("GlobalMaxPool")
def global_max_pool(op: Emitter, dy: Value, x: Value, *, y: Value) -> Gradients:
    if rank(x) == 2:
        return [dy]
    axes = op.constant(list(range(2, rank(x))))
    return [extreme(op, x, y, dy, Along(op, x, axes, noop=0))]


@rule("MaxUnpool")
def max_unpool(
    op: Emitter, dy: Value, x: Value, indices: Value, shape: Input = None, *, node: Node
) -> Gradients:
    """Read `dy` at the position of each element. With a given output shape, an evaluator maps the positions.

    ONNX defines positions in the output without the given shape, which adds elements at the ends. ONNX Runtime
    interprets them as positions in the given shape.
    """
    if shape is None:
        flat = op.Gather(op.Reshape(dy, [-1]), op.Reshape(indices, [-1]))
        return [like(op.Reshape(flat, op.shape_of(x)), x)]
    put: Value = op.MaxUnpool(op.Cast(positions(op, x) + 1, to=x.dtype), indices, shape, **node.attributes)
    put.shape = dy.shape = ir.Shape([None] * rank(x))  # ONNX infers no shape
    where = op.Cast(put, to=ir.DataType.INT64)
    return [scatter_back(op, dy * mask(op, op.Greater(where, 0), dy), op.Max(where - 1, 0), x)]
