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
import onnx_ir as ir
import pytest

from graphopt.graph.rewriting import Pass
from graphopt.runtime import forms
from graphopt.targets.onnxruntime.fuse import FUSIONS

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


@pytest.fixture(autouse=True)
def small_graphs_wait_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower a small graph before its first step on every machine, not from the second graph on alone."""
    monkeypatch.setattr(forms, "lacks_parts", lambda model: False)


@pytest.fixture(autouse=True, scope="session")
def rewriters_leave_sorted_graphs() -> Iterator[None]:
    """Check the graph after each pass and each fusion of all tests: rewriters read nodes in topological order."""
    call, fusions = Pass.call, dict(FUSIONS)

    def checked(self: Pass, model: ir.Model) -> ir.passes.PassResult:
        result = call(self, model)
        assert_sorted(model, type(self).__name__)
        return result

    def after(name: str) -> None:
        fusion = fusions[name]

        def fused(model: ir.Model) -> int:
            assert_sorted(model, f"what runs before {name}")
            return fusion(model)

        FUSIONS[name] = fused

    Pass.call = checked  # type: ignore[method-assign]
    for name in fusions:
        after(name)
    yield
    Pass.call = call  # type: ignore[method-assign]
    FUSIONS.update(fusions)


def assert_sorted(model: ir.Model, name: str) -> None:
    """Check that each node of a graph and of its bodies comes after the nodes that it reads."""
    for graph in model.graphs():
        seen: set[ir.Node] = set()
        for node in graph:
            sources = (x.producer() for x in node.inputs if x is not None)
            late = [x for x in sources if x is not None and x.graph is graph and x not in seen]
            assert not late, (
                f"{name} leaves a graph that is not sorted: {node.op_type} before {late[0].op_type}"
            )
            seen.add(node)


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
