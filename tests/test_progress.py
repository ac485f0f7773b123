"""What a person sees while training: bars in a terminal, lines in a pipe, nothing if the run is quiet."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import statistics
import struct
import subprocess
import sys
import termios
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
from graphopt.training.callbacks import progress, terminal
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
    last = said.rpartition("epoch 3/3   ")[2]
    assert "step  16/16" in last
    assert re.search(r"best validation loss 0\.\d+ in epoch \d", said)
    recent = losses[-progress.WINDOW :]
    error = statistics.stdev(recent) / len(recent) ** 0.5
    assert f"loss {statistics.fmean(recent):.4f} ± {error:.2g}" in last
    assert set(re.findall("[▁▂▃▄▅▆▇█]", last)) >= {"▁", "█"}
    assert "samples/s" in last and "rate 1.00e-03" in last
    assert len(re.findall(r"\repoch \d/3  loss", said)) == 3


FIELD = (
    r"loss \d\.\d{4}( ± [\d.e-]+)?|learning rate 1\.00e-03|[\d,]+ samples/s|[▁▂▃▄▅▆▇█]+|\d+ s left|"
    r"best validation loss 0\.\d{4} in epoch \d"
)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 110, 120])
def test_no_number_is_cut_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    said, _ = shown(console, monkeypatch)
    lines = [line for part in said.splitlines() for line in part.split("\r")]
    assert max(map(len, lines)) <= width and "…" not in said
    bars = [re.split("[━╸╺]+", line)[-1].strip() for line in lines if "━" in line]
    assert bars and all(re.fullmatch(FIELD, field) for bar in bars for field in re.split("  +", bar) if field)
    printed = " ".join(" ".join(line for line in lines if "━" not in line).split())
    numbers = r"epoch 3/3 loss \d\.\d{4} validation loss \d\.\d{4} accuracy \d\.\d{4} learning rate 1\.00e-03"
    assert re.search(numbers, printed)


def test_bars_keep_up_with_short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[str] = []
    show = progress._Bars.show

    def noted(self: Any, run: Any, record: Any, *texts: Any) -> None:
        show(self, run, record, *texts)
        bars.append(self._progress.tasks[0].fields["count"] + " " + self._progress.tasks[0].fields["text"])

    monkeypatch.setattr(progress._Bars, "show", noted)
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    step = graphopt.compile(mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.AdamW())
    records = graphopt.fit(graphopt.Executor(step), DATA, epochs=4, callbacks=[ProgressBar(console)])
    for record in records:  # each of which takes less time than two pictures are apart
        losses = [x["validation_loss"] for x in records[: record["epoch"]]]
        told = f"{record['epoch']}/4 "
        assert any(bar.startswith(told) and f"best validation loss {min(losses):.4f} in" in bar for bar in bars)


class Display:
    """Stands for IPython.display: keeps what a cell shows."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, cell: Any, display_id: bool) -> Display:
        self.update(cell)
        return self

    def update(self, cell: Any) -> None:
        assert "<b>" not in cell._repr_html_()
        self.shown.append(repr(cell))


def test_a_notebook_updates_one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display()
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), force_jupyter=True)
    said, _ = shown(console, monkeypatch)
    assert said == ""
    assert [line[:15] for line in display.shown[-1].splitlines()] == [f"epoch {i}/3  loss" for i in (1, 2, 3)]
    live = [cell.splitlines()[-1] for cell in display.shown if cell]
    assert any(re.match(r"epoch 2/3  step 20/48  ", line) for line in live)


@pytest.mark.slow
def test_output_for_programs_is_plain() -> None:
    code = "from graphopt.training.callbacks.terminal import open_console; print(open_console().is_terminal)"
    said = []
    for columns in (0, 40):  # mpiexec gives its workers terminals without a size
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
        environment = {name: x for name, x in os.environ.items() if name not in terminal._ASKED}
        subprocess.run([sys.executable, "-c", code], stdout=theirs, env={**environment, "TERM": "xterm"}, check=True)
        said.append(os.read(ours, 100).decode().strip())
    assert said == ["False", "True"]


@pytest.mark.slow
def test_rich_is_loaded_when_it_is_used() -> None:
    code = "import graphopt, sys; assert not {'rich', 'pygal', 'IPython'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lines_break_between_words() -> None:
    text = "model     " + " ".join(["17,226 parameters in 6 tensors"] * 4)
    for width in range(1, 130):
        lines = terminal.broken(text, width, 10).split("\n")
        assert " ".join(" ".join(lines).split()) == " ".join(text.split())
        assert all(len(line) <= width or " " not in line.strip() for line in lines)
    assert terminal.broken(terminal.glued("loss 0.5"), 4, 2) == "loss 0.5"


def test_notes_are_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = graphopt.callbacks.LearningRateFinder(steps=30)
    console = Console(file=io.StringIO(), width=100)
    step = graphopt.compile(mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.AdamW())
    bar = ProgressBar(console)
    graphopt.fit(graphopt.Executor(step), DATA, epochs=2, batch_size=10, callbacks=[finder, bar])
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.startswith(f"rate      {finder.suggestion:.3g}, at which the loss fell fastest")
    assert said.count("range test") == 1


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
    cache: Path,
    parts: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_NATIVE", "true")
    line = "kernels   compiling for this machine, once for this graph"
    for run, quiet, said in (("first", False, True), ("second", False, False), ("third", True, False)):
        for path in cache.glob("*.so") if quiet else ():
            path.unlink()
        assert cli.main(["fit.epochs=1", f"folder={run}", f"quiet={quiet}"]) == 0
        assert (line in capfd.readouterr().out) == said
    assert toolchain.logger.handlers == []
