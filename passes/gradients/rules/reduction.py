"""Differentiate reductions by a table of gradients that broadcast along the reduced axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx_ir import Value

from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import constant_of, like, rank
from passes.gradients.registry import UNIFORM, Gradients, Rule, rule
from passes.gradients.rules.elementwise import mask, nonzero
from passes.gradients.walk import is_uniform


@dataclass(frozen=True)
class Along:
    """Store the axes of a reduction of `x`: all axes if none are given, unless `noop` is set."""

    op: Emitter
    x: Value
    axes: Input
    noop: int

    def sum(self, value: Value) -> Value:
        """Sum along the axes and keep them."""
        return self.op.ReduceSum(value, self.axes, keepdims=1, noop_with_empty_axes=self.noop)

    def product(self, value: Value) -> Value:
        """Multiply along the axes and keep them."""
        return self.op.ReduceProd(value, self.axes, keepdims=1, noop_with_empty_axes=self.noop)

    def count(self, y: Value) -> Value | float:
        """Return the number of elements of `x` for each element of `y`."""
        known = np.array([], np.int64) if self.axes is None else constant_of(self.axes)
        if known is None:
            return self.op.Cast(self.op.Size(self.x) / self.op.Size(y), to=self.x.dtype)
        axes = known.tolist() or ([] if self.noop else range(rank(self.x)))
        return self.op.count(self.x, axes)

    def restore_axes(self, value: Value, keepdims: int) -> Value:
        """Restore the reduced axes of a value in the shape of the reduction."""
        whole = keepdims or self.axes is None or is_uniform(value)
        return value if whole else self.op.Unsqueeze(value, self.axes)


def spread(op: Emitter, value: Value, x: Value) -> Value:
    """Broadcast `value` to the shape of `x`."""
    return value if value.shape == x.shape else like(op.Expand(value, op.shape_of(x)), x)


def extreme(op: Emitter, x: Value, y: Value, dy: Value, along: Along) -> Value:
    """Split the gradient among equal extremes."""
    chosen = mask(op, op.Equal(x, y), x)
    return chosen * (dy / along.sum(chosen))


def product(op: Emitter, x: Value, y: Value, dy: Value, along: Along) -> Value:
    """Return the product of the other elements.

    A division computes it from the elements that are not 0. The other zeros contribute the factor 1 if there are none,
    the zero itself if there is one, so that second derivatives are right, and 0 if there are more.
    """
    is_zero = op.Equal(x, 0.0)
    zero = mask(op, is_zero, x)
    others = along.sum(zero) - zero
    only = x * zero
    zeros = mask(op, op.Equal(others, 0.0), x) + mask(op, op.Equal(others, 1.0), x) * (along.sum(only) - only)
    factors = op.Where(is_zero, op.constant(1.0, like=x), x)
    return dy * (along.product(factors) / factors * zeros)


_REDUCTIONS: dict[str, Callable[..., Value]] = {
    "ReduceSum": lambda op, x, y, dy, along: dy,
    "ReduceMean": lambda op, x, y, dy, along: dy / along.count(y),
    "ReduceMax": extreme,
    "ReduceMin": extreme,
    "ReduceProd": product,
    "ReduceL1": lambda op, x, y, dy, along: op.Sign(x) * dy,
    "ReduceL2": lambda op, x, y, dy, along: x * (dy / nonzero(op, y)),  # 0 if all elements are 0
    "ReduceSumSquare": lambda op, x, y, dy, along: x * (2 * dy),
    "ReduceLogSum": lambda op, x, y, dy, along: dy / op.Exp(y),
    "ReduceLogSumExp": lambda op, x, y, dy, along: op.Exp(x - y) * dy,
}


def reduction(gradient: Callable[..., Value]) -> Rule:
    """Return the gradient rule for a row of the table."""

    def reduced(
        op: Emitter,
        dy: Value,
        x: Value,
        axes: Input = None,
        *,
        y: Value,
        keepdims: int,
        noop_with_empty_axes: int,
    ) -> Gradients:
        along = Along(op, x, axes, noop_with_empty_axes)
        dx = gradient(op, x, along.restore_axes(y, keepdims), along.restore_axes(dy, keepdims), along)
        return [dx if is_uniform(dx) else spread(op, dx, x)]

    return reduced


UNIFORM.update([("", "ReduceSum"), ("", "ReduceMean")])
for op_type, gradient in _REDUCTIONS.items():
    rule(op_type)(reduction(gradient))
