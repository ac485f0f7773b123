"""Differentiate convolutions and pools, whose windows slide along the spatial axes.

A convolution's input has a transposed convolution as its gradient, and its weights have a correlation: Dumoulin and
Visin, https://arxiv.org/abs/1603.07285. Pools pass gradients to the largest element or to all averaged elements. If
several elements are the largest, the first in row-major order has the gradient, as in PyTorch and JAX.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import constant_of, dims_of, like, rank
from graphopt.graph.windows import Window, is_same, pad_mode, padded_window, window_of
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.elementwise import mask, nonzero
from passes.gradients.rules.shape import constant_size, indices_along, positions, reshape_like, scatter_back
from passes.gradients.walk import broadcast_to, further_output

_MOST_TAPS = 2**20  # of a window whose elements have scores: float32 numbers tell them apart


def taps_of(x: Value, node: Node, w: Input = None) -> list[int]:
    """Return the sizes of a node's kernel, from an attribute or its weights."""
    kernel = node.attributes.get_ints("kernel_shape", None) or ([] if w is None else dims_of(w)[2:])
    taps = [size for size in kernel if isinstance(size, int)]
    if len(taps) < len(kernel):
        raise GraphoptError(
            f"the gradient with respect to {x.name!r} needs a kernel of known size, found {list(kernel)}: declare "
            f"its shape"
        )
    return taps


def padded(op: Emitter, x: Value, node: Node, w: Input = None) -> tuple[Window, Value, Value | None]:
    """Return the window of a node, what it slides over, and where the input begins in that if it has been padded.

    With SAME padding and strides, the pads depend on the sizes. If these are open, the input is padded at run time,
    as https://onnx.ai/onnx/operators/onnx__AveragePool.html defines the pads, and the window has none.
    """
    taps = taps_of(x, node, w)
    window = padded_window(node, dims_of(x)[2:], taps)
    if window is not None:
        return window, x, None
    window = window_of(node, taps)
    sizes, strides = op.shape_of(x, 2), op.constant(np.array(window.strides, np.int64))
    reached = ((sizes + strides - 1) / strides - 1) * strides + np.array(window.extent, np.int64)
    total = op.Max(reached - sizes, 0)
    begin = total / 2 if pad_mode(node) == "SAME_UPPER" else total - total / 2
    larger: Value = op.Pad(x, op.Concat([0, 0], begin, [0, 0], total - begin, axis=0))
    larger.shape = ir.Shape([*dims_of(x)[:2], *[None] * len(window.kernel)])
    return window, larger, begin


def without_pads(op: Emitter, dx: Value, x: Value, begin: Value | None) -> Value:
    """Return the part of the gradient of a padded input that belongs to the input."""
    if begin is None:
        return like(dx, x)
    return like(op.Slice(dx, begin, begin + op.shape_of(x, 2), list(range(2, rank(x)))), x)


def _transposed(op: Emitter, window: Window, dy: Value, w: Value, x: Value, group: int = 1) -> Value:
    """Return the gradient of a convolution's input, in the spatial sizes of `x`.

    If strides and an unknown size hide which part of the input the windows reach, emit a larger gradient and crop it.
    """
    missing, exact = [], True
    for i, (size, windows) in enumerate(zip(dims_of(x)[2:], dims_of(dy)[2:], strict=True)):
        if isinstance(size, int) and isinstance(windows, int):
            missing.append(size - window.reach(i, windows))
        else:
            exact = exact and window.strides[i] == 1
            missing.append(-window.end[i] if window.strides[i] == 1 else window.strides[i] - 1)
    dx: Value = op.ConvTranspose(
        dy,
        w,
        strides=window.strides,
        dilations=window.dilations,
        pads=[*window.begin, *(max(-size, 0) for size in missing)],
        output_padding=[max(size, 0) for size in missing],
        group=group,
    )
    axes = list(range(2, rank(x)))
    return dx if exact else op.Slice(dx, [0] * len(axes), op.shape_of(x, 2), axes)


def correlation(op: Emitter, window: Window, x: Value, dy: Value, w: Value, group: int = 1) -> Value:
    """Return the gradient of the weights: the correlation of x and dy, with batch as channels and strides as dilations.

    Groups remain groups: channels become the batch and the batch becomes channels. A kernel of one element is a matrix
    product, which is five times as fast.
    """
    ones = [1] * len(window.kernel)
    if group == 1 and window.kernel == window.strides == ones and not window.is_padded:
        rows, columns = op.Reshape(dy, [0, 0, -1]), op.Reshape(x, [0, 0, -1])
        products = op.MatMul(rows, op.Transpose(columns, perm=[0, 2, 1]))
        return reshape_like(op, op.ReduceSum(products, [0], keepdims=0), w)
    swap = [1, 0, *range(2, rank(x))]
    if group == 1:
        data = op.Transpose(x, perm=swap)
    else:
        channels = op.shape_of(w, 1, 2)
        split = op.Reshape(x, op.Concat([0, group], channels, op.shape_of(x, 2), axis=0))
        moved = op.Transpose(split, perm=[2, 1, 0, *range(3, rank(x) + 1)])
        data = op.Reshape(moved, op.Concat(channels, [-1], op.shape_of(x, 2), axis=0))
    end, exact = list(window.end), True
    reached = {}  # the part of an axis that windows reach, if it is not the whole axis
    for i, (size, windows) in enumerate(zip(dims_of(x)[2:], dims_of(dy)[2:], strict=True)):
        dilation = window.dilations[i]
        if isinstance(size, int) and isinstance(windows, int):
            unreached = size + end[i] - window.reach(i, windows)
            end[i], unreached = max(end[i] - unreached, 0), max(unreached - end[i], 0)
            if unreached >= dilation:
                reached[i + 2] = size - unreached
        else:
            exact = exact and window.strides[i] - 1 < dilation
    if reached:
        data = op.Slice(data, [0] * len(reached), list(reached.values()), list(reached))
    dw: Value = op.Conv(
        data,
        op.Transpose(dy, perm=swap),
        strides=window.dilations,
        dilations=window.strides,
        pads=[*window.begin, *end],
        group=group,
    )
    dw.shape = dw.shape or ir.Shape([None] * rank(x))  # ONNX infers no shape if channels are unknown
    if not exact:
        dw = op.Slice(dw, [0] * len(window.kernel), window.kernel, list(range(2, rank(x))))
    return like(op.Transpose(dw, perm=swap), w)


@rule("Conv")
def conv(op: Emitter, dy: Value, x: Value, w: Value, bias: Input = None, *, node: Node, group: int) -> Gradients:
    window, inner, begin = padded(op, x, node, w)
    dx = without_pads(op, _transposed(op, window, dy, w, inner, group), x, begin)
    return [dx, correlation(op, window, inner, dy, w, group), _by_channel(op, dy, bias)]


@rule("ConvTranspose")
def conv_transpose(
    op: Emitter, dy: Value, x: Value, w: Value, bias: Input = None, *, node: Node, group: int, auto_pad: str
) -> Gradients:
    """Convolve: the gradient of a transposed convolution is the convolution itself."""
    window = window_of(node, taps_of(x, node, w))
    more = node.attributes.get_ints("output_padding", [0] * len(window.kernel))
    if "output_shape" in node.attributes:
        sizes, total = ([n for n in dims_of(value)[2:] if isinstance(n, int)] for value in (x, dy))
        if len(sizes) + len(total) < 2 * len(more):
            raise GraphoptError(
                f"the pads of a ConvTranspose need known spatial sizes, found {x.name!r} of shape {x.shape}: declare "
                f"its shape"
            )
        window = window.halved(np.maximum(window.cropped(sizes, total, more), 0), auto_pad)
    elif is_same(node):
        window = window.same_of_transposed(more, auto_pad)
    dx = op.Conv(dy, w, **window.geometry, group=group)
    if any(size >= stride for size, stride in zip(more, window.strides, strict=True)):
        dx = op.Slice(dx, [0] * len(more), op.shape_of(x, 2), list(range(2, rank(x))))
    return [like(dx, x), correlation(op, window, dy, x, w, group), _by_channel(op, dy, bias)]


def _by_channel(op: Emitter, dy: Value, bias: Input) -> Value | None:
    """Return the gradient of a bias per channel."""
    return bias and like(op.ReduceSum(dy, [0, *range(2, rank(dy))], keepdims=0), bias)


@rule("Col2Im")
def col2im(op: Emitter, dy: Value, x: Value, image: Value, block: Value, *, node: Node) -> Gradients:
    """Extract the blocks of the image by a convolution with one kernel for each position in a block."""
    taps = constant_of(block)
    if taps is None:
        raise GraphoptError(
            f"Col2Im: the gradient with respect to {x.name!r} needs a known block shape, found a computed one: make it "
            f"an initializer"
        )
    places = constant_size(*taps)
    constant_size(places, places)
    kernel = op.constant(np.eye(places).reshape(places, 1, *taps), like=dy)
    planes = op.Reshape(dy, op.Concat([-1, 1], op.shape_of(dy, 2), axis=0))
    blocks = op.Conv(planes, kernel, **node.attributes)
    return [like(op.Reshape(blocks, op.shape_of(x)), x)]


@rule("MaxPool")
def max_pool(op: Emitter, dy: Value, x: Value, *, y: Value, node: Node, ceil_mode: int) -> Gradients:
    """Compare elements with their maximum if windows tile the input, and otherwise find the position of each maximum.

    In the first form, elements that equal the maximum get scores, and the first one has the highest score. This form
    takes 0.6 of the time on the CPU, where MaxPool is slow when it returns positions. It is not used for float64,
    because ONNX Runtime has no such ConvTranspose, nor for 16 bits: the CPU provider computes them in float32, so that
    some readers see rounded numbers and others do not.
    """
    window = tiling(x, node, ceil_mode)
    if window is None or window.taps > _MOST_TAPS:
        return [scatter_back(op, dy, maxima(op, node, x), x)]
    equal = mask(op, op.Equal(x, repeat_window(op, window, y, x)), x)
    score = equal * scores(op, window, y, x)
    highest = op.MaxPool(score, kernel_shape=window.kernel, **window.geometry)
    first = mask(op, op.Equal(score, repeat_window(op, window, like(highest, y), x)), x)
    return [first * repeat_window(op, window, dy, x)]


def scores(op: Emitter, window: Window, y: Value, x: Value) -> Value:
    """Return numbers for the elements of one image that fall in each window from the first element to the last."""
    taps = np.arange(window.taps, 0, -1).reshape(1, 1, *window.kernel)
    tiles: Value = op.Tile(op.constant(taps.tolist(), like=x), [1, 1, *dims_of(y)[2:]])
    tiles.shape = ir.Shape([1, 1, *(n * k for n, k in zip(dims_of(y)[2:], window.kernel, strict=True))])
    return _inside(op, window, tiles, y, x)


def tiling(x: Value, node: Node, ceil_mode: int) -> Window | None:
    """Return the window of a pool of float32 with known sizes, if its windows have no overlaps and no gaps."""
    sized = all(isinstance(size, int) for size in dims_of(x)[2:])
    window = padded_window(node, dims_of(x)[2:])
    if not sized or ceil_mode or x.dtype != ir.DataType.FLOAT or window is None:
        return None
    return window if window.tiles else None


def maxima(op: Emitter, node: Node, x: Value) -> Value:
    """Return the position in `x` of each maximum, the second output of MaxPool in row-major order."""
    if not node.attributes.get_int("storage_order", 0):
        return further_output(node, 1, ir.DataType.INT64, node.outputs[0].shape)
    attributes = {name: value for name, value in node.attributes.items() if name != "storage_order"}
    positions: Value = op.MaxPool(x, **attributes, _outputs=2)[1]
    return positions


def average(op: Emitter, window: Window, x: Value) -> Value:
    """Return the average of each window including pads."""
    return op.AveragePool(x, kernel_shape=window.kernel, **window.geometry, count_include_pad=1)


@rule("AveragePool")
def average_pool(op: Emitter, dy: Value, x: Value, *, node: Node, ceil_mode: int, count_include_pad: int) -> Gradients:
    """Treat an average as a convolution with equal weights, divided by the number of counted elements.

    If windows tile the input, each element gets the share of its window.
    """
    window, inner, begin = padded(op, x, node)
    if begin is None:
        share = dy / divisor(op, window, x, dy, ceil_mode, count_include_pad)
    else:  # SAME pads make all windows whole
        share = dy / float(window.taps)
        if not count_include_pad:
            share = share / average(op, window, padded(op, _channel_of_ones(op, x), node)[1])
    if tiling(x, node, ceil_mode) is not None:
        return [repeat_window(op, window, share, x)]
    return [without_pads(op, spread_window(op, window, share, inner), x, begin)]


def spread_window(op: Emitter, window: Window, dy: Value, x: Value) -> Value:
    """Add each element of `dy` to all elements of `x` in its window."""
    planes = op.Reshape(dy, op.Concat([-1, 1], op.shape_of(dy, 2), axis=0))
    planes.shape = ir.Shape([None, 1, *dims_of(dy)[2:]])
    constant_size(*window.kernel)
    ones = op.constant(np.ones([1, 1, *window.kernel]).tolist(), like=dy)
    return reshape_like(op, _transposed(op, window, planes, ones, x), x)


def repeat_window(op: Emitter, window: Window, y: Value, x: Value) -> Value:
    """Return for each element of `x` the element of `y` whose window contains it, and 0 outside windows that tile `x`.

    This copies elements exactly. A convolution on a GPU may round.
    """
    scales = op.constant(np.array([1, 1, *window.strides], np.float32))
    up: Value = op.Resize(
        y, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    return like(_inside(op, window, up, y, x), x)


def _inside(op: Emitter, window: Window, up: Value, y: Value, x: Value) -> Value:
    """Return the part of the windows `up` that lies inside `x`, and 0 for the elements of `x` outside the windows."""
    sizes, windows = ([size for size in dims_of(value)[2:] if isinstance(size, int)] for value in (x, y))
    spans = [count * stride for count, stride in zip(windows, window.strides, strict=True)]
    ends = [begin + size for begin, size in zip(window.begin, sizes, strict=True)]
    if any(window.begin) or any(end < span for end, span in zip(ends, spans, strict=True)):
        up = op.Slice(up, window.begin, ends, list(range(2, rank(x))))
    missing = [max(end - span, 0) for end, span in zip(ends, spans, strict=True)]
    if any(missing):
        up = op.Pad(up, [0] * (rank(x) + 2) + missing)
    return up


def divisor(op: Emitter, window: Window, x: Value, dy: Value, ceil_mode: int, count_include_pad: int) -> Value | float:
    """Return the number of elements that each average counts."""
    axes = list(zip(dims_of(x)[2:], dims_of(dy)[2:], strict=True))
    known = [(size, count) for size, count in axes if isinstance(size, int) and isinstance(count, int)]
    if not ceil_mode and (count_include_pad or not window.is_padded):
        if len(known) < len(axes):
            return taps_inside(op, window, x)
        if all(window.reach(i, count) <= size + window.end[i] for i, (size, count) in enumerate(known)):
            return float(window.taps)
    if len(known) < len(axes):
        return _counted(op, window, _channel_of_ones(op, x), dy, ceil_mode, count_include_pad)
    counts = []
    for i, (size, count) in enumerate(known):
        constant_size(count, window.kernel[i])
        counts.append(window.elements(i, count, size, bool(count_include_pad)))
    constant_size(*map(len, counts))
    return op.constant(functools.reduce(np.multiply.outer, counts).tolist(), like=dy)


def taps_inside(op: Emitter, window: Window, x: Value) -> Value | float:
    """Return how many elements the first window has. ONNX Runtime cuts a window that is larger than its input."""
    if window.taps == 1:
        return 1.0
    dilations, taps = (op.constant(np.array(n)) for n in (window.dilations, window.kernel))
    more = np.add(window.begin, window.end) + window.dilations - 1
    inside = op.Min((op.shape_of(x, 2) + op.constant(more)) / dilations, taps)
    count: Value = op.Cast(op.ReduceProd(inside, keepdims=0), to=x.dtype)
    return count


def _channel_of_ones(op: Emitter, x: Value) -> Value:
    """Return one channel of ones in the spatial sizes of `x`."""
    ones: Value = op.Expand(op.constant(1.0, like=x), op.Concat([1, 1], op.shape_of(x, 2), axis=0))
    ones.shape = ir.Shape([1, 1, *dims_of(x)[2:]])
    return ones


def _counted(op: Emitter, window: Window, ones: Value, dy: Value, ceil_mode: int, count_include_pad: int) -> Value:
    """Return how many ones each window covers, and how many pads if these count, from the sizes at run time."""
    axes = list(range(2, rank(dy)))
    none, zero = [0] * len(axes), op.constant(0.0, like=ones)
    if count_include_pad:
        ones = op.Pad(ones, [0, 0, *window.begin, 0, 0, *window.end], zero + 1.0)
        window = replace(window, begin=none, end=none)
    if ceil_mode:  # zeros make the last windows whole
        ends = [end + stride - 1 for end, stride in zip(window.end, window.strides, strict=True)]
        ones = op.Pad(ones, [0, 0, *window.begin, 0, 0, *ends], zero)
        window = replace(window, begin=none, end=none)
    counts: Value = average(op, window, ones) * taps_inside(op, window, ones)
    return op.Slice(counts, none, op.shape_of(dy, 2), axes) if ceil_mode else counts


@rule("LpPool", "GlobalLpPool")
def lp_pool(op: Emitter, dy: Value, x: Value, *, y: Value, node: Node, p: int) -> Gradients:
    """Differentiate y = (sum |x|^p)^(1/p): dx = sign(x) |x|^(p-1) y^(1-p) dy, and 0 if all elements are 0."""
    share = dy * op.Pow(nonzero(op, y), op.constant(1.0 - p, like=y))
    if node.op_type == "LpPool":
        window, inner, begin = padded(op, x, node)
        share = without_pads(op, spread_window(op, window, share, inner), x, begin)
    return [op.Sign(x) * op.Pow(op.Abs(x), op.constant(p - 1.0, like=x)) * share]


@rule("GlobalAveragePool")
def global_average_pool(op: Emitter, dy: Value, x: Value) -> Gradients:
    return [broadcast_to(op, dy / op.count(x, range(2, rank(x))), x)]


@rule("GlobalMaxPool")
def global_max_pool(op: Emitter, dy: Value, x: Value) -> Gradients:
    planes = op.Flatten(x, axis=2)  # Reshape with -1 refuses a batch without rows
    first = op.Equal(op.ArgMax(planes, axis=1), indices_along(op, planes, 1))
    return [reshape_like(op, op.Flatten(dy, axis=2) * mask(op, first, x), x)]


@rule("MaxUnpool")
def max_unpool(op: Emitter, dy: Value, x: Value, indices: Value, shape: Input = None, *, node: Node) -> Gradients:
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
