"""Account for differential privacy: the epsilon of a training with `passes.PrivateGradient`, and its inverse.

The extra `privacy` installs dp-accounting, which computes it from the distribution of privacy losses (Koskela, Jälkö,
Honkela 2020, arXiv:1906.03049), for data sets that differ by one row, and batches by Poisson sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from graphopt.arguments import checked
from graphopt.errors import GraphoptError


@checked()
def epsilon(rows: int, batch_size: int, steps: int, multiplier: float, delta: float) -> float:
    """Return the epsilon of (epsilon, delta)-differential privacy after so many steps; infinity without noise.

    Args:
        rows: the number of rows that train.
        batch_size: the expected number of rows of a batch.
        steps: the number of updates.
        multiplier: that of `passes.GaussianNoise`.
        delta: the probability with which the bound may fail, such as 1e-5: less than 1 / rows.

    Raises:
        GraphoptError: a number is out of its range, or dp-accounting is not installed.

    >>> round(graphopt.privacy.epsilon(rows=1297, batch_size=128, steps=607, multiplier=1.1, delta=1e-4), 2)
    13.57
    """
    wrong = {
        "rows": (rows, rows >= 1, "1 or more"),
        "batch_size": (batch_size, 1 <= batch_size <= rows, f"1 to {rows} rows"),
        "steps": (steps, steps >= 0, "0 or more"),
        "multiplier": (multiplier, 0 <= multiplier < math.inf, "0 or more"),
        "delta": (delta, 0 < delta < 1 / max(rows, 1), "a number between 0 and 1 / rows"),
    }
    for name, (found, fits, expected) in wrong.items():
        if not fits:
            raise GraphoptError(f"privacy: {name}: expected {expected}, found {found}")
    if not steps:
        return 0.0
    if not multiplier:
        return math.inf
    return float(_losses(batch_size / rows, multiplier).self_compose(steps).get_epsilon_for_delta(delta))


@lru_cache(maxsize=1)
def _losses(share: float, multiplier: float) -> Any:
    """Return the distribution of the privacy loss of one step, which a search composes for many numbers of steps."""
    try:
        from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
    except ImportError as error:
        raise GraphoptError(
            f"privacy: expected dp-accounting, found: {error}: pip install 'graphopt[privacy]'"
        ) from error
    return from_gaussian_mechanism(multiplier, sampling_prob=share)


@checked()
def multiplier_for(epsilon: float, rows: int, batch_size: int, steps: int, delta: float) -> float:
    """Return the least multiplier of `passes.GaussianNoise`, to 0.001, that gives at most this epsilon.

    Args:
        epsilon: the bound.
        rows, batch_size, steps, delta: as for `graphopt.privacy.epsilon`.

    Raises:
        GraphoptError: a number is out of its range, or dp-accounting is not installed.

    >>> graphopt.privacy.multiplier_for(8.0, rows=60000, batch_size=256, steps=3520, delta=1e-5) < 1
    True
    """
    if not 0 < epsilon < math.inf:
        raise GraphoptError(f"privacy: epsilon: expected a number above 0, found {epsilon}")

    def fits(thousandths: int) -> bool:
        return _epsilon(rows, batch_size, steps, thousandths / 1000, delta) <= epsilon

    return _least(fits, 1000) / 1000


def steps_for(epsilon: float, rows: int, batch_size: int, multiplier: float, delta: float, most: int) -> int:
    """Return the largest number of steps, up to `most`, whose epsilon is at most this one."""
    if _epsilon(rows, batch_size, most, multiplier, delta) <= epsilon:
        return most
    return _least(lambda steps: _epsilon(rows, batch_size, steps, multiplier, delta) > epsilon, 1) - 1


def _least(holds: Callable[[int], bool], start: int) -> int:
    """Return the least number from 1 on for which a condition holds that holds for all larger ones."""
    high = start
    while not holds(high):
        high *= 2
        if high > 2**30:
            raise GraphoptError("privacy: expected a bound that noise can keep, found none: raise epsilon or delta")
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


_epsilon = epsilon
