"""Reductions."""

from __future__ import annotations

from onnx_ir import Value

from graphopt.emitter import Emitter, like
from passes.gradient.registry import Gradients, rule
from passes.gradient.rules.elementwise import mask
from passes.gradient.walk import constant_of


def kept(op: Emitter, value: Value, axes: Value | None, keepdims: int) -> Value:
    """Give `value`, of the shape of a reduction's output, the reduced axes back, so that it broadcasts."""
    return value if keepdims or axes is None else op.Unsqueeze(value, axes)


def spread(op: Emitter, value: Value, x: Value) -> Value:
    """Repeat `value` to the shape of `x`."""
    return like(op.Expand(value, op.shape_of(x)), x)


def shared(op: Emitter, dy: Value, x: Value, y: Value, axes: Value | list[int] | None) -> Value:
    """Give the gradient of an extreme of `x` along `axes`, in equal shares, to the elements that are the extreme."""
    chosen = mask(op, op.Equal(x, y), x)
    return chosen * (dy / op.ReduceSum(chosen, axes))


def reduced_count(op: Emitter, x: Value, y: Value, axes: Value | None) -> Value | float:
    """Return how many elements of `x` make one of the reduction's output `y`."""
    known = constant_of(axes)
    if axes is None or (known is not None and known.size == 0):
        return op.count(x)
    return op.Cast(op.Size(x) / op.Size(y), to=x.dtype) if known is None else op.count(x, known.tolist())


@rule("ReduceSum")
def reduce_sum(op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int) -> Gradients:
    return [spread(op, kept(op, dy, axes, keepdims), x)]


@rule("ReduceMean")
def reduce_mean(
    op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, y: Value, keepdims: int
) -> Gradients:
    return [spread(op, kept(op, dy / reduced_count(op, x, y, axes), axes, keepdims), x)]


@rule("ReduceMax", "ReduceMin")
def reduce_extremum(
    op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, y: Value, keepdims: int
) -> Gradients:
    return [shared(op, kept(op, dy, axes, keepdims), x, kept(op, y, axes, keepdims), axes)]


@rule("ReduceProd")
def reduce_prod(op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int) -> Gradients:
    """The product of the others: none is 0, or this alone is; zeros count as ones in the product of all."""
    zero = mask(op, op.Equal(x, 0.0), x)
    factors = x + zero
    others = dy * op.ReduceProd(factors, axes, keepdims=keepdims)
    alone = mask(op, op.Equal(zero, op.ReduceSum(zero, axes, keepdims=1)), x)
    return [kept(op, others, axes, keepdims) / factors * alone]


@rule("ReduceSumSquare")
def reduce_sum_square(
    op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int
) -> Gradients:
    return [x * kept(op, 2 * dy, axes, keepdims)]


@rule("ReduceL1")
def reduce_l1(op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int) -> Gradients:
    return [op.Sign(x) * kept(op, dy, axes, keepdims)]


@rule("ReduceL2")
def reduce_l2(
    op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, y: Value, keepdims: int
) -> Gradients:
    """x / y, and 0 where all is 0."""
    return [x * kept(op, dy / (y + mask(op, op.Equal(y, 0.0), y)), axes, keepdims)]


@rule("ReduceLogSum")
def reduce_log_sum(
    op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, y: Value, keepdims: int
) -> Gradients:
    return [spread(op, kept(op, dy / op.Exp(y), axes, keepdims), x)]


@rule("ReduceLogSumExp")
def reduce_log_sum_exp(
    op: Emitter, dy: Value, x: Value, axes: Value | None = None, *, y: Value, keepdims: int
) -> Gradients:
    return [op.Exp(x - kept(op, y, axes, keepdims)) * kept(op, dy, axes, keepdims)]
