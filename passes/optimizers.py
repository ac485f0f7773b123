"""Update parameters from their gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.arguments import Checked
from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.rewriting import Pass, Pattern, selects
from graphopt.graph.roles import Role, needs_training_runtime, with_role
from graphopt.graph.state import LEARNING_RATE
from graphopt.graph.values import dtype_of, gradient_of, like, name_of, wide_type
from graphopt.intervals import check_intervals, check_types, within

__all__ = ["Adagrad", "Adam", "AdamW", "Group", "Lion", "Optimizer", "RMSprop", "SGD"]

ValueTuple = tuple[Value, ...]
_Rows = Sequence[ValueTuple]  # for each parameter: the parameter, its gradient and its slots


@dataclass(frozen=True)
class Group(metaclass=Checked):
    """Set the learning rate and weight decay of the parameters whose names match `pattern`.

    Args:
        pattern: shell-style patterns of names, one or several.
        learning_rate: the factor by which the optimizer's rate is multiplied.
        weight_decay: the weight decay; None for the optimizer's.

    >>> passes.AdamW(groups=(passes.Group("*.bias", weight_decay=0.0),)).groups[0].learning_rate
    1.0
    """

    pattern: Pattern
    learning_rate: float = within("[0, inf)", 1.0)
    weight_decay: float | None = within("[0, inf)", None)

    def __post_init__(self) -> None:
        check_intervals(self)
        check_types(self)


@dataclass(frozen=True)
class Optimizer(Pass):
    """Add an output `NAME.next` for every parameter that has a gradient, and the hyperparameter `learning_rate`.

    This is the base class of optimizers. A subclass implements `update`, and `slots` if it has state. 16-bit
    parameters are updated in float32, the type of their slots.

    Args:
        learning_rate: the rate of all parameters. Unless a schedule computes it, feed the input to change it.
        weight_decay: the multiple of the parameter that is added to its gradient. AdamW and Lion instead subtract
            this multiple times the rate from the parameter.
        groups: rates and weight decays for some parameters; the first group that matches a parameter's name applies.
        fused: use one kernel of onnxruntime-training for all parameters. Only AdamW and SGD without momentum have
            such a kernel, for float32 and 16-bit parameters.

    Raises:
        GraphoptError: a number is outside its interval, the graph has no gradients, a group matches no parameter, or
            the optimizer has no kernel. Rates, decays and epsilons are finite and at least 0. Moments' factors are in
            [0, 1).

    >>> class SignDescent(passes.Optimizer):
    ...     def update(self, op, w, g, rate, t):
    ...         return (w - rate * op.Sign(g),)
    >>> SignDescent(learning_rate=0.01).learning_rate
    0.01
    """

    learning_rate: float = within("[0, inf)", 1e-3)
    weight_decay: float = within("[0, inf)", 0.0, kw_only=True)
    groups: tuple[Group, ...] = field(default=(), kw_only=True)
    fused: bool = field(default=False, kw_only=True)

    decoupled: ClassVar[bool] = False

    def slots(self) -> dict[str, float]:
        """Return the initial value of each slot of a parameter, by the slot's name."""
        return {}

    @abstractmethod
    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        """Emit the new parameter and its new slots; `t` is the number of the step, starting at 1."""

    def kernel(self, decay: float) -> tuple[str, dict[str, Any]] | None:
        """Return the name and attributes of the fused kernel, or None.

        The inputs of the kernel are the rate, the number of the step if there are slots, and the tensors.
        """
        return None

    @final
    def rewrite(self, model: ir.Model) -> None:
        gradients = self.required(model, Role.GRADIENT, "run Gradient first")
        if self.fused and self.kernel(0.0) is None:
            raise GraphoptError(
                f"{type(self).__name__}: fused: onnxruntime-training has no kernel for {self}, only for AdamW and for "
                f"SGD without momentum: leave it out"
            )
        parameters = {gradient_of(p): p for p in with_role(model, Role.PARAMETER)}
        for group in self.groups:
            if not any(selects(group.pattern, parameter) for parameter in parameters.values()):
                raise GraphoptError(
                    f"{type(self).__name__}: groups: pattern {group.pattern!r} matches no parameter; the model trains: "
                    f"{', '.join(map(name_of, parameters.values()))}"
                )
        for gradient in gradients:
            model.graph.outputs.remove(gradient)
        types = {wide_type(p) for p in parameters.values()}
        rate_type = ir.DataType.DOUBLE if ir.DataType.DOUBLE in types else ir.DataType.FLOAT
        initial = np.array(self.learning_rate, rate_type.numpy())
        rate = state.declare(model, LEARNING_RATE, initial, Role.HYPERPARAMETER)
        counter = state.counter(model)
        groups: dict[tuple[float, float], list[ValueTuple]] = {}
        for gradient in gradients:
            w = parameters[name_of(gradient)]
            group = next((group for group in self.groups if selects(group.pattern, w)), Group(None))
            decay = self.weight_decay if group.weight_decay is None else group.weight_decay
            assert w.shape is not None
            dims, dtype = w.shape.numpy(), wide_type(w).numpy()
            starts = {slot: np.full(dims, fill, dtype) for slot, fill in self.slots().items()}
            slots = (state.declare_slot(model, w, slot, start) for slot, start in starts.items())
            groups.setdefault((group.learning_rate, decay), []).append((w, gradient, *slots))
        with Emitter(model) as op:
            step = op.Add(counter, 1)
            for (factor, decay), rows in groups.items():
                scaled = rate if factor == 1 else rate * factor
                updates = self._fused_updates if self.fused else self._updates
                results = updates(model, op, rows, decay, scaled, step)
                for (w, _, *held), updated in zip(rows, results, strict=True):
                    for x, value in zip((w, *held), updated, strict=True):
                        state.set_next(model, x, op.Identity(op.cast(value, x.dtype)))

    def _updates(
        self, model: ir.Model, op: Emitter, rows: _Rows, decay: float, rate: Value, step: Value
    ) -> Iterator[ValueTuple]:
        """Emit the update of each parameter, from its gradient and its slots."""
        for row in rows:
            w, g, own_rate, t = (op.cast(x, wide_type(row[0])) for x in (*row[:2], rate, step))
            if decay and self.decoupled:
                w = w * (1 - own_rate * decay)
            elif decay:
                g = g + decay * w
            yield self.update(op, w, g, own_rate, t, *row[2:])

    def _fused_updates(
        self, model: ir.Model, op: Emitter, rows: _Rows, decay: float, *scalars: Value
    ) -> Iterator[ValueTuple]:
        """Emit one kernel of onnxruntime-training for all parameters."""
        kernel = self.kernel(decay)
        assert kernel is not None
        inputs = []
        for row in rows:
            w, g = (op.cast(x, wide_type(row[0])) for x in row[:2])
            inputs.append((w, g if self.decoupled or not decay else g + decay * w, *row[2:]))
        columns = list(zip(*inputs, strict=True))
        updated = [columns[0], *columns[2:]]  # all but the gradients
        scalars = scalars[: len(updated)]
        return zip(*call_kernel(op, model, kernel[0], scalars, columns, updated, **kernel[1]), strict=True)


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

    def kernel(self, decay: float) -> tuple[str, dict[str, Any]] | None:
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

    >>> passes.AdamW(1e-3, weight_decay=0.1).slots()
    {'exp_sum': 0.0, 'exp_sum_sq': 0.0}
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

    >>> passes.Adagrad(0.1).slots()
    {'sum': 0.0}
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

    >>> passes.RMSprop(0.01, centered=True).slots()
    {'square_avg': 0.0, 'grad_avg': 0.0}
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


def _rounded(number: float, x: Value) -> float:
    """Round a number to the type of `x`, so that 1 - 0.999 corrects the bias of a float32 moment exactly."""
    return float(dtype_of(x).numpy().type(number))


def call_kernel(
    op: Emitter,
    model: ir.Model,
    op_type: str,
    scalars: Sequence[Value],
    columns: Sequence[Sequence[Value]],
    updated: Sequence[Sequence[Value]],
    **attributes: Any,
) -> list[list[Value]]:
    """Emit a kernel of onnxruntime-training that updates all tensors of a step at once; return those of its outputs.

    It updates in place. SequenceConstruct copies its inputs, so that the buffers of the state do not change.

    Args:
        scalars: the first inputs. The first output of a kernel that has any is a flag that it has run.
        columns: the tensors of the other inputs, each of which is a sequence of float32 tensors.
        updated: the columns that the kernel updates and returns.
    """
    for x in (x for column in columns for x in column):
        if x.dtype != ir.DataType.FLOAT:
            raise GraphoptError(
                f"fused: {op_type} of onnxruntime-training expects float32, found {x.name!r} of {x.dtype}: set "
                f"fused=False"
            )
    needs_training_runtime(model)
    sequences = [op.SequenceConstruct(*column) for column in columns]
    count = bool(scalars) + len(updated)
    node = ir.node(op_type, [*scalars, *sequences], attributes, domain=MICROSOFT, num_outputs=count)
    model.graph.append(node)
    results = []
    for sequence, column in zip(node.outputs[-len(updated) :], updated, strict=True):
        sequence.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
        results.append([like(op.SequenceAt(sequence, i), x) for i, x in enumerate(column)])
    return results
