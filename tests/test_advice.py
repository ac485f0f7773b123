"""`fit` warns of a batch larger than the data, and of class numbers that train a regression, and of nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphopt
import passes
from graphopt import models

pytestmark = pytest.mark.usefixtures("plain")

RNG = np.random.default_rng(0)
CLASSES, BINARY = RNG.integers(0, 4, 100), RNG.integers(0, 2, 100)


def fit(target: np.ndarray, loss: Any = None, outputs: int = 1, **options: Any) -> None:
    model = models.linear((3,), outputs)
    step = graphopt.compile(model, loss=loss or passes.MeanSquaredError(), optimizer=passes.SGD(1e-3))
    x = np.ones((len(target), 3), np.float32)
    graphopt.fit(graphopt.Executor(step), {"x": x, "target": target}, epochs=1, **options)


WARNED: list[tuple[Callable[[], None], str]] = [
    (lambda: fit(CLASSES), r"whole numbers from 0 to 3 train a regression: .*passes.CrossEntropy"),
    (lambda: fit(CLASSES.astype(np.uint8)), "whole numbers from 0 to 3 train a regression"),
    (lambda: fit(CLASSES, passes.Huber()), "whole numbers from 0 to 3 train a regression"),
    (lambda: fit(BINARY), "passes.BinaryCrossEntropy"),
    (
        lambda: fit(RNG.normal(size=100), batch_size=90),
        "batch_size=90: more than the 80 rows that train, .* such as 8",
    ),
]
SILENT: list[Callable[[], None]] = [
    lambda: fit(CLASSES, passes.CrossEntropy(), outputs=4),
    lambda: fit(BINARY, passes.BinaryCrossEntropy()),
    lambda: fit(CLASSES.astype(np.float32)),
    lambda: fit(CLASSES + 1),
    lambda: fit(RNG.poisson(4, 100), passes.Poisson()),
    lambda: fit(RNG.integers(0, 100, 100)),
    lambda: fit(RNG.normal(size=100), batch_size=80),
    lambda: fit(RNG.normal(size=20)),
]


@pytest.mark.parametrize(("call", "said"), WARNED)
def test_what_hardly_anyone_means_is_warned_of_once(call: Callable[[], None], said: str) -> None:
    with pytest.warns(UserWarning, match=said) as caught:
        call()
    ours = [warning for warning in caught if issubclass(warning.category, UserWarning)]
    assert len(ours) == 1 and ours[0].filename == __file__


@pytest.mark.parametrize("call", SILENT)
def test_what_people_mean_is_not(call: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
