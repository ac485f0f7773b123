"""Fixtures of all tests, and the sample of them that runs by default."""

from __future__ import annotations

import itertools
import logging
import os
import zlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.graph.rewriting import Pass
from graphopt.targets.onnxruntime.fuse import FUSIONS

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
    config.addinivalue_line(
        "markers", "whole: all cases of a test run by default, since each takes milliseconds"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what a sample leaves out of a test with many cases: always the same cases, in no order."""
    cases = (item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec"))
    for _, group in itertools.groupby(cases, key=lambda item: (item.path, item.originalname)):
        drawn = sorted(group, key=lambda item: zlib.crc32(item.name.encode()))
        for item in [item for item in drawn[SAMPLE:] if item.get_closest_marker("whole") is None]:
            item.add_marker(pytest.mark.slow)
