"""Rewrite convolutions, and pools in training, into forms that ONNX Runtime's CPU kernels compute faster.

`examples/benchmarks/convolution.py` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.inference import stand_in
from graphopt.graph.windows import pad_mode, window_of
from graphopt.targets.native.forms import NodeForms
from graphopt.targets.native.pools import first_maximum
from graphopt.targets.portable.form import given

_FEW_ROWS = 12  # of a batch, of which each is unfolded by itself
_LEAST_FILTERS = 32  # of a transposed convolution that is worth flipping
_MOST_PLACES = 1024  # taps of a kernel that is flipped, or places along an axis that becomes channels
_MOST_POSITIONS = 2**18  # of an image, in a constant; float32 numbers tell up to 2^24 apart
_BLOCK = 8  # channels, or a multiple of it, in a block of ONNX Runtime's layout


def transposed_convolution_as_convolution(model: ir.Model) -> bool:
    """Replace transposed convolutions of stride 1 by convolutions with the flipped kernel.

    ONNX Runtime sums the products of a transposed convolution on one thread. This form is 1.2 times as fast on two
    threads and equally fast on one.
    """
    return _rewrite(model, "ConvTranspose", _flipped)


def widen_convolution_products(model: ir.Model) -> bool:
    """Rewrite convolutions that ONNX Runtime would unfold into a product of few columns for each batch element.

    If the kernel is as large as the image, as in gradients of weights, this is 1.4 to 4 times as fast. If there are
    more filters than positions, it is 1.4 to 1.6 times as fast on two threads and equally fast on one.
    """
    return _rewrite(model, "Conv", _widened)


def pool_channels_as_batch(model: ir.Model) -> bool:
    """Move the channels of a MaxPool that has a gradient into the batch. Inference keeps the original MaxPool.

    ONNX Runtime converts pools to its blocked layout, even between convolutions that do not use this layout because
    their weights are not constants. A step of a small network takes 27.8 ms with this rewriting and 30.0 ms without.
    """
    return _rewrite(model, "MaxPool", _pooled_by_planes)


def unpool_first_maxima(model: ir.Model) -> bool:
    """Find the position of the first maximum of each window, and write the gradient there into zeros.

    This is 1.3 to 1.6 times as fast as to compare each element with the score of the first maximum, on one thread.
    """
    forms = NodeForms(model.opset_imports)
    return _rewrite(model, "Mul", lambda op, node: _unpooled(op, node, forms))


def _rewrite(model: ir.Model, op_type: str, rewritten: Callable[[Emitter, ir.Node], ir.Value | None]) -> bool:
    changed = False
    with Emitter(model) as op:
        for node in [node for node in model.graph if node.op_type == op_type and node.domain == ""]:
            other = rewritten(op, node)
            if other is not None:
                stand_in(node, [other])
                changed = True
    return changed


def _unpooled(op: Emitter, node: ir.Node, forms: NodeForms) -> ir.Value | None:
    found = first_maximum(node, forms)
    sizes = [] if found is None else _sizes(found.x)[2:]
    size = math.prod(sizes)
    if found is None or not 0 < size <= _MOST_POSITIONS:
        return None
    # Computed once, by the runtime: an array of the graph's own would keep the lowered graph out of the cache.
    order = op.cast(op.Range(size, 0, -1), found.x.dtype)  # the first one is the largest
    places = op.Reshape(order, [1, 1, *sizes])
    axes = [*range(2, 2 + len(sizes))]
    # NaN equals no maximum
    last = op.Slice(places, [k - 1 for k in found.window], sizes, axes, [*found.window])
    how = {"kernel_shape": found.window, "strides": found.window}
    planes = op.Reshape(found.equal * places, [-1, 1, *sizes])
    place = op.Cast(op.Max(op.MaxPool(planes, **how), last), to=ir.DataType.INT64)
    after = op.Reshape(op.Range(size, op.Size(planes) + size, size), [-1, *[1] * (len(sizes) + 1)])
    share = op.Reshape(found.share, [-1, 1, *_sizes(last)[2:]])
    unpooled = op.MaxUnpool(share, after - place, op.Shape(planes), **how)
    unpooled.shape = planes.shape  # ONNX infers none
    return op.Reshape(unpooled, op.Shape(found.x))


def _pooled_by_planes(op: Emitter, node: ir.Node) -> ir.Value | None:
    x, y = given(node.inputs[0]), node.outputs[0]
    sizes, pooled = _sizes(x), _sizes(y)
    if len(node.outputs) > 1 or len(sizes) != 4 or 0 in [*sizes[1:], *pooled[1:]] or sizes[1] % _BLOCK:
        return None
    if not any(user.op_type == "Resize" for user in y.consumers()):
        return None
    planes = op.MaxPool(op.Reshape(x, [-1, 1, *sizes[2:]]), **node.attributes)
    return op.Reshape(planes, [-1, *pooled[1:]])


def _is_explicit(node: ir.Node) -> bool:
    """Return whether a convolution says its pads, and its result has axes of space."""
    return pad_mode(node) == "NOTSET" and len(_sizes(node.outputs[0])) > 2


def _sizes(x: ir.Value) -> list[int]:
    """Return the sizes of `x`, 0 for each unknown size, and no sizes if the rank is unknown."""
    return [size if isinstance(size, int) else 0 for size in x.shape or ()]


def _flipped(op: Emitter, node: ir.Node) -> ir.Value | None:
    x, w = map(given, node.inputs[:2])
    if not _is_explicit(node):
        return None
    filters, channels, *taps = _sizes(w)
    window = window_of(node, taps)
    ends = zip(window.extent * 2, window.begin + window.end, strict=True)
    rest = [size - 1 - pad for size, pad in ends]
    if min(rest) < 0 or max(window.strides) > 1 or not _LEAST_FILTERS <= filters <= channels:
        return None
    if any(node.attributes.get_ints("output_padding", [])) or "output_shape" in node.attributes:
        return None
    if node.attributes.get_int("group", 1) > 1 or not 1 < math.prod(taps) <= _MOST_PLACES:
        return None
    backwards = op.constant(np.eye(math.prod(taps))[::-1], like=w)
    flipped = op.MatMul(op.Reshape(w, [0, 0, -1]), backwards)  # five times as fast as a Gather
    kernel = op.Reshape(op.Transpose(flipped, perm=[1, 0, 2]), [channels, filters, *taps])
    return op.Conv(x, kernel, *node.inputs[2:], dilations=window.dilations, pads=rest)


def _widened(op: Emitter, node: ir.Node) -> ir.Value | None:
    x, w, y = *map(given, node.inputs[:2]), node.outputs[0]
    if not _is_explicit(node):
        return None
    filters, _, *kernel = _sizes(w)
    batch, _, *places = _sizes(y)
    is_wide = not 0 < batch < _FEW_ROWS
    many, positions = math.prod(places), math.prod(kernel)
    plain = node.attributes.get_int("group", 1) == 1 and len(node.inputs) == 2
    if many == 0 or positions == 0:
        return None
    if positions >= 2 * many and positions > 16:
        if len(kernel) < 3 and is_wide:
            return _with_batch_as_axis(op, node, x, w)
        if len(kernel) == 3 and is_wide and plain and 0 not in _sizes(x)[3:] and places[0] <= _MOST_PLACES:
            return _with_axis_as_channels(op, node, x, w, places[0])
        return _unfolded(op, node, x, w, batch, places) if plain and batch and many < 32 else None
    if plain and len(kernel) < 3 and filters > many and positions > 1 and batch != 1:
        return _with_batch_as_axis(op, node, x, w)
    return None


def _with_batch_as_axis(op: Emitter, node: ir.Node, x: ir.Value, w: ir.Value) -> ir.Value:
    """Turn the batch into a last spatial axis, on which the kernel has size 1, to get one product of all columns."""
    n = len(_sizes(x)) - 2  # the CPU provider's fast kernels support up to three spatial axes
    window = window_of(node, _sizes(w)[2:])
    y = op.Conv(
        op.Unsqueeze(_transposed(op, x, [*range(1, n + 2), 0]), [0]),
        op.Unsqueeze(w, [-1]),
        *node.inputs[2:],
        strides=[*window.strides, 1],
        dilations=[*window.dilations, 1],
        pads=[*window.begin, 0, *window.end, 0],
        group=node.attributes.get_int("group", 1),
    )
    return op.Transpose(op.Squeeze(y, [0]), perm=[n + 1, *range(n + 1)])


def _with_axis_as_channels(op: Emitter, node: ir.Node, x: ir.Value, w: ir.Value, places: int) -> ir.Value:
    """Turn the first of three spatial axes into channels, and convolve the other two once per position on that axis."""
    window = window_of(node, _sizes(w)[2:])
    stride, *strides = window.strides
    dilation, *dilations = window.dilations
    padded = op.Pad(x, [0, 0, window.begin[0], 0, 0, 0, 0, window.end[0], 0, 0])
    pads = [*window.begin[1:], *window.end[1:]]
    kernel = op.Reshape(w, [0, -1, *_sizes(w)[3:]])
    parts = []
    for start in range(0, places * stride, stride):
        under = op.Slice(padded, [start], [start + window.extent[0]], [2], [dilation])
        image = op.Reshape(under, [0, -1, *_sizes(x)[3:]])
        part = op.Conv(image, kernel, strides=strides, dilations=dilations, pads=pads)
        parts.append(op.Unsqueeze(_with_batch_as_axis(op, part.producer(), image, kernel), [2]))
    return op.Concat(*parts, axis=2)


def _unfolded(op: Emitter, node: ir.Node, x: ir.Value, w: ir.Value, batch: int, places: Sequence[int]) -> ir.Value:
    """Multiply the kernel by the part of the image that it covers at each position.

    If batch and channels are exchanged, as in a forward pass, this is a convolution with one kernel per position.
    """
    n = len(places)
    swap = [1, 0, *range(2, n + 2)]
    many = math.prod(places)
    one_hot = np.tile(np.eye(many).reshape(many, 1, *places), [batch, 1, *[1] * n])
    window = window_of(node, _sizes(w)[2:])
    columns = op.Conv(
        _transposed(op, x, swap),
        op.constant(one_hot, like=x),
        strides=window.dilations,
        dilations=window.strides,
        pads=[*window.begin, *window.end],
        group=batch,
    )
    rows = op.Transpose(op.Reshape(_transposed(op, w, swap), [0, 0, -1]), perm=[0, 2, 1])
    products = op.ReduceSum(op.MatMul(op.Reshape(columns, [0, 0, -1]), rows), [0], keepdims=0)
    return op.Transpose(op.Reshape(products, [batch, *places, -1]), perm=[0, n + 1, *range(1, n + 1)])


def _transposed(op: Emitter, x: ir.Value, perm: Sequence[int]) -> ir.Value:
    """Transpose `x`, and merge the transpose with one that already produces `x`."""
    node = x.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        before = node.attributes.get_ints("perm", [*reversed(range(len(perm)))])
        x, perm = node.inputs[0], [before[axis] for axis in perm]
    if list(perm) == sorted(perm):
        return x
    return op.Transpose(x, perm=perm)
