"""Define optimizers that follow the gradient, its velocity or its sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.intervals import within
from passes.optimizers.optimizer import Kernel, Optimizer, ValueTuple

__all__ = ["SGD", "Lion"]


@dataclass(frozen=True)
class SGD(Optimizer):
    """Update by w - rate d, where d is the gradient g or, with momentum, a velocity.

    The velocity is b = momentum b + (1 - dampening) g, and d is b, or g + momentum b with `nesterov`. As in PyTorch,
    b is g in the first step (Sutskever et al. 2013).

    Args:
        momentum: the decay of the velocity. 0 turns it off.
        dampening: the share of each gradient that does not enter the velocity.
        nesterov: use the gradient plus the velocity of the next step.
        rate_in_velocity: multiply gradients by the rate when they enter the velocity: v = momentum v + rate
            (1 - dampening) g, and the update is w - v, or w - rate g - momentum v with `nesterov`. scikit-learn and
            Keras do this. Under a schedule, past gradients keep the rate of their step. At a constant rate the two
            forms are equal.

    >>> optimizer = passes.SGD(0.1, momentum=0.9)
    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=optimizer)
    >>> sorted(graphopt.Executor(step).state)[:2]
    ['layers.0.bias', 'layers.0.bias.momentum']
    """

    momentum: float = within("[0, 1]", 0.0)
    dampening: float = within("[0, 1]", 0.0)
    nesterov: bool = False
    rate_in_velocity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise GraphoptError(
                "SGD(nesterov=True): expected a momentum above 0, found 0: set momentum=0.9, for example"
            )

    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def kernel(self) -> Kernel | None:
        return None if self.momentum else ("SGDOptimizerV2", {})

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        if not slots:
            return (w - rate * g,)
        fresh = g
        if self.dampening:
            later = op.Cast(op.Greater(t, 1.0), to=t.dtype)
            fresh = (1 - self.dampening * later) * g
        if self.rate_in_velocity:
            g, fresh = rate * g, rate * fresh
        b = self.momentum * slots[0] + fresh
        d = g + self.momentum * b if self.nesterov else b
        return (w - d if self.rate_in_velocity else w - rate * d), b


@dataclass(frozen=True)
class Lion(Optimizer):
    """Update by w - rate sign(beta1 m + (1 - beta1) g), with decoupled weight decay (Chen et al. 2023).

    Args:
        learning_rate: the rate of all parameters.
        beta1: the share of the mean in the update's direction.
        beta2: the decay of the mean m of gradients.

    >>> passes.Lion(1e-4).slots()
    {'exp_avg': 0.0}
    """

    learning_rate: float = within("[0, inf)", 1e-4)
    beta1: float = within("[0, 1)", 0.9)
    beta2: float = within("[0, 1)", 0.99)

    decoupled: ClassVar[bool] = True

    def slots(self) -> dict[str, float]:
        return {"exp_avg": 0.0}

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        (m,) = slots
        direction = op.Sign(self.beta1 * m + (1 - self.beta1) * g)
        return w - rate * direction, self.beta2 * m + (1 - self.beta2) * g
