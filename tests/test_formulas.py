"""Formulas of sizes have the values that integers have, and what is proved of them holds at every size tried."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from graphopt.graph.formulas import (
    Formula,
    TooLong,
    ceiling,
    floor,
    is_nonnegative,
    largest,
    number,
    quotient,
    smallest,
    symbol,
)

LENGTHS = (1, 2, 3, 5, 64, 127, 128, 129, 1600)
SIZES = [dict(zip("NS", pair, strict=True)) for pair in itertools.product(LENGTHS, repeat=2)]
Values = list[Fraction]  # at each of these sizes


def grown(rng: np.random.Generator) -> tuple[Formula, Values]:
    """Return a formula, and its values, computed in another way."""
    parts = [(symbol(name), [Fraction(at[name]) for at in SIZES]) for name in "NS"]
    parts += [(number(n), [Fraction(n)] * len(SIZES)) for n in (3, 128)]
    for _ in range(int(rng.integers(1, 7))):
        (a, f), (b, g) = (parts[i] for i in rng.integers(len(parts), size=2))
        by = Fraction(1, int(rng.choice([2, 3, 128])))
        pairs = list(zip(f, g, strict=True))
        try:
            match int(rng.integers(8)):
                case 0:
                    parts.append((a + b, [x + y for x, y in pairs]))
                case 1:
                    parts.append((a - b, [x - y for x, y in pairs]))
                case 2:
                    parts.append((a * b, [x * y for x, y in pairs]))
                case 3:
                    parts.append((floor(a * by), [Fraction(math.floor(x * by)) for x in f]))
                case 4:
                    parts.append((ceiling(a * by), [Fraction(math.ceil(x * by)) for x in f]))
                case 5:
                    parts.append((largest(a, b), list(map(max, pairs))))
                case 6:
                    parts.append((smallest(a, b), list(map(min, pairs))))
                case 7 if b.number != 0:
                    parts.append((quotient([a, b], [b]), f))
        except TooLong:
            continue
    return parts[-1]


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.sample(30)
def test_what_is_proved_of_formulas_holds(seed):
    (a, f), (b, g) = (grown(np.random.default_rng([seed, i])) for i in range(2))
    if a.number is not None:
        assert set(f) == {a.number}
    if a.name is not None:
        assert f == [at[a.name] for at in SIZES]
    if a == b:
        assert f == g
    if is_nonnegative(a):
        assert min(f) >= 0
    if is_nonnegative(largest(a, b) - a):
        assert all(x >= y for x, y in zip(map(max, f, g), f, strict=True))


def test_names_that_may_be_empty_are_not_taken_for_positive():
    n = symbol("N", 0)
    assert is_nonnegative(n) and not is_nonnegative(n - 1)
    assert largest(n, number(1)).name is None
