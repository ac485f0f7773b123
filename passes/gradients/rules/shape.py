"""Differentiate operators that move elements."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import constant_of, dims_of, like, rank
from passes.gradients.registry import Gradients, one_line_rules, rule

_MOST = 2**24  # the largest number of elements of a constant in a rule; as a list it takes half a gigabyte


def reshape_like(op: Emitter, value: Value, x: Value) -> Value:
    """Reshape `value` to the shape of `x`, without reading `x` if at most one of its dimensions is unknown."""
    if value.shape == x.shape:
        return value
    dims = [dim if isinstance(dim, int) else -1 for dim in dims_of(x)]
    known = dims.count(-1) <= 1 and 0 not in dims
    if known:
        return like(op.Reshape(value, op.constant(np.array(dims, np.int64))), x)
    return like(op.Reshape(value, op.shape_of(x), allowzero=1), x)


def constant_size(*sizes: int) -> int:
    """Return the number of elements of a constant of given sizes, which a model's file may make arbitrarily large."""
    count = math.prod(int(size) for size in sizes)
    if count > _MOST:
        raise GraphoptError(
            f"it takes a constant of at most {_MOST:,} elements, found {count:,}: freeze the parameters before it"
        )
    return count


def pads_of_all_axes(op: Emitter, x: Value, pads: Value, axes: Input) -> Value:
    """Return the pads of all axes of `x`. ONNX Runtime 1.31 moves a Transpose incorrectly past a Pad with `axes`."""
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
