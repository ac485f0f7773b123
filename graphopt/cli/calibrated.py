"""Calibrate the model that a run has trained on the rows that it held out, and write a page about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
from graphopt.graph.loading import load
from graphopt.graph.metadata import Derived, labels_in
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role, TargetSpec, with_role
from graphopt.graph.storage import save
from graphopt.graph.values import name_of
from graphopt.inspection import html
from graphopt.inspection.charts import scatter_chart
from graphopt.moments import row_index
from graphopt.training.calibrate import calibrate, numbered
from graphopt.training.evaluation import predict
from graphopt.training.metrics import CalibrationError, Metrics

_FOLDS = 5  # in turn, one is measured after the others have calibrated
_OF_CLASSES, _OF_SETS = ("ece", "log_loss", "accuracy"), ("coverage", "mean_width")
_MEASURES = {"binary": _OF_CLASSES, "classification": _OF_CLASSES, "regression": ("r2", "mae")}
_Outputs = Mapping[str, np.ndarray]


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
    data = numbered(data, model)
    calibrated = calibrate(model, data, *passes, allow_nan=trained.batches["allow_nan"])
    outputs = {"before": _outputs(model, trained, data)}
    spec, derived = _spec(model, step, calibrated, passes, outputs["before"])
    try:
        parts = list(_measured(model, trained, data, passes))
        rows = np.argsort(np.concatenate([rows for rows, _ in parts]))
        outputs["after"] = {name: np.concatenate([y[name] for _, y in parts])[rows] for name in parts[0][1]}
    except GraphoptError as error:
        say(console, "measured", f"nothing after calibration on four fifths of the rows: {error}")
    target = np.asarray(data.arrays[TARGET][row_index(range(len(data)))])
    numbers: dict[str, dict[str, float]] = {}
    charts = []
    for when, found in outputs.items():
        beside = {kind: found[name] for kind, name in derived.items() if name in found}
        if spec is None or spec.output not in found:
            continue
        prediction, measures = found[spec.output], [*_MEASURES[spec.task]]
        if spec.task == "regression" and prediction.size != target.size:  # quantiles: the interval has a target's size
            if "lower" not in beside:
                continue
            prediction, measures = beside["lower"], []
        metrics = Metrics(spec, [*measures, *(_OF_SETS if {"set", "lower"} & {*beside} else ())])
        metrics.add(prediction, target, **beside)
        numbers[when] = metrics.result()
        if spec.task != "regression":
            (bins := CalibrationError()).update(metrics.batch(prediction, target, **beside))
            charts.append(_diagram(f"Reliability {when}", bins))
    names = list(dict.fromkeys(name for each in numbers.values() for name in each))
    table = [[name, *(f"{x[name]:.4g}" if name in x else "" for x in numbers.values())] for name in names]
    print_table(console, ["measure", *numbers], table)
    trained.prepare()
    save(
        calibrated if columns is None else columns.before(ir.to_proto(calibrated), labels_in(model)),
        path := trained.folder / CALIBRATED,
    )
    sections = [html.section("Measures", html.html_table(["measure", *numbers], table))]
    if charts:
        sections.insert(0, html.section("Reliability", html.charts(charts)))
    note = html.note(
        "Before: the trained model. After: each fifth of the rows, calibrated by the others. calibrated.onnx has "
        f"learnt from all rows. {about}. {json.dumps([type(each).__name__ for each in passes])}"
    )
    write(trained.folder / CALIBRATION_PAGE, html.page("Calibration", str(trained.folder), *sections, note))
    return path


def _spec(
    model: ir.Model, step: ir.Model | None, calibrated: ir.Model, passes: Sequence[Pass], before: _Outputs
) -> tuple[TargetSpec | None, dict[str, str]]:
    """Return how the target compares with an output, and the outputs that are derived from it, by kind."""
    from passes.calibration import OfClasses, are_probabilities

    noted = [TargetSpec.read(model), *map(TargetSpec.read, with_role(step, Role.TARGET) if step else ())]
    spec = next((each for each in noted if each is not None), None)
    note = next(iter(filter(None, map(Derived.read, calibrated.graph.outputs))), None)
    output = note.of if note is not None else "" if spec is None else spec.output
    derived = {kind: name_of(y) for kind, y in Derived.all(calibrated, output).items()}
    of_classes = next((each for each in passes if isinstance(each, OfClasses)), None)
    if spec is None and of_classes is not None:  # a file that no run has trained
        output = name_of(of_classes.own_output(model))
        if (y := before[output]).ndim == 2 and y.shape[1] > 1:
            is_logit = not are_probabilities(y) if of_classes.from_logits is None else of_classes.from_logits
            spec = TargetSpec(output, "classification", axis=1, from_logits=is_logit)
    elif spec is None and derived:
        spec = TargetSpec(output, "regression")
    return spec, derived


def _measured(
    model: ir.Model, trained: Trained, data: Dataset, passes: Sequence[Pass]
) -> Iterator[tuple[np.ndarray, _Outputs]]:
    """Yield parts of the rows, and the outputs there of the model that the other rows have calibrated."""
    folds = np.random.default_rng(0).permutation(len(data)) % _FOLDS
    for i in range(_FOLDS):
        learnt, rows = (np.flatnonzero(chosen) for chosen in (folds != i, folds == i))
        other = calibrate(model, selected(data, learnt), *passes, allow_nan=trained.batches["allow_nan"])
        yield rows, _outputs(other, trained, selected(data, rows))


def _outputs(model: ir.Model, trained: Trained, data: Dataset) -> _Outputs:
    return predict(model, data, device=trained.recipe.device, **trained.batches)


def _diagram(title: str, bins: CalibrationError) -> str:
    """Return a chart of the share that is right against the mean confidence of each bin."""
    count, confidence, right = bins.sums[:, bins.sums[0] > 0]
    points = list(zip((confidence / count).tolist(), (right / count).tolist(), strict=True))
    return scatter_chart(title, points, "confidence", "share right", through="y = x")
