"""Show the progress of a run in a notebook, in one place that is written anew; it needs no package but IPython."""

from __future__ import annotations

import sys
import time
from typing import Any

from graphopt.training.callbacks.callback import Callback, Record, Run
from graphopt.training.records import Records

_SECONDS = 0.2  # between two pictures
_KERNELS = ("ZMQInteractiveShell", "Shell")  # Jupyter's and Colab's; a terminal's is TerminalInteractiveShell


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ in _KERNELS


class NotebookProgress(Callback):
    """Show a bar with the epoch, the step and the loss, above a table of the records so far."""

    reads_state = False
    on_every_worker = False

    def __init__(self) -> None:
        self._display: Any = None

    def on_fit_begin(self, run: Run) -> None:
        self._shown = 0.0
        self._display = sys.modules["IPython"].display.display(_Html(""), display_id=True)

    def on_step_end(self, run: Run, record: Record) -> None:
        now = time.perf_counter()
        if now - self._shown >= _SECONDS:
            self._shown = now
            done, total = run.step, run.steps and run.epochs * run.steps
            value = f" value='{done}' max='{total}'" if total else ""
            of = f" of {total:,}" if total else ""
            text = f"epoch {run.epoch} of {run.epochs}, step {done:,}{of}, loss {float(record['loss']):.4g}"
            self._show(f"<progress{value}></progress> {text}", run.records)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        self._show(f"epoch {run.epoch} of {run.epochs}", [*run.records, record])

    def on_fit_end(self, run: Run) -> None:
        self._show(f"stopped: {run.stopped}" if run.stopped else "", run.records)

    def _show(self, line: str, records: list[Record]) -> None:
        table = Records(records)._repr_html_() if records else ""
        self._display.update(_Html(f"<div>{line}</div>{table}"))


class _Html:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return "the progress of fit"

    def _repr_html_(self) -> str:
        return self._text
