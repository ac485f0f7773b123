"""Define schedules, which compute the learning rate from the step counter in the graph."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from graphopt.errors import GraphoptError
from graphopt.graph import roles, state
from graphopt.graph.authored import ask, name_of_method, scalar
from graphopt.graph.emitter import Emitter
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role
from graphopt.graph.state import LEARNING_RATE, STEP
from graphopt.graph.values import redirect
from graphopt.intervals import within

__all__ = ["Constant", "Cosine", "Exponential", "InverseScaling", "Linear"]
__all__ += ["OneCycle", "Optimal", "Polynomial", "Schedule", "StepDecay"]


@dataclass(frozen=True)
class Schedule(Pass):
    """Compute the learning rate in the graph from the number of completed steps.

    This is the base class of schedules. A subclass implements `rate`. The optimizer's learning rate is the base rate
    and becomes the hyperparameter `base_learning_rate`. Each step reports its rate as `learning_rate`.

    Args:
        warmup: the number of steps in which the rate grows linearly from base / warmup to base, before the schedule
            starts.
        warmup_from_zero: let the rate grow from 0 in the first step, and reach base one step later, as
            onnxruntime-training's LinearLRScheduler and Hugging Face's schedules do.

    Raises:
        GraphoptError: the model has no hyperparameter `learning_rate`, or a number is outside its interval. Steps are
            integers, and factors are finite and above 0.

    >>> class Halved(passes.Schedule):
    ...     def rate(self, op, base, t):
    ...         return base * 0.5
    >>> Halved(warmup=4).rates(0.1, 2).tolist()
    [0.0125, 0.025]
    """

    warmup: int = within("[0, inf)", 0, kw_only=True)
    warmup_from_zero: bool = field(default=False, kw_only=True)

    @abstractmethod
    def rate(self, op: Emitter, base: ir.Value, t: ir.Value) -> ir.Value:
        """Emit the rate `t` steps after the warm-up, a scalar. `t` and the result have the type of `base`."""

    def requires(self, model: ir.Model) -> None:
        name, scheduled = type(self).__name__, roles.with_role(model, Role.DIAGNOSTIC)
        if any(x.name == LEARNING_RATE for x in scheduled):
            raise GraphoptError(f"{name}: expected a rate without a schedule, found one with: use one schedule")
        if all(x.name != LEARNING_RATE for x in roles.with_role(model, Role.HYPERPARAMETER)):
            raise GraphoptError(f"{name} needs the hyperparameter 'learning_rate', found none: run the optimizer first")

    @final
    def rewrite(self, model: ir.Model) -> None:
        hyperparameters = roles.with_role(model, Role.HYPERPARAMETER)
        base = next(x for x in hyperparameters if x.name == LEARNING_RATE)
        if isinstance(self, _Planned) and self.steps is None:
            kind = type(self).__name__
            raise GraphoptError(
                f"{kind}(steps=None): expected the number of steps of the training, found none: write {kind}(steps=...)"
                ", epochs times the batches of an epoch, or graphopt.adapt(..., epochs=..., batch_size=...)"
            )
        users = list(base.uses())
        base.name = f"base_{LEARNING_RATE}"
        counter = state.counter(model)
        with Emitter(model) as op:
            done = op.Cast(counter, to=base.dtype)
            since = op.Max(done - float(self.warmup), 0.0) if self.warmup else done
            rate = scalar(ask(self, "rate", op, base, since), name_of_method(self, "rate"), "the rate", base.dtype)
            if self.warmup:
                grown = done if self.warmup_from_zero else done + 1.0
                rate = rate * op.Min(grown / float(self.warmup), 1.0)
            rate = op.Identity(rate, _outputs=[LEARNING_RATE])
        redirect(users, rate)
        model.graph.outputs.append(roles.set_role(rate, Role.DIAGNOSTIC))

    def rates(self, base: float, steps: int) -> np.ndarray:
        """Compute the rates of the first steps, to look at a schedule before training.

        Args:
            base: the optimizer's learning rate.
            steps: the number of rates to compute; that of the training for a schedule that has no number of its own.
        """
        own = self.planned(steps)
        model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}), ir_version=IR_VERSION)
        with state.detached(model):
            state.declare(model, LEARNING_RATE, np.array(base), Role.HYPERPARAMETER)
        evaluator = ReferenceEvaluator(ir.to_proto(own(model).model))
        return np.array([evaluator.run([LEARNING_RATE], {STEP: np.array(t)}) for t in range(steps)]).ravel()


@dataclass(frozen=True)
class Constant(Schedule):
    """Keep the base rate, after the warm-up if `warmup` is set.

    >>> passes.Constant(warmup=4).rates(0.1, 5).round(4).tolist()
    [0.025, 0.05, 0.075, 0.1, 0.1]
    """

    def rate(self, op: Emitter, base: ir.Value, t: ir.Value) -> ir.Value:
        return base


@dataclass(frozen=True)
class _Planned(Schedule):
    """Take `steps` steps; None stands for the steps of the training."""

    steps: int | None = within("[1, inf)", None, whole=True)

    def planned(self, steps: int) -> _Planned:
        return self if self.steps is not None else replace(self, steps=steps)


@dataclass(frozen=True)
class _Finite(_Planned):
    """Decrease the rate from base to base * `end` in `steps` steps, then keep it."""

    end: float = within("[0, inf)", 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps <= self.warmup:
            raise GraphoptError(
                f"{type(self).__name__}(steps={self.steps}): expected more than warmup={self.warmup}, found "
                f"{self.steps}"
            )

    @abstractmethod
    def fall(self, op: Emitter, progress: ir.Value) -> ir.Value:
        """Emit a factor that falls from 1 at `progress` 0 to 0 at `progress` 1."""

    @final
    def rate(self, op: Emitter, base: ir.Value, t: ir.Value) -> ir.Value:
        assert self.steps is not None
        progress = op.Min(t / float(self.steps - self.warmup), 1.0)
        factor = self.fall(op, progress)
        return base * (factor if self.end == 0 else self.end + (1 - self.end) * factor)


@dataclass(frozen=True)
class Linear(_Finite):
    """Decrease the rate linearly: base (1 - p), where p is the share of completed steps.

    Args:
        steps: the number of steps until the rate is lowest, including the warm-up; None for the whole training, which
            `graphopt.adapt`, estimators and recipes know.
        end: the last rate, as a share of the base rate.

    >>> passes.Linear(steps=4).rates(0.1, 5).round(4).tolist()
    [0.1, 0.075, 0.05, 0.025, 0.0]
    """

    def fall(self, op: Emitter, progress: ir.Value) -> ir.Value:
        return 1.0 - progress


@dataclass(frozen=True)
class Cosine(_Finite):
    """Decrease the rate by half a cosine: base (1 + cos(pi p)) / 2, where p is the share of completed steps.

    Loshchilov, Hutter 2017.

    Args:
        steps: the number of steps until the rate is lowest, including the warm-up; None for the whole training, which
            `graphopt.adapt`, estimators and recipes know.
        end: the last rate, as a share of the base rate.

    >>> passes.Cosine(steps=4, end=0.1).rates(0.1, 5).round(4).tolist()
    [0.1, 0.0868, 0.055, 0.0232, 0.01]
    """

    def fall(self, op: Emitter, progress: ir.Value) -> ir.Value:
        return _half_cosine(op, progress)


@dataclass(frozen=True)
class Polynomial(_Finite):
    """Decrease the rate polynomially: base (1 - p)^power, where p is the share of completed steps.

    Args:
        steps: the number of steps until the rate is lowest, including the warm-up; None for the whole training, which
            `graphopt.adapt`, estimators and recipes know.
        end: the last rate, as a share of the base rate.
        power: the exponent. 1 equals `Linear`.

    >>> passes.Polynomial(steps=5).rates(0.1, 3).round(4).tolist()
    [0.1, 0.064, 0.036]
    """

    power: float = within("[0, inf)", 2.0)

    def fall(self, op: Emitter, progress: ir.Value) -> ir.Value:
        return op.Pow(1.0 - progress, op.constant(self.power, like=progress))


@dataclass(frozen=True)
class StepDecay(Schedule):
    """Multiply the rate by a factor at regular intervals: base factor^floor(t / every).

    Args:
        every: the number of steps between two decreases.
        factor: the factor of the rate at each decrease.

    >>> passes.StepDecay(every=2).rates(0.1, 4).round(4).tolist()
    [0.1, 0.1, 0.01, 0.01]
    """

    every: int = within("[1, inf)", 1000)
    factor: float = within("(0, inf)", 0.1)

    def rate(self, op: Emitter, base: ir.Value, t: ir.Value) -> ir.Value:
        return base * op.Pow(op.constant(self.factor, like=t), op.Floor(t / float(self.every)))


@dataclass(frozen=True)
class Exponential(Schedule):
    """Multiply the rate by a factor in each step: base factor^t.

    Args:
        factor: the factor of the rate in each step.

    >>> passes.Exponential(0.5).rates(0.1, 3).round(4).tolist()
    [0.1, 0.05, 0.025]
    """

    factor: float = within("(0, inf)", 0.999)

    def rate(self, op: Emitter, base: ir.Value, t: ir.Value) -> ir.Value:
        return base * op.Pow(op.constant(self.factor, like=t), t)


@dataclass(frozen=True)
class OneCycle(_Planned):
    """Increase the rate to base and then decrease it below its first value, each by half a cosine (Smith, Topin 2019).

    Args:
        steps: the number of steps of the whole cycle; None for the whole training, as for `Cosine`.
        rise: the share of the steps in which the rate grows.
        start: the divisor of base that gives the first rate.
        finish: the divisor of the first rate that gives the last rate.

    >>> passes.OneCycle(steps=5, rise=0.4, start=10).rates(0.1, 5).round(4).tolist()
    [0.01, 0.1, 0.075, 0.025, 0.0]
    """

    rise: float = within("(0, 1)", 0.3)
    start: float = within("(0, inf)", 25.0)
    finish: float = within("(0, inf)", 1e4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and not 0 < self.rise * self.steps - 1 < self.steps - 1:
            raise GraphoptError(
                f"{self}: expected a share `rise` that leaves at least one step to rise and one to fall, found "
                f"{self.rise} of {self.steps} steps"
            )

    def rate(self, op: Emitter, base: ir.Value, t: ir.Value) -> ir.Value:
        assert self.steps is not None
        top, last = self.rise * self.steps - 1, self.steps - 1
        up = _half_cosine(op, op.Min(t / top, 1.0))
        down = _half_cosine(op, op.Min(op.Max(t - top, 0.0) / (last - top), 1.0))
        low, lowest = 1 / self.start, 1 / self.start / self.finish
        return base * (1.0 + (low - 1.0) * up + (lowest - 1.0) * (1.0 - down))


def _half_cosine(op: Emitter, share: ir.Value) -> ir.Value:
    """Emit (1 + cos(pi share)) / 2 by the sine of half the angle (tests/faults.py: Cos-float64)."""
    sine = op.Sin(math.pi / 2 * share)
    return 1.0 - sine * sine


@dataclass(frozen=True)
class InverseScaling(Schedule):
    """Divide the rate by a power of the step, base / (t + 1)^power, as scikit-learn's `invscaling` does.

    Args:
        power: the exponent.
        every: the number of steps with the same rate, such as an epoch: base / (floor(t / every) + 1)^power.

    >>> passes.InverseScaling(power=1).rates(0.1, 3).round(4).tolist()
    [0.1, 0.05, 0.0333]
    """

    power: float = within("[0, inf)", 0.25)
    every: int = within("[1, inf)", 1)

    def rate(self, op: Emitter, base: ir.Value, t: ir.Value) -> ir.Value:
        t = t if self.every == 1 else op.Floor(t / float(self.every))
        return base / op.Pow(t + 1.0, op.constant(self.power, like=t))


@dataclass(frozen=True)
class Optimal(Schedule):
    """Compute the rate 1 / (alpha (t + t0)), as scikit-learn's `optimal` does.

    The optimizer's learning rate is ignored. Bottou's t0 is 1 / (alpha sqrt(1 / sqrt(alpha))).

    Args:
        alpha: the factor; scikit-learn uses the strength of its regularizer.

    >>> passes.Optimal(alpha=0.01).rates(0.1, 3).round(3).tolist()
    [3.162, 3.065, 2.974]
    """

    alpha: float = within("(0, inf)", 1e-4)

    def rate(self, op: Emitter, base: ir.Value, t: ir.Value) -> ir.Value:
        t0 = 1.0 / (math.sqrt(1.0 / math.sqrt(self.alpha)) * self.alpha)
        return 1.0 / (self.alpha * (t + t0))
