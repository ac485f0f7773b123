"""Print what a run is about."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console

from graphopt.targets.native import toolchain
from graphopt.training.callbacks import Callback, Run


class Header(Callback):
    """Print the model, the data and the length of the run, as a callback of `fit`."""

    reads_state = False
    on_every_worker = False

    def __init__(
        self, console: Console, title: str | None = None, *, model: str, data: str, workers: int = 1
    ) -> None:
        self._console = console
        self._title = title
        self._model = model
        self._data = data
        self._workers = workers

    def on_fit_begin(self, run: Run) -> None:
        if self._title is not None:
            self._console.print(self._title, markup=False, highlight=False, soft_wrap=True, style="bold")
        held_out = f", {run.validation_rows:,} held out" if run.validation_rows else ""
        rows = "rows" if run.rows is None else f"{run.rows:,} rows"
        say(self._console, "model", self._model)
        say(self._console, "data", f"{self._data}, {rows} to train on{held_out}")
        steps = "" if run.steps is None else f", {counted(run.epochs * run.steps, 'step')}"
        workers = f", {counted(self._workers, 'worker')}" if self._workers > 1 else ""
        say(self._console, "run", f"{counted(run.epochs, 'epoch')}{steps}{workers}")
        if run.resumed is not None:
            say(self._console, "resumed", f"after step {run.step:,}, in epoch {run.epoch}: {run.resumed}")


@contextlib.contextmanager
def compilations(console: Console) -> Iterator[None]:
    """Print a line whenever the compiler starts, which may take long."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(console, "kernels", record.getMessage())

    handler, level = Lines(), toolchain.logger.level
    toolchain.logger.addHandler(handler)
    toolchain.logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        toolchain.logger.removeHandler(handler)
        toolchain.logger.setLevel(level)


def say(console: Console, what: str, text: str) -> None:
    """Print a line that starts with its topic."""
    console.print(f"{what:<9} {text}", markup=False, highlight=False, soft_wrap=True)


def counted(number: int, what: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
