"""Compute folded initializers, and copies of weights, again from parameters, where numbers prove how."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.original import note_fold
from graphopt.graph.origins import Copy
from graphopt.graph.values import like, name_of
from passes.differentiate import stop_gradient
from passes.weights.initializers import array, register, replace_by

_Function = Callable[[np.ndarray], np.ndarray]
_Traced = Callable[[Emitter, ir.Value], ir.Value]
Relation = tuple[str, list[_Traced]]  # what a copy is in words, and the steps that compute it

# Functions of ATen, with their inverses if they have one. ONNX's operators have the same names.
_UNARY: dict[str, tuple[_Function, _Function | None]] = {
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
FUNCTIONS = set(_UNARY)
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    **{"add": np.add, "sub": np.subtract, "rsub": np.subtract},
    **{"mul": np.multiply, "div": np.divide, "pow": np.power},
}
_MOST_CALLS = 3
_FEWEST_EQUAL = 8  # the fewest equal elements that indicate a tie
_COMMON = (0.0, 1.0, 2.0, 0.5, -1.0)


def _compute_instead(model: ir.Model, value: ir.Value, computed: ir.Value) -> None:
    """Replace an initializer by a computed value, and note how to write the initializer into the file again."""
    note_fold(model, value, computed)
    replace_by(model, value, computed)


def gather_rows(model: ir.Model, value: ir.Value, name: str) -> ir.Value | None:
    """Gather an initializer from a table `name` of its distinct rows, and return it, or None if no rows repeat."""
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
    with Emitter(model) as op:
        gathered = op.Gather(table, np.array(indices, np.int64).reshape(rows.shape[:-1]))
        perm = np.insert(np.arange(numbers.ndim - 1), axis, numbers.ndim - 1).tolist()
        _compute_instead(model, value, op.Transpose(gathered, perm=perm))
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


def move(
    model: ir.Model, value: ir.Value, sources: Sequence[ir.Value], missing: Sequence[str], detached: bool
) -> ir.Value | None:
    """Gather the numbers of a folded initializer from its sources, and return the last source, or None.

    The only name in `missing`, of a parameter that is not in the file, becomes an initializer with the numbers that no
    source has, and the last source.
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
    with Emitter(model) as op:
        parts = [op.Reshape(source, [-1]) for source in sources]
        whole = op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]
        gathered = op.Gather(whole, index)
        _compute_instead(model, value, stop_gradient(op, gathered) if detached else gathered)
    return sources[-1]


def compute_by_inverse(model: ir.Model, value: ir.Value, name: str, calls: Sequence[str], masked: bool = False) -> bool:
    """Compute an initializer from the parameter `name` by functions, if they have an inverse, and return whether.

    The exporter records no order except that the last function is the last. Numbers must have one order only: there is
    no x with exp(exp(-x)) < 1.

    Args:
        calls: the functions; the last of them is applied last.
        masked: whether a mask of zeros and ones multiplies the result, so that the zeros of the initializer stay.
    """
    if not 0 < len(calls) <= _MOST_CALLS or any(_UNARY.get(call, (None, None))[1] is None for call in calls):
        return False
    wanted = array(value).astype(np.float64)
    kept = wanted != 0 if masked else np.ones(wanted.shape, bool)
    existing = model.graph.initializers.get(name)
    found = []
    for first in dict.fromkeys(itertools.permutations(calls[:-1])):
        order, numbers = (*first, calls[-1]), wanted[kept]
        with np.errstate(all="ignore"):
            for call in reversed(order):
                inverse = _UNARY[call][1]
                assert inverse is not None
                numbers = inverse(numbers)
        equal = existing is None or (
            array(existing).size == wanted.size
            and np.allclose(array(existing).reshape(wanted.shape)[kept], numbers, rtol=1e-4, atol=1e-5)
        )
        if np.isfinite(numbers).all() and equal:
            found.append((order, numbers))
    if len(found) != 1:
        return False
    order, numbers = found[0]
    if existing is None:
        start = np.ones(wanted.shape)
        start[kept] = numbers
        existing = register(model, name, start.astype(array(value).dtype))
    last = existing
    with Emitter(model) as op:
        for call in order:
            last = _traced(call.capitalize())(op, last)
        if masked:
            last = last * op.constant(kept.astype(array(value).dtype))
        _compute_instead(model, value, last)
    return True


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
    with Emitter(model) as op:
        last = start
        for step in chain:
            last = step(op, last)
        if last.shape != value.shape:
            last = op.Reshape(last, np.array(wanted.shape, np.int64))
        _compute_instead(model, value, stop_gradient(op, last) if detached else last)


def _chains(
    x: np.ndarray, wanted: np.ndarray, calls: Sequence[str], others: Sequence[ir.Value]
) -> Iterator[tuple[_Traced, ...]]:
    """Yield the steps by which calls, in this order, give the wanted numbers."""
    if not calls:
        squeezed = [[dim for dim in numbers.shape if dim != 1] for numbers in (x, wanted)]
        if squeezed[0] == squeezed[1] and np.allclose(x.ravel(), wanted.ravel(), rtol=1e-5, atol=1e-7):
            yield ()
        return
    for step, y in _steps(x, wanted, calls[0], others, last=len(calls) == 1):
        for rest in _chains(y, wanted, calls[1:], others):
            yield (step, *rest)


def _traced(op_type: str, *other: object, other_first: bool = False, **attributes: object) -> _Traced:
    """Return a traced function of a value, and of another operand if there is one."""

    def step(op: Emitter, x: ir.Value) -> ir.Value:
        result = op.call_op(op_type, [*other, x] if other_first else [x, *other], attributes)
        assert isinstance(result, ir.Value)
        return result

    return step


def _steps(
    x: np.ndarray, wanted: np.ndarray, call: str, others: Sequence[ir.Value], last: bool
) -> Iterator[tuple[_Traced, np.ndarray]]:
    if call in ("softmax", "_softmax", "log_softmax", "_log_softmax"):
        for axis in range(x.ndim):
            shifted = x - x.max(axis, keepdims=True)
            y = shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))
            log = "log" in call
            yield _traced("LogSoftmax" if log else "Softmax", axis=axis), y if log else np.exp(y)
    elif call in ("t", "transpose", "permute"):
        for perm in itertools.permutations(range(x.ndim)) if x.ndim <= 4 else ():
            yield _traced("Transpose", perm=list(perm)), x.transpose(perm)
    elif call in _UNARY:
        yield _traced(call.capitalize()), _UNARY[call][0](x)
    elif call in _ARITHMETIC:
        op_type, function = call.removeprefix("r").capitalize(), _ARITHMETIC[call]
        for other in [*others, *(_scalar(x, wanted, call) if last else map(np.array, _COMMON))]:
            numbers = (array(other) if isinstance(other, ir.Value) else other).astype(np.float64)
            for first in (False, True):
                try:
                    y = function(numbers, x) if first else function(x, numbers)
                except ValueError:  # shapes that do not broadcast
                    continue
                yield _traced(op_type, other, other_first=first), y


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


def groups(weights: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """Group weights with the same numbers, in any order of their axes."""
    alike: dict[object, list[ir.Value]] = defaultdict(list)
    for weight in weights:
        numbers = array(weight)
        ends = numbers.flat[:1].tobytes(), numbers.flat[-1:].tobytes()  # the same in any order of the axes
        alike[numbers.dtype.str, numbers.size, ends].append(weight)
    result: dict[object, list[ir.Value]] = defaultdict(list)
    for key, group in alike.items():
        for weight in group if len(group) > 1 else ():
            numbers = array(weight)
            bits = np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}")
            result[key, int(bits.sum(dtype=np.uint64))].append(weight)
    return [group for group in result.values() if len(group) > 1]


def relation(weight: ir.Value, copy: ir.Value, transposed: bool) -> Relation | None:
    """Return how to compute `copy` from `weight`, or None; if `transposed`, symmetric numbers become a Transpose."""
    a, b = array(weight), array(copy)
    if a.dtype != b.dtype or a.size != b.size:
        return None
    if not transposed and a.shape == b.shape and np.array_equal(a, b):
        return "equal to", []
    perm = _permutation(a, b)
    if perm is not None:
        is_equal = perm == [*range(a.ndim)]
        return ("equal to", []) if is_equal else ("the transpose of", [_traced("Transpose", perm=perm)])
    reshape = _traced("Reshape", np.array(b.shape, np.int64))
    if np.array_equal(a.ravel(), b.ravel()):
        return "a reshaped copy of", [reshape]
    perm = _permutation(a.squeeze(), b.squeeze())
    if perm is None:
        return None
    squeeze = _traced("Reshape", np.array(a.squeeze().shape, np.int64))
    return "a copy with moved axes of", [squeeze, _traced("Transpose", perm=perm), reshape]


def _permutation(a: np.ndarray, b: np.ndarray) -> list[int] | None:
    """Return the permutation of the axes of `a` that gives `b`, or None."""
    perms = sorted(itertools.permutations(range(a.ndim)), reverse=True) if a.ndim == b.ndim <= 5 else ()
    moved = (list(perm) for perm in perms if a.transpose(perm).shape == b.shape)
    return next((perm for perm in moved if np.array_equal(a.transpose(perm), b)), None)


def tells(weight: ir.Value) -> bool:
    """Return whether equal numbers indicate a tie. Numbers that initialization repeats, such as zeros, do not."""
    numbers = array(weight).ravel()
    return numbers.size >= _FEWEST_EQUAL and len(np.unique(numbers[:4096])) >= min(_FEWEST_EQUAL, numbers.size // 2)


def tie(model: ir.Model, weight: ir.Value, copy: ir.Value, how: str, steps: Sequence[_Traced]) -> Copy:
    """Compute an initializer from the weight of which it is a copy."""
    name, shape, computed = name_of(copy), array(copy).shape, weight
    with Emitter(model) as op:
        for step in steps:
            computed = step(op, computed)
    if steps:
        like(computed, copy)
    _compute_instead(model, copy, computed)
    return Copy(name, shape, f"{how} {weight.name}")
