"""Write a page about a run: its curves, what it trained, and what it predicts on held-out rows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import some
from graphopt.files import write
from graphopt.graph.roles import Role, role_of
from graphopt.graph.values import name_of
from graphopt.inspection import html
from graphopt.inspection.drawing import kinds_of_nodes
from graphopt.inspection.html import line_chart, scatter_chart
from graphopt.inspection.report import Report
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks.callback import Callback, Record, Run
from graphopt.training.callbacks.progress import Curve
from graphopt.training.metrics import ScoredBatch, metrics

MOST_BINS = 400  # of a curve over steps
MOST_CLASSES = 50  # of a confusion matrix
MOST_EPOCHS = 20  # of a table that is not folded
MOST_POINTS = 2000  # of a chart of residuals
_PACKAGES = ("graphopt", "onnx", "onnx-ir", "onnxscript", "numpy")


class Page(Callback):
    """Gather what a self-contained HTML page shows about a run that trains `model`; `recipe` is YAML."""

    reads_state = False
    on_every_worker = False

    def __init__(self, path: Path, title: str, *, model: ir.Model, recipe: str, batch_size: int) -> None:
        self._path, self._title = path, title
        self._model, self._recipe, self._batch_size = model, recipe, batch_size
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
        last, seconds = run.records[-1], sum(record["seconds"] for record in run.records)
        ended = f"stopped: {run.stopped}" if run.stopped else "complete"
        about = f"{len(run.records)} of {run.epochs} epochs, {last['step']:,} steps, {seconds:.1f} s, {ended}"
        shown = [name for name, value in last.items() if isinstance(value, int | float)]
        rows = [
            [f"{record.get(name, ''):.6g}" if name in record else "" for name in shown]
            for record in run.records
        ]
        epochs = html.table(shown, rows)
        step = run.executor.model
        report = Report(self._model, [("pipeline", "", step, 0.0)], batch=self._batch_size)
        return html.page(
            self._title,
            about,
            html.section("Curves", html.charts(self._charts(run))),
            *(html.section(title, part) for title, part in _predictions(run)),
            html.section(
                "Epochs", epochs if len(rows) <= MOST_EPOCHS else html.folded(f"{len(rows)} epochs", epochs)
            ),
            html.section(
                "Training graph",
                _graph(step),
                html.details("Weights, operators and memory", report.summary()),
            ),
            html.section("Machine", html.table(("", ""), _machine(run.executor), words=True)),
            html.section("Recipe", html.details("config.yaml", self._recipe)),
        )

    def _charts(self, run: Run) -> Iterator[str]:
        epochs = [record["epoch"] for record in run.records]
        lines: dict[str, dict[str, list[Any]]] = {}
        numbers = (name for record in run.records for name, x in record.items() if isinstance(x, int | float))
        for name in dict.fromkeys(numbers):
            chart = "loss" if name in ("loss", "validation_loss") else name.replace("_", " ")
            label = {"loss": "training", "validation_loss": "held out"}.get(name, name)
            if name not in ("epoch", "step", "seconds", "learning_rate"):
                lines.setdefault(chart, {})[label] = [record.get(name) for record in run.records]
        for chart, named in lines.items():
            yield line_chart(f"{chart}, by epoch", epochs, named, logarithmic=chart == "loss")
        for name, curve in self._curves.items():
            steps, means = curve.points()
            yield line_chart(
                f"{name.replace('_', ' ')}, by step", steps, {name: means}, logarithmic="loss" in name
            )


def _predictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield a title, and a confusion matrix or a chart of residuals, for each target."""
    if run.evaluated is None:
        return
    chosen = metrics(run.executor.inputs)
    batches: dict[str, list[ScoredBatch]] = {name: [] for name in chosen}
    for feeds, values in run.evaluated():
        for target, (output, metric) in chosen.items():
            batches[target].append(metric.batch(np.asarray(values[output]), feeds[target]))
    for target, parts in batches.items():
        predicted = np.concatenate([batch.predicted for batch in parts])
        expected = np.concatenate([batch.target for batch in parts])
        if parts[0].spec.task == "regression":
            every = -(-predicted.size // MOST_POINTS)
            points = np.stack([predicted.reshape(-1), (expected - predicted).reshape(-1)])
            chart = scatter_chart("", points[:, ::every].T.tolist(), "prediction", "residual")
            yield f"Residuals of {target} on held-out rows", html.charts([chart])
        else:
            labels, ranks = np.unique(np.stack([expected, predicted]), return_inverse=True)
            if len(labels) <= MOST_CLASSES:
                counts = np.zeros((len(labels), len(labels)), np.int64)
                np.add.at(counts, tuple(ranks.reshape(2, -1)), 1)
                yield (
                    f"Confusion matrix of {target} on held-out rows",
                    html.shaded("target \\ predicted", [f"{label:g}" for label in labels], counts.tolist()),
                )


def _graph(step: ir.Model) -> str:
    """Return tables of the values of a training graph by role, and of its nodes by purpose."""
    values: dict[Role, list[str]] = {}
    for value in (*step.graph.inputs, *step.graph.outputs):
        role = role_of(value)
        if role is not None:
            values.setdefault(role, []).append(name_of(value))
    rows = [(role.value, len(names), some(names)) for role, names in values.items()]
    nodes: dict[str, Counter[str]] = {}
    for node, kind in kinds_of_nodes(step.graph).items():
        nodes.setdefault(kind.title, Counter())[node.op_type] += 1
    purposes = [
        (name, sum(count.values()), ", ".join(f"{operator} {n}" for operator, n in count.most_common(8)))
        for name, count in nodes.items()
    ]
    return html.table(("nodes of", "number", "operators"), purposes, words=True) + html.table(
        ("inputs and outputs", "number", "names"), rows, words=True
    )


def _machine(executor: Executor) -> Iterator[tuple[str, str]]:
    device = executor.device_options
    for name in _PACKAGES:
        yield name, metadata.version(name)
    yield "ONNX Runtime", device.ort.__version__
    yield "Python", sys.version.split()[0]
    yield "device", f"{device.name}, {device.threads or 'all'} threads"
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        yield "peak memory of the process", f"{peak / 1e6:,.0f} MB"
