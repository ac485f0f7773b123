"""Write the sum of gradients that lie side by side, as those of Slices of one value, as a Concat of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import constant_of, dims_of, like

_MOST_JOINED = 64  # inputs of a Concat: longer ones would be written again for each further input


@dataclass(frozen=True)
class _Padded:
    """Hold a value with zeros around it: the zeros before and behind it on each axis."""

    source: ir.Value
    before: np.ndarray
    behind: np.ndarray


def side_by_side(op: Emitter, one: ir.Value, other: ir.Value) -> ir.Value | None:
    """Return the sum of two values with zeros around them that lie side by side; None for any others."""
    first, second = _padded(one), _padded(other)
    if first is None or second is None or len(first.before) != len(second.before):
        return None
    apart = np.flatnonzero((first.before != second.before) | (first.behind != second.behind))
    if len(apart) != 1:
        return None
    axis = int(apart[0])
    if first.before[axis] > second.before[axis]:
        first, second = second, first
    size, next_size = (dims_of(x.source)[axis] for x in (first, second))
    if not isinstance(size, int) or not isinstance(next_size, int):
        return None
    begins_behind = first.before[axis] + size == second.before[axis]
    if not begins_behind or first.behind[axis] != next_size + second.behind[axis]:
        return None
    parts = [*_parts(first.source, axis), *_parts(second.source, axis)]
    joined = op.Concat(*parts, axis=axis)
    behind = first.behind.copy()
    behind[axis] = second.behind[axis]
    if first.before.any() or behind.any():
        joined = op.Pad(joined, np.concatenate([first.before, behind]))
    return like(joined, one)


def _padded(x: ir.Value) -> _Padded | None:
    node = x.producer()
    if node is None or node.op_type != "Pad" or node.domain or len(node.inputs) != 2:
        return None
    source, widths = node.inputs[0], constant_of(node.inputs[1])
    is_of_zeros = node.attributes.get_string("mode", "constant") == "constant"
    if source is None or source.shape is None or widths is None or not is_of_zeros or (widths < 0).any():
        return None
    return _Padded(source, *widths.reshape(2, -1))


def _parts(x: ir.Value, axis: int) -> list[ir.Value]:
    """Return what a Concat along an axis joins, if it joins few values; any other value itself."""
    node = x.producer()
    is_concat = node is not None and node.op_type == "Concat" and not node.domain
    if node is None or not is_concat or len(node.inputs) >= _MOST_JOINED or node.attributes.get_int("axis", 0) != axis:
        return [x]
    return [part for part in node.inputs if part is not None]
