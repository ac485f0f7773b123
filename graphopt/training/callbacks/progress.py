"""Show the progress of a run: bars in a terminal, a cell that changes in a notebook, plain lines elsewhere."""

from __future__ import annotations

import html
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphopt.errors import escaped
from graphopt.inspection.words import duration, label_of
from graphopt.training.callbacks.callback import Callback, Record, Run
from graphopt.training.callbacks.terminal import glued, open_console, print_line
from graphopt.training.metrics import RECORDED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["ProgressBar"]

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 30.0
WINDOW = 50  # the number of last steps whose losses are averaged
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 12  # columns
_LONG_BAR, _SHORT_BAR = 20, 8  # columns
_LONG_BARS_FROM = 110  # columns of a terminal
_NOTEBOOK_LINES = 30  # the latest lines of epochs, which a notebook shows
SHOWN_SEPARATELY = {*RECORDED} - {"validation_loss"}


class ProgressBar(Callback):
    """Show the progress of `fit`: epochs, steps, the loss, measures, the rate, samples per second and the time left.

    In a terminal and in a notebook, the epochs and the steps of the epoch are shown as they go, with a sparkline of the
    loss, the mean of the last 50 losses and its standard error, and the least validation loss so far; a narrow
    terminal shows as much of it as it has room for. Elsewhere, a line is printed per epoch, and every 30 seconds.

    Args:
        console: the console of the package rich to print on; that of the process by default.
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
        self._console = console or open_console()
        self._lines = epochs
        self._live: _Bars | _Cell | None = None

    def on_fit_begin(self, run: Run) -> None:
        self._rows, self._first = 0, run.step
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._losses = Curve(SPARKLINE_WIDTH)
        self._start = self._shown = time.perf_counter()
        if self._console.is_jupyter and not self._console.quiet:
            self._live = _Cell()
        elif self._console.is_terminal and not self._console.quiet:
            self._live = _Bars(self._console, run)
        self._print_notes(run)

    def on_step_end(self, run: Run, record: Record) -> None:
        self._rows += record["rows"]
        self._recent.append(float(record["loss"]))
        self._losses.add(record["step"], float(record["loss"]))
        if time.perf_counter() - self._shown >= (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            self._show(run, record)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        if self._live is not None and self._recent:
            self._show(run, record)
        elif self._live is None:
            self._shown = time.perf_counter()
        self._print_notes(run)
        if self._lines:
            fields = [f"epoch {_epoch(run, record)}", *_step_fields(record)]
            is_long = len("  ".join(fields)) > self._console.width  # the bars have the speed, too
            self._print(fields[:-1] if is_long and isinstance(self._live, _Bars) else fields)

    def on_fit_end(self, run: Run) -> None:
        if self._live is not None:
            self._live.end()
            self._live = None
        self._print_notes(run)

    def _show(self, run: Run, record: Record) -> None:
        """Show where the run is: in the bars, or else in a line."""
        self._shown = now = time.perf_counter()
        loss = statistics.fmean(self._recent)
        error = None  # the standard error of the mean
        if len(self._recent) > 1:
            error = statistics.stdev(self._recent) / math.sqrt(len(self._recent))
        speed = self._rows / (now - self._start)
        shown = {**record, "loss": loss, "samples_per_second": speed}
        if run.row_tokens is not None:
            shown["tokens_per_second"] = speed * run.row_tokens
        fields = _step_fields(shown, shown=False, error=error)
        left, total = "", None if run.steps is None else run.epochs * run.steps
        if total is not None:
            seconds = (now - self._start) * (total - record["step"]) / max(record["step"] - self._first, 1)
            left = f"{duration(round(seconds))} left"
        if self._live is not None:
            line = sparkline(self._losses.points()[1])
            self._live.show(run, record, [x for x in (left, _best_text([*run.records, record])) if x], [line, *fields])
            return
        steps = "" if total is None else f"/{total}"
        self._print([f"epoch {_epoch(run, record)}", f"step {record['step']}{steps}", *fields, left])

    def _print(self, fields: Sequence[str]) -> None:
        self._print_line("  ".join(map(glued, filter(None, fields))))

    def _print_line(self, line: str, indent: int = 2) -> None:
        if isinstance(self._live, _Cell):
            self._live.add(line)
        else:
            print_line(self._console, line, indent)

    def _print_notes(self, run: Run) -> None:
        for text in run.notes:
            self._print_line(text, indent=10)
        run.notes.clear()


class _Bars:
    """Show a bar of the epochs and one of the steps of the epoch in a terminal."""

    def __init__(self, console: Console, run: Run) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._width, self._bar = console.width, _LONG_BAR if console.width >= _LONG_BARS_FROM else _SHORT_BAR
        self._progress: Progress = Progress(
            TextColumn("{task.description:<5} {task.fields[count]}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=self._bar),
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
        )
        self._total = None if run.steps is None else run.epochs * run.steps
        self._epochs = self._progress.add_task("epoch", total=self._total, completed=run.step, count="", text="")
        self._steps = self._progress.add_task("step", total=run.steps, count="", text="")
        self._progress.start()

    def show(self, run: Run, record: Record, of_run: Sequence[str], of_step: Sequence[str]) -> None:
        """Move both bars; each has as many of its texts as the terminal has room for."""
        done = record["step"] if run.steps is None else record["step"] - (record["epoch"] - 1) * run.steps
        counts = [
            _epoch(run, record),
            f"{done}" if run.steps is None else f"{done:>{len(str(run.steps))}}/{run.steps}",
        ]
        room = self._width - len("epoch ") - max(map(len, counts)) - self._bar - 3
        line, loss, *others = of_step
        if len(line) + 2 + len(loss) > room:
            of_step = [loss if len(loss) <= room else loss.partition(" ± ")[0], *others]
        texts = [_fields_that_fit(fields, room) for fields in (of_run, of_step)]
        self._progress.update(self._epochs, completed=record["step"], count=counts[0], text=texts[0])
        self._progress.update(self._steps, completed=done, count=counts[1], text=texts[1])

    def end(self) -> None:
        self._progress.stop()


class _Cell:
    """Show the lines of the epochs, and below them where the run is, in the cell of a notebook, without widgets."""

    def __init__(self) -> None:
        from IPython.display import display

        self._lines: deque[str] = deque(maxlen=_NOTEBOOK_LINES)
        self._count, self._now = 0, ""
        self._handle = display(self, display_id=True)

    def show(self, run: Run, record: Record, of_run: Sequence[str], of_step: Sequence[str]) -> None:
        """Show where the run is."""
        steps = "" if run.steps is None else f"/{run.epochs * run.steps}"
        fields = [f"epoch {_epoch(run, record)}", f"step {record['step']}{steps}", *of_step, *of_run]
        self._now = escaped("  ".join(fields))
        self._handle.update(self)

    def add(self, line: str) -> None:
        """Add a line that stays."""
        self._lines.append(escaped(line.replace(glued(" "), " ")))
        self._count += 1

    def end(self) -> None:
        self._now = ""
        self._handle.update(self)

    def __repr__(self) -> str:
        earlier = self._count - len(self._lines)
        first = [f"... {earlier} earlier lines"] if earlier else []
        return "\n".join([*first, *self._lines, *filter(None, [self._now])])

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{html.escape(repr(self))}</pre>'


def _fields_that_fit(fields: Sequence[str], room: int) -> str:
    """Return the first fields that fit, each whole."""
    texts = ["  ".join(fields[:count]) for count in range(len(fields) + 1)]
    return [text for text in texts if len(text) <= max(room, 0)][-1]


def sparkline(means: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Return numbers as a line of bars; nothing if one is not finite."""
    low, high = min(means, default=0.0), max(means, default=0.0)
    if not math.isfinite(high - low):
        return ""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means).ljust(width)


def _best_text(records: Sequence[Record]) -> str:
    """Return the least validation loss, and its epoch."""
    losses = [(record.get("validation_loss", math.inf), record["epoch"]) for record in records]
    loss, epoch = min((pair for pair in losses if pair[0] < math.inf), default=(math.inf, 0))
    return f"best validation loss {_number_text(loss)} in epoch {epoch}" if epoch else ""


def measures(record: Mapping[str, object]) -> str:
    """Return a record's validation loss and metrics as text."""
    return "  ".join(glued(text) for text in _measure_texts(record))


def _measure_texts(record: Mapping[str, object]) -> list[str]:
    numbers = {k: v for k, v in record.items() if k not in SHOWN_SEPARATELY and isinstance(v, float)}
    return [f"{label_of(name).replace('²', '2')} {_number_text(value)}" for name, value in numbers.items()]


def _epoch(run: Run, record: Mapping[str, object]) -> str:
    return f"{record['epoch']:>{len(str(run.epochs))}}/{run.epochs}"


def _step_fields(record: Mapping[str, Any], *, shown: bool = True, error: float | None = None) -> list[str]:
    """Return the loss, the measures if they are `shown`, the rate and the speed, as a text each."""
    loss = [_number_text(record["loss"])] if "loss" in record else []  # none before the first step
    fields = [f"loss {x}" + (f" ± {error:.2g}" if error is not None else "") for x in loss]
    fields += _measure_texts(record) if shown else []
    if record.get("learning_rate") is not None:
        fields.append(f"learning rate {record['learning_rate']:.2e}")
    if "tokens_per_second" in record:
        return [*fields, f"{record['tokens_per_second']:,.0f} tokens/s"]
    if "samples_per_second" in record:
        fields.append(f"{record['samples_per_second']:,.0f} samples/s")
    return fields


def _number_text(value: float) -> str:
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
