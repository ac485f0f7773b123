"""Benchmarks run, and compare the same work; what they measure is not asserted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "examples/benchmarks"


def benchmark(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_scikit_learn_and_pytorch_take_the_same_steps(monkeypatch, tmp_path):
    path = tmp_path / "curves.svg"
    found = benchmark("scikit_learn", monkeypatch).main(epochs=3, rounds=1, path=str(path))
    assert set(found) == {"graphopt", "scikit-learn", "PyTorch"}
    curves = np.array([curve for _, curve in found.values()])
    np.testing.assert_allclose(curves[1:], curves[[0, 0]], rtol=1e-4)
    assert "<svg" in path.read_text()


def test_compiling_is_timed(monkeypatch):
    rows = benchmark("compile_time", monkeypatch).main("squeezenet")
    ((before, after, seconds),) = rows.values()
    assert 0 < before < after
    assert seconds > 0
