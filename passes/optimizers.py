"""Optimizers: how a parameter follows its gradient.

The base class declares the slots, the rate and the step counter, adds weight decay and takes the gradients out of
the outputs; a leaf names its slots and is its mathematics, `update`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np
import onnx_ir as ir

from graphopt import state
from graphopt.emitter import Emitter
from graphopt.errors import GraphoptError
from graphopt.rewriting import Pass, Pattern, matches
from graphopt.roles import Role, set_role, with_role

LEARNING_RATE = "learning_rate"


@dataclass(frozen=True)
class Group:
    """Parameters whose names match `pattern`: their rate as a multiple of the optimizer's, their own weight decay."""

    pattern: Pattern
    learning_rate: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class Optimizer(Pass):
    """Add `NAME.next` for every parameter that has a gradient, and the hyperparameter `learning_rate`.

    16-bit parameters are updated in float32, in which their slots are kept.

    Args:
        learning_rate: the rate of all parameters, fed to change it, unless a schedule computes it.
        weight_decay: what multiplies a parameter and is added to its gradient (decoupled from it in AdamW and Lion).
        groups: other rates and weight decays by name; the first group that matches holds.

    Raises:
        GraphoptError: there are no gradients, or a group matches no parameter.
    """

    learning_rate: float = 1e-3
    weight_decay: float = field(default=0.0, kw_only=True)
    groups: tuple[Group, ...] = field(default=(), kw_only=True)

    slots: ClassVar[tuple[str, ...]] = ()
    decoupled: ClassVar[bool] = False

    @abstractmethod
    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, rate: ir.Value, step: ir.Value, *slots: ir.Value
    ) -> tuple[ir.Value, ...]:
        """Emit the new parameter and its new slots; `step` is 1 in the first step, in the type of `w`."""

    @final
    def rewrite(self, model: ir.Model) -> None:
        gradients = with_role(model, Role.GRADIENT)
        if not gradients:
            raise GraphoptError("an optimizer needs gradients, found none: run Gradient first")
        parameters = {f"{p.name}.grad": p for p in with_role(model, Role.PARAMETER)}
        self._check_groups([str(p.name) for p in parameters.values()])
        for gradient in gradients:
            model.graph.outputs.remove(gradient)
        wide = [_wide(p.dtype) for p in parameters.values()]
        rate_type = ir.DataType.DOUBLE if ir.DataType.DOUBLE in wide else ir.DataType.FLOAT
        rate = state.declare(
            model, LEARNING_RATE, np.array(self.learning_rate, rate_type.numpy()), Role.HYPERPARAMETER
        )
        counter = state.counter(model)
        with Emitter(model) as op:
            following = op.Add(counter, 1)
            for gradient in gradients:
                self._emit(model, op, parameters[str(gradient.name)], gradient, rate, following)

    def _emit(
        self, model: ir.Model, op: Emitter, w: ir.Value, g: ir.Value, rate: ir.Value, step: ir.Value
    ) -> None:
        dtype = _wide(w.dtype)
        group = next((group for group in self.groups if matches(w.name, group.pattern)), Group(None))
        decay = self.weight_decay if group.weight_decay is None else group.weight_decay
        start = state.initial(w)
        assert start is not None
        slots = [
            state.declare(model, f"{w.name}.{slot}", self.start(slot, start.numpy().astype(dtype.numpy())), Role.SLOT)
            for slot in self.slots
        ]
        old, g, rate, step = (_cast(op, value, dtype) for value in (w, g, rate, step))
        if group.learning_rate != 1:
            rate = rate * group.learning_rate
        if decay and self.decoupled:
            old = old - rate * decay * old
        elif decay:
            g = g + decay * old
        new, *new_slots = self.update(op, old, g, rate, step, *slots)
        assert w.dtype is not None
        state.set_next(model, w, op.Identity(_cast(op, new, w.dtype)))
        for slot, new_slot in zip(slots, new_slots, strict=True):
            state.set_next(model, slot, op.Identity(new_slot))

    def start(self, slot: str, w: np.ndarray) -> np.ndarray:
        """Return the value that a slot of parameter `w` starts with; zeros by default."""
        return np.zeros_like(w)

    def _check_groups(self, names: list[str]) -> None:
        for group in self.groups:
            if not any(matches(name, group.pattern) for name in names):
                raise GraphoptError(
                    f"optimizer.groups: pattern {group.pattern!r} matches no parameter; the model trains: "
                    f"{', '.join(names)}"
                )


def _wide(dtype: ir.DataType | None) -> ir.DataType:
    """Return the type in which a parameter is updated."""
    assert dtype is not None
    return ir.DataType.FLOAT if dtype.itemsize < 4 else dtype


def _cast(op: Emitter, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    return value if value.dtype == dtype else op.Cast(value, to=dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SGD(Optimizer):
    """w - rate * g."""

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, rate: ir.Value, step: ir.Value, *slots: ir.Value
    ) -> tuple[ir.Value, ...]:
        return (w - rate * g,)
