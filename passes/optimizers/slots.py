"""Declare the slots of a parameter, whole or in 8-bit codes by blocks.

Dettmers, Lewis, Shleifer, Zettlemoyer 2022, 8-bit Optimizers via Block-wise Quantization,
https://arxiv.org/abs/2110.02861: a block of 256 numbers is divided by its largest absolute value, and each quotient is
replaced by the nearest number of a table, whose steps grow with the number.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.values import wide_type

BLOCK = 256
_FEWEST_NUMBERS = 4096  # slots of fewer numbers stay whole
_CELLS_PER_FACTOR_E = (
    256  # for each factor of e, so that a cell contains at most one bound between two numbers of a table
)


class Slot:
    """Hold a slot of a parameter in one state.

    Args:
        w: the parameter.
        name: the name of the slot.
        start: its initial value.
    """

    def __init__(self, model: ir.Model, w: ir.Value, name: str, start: np.ndarray) -> None:
        self.name = name
        self._held = state.declare_slot(model, w, name, start)

    def read(self, op: Emitter) -> ir.Value:
        """Return the value before the step."""
        return self._held

    def write(self, model: ir.Model, op: Emitter, value: ir.Value) -> None:
        """Set the value after the step."""
        state.set_next(model, self._held, op.Identity(op.cast(value, self._held.dtype)))


class QuantizedSlot(Slot):
    """Hold a slot of a parameter in two states: the codes, and the largest absolute value of each block.

    Args:
        w: the parameter.
        name: the name of the slot.
        start: its initial value.
        signed: whether the numbers may be negative.
    """

    def __init__(self, model: ir.Model, w: ir.Value, name: str, start: np.ndarray, signed: bool) -> None:
        self.name = name
        self._dims, self._count, self._dtype = start.shape, start.size, wide_type(w)
        self._table = dynamic_table(signed)
        padded = np.pad(start.astype(np.float32).ravel(), (0, -start.size % BLOCK)).reshape(-1, BLOCK)
        largest = np.abs(padded).max(1, keepdims=True)
        quotients = padded / np.maximum(largest, np.finfo(np.float32).tiny)
        codes = np.searchsorted((self._table[1:] + self._table[:-1]) / 2, quotients).astype(np.uint8)
        self._codes = state.declare_slot(model, w, name, codes)
        self._largest = state.declare_slot(model, w, f"{name}_absmax", largest)

    def read(self, op: Emitter) -> ir.Value:
        table = op.constant(self._table)
        numbers = op.Gather(table, op.Cast(self._codes, to=ir.DataType.INT32)) * self._largest
        flat = op.Reshape(numbers, [-1])
        if self._count % BLOCK:
            flat = op.Slice(flat, [0], [self._count], [0])
        return op.cast(op.Reshape(flat, list(self._dims)), self._dtype)

    def write(self, model: ir.Model, op: Emitter, value: ir.Value) -> None:
        flat = op.Reshape(op.cast(value, ir.DataType.FLOAT), [-1])
        if rest := -self._count % BLOCK:
            flat = op.Concat(flat, op.constant(np.zeros(rest, np.float32)), axis=0)
        blocks = op.Reshape(flat, [-1, BLOCK])
        largest = op.ReduceMax(op.Abs(blocks), [1], keepdims=1)
        quotients = blocks / op.Max(largest, float(np.finfo(np.float32).tiny))
        state.set_next(model, self._codes, op.Identity(self._nearest(op, quotients)))
        state.set_next(model, self._largest, op.Identity(largest))

    def _nearest(self, op: Emitter, x: ir.Value) -> ir.Value:
        """Emit the codes of the nearest numbers of the table, which is symmetric but for the number 1."""
        zero = int(np.searchsorted(self._table, 0))
        magnitudes = self._table[zero:]
        bounds = (magnitudes[1:] + magnitudes[:-1]) / 2
        cells = np.floor((np.log(bounds) - math.log(bounds[0])) * _CELLS_PER_FACTOR_E).astype(int)
        first = np.searchsorted(cells, np.arange(cells[-1] + 2))  # the first bound in each cell or after it
        size = op.Abs(x)
        cell = (op.Log(op.Max(size, float(bounds[0]))) - math.log(bounds[0])) * float(_CELLS_PER_FACTOR_E)
        cell = op.Clip(op.Cast(cell, to=ir.DataType.INT32), np.int32(0), np.int32(len(first) - 1))
        index = op.Gather(op.constant(first.astype(np.int32)), cell)
        bound = op.Gather(op.constant(np.append(bounds, np.float32(2))), index)
        index = index + op.Cast(op.Greater(size, bound), to=ir.DataType.INT32)
        if zero:
            index = op.Max(index * op.Cast(op.Sign(x), to=ir.DataType.INT32) + zero, 0)
        return op.Cast(index, to=ir.DataType.UINT8)


@functools.cache
def dynamic_table(signed: bool) -> np.ndarray:
    """Return the 256 numbers of bitsandbytes' dynamic quantization: from 1e-7 to 1, and 7 bits at most after the first.

    Args:
        signed: whether half of them are negative.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=np.float32)
        means = 10.0 ** (exponent - 6) * ((edges[1:] + edges[:-1]) / np.float32(2)).astype(float)
        numbers += [*means, *(-means if signed else ())]
    table = np.sort(np.array(numbers, np.float32))
    table.setflags(write=False)
    return table


def initial_array(w: ir.Value) -> np.ndarray:
    """Return the initial value of a parameter, in the type of its slots."""
    start = state.initial(w)
    if start is None:
        raise GraphoptError(f"{w.name!r}: expected a parameter with an initial value, found data")
    return start.numpy().astype(wide_type(w).numpy(), copy=False)


def slot(model: ir.Model, w: ir.Value, name: str, start: np.ndarray, bits: int, *, signed: bool) -> Slot:
    """Declare a slot of a parameter: in 8 bits if that is asked for, and it has the parameter's shape and is large.

    Args:
        w: the parameter.
        name: the name of the slot.
        start: its initial value.
        bits: 8 or 32.
        signed: whether the numbers may be negative.
    """
    if bits == 8 and start.size >= _FEWEST_NUMBERS and w.shape is not None and start.shape == tuple(w.shape.numpy()):
        return QuantizedSlot(model, w, name, start, signed)
    return Slot(model, w, name, start)
