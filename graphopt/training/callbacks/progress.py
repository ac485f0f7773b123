"""Show the progress of a run: bars in a terminal and in notebooks, plain lines elsewhere."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from graphopt.training.callbacks.callback import Callback, Record, Run

__all__ = ["ProgressBar"]

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 30.0
WINDOW = 50  # the number of last steps whose losses are averaged
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 12  # of the sparkline
_WIDE = 110  # columns of a terminal that has room for long bars
SHOWN_SEPARATELY = ("epoch", "step", "rows", "loss", "learning_rate", "seconds", "samples_per_second")


class ProgressBar(Callback):
    """Show the progress of `fit`: epochs, steps, the loss, measures, the rate, samples per second and the time left.

    In a terminal and in a notebook, bars show the epochs and the steps of the epoch, with a sparkline of the loss, the
    mean of the last 50 losses and its standard error, and the least validation loss so far. Elsewhere, a line is
    printed per epoch, and every 30 seconds. Notebooks need the package ipywidgets to update the bars in place.

    Args:
        console: the console to print on; that of the process by default.
        epochs: print a line per epoch.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> data = {"x": X, "target": 2 * X + 1}
    >>> bar = graphopt.callbacks.ProgressBar()
    >>> records = graphopt.fit(graphopt.Executor(step), data, epochs=1, callbacks=[bar])  # doctest: +ELLIPSIS
    epoch 1/1  loss ...
    """

    reads_state = False
    on_every_worker = False

    def __init__(self, console: Console | None = None, *, epochs: bool = True) -> None:
        self._console = console or Console()
        self._lines = epochs
        self._progress: Progress | None = None

    def on_fit_begin(self, run: Run) -> None:
        self._rows, self._first = 0, run.step
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._losses = Curve(WIDTH)
        self._start = self._shown = time.perf_counter()
        if self._console.is_terminal or self._console.is_jupyter:
            self._progress = Progress(
                TextColumn("{task.description:<6} {task.fields[count]}"),
                BarColumn(bar_width=20 if self._console.width >= _WIDE else 8),
                TextColumn("{task.fields[text]}"),
                _Left(compact=True),
                console=self._console,
                transient=True,
            )
            total = None if run.steps is None else run.epochs * run.steps
            self._epochs = self._progress.add_task(
                "epoch", total=total, completed=run.step, count="", text=""
            )
            self._steps = self._progress.add_task("step", total=run.steps, count="", text="", is_inner=True)
            self._progress.start()

    def on_step_end(self, run: Run, record: Record) -> None:
        self._rows += record["rows"]
        self._recent.append(float(record["loss"]))
        self._losses.add(record["step"], float(record["loss"]))
        now = time.perf_counter()
        if now - self._shown < (LIVE_SECONDS if self._progress else PLAIN_SECONDS):
            return
        self._shown = now
        speed = self._rows / (now - self._start)
        loss = statistics.fmean(self._recent)
        error = None  # the standard error of the mean
        if len(self._recent) > 1:
            error = statistics.stdev(self._recent) / math.sqrt(len(self._recent))
        text = _text({**record, "loss": loss, "samples_per_second": speed}, shown=False, error=error)
        if self._progress is not None:
            done = record["step"] if run.steps is None else record["step"] - (record["epoch"] - 1) * run.steps
            steps = "" if run.steps is None else f"/{run.steps}"
            self._progress.update(
                self._epochs, completed=record["step"], count=_epoch(run, record), text=_best(run.records)
            )
            self._progress.update(
                self._steps,
                completed=done,
                count=f"{done}{steps}",
                text=f"{sparkline(self._losses.points()[1])} {text}",
            )
            return
        left = ""
        if run.steps is not None:
            total = run.epochs * run.steps
            seconds = (now - self._start) * (total - record["step"]) / (record["step"] - self._first)
            left = f"/{total}  {text}  {seconds:.0f} s left"
        self._print(f"epoch {_epoch(run, record)}  step {record['step']}{left or f'  {text}'}")

    def on_epoch_end(self, run: Run, record: Record) -> None:
        self._shown = time.perf_counter()
        if self._lines:
            self._print(f"epoch {_epoch(run, record)}  {_text(record)}")

    def on_fit_end(self, run: Run) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def sparkline(means: Sequence[float], width: int = WIDTH) -> str:
    """Return numbers as a line of bars; nothing if one is not finite."""
    low, high = min(means, default=0.0), max(means, default=0.0)
    if not math.isfinite(high - low):
        return ""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means).ljust(width)


def _best(records: Sequence[Record]) -> str:
    """Return the least validation loss, and its epoch."""
    losses = [(record.get("validation_loss", math.inf), record["epoch"]) for record in records]
    loss, epoch = min((pair for pair in losses if pair[0] < math.inf), default=(math.inf, 0))
    return f"best validation {_number(loss)} in epoch {epoch}" if epoch else ""


class _Left(TimeRemainingColumn):
    """Show the time left until the end of the run, but not until the end of its epoch."""

    def render(self, task: Any) -> Any:
        if task.fields.get("is_inner") or task.total is None:
            return ""
        return super().render(task) + " left"


def measures(record: Mapping[str, Any]) -> str:
    """Return a record's validation loss and metrics as text."""
    numbers = {k: v for k, v in record.items() if k not in SHOWN_SEPARATELY and isinstance(v, float)}
    return "  ".join(f"{_label(name)} {_number(value)}" for name, value in numbers.items())


def _epoch(run: Run, record: Mapping[str, Any]) -> str:
    return f"{record['epoch']:>{len(str(run.epochs))}}/{run.epochs}"


def _text(record: Mapping[str, Any], *, shown: bool = True, error: float | None = None) -> str:
    parts = [f"loss {_number(record['loss'])}" + (f" ± {error:.2g}" if error is not None else "")]
    if shown and measures(record):
        parts.append(measures(record))
    if record.get("learning_rate") is not None:
        parts.append(f"rate {record['learning_rate']:.2e}")
    parts.append(f"{record['samples_per_second']:,.0f} samples/s")
    return "  ".join(parts)


def _label(name: str) -> str:
    return {"validation_loss": "validation", "r2": "R2", "mae": "MAE"}.get(name, name.replace("_", " "))


def _number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


class Curve:
    """Keep the means of a number over at most `most` equal bins; a bin has its count, last step and sum."""

    def __init__(self, most: int, bins: list[list[float]] | None = None) -> None:
        self._most, self.bins = most, bins or []
        self._width = max((count for count, _, _ in self.bins), default=1)

    def add(self, step: int, value: float) -> None:
        """Add a value; merge pairs of bins if all are full."""
        if not self.bins or self.bins[-1][0] >= self._width:
            if len(self.bins) == self._most:
                pairs = zip(self.bins[::2], self.bins[1::2], strict=True)
                self.bins = [[a[0] + b[0], b[1], a[2] + b[2]] for a, b in pairs]
                self._width *= 2
            self.bins.append([0, step, 0.0])
        last = self.bins[-1]
        last[0], last[1], last[2] = last[0] + 1, step, last[2] + value

    def points(self) -> tuple[list[float], list[float]]:
        """Return the last step and the mean of each bin."""
        return [step for _, step, _ in self.bins], [total / count for count, _, total in self.bins]
