"""Differentiate quantization: rounding has derivative 1, and the scale has a gradient.

Bengio et al., https://arxiv.org/abs/1308.3432: the derivative of rounding is treated as 1. Jacob et al.,
https://arxiv.org/abs/1712.05877: it is 0 if a number is out of range. The gradients of the scale from both operators
sum to the gradient of Esser et al., https://arxiv.org/abs/1902.08153. A zero point is an integer and has no gradient.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import dims_of, dtype_of, like, rank
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.expansion import expansion


@expansion("QuantizeLinear")
def quantize_linear(
    op: Emitter, x: Value, scale: Value, zero_point: Input = None, *, y: Value, axis: int, block_size: int
) -> list[Value]:
    """Pass the gradient of numbers that round into the range of integers; halves round to even."""
    steps, dtype = x / stretched(op, scale, x, axis, block_size), dtype_of(y)
    low, high = float(dtype.min), float(dtype.max)
    if dtype.is_floating_point():
        return [op.Clip(steps, low, high)]
    rounded = op.Round(steps)
    if zero_point is not None:
        zero = op.Cast(zero_point, to=scale.dtype)
        rounded = rounded + stretched(op, zero, x, axis, block_size)
    inside = op.And(op.GreaterOrEqual(rounded, low), op.LessOrEqual(rounded, high))
    return [op.Where(inside, steps, 0.0)]


@expansion("DynamicQuantizeLinear")
def dynamic_quantize_linear(op: Emitter, x: Value) -> list[Value]:
    """Pass all gradients: the range contains all numbers and 0, so that no number is clipped."""
    most, least = op.ReduceMax(x, keepdims=0), op.ReduceMin(x, keepdims=0)
    scale = (op.Max(most, 0.0) - op.Min(least, 0.0)) / 255
    return [x / scale, scale]


def stretched(op: Emitter, scale: Value, x: Value, axis: int, block_size: int) -> Value:
    """Return the scale of each element of `x`."""
    if rank(scale) == 0:
        return scale
    ones = op.ConstantOfShape(op.shape_of(x), value=ir.tensor([1], dtype=ir.DataType.INT8))
    steps = op.DequantizeLinear(ones, scale, axis=axis, block_size=block_size)
    steps.shape = x.shape
    return steps


@rule("DequantizeLinear")
def dequantize_linear(
    op: Emitter,
    dy: Value,
    x: Value,
    scale: Value,
    zero_point: Input = None,
    *,
    active: frozenset[Value],
    axis: int,
    block_size: int,
) -> Gradients:
    """Differentiate y = (x - zero) scale, with one scale for all elements, per position on an axis, or per block."""
    ones = op.Expand(op.CastLike(1.0, scale), op.shape_of(scale))
    steps = op.DequantizeLinear(x, like(ones, scale), zero_point, axis=axis, block_size=block_size)
    terms = dy * op.Cast(steps, to=dy.dtype)
    dx = None
    if x in active:
        dx = dy * stretched(op, scale, x, axis, block_size)
        dx.shape = x.shape
    return [dx, by_scale(op, terms, x, scale, axis, block_size)]


def by_scale(op: Emitter, terms: Value, x: Value, scale: Value, axis: int, block_size: int) -> Value:
    """Sum the terms of all elements that share a scale."""
    if rank(scale) == 0:
        return terms
    axis %= rank(x)
    if block_size == 0:
        rest = [i for i in range(rank(x)) if i != axis]
        return like(op.ReduceSum(terms, rest, keepdims=0), scale) if rest else terms
    size, blocks = dims_of(x)[axis], dims_of(scale)[axis]
    if not isinstance(size, int) or not isinstance(blocks, int) or size != blocks * block_size:
        raise GraphoptError(
            f"DequantizeLinear of {x.name!r}: a scale's gradient needs whole blocks, found {x.shape} in blocks of "
            f"{block_size}: freeze the scale"
        )
    split = op.constant(np.array([blocks, block_size], np.int64))
    before, after = [op.shape_of(x, 0, axis)] * (axis > 0), [op.shape_of(x, axis + 1)] * (axis + 1 < rank(x))
    rows = op.Reshape(terms, op.Concat(*before, split, *after, axis=0))
    return like(op.ReduceSum(rows, [axis + 1], keepdims=0), scale)
