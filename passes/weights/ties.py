"""Find copies of a weight, transposed or reshaped, and compute them from the weight."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import Copy
from graphopt.graph.values import like, name_of
from passes.weights.initializers import array, duplicate

_FEWEST = 8  # the fewest equal elements that indicate a tie


def groups(weights: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """Group weights with the same numbers, in any order of their axes. Each other weight is a separate group."""
    found: dict[object, list[ir.Value]] = defaultdict(list)
    for weight in weights:
        found[_fingerprint(array(weight))].append(weight)
    return [group for group in found.values() if len(group) > 1]


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
    if a.ndim == b.ndim and a.ndim <= 5:
        for perm in sorted(itertools.permutations(range(a.ndim)), reverse=True):
            if a.transpose(perm).shape == b.shape and np.array_equal(a.transpose(perm), b):
                return ("Identity", []) if perm == tuple(range(a.ndim)) else ("Transpose", list(perm))
    if np.array_equal(a.ravel(), b.ravel()):
        return "Reshape", list(b.shape)
    a, b = a.squeeze(), b.squeeze()
    if a.ndim == b.ndim and a.ndim <= 5:
        for perm in sorted(itertools.permutations(range(a.ndim)), reverse=True):
            if a.transpose(perm).shape == b.shape and np.array_equal(a.transpose(perm), b):
                return "Moved", list(perm)
    return None


def tells(weight: ir.Value) -> bool:
    """Return whether equal numbers indicate a tie. Numbers that initialization repeats, such as zeros, do not."""
    numbers = array(weight).ravel()
    return numbers.size >= _FEWEST and len(np.unique(numbers[:4096])) >= min(_FEWEST, numbers.size // 2)


def tie(model: ir.Model, weight: ir.Value, copy: ir.Value, made_by: tuple[str, list[int]]) -> Copy:
    """Compute an initializer from the weight of which it is a copy."""
    op_type, argument = made_by
    name, shape = name_of(copy), array(copy).shape
    with Emitter(model) as op:
        emit: dict[str, Callable[[], ir.Value]] = {
            "Identity": lambda: weight,
            "Transpose": lambda: op.Transpose(weight, perm=argument),
            "Reshape": lambda: _reshaped(op, weight, argument),
            "Moved": lambda: _reshaped(op, op.Transpose(_squeezed(op, weight), perm=argument), shape),
        }
        computed = emit[op_type]()
    ir.convenience.replace_all_uses_with(copy, computed, replace_graph_outputs=True)
    del model.graph.initializers[name]
    if computed is not weight:
        like(computed, copy)
    how = {
        "Identity": "equal to",
        "Transpose": "the transpose of",
        "Reshape": "a reshaped copy of",
        "Moved": "a copy with moved axes of",
    }[op_type]
    return Copy(name, shape, f"{how} {weight.name}")


def _squeezed(op: Emitter, x: ir.Value) -> ir.Value:
    return _reshaped(op, x, array(x).squeeze().shape)


def _reshaped(op: Emitter, x: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Reshape a value, to a scalar, too, whose empty shape an operator's list of numbers cannot express."""
    return op.Reshape(x, list(shape)) if len(shape) else op.Squeeze(x)


def untie(model: ir.Model, weight: ir.Value) -> list[ir.Value]:
    """Copy an initializer for each use except the first, and return the copies."""
    copies: list[ir.Value] = []
    for node, index in list(weight.uses())[1:]:
        copies.append(duplicate(model, weight, f"{weight.name}.{len(copies) + 1}"))
        node.replace_input_with(index, copies[-1])
    return copies


def _fingerprint(numbers: np.ndarray) -> tuple[str, int, int]:
    """Return the sum of the numbers' bits modulo 2^64, which does not depend on their order."""
    bits = np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}")
    return numbers.dtype.str, numbers.size, int(bits.sum(dtype=np.uint64))
