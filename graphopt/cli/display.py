"""Display a training run: as a live line in a terminal, and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from graphopt.training.callbacks import Callback, Record, Run

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 30.0
SHOWN_BESIDE = ("epoch", "step", "rows", "loss", "learning_rate", "seconds", "samples_per_second")


class Display(Callback):
    """Display training as a callback of `fit`, in a `with` block.

    Args:
        console: the console to print on.
        epochs: print a line per epoch; otherwise show the live line only.
    """

    reads_state = False

    def __init__(self, console: Console, *, epochs: bool = True) -> None:
        self._console = console
        self._lines = epochs
        self._progress: Progress | None = None
        self._shown = time.perf_counter()

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def on_fit_begin(self, run: Run) -> None:
        self._epochs, self._steps = run.epochs, _steps(run)
        self._done, self._rows, self._first = run.step, 0, run.step
        self._start = self._shown = time.perf_counter()
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task(
                "",
                total=self._steps,
                completed=self._done,
                epoch=f"{max(run.epoch, 1)}/{run.epochs}",
                text="",
            )
            self._progress.start()

    def on_step_end(self, run: Run, record: Record) -> None:
        self._done += 1
        self._rows += record["rows"]
        now = time.perf_counter()
        if now - self._shown < (LIVE_SECONDS if self._progress else PLAIN_SECONDS):
            return
        self._shown = now
        text = _text({**record, "samples_per_second": self._rows / (now - self._start)}, ("loss",))
        if self._progress is not None:
            epoch = f"{record['epoch']}/{self._epochs}"
            self._progress.update(self._task, completed=self._done, epoch=epoch, text=text)
        else:
            left = (now - self._start) * (self._steps - self._done) / (self._done - self._first)
            self._print(
                f"epoch {self._epoch(record)}  step {self._done}/{self._steps}  {text}  {left:.0f} s left"
            )

    def on_epoch_end(self, run: Run, record: Record) -> None:
        self._shown = time.perf_counter()
        if self._lines:
            self._print(f"epoch {self._epoch(record)}  {_text(record)}")

    def _epoch(self, record: Record) -> str:
        return f"{record['epoch']:>{len(str(self._epochs))}}/{self._epochs}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Header(Callback):
    """Print the model, the data and the length of the run, as a callback of `fit`."""

    reads_state = False

    def __init__(self, console: Console, title: str | None = None, *, model: str, data: str) -> None:
        self._console = console
        self._title = title
        self._model = model
        self._data = data

    def on_fit_begin(self, run: Run) -> None:
        if self._title is not None:
            self._console.print(self._title, markup=False, highlight=False, soft_wrap=True, style="bold")
        held_out = f", {run.validation_rows:,} held out" if run.validation_rows else ""
        say(self._console, "model", self._model)
        say(self._console, "data", f"{self._data}, {run.rows:,} rows to train on{held_out}")
        say(self._console, "run", f"{counted(run.epochs, 'epoch')}, {counted(_steps(run), 'step')}")
        if run.resumed is not None:
            say(self._console, "resumed", f"after step {run.step:,}, in epoch {run.epoch}: {run.resumed}")


def _steps(run: Run) -> int:
    assert run.steps is not None
    return run.epochs * run.steps


def say(console: Console, what: str, text: str) -> None:
    """Print a line that starts with its topic."""
    console.print(f"{what:<9} {text}", markup=False, highlight=False, soft_wrap=True)


def counted(number: int, what: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def measures(record: Mapping[str, Any]) -> str:
    """Return a record's validation loss and metrics as text."""
    numbers = {k: v for k, v in record.items() if k not in SHOWN_BESIDE and isinstance(v, float)}
    return "  ".join(f"{_label(name)} {_number(value)}" for name, value in numbers.items())


def _text(record: Mapping[str, Any], numbers: tuple[str, ...] | None = None) -> str:
    parts = [f"loss {_number(record['loss'])}"]
    if numbers is None and measures(record):
        parts.append(measures(record))
    if record.get("learning_rate") is not None:
        parts.append(f"rate {record['learning_rate']:.2e}")
    parts.append(f"{record['samples_per_second']:,.0f} samples/s")
    return "  ".join(parts)


def _label(name: str) -> str:
    return {"validation_loss": "validation", "r2": "R2", "mae": "MAE"}.get(name, name.replace("_", " "))


def _number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"
