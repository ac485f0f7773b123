"""Differentiate reductions, softmaxes and normalizations along axes.

Reductions are a table of gradients that broadcast along the reduced axes. Normalizations are y = scale z + bias with
z = (x - mean) / sqrt(variance + epsilon).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import BATCH_COUNT, BATCH_GRADIENT, OF_BATCH
from graphopt.graph.values import constant_of, dims_of, dtype_of, rank
from passes.gradients.registry import UNIFORM, Active, Gradients, rule
from passes.gradients.rules.elementwise import mask, nonzero
from passes.gradients.rules.shape import reshape_like
from passes.gradients.walk import broadcast_to, further_output, is_uniform, zeros

# What a rule needs to reduce as the operator does: its input `axes`, its `noop_with_empty_axes`, and `keepdims=1`.
Along = dict[str, Any]


def extreme(op: Emitter, x: Value, y: Value, dy: Value, along: Along) -> Value:
    """Split the gradient among equal extremes."""
    chosen = mask(op, op.Equal(x, y), x)
    return chosen * (dy / op.ReduceSum(chosen, **along))


def product(op: Emitter, x: Value, y: Value, dy: Value, along: Along) -> Value:
    """Return the product of the other elements.

    A division computes it from the elements that are not 0. The other zeros contribute the factor 1 if there are none,
    the zero itself if there is one, so that second derivatives are right, and 0 if there are more.
    """
    is_zero = op.Equal(x, 0.0)
    zero = mask(op, is_zero, x)
    others = op.ReduceSum(zero, **along) - zero
    only = x * zero
    zeros = mask(op, op.Equal(others, 0.0), x) + mask(op, op.Equal(others, 1.0), x) * (
        op.ReduceSum(only, **along) - only
    )
    factors = op.Where(is_zero, op.constant(1.0, like=x), x)
    return dy * (op.ReduceProd(factors, **along) / factors * zeros)


def _mean(op: Emitter, x: Value, y: Value, dy: Value, along: Along) -> Value:
    """Divide by the number of elements of `x` for each element of `y`."""
    known = np.array([], np.int64) if along["axes"] is None else constant_of(along["axes"])
    if known is None:
        return dy / op.Cast(op.Size(x) / op.Size(y), to=x.dtype)
    return dy / op.count(x, known.tolist() or ([] if along["noop_with_empty_axes"] else range(rank(x))))


_REDUCTIONS: dict[str, Callable[..., Value]] = {
    "ReduceSum": lambda op, x, y, dy, along: dy,
    "ReduceMean": _mean,
    "ReduceMax": extreme,
    "ReduceMin": extreme,
    "ReduceProd": product,
    "ReduceL1": lambda op, x, y, dy, along: op.Sign(x) * dy,
    "ReduceL2": lambda op, x, y, dy, along: x * (dy / nonzero(op, y)),  # 0 if all elements are 0
    "ReduceSumSquare": lambda op, x, y, dy, along: x * (2 * dy),
    "ReduceLogSum": lambda op, x, y, dy, along: dy / op.Exp(y),
    "ReduceLogSumExp": lambda op, x, y, dy, along: op.Exp(x - y) * dy,
}


@rule(*_REDUCTIONS)
def reduction(op: Emitter, dy: Value, x: Value, axes: Input = None, *, y: Value, node: Node, **how: Any) -> Gradients:
    along = {"axes": axes, "keepdims": 1, "noop_with_empty_axes": how["noop_with_empty_axes"]}
    if not how["keepdims"] and axes is not None:
        y, dy = (value if is_uniform(value) else op.Unsqueeze(value, axes) for value in (y, dy))
    dx = _REDUCTIONS[node.op_type](op, x, y, dy, along)
    return [dx if is_uniform(dx) else broadcast_to(op, dx, x)]


UNIFORM.update([("", "ReduceSum"), ("", "ReduceMean")])


def standardize(op: Emitter, x: Value, axes: list[int], epsilon: float) -> tuple[Value, Value]:
    """Return z and 1 / sqrt(variance + epsilon) of `x` along `axes`."""
    centered = x - op.ReduceMean(x, axes)
    inverse = 1 / op.Sqrt(op.ReduceMean(centered * centered, axes) + epsilon)
    return centered * inverse, inverse


def standardized(op: Emitter, dz: Value, z: Value, inverse: Value, axes: list[int]) -> Value:
    """Return dx = (dz - mean(dz) - z mean(dz z)) / sd (Ioffe and Szegedy, https://arxiv.org/abs/1502.03167)."""
    return inverse * (dz - op.ReduceMean(dz, axes) - z * op.ReduceMean(dz * z, axes))


@rule("LayerNormalization")
def _layer_normalization(
    op: Emitter, dy: Input, x: Value, scale: Value, *bias: Value, dys: list[Input], node: Node, **how: Any
) -> Gradients:
    """Reuse the mean and deviation from the node's further outputs if they have the precision of `x`."""
    dy, *further = dys
    assert dy is not None
    axes = list(range(how["axis"] % rank(x), rank(x)))
    if x.dtype == how["stash_type"]:
        shape = ir.Shape([*dims_of(x)[: axes[0]], *[1] * len(axes)])
        mean, inverse = (further_output(node, i, dtype_of(x), shape) for i in (1, 2))
        z = (x - mean) * inverse
    else:
        z, inverse = standardize(op, x, axes, how["epsilon"])
    dx = standardized(op, dy * scale, z, inverse, axes)
    for i, dstatistic in enumerate(further):
        if dstatistic is None:  # the optional output does not exist
            continue
        share = op.Cast(dstatistic, to=x.dtype) / op.count(x, axes)
        dx = dx - share * inverse * inverse * z if i else dx + share
    return [dx, dy * z, dy]


@rule("InstanceNormalization")
def instance_normalization(op: Emitter, dy: Value, x: Value, scale: Value, bias: Value, *, epsilon: float) -> Gradients:
    axes = list(range(2, rank(x)))
    if not axes:
        raise GraphoptError(f"expected axes after batch and channels, found {x.name!r} of shape {x.shape}: reshape it")
    z, inverse = standardize(op, x, axes, epsilon)
    return _by_channel(op, dy, x, z, standardized(op, dy * channels(op, scale, x), z, inverse, axes))


@rule("BatchNormalization")
def _batch_normalization(
    op: Emitter,
    dy: Input,
    x: Value,
    scale: Value,
    bias: Value,
    mean: Value,
    variance: Value,
    *,
    active: Active,
    further: list[Input],
    epsilon: float,
    momentum: float,
    training_mode: int,
    node: Node,
) -> Gradients:
    """Use the statistics of `x` in training. In inference they are inputs, and dx is a normalization too.

    Further outputs are the running statistics: momentum times the old ones plus (1 - momentum) times those of `x`.
    """
    if training_mode:
        axes = [0, *range(2, rank(x))]
        z, inverse = standardize(op, x, axes, epsilon)
        dy = zeros(op, x) if dy is None else dy
        dx, *rest = _by_channel(op, dy, x, z, standardized(op, dy * channels(op, scale, x), z, inverse, axes))
        for i, dstatistic in enumerate(further):
            if dstatistic is not None:
                share = channels(op, dstatistic, x) * (1 - momentum) / op.count(x, axes)
                dx = dx + (2 * share * z / inverse if i else share)
        return [dx, *rest, *(dstatistic and dstatistic * momentum for dstatistic in further)]
    assert dy is not None
    if OF_BATCH.is_set(node):
        return _of_batch(op, dy, x, scale, mean, variance, epsilon)
    zero, ones = filled(op, 0.0, scale), filled(op, 1.0, scale)
    z = op.BatchNormalization(x, ones, zero, mean, variance, epsilon=epsilon)
    dx = op.BatchNormalization(dy, scale, zero, zero, variance, epsilon=epsilon)
    dx, dscale, dbias = _by_channel(op, dy, x, z, dx)
    if mean not in active and variance not in active:
        return [dx, dscale, dbias]
    inverse = 1 / op.Sqrt(variance + epsilon)
    return [dx, dscale, dbias, -scale * inverse * dbias, -0.5 * scale * inverse * inverse * dscale]


def _of_batch(
    op: Emitter, dy: Value, x: Value, scale: Value, mean: Value, variance: Value, epsilon: float
) -> Gradients:
    """Differentiate through the batch statistics, which have no gradients of their own: per channel, as `standardized`.

    With c = x - mean and s = 1 / sd, dx = scale s dy - scale s (mean(dy) + c s^2 mean(dy c)). The first part is a
    shifted normalization of dy, and the second is c times one number per channel. The count and the sums in both are
    marked, because several workers take them over all rows.
    """
    axes = [0, *range(2, rank(x))]
    centered = x - channels(op, op.Cast(mean, to=x.dtype), x)
    inverse = 1 / op.Sqrt(op.Cast(variance, to=x.dtype) + epsilon)
    dbias = op.ReduceSum(dy, axes, keepdims=0)
    along = op.ReduceSum(dy * centered, axes, keepdims=0) * inverse
    share = BATCH_COUNT.mark(op.Cast(scale, to=x.dtype) * inverse / op.count(x, axes))
    shift = op.Cast(BATCH_GRADIENT.mark(-share * dbias), to=scale.dtype)
    zero = op.Cast(filled(op, 0.0, scale), to=variance.dtype)
    dx = op.BatchNormalization(dy, scale, shift, zero, variance, epsilon=epsilon)
    slope = BATCH_GRADIENT.mark(share * inverse * along)
    return [dx - centered * channels(op, slope, x), along, dbias]


def filled(op: Emitter, number: float, x: Value) -> Value:
    """Return a tensor of the shape and element type of `x` that is filled with one number."""
    if all(isinstance(dim, int) for dim in dims_of(x)):
        return op.constant(np.full(dims_of(x), number), like=x)
    return op.Expand(op.constant(number, like=x), op.shape_of(x))


def _by_channel(op: Emitter, dy: Value, x: Value, z: Value, dx: Value) -> list[Value]:
    """Return the gradients of x, and of the scale and bias of each channel."""
    rest = [0, *range(2, rank(x))]
    return [dx, op.ReduceSum(dy * z, rest, keepdims=0), op.ReduceSum(dy, rest, keepdims=0)]


def channels(op: Emitter, vector: Value, x: Value) -> Value:
    """Reshape one number per channel to broadcast along the other axes of `x`."""
    return op.Unsqueeze(vector, [*range(1, rank(x) - 1)]) if rank(x) > 2 else vector


@rule("LpNormalization")
def lp_normalization(op: Emitter, dy: Value, x: Value, *, y: Value, axis: int, p: int) -> Gradients:
    """Differentiate y = x / n with n = |x|: dx = (dy - dn/dx sum(dy y)) / n, where dn/dx is y or its sign."""
    norm = op.ReduceL1(x, [axis]) if p == 1 else op.Sqrt(op.ReduceSum(x * x, [axis]))
    return [(dy - (op.Sign(x) if p == 1 else y) * op.ReduceSum(dy * y, [axis])) / nonzero(op, norm)]


@rule("LRN")
def lrn(op: Emitter, dy: Value, x: Value, *, y: Value, size: int, alpha: float, beta: float, bias: float) -> Gradients:
    """Differentiate y = x s^-beta with s = bias + alpha mean(x^2) over `size` channels (Krizhevsky et al. 2012)."""
    before, after = (size - 1) // 2, size // 2

    def mean(value: Value, first: int, last: int) -> Value:
        positions = op.ReduceProd(op.shape_of(x, 2))  # a -1 in its place fails without rows
        plane = op.Reshape(value, op.Concat([0, 1], op.shape_of(x, 1, 2), positions, axis=0))
        pool = {"kernel_shape": [size, 1], "pads": [first, 0, last, 0], "strides": [1, 1]}
        return reshape_like(op, op.AveragePool(plane, **pool, count_include_pad=1), x)

    s = bias + alpha * mean(x * x, before, after)
    power = op.Pow(s, op.constant(-beta, like=x))
    return [dy * power - 2 * alpha * beta * x * mean(dy * x * power / s, after, before)]


@rule("Softmax")
def softmax(op: Emitter, dy: Value, x: Value, *, y: Value, axis: int) -> Gradients:
    """Return dx = y (dy - sum(y dy)), and 0 in rows that contain NaN, which the model replaces."""
    if any(user.op_type in ("IsNaN", "Where") for user in y.consumers()):
        y = op.Where(op.IsNaN(y), zeros(op, y), y)
    return [y * (dy - op.ReduceSum(y * dy, [axis]))]


@rule("LogSoftmax")
def log_softmax(op: Emitter, dy: Value, x: Value, *, y: Value, axis: int) -> Gradients:
    """Return dx = dy - softmax(x) sum(dy)."""
    return [dy - op.Exp(y) * op.ReduceSum(dy, [axis])]
