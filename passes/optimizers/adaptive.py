"""Define optimizers that adapt the rate of each element to its previous gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from onnx_ir import Value

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import dtype_of
from graphopt.intervals import within
from passes.optimizers.emission import ValueTuple
from passes.optimizers.optimizer import Optimizer

__all__ = ["Adagrad", "Adam", "AdamW", "Lion", "RMSprop"]


@dataclass(frozen=True)
class Adam(Optimizer):
    """Update by w - rate m' / (sqrt(v') + epsilon), with bias-corrected moments m' and v' (Kingma, Ba 2015).

    The slots are sums that each step multiplies by beta: exp_avg is (1 - beta1) exp_sum, and exp_avg_sq is
    (1 - beta2) exp_sum_sq. The rest of the formula is two numbers per step. The fused kernel stores averages.

    Args:
        beta1: the decay of the mean of gradients.
        beta2: the decay of the mean of squared gradients.
        epsilon: the number added to the root of the mean, to avoid division by 0.

    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.Adam(1e-3))
    >>> sorted(graphopt.Executor(step).state)[:3]
    ['layers.0.bias', 'layers.0.bias.exp_sum', 'layers.0.bias.exp_sum_sq']
    """

    beta1: float = within("[0, 1)", 0.9)
    beta2: float = within("[0, 1)", 0.999)
    epsilon: float = within("[0, inf)", 1e-8)

    def slots(self) -> dict[str, float]:
        moment = "exp_avg" if self.fused else "exp_sum"
        return {moment: 0.0, f"{moment}_sq": 0.0}

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        m, v = slots
        m = self.beta1 * m + g
        v = self.beta2 * v + g * g
        corrected1 = (1 - _rounded(self.beta1, g)) / (1 - op.Pow(op.constant(self.beta1, like=t), t))
        corrected2 = (1 - _rounded(self.beta2, g)) / (1 - op.Pow(op.constant(self.beta2, like=t), t))
        scale = op.Sqrt(corrected2)
        return w - (rate * corrected1 / scale) * (m / (op.Sqrt(v) + self.epsilon / scale)), m, v


@dataclass(frozen=True)
class AdamW(Adam):
    """Update as Adam does, with weight decay decoupled from the gradient (Loshchilov, Hutter 2019).

    Args:
        weight_decay: the share of each parameter that a step removes, times the rate.

    >>> optimizer = passes.AdamW(1e-3, weight_decay=0.1)
    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=optimizer)
    >>> round(graphopt.Executor(step).learning_rate, 6)
    0.001
    """

    weight_decay: float = within("[0, inf)", 0.01, kw_only=True)

    decoupled: ClassVar[bool] = True

    def kernel(self, decay: float) -> tuple[str, dict[str, Any]] | None:
        moments = {"alpha": self.beta1, "beta": self.beta2, "epsilon": self.epsilon}
        return "AdamWOptimizer", {**moments, "weight_decay": decay, "adam_mode": 0}  # 0: as in PyTorch


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Update by w - rate g / (sqrt(s) + epsilon), where s is the sum of g^2 so far (Duchi, Hazan, Singer 2011).

    Args:
        initial_accumulator: the initial value of the sum.
        epsilon: the number added to the root of the sum, to avoid division by 0.

    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.Adagrad(0.1))
    >>> sorted(graphopt.Executor(step).state)[:2]
    ['layers.0.bias', 'layers.0.bias.sum']
    """

    initial_accumulator: float = within("[0, inf)", 0.0)
    epsilon: float = within("[0, inf)", 1e-10)

    def slots(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator}

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        s = slots[0] + g * g
        return w - rate * g / (op.Sqrt(s) + self.epsilon), s


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Update by w - rate g / (sqrt(v) + epsilon), where v is the moving mean of g^2 (Tieleman, Hinton 2012).

    Args:
        alpha: the decay of the mean of squared gradients.
        epsilon: the number added to the root of the mean, to avoid division by 0.
        momentum: the decay of the velocity, which accumulates the steps as in PyTorch. 0 turns it off.
        centered: subtract the square of the mean gradient from the mean of squares.

    >>> optimizer = passes.RMSprop(0.01, centered=True)
    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=optimizer)
    >>> sorted(graphopt.Executor(step).state)[:3]
    ['layers.0.bias', 'layers.0.bias.grad_avg', 'layers.0.bias.square_avg']
    """

    alpha: float = within("[0, 1)", 0.99)
    epsilon: float = within("[0, inf)", 1e-8)
    momentum: float = within("[0, 1]", 0.0)
    centered: bool = False

    def slots(self) -> dict[str, float]:
        names = ["square_avg", *(["grad_avg"] * self.centered), *(["momentum"] if self.momentum else [])]
        return dict.fromkeys(names, 0.0)

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        new = {name: slot for name, slot in zip(self.slots(), slots, strict=True)}
        v = new["square_avg"] = self.alpha * new["square_avg"] + (1 - self.alpha) * (g * g)
        if self.centered:
            mean = new["grad_avg"] = self.alpha * new["grad_avg"] + (1 - self.alpha) * g
            v = v - mean * mean
        d = g / (op.Sqrt(v) + self.epsilon)
        if self.momentum:
            d = new["momentum"] = self.momentum * new["momentum"] + d
        return w - rate * d, *new.values()


@dataclass(frozen=True)
class Lion(Optimizer):
    """Update by w - rate sign(beta1 m + (1 - beta1) g), with decoupled weight decay (Chen et al. 2023).

    Args:
        learning_rate: the rate of all parameters.
        beta1: the share of the mean in the update's direction.
        beta2: the decay of the mean m of gradients.

    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.Lion(1e-4))
    >>> sorted(graphopt.Executor(step).state)[:2]
    ['layers.0.bias', 'layers.0.bias.exp_avg']
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


def _rounded(number: float, like: Value) -> float:
    """Round a number to the type of `like`, so that 1 - 0.999 corrects the bias of a float32 moment exactly."""
    return float(dtype_of(like).numpy().type(number))
