"""Write a page about a run: its result, curves and training graph, and its predictions of held-out rows."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.errors import some
from graphopt.files import write
from graphopt.graph.roles import Role, role_of, with_role
from graphopt.graph.shown import elements
from graphopt.graph.values import name_of
from graphopt.inspection import html
from graphopt.inspection.charts import PERCENT, line_chart
from graphopt.inspection.drawing import kinds_of_nodes
from graphopt.inspection.report import MOST_ROWS, Report
from graphopt.inspection.words import duration, is_share, label_of, measure_text, readable
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks.callback import Callback, Record, Run
from graphopt.training.callbacks.predictions import predictions
from graphopt.training.callbacks.progress import Curve
from graphopt.training.callbacks.steering import LearningRateFinder

MOST_BINS = 400  # that a curve over steps has
UNFOLDED_EPOCHS = 20  # a longer table of epochs is folded
MOST_TABLE_ROWS = 200  # of epochs; metrics.jsonl has all
SMOOTHING_WEIGHT = 0.2  # of a new number in the mean that is drawn
_PACKAGES = ("graphopt", "onnx", "onnx-ir", "onnxscript", "numpy")
_POSITIONS = ("epoch", "step", "seconds")


class Page(Callback):
    """Gather the contents of a self-contained HTML page about a run.

    Args:
        path: the file.
        title: the title of the page.
        model: the model before the first pass.
        recipe: the recipe as YAML.
        batch_size: the number of rows of a batch.
        facts: what else to say about the run, by name.
        callbacks: the callbacks of the run, some of which have something to show.
        norms: returns the norms of the gradients of rows by a trained model, which the page then shows; None for none.
    """

    reads_state = False
    on_every_worker = False

    def __init__(
        self,
        path: Path,
        title: str,
        *,
        model: ir.Model,
        recipe: str,
        batch_size: int,
        facts: Mapping[str, str],
        callbacks: Sequence[Callback] = (),
        norms: Callable[[onnx.ModelProto, Mapping[str, np.ndarray]], np.ndarray] | None = None,
    ) -> None:
        self._path, self._title = path, title
        self._model, self._recipe, self._batch_size = model, recipe, batch_size
        self._facts, self._callbacks, self._norms = facts, callbacks, norms
        self._curves: dict[str, Curve] = {}
        self._run: Run | None = None

    def write(self) -> None:
        """Write the page, once an epoch has ended."""
        if self._run is not None and self._run.records:
            write(self._path, self._text(self._run))

    def on_fit_begin(self, run: Run) -> None:
        self._run = run

    def on_step_end(self, run: Run, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, float):
                self._curves.setdefault(name, Curve(MOST_BINS)).add(record["step"], value)

    def state_dict(self) -> dict[str, Any]:
        return {name: np.array(curve.bins) for name, curve in self._curves.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._curves = {name: Curve(MOST_BINS, bins.tolist()) for name, bins in state.items()}

    def _text(self, run: Run) -> str:
        last, step, norms = run.records[-1], run.executor.model, self._norms
        curves = list(self._charts(run))
        ended = f"stopped: {run.stopped}" if run.stopped else "complete"
        about = f"{len(run.records):,} of {run.epochs:,} epochs, {last['step']:,} steps, {ended}"
        batch = min(self._batch_size, run.rows or self._batch_size, MOST_ROWS)
        report = Report(self._model, [("pipeline", "", step, 0.0)], batch=batch)
        return html.page(
            self._title,
            about,
            html.section("Result", *self._result(run)),
            *([html.section("Curves", html.charts(curves))] if curves else []),
            *predictions(run, None if norms is None else lambda rows: norms(run.executor.trained(), rows)),
            html.section("Epochs", _epochs(run)),
            html.section(
                "Training graph",
                _graph(step),
                html.details("Weights, operators and memory", report.summary()),
            ),
            html.section("Machine", html.html_table(("", ""), _machine(run.executor), words=True), half=True),
            html.section("Recipe", html.details("config.yaml", self._recipe), half=True),
        )

    def _result(self, run: Run) -> Iterator[str]:
        """Yield the result: the measures of the weights that the run ends with, and facts about the run."""
        final, best = run.restored or run.records[-1], _best_record(run.records)
        yield html.figures(_figures(run, final, best))
        if "validation_loss" in final:
            weights = "the average of the weights" if run.averaged is not None else "the weights"
            text = f"Measured on held-out rows with {weights} of epoch {final['epoch']:,}, which trained.onnx has."
            if best["epoch"] != final["epoch"]:
                least = readable(best["validation_loss"])
                text += f" The validation loss was least in epoch {best['epoch']:,}: {least}."
            yield html.note(text)
        rates = self._curves["learning_rate"].points()[1] if "learning_rate" in self._curves else []
        rows = "" if run.rows is None else f"{run.rows:,} to train on"
        held_out = f", {run.validation_rows:,} held out" if run.validation_rows else ""
        facts = {
            "date": f"{datetime.now().astimezone():%d %B %Y, %H:%M}".removeprefix("0"),
            "rows": rows + held_out if rows else "an iterable",
            "parameters": f"{elements(with_role(run.executor.model, Role.PARAMETER)):,}",
            **self._facts,
            **({"learning rate": _rate_range(rates)} if rates else {}),
            "samples/s": readable(last_speed(run.records), 3),
            "device": _device(run.executor),
        }
        yield html.facts(facts)

    def _charts(self, run: Run) -> Iterator[str]:
        epochs = [record["epoch"] for record in run.records] if len(run.records) > 1 else []
        numbers = dict.fromkeys(name for record in run.records for name, x in record.items() if _is_real(x))
        lines: dict[str, dict[str, list[float | None]]] = {}
        for name in numbers:
            if name not in (*_POSITIONS, "learning_rate"):
                chart = "loss" if name in ("loss", "validation_loss") else name
                lines.setdefault(chart, {})[label_of(name)] = [_as_float(record.get(name)) for record in run.records]
        speed = lines.pop("samples_per_second", {})
        lines.pop("tokens_per_second", None)
        best = _best_record(run.records)
        for chart, of_chart in lines.items() if epochs else ():
            unit, factor = (PERCENT, 100.0) if is_share(chart) else ("", 1.0)
            scaled = {name: [None if y is None else factor * y for y in line] for name, line in of_chart.items()}
            marked = chart == "loss" and "validation_loss" in best
            mark = (best["epoch"], f"least in epoch {best['epoch']:,}") if marked else None
            yield line_chart(_title(chart), epochs, scaled, logarithmic="loss" in chart, unit=unit, mark=mark)
        for name, curve in self._curves.items():
            steps, means = curve.points()
            if len(set(means)) > 1:
                yield _by_step(name, steps, means)
        for callback in self._callbacks:
            if isinstance(callback, LearningRateFinder) and callback.rates:
                yield _range_test(callback)
        if epochs:
            yield line_chart(_title("samples_per_second"), epochs, speed)


def _by_step(name: str, steps: Sequence[float], means: Sequence[float]) -> str:
    """Return the chart of a number over steps; a learning rate is not smoothed."""
    if name == "learning_rate":
        return line_chart(_title(name), steps, {label_of(name): means}, along="step")
    lines = {"smoothed": smoothed(means), "steps": means}
    return line_chart(_title(name), steps, lines, along="step", logarithmic="loss" in name, faint="steps")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential mean up to each number; at the start, the mean."""
    mean, means = 0.0, []
    for i, value in enumerate(values, 1):
        mean += max(SMOOTHING_WEIGHT, 1 / i) * (value - mean)
        means.append(mean)
    return means


def last_speed(records: Sequence[Record]) -> float:
    """Return the samples per second of a run as a whole."""
    seconds = sum(record["seconds"] for record in records)
    rows = sum(record["seconds"] * record.get("samples_per_second", 0.0) for record in records)
    return float(rows / seconds) if seconds else 0.0


def _figures(run: Run, final: Record, best: Record) -> Iterator[tuple[str, str, str]]:
    """Yield the large numbers of a result: the measures of held-out rows first."""
    names = list(final)
    held_out = names[names.index("validation_loss") + 1 :] if "validation_loss" in final else []
    for name in held_out:
        if _is_real(final[name]) and name not in (*_POSITIONS, "samples_per_second", "tokens_per_second"):
            yield label_of(name), measure_text(name, final[name]), "c1"
    for name in [name for name in ("validation_loss", "loss") if name in final]:
        yield label_of(name), readable(final[name]), ""
    if len(run.records) > 1:
        yield "best epoch", f"{best['epoch']:,} of {len(run.records):,}", ""
    yield "training time", duration(sum(record["seconds"] for record in run.records)), ""


def _best_record(records: Sequence[Record]) -> Record:
    """Return the record of the epoch with the least loss of held-out rows, or of training if none are held out."""
    name = "validation_loss" if any("validation_loss" in record for record in records) else "loss"

    def loss(record: Record) -> float:
        value = _as_float(record.get(name))
        return math.inf if value is None or math.isnan(value) else value

    return min(records, key=loss)


def _rate_range(rates: Sequence[float]) -> str:
    low, high = min(rates), max(rates)
    return readable(low) if math.isclose(low, high) else f"up to {readable(high)}"


def _range_test(finder: LearningRateFinder) -> str:
    """Return the chart of a range test, with the rate that it has suggested."""
    rate = finder.suggestion
    return line_chart(
        "Learning rate finder",
        finder.rates,
        {"smoothed loss": finder.smoothed(), "loss": finder.losses},
        along="learning rate",
        logarithmic=True,
        logarithmic_x=True,
        faint="loss",
        mark=None if rate is None else (rate, f"chosen: {readable(rate, 3)}"),
    )


def _epochs(run: Run) -> str:
    """Return a table of the epochs with the best one marked; of many epochs, some."""
    names = [name for name, x in run.records[-1].items() if _is_real(x)]
    every, best = -(-len(run.records) // MOST_TABLE_ROWS), _best_record(run.records)
    shown = [
        record
        for i, record in enumerate(run.records, 1)
        if i % every == 0 or i in (1, len(run.records)) or record is best
    ]
    rows = [[measure_text(name, record[name]) if name in record else "" for name in names] for record in shown]
    table = html.html_table([label_of(name) for name in names], rows, marks={shown.index(best): "best"})
    if len(rows) <= UNFOLDED_EPOCHS:
        return table
    which = f"{len(rows):,} of {len(run.records):,} epochs" if every > 1 else f"{len(rows):,} epochs"
    return html.folded(which, table)


def _title(name: str) -> str:
    text = label_of(name)
    return text[:1].upper() + text[1:]


def _is_real(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float)


def _as_float(value: object) -> float | None:
    return float(value) if _is_real(value) else None


def _device(executor: Executor) -> str:
    options = executor.device_options
    threads = "1 thread" if options.threads == 1 else f"{options.threads or 'all'} threads"
    return f"{options.name.upper()}, {threads}"


def _graph(step: ir.Model) -> str:
    """Return tables of the values of a training graph by role, and of its nodes by purpose."""
    values: dict[Role, list[str]] = {}
    for value in (*step.graph.inputs, *step.graph.outputs):
        role = role_of(value)
        if role is not None:
            values.setdefault(role, []).append(name_of(value))
    rows = [(role.value.replace("_", " "), len(names), some(names)) for role, names in values.items()]
    nodes: dict[str, Counter[str]] = {}
    for node, kind in kinds_of_nodes(step.graph).items():
        nodes.setdefault(kind.title, Counter())[node.op_type] += 1
    purposes = [
        (name, sum(count.values()), ", ".join(f"{operator} {n}" for operator, n in count.most_common(8)))
        for name, count in nodes.items()
    ]
    return html.html_table(("nodes of", "number", "operators"), purposes, words=True) + html.html_table(
        ("inputs and outputs", "number", "names"), rows, words=True
    )


def _machine(executor: Executor) -> Iterator[tuple[str, str]]:
    device = executor.device_options
    for name in _PACKAGES:
        yield name, metadata.version(name)
    yield "ONNX Runtime", device.ort.__version__
    yield "Python", sys.version.split()[0]
    yield "device", _device(executor)
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        yield "peak memory of the process", f"{peak / 1e6:,.0f} MB"
