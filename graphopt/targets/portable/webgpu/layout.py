"""Write operators that move or choose elements as others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import constant_number, dims_of, rank
from graphopt.targets.portable.form import Form, given


def _slices(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a Split of many outputs as Slices. A kernel may read and write 8 buffers at least, often 10."""
    axis = node.attributes.get_int("axis", 0)
    sizes = [size for y in node.outputs if isinstance(size := dims_of(y)[axis], int)]
    if len(node.outputs) < 8 or len(sizes) < len(node.outputs):
        return None
    places = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return [op.Slice(node.inputs[0], [start], [end], [axis]) for start, end in places]


def _space_to_depth(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Transpose the elements of each block. There is no kernel for SpaceToDepth."""
    x, block = given(node.inputs[0]), node.attributes.get_int("blocksize", 0)
    heights, widths = op.shape_of(x, 2, 3), op.shape_of(x, 3, 4)
    tiles = op.Concat(heights / block, [block], widths / block, [block], axis=0)
    split = op.Reshape(x, op.Concat([0, -1], tiles, axis=0))
    moved = op.Transpose(split, perm=[0, 3, 5, 1, 2, 4])
    shape = op.Concat(op.shape_of(x, 0, 1), [-1], heights / block, widths / block, axis=0)
    return [op.Reshape(moved, shape)]


def _triangle(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Compare rows with columns. 1.27 has no kernel for Trilu."""
    x, *diagonal = node.inputs
    x = given(x)
    if x.shape is None:
        return None
    rows, columns = (
        op.Cast(op.Range(0, op.Squeeze(op.shape_of(x, i, i + 1), [0]), 1), to=ir.DataType.INT32)
        for i in (rank(x) - 2, rank(x) - 1)
    )
    distance = op.Unsqueeze(columns, [0]) - op.Unsqueeze(rows, [1])
    given_first = diagonal[0] if diagonal and diagonal[0] is not None else op.constant(0)
    first = op.Cast(given_first, to=ir.DataType.INT32)
    compare = op.GreaterOrEqual if node.attributes.get_int("upper", 1) else op.LessOrEqual
    return [op.Where(compare(distance, first), x, op.constant(0, like=x))]


def _one_hot(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Compare indices with the numbers of classes. There is no kernel for OneHot."""
    indices, depth, values = map(given, node.inputs)
    if indices.shape is None or constant_number(depth) is None:
        return None
    indices = op.Cast(indices, to=ir.DataType.INT32)
    count, axis = int(constant_number(depth) or 0), node.attributes.get_int("axis", -1)
    wrapped = op.Where(op.Less(indices, op.constant(0, like=indices)), indices + count, indices)
    total = rank(indices) + 1
    classes = op.constant(list(range(count)), like=indices)
    shape = [count if i == axis % total else 1 for i in range(total)]
    chosen = op.Equal(op.Unsqueeze(wrapped, [axis]), op.Reshape(classes, shape))
    off, on = (op.Slice(values, [i], [i + 1]) for i in (0, 1))
    return [op.Where(chosen, on, off)]


FORMS: dict[str, Form] = {
    "OneHot": _one_hot,
    "SpaceToDepth": _space_to_depth,
    "Split": _slices,
    "Trilu": _triangle,
}
