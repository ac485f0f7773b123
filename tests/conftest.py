"""Fixtures of all tests, and the sample of them that runs by default."""

from __future__ import annotations

import itertools
import logging
import os
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

os.environ.setdefault("GRAPHOPT_NATIVE", "false")  # kernels are compiled where a test asks for them

SAMPLE = 8  # cases of a parametrized test that run by default; the others are marked `slow`, which CI runs


@pytest.fixture(autouse=True)
def generator_of_its_own(request: pytest.FixtureRequest) -> None:
    """Give each test its own random generator, `RNG` of its module: it draws the same numbers alone as among others."""
    if hasattr(request.module, "RNG"):
        request.module.RNG = np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def log_files_are_closed() -> Iterator[None]:
    """Close the log files of a test's runs: pytest deletes their folders, and later tests write logs, too."""
    before = list(logging.root.handlers)
    yield
    for handler in [*logging.root.handlers]:
        if isinstance(handler, logging.FileHandler) and handler not in before:
            logging.root.removeHandler(handler)
            handler.close()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps as their graphs say: a test compares small numbers bit by bit, or watches what processes start."""
    monkeypatch.setenv("GRAPHOPT_NATIVE", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what a sample leaves out of a test with many cases: always the same cases, in no order."""
    cases = (item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec"))
    for _, group in itertools.groupby(cases, key=lambda item: (item.path, item.originalname)):
        drawn = sorted(group, key=lambda item: zlib.crc32(item.name.encode()))
        for item in drawn[SAMPLE:]:
            item.add_marker(pytest.mark.slow)
