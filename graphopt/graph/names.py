"""Derive names of values: the next value of a state, a gradient, a slot.

Each function accepts a name or a value, and returns a name.
"""

from __future__ import annotations

from collections.abc import Callable

from graphopt.graph.values import Named, name_of

_Naming = Callable[[Named], str]

COUNTERS = "graphopt."  # the prefix of entries in an on-device checkpoint that are not weights
FIRST_ROW = "first_row"  # the input of `grad` that shifts the positions in masks
ROWS = "rows"  # the output of `grad` that weighs a batch
SHARE = "share"  # the input of `apply` by which it multiplies the sums over all workers


def _suffixed(suffix: str) -> tuple[_Naming, _Naming]:
    """Return a function that appends a suffix to a name, and one that removes it."""
    return lambda x: f"{name_of(x)}{suffix}", lambda x: name_of(x).removesuffix(suffix)


next_of, state_of = _suffixed(".next")  # the output that replaces a state after the step
gradient_of, value_of = _suffixed(".grad")  # the gradient with respect to a value
seed_of, output_of = _suffixed(".seed")  # the input that weighs an output in a vector-Jacobian product
report_of, _ = _suffixed(".gradient")  # the output that reports the gradient with respect to a parameter
local_of, _ = _suffixed(".local")  # a worker's own value of an output that replaces a state
constant_copy_of, _ = _suffixed(".constant")  # the copy of a weight that stays constant


def derivative_of(output: Named, value: Named) -> str:
    """Return the name of the derivative of an output with respect to a value."""
    return f"{gradient_of(output)}.{name_of(value)}"


def slot_of(state: Named, slot: str) -> str:
    """Return the name of a slot that belongs to a parameter or other state, such as a momentum."""
    return f"{name_of(state)}.{slot}"


def of_worker(value: Named, rank: int) -> str:
    """Return the name of a worker's value, as another worker reads it."""
    return f"{name_of(value)}.{rank}"
