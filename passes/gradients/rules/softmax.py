"""Differentiate Softmax and LogSoftmax."""

from __future__ import annotations

from onnx_ir import Value

from graphopt.graph.emitter import Emitter
from passes.gradients.registry import Gradients, rule
from passes.gradients.walk import zeros


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
