"""What a person sees while training: bars in a terminal, lines in a pipe, nothing if the run is quiet."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import mlp
from rich.console import Console

import graphopt
import passes
from graphopt import cli
from graphopt.targets.native import toolchain
from graphopt.training.callbacks import progress
from graphopt.training.callbacks.progress import Curve, ProgressBar, sparkline

X = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32)
DATA = {"x": X, "target": (X.sum(axis=1) > 0).astype(np.int64)}


def shown(console: Console, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[str, list[float]]:
    """Train with bars that are drawn at each step; return what is printed, and the losses."""
    monkeypatch.setattr(progress, "LIVE_SECONDS", 0.0)
    losses = []

    class Losses(graphopt.Callback):
        def on_step_end(self, run: Any, record: Any) -> None:
            losses.append(record["loss"])

    step = graphopt.compile(mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.AdamW())
    bar = ProgressBar(console)
    callbacks = [Losses(), bar]
    graphopt.fit(graphopt.Executor(step), DATA, epochs=3, batch_size=10, callbacks=callbacks, **options)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()), losses  # type: ignore[attr-defined]


def test_bars_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=130)
    said, losses = shown(console, monkeypatch)
    last = said.rpartition("epoch  3/3")[2]
    assert "step   16/16" in last
    assert re.search(r"best validation 0\.\d+ in epoch 2", said)
    recent = losses[-progress.WINDOW :]
    error = statistics.stdev(recent) / len(recent) ** 0.5
    assert f"loss {statistics.fmean(recent):.4f} ± {error:.2g}" in last
    assert set(re.findall("[▁▂▃▄▅▆▇█]", last)) >= {"▁", "█"}
    assert "samples/s" in last and "rate 1.00e-03" in last
    assert len(re.findall(r"\repoch \d/3  loss", said)) == 3


@pytest.mark.parametrize("width", [60, 80, 110])
def test_bars_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    said, _ = shown(console, monkeypatch)
    bars = [line for line in said.splitlines() if "━" in line]
    assert bars and max(map(len, bars)) <= width


def test_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = shown(Console(file=io.StringIO(), width=80), monkeypatch, validation=None)
    assert [line[:9] for line in said.splitlines()] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    said, _ = shown(Console(file=io.StringIO(), width=80), monkeypatch, validation=None)
    assert re.search(r"^epoch 2/3  step 33/60  loss 0\.\d+ ± .* samples/s  \d+ s left$", said, re.MULTILINE)


def test_the_sparkline_has_the_means_of_equal_parts() -> None:
    def line(width: int, values: Any) -> str:
        curve = Curve(width)
        for step, value in enumerate(values):
            curve.add(step, float(value))
        return sparkline(curve.points()[1], width)

    assert line(4, [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [7.0] * 4) == "▁▂▃█"
    for width, count in itertools.product((2, 12), (1, 5, 100, 1001)):
        bars = line(width, np.linspace(3, 1, count))
        heights = [progress.BARS.index(x) for x in bars.strip()]
        assert len(bars) == width and heights == sorted(heights, reverse=True)
    assert line(2, [1.0, float("inf")]) == ""


@pytest.mark.slow
def test_a_quiet_run_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["quiet=true", "fit.epochs=1", "folder=run"]) == 0
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")
    assert Path("run/trained.onnx").exists()
    assert cli.main(["quiet=true", "folder=run"]) == 1
    assert capfd.readouterr().err.startswith("graphopt: error: ")


@pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
@pytest.mark.slow
def test_the_command_says_that_the_compiler_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GRAPHOPT_NATIVE", "auto")
    line = "kernels   compiling for this machine, once for this graph"
    for run, quiet, said in (("first", False, True), ("second", False, False), ("third", True, False)):
        if quiet:
            shutil.rmtree(tmp_path / "graphopt")
        assert cli.main(["fit.epochs=1", f"folder={run}", f"quiet={quiet}"]) == 0
        assert (line in capfd.readouterr().out) == said
    assert toolchain.logger.handlers == []
