"""Declare the options of the estimators, and the passes with which scikit-learn's networks train.

In scikit-learn, a loss is summed over the outputs of a row and averaged over the rows of a batch, and the penalty of
the weights is divided by the rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import onnx_ir as ir

import passes
from graphopt.errors import GraphoptError, unknown
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source
from graphopt.graph.roles import Role, role_of
from graphopt.graph.values import rank
from graphopt.intervals import check_intervals, within
from graphopt.pipeline import Step
from graphopt.training.sklearn.network import HIDDEN

RATES = ("constant", "invscaling", "adaptive")
SOLVERS = ("adam", "sgd")
_TYPES = ("auto", "float32", "float64")


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
        assert w.graph is not None
        if rank(w) < 2:
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
    axes = [*range(1, rank(elements))]
    return op.ReduceSum(elements, axes, keepdims=0) if axes else elements


@dataclass(kw_only=True, eq=False, repr=False)
class EstimatorOptions:
    """Declare the arguments of `OnnxClassifier` and `OnnxRegressor`; names and meanings are MLPClassifier's.

    Args:
        model: the model to train: a path, an onnx.ModelProto or an onnx_ir.Model with one input and a batch of any
            size. None trains a perceptron with `hidden_layer_sizes`.
        hidden_layer_sizes: the number of units in each hidden layer of the perceptron.
        activation: the activation of its hidden layers: `identity`, `logistic`, `tanh` or `relu`.
        loss: a loss pass. By default, the loss of scikit-learn's networks.
        solver: `adam`, `sgd`, or an optimizer pass with a rate and options of its own.
        alpha: the strength of the L2 penalty of all weights except vectors, divided by the rows of a batch.
        batch_size: the number of rows of a batch; `auto` for 200, or all rows if there are fewer.
        learning_rate: `constant`; `invscaling` for the rate divided by the number of rows so far, raised to `power_t`;
            `adaptive` to divide the rate by 5 each time when training would stop; or a schedule pass. The solver
            `adam` takes no notice of `invscaling` and `adaptive`.
        learning_rate_init: the initial rate of the solvers `adam` and `sgd`.
        power_t: the exponent of `invscaling`.
        max_iter: the largest number of epochs.
        shuffle: train on the rows in a new random order in each epoch.
        random_state: a seed, a numpy.random.RandomState or None, for the initial weights, the rows that are held out
            and the order of rows. All of them are drawn as scikit-learn draws them.
        tol: the amount by which the loss, or the validation score, has to improve.
        verbose: print the loss of each epoch.
        warm_start: let `fit` start from the weights of the last `fit`, with a new optimizer.
        momentum, nesterovs_momentum: the momentum of the solver `sgd`, and whether it is Nesterov's.
        early_stopping: hold out rows, stop when their score does not improve, and keep the weights of the best score.
        validation_fraction: the share of rows that `early_stopping` holds out.
        beta_1, beta_2, epsilon: options of the solver `adam`.
        n_iter_no_change: the number of epochs without improvement after which training stops.
        training, parameters: passes of the standard pipeline, see `graphopt.compile`.
        dtype: the type of the perceptron's numbers: `float32`, `float64`, or `auto` for float32 if the features are of
            this type and float64 otherwise, as in scikit-learn. Most runtimes want float32. A model has its own type.
        device, threads: see `Executor`.
    """

    model: Source | None = field(default=None, kw_only=False)
    hidden_layer_sizes: int | Sequence[int] = within("[1, inf)", (100,), whole=True, kw_only=False)
    activation: str = field(default="relu", kw_only=False)
    loss: str | Step | None = None
    solver: str | Step = "adam"
    alpha: float = within("[0, inf)", 1e-4)
    batch_size: int | Literal["auto"] = "auto"
    learning_rate: str | Step = "constant"
    learning_rate_init: float = within("(0, inf)", 1e-3)
    power_t: float = within("(0, inf)", 0.5)
    max_iter: int = within("[1, inf)", 200)
    shuffle: bool = True
    random_state: Any = None
    tol: float = within("[0, inf)", 1e-4)
    verbose: bool | int = False
    warm_start: bool = False
    momentum: float = within("[0, 1]", 0.9)
    nesterovs_momentum: bool = True
    early_stopping: bool = False
    validation_fraction: float = within("(0, 1)", 0.1)
    beta_1: float = within("[0, 1)", 0.9)
    beta_2: float = within("[0, 1)", 0.999)
    epsilon: float = within("(0, inf)", 1e-8)
    n_iter_no_change: float = within("[1, inf]", 10, whole=False)
    training: Step | None = None
    parameters: Step | None = None
    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None

    def _check_options(self) -> None:
        """Raise an error unless all options are valid."""
        check_intervals(self)
        choices = {"activation": HIDDEN, "solver": SOLVERS, "learning_rate": RATES, "dtype": _TYPES}
        for name, known in choices.items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in known:
                raise GraphoptError(unknown(name, value, known))
        size = self.batch_size
        if size != "auto" and not (isinstance(size, Integral) and size >= 1):
            raise GraphoptError(f"batch_size: expected 'auto', or 1 or more, found {size!r}")

    def _optimizer(self) -> Any:
        """Return the optimizer pass."""
        if self.solver == "adam":
            return ScikitLearnAdam(1e-3, self.beta_1, self.beta_2, self.epsilon)
        if self.solver == "sgd":
            return passes.SGD(
                1e-3,
                self.momentum,
                nesterov=bool(self.nesterovs_momentum and self.momentum),
                rate_in_velocity=bool(self.momentum),
            )
        return self.solver

    def _base_rate(self) -> float:
        """Return the initial learning rate."""
        return self.learning_rate_init if isinstance(self.solver, str) else self.solver.learning_rate  # type: ignore[attr-defined]
