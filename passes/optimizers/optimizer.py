"""Update parameters from their gradients.

The base class declares the slots, the rate and the step counter, adds weight decay and removes the gradients from the
outputs. A subclass names its slots and implements its formula in `update`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.names import gradient_of
from graphopt.graph.rewriting import Pass, Pattern, selects
from graphopt.graph.roles import Role, with_role
from graphopt.graph.state import LEARNING_RATE
from graphopt.graph.values import name_of, wide_type
from graphopt.intervals import check_intervals, within
from passes.optimizers.emission import Emission, Row, ValueTuple

__all__ = ["Group", "Optimizer"]


@dataclass(frozen=True)
class Group:
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
        self._check_groups(list(parameters.values()))
        for gradient in gradients:
            model.graph.outputs.remove(gradient)
        types = {wide_type(p) for p in parameters.values()}
        rate_type = ir.DataType.DOUBLE if ir.DataType.DOUBLE in types else ir.DataType.FLOAT
        initial = np.array(self.learning_rate, rate_type.numpy())
        rate = state.declare(model, LEARNING_RATE, initial, Role.HYPERPARAMETER)
        counter = state.counter(model)
        rows: dict[tuple[float, float], list[Row]] = {}
        for gradient in gradients:
            w = parameters[name_of(gradient)]
            group = next((group for group in self.groups if selects(group.pattern, w)), Group(None))
            decay = self.weight_decay if group.weight_decay is None else group.weight_decay
            row = Row(w, gradient, self._declare_slots(model, w))
            rows.setdefault((group.learning_rate, decay), []).append(row)
        with Emitter(model) as op:
            step = op.Add(counter, 1)
            for (factor, decay), together in rows.items():
                scaled = rate if factor == 1 else rate * factor
                self._emit(Emission(model, op, scaled, step, decay, self.decoupled), together)

    def _emit(self, emission: Emission, rows: list[Row]) -> None:
        kernel = self.kernel(emission.decay) if self.fused else None
        if kernel is not None:
            emission.kernel(*kernel, rows)
            return
        emission.each(self.update, rows)

    def _declare_slots(self, model: ir.Model, w: Value) -> ValueTuple:
        assert w.shape is not None
        dims, dtype = w.shape.numpy(), wide_type(w).numpy()
        return tuple(
            state.declare_slot(model, w, slot, np.full(dims, fill, dtype))
            for slot, fill in self.slots().items()
        )

    def _check_groups(self, parameters: list[Value]) -> None:
        for group in self.groups:
            if not any(selects(group.pattern, parameter) for parameter in parameters):
                raise GraphoptError(
                    f"{type(self).__name__}: groups: pattern {group.pattern!r} matches no parameter; the model trains: "
                    f"{', '.join(name_of(parameter) for parameter in parameters)}"
                )
