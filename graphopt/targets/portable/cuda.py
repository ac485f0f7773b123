"""Write operators that ONNX Runtime's CUDA provider lacks, or computes slowly, as others.

The version is that of onnxruntime-gpu 1.31. Times are those of kernels on an NVIDIA H200
(tests/faults.py: cuda-operators).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import constant_of, dims_of, rank
from graphopt.graph.windows import is_same, window_of
from graphopt.targets.bfloat16 import in_float32, is_of_bfloat16
from graphopt.targets.joining import join_arrays_by_size
from graphopt.targets.portable.everywhere import ALONG_NO_AXIS, celu, mean
from graphopt.targets.portable.form import Form, given, known_sizes

# Addresses that a kernel takes. More are copied to the device in each step, which a captured graph does not repeat.
_MOST_ADDRESSES = 32
_MOST_JOINED = 2**18  # numbers of an array: to join larger ones takes longer than it saves
_MOST_UNFOLDED = 2**22  # numbers of a row of the batch that are unfolded at once


def _even_pads(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write ConvTranspose with other pads at the end than at the start as one with the lesser pads, and a Slice.

    There is no kernel for such pads, which the gradient of a convolution with strides has.
    """
    pads = list(node.attributes.get_ints("pads", ()) or ())
    starts, ends = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    if starts == ends:
        return None
    least = list(map(min, starts, ends))
    y = op.ConvTranspose(*node.inputs, **{**node.attributes, "pads": [*least, *least]})
    first = [start - pad for start, pad in zip(starts, least, strict=True)]
    last = [pad - end or sys.maxsize for end, pad in zip(ends, least, strict=True)]
    return [op.Slice(y, first, last, list(range(2, 2 + len(least))))]


def _without_bfloat16(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Compute an operator on bfloat16 in float32: there is no kernel for it."""
    return in_float32(op, node) if is_of_bfloat16(node) else None


def _first_of(*forms: Form) -> Form:
    """Return a form that tries others in order, and takes the first that applies."""

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        return next((found for own in forms if (found := own(op, node)) is not None), None)

    return form


def _stays(op: Emitter, node: ir.Node) -> None:
    """Leave an operator that has a kernel there, and not on all runtimes."""


def _in_parts(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Join up to 32 values at once."""
    inputs, axis = node.inputs, node.attributes.get_int("axis", 0)
    if len(inputs) <= _MOST_ADDRESSES:
        return None
    parts = [op.Concat(*inputs[i : i + _MOST_ADDRESSES], axis=axis) for i in range(0, len(inputs), _MOST_ADDRESSES)]
    return [op.Concat(*parts, axis=axis)]


def _in_even_parts(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Cut a value into runs of equal parts first: an uneven Split copies a table of positions in each step, too."""
    x, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    sizes = [shape[axis] if (shape := known_sizes(y)) is not None else None for y in node.outputs]
    if None in sizes or (len(sizes) <= _MOST_ADDRESSES and len(set(sizes)) == 1):
        return None
    parts: list[ir.Value] = []
    start = 0
    for size, run in itertools.groupby(sizes):
        alike = len(list(run))
        for i in range(0, alike, _MOST_ADDRESSES):
            count = min(alike - i, _MOST_ADDRESSES)
            end = start + count * size  # type: ignore[operator]
            together = op.Slice(x, [start], [end], [axis])
            start = end
            even = {"num_outputs": count, "axis": axis}
            parts += op.Split(together, **even, _outputs=count) if count > 1 else [together]
    return parts


def _in_two_steps(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Reduce the last axes first, and then those before an axis that stays, as the rows and places of each channel.

    For 32 channels of 16 x 32 x 32 numbers that takes 4 us in place of 24; for 64 of 32 x 56 x 56, 21 in place of 143.
    """
    x, axes = node.inputs[0], constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or axes is None:
        return None
    reduced, last = sorted(axis % rank(x) for axis in axes.tolist()), rank(x)
    while last - 1 in reduced:
        last -= 1
    first = [axis for axis in reduced if axis < last]
    if not first or last == rank(x):
        return None
    attributes = dict(node.attributes)
    partial: ir.Value = op.call_op(node.op_type, [x, op.constant([*range(last, rank(x))])], attributes)  # type: ignore[assignment]
    return [op.call_op(node.op_type, [partial, op.constant(first)], attributes)]  # type: ignore[list-item]


def _expanded(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Expand the first of two stacks of matrices that both have an axis of size 1 where the other has not.

    The kernel takes stacks of as many matrices for stacks of equal shape: [2, 1] by [1, 2] gives wrong numbers.
    """
    a, b = given(node.inputs[0]), given(node.inputs[1])
    if a.shape is None or b.shape is None:
        return None
    stack, other = list(dims_of(a))[:-2], list(dims_of(b))[:-2]
    pairs = list(zip(reversed(stack), reversed(other), strict=False))
    if not (any(m == 1 != n for m, n in pairs) and any(n == 1 != m for m, n in pairs)):
        return None
    expanded = op.Expand(a, op.Concat(op.shape_of(b, 0, len(other)), [1, 1], axis=0))
    more = max(len(other) - len(stack), 0)
    wide = [
        *other[:more],
        *stack[: len(stack) - len(pairs)],
        *(n if m == 1 else m for m, n in reversed(pairs)),
    ]
    expanded.shape = ir.Shape([*wide, *dims_of(a)[-2:]])
    return [op.MatMul(expanded, b)]


def _by_element(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Add rows into others by elements, in files: one thread adds a whole row otherwise (512 of 256: 5 us, not 95)."""
    data, indices, rows = map(given, node.inputs)
    shape, row = known_sizes(indices), (known_sizes(data) or [])[1:]
    if shape is None or shape[-1] != 1 or node.attributes.get_string("reduction") != "add":
        return None
    if data.dtype != ir.DataType.FLOAT or not row or None in row:
        return None
    column = op.Reshape(indices, [-1, *[1] * len(row)])
    rows = op.Reshape(rows, [-1, *row])
    return [op.ScatterElements(data, op.Expand(column, op.Shape(rows)), rows, axis=0, reduction="add")]


def _unfolded(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a convolution with a kernel as large as the image, as a gradient of weights, as a product.

    cuDNN finds no good form for it: with 32 channels of 32 x 32 places and 16 rows it takes 620 to 780 us, and a
    product of unfolded rows 70. `x` and `w` have the channels [channels, rows, ...] and [filters, rows, ...].
    """
    x, w, y = given(node.inputs[0]), given(node.inputs[1]), node.outputs[0]
    group = node.attributes.get_int("group", 1)
    image, places, kernel = ((known_sizes(value) or [None])[2:] for value in (x, w, y))
    known = [*image, *places, *kernel]
    if not image or None in known or len(node.inputs) > 2 or is_same(node):
        return None
    many, taps = math.prod(places), math.prod(kernel)  # type: ignore[arg-type]
    channels, filters = dims_of(x)[0], dims_of(w)[0]
    if many < 2 * taps or many <= 16 or not isinstance(channels, int) or not isinstance(filters, int):
        return None
    swap, window = [1, 0, *range(2, len(image) + 2)], window_of(node, kernel)  # type: ignore[arg-type]
    padded = [size + sum(pads) for size, *pads in zip(image, window.begin, window.end, strict=True)]  # type: ignore[operator]
    rows = op.Transpose(x, perm=swap)
    if window.is_padded:
        rows = op.Pad(rows, [0, 0, *window.begin, 0, 0, *window.end])
    rows = op.Reshape(rows, [0, 0, -1])  # [group * rows, channels, places]
    errors = op.Reshape(op.Transpose(w, perm=swap), [0, 0, -1])  # [rows, filters, places]
    if group > 1:
        errors = op.Transpose(op.Reshape(errors, [0, group, filters // group, -1]), perm=[1, 0, 2, 3])
    starts = _positions(kernel, window.strides, padded)  # type: ignore[arg-type]
    offsets = _positions(places, window.dilations, padded)  # type: ignore[arg-type]
    together = max(1, _MOST_UNFOLDED // (channels * many))
    sums = []
    for i in range(0, taps, together):
        read = starts[i : i + together, None] + offsets
        width = channels * len(read)
        columns = op.Reshape(op.Gather(rows, op.constant(read.ravel()), axis=2), [0, -1, many])
        if group > 1:
            columns = op.Reshape(columns, [group, -1, width, many])
            product = op.MatMul(errors, op.Transpose(columns, perm=[0, 1, 3, 2]))
            total = op.ReduceSum(product, [1], keepdims=0)
        elif filters <= many:
            total = op.ReduceSum(op.MatMul(errors, op.Transpose(columns, perm=[0, 2, 1])), [0], keepdims=0)
        else:  # a sum over rows and places at once: the products of all rows are larger than the columns
            columns = op.Reshape(op.Transpose(columns, perm=[1, 0, 2]), [width, -1])
            total = op.Gemm(op.Reshape(w, [filters, -1]), columns, transB=1)
        sums.append(op.Reshape(total, [filters, channels, len(read)]))
    joined = sums[0] if len(sums) == 1 else op.Concat(*sums, axis=2)
    return [op.Transpose(op.Reshape(joined, [filters, channels, *kernel]), perm=swap)]


def _positions(sizes: Sequence[int], steps: Sequence[int], image: Sequence[int]) -> np.ndarray:
    """Return the flat positions in an image of a grid with steps along its axes."""
    grid = np.indices(sizes).reshape(len(sizes), -1) * np.array(steps)[:, None]
    return np.ravel_multi_index(tuple(grid), tuple(image)).astype(np.int64)


def join_small_arrays(model: ir.Model) -> bool:
    """Compute new state that elementwise operators compute alike as one vector: each kernel takes a microsecond."""
    return join_arrays_by_size(model, _MOST_JOINED)


_WITHOUT_BFLOAT16 = (
    *("ArgMax", "ArgMin", "Ceil", "CumSum", "DepthToSpace", "Equal", "Floor", "Greater", "GreaterOrEqual"),
    *("LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "PRelu", "Pad", "Reciprocal"),
    *("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd", "Resize"),
)
CUDA: dict[str, Form] = {
    **ALONG_NO_AXIS,
    **{name: _first_of(*filter(None, [_without_bfloat16, ALONG_NO_AXIS.get(name)])) for name in _WITHOUT_BFLOAT16},
    "Celu": celu,
    "Concat": _in_parts,
    "Conv": _unfolded,
    "ConvTranspose": _even_pads,
    "MatMul": _expanded,
    "Mean": _first_of(_without_bfloat16, mean),
    "ReduceMean": _in_two_steps,
    "ReduceSum": _in_two_steps,
    "ScatterND": _by_element,
    "Size": _stays,
    "Split": _in_even_parts,
    "Sum": _stays,
}
