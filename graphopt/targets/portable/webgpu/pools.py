"""Write pools as convolutions, reductions and MaxPools of one output."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import dims_of, dtype_of, rank
from graphopt.graph.windows import Window, is_same, padded_window
from graphopt.targets.portable.form import Form, given, is_read, known_sizes

_MOST_COUNTS = 2**20  # numbers of a constant that says how many elements each window has


def _windows(node: ir.Node) -> tuple[Window, Window] | None:
    """Return the window of a pool, as given and with pads for a partial one; None if unknown sizes decide pads."""
    sizes, counts = known_sizes(node.inputs[0]), known_sizes(node.outputs[0])
    window = None if sizes is None else padded_window(node, sizes[2:])
    if sizes is None or window is None:
        return None
    end = list(window.end)
    if node.attributes.get_int("ceil_mode", 0):
        for i, (size, count) in enumerate(zip(sizes[2:], counts[2:] if counts else [None] * len(end), strict=True)):
            if size is None or count is None:
                return None
            end[i] = max(end[i], window.reach(i, count) - size)
    return window, replace(window, end=end)


def _sums(op: Emitter, window: Window, x: ir.Value) -> ir.Value:
    """Return the sum of each window, by a convolution of each plane with ones, or by a reduction if windows tile it."""
    sizes = (known_sizes(x) or [])[2:]
    parts = [(size or 1) % k for size, k in zip(sizes, window.kernel, strict=True)]
    if window.tiles and None not in sizes and not window.is_padded and not any(parts):
        split = [part for size, k in zip(sizes, window.kernel, strict=True) for part in ((size or 0) // k, k)]
        axes = [3 + 2 * i for i in range(len(sizes))]
        return op.ReduceSum(op.Reshape(x, [0, 0, *split]), axes, keepdims=0)
    planes = op.Reshape(x, op.Concat([-1, 1], op.shape_of(x, 2), axis=0))
    planes.shape = ir.Shape([None, 1, *dims_of(x)[2:]])
    ones = op.constant(np.ones([1, 1, *window.kernel]), like=x)
    y = op.Conv(planes, ones, **window.geometry)
    return op.Reshape(y, op.Concat(op.shape_of(x, 0, 2), [0] * len(sizes), axis=0))  # 0 keeps a size


def _average_pool(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Divide the sums of windows by the number of their elements. 1.27 has no kernel of opset 19 for AveragePool."""
    x, windows = given(node.inputs[0]), _windows(node)
    if windows is None:
        return None
    counts = _counts(op, *windows, x, node)
    return None if counts is None else [_sums(op, windows[1], x) / counts]


def _counts(op: Emitter, window: Window, whole: Window, x: ir.Value, node: ir.Node) -> ir.Value | float | None:
    """Return how many elements each window counts: those inside, and those of pads if they count."""
    with_pads = bool(node.attributes.get_int("count_include_pad", 0))
    if whole == window and (with_pads or not window.is_padded):
        return float(window.taps)
    sizes = (known_sizes(x) or [])[2:]
    if None in sizes:
        if with_pads:
            return None
        shape = op.Concat([1, 1], op.shape_of(x, 2), axis=0)
        ones = op.Expand(op.constant(1, like=x), shape)
        ones.shape = ir.Shape([1, 1, *dims_of(x)[2:]])
        return _sums(op, whole, ones)
    along = []
    for i, size in enumerate(sizes):
        count = ((size or 0) + whole.begin[i] + whole.end[i] - whole.extent[i]) // whole.strides[i] + 1
        along.append(window.elements(i, count, size or 0, with_pads))
    if math.prod(map(len, along)) > _MOST_COUNTS:
        return None
    return op.constant(functools.reduce(np.multiply.outer, along), like=x)


def _lp_pool(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write LpPool as sums of powers. There is no kernel for LpPool."""
    x, windows, p = given(node.inputs[0]), _windows(node), node.attributes.get_int("p", 2)
    if windows is None:
        return None
    return [_root(op, _sums(op, windows[1], _power(op, x, p)), p)]


def _global_lp_pool(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write GlobalLpPool as a sum of powers. There is no kernel for GlobalLpPool."""
    x, p = given(node.inputs[0]), node.attributes.get_int("p", 2)
    if x.shape is None:
        return None
    return [_root(op, op.ReduceSum(_power(op, x, p), list(range(2, rank(x)))), p)]


def _power(op: Emitter, x: ir.Value, p: int) -> ir.Value:
    magnitude = op.Abs(x)
    return x * x if p == 2 else magnitude if p == 1 else op.Pow(magnitude, op.constant(p, like=x))


def _root(op: Emitter, y: ir.Value, p: int) -> ir.Value:
    return op.Sqrt(y) if p == 2 else y if p == 1 else op.Pow(y, op.constant(1 / p, like=y))


def _max_pool(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Find the positions of maxima by ArgMax. The kernel refuses to return positions, column-major ones, and SAME
    padding of windows that have gaps between them."""
    positions = len(node.outputs) > 1 and is_read(node.outputs[1])
    columns = bool(node.attributes.get_int("storage_order", 0))
    if not (positions or columns or is_same(node)):
        return None
    x, windows = given(node.inputs[0]), _windows(node)
    if windows is None or (positions and columns):
        return _on_the_cpu(op, node) if positions and x.dtype == ir.DataType.FLOAT else None
    kept = {name: node.attributes[name] for name in ("kernel_shape", "ceil_mode") if name in node.attributes}
    window, whole = windows
    y = op.MaxPool(x, **kept, **window.geometry)
    return [y, _positions(op, whole, x)] if positions else [y]


def _on_the_cpu(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Pool in float64, for which only the CPU has kernels."""
    y, where = op.MaxPool(op.Cast(node.inputs[0], to=ir.DataType.DOUBLE), **node.attributes, _outputs=2)
    return [op.Cast(y, to=ir.DataType.FLOAT), where]


def _positions(op: Emitter, window: Window, x: ir.Value) -> ir.Value:
    """Return the position of the first maximum of each window among all elements."""
    n = len(window.kernel)
    lowest = op.constant(np.finfo(dtype_of(x).numpy()).min, like=x)
    padded = op.Pad(x, [0, 0, *window.begin, 0, 0, *window.end], lowest)
    planes = op.Reshape(padded, op.Concat([-1, 1], op.shape_of(padded, 2), axis=0))
    taps = op.constant(np.eye(window.taps).reshape(-1, 1, *window.kernel), like=x)
    choices = op.Conv(planes, taps, strides=window.strides, dilations=window.dilations)
    chosen = op.Cast(op.ArgMax(choices, axis=1, keepdims=0), to=ir.DataType.INT32)  # [planes, window...]
    sizes = op.Cast(op.shape_of(x, 2), to=ir.DataType.INT32)
    # The number of windows along each axis; the shape of a result would be read back.
    room = [begin + end - reach for begin, end, reach in zip(window.begin, window.end, window.extent, strict=True)]
    counts = (op.shape_of(x, 2) + room) / window.strides + 1
    place = op.constant(np.zeros((), np.int32))
    for i in range(n):
        starts = _numbers_below(op, counts, i) * window.strides[i]
        starts = op.Reshape(starts - window.begin[i], [-1, *[1] * (n - 1 - i)])
        offsets = np.indices(window.kernel)[i].ravel() * window.dilations[i]
        inside = op.Gather(op.constant(offsets.astype(np.int32)), chosen)
        place = place * _number(op, sizes, i) + (starts + inside)
    first = _numbers_below(op, op.shape_of(planes, 0, 1), 0)
    first = op.Reshape(first * op.ReduceProd(sizes, keepdims=0), [-1, *[1] * n])
    shape = op.Concat(op.shape_of(x, 0, 2), counts, axis=0)
    return op.Reshape(op.Cast(place + first, to=ir.DataType.INT64), shape)


def _number(op: Emitter, sizes: ir.Value, i: int) -> ir.Value:
    return op.Cast(op.Gather(sizes, op.constant(np.int64(i))), to=ir.DataType.INT32)


def _numbers_below(op: Emitter, sizes: ir.Value, i: int) -> ir.Value:
    zero, one = (op.constant(np.int32(number)) for number in (0, 1))
    return op.Range(zero, _number(op, sizes, i), one)


def _local_response(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Sum the squares of neighbouring channels by Slices. There is no kernel for LRN."""
    x, size = given(node.inputs[0]), node.attributes.get_int("size", 1)
    if x.shape is None:
        return None
    before, after = (size - 1) // 2, size // 2
    pads = [0] * (2 * rank(x))
    pads[1], pads[rank(x) + 1] = before, after
    squares = op.Pad(x * x, pads)
    starts = range(size)
    near = [op.Slice(squares, [i], [i + 1 - size if i + 1 < size else 2**31 - 1], [1]) for i in starts]
    numbers = node.attributes.get_float
    share = functools.reduce(op.Add, near) * (numbers("alpha", 1e-4) / size) + numbers("bias", 1.0)
    return [x / op.Pow(share, op.constant(numbers("beta", 0.75), like=x))]


FORMS: dict[str, Form] = {
    "AveragePool": _average_pool,
    "GlobalLpPool": _global_lp_pool,
    "LRN": _local_response,
    "LpPool": _lp_pool,
    "MaxPool": _max_pool,
}
