"""Define losses of predicted numbers, rates and quantiles."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.intervals import within
from passes.losses.loss import Loss, positive

__all__ = ["Elastic", "Huber", "MeanAbsoluteError", "MeanSquaredError", "Poisson", "Quantile"]


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """Compute (p - t)^2, for a prediction p and a target t.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError())
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.float32([[1], [3]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    5.0
    """

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Pow(prediction - target, 2)


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    """Compute |p - t|, for a prediction p and a target t.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanAbsoluteError())
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.float32([[1], [3]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    2.0
    """

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Abs(prediction - target)


@dataclass(frozen=True)
class Elastic(Loss):
    """Compute l1 |p - t| + l2 (p - t)^2, for a prediction p and a target t.

    Args:
        l1: the factor of the absolute error.
        l2: the factor of the squared error.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Elastic(l1=1.0, l2=0.5))
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[2]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    4.0
    """

    l1: float = within("[0, inf)", 0.5)
    l2: float = within("[0, inf)", 0.5)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        difference = prediction - target
        return self.l1 * op.Abs(difference) + self.l2 * op.Pow(difference, 2)


@dataclass(frozen=True)
class Huber(Loss):
    """Compute d^2 / 2 if d = |p - t| is at most `delta`, and delta (d - delta / 2) beyond (Huber 1964).

    Args:
        delta: the error beyond which the loss is linear.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Huber(delta=1.0))
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[3]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    2.5
    """

    delta: float = within("(0, inf)", 1.0)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        distance = op.Abs(prediction - target)
        near = op.Min(distance, self.delta)
        return near * (distance - 0.5 * near)


@dataclass(frozen=True)
class Quantile(Loss):
    """Compute the pinball loss max(q (t - p), (q - 1) (t - p)), minimal at the quantile q (Koenker, Bassett 1978).

    Args:
        quantile: the quantile q to predict, between 0 and 1.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Quantile(0.75))
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.float32([[1], [-1]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the mean of 0.75 and 0.25
    0.5
    """

    quantile: float = within("(0, 1)", 0.5)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        difference = target - prediction
        return op.Max(self.quantile * difference, (self.quantile - 1) * difference)


@dataclass(frozen=True)
class Poisson(Loss):
    """Compute the negative log-likelihood of counts t without its constant: e^p - t p, or p - t log p for rates p.

    Args:
        log_rates: the model predicts the logarithms of rates, not rates.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Poisson())
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[2]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts a rate of 1
    1.0
    """

    log_rates: bool = True

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        if self.log_rates:
            return op.Exp(prediction) - target * prediction
        return prediction - target * op.Log(positive(op, prediction))
