"""Reverse folded gathers: replace a value with repeated rows by a table of distinct rows and a Gather."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from passes.weights.initializers import array, prepend, register, replace_by


def undo(model: ir.Model, value: ir.Value, name: str) -> ir.Value | None:
    """Compute an initializer from a table `name` of its distinct rows, and return it, or None if no rows repeat."""
    numbers = array(value)
    axis = _axis(numbers)
    if axis is None:
        return None
    rows = np.moveaxis(numbers, axis, -1)
    matrix = rows.reshape(-1, rows.shape[-1])
    existing = model.graph.initializers.get(name)
    distinct = array(existing) if existing else _distinct(matrix)
    if distinct.ndim != 2 or distinct.dtype != matrix.dtype or distinct.shape[1] != matrix.shape[1]:
        return None
    places = {row.tobytes(): i for i, row in reversed(list(enumerate(distinct)))}
    indices = [places.get(row.tobytes()) for row in matrix]
    if None in indices:
        return None
    table = existing or register(model, name, distinct)
    index = register(model, f"{value.name}.rows", np.array(indices, np.int64).reshape(rows.shape[:-1]))
    gathered = prepend(model, value, "gather", "Gather", [table, index], {"axis": 0}, rows.shape)
    order = list(range(numbers.ndim - 1))
    order.insert(axis, numbers.ndim - 1)
    replace_by(model, value, prepend(model, value, "transpose", "Transpose", [gathered], {"perm": order}))
    return table


def repeats(numbers: np.ndarray) -> bool:
    """Return whether rows repeat along an axis, or all numbers are equal."""
    return _axis(numbers) is not None or len(np.unique(numbers)) < 2 <= numbers.size


def _axis(numbers: np.ndarray) -> int | None:
    """Return the axis along which distinct rows have the fewest numbers, or None."""
    if numbers.ndim < 2 or numbers.size == 0 or np.all(numbers == numbers.flat[0]):
        return None
    candidates = []
    for axis in range(numbers.ndim):
        rows = np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])
        distinct = _distinct(rows)
        if len(distinct) < len(rows):
            candidates.append((distinct.size, -numbers.shape[axis], axis))
    return min(candidates)[2] if candidates else None


def _distinct(rows: np.ndarray) -> np.ndarray:
    """Return distinct rows in the order of their first occurrence."""
    _, first = np.unique(rows, axis=0, return_index=True)
    return np.ascontiguousarray(rows[np.sort(first)])
