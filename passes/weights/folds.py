"""Compute folded initializers again from parameters that the file contains, where numbers prove how."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.graph.metadata import STOP_GRADIENT
from passes.weights.initializers import array, prepend, register, replace_by


@dataclass(frozen=True)
class _Step:
    """Describe an operator, its attributes, its other operand, and whether that comes first."""

    op_type: str
    attributes: tuple[tuple[str, object], ...] = ()
    other: np.ndarray | ir.Value | None = None
    other_first: bool = False


Chain = tuple[_Step, ...]
_Function = Callable[[np.ndarray], np.ndarray]

# Functions of ATen, with their inverses if they have one. ONNX's operators have the same names.
UNARY: dict[str, tuple[_Function, _Function | None]] = {
    "abs": (np.abs, None),
    "exp": (np.exp, np.log),
    "log": (np.log, np.exp),
    "neg": (np.negative, np.negative),
    "reciprocal": (np.reciprocal, np.reciprocal),
    "relu": (lambda x: np.maximum(x, 0), None),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda y: np.log(y / (1 - y))),
    "softplus": (
        lambda x: np.logaddexp(x, 0),
        lambda y: np.where(y > 20, y, np.log(np.expm1(np.minimum(y, 20)))),
    ),
    "sqrt": (np.sqrt, np.square),
    "tanh": (np.tanh, np.arctanh),
}
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    **{"add": np.add, "sub": np.subtract, "rsub": np.subtract},
    **{"mul": np.multiply, "div": np.divide, "pow": np.power},
}
_MOST_CALLS = 3


def move(
    model: ir.Model, value: ir.Value, sources: Sequence[ir.Value], missing: Sequence[str], detached: bool
) -> ir.Value | None:
    """Gather the numbers of a folded initializer from its sources, and return the last source, or None.

    Args:
        sources: the initializers whose numbers it contains, each number once.
        missing: names of parameters that are not in the file. The only one becomes an initializer with the numbers that
            no source has.
        detached: stop the gradient.
    """
    numbers = array(value)
    if {array(source).dtype for source in sources} != {numbers.dtype} or len(missing) > 1 or not numbers.size:
        return None
    flat = np.concatenate([array(source).ravel() for source in sources])
    distinct, places = np.unique(flat, return_index=True)
    if distinct.size < flat.size:
        return None
    near = np.minimum(np.searchsorted(distinct, numbers), distinct.size - 1)
    known, index = distinct[near] == numbers, places[near].astype(np.int64)
    if known.all() != (not missing) or not known.any():
        return None
    if missing:
        block = np.ix_(*(np.unique(axis) for axis in np.nonzero(~known)))
        is_block = not known[block].any()
        rest = register(model, missing[0], (numbers[block] if is_block else numbers[~known]).copy())
        index[~known] = flat.size + np.arange((~known).sum())
        sources = [*sources, rest]
    size = sum(array(source).size for source in sources)
    shape = register(model, f"{value.name}.flat", np.array([-1], np.int64))
    parts = [
        prepend(model, value, f"flat{i}", "Reshape", [source, shape], shape=(array(source).size,))
        for i, source in enumerate(sources)
    ]
    whole = (
        parts[0] if len(parts) == 1 else prepend(model, value, "all", "Concat", parts, {"axis": 0}, (size,))
    )
    gathered = [whole, register(model, f"{value.name}.places", index)]
    _replace(model, value, prepend(model, value, "moved", "Gather", gathered, {"axis": 0}), detached)
    return sources[-1]


def compute(
    model: ir.Model,
    value: ir.Value,
    parameters: Sequence[ir.Value],
    constants: Sequence[ir.Value],
    calls: Sequence[str],
    detached: bool,
) -> None:
    """Compute a folded initializer from a parameter by calls in the order that gives its numbers, if there is one."""
    wanted, start = array(value).astype(np.float64), parameters[0]
    if len(calls) > _MOST_CALLS or len(parameters) > 2 or wanted.size == 0:
        return
    others = [*parameters[1:], *constants]
    with np.errstate(all="ignore"):
        chains = (
            chain
            for order in dict.fromkeys(itertools.permutations(calls))
            for chain in _chains(array(start).astype(np.float64), wanted, order, others)
        )
        chain = next(chains, None)
    if chain is None:
        return
    last, shape = start, array(start).shape
    for i, step in enumerate(chain):
        inputs = [last]
        other = step.other
        if isinstance(other, np.ndarray):
            other = register(model, f"{value.name}.operand", other.astype(array(value).dtype))
        if other is not None:
            inputs = [other, last] if step.other_first else [last, other]
            shape = np.broadcast_shapes(shape, array(other).shape)
        if step.op_type == "Transpose":
            shape = tuple(shape[axis] for axis in dict(step.attributes)["perm"])  # type: ignore[attr-defined]
        last = prepend(model, value, f"{step.op_type}{i}", step.op_type, inputs, dict(step.attributes), shape)
    if shape != array(value).shape:
        target = register(model, f"{value.name}.shape", np.array(array(value).shape, np.int64))
        last = prepend(model, value, "reshape", "Reshape", [last, target])
    _replace(model, value, last, detached)


def _replace(model: ir.Model, value: ir.Value, computed: ir.Value, detached: bool) -> None:
    if detached:
        computed = STOP_GRADIENT.mark(prepend(model, value, "detached", "Identity", [computed]))
    replace_by(model, value, computed)


def _chains(
    x: np.ndarray, wanted: np.ndarray, calls: Sequence[str], others: Sequence[ir.Value]
) -> Iterator[Chain]:
    """Yield the steps by which calls, in this order, give the wanted numbers."""
    if not calls:
        squeezed = [[dim for dim in numbers.shape if dim != 1] for numbers in (x, wanted)]
        if squeezed[0] == squeezed[1] and np.allclose(x.ravel(), wanted.ravel(), rtol=1e-5, atol=1e-7):
            yield ()
        return
    for step, y in _steps(x, wanted, calls[0], others, last=len(calls) == 1):
        for rest in _chains(y, wanted, calls[1:], others):
            yield (step, *rest)


def _steps(
    x: np.ndarray, wanted: np.ndarray, call: str, others: Sequence[ir.Value], last: bool
) -> Iterator[tuple[_Step, np.ndarray]]:
    if call in ("softmax", "_softmax", "log_softmax", "_log_softmax"):
        for axis in range(x.ndim):
            shifted = x - x.max(axis, keepdims=True)
            y = shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))
            log = "log" in call
            yield _Step("LogSoftmax" if log else "Softmax", (("axis", axis),)), y if log else np.exp(y)
    elif call in ("t", "transpose", "permute"):
        for perm in itertools.permutations(range(min(x.ndim, 4))):
            yield _Step("Transpose", (("perm", list(perm)),)), x.transpose(perm)
    elif call in UNARY:
        yield _Step(call.capitalize()), UNARY[call][0](x)
    elif call in _ARITHMETIC:
        op_type, function = call.removeprefix("r").capitalize(), _ARITHMETIC[call]
        for other in [*others, *(_scalar(x, wanted, call) if last else map(np.array, _COMMON))]:
            numbers = (array(other) if isinstance(other, ir.Value) else other).astype(np.float64)
            for first in (False, True):
                try:
                    y = function(numbers, x) if first else function(x, numbers)
                except ValueError:  # shapes that do not broadcast
                    continue
                yield _Step(op_type, (), other, first), y


_COMMON = (0.0, 1.0, 2.0, 0.5, -1.0)


def _scalar(x: np.ndarray, wanted: np.ndarray, call: str) -> list[np.ndarray]:
    """Return single numbers, of few digits or not, that may take an operand to the wanted numbers."""
    if x.size != wanted.size or x.size == 0:
        return []
    wanted = wanted.reshape(x.shape)
    pick = np.unravel_index(np.argmax(np.abs(x)), x.shape)
    a, b = float(x[pick]), float(wanted[pick])
    guesses = {
        "add": [b - a], "sub": [a - b, b + a], "rsub": [b + a], "mul": [b / a if a else 0.0],
        "div": [a / b if b else 0.0, a * b], "pow": [2.0, 3.0, 0.5, -1.0, -0.5],
    }[call]  # fmt: skip
    tries = [float(f"{guess:.{digits}g}") for guess in guesses if np.isfinite(guess) for digits in (2, 4, 7)]
    if len(np.unique(x)) < 3:  # too few to prove a number that is not common
        tries = [number for number in tries if number in _COMMON]
    masks = []
    if call == "mul" and np.isin(wanted[x != 0] / x[x != 0], (0, 1)).all():
        masks = [np.where(x != 0, wanted / np.where(x == 0, 1, x), 1.0)]
    return [np.array(number) for number in dict.fromkeys(tries)] + masks
