"""Quantization: the numbers are integers, but their scale learns."""

from __future__ import annotations

import numpy as np
from onnx_ir import Value

from graphopt.emitter import Emitter, like
from graphopt.errors import GraphoptError
from passes.gradient.registry import Gradients, rule
from passes.gradient.rules.shape import rank, sizes_of
from passes.gradient.walk import dims_of


@rule("DequantizeLinear")
def dequantize_linear(
    op: Emitter,
    dy: Value,
    x: Value,
    scale: Value,
    zero_point: Value | None = None,
    *,
    axis: int,
    block_size: int,
) -> Gradients:
    """y = (x - zero) scale, one scale for all, for each place along an axis or for each block."""
    ones = op.Expand(op.CastLike(1.0, scale), op.shape_of(scale))
    steps = op.DequantizeLinear(x, like(ones, scale), zero_point, axis=axis, block_size=block_size)
    terms = dy * op.Cast(steps, to=dy.dtype)
    if rank(scale) == 0:
        return [None, terms]
    axis %= rank(x)
    if block_size == 0:
        rest = [i for i in range(rank(x)) if i != axis]
        return [None, like(op.ReduceSum(terms, rest, keepdims=0), scale) if rest else terms]
    size, blocks = dims_of(x)[axis], dims_of(scale)[axis]
    if not isinstance(size, int) or not isinstance(blocks, int) or size != blocks * block_size:
        raise GraphoptError(f"DequantizeLinear of {x.name!r}: a scale's gradient needs whole blocks")
    split = op.constant(np.array([blocks, block_size], np.int64))
    shape = (
        [sizes_of(op, x, 0, axis)] * (axis > 0) + [split] + [sizes_of(op, x, axis + 1)] * (axis + 1 < rank(x))
    )
    return [
        None,
        like(op.ReduceSum(op.Reshape(terms, op.Concat(*shape, axis=0)), [axis + 1], keepdims=0), scale),
    ]
