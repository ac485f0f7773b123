"""Define the losses, the penalty and the form of Adam with which scikit-learn trains its networks.

In scikit-learn, a loss is summed over the outputs of a row and averaged over the rows of a batch, and the penalty of
the weights is divided by the rows of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

import passes
from graphopt.graph.emitter import Emitter
from graphopt.graph.roles import Role, role_of
from graphopt.intervals import within


@dataclass(frozen=True)
class LogLoss(passes.BinaryCrossEntropy):
    """Sum the cross-entropies of the outputs of a row, each of which is the probability of a label."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return _of_rows(op, super().compare(op, prediction, target))


@dataclass(frozen=True)
class SquaredError(passes.Loss):
    """Sum (p - t)^2 / 2 over the outputs of a row, for predictions p and targets t."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return _of_rows(op, 0.5 * op.Pow(prediction - target, 2))


@dataclass(frozen=True)
class PoissonDeviance(passes.Loss):
    """Sum t log(t / p) - t + p over the outputs of a row, for predicted rates p and counts t: half the deviance."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        counted = op.Max(target, 1e-30)  # 0 log 0 is 0
        return _of_rows(op, target * (op.Log(counted) - op.Log(prediction)) - target + prediction)


@dataclass(frozen=True)
class WeightPenalty(passes.Regularizer):
    """Add alpha / 2 * sum w^2 over matrices and kernels w, divided by the rows of the batch or by their weights.

    Args:
        alpha: the factor of the penalty.
    """

    alpha: float = within("[0, inf)", 1e-4)

    def penalty(self, op: Emitter, w: ir.Value) -> ir.Value:
        assert w.shape is not None and w.graph is not None
        if len(w.shape) < 2:
            return op.constant(0.0, like=w)
        inputs = {role_of(value): value for value in w.graph.inputs}
        weights = inputs.get(Role.SAMPLE_WEIGHT)
        rows = op.count(inputs[Role.TARGET], [0]) if weights is None else op.ReduceSum(weights, keepdims=0)
        if isinstance(rows, ir.Value) and rows.dtype != w.dtype:
            rows = op.Cast(rows, to=w.dtype)
        return 0.5 * self.alpha * op.ReduceSum(op.Pow(w, 2), keepdims=0) / rows


@dataclass(frozen=True)
class ScikitLearnAdam(passes.Adam):
    """Update as Adam does, with epsilon added to the root of the mean before its bias is corrected.

    This is the efficient form at the end of section 2 of Kingma and Ba (2015).
    """

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, rate: ir.Value, t: ir.Value, *slots: ir.Value
    ) -> tuple[ir.Value, ...]:
        m, v = slots
        m = self.beta1 * m + g
        v = self.beta2 * v + g * g
        t = op.Cast(t, to=ir.DataType.DOUBLE)  # in which 1 - 0.999 loses no digits
        root = math.sqrt(1 - self.beta2)
        bias1, bias2 = (1 - op.Pow(op.constant(beta, like=t), t) for beta in (self.beta1, self.beta2))
        factor = op.Cast((1 - self.beta1) / root * op.Sqrt(bias2) / bias1, to=rate.dtype)
        return w - rate * factor * (m / (op.Sqrt(v) + self.epsilon / root)), m, v


def _of_rows(op: Emitter, elements: ir.Value) -> ir.Value:
    assert elements.shape is not None
    axes = [*range(1, len(elements.shape))]
    return op.ReduceSum(elements, axes, keepdims=0) if axes else elements
