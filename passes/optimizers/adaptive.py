"""Define optimizers that divide by the root of a mean or sum of squared gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.state import STEP
from graphopt.graph.values import dtype_of, wide_type
from graphopt.intervals import within
from passes.optimizers.optimizer import Kernel, Optimizer, Row, Start, ValueTuple, read_at

__all__ = ["LAMB", "Adagrad", "Adam", "AdamW", "RMSprop", "ScheduleFreeAdamW"]


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

    unsigned: ClassVar[tuple[str, ...]] = ("exp_sum_sq",)

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

    >>> passes.AdamW(1e-3, weight_decay=0.1).slots()
    {'exp_sum': 0.0, 'exp_sum_sq': 0.0}
    """

    weight_decay: float = within("[0, inf)", 0.01, kw_only=True)

    decoupled: ClassVar[bool] = True

    def kernel(self) -> Kernel:
        moments = {"alpha": self.beta1, "beta": self.beta2, "epsilon": self.epsilon}
        # Mode 0 is as in PyTorch
        return "AdamWOptimizer", {**moments, "weight_decay": self.weight_decay, "adam_mode": 0}


@dataclass(frozen=True)
class LAMB(Adam):
    """Update by w - rate r u, where u is Adam's direction plus decay w, and r is the norm of w over that of u.

    You et al. 2020. r is 1 where a norm is 0. As in optax, the moments are corrected for their bias.

    Args:
        epsilon: the number added to the root of the mean, to avoid division by 0.
        weight_decay: the multiple of the parameter in u.

    >>> passes.LAMB(1e-2, weight_decay=0.01).slots()
    {'exp_sum': 0.0, 'exp_sum_sq': 0.0}
    """

    epsilon: float = within("[0, inf)", 1e-6)

    def decayed(self, op: Emitter, w: Value, g: Value, rate: Value) -> tuple[Value, Value]:
        return w, g

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        zero, one = op.constant(0.0, like=w), op.constant(1.0, like=w)
        minus, m, v = super().update(op, zero, g, one, t, *slots)
        u = self.weight_decay * w - minus
        norms = [op.Sqrt(op.ReduceSumSquare(x, keepdims=0)) for x in (w, u)]
        ratio = op.Where(op.Greater(norms[0] * norms[1], 0.0), norms[0] / norms[1], one)
        return w - (rate * ratio) * u, m, v


@dataclass(frozen=True)
class ScheduleFreeAdamW(Optimizer):
    """Update by AdamW without a schedule: compute gradients between two sequences, the second the mean of the first.

    Defazio et al. 2024. The slot z moves by z - rate (g / (sqrt(v') + epsilon) + decay y). The parameter x is the
    weighted mean of z. The gradient g is taken at y = beta1 x + (1 - beta1) z. Evaluation, prediction, checkpoints and
    the trained model have x, so that no mode needs to be switched. A schedule may warm up:
    `passes.Constant(warmup=100)`.

    Args:
        learning_rate: the rate of all parameters.
        beta1: the share of x in y.
        beta2: the decay of the mean of squared gradients.
        epsilon: the number added to the root of the mean, to avoid division by 0.
        weight_power: the power r of the weight t^r rate^p of step t in the mean.
        rate_power: the power p of the largest rate so far in that weight.

    >>> steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.ScheduleFreeAdamW()}
    >>> sorted(graphopt.Executor(graphopt.compile(models.linear((2,), 1), **steps)).state)[:3]
    ['layers.0.bias', 'layers.0.bias.exp_avg_sq', 'layers.0.bias.z']
    """

    learning_rate: float = within("[0, inf)", 2.5e-3)
    beta1: float = within("[0, 1)", 0.9)
    beta2: float = within("[0, 1)", 0.999)
    epsilon: float = within("[0, inf)", 1e-8)
    weight_power: float = within("[0, inf)", 0.0)
    rate_power: float = within("[0, inf)", 2.0)

    unsigned: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    exact: ClassVar[tuple[str, ...]] = ("z",)

    def slots(self) -> dict[str, Start]:
        return {"z": np.array, "exp_avg_sq": 0.0}

    def shared(self, model: ir.Model, op: Emitter, rows: Sequence[Row], rate: Value, t: Value) -> ValueTuple:
        if any(x.name == f"{STEP}.weight_sum" for x in model.graph.inputs):
            raise GraphoptError("expected one ScheduleFreeAdamW with the same powers for all parameters, found several")
        for row in rows:
            w, z = op.cast(row.w, wide_type(row.w)), row.slots[0].read(op)
            read_at(op, row.w, self._point(op, w, z))
        dtype = dtype_of(rate).numpy()
        sums = [state.declare_slot(model, STEP, name, np.zeros((), dtype)) for name in ("largest_rate", "weight_sum")]
        largest = op.Max(sums[0], rate)
        weight = op.Pow(largest, self.rate_power)
        if self.weight_power:
            weight = weight * op.Pow(op.cast(t, rate.dtype), self.weight_power)
        total = sums[1] + weight
        state.set_next(model, sums[0], largest)
        state.set_next(model, sums[1], total)
        return (weight / op.Max(total, float(np.finfo(dtype).tiny)),)

    def _point(self, op: Emitter, w: Value, z: Value) -> Value:
        """Emit y, at which the step computes the gradient."""
        return w + (1 - self.beta1) * (z - w)

    def decayed(self, op: Emitter, w: Value, g: Value, rate: Value) -> tuple[Value, Value]:
        return w, g

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        z, v, share = slots
        v = self.beta2 * v + (1 - self.beta2) * (g * g)
        correction = 1 - op.Pow(op.constant(self.beta2, like=t), t)
        d = g / (op.Sqrt(v / correction) + self.epsilon)
        if self.weight_decay:
            d = d + self.weight_decay * self._point(op, w, z)
        z = z - rate * d
        return w + share * (z - w), z, v


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Update by w - rate g / (sqrt(s) + epsilon), where s is the sum of g^2 so far (Duchi, Hazan, Singer 2011).

    Args:
        initial_accumulator: the initial value of the sum.
        epsilon: the number added to the root of the sum, to avoid division by 0.

    >>> passes.Adagrad(0.1).slots()
    {'sum': 0.0}
    """

    initial_accumulator: float = within("[0, inf)", 0.0)
    epsilon: float = within("[0, inf)", 1e-10)

    unsigned: ClassVar[tuple[str, ...]] = ("sum",)

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

    >>> passes.RMSprop(0.01, centered=True).slots()
    {'square_avg': 0.0, 'grad_avg': 0.0}
    """

    alpha: float = within("[0, 1)", 0.99)
    epsilon: float = within("[0, inf)", 1e-8)
    momentum: float = within("[0, 1]", 0.0)
    centered: bool = False

    unsigned: ClassVar[tuple[str, ...]] = ("square_avg",)

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


def _rounded(number: float, x: Value) -> float:
    """Round a number to the type of `x`, so that 1 - 0.999 corrects the bias of a float32 moment exactly."""
    return float(dtype_of(x).numpy().type(number))
