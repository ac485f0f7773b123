"""Normalizations: y = scale z + bias with z = (x - mean) / sqrt(variance + epsilon)."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.emitter import Emitter
from passes.gradient.registry import Gradients, rule
from passes.gradient.rules.shape import rank
from passes.gradient.walk import dims_of, further_output


def standardize(op: Emitter, x: Value, axes: list[int], epsilon: float) -> tuple[Value, Value]:
    """Return z and 1 / sqrt(variance + epsilon), of `x` along `axes`."""
    centered = x - op.ReduceMean(x, axes)
    inverse = 1 / op.Sqrt(op.ReduceMean(centered * centered, axes) + epsilon)
    return centered * inverse, inverse


def standardized(op: Emitter, dz: Value, z: Value, inverse: Value, axes: list[int]) -> Value:
    """Ioffe and Szegedy, https://arxiv.org/abs/1502.03167: dx = (dz - mean(dz) - z mean(dz z)) / sd."""
    return inverse * (dz - op.ReduceMean(dz, axes) - z * op.ReduceMean(dz * z, axes))


@rule("LayerNormalization")
def layer_normalization(
    op: Emitter,
    dy: Value,
    x: Value,
    scale: Value,
    bias: Value | None = None,
    *,
    node: Node,
    axis: int,
    epsilon: float,
    stash_type: int,
) -> Gradients:
    """Take the mean and deviation from the node's further outputs where they have the precision of `x`."""
    axes = list(range(axis % rank(x), rank(x)))
    if x.dtype == stash_type:
        shape = ir.Shape([*dims_of(x)[: axes[0]], *[1] * len(axes)])
        mean, inverse = (further_output(node, i, ir.DataType(stash_type), shape) for i in (1, 2))
        z = (x - mean) * inverse
    else:
        z, inverse = standardize(op, x, axes, epsilon)
    return [standardized(op, dy * scale, z, inverse, axes), dy * z, dy]


@rule("InstanceNormalization")
def instance_normalization(
    op: Emitter, dy: Value, x: Value, scale: Value, bias: Value, *, epsilon: float
) -> Gradients:
    axes = list(range(2, rank(x)))
    z, inverse = standardize(op, x, axes, epsilon)
    return by_channel(op, dy, x, z, standardized(op, dy * channels(op, scale, x), z, inverse, axes))


@rule("BatchNormalization")
def batch_normalization(
    op: Emitter,
    dy: Value,
    x: Value,
    scale: Value,
    bias: Value,
    mean: Value,
    variance: Value,
    *,
    epsilon: float,
    training_mode: int,
) -> Gradients:
    """In training the statistics are those of `x`; in inference they are inputs of their own."""
    if training_mode:
        axes = [0, *range(2, rank(x))]
        z, inverse = standardize(op, x, axes, epsilon)
        return by_channel(op, dy, x, z, standardized(op, dy * channels(op, scale, x), z, inverse, axes))
    inverse = 1 / op.Sqrt(variance + epsilon)
    z = (x - channels(op, mean, x)) * channels(op, inverse, x)
    factor = scale * inverse
    dx, dscale, dbias = by_channel(op, dy, x, z, dy * channels(op, factor, x))
    return [dx, dscale, dbias, -factor * dbias, -0.5 * factor * inverse * dscale]


def by_channel(op: Emitter, dy: Value, x: Value, z: Value, dx: Value) -> list[Value]:
    """Return the gradients of x, of the scale and of the bias that each channel has."""
    rest = [0, *range(2, rank(x))]
    return [dx, op.ReduceSum(dy * z, rest, keepdims=0), op.ReduceSum(dy, rest, keepdims=0)]


def channels(op: Emitter, vector: Value, x: Value) -> Value:
    """Make a number a channel broadcast along the other axes of `x`."""
    return op.Unsqueeze(vector, [*range(1, rank(x) - 1)]) if rank(x) > 2 else vector
