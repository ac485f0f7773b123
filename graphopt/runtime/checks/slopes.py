"""Compare slopes of a function along directions with those that its gradient has, by central differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir

Arrays = dict[str, np.ndarray]


class Entries(NamedTuple):
    """Hold the numbers of an array that are not 0, and their places in its one axis."""

    where: np.ndarray
    numbers: np.ndarray


Direction = Mapping[str, np.ndarray | Entries]
Verdict = Literal["agrees", "differs", "not checked"]

# The roundings of types, relative to the number, and how many of them noise has that shows what rounding does.
ROUNDINGS = {ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7, ir.DataType.FLOAT: 2.0**-23}
ROUNDINGS_OF_NOISE = 16

# Multiples of the step, of which pairs are extrapolated.
LADDER = (*(1.0, 0.5), *(0.125, 0.0625), *(4.0, 8.0), *(16.0, 32.0))
MOVED = 0.01  # the largest step along a direction, relative to a parameter's own size
FARTHEST = 0.3  # where rounding hides the slope of smaller steps
SIZE_SAMPLE = 2**12  # numbers of a parameter whose median is its size
# The share of what is allowed by which a slope may differ on one side, whose curvature might hide an error.
ONE_SIDED = 0.3
_CHUNK = 2**12  # numbers whose products are added in their own type
SMALLEST = 1e-2  # the size of parameters that are all 0, such as new biases


@dataclass(frozen=True)
class Precision:
    """Describe how exactly a loss is computed.

    Args:
        unit: the rounding of the loss.
        change: the relative change of the loss that a step is to make.
        tolerance: the largest relative difference of slopes that agree.
        doubted: the share of a slope that may be in doubt if it agrees.
        lost: of the slope along random signs that lost entries of typical size have, what rounding may be.
        jitter: the relative noise that is added to parameters, so that no number is exactly at a kink.
        blind: the share of the largest step that is taken where the gradient is 0.
        scale: the least magnitude of what is rounded: scores are larger than the loss of a saturated softmax.
    """

    unit: float
    change: float
    tolerance: float
    doubted: float
    lost: float
    jitter: float
    blind: float
    scale: float


DOUBLE = Precision(2.0**-52, 1e-6, 2e-3, 0.3, 2e-3, 1e-3, 1e-3, 1.0)
SINGLE = Precision(2.0**-23, 3e-4, 3e-2, 0.3, 2e-2, 2e-2, 0.25, 1e-3)


@dataclass(frozen=True)
class Slope:
    """Hold the slope of a loss along a direction, as the gradient has it and as differences do.

    Args:
        expected: the slope by differences.
        found: the inner product of the gradient and the direction.
        doubt: how much of their difference rounding and curvature may explain.
        verdict: whether they agree; `not checked` where rounding and curvature overlap.
    """

    expected: float
    found: float
    doubt: float
    verdict: Verdict


def allowed_error(unit: float) -> float:
    """Return by how much numbers computed in two ways may differ, with the rounding of 16 bits or of float32."""
    return (30 if unit > 1e-6 else 1000) * unit


def wide(x: np.ndarray) -> np.ndarray:
    """Return an array in 32 bits or more."""
    return x if x.dtype.itemsize >= 4 else x.astype(np.float32)


def inner_product(x: np.ndarray, y: np.ndarray) -> float:
    """Return the inner product of two arrays, without the threads of a library, which would spin later.

    Chunks are added in their own type, which takes a fifth of the time, and in float64 where its range may not do.
    """
    x, y = x.ravel(), y.ravel()
    count, total = x.size - x.size % _CHUNK, 0.0
    if count:
        with np.errstate(all="ignore"):
            chunks = np.einsum("ij,ij->i", *(z[:count].reshape(-1, _CHUNK) for z in (x, y)))
        total = float(chunks.sum(dtype=np.float64))
    if not 1e-20 < abs(total) < 1e30:
        count, total = 0, 0.0
    return total + float(np.einsum("i,i->", x[count:], y[count:], dtype=np.float64))


def dot_along(x: np.ndarray, d: np.ndarray | Entries) -> float:
    """Return the inner product of an array and a part of a direction."""
    return inner_product(x.ravel()[d.where], d.numbers) if isinstance(d, Entries) else inner_product(x, d)


def move_along(x: np.ndarray, d: np.ndarray | Entries, step: float, out: np.ndarray) -> np.ndarray:
    """Write an array that is moved along a part of a direction into `out`: another one, the part, or the array."""
    if isinstance(d, Entries):
        if out is not x:
            np.copyto(out, x)
        out.reshape(-1)[d.where] += step * d.numbers
    else:
        np.multiply(d, step, out=out, dtype=out.dtype)
        out += x
    return out


def norm_of(x: np.ndarray) -> float:
    """Return the Euclidean norm of an array."""
    return math.sqrt(inner_product(x, x))


def are_finite(x: np.ndarray) -> bool:
    """Return whether all numbers of an array are finite. A sum tells it sooner, unless it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(x.sum()) or bool(np.isfinite(x).all())


def typical_sizes(parameters: Arrays) -> dict[str, float]:
    """Return the median magnitude of the numbers of each parameter, or `SMALLEST` of one that is all 0."""
    sizes = {}
    for name, w in parameters.items():
        some = np.abs(w.ravel()[:: max(1, w.size // SIZE_SAMPLE)].astype(np.float64))
        some = some[some > 0]
        sizes[name] = float(np.median(some)) if some.size else SMALLEST
    return sizes


@dataclass(frozen=True)
class Question:
    """Ask whether a loss has the slope along a direction that its gradient has.

    Args:
        direction: what is added to some parameters, times the step.
        found: the inner product of the gradient and the direction.
        least: the difference that is always rounding of the gradient.
        precision: how exactly the loss is computed.
        sizes: those of the parameters, if they are known.
    """

    direction: Direction
    found: float
    least: float
    precision: Precision
    sizes: Mapping[str, float] | None = None

    @property
    def allowed(self) -> float:
        """Return the difference of slopes that agree."""
        return max(self.precision.tolerance * abs(self.found), self.least)

    def move(self, point: Arrays) -> float:
        """Return the largest number of the direction, relative to its parameter's own size."""
        sizes = self.sizes or typical_sizes({name: point[name] for name in self.direction})
        return max(
            (
                max(d.max(initial=0.0), -d.min(initial=0.0)) / sizes[name]
                for name, part in self.direction.items()
                for d in (part.numbers if isinstance(part, Entries) else part,)
            ),
            default=0.0,
        )

    def wanted(self, start: float) -> float:
        """Return the change of the loss that a step is to make."""
        return self.precision.change * max(abs(start), 1e-3)

    def step(self, start: float, move: float) -> float:
        """Return the first step: it makes the wanted change, but moves no parameter far."""
        most = MOVED / move
        return min(most, self.wanted(start) / abs(self.found)) if self.found else most * self.precision.blind


def agree_at_once(
    loss: Callable[[Arrays], float], point: Arrays, start: float, asked: Sequence[Question]
) -> tuple[float, float] | None:
    """Return the change of a loss by steps along several directions at once, and the one by its gradient.

    Return None unless they are so close that the slope along each direction agrees on this side. The directions are
    overwritten.
    """
    moved, expected, allowed = dict(point), 0.0, math.inf
    for question in asked:
        if not (move := question.move(point)):
            return None
        # Nothing changes along a slope of 0, and a step of the usual length may be less than rounding.
        step = question.step(start, move) if question.found else 2 * MOVED / move
        step = math.copysign(step, question.found)  # uphill along each, so that a factor of all adds up
        for name, d in question.direction.items():
            x = moved[name]
            if x is not point[name] and isinstance(d, Entries):
                out = x
            else:
                out = np.empty_like(x, order="C") if isinstance(d, Entries) or d.dtype != x.dtype else d
            moved[name] = move_along(x, d, step, out)
        expected += step * question.found
        allowed = min(allowed, abs(step) * question.allowed)
    found = loss(moved) - start
    return (found, expected) if abs(found - expected) <= ONE_SIDED * allowed else None


def slope_along(loss: Callable[[Arrays], float], point: Arrays, start: float, asked: Question) -> Slope:
    """Compare the slope of a loss along a direction with that of its gradient.

    One forward pass decides if they agree well, a second one, on the other side, if they agree, and two more at the
    farthest step if rounding may hide the slope of the first. Otherwise, pairs of steps are extrapolated (Richardson
    1911): the difference between a pair's slopes tells how much rounding, curvature and kinks may explain. A pair says
    that they agree only if it is in less doubt than those before.

    Args:
        loss: returns the loss at a point.
        point: the parameters.
        start: the loss there, computed in any precision.
        asked: the direction, and the slope that the gradient has.
    """
    direction, found, least, precision = asked.direction, asked.found, asked.least, asked.precision
    relative, allowed = asked.move(point), asked.allowed
    if not relative:
        return Slope(0.0, found, 0.0, "agrees" if abs(found) <= least else "differs")
    first = asked.step(start, relative)
    ends: dict[float, tuple[float, float]] = {}
    moved = {name: np.empty_like(point[name], order="C") for name in direction}

    def loss_at(step: float) -> float:
        for name, d in direction.items():
            move_along(point[name], d, step, moved[name])
        return loss(point | moved)

    def at(multiple: float) -> tuple[float, float, float]:
        """Return the losses on both sides, and the slope between them."""
        step = multiple * first
        if multiple not in ends:
            ends[multiple] = ahead if multiple == 1 else loss_at(step), loss_at(-step)
        after, before = ends[multiple]
        return after, before, (after - before) / (2 * step)

    def rounding(multiple: float) -> float:
        return 4 * precision.unit * max(abs(start), precision.scale) / (multiple * first)

    ahead = loss_at(first)
    forward = (ahead - start) / first
    if abs(forward - found) <= ONE_SIDED * allowed:
        return Slope(forward, found, rounding(1.0), "agrees")
    central = at(1.0)[-1]
    if abs(central - found) <= allowed + min(rounding(1.0), abs(found) * precision.tolerance):
        return Slope(central, found, rounding(1.0), "agrees")
    far = min(FARTHEST / relative, asked.wanted(start) / abs(found) if found else math.inf) / first
    if far > 1.0 and rounding(1.0) > allowed and abs(at(far)[-1] - found) <= allowed:
        return Slope(at(far)[-1], found, rounding(far), "agrees")
    best, here = Slope(central, found, math.inf, "not checked"), loss(point)
    is_open = False  # a pair agrees, and another one that is in less doubt does not
    for large, small in zip(LADDER[::2], LADDER[1::2], strict=True):
        if small > large:
            large, small = small, large
        if large * first * relative > FARTHEST:
            continue
        (*_, wide), (above, below, narrow) = at(large), at(small)
        after, before = (above - here) / (small * first), (here - below) / (small * first)
        if not all(map(math.isfinite, (wide, narrow, after, before))):
            continue
        doubt = abs(wide - narrow) + rounding(small)
        expected = narrow + (narrow - wide) / ((large / small) ** 2 - 1)
        off = abs(expected - found)
        between = min(after, before) - allowed <= found <= max(after, before) + allowed
        if off <= allowed + doubt / 3 and (doubt <= precision.doubted * abs(found) or off <= least):
            if doubt < best.doubt:
                return Slope(expected, found, doubt, "agrees")
            is_open = True
        clear = off > 4 * doubt + 1.2 * allowed and not between
        if doubt < best.doubt:
            best = Slope(expected, found, doubt, "differs" if clear else "not checked")
        if clear and doubt < 0.05 * off:
            break
    return replace(best, verdict="not checked") if is_open else best
