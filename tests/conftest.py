"""Fixtures of all tests, and the sample of them that runs by default."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # workers share the cores; libraries read it when they are loaded

import numpy as np
import pytest

from graphopt.testing import strict

SAMPLE = 3  # cases of a parametrized test that run by default; the others are marked `slow`, which CI runs


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


@pytest.fixture(autouse=True, scope="session")
def promises_are_checked() -> Iterator[None]:
    """Check every pass of all tests, and all that is remembered."""
    with strict():
        yield


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "whole: all cases of a test run by default, since each takes milliseconds",
        "sample(count): CI runs so many of a test's cases; the others are `exhaustive`",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what samples leave out of a test with many cases: always the same cases, drawn by their names."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("exhaustive") is None:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        cases.sort(key=lambda case: zlib.crc32(case.name.encode()))
        sample = cases[0].get_closest_marker("sample")
        for case in cases[sample.args[0] :] if sample else []:
            case.add_marker(pytest.mark.exhaustive)
        for case in cases[SAMPLE:] if cases[0].get_closest_marker("whole") is None else []:
            case.add_marker(pytest.mark.slow)
