"""Calibrate the model that a run has trained on the rows that it held out, and write a page about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from rich.console import Console

from graphopt.cli.messages import print_table, say
from graphopt.cli.rows import selected
from graphopt.cli.run_folder import CALIBRATED, CALIBRATION_PAGE
from graphopt.cli.trained import Trained
from graphopt.data import Columns, Dataset
from graphopt.data.dataset import TARGET
from graphopt.errors import GraphoptError
from graphopt.files import write
from graphopt.graph.classified import LABEL, PROBABILITIES, classes_of, classification_of
from graphopt.graph.loading import load
from graphopt.graph.metadata import labels_in
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import TargetSpec
from graphopt.graph.storage import save
from graphopt.inspection import html
from graphopt.inspection.charts import scatter_chart
from graphopt.moments import row_index
from graphopt.training.calibrate import calibrate
from graphopt.training.evaluation import predict
from graphopt.training.metrics import CalibrationError

_FOLDS = 5  # in turn, one is measured after the others have calibrated
_LEAST = 1e-30  # a probability


def write_calibrated(trained: Trained, console: Console) -> Path:
    """Write calibrated.onnx, and calibration.html with what it is like on rows that it did not learn from."""
    recipe, (data, about) = trained.recipe, trained.chosen
    passes = recipe.calibration
    step = None if trained.step is None else recipe.model(trained.step)
    columns = None if step is None else Columns.of(step)
    if step is not None and (trained.checkpoint is not None or trained.caches or columns is not None):
        model = load(trained.executor().trained(), limits=recipe.limits)
    else:
        model = recipe.model(trained.model)
    allow_nan = trained.batches["allow_nan"]
    calibrated = calibrate(model, data, *passes, allow_nan=allow_nan)
    spec = classification_of(model) or (None if step is None else classification_of(step))
    before = _outputs(model, spec, trained, data)
    after: dict[str, np.ndarray] = {}
    try:
        parts = list(_measured(model, spec, trained, data, passes))
        rows = np.concatenate([rows for rows, _ in parts])
        joined = {name: np.concatenate([x[name] for _, x in parts]) for name in parts[0][1]}
        after = {name: y[np.argsort(rows)] for name, y in joined.items()}
    except GraphoptError as error:
        say(console, "measured", f"nothing after calibration, a fifth fewer rows are too few: {error}")
    target = np.asarray(data.arrays[TARGET][row_index(range(len(data)))]).reshape(len(data), -1)[:, 0]
    numbers = {"before": _numbers(before, target), "after": _numbers(after, target)}
    names = list(dict.fromkeys(name for each in numbers.values() for name in each))
    table = [[name, *(f"{x[name]:.4g}" if name in x else "" for x in numbers.values())] for name in names]
    print_table(console, ["measure", *numbers], table)
    trained.prepare()
    save(
        calibrated if columns is None else columns.before(ir.to_proto(calibrated), labels_in(model)),
        path := trained.folder / CALIBRATED,
    )
    charts = [
        _diagram(f"Reliability {when}", y, target) for when, y in (("before", before), ("after", after))
    ]
    sections = [html.section("Measures", html.html_table(["measure", *numbers], table))]
    if shown := [chart for chart in charts if chart]:
        sections.insert(0, html.section("Reliability", html.charts(shown)))
    note = html.note(
        "Before: the trained model. After: each fifth of the rows, calibrated by the others. calibrated.onnx has "
        f"learnt from all rows. {about}. {json.dumps([type(each).__name__ for each in passes])}"
    )
    write(trained.folder / CALIBRATION_PAGE, html.page("Calibration", str(trained.folder), *sections, note))
    return path


def _measured(
    model: ir.Model, spec: TargetSpec | None, trained: Trained, data: Dataset, passes: Sequence[Pass]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yield parts of the rows, and the outputs there of the model that the other rows have calibrated."""
    folds = np.random.default_rng(0).permutation(len(data)) % _FOLDS
    for i in range(_FOLDS):
        learnt, rows = (np.flatnonzero(chosen) for chosen in (folds != i, folds == i))
        other = calibrate(model, selected(data, learnt), *passes, allow_nan=trained.batches["allow_nan"])
        yield rows, _outputs(other, spec, trained, selected(data, rows))


def _outputs(
    model: ir.Model, spec: TargetSpec | None, trained: Trained, data: Dataset
) -> dict[str, np.ndarray]:
    """Return the outputs of a model, and the probabilities of classes, if there are any."""
    outputs = dict(predict(model, data, device=trained.recipe.device, **trained.batches))
    if PROBABILITIES not in outputs and spec is not None and spec.output in outputs:
        outputs |= classes_of(outputs[spec.output], spec, None)
    if "probability" in outputs:
        outputs[PROBABILITIES] = outputs["probability"]
    outputs.pop(LABEL, None)
    return outputs


def _numbers(outputs: dict[str, np.ndarray], target: np.ndarray) -> dict[str, float]:
    """Return what the outputs are like beside the targets, by the name of the measure."""
    found, rows = {}, np.arange(len(target))
    p = outputs.get(PROBABILITIES)
    if p is not None and p.ndim == 2:
        numbers = target.astype(np.int64)
        found["ece"] = _bins(p, numbers).result()
        found["negative log-likelihood"] = float(-np.log(np.maximum(p[rows, numbers], _LEAST)).mean())
        found["accuracy"] = float((p.argmax(1) == numbers).mean())
        if "set" in outputs:
            found["coverage"] = float(outputs["set"][rows, numbers].mean())
            found["mean size of sets"] = float(outputs["set"].sum(1).mean())
    if "lower" in outputs:
        lower, upper = (outputs[name].reshape(len(target)) for name in ("lower", "upper"))
        found["coverage"] = float(((lower <= target) & (target <= upper)).mean())
        found["mean width of intervals"] = float((upper - lower).mean())
    return found


def _bins(p: np.ndarray, numbers: np.ndarray) -> CalibrationError:
    error = CalibrationError()
    error.add(p.astype(np.float64), numbers)
    return error


def _diagram(title: str, outputs: dict[str, np.ndarray], target: np.ndarray) -> str | None:
    """Return a chart of the share that is right against the mean confidence of each bin."""
    if (p := outputs.get(PROBABILITIES)) is None or p.ndim != 2:
        return None
    sums = _bins(p, target.astype(np.int64)).sums
    count, confidence, right = sums[:, sums[0] > 0]
    points = list(zip((confidence / count).tolist(), (right / count).tolist(), strict=True))
    return scatter_chart(title, points, "confidence", "share right", through="y = x")
