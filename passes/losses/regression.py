"""Losses of predicted numbers, rates and quantiles."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.intervals import within
from passes.losses.loss import Loss, positive


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """(p - t)^2."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Pow(prediction - target, 2)


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    """|p - t|."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Abs(prediction - target)


@dataclass(frozen=True)
class Elastic(Loss):
    """l1 |p - t| + l2 (p - t)^2."""

    l1: float = within("[0, inf)", 0.5)
    l2: float = within("[0, inf)", 0.5)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        difference = prediction - target
        return self.l1 * op.Abs(difference) + self.l2 * op.Pow(difference, 2)


@dataclass(frozen=True)
class Huber(Loss):
    """d^2 / 2 where d = |p - t| is at most `delta`, delta (d - delta / 2) beyond (Huber 1964)."""

    delta: float = within("(0, inf)", 1.0)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        distance = op.Abs(prediction - target)
        near = op.Min(distance, self.delta)
        return near * (distance - 0.5 * near)


@dataclass(frozen=True)
class Quantile(Loss):
    """The pinball loss max(q (t - p), (q - 1) (t - p)), whose minimum is the `quantile` q (Koenker, Bassett 1978)."""

    quantile: float = within("(0, 1)", 0.5)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        difference = target - prediction
        return op.Max(self.quantile * difference, (self.quantile - 1) * difference)


@dataclass(frozen=True)
class Poisson(Loss):
    """The negative log-likelihood of counts t, without its constant: e^p - t p, or p - t log p of rates p.

    Args:
        log_rates: the model predicts the logarithms of rates, not rates.
    """

    log_rates: bool = True

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        if self.log_rates:
            return op.Exp(prediction) - target * prediction
        return prediction - target * op.Log(positive(op, prediction))
