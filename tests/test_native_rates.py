"""The rates by which convolutions choose: the same for all processes of a cache, fixed ones for deterministic steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from builders import model

import graphopt
import passes
from graphopt import models
from graphopt.graph.loading import load
from graphopt.runtime import forms
from graphopt.targets.native import lowering, rates, toolchain
from graphopt.targets.native.cache import write_cached
from graphopt.targets.native.lowering import lower_to_kernels
from graphopt.targets.native.rates import kept_rates, measured_rates
from graphopt.testing import strict

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")


def measuring(monkeypatch, measure):
    """Let a function measure in place of a library; it returns the rates, or none."""

    def measure_rates(to):
        to[:] = found = measure() or [0.0] * 4
        return int(any(found))

    monkeypatch.setattr(rates, "build", lambda *_: Path())
    monkeypatch.setattr(rates.ctypes, "CDLL", lambda _: SimpleNamespace(measure_rates=measure_rates))


@pytest.mark.parametrize("found", ["nothing", "damage"])
def test_processes_that_measure_at_once_have_the_rates_of_the_first(found, monkeypatch, cache):
    own, first = (2.0, 2.0, 2.0, 40.0), (1.0, 1.0, 1.0, 20.0)

    def measure():  # meanwhile, another process ends
        measuring(monkeypatch, lambda: first)
        assert measured_rates() == first
        return own

    if found == "damage":
        write_cached(rates.rates_file(), b"[]").write_bytes(b"[0]")
    measuring(monkeypatch, measure)
    assert measured_rates() == first == kept_rates()


def test_rates_that_cannot_be_measured_are_not_kept(monkeypatch, cache):
    measuring(monkeypatch, lambda: None)
    assert measured_rates() is None and kept_rates() is None
    measuring(monkeypatch, lambda: (1.0, -1.0, 1.0, 20.0))
    assert measured_rates() is None and kept_rates() is None
    measuring(monkeypatch, lambda: (1.0, 1.0, 1.0, 20.0))
    assert measured_rates() == (1.0, 1.0, 1.0, 20.0)


def test_rates_decide_what_the_cache_keeps(monkeypatch, cache):
    """The library of a graph has rates; where steps are deterministic, always those of rates.h."""
    graph = load(model("g (float[8,64,14,14] x, float[64,64,1,1] w) => (float[8,64,14,14] y) { y = Conv(x, w) }"))
    sources = []
    monkeypatch.setattr(lowering, "pieces_for", lambda _: 1)
    monkeypatch.setattr(lowering, "build", lambda code, *_: sources.append(code) or write_cached("library", b"code"))
    monkeypatch.setattr(lowering, "Objects", MagicMock)
    digests = []
    with strict(False):
        for rate in (1.0, 2.0):
            for name in cache.glob(f"{rates.rates_file()}*"):
                name.unlink()
            measuring(monkeypatch, lambda rate=rate: (rate, rate, rate, rate))
            digests += [
                lower_to_kernels(graph, ["products"], 1, measures=measures).digest for measures in (True, False, True)
            ]
    assert len(set(digests)) == len(sources) == 3
    assert digests[0] == digests[2] != digests[3] == digests[5] and digests[1] == digests[4]
    assert ["NULL);" in code for code in sources] == [False, True, False]


def test_a_deterministic_step_measures_no_rates(monkeypatch):
    asked = []
    monkeypatch.setattr(forms, "lower_to_kernels", lambda *_, measures, **__: asked.append(measures))
    step = graphopt.compile(models.mlp((4,), 2), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    for deterministic in (False, True):
        graphopt.Executor(step, native=True, deterministic=deterministic)
    assert asked == [True, False]
