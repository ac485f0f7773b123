"""Derive names of values: the next value of a state, a gradient, a slot.

Each function accepts a name or a value, and returns a name.
"""

from __future__ import annotations

import onnx_ir as ir

Named = ir.Value | str

COUNTERS = "graphopt."  # the prefix of entries in an on-device checkpoint that are not weights
FIRST_ROW = "first_row"  # the input of `grad` that shifts the positions in masks
ROWS = "rows"  # the output of `grad` that weighs a batch
SHARE = "share"  # the input of `apply` by which it multiplies the sums over all workers
_NEXT, _GRADIENT, _SEED, _REPORT, _CONSTANT = ".next", ".grad", ".seed", ".gradient", ".constant"
_LOCAL = ".local"


def next_of(state: Named) -> str:
    """Return the name of the output that replaces a state after the step."""
    return f"{name_of(state)}{_NEXT}"


def state_of(following: Named) -> str:
    """Return the name of the state that an output replaces."""
    return name_of(following).removesuffix(_NEXT)


def gradient_of(value: Named) -> str:
    """Return the name of the gradient with respect to a value."""
    return f"{name_of(value)}{_GRADIENT}"


def value_of(gradient: Named) -> str:
    """Return the name of the value that belongs to a gradient."""
    return name_of(gradient).removesuffix(_GRADIENT)


def seed_of(output: Named) -> str:
    """Return the name of the input that weighs an output in a vector-Jacobian product."""
    return f"{name_of(output)}{_SEED}"


def output_of(seed: Named) -> str:
    """Return the name of the output that a seed weighs."""
    return name_of(seed).removesuffix(_SEED)


def derivative_of(output: Named, value: Named) -> str:
    """Return the name of the derivative of an output with respect to a value."""
    return f"{gradient_of(output)}.{name_of(value)}"


def report_of(parameter: Named) -> str:
    """Return the name of the output that reports the gradient with respect to a parameter."""
    return f"{name_of(parameter)}{_REPORT}"


def slot_of(state: Named, slot: str) -> str:
    """Return the name of a slot that belongs to a parameter or other state, such as a momentum."""
    return f"{name_of(state)}.{slot}"


def local_of(following: Named) -> str:
    """Return the name of a worker's own value of an output that replaces a state."""
    return f"{name_of(following)}{_LOCAL}"


def of_worker(value: Named, rank: int) -> str:
    """Return the name of a worker's value, as another worker reads it."""
    return f"{name_of(value)}.{rank}"


def constant_copy_of(weight: Named) -> str:
    """Return the name of the copy of a weight that stays constant."""
    return f"{name_of(weight)}{_CONSTANT}"


def name_of(value: Named) -> str:
    """Return a name, or that of a value."""
    return value if isinstance(value, str) else str(value.name)
