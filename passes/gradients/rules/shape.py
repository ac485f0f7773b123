"""Differentiate operators that move or select elements: add each gradient at the position of its element."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.flat_indices import flat_indices, flat_indices_of_rows
from graphopt.graph.values import constant_of, dims_of, like, rank, wide_type
from passes.gradients.registry import Gradients, one_line_rules, rule
from passes.gradients.walk import further_output, zeros

# The largest number of elements of a constant in a rule; as a list it takes half a gigabyte
_MOST_ELEMENTS = 2**24


def reshape_like(op: Emitter, value: Value, x: Value) -> Value:
    """Reshape `value` to the shape of `x`, without reading `x` if at most one of its dimensions is unknown."""
    if value.shape == x.shape:
        return value
    dims = [dim if isinstance(dim, int) else -1 for dim in dims_of(x)]
    known = dims.count(-1) <= 1 and 0 not in dims
    if known:
        return like(op.Reshape(value, op.constant(np.array(dims, np.int64))), x)
    return like(op.Reshape(value, op.shape_of(x), allowzero=1), x)


def elements_along(op: Emitter, x: Value, count: int, axis: int) -> list[Value]:
    parts = [x] if count == 1 else op.Split(x, num_outputs=count, axis=axis, _outputs=count)
    return [op.Squeeze(part, [axis]) for part in parts]


def indices_along(op: Emitter, x: Value, axis: int, trailing: int = 0) -> Value:
    """Return the indices of an axis, 0, 1, 2, ..., with trailing axes of size 1."""
    row: Value = op.Range(0, op.Squeeze(op.shape_of(x, axis, axis + 1)), 1)
    return op.Unsqueeze(row, [*range(1, 1 + trailing)]) if trailing else row


def constant_size(*sizes: int) -> int:
    """Return the number of elements of a constant of given sizes, which a model's file may make arbitrarily large."""
    count = math.prod(int(size) for size in sizes)
    if count > _MOST_ELEMENTS:
        raise GraphoptError(
            f"it takes a constant of at most {_MOST_ELEMENTS:,} elements, found {count:,}: freeze the "
            f"parameters before it"
        )
    return count


def pads_of_all_axes(op: Emitter, x: Value, pads: Value, axes: Input) -> Value:
    """Return the pads of all axes of `x`. Some runtimes mistake its `axes` (tests/faults.py: Pad-axes)."""
    if axes is None:
        return pads
    at, widths = constant_of(axes), constant_of(pads)
    if at is not None and widths is not None:
        return op.constant(spread_pads(rank(x), widths, at))
    at = op.Mod(op.cast(axes, ir.DataType.INT64), rank(x))
    where = op.Unsqueeze(op.Concat(at, at + rank(x), axis=0), [1])
    return op.ScatterND(op.constant(np.zeros(2 * rank(x), np.int64)), where, pads)


def spread_pads(count: int, pads: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """Return the pads of `count` axes from those of some axes: all begin pads, then all end pads."""
    spread = np.zeros((2, count), np.int64)
    spread[:, axes % count] = pads.reshape(2, -1)
    return spread.ravel()


one_line_rules(
    {
        **dict.fromkeys(
            ("Flatten", "Reshape", "Squeeze", "Unsqueeze"), lambda op, dy, x, *_: [reshape_like(op, dy, x)]
        ),
        "CumProd": lambda op, dy, x, axis, *, y, exclusive, reverse: [  # the factors are assumed not to be 0
            op.CumSum(dy * y, axis, exclusive=exclusive, reverse=1 - reverse) / x
        ],
        "CumSum": lambda op, dy, x, axis, *, exclusive, reverse: [
            op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse)
        ],
        "Expand": lambda op, dy, x, shape: [dy],
        "Range": lambda op, dy, start, limit, delta: [
            op.ReduceSum(dy, keepdims=0),
            None,
            op.ReduceSum(dy * op.Cast(op.Range(0, op.Size(dy), 1), to=dy.dtype), keepdims=0),
        ],
        "ReverseSequence": lambda op, dy, x, lengths, *, batch_axis, time_axis: [
            op.ReverseSequence(dy, lengths, batch_axis=batch_axis, time_axis=time_axis)
        ],
        "SpaceToDepth": lambda op, dy, x, *, blocksize, mode="DCR": [  # before opset 28, the only order
            like(op.DepthToSpace(dy, blocksize=blocksize, mode=mode), x)
        ],
        "Split": lambda op, dy, x, sizes=None, *, dys, axis: [like(op.Concat(*dys, axis=axis), x)],
        "Transpose": lambda op, dy, x, *, perm=None: [
            op.Transpose(dy) if perm is None else op.Transpose(dy, perm=np.argsort(perm).tolist())
        ],
        "Trilu": lambda op, dy, x, k=None, *, upper: [op.Trilu(dy, k, upper=upper)],
    }
)


@rule("Concat")
def concat(op: Emitter, dy: Value, *inputs: Value, axis: int) -> Gradients:
    if len(inputs) == 1:
        return [dy]
    axis %= rank(dy)
    sizes = op.Concat(*(op.shape_of(x, axis, axis + 1) for x in inputs), axis=0)
    parts = op.Split(dy, sizes, axis=axis, _outputs=len(inputs))
    return [like(part, x) for part, x in zip(parts, inputs, strict=True)]


@rule("Tile")
def tile(op: Emitter, dy: Value, x: Value, repeats: Value) -> Gradients:
    """Sum over the copies: an axis of r copies of n elements is reshaped to two axes, r and n."""
    pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.shape_of(x), [1]), axis=1)
    copies = op.Reshape(dy, op.Reshape(pairs, [-1]))
    return [like(op.ReduceSum(copies, [*range(0, 2 * rank(x), 2)], keepdims=0), x)]


@rule("DepthToSpace")
def depth_to_space(op: Emitter, dy: Value, x: Value, *, blocksize: int, mode: str) -> Gradients:
    """Apply SpaceToDepth, whose only order here is DCR (block, then channel), and transpose for the order CRD."""
    blocks = op.SpaceToDepth(dy, blocksize=blocksize)
    if mode == "CRD":
        split = op.Reshape(blocks, op.Concat([0, blocksize**2, -1], op.Shape(blocks, start=2), axis=0))
        blocks = op.Transpose(split, perm=[0, 2, 1, 3, 4])
    return [reshape_like(op, blocks, x) if mode == "CRD" else like(blocks, x)]


def positions(op: Emitter, x: Value) -> Value:
    """Return the flat position of each element of `x`, in the shape of `x`."""
    where = flat_indices(op, op.shape_of(x))
    where.shape = x.shape
    return where


def add_up(op: Emitter, shape: Value, where: Value, dy: Value, axis: int = 0) -> Value:
    """Add `dy` into zeros of a shape; 16-bit numbers in float32, as CPUs need (tests/faults.py: Scatter-16)."""
    dtype, where = wide_type(dy), op.cast(where, ir.DataType.INT64)
    zeros = op.ConstantOfShape(shape, value=ir.tensor([0], dtype=dtype))
    total = op.ScatterElements(zeros, where, op.cast(dy, dtype), axis=axis, reduction="add")
    return op.cast(total, dy.dtype)


def add_rows(op: Emitter, shape: Value, rows: Value, dy: Value, x: Value, axes: int = 1) -> Value:
    """Add rows of `dy`, by their numbers in `rows`, into zeros of a shape, of the rank of `x`.

    A row has a place on each of the first `axes` axes.

    ONNX Runtime's ScatterND loses rows on several threads (tests/faults.py: ScatterND-threads). ScatterElements adds in
    order, along one axis fastest: on one thread, rows of 512 numbers take 2.4 times as long as by ScatterND, and the
    positions twice the bytes of `dy`.
    """
    where = flat_indices_of_rows(op, shape, op.cast(rows, ir.DataType.INT64), axes, rank(x))
    total = add_up(op, op.ReduceProd(shape, keepdims=1), op.Reshape(where, [-1]), op.Reshape(dy, [-1]))
    return op.Reshape(total, shape, allowzero=1)


def scatter_back(op: Emitter, dy: Value, where: Value, x: Value) -> Value:
    """Return the gradient of `x` if each element of `dy` belongs to one flat position of `x`."""
    size = op.ReduceProd(op.shape_of(x), keepdims=1)
    total = add_up(op, size, op.Reshape(where, [-1]), op.Reshape(dy, [-1]))
    return reshape_like(op, total, x)


@rule("Slice")
def slice_(op: Emitter, dy: Value, x: Value, *bounds: Value) -> Gradients:
    """Pad by the parts that the Slice removed if they are known, and otherwise add into zeros."""
    pads = _left_out(x, *bounds)
    if pads is not None:
        return [like(op.Pad(dy, pads), x)]
    return [scatter_back(op, dy, op.Slice(positions(op, x), *bounds), x)]


def _left_out(x: Value, *bounds: Value) -> list[int] | None:
    """Return the pads that reverse a Slice in steps of 1 along static axes."""
    known = [constant_of(bound) for bound in bounds]
    if any(bound is None for bound in known):
        return None
    starts, ends, *rest = [bound.tolist() for bound in known if bound is not None]
    axes = rest[0] if rest else range(len(starts))
    pads = [0] * (2 * rank(x))
    for axis, start, end in zip(axes, starts, ends, strict=True):
        size = dims_of(x)[axis]
        if not isinstance(size, int):
            return None
        first, last, _ = slice(start, end).indices(size)
        pads[axis % rank(x)], pads[axis % rank(x) + rank(x)] = first, size - max(first, last)
    return pads if len(rest) < 2 or set(rest[1]) <= {1} else None


@rule("Pad")
def pad(
    op: Emitter, dy: Value, x: Value, pads: Value, fill: Input = None, axes: Input = None, *, mode: str
) -> Gradients:
    """Pad by the negative pads, or slice if no pad is negative. Add the gradient of a copied element to its origin."""
    pads = pads_of_all_axes(op, x, pads, axes)
    if mode != "constant":
        return [scatter_back(op, dy, op.Pad(positions(op, x), pads, mode=mode), x)]
    widths = constant_of(pads)
    if widths is None or (widths < 0).any():
        dx = like(op.Pad(dy, op.Neg(pads)), x)
    else:
        begin, end = widths.reshape(2, -1)
        cut = np.flatnonzero(begin + end)
        ends = np.where(end == 0, np.iinfo(np.int64).max, -end)
        dx = like(op.Slice(dy, op.constant(begin[cut]), op.constant(ends[cut]), op.constant(cut)), x)
    rest = op.ReduceSum(dy, keepdims=0) - op.ReduceSum(dx, keepdims=0)
    rest.shape = ir.Shape([])
    return [dx, None, rest]


@rule("Gather")
def gather(op: Emitter, dy: Value, x: Value, indices: Value, *, axis: int) -> Gradients:
    """Add rows of `dy` to rows of zeros with the gathered axis first. Pad a single known row instead."""
    width, size, index = rank(indices), dims_of(x)[axis], constant_of(indices)
    axis %= rank(x)
    if width < 2 and index is not None and index.size == 1 and isinstance(size, int) and size:
        before = index.item() % size
        row = dy if width else op.Unsqueeze(dy, [axis])
        pads = spread_pads(rank(x), np.array([before, size - 1 - before]), np.array([axis]))
        return [like(op.Pad(row, op.constant(pads)), x)]
    if axis == 0:
        return [like(add_rows(op, op.shape_of(x), indices, dy, x), x)]
    shape = op.Gather(op.shape_of(x), [axis, *range(axis), *range(axis + 1, rank(x))])
    front = [*range(axis, axis + width), *range(axis), *range(axis + width, rank(x) - 1 + width)]
    total = add_rows(op, shape, indices, op.Transpose(dy, perm=front), x)
    return [like(op.Transpose(total, perm=[*range(1, axis + 1), 0, *range(axis + 1, rank(x))]), x)]


one_line_rules(
    {
        "Compress": lambda op, dy, x, condition, *, node: [
            scatter_back(op, dy, op.Compress(positions(op, x), condition, **node.attributes), x)
        ],
        "GatherElements": lambda op, dy, x, indices, *, axis: [
            like(add_up(op, op.shape_of(x), indices, dy, axis=axis), x)
        ],
        "TopK": lambda op, dy, x, k, *, axis, node: [
            like(op.ScatterElements(zeros(op, x), node.outputs[1], dy, axis=axis), x)
        ],
    }
)


@rule("GatherND")
def gather_nd(op: Emitter, dy: Value, x: Value, indices: Value, *, batch_dims: int) -> Gradients:
    """Add rows of `dy` to rows of zeros, by the numbers of the rows; of each row of a batch, numbers by positions."""
    axes = dims_of(indices)[-1]
    if batch_dims or not isinstance(axes, int):
        return [scatter_back(op, dy, op.GatherND(positions(op, x), indices, batch_dims=batch_dims), x)]
    sizes = op.shape_of(x, 0, axes)
    numbers = indices if axes == 1 else op.Where(op.Less(indices, 0), op.Add(indices, sizes), indices)
    rows = op.Gather(numbers, 0, axis=-1)
    for i in range(1, axes):
        rows = op.Add(op.Mul(rows, op.Gather(sizes, i)), op.Gather(numbers, i, axis=-1))
    return [like(add_rows(op, op.shape_of(x), rows, dy, x, axes), x)]


@rule("ScatterElements", "ScatterND")
def scattered(
    op: Emitter, dy: Value, x: Value, indices: Value, updates: Value, *, y: Value, node: Node, reduction: str
) -> Gradients:
    """Pass no gradient to replaced elements, split it among equal extremes, and multiply it by the other factors."""
    write, read, along = op.ScatterND, op.GatherND, {}
    if node.op_type == "ScatterElements":
        write, read = op.ScatterElements, op.GatherElements
        along = {"axis": node.attributes.get_int("axis", 0)}

    def scatter(base: Value, values: Value, reduction: str = "none") -> Value:
        return like(write(base, indices, values, **along, reduction=reduction), x)

    def gather(values: Value) -> Value:
        return like(read(values, indices, **along), updates)

    if reduction == "none":
        return [scatter(dy, zeros(op, updates)), None, gather(dy)]
    if reduction == "add":
        return [dy, None, gather(dy)]
    if reduction == "mul":
        zero, nil = (op.Cast(op.Equal(factor, 0.0), to=x.dtype) for factor in (x, updates))
        count, product = scatter(zero, nil, "add"), dy * scatter(x + zero, updates + nil, "mul")
        dx = product / (x + zero) * op.CastLike(op.Equal(count, zero), x)
        return [dx, None, gather(product) / (updates + nil) * op.CastLike(op.Equal(gather(count), nil), x)]
    unchanged, taken = op.Cast(op.Equal(x, y), to=x.dtype), op.Cast(op.Equal(updates, gather(y)), to=x.dtype)
    share = dy / op.Max(scatter(unchanged, taken, "add"), 1.0)
    return [share * unchanged, None, gather(share) * taken]


@rule("Unique")
def unique(op: Emitter, dy: Value, x: Value, *, node: Node, axis: int | None = None) -> Gradients:
    """Pass the gradient to the first of equal elements."""
    first = further_output(node, 1, ir.DataType.INT64, ir.Shape([None]))
    if axis is not None:
        return gather(op, dy, x, first, axis=axis)
    return [scatter_back(op, dy, first, x)]


@rule("OneHot")
def one_hot(op: Emitter, dy: Value, indices: Value, depth: Value, values: Value, *, y: Value, axis: int) -> Gradients:
    """Sum the gradients of the elements that equal each of the two values."""
    hot = op.OneHot(indices, depth, op.CastLike(op.constant([0.0, 1.0]), values), axis=axis)
    on, total = op.ReduceSum(dy * hot, keepdims=0), op.ReduceSum(dy, keepdims=0)
    return [None, None, op.Concat(op.Unsqueeze(total - on, [0]), op.Unsqueeze(on, [0]), axis=0)]


@rule("TensorScatter")
def tensor_scatter(
    op: Emitter, dy: Value, x: Value, update: Value, start: Input = None, *, axis: int, mode: str
) -> Gradients:
    """Pass no gradient to the overwritten part of the cache, which starts at a separate position for each row."""
    dx = op.TensorScatter(dy, zeros(op, update), start, axis=axis, mode=mode)
    axis %= rank(x)
    at = indices_along(op, update, axis, rank(x) - axis - 1)
    if start is not None:
        at = at + op.Unsqueeze(start, [*range(1, rank(x))])
    if mode == "circular":
        at = op.Mod(at, op.Shape(x, start=axis, end=axis + 1))
    where = op.Expand(at, op.shape_of(update))
    return [like(dx, x), like(op.GatherElements(dy, where, axis=axis), update)]
