"""Calibrate a model: passes learn from rows that did not train, and become a part of the file."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.data.dataset import TARGET, WEIGHT
from graphopt.data.foreign import as_dataset, has_rows
from graphopt.data.loader import TrainingRows
from graphopt.derivatives import normal_form
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.inference import as_it_came
from graphopt.graph.loading import Source
from graphopt.graph.rewriting import Pass
from graphopt.graph.values import name_of
from graphopt.training.fit import opened
from graphopt.training.options import Data


@checked("give X and y as one tuple, calibrate(model, (X, y), passes.Temperature())")
def calibrate(model: Source, data: Data, *passes: Pass, allow_nan: bool = False) -> ir.Model:
    """Return a model whose predictions are calibrated, or that says how sure it is.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        data: rows that did not train, as in `graphopt.fit`, with an array `target`. `passes.LastLayerLaplace` alone
            takes the rows that trained.
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
    loaded = normal_form(model, restored=True)
    if any(x.name == TARGET for x in loaded.graph.inputs):
        raise GraphoptError(
            f"calibrate: expected a model without an input {TARGET!r}, the name of the targets in the data, found one: "
            "rename it"
        )
    rows = as_dataset(data, {name_of(x): x for x in loaded.graph.inputs if not x.is_initializer()})
    if WEIGHT in rows.arrays:
        raise GraphoptError(
            f"calibrate: expected rows that count alike, found an array {WEIGHT!r}: leave it out, or draw rows by it"
        )
    read = TrainingRows(rows, loaded, range(len(rows)), opened, allow_nan=allow_nan)
    own = [name_of(y) for y in loaded.graph.outputs]
    for each in passes:
        (each.adapted(loaded, read) if each.learns else each).apply(loaded)
    return as_it_came(loaded, own)
