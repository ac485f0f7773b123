"""Derive names of values: the next value of a state, a gradient, a seed.

Each function accepts a name or a value, and returns a name.
"""

from __future__ import annotations

import onnx_ir as ir

Named = ir.Value | str

COUNTERS = "graphopt."  # the prefix of entries in an on-device checkpoint that are not weights
_NEXT, _GRADIENT, _SEED = ".next", ".grad", ".seed"


def next_of(state: Named) -> str:
    """Return the name of the output that replaces a state after the step."""
    return f"{_name(state)}{_NEXT}"


def state_of(following: Named) -> str:
    """Return the name of the state that an output replaces."""
    return _name(following).removesuffix(_NEXT)


def gradient_of(value: Named) -> str:
    """Return the name of the gradient with respect to a value."""
    return f"{_name(value)}{_GRADIENT}"


def value_of(gradient: Named) -> str:
    """Return the name of the value that belongs to a gradient."""
    return _name(gradient).removesuffix(_GRADIENT)


def seed_of(output: Named) -> str:
    """Return the name of the input that weighs an output in a vector-Jacobian product."""
    return f"{_name(output)}{_SEED}"


def output_of(seed: Named) -> str:
    """Return the name of the output that a seed weighs."""
    return _name(seed).removesuffix(_SEED)


def _name(value: Named) -> str:
    return value if isinstance(value, str) else str(value.name)
