"""Emit the updates of an optimizer: for each parameter, or in one kernel for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx_ir as ir
from onnx_ir import Value

from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.values import wide_type
from passes import ort_kernels

ValueTuple = tuple[Value, ...]
Formula = Callable[..., ValueTuple]


class Row(NamedTuple):
    """Hold a parameter, its gradient and its slots."""

    parameter: Value
    gradient: Value
    slots: ValueTuple

    @property
    def state(self) -> ValueTuple:
        return self.parameter, *self.slots


@dataclass(frozen=True)
class Emission:
    """Emit updates with one rate and one weight decay."""

    model: ir.Model
    op: Emitter
    rate: Value
    step: Value  # its number, starting at 1
    decay: float
    decoupled: bool  # whether the decay shrinks the parameter instead of being added to its gradient

    def each(self, formula: Formula, rows: Sequence[Row]) -> None:
        """Update each parameter on its own."""
        for row in rows:
            self._set_next(row, self._apply(formula, row.parameter, row.gradient, *row.slots))

    def kernel(self, op_type: str, attributes: dict[str, Any], rows: Sequence[Row]) -> None:
        """Update all parameters in one kernel of onnxruntime-training."""
        inputs = []
        for row in rows:
            w, g = self._wide(row.parameter, row.gradient)
            inputs.append((w, g if self.decoupled else self._decayed(w, g), *row.slots))
        columns = list(zip(*inputs, strict=True))
        updated = [column for i, column in enumerate(columns) if i != 1]  # all but the gradients
        scalars = [self.rate, self.step] if rows[0].slots else [self.rate]
        tensors = (scalars, columns, updated)
        results = ort_kernels.call(self.op, self.model, op_type, *tensors, flag=True, **attributes)
        for row, new in zip(rows, zip(*results, strict=True), strict=True):
            self._set_next(row, new)

    def _apply(self, formula: Formula, w: Value, g: Value, *slots: Value) -> ValueTuple:
        w, g, rate, step = self._wide(w, g, self.rate, self.step)
        if self.decay and self.decoupled:
            w = w * (1 - rate * self.decay)
        else:
            g = self._decayed(w, g)
        return formula(self.op, w, g, rate, step, *slots)

    def _decayed(self, w: Value, g: Value) -> Value:
        return g + self.decay * w if self.decay else g

    def _wide(self, w: Value, *values: Value) -> list[Value]:
        """Cast a parameter and other values to the type in which it is updated."""
        return [self.op.cast(value, wide_type(w)) for value in (w, *values)]

    def _set_next(self, row: Row, new: Sequence[Value]) -> None:
        for x, value in zip(row.state, new, strict=True):
            state.set_next(self.model, x, self.op.Identity(self.op.cast(value, x.dtype)))
