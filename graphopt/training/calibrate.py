"""Calibrate a model: passes learn from rows that did not train, and become a part of the file."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.data.dataset import TARGET, WEIGHT, Dataset
from graphopt.data.foreign import as_dataset, by_name, has_rows, is_text, relabelled
from graphopt.data.loader import TrainingRows
from graphopt.derivatives import normal_form
from graphopt.errors import GraphoptError, kind_of, some
from graphopt.graph.classified import are_numbers, class_name, class_names
from graphopt.graph.inference import as_it_came
from graphopt.graph.loading import Source, load
from graphopt.graph.metadata import LABELS
from graphopt.graph.rewriting import Pass
from graphopt.graph.values import dims_of, name_of
from graphopt.training.fit import opened
from graphopt.training.options import Data


@checked("give X and y as one tuple, calibrate(model, (X, y), passes.Temperature())")
def calibrate(model: Source, data: Data, *passes: Pass, allow_nan: bool = False) -> ir.Model:
    """Return a model whose predictions are calibrated, or that says how sure it is.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        data: rows that did not train, as in `graphopt.fit`, with an array `target`: class numbers, or the names that
            the file gives its classes, such as those of scikit-learn. `passes.LastLayerLaplace` alone takes the rows
            that trained.
        passes: what to do, one after the other: such as `passes.Temperature()`, then `passes.PredictionSet(0.1)`.
        allow_nan: accept NaN and infinities in the inputs.

    Raises:
        GraphoptError: the model or the data cannot be read, or a pass does not fit them.

    >>> from graphopt import models
    >>> rows = graphopt.data.digits()
    >>> step = graphopt.compile(models.mlp((1, 8, 8), 10), loss=passes.CrossEntropy(), optimizer=passes.Adam(1e-3))
    >>> executor = graphopt.Executor(step)
    >>> _ = graphopt.fit(executor, rows, epochs=1)
    >>> sure = graphopt.calibrate(executor.trained(), rows, passes.Temperature(), passes.PredictionSet(0.1))
    >>> [output.name for output in sure.graph.outputs]
    ['y', 'probability', 'set']
    """
    if not passes or not all(isinstance(each, Pass) for each in passes):
        wrong = [kind_of(each) for each in passes if not isinstance(each, Pass)] or ["none"]
        raise GraphoptError(
            f"calibrate: expected passes after the data, such as passes.Temperature(), found {wrong[0]}"
        )
    if not has_rows(data):
        raise GraphoptError(f"calibrate: expected data with rows, found {kind_of(data)}: give arrays by name")
    file = load(model)
    loaded = normal_form(file, restored=True)
    if any(x.name == TARGET for x in loaded.graph.inputs):
        raise GraphoptError(
            f"calibrate: expected a model without an input {TARGET!r}, the name of the targets in the data, found one: "
            "rename it"
        )
    rows = numbered(as_dataset(data, {name_of(x): x for x in loaded.graph.inputs if not x.is_initializer()}), file)
    if WEIGHT in rows.arrays:
        raise GraphoptError(
            f"calibrate: expected rows that count alike, found an array {WEIGHT!r}: leave it out, or draw rows by it"
        )
    read = TrainingRows(rows, loaded, range(len(rows)), opened, allow_nan=allow_nan)
    own = [name_of(y) for y in loaded.graph.outputs]
    for each in passes:
        (each.adapted(loaded, read) if each.learns else each).apply(loaded)
    calibrated = as_it_came(loaded, own)
    if (names := class_names(file)) is not None:  # the operators that told them may be gone
        LABELS.write(calibrated, json.dumps(names))
    return calibrated


def numbered(data: Dataset, file: ir.Model) -> Dataset:
    """Return rows whose classes have the numbers that they have in a file, by the names that it gives them.

    Warn of the order that names take in a file that gives none, if it is the alphabet's.

    Raises:
        GraphoptError: it gives others, or none and has another number of classes, or numbers in the data may be names.
    """
    names, target = class_names(file) or (), data.arrays.get(TARGET)
    if target is None:
        return data
    if data.labels is None and is_text(target):
        labels, numbers = by_name(target)
        data = replace(data, arrays={**data.arrays, TARGET: numbers}, labels=labels)
    elif data.labels is None and not are_numbers(names):
        found, numbers = np.unique(np.asarray(target), return_inverse=True)
        texts = tuple(map(class_name, found))
        if {*texts} <= {*names} & {*map(str, range(len(names)))}:
            raise GraphoptError(
                f"{data.source}: expected targets that are names of the classes {', '.join(names)}, or class numbers, "
                f"found {', '.join(texts)}, which may be both: give the names as text"
            )
        if {*texts} <= {*names}:
            data = replace(data, arrays={**data.arrays, TARGET: numbers.reshape(-1)}, labels=texts)
    if data.labels is None or not are_numbers(names) or {*data.labels} <= {*names}:
        return relabelled(data, names, data.source)
    due = {(len(data.labels),), *([(), (1,)] if len(data.labels) == 2 else ())}
    if not due & {dims_of(y)[1:] for y in file.graph.outputs if y.shape is not None}:
        raise GraphoptError(
            f"{data.source}: expected the names of all classes of a file that names none, found "
            f"{', '.join(data.labels)}: give class numbers as the target"
        )
    if [*data.labels] == sorted(data.labels):
        warnings.warn(
            f"{data.source}: the file names no classes: {some([*data.labels], 5)} are taken for its classes from 0 on, "
            "in this order: if it is another one, give class numbers, or graphopt.data.Dataset(arrays, labels=[...])",
            stacklevel=2,
        )
    return data
