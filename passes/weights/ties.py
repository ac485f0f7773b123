"""Find copies of a weight, transposed or reshaped, and compute them from the weight."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import Copy
from graphopt.graph.values import like, name_of
from passes.weights.initializers import array, replace_by

_FEWEST = 8  # the fewest equal elements that indicate a tie
_HOW = {
    "Identity": "equal to",
    "Transpose": "the transpose of",
    "Reshape": "a reshaped copy of",
    "Moved": "a copy with moved axes of",
}


def groups(weights: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """Group weights with the same numbers, in any order of their axes. Each other weight is a separate group."""
    result: dict[object, list[ir.Value]] = defaultdict(list)
    for weight in weights:
        numbers = array(weight)
        bits = np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}")
        total = int(bits.sum(dtype=np.uint64))  # which does not depend on the order of the numbers
        result[numbers.dtype.str, numbers.size, total].append(weight)
    return [group for group in result.values() if len(group) > 1]


def relation(weight: ir.Value, copy: ir.Value, transposed: bool) -> tuple[str, list[int]] | None:
    """Return the operator that makes `copy` from `weight` and its argument, or None.

    It is Identity, Transpose or Reshape, or Moved: a Transpose of the axes longer than 1, between two Reshapes.

    Args:
        transposed: prefer a Transpose if symmetric numbers allow both.
    """
    a, b = array(weight), array(copy)
    if a.dtype != b.dtype or a.size != b.size:
        return None
    if not transposed and a.shape == b.shape and np.array_equal(a, b):
        return "Identity", []
    perm = _permutation(a, b)
    if perm is not None:
        return ("Identity", []) if perm == [*range(a.ndim)] else ("Transpose", perm)
    if np.array_equal(a.ravel(), b.ravel()):
        return "Reshape", list(b.shape)
    perm = _permutation(a.squeeze(), b.squeeze())
    return None if perm is None else ("Moved", perm)


def _permutation(a: np.ndarray, b: np.ndarray) -> list[int] | None:
    """Return the permutation of the axes of `a` that gives `b`, or None."""
    perms = sorted(itertools.permutations(range(a.ndim)), reverse=True) if a.ndim == b.ndim <= 5 else ()
    moved = (list(perm) for perm in perms if a.transpose(perm).shape == b.shape)
    return next((perm for perm in moved if np.array_equal(a.transpose(perm), b)), None)


def tells(weight: ir.Value) -> bool:
    """Return whether equal numbers indicate a tie. Numbers that initialization repeats, such as zeros, do not."""
    numbers = array(weight).ravel()
    return numbers.size >= _FEWEST and len(np.unique(numbers[:4096])) >= min(_FEWEST, numbers.size // 2)


def tie(model: ir.Model, weight: ir.Value, copy: ir.Value, made_by: tuple[str, list[int]]) -> Copy:
    """Compute an initializer from the weight of which it is a copy."""
    op_type, argument = made_by
    name, shape = name_of(copy), array(copy).shape
    with Emitter(model) as op:
        computed = weight
        if op_type == "Moved":
            computed = op.Reshape(weight, np.array(array(weight).squeeze().shape, np.int64))
        if op_type in ("Moved", "Transpose"):
            computed = op.Transpose(computed, perm=argument)
        if op_type in ("Moved", "Reshape"):
            computed = op.Reshape(computed, np.array(shape, np.int64))
    if computed is not weight:
        like(computed, copy)
    replace_by(model, copy, computed)
    return Copy(name, shape, f"{_HOW[op_type]} {weight.name}")
