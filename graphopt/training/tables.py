"""Train on a table in one call: split, describe columns, build a network, train it, and keep the best weights."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx_ir as ir

from graphopt import models
from graphopt.arguments import Checked, checked
from graphopt.compiler import standard
from graphopt.data import READERS, Columns, Dataset, columnar, files, foreign, hold_out
from graphopt.data.columns import cell_text
from graphopt.data.dataset import TARGET
from graphopt.data.tables import names_in
from graphopt.errors import GraphoptError, kind_of, some, unknown
from graphopt.graph.classified import LABEL, PROBABILITIES
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.storage import save
from graphopt.graph.values import dims_of, name_of
from graphopt.moments import mean_and_scale, row_index
from graphopt.pipeline import Step
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks import EarlyStopping
from graphopt.training.callbacks.callback import Record, Watchers, callbacks_of
from graphopt.training.evaluation import evaluate, predict
from graphopt.training.fit import adapt, fit
from graphopt.training.metrics import Wanted
from graphopt.training.options import FitOptions

_Task = Literal["classification", "regression"]
_READ: dict[str, Callable[..., Dataset]] = {
    "csv": files.csv,
    "parquet": columnar.parquet,
    "arrow": columnar.arrow,
}
_FEW_NUMBERS = 20  # different whole numbers of a target, which may be classes
_BATCHES = 100  # of an epoch, which the size of a batch is chosen for, within these bounds
_LEAST_BATCH, _MOST_BATCH = 32, 256


@dataclass(frozen=True)
class FittedTable(Checked):
    """Hold the network that `graphopt.fit_table` has trained, with the columns that it takes.

    Args:
        executor: the executor of the training graph, with the best weights.
        columns: the columns, with what they have learnt from the rows that trained.
        target, sample_weight: the columns to predict, and of weights.
        labels: the names of the classes; None if their numbers name them, and for a regression.
        classes: the values of the target in the order of `predict_proba`; None for a regression.
        records: the record of each epoch, as `fit` returns them.
        best: the record of the epoch whose weights these are.

    >>> table = {"age": [*range(20, 60)], "wage": [1000 + 50 * age for age in range(20, 60)]}
    >>> fitted = graphopt.fit_table(table, "wage", epochs=60)
    >>> bool(abs(fitted.predict({"age": [40]})[0] - 3000) < 300)
    True
    """

    executor: Executor
    columns: Columns
    target: str | Sequence[str]
    sample_weight: str | None
    labels: Sequence[str] | None
    classes: np.ndarray | None
    records: Sequence[Record]
    best: Record

    def predict(self, table: object) -> np.ndarray:
        """Return the predicted class or number of each row of a table, as the target has them.

        Args:
            table: a table as for `graphopt.fit_table`; it needs no target.

        Raises:
            GraphoptError: the table lacks a column, or a cell is not what its column expects.
        """
        outputs = self._outputs(table)
        if LABEL not in outputs:
            (predicted,) = outputs.values()
            return predicted[:, 0] if predicted.shape[1:] == (1,) else predicted
        label = outputs[LABEL]
        if self.labels is None or self.classes is None or self.classes.dtype == object:
            return label
        return self.classes[[self.labels.index(name) for name in label.tolist()]]

    def predict_proba(self, table: object) -> np.ndarray:
        """Return the probabilities of the classes, in columns.

        Args:
            table: a table as for `graphopt.fit_table`; it needs no target.

        Raises:
            GraphoptError: as `predict` does, or the network predicts numbers, or its loss knows no probabilities.
        """
        outputs = self._outputs(table)
        if PROBABILITIES not in outputs:
            raise GraphoptError("predict_proba: expected a classifier with probabilities, found another: use predict")
        return outputs[PROBABILITIES]

    def evaluate(self, table: object, *, metrics: Wanted | Sequence[Wanted] | None = None) -> dict[str, Any]:
        """Return the loss and the metrics on a table that has the target.

        Args:
            table: the table.
            metrics: the metrics, as in `graphopt.fit`.

        Raises:
            GraphoptError: as `predict` does, or the target has another class.
        """
        options = {"columns": self.columns, "labels": self.labels, "sample_weight": self.sample_weight}
        data = _read(table, self.target, **options)
        if self.labels is None and self.classes is not None:
            data = _with_classes(data, self.classes)
        return evaluate(self.executor, data, metrics=metrics)

    def to_onnx(self) -> onnx.ModelProto:
        """Return one model of the table's columns, with the outputs `label` and `probabilities` if it classifies."""
        return ir.to_proto(self.columns.before(self.executor.trained(), self.labels))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model of `to_onnx` to a file.

        Args:
            path: the file.

        Raises:
            GraphoptError: the file cannot be written.
        """
        save(self.to_onnx(), path)

    def _outputs(self, table: object) -> dict[str, np.ndarray]:
        rows = _read(table, None, columns=self.columns) if _is_path(table) else foreign.as_columns(table)
        return predict(self.to_onnx(), rows)


@checked()
def fit_table(
    table: object,
    target: str | Sequence[str],
    *,
    task: _Task | None = None,
    model: Source | None = None,
    columns: Columns | Mapping[str, Any] | str = "auto",
    labels: Sequence[str | int | float | bool] | None = None,
    sample_weight: str | None = None,
    class_weights: Literal["balanced"] | Sequence[float] | None = None,
    loss: Step | None = None,
    optimizer: Step | None = None,
    validation: Any = 0.2,
    epochs: int = 100,
    patience: int = 10,
    batch_size: int | None = None,
    seed: int = 0,
    metrics: Wanted | Sequence[Wanted] | None = None,
    callbacks: Watchers = (),
    device: str | Device = "cpu",
    verbose: bool | int | None = None,
) -> FittedTable:
    """Train a network on a table, and return it with the columns that it takes.

    A share of the rows is held out. Columns learn means and categories from the others. Training ends once the loss of
    the held-out rows has not improved for `patience` epochs, and the weights are those of the best epoch.

    Args:
        table: a DataFrame of pandas or Polars, a table of pyarrow, columns by name, or the path of a CSV, Parquet or
            Arrow file.
        target: the column to predict, or several.
        task: `classification` or `regression`. By default, text, booleans and two different whole numbers are classes,
            and other numbers are quantities; up to 20 different whole numbers are asked for.
        model: an ONNX model of the features, [rows, features]. By default, a perceptron with layers of 128 and 64
            units; that of a regression predicts in units of the target's standard deviation.
        columns: the columns that become features, as in `graphopt.data.csv`.
        labels: the classes in order, as in `graphopt.data.csv`.
        sample_weight: the column of sample weights.
        class_weights: a weight for each class, or `balanced` for the inverse of their frequency in the rows that train.
        loss: a loss pass; by default, the cross-entropy or the mean squared error.
        optimizer: an optimizer pass; by default, `passes.AdamW()`.
        validation: the share of rows to hold out, another table, or None to train for all `epochs`.
        epochs: the largest number of epochs.
        patience: the number of epochs without improvement after which training ends.
        batch_size: the number of rows of a batch; by default, a hundredth of the rows, from 32 to 256.
        seed: the seed of the weights, of the held-out rows and of the order of rows.
        metrics, callbacks, verbose: as in `graphopt.fit`.
        device: as in `graphopt.Executor`.

    Raises:
        GraphoptError: a column is missing, no kind suits it, the target has one class only, or an option is wrong.

    >>> table = {"age": [*range(20, 60)], "city": ["Bern", "Oslo"] * 20, "bought": ["no"] * 20 + ["yes"] * 20}
    >>> fitted = graphopt.fit_table(table, "bought", epochs=60, seed=1)
    >>> fitted.predict({"age": [22, 58], "city": ["Oslo", "Bern"]}).tolist()
    ['no', 'yes']
    >>> [x.name for x in fitted.to_onnx().graph.output]
    ['y', 'label', 'probabilities']
    """
    import passes

    if not target or not isinstance(target, str | Sequence):
        raise GraphoptError(f"target: expected the name of a column, or several, found {target!r}")
    if task not in (None, *get_args(_Task)):
        raise GraphoptError(unknown("task", str(task), get_args(_Task)))
    FitOptions(epochs=epochs, batch_size=_LEAST_BATCH if batch_size is None else batch_size, seed=seed)
    data = _read(table, target, columns=columns, labels=labels, sample_weight=sample_weight)
    share = validation if isinstance(validation, int | float) else 0.0
    rows, _ = hold_out(len(data), share, seed=seed)
    data, classes = _classified(data, target, task)
    if data.columns is not None and not data.columns.has_learnt:
        data = data.learn(rows)
    known = data.columns
    if known is None:  # `columns` are given, or `auto`
        raise GraphoptError("fit_table: expected columns='auto', or a description of columns, found None: leave it out")
    several = data.arrays[TARGET].shape[1:] not in ((), (1,))
    source = _network(data, classes, rows, seed) if model is None else load(model)
    known.before(source, data.labels)  # raises an error unless it takes the features
    if class_weights is not None and (loss is not None or classes is None):
        raise GraphoptError(
            "class_weights: expected a classification without a loss, found another: give class_weights to the loss"
        )
    if loss is None:
        weights = class_weights if isinstance(class_weights, str | None) else tuple(class_weights)
        loss = _loss(source, classes, weights, several=several)
    if sample_weight is not None:
        loss = dataclasses.replace(loss, sample_weight=True)  # type: ignore[type-var]
    pipeline = standard(loss=loss, optimizer=optimizer or passes.AdamW())
    pipeline = adapt(pipeline, source, data, validation=share, seed=seed)
    executor = Executor(pipeline(source), device=device)
    held_out: Any = validation
    if validation is not None and not isinstance(validation, int | float):
        held_out = _read(validation, target, columns=known, labels=data.labels, sample_weight=sample_weight)
        held_out = _with_classes(held_out, classes) if data.labels is None and classes is not None else held_out
    stopping = [EarlyStopping(patience=patience)] if held_out is not None else []
    chosen = min(_MOST_BATCH, max(_LEAST_BATCH, len(rows) // _BATCHES)) if batch_size is None else batch_size
    records = fit(
        executor,
        data,
        epochs=epochs,
        batch_size=chosen,
        seed=seed,
        validation=held_out,
        metrics=metrics,
        callbacks=[*callbacks_of(callbacks), *stopping],
        verbose=verbose,
    )
    best = next((x.record for x in stopping if x.record is not None), records[-1])
    return FittedTable(executor, known, target, sample_weight, data.labels, classes, records, best)


def _is_path(table: object) -> bool:
    return isinstance(table, str | os.PathLike)


def _read(table: Any, target: str | Sequence[str] | None, **options: Any) -> Dataset:
    """Return a table in memory or in a file as a data set."""
    if not _is_path(table):
        if isinstance(table, Dataset | tuple | np.ndarray):
            raise GraphoptError(
                f"fit_table: expected a DataFrame, columns by name or the path of a file, found {kind_of(table)}: "
                "graphopt.fit trains on arrays"
            )
        table = foreign.as_columns(table)
        for name in [target] if isinstance(target, str) else target or ():
            if name not in (known := names_in(table)):
                raise GraphoptError(f"target: {unknown('column', name, known)}")
        return foreign.table(table, target=target, **options)
    reader = READERS.get(Path(table).suffix.lower(), "")
    if reader not in _READ:
        endings = [ending for ending, name in READERS.items() if name in _READ]
        raise GraphoptError(
            f"{table}: expected a file that ends in {', '.join(endings)}, found another: read it with pandas, and give "
            "the DataFrame"
        )
    return _READ[reader](str(table), target=target, **options)


def _classified(data: Dataset, target: str | Sequence[str], task: _Task | None) -> tuple[Dataset, np.ndarray | None]:
    """Return the data with numbers of classes as target, and the classes; None for quantities."""
    y = np.asarray(data.arrays[TARGET])
    if data.labels is not None:
        if task == "regression":
            raise GraphoptError(f"task: expected numbers to predict, found classes: {some(data.labels)}")
        return data, np.array(data.labels, object)
    different = np.unique(y)
    are_whole = y.dtype.kind in "iub" or (np.isfinite(different).all() and (different == np.rint(different)).all())
    if y.ndim > 1 and y.shape[1] > 1:
        is_binary = are_whole and {*different.tolist()} <= {0, 1}
        if is_binary and task is None:
            raise _unsure(target, different)
        if task == "classification" and not is_binary:
            raise GraphoptError(f"target: expected columns of 0 and 1, found {some([*map(cell_text, different)])}")
        return data, np.arange(y.shape[1]) if task == "classification" else None
    if task is None and are_whole and 2 < len(different) <= _FEW_NUMBERS:
        raise _unsure(target, different)
    if task == "regression" or (task is None and not (are_whole and len(different) <= 2)):
        return dataclasses.replace(data, arrays={**data.arrays, TARGET: y.astype(np.float64)}), None
    if len(different) == 1:
        raise GraphoptError(
            f"{data.source}: expected a target of two classes or more, found {cell_text(different[0])!r} in all rows"
        )
    if not are_whole or 2 * len(different) > max(len(y), 2 * _FEW_NUMBERS):
        raise GraphoptError(
            f"target: expected classes, each in several rows, found {len(different):,} different numbers in "
            f"{len(y):,} rows: task='regression'"
        )
    return _with_classes(data, different), different


def _unsure(target: str | Sequence[str], different: np.ndarray) -> GraphoptError:
    found = some([*map(cell_text, different.tolist())])
    return GraphoptError(
        f"target {target!r}: expected classes or quantities, found whole numbers, {found}, which may be both: "
        "task='classification' or task='regression'"
    )


def _with_classes(data: Dataset, classes: np.ndarray) -> Dataset:
    """Return data whose target has the numbers of classes; those from 0 on have no other names."""
    target = np.asarray(data.arrays[TARGET])
    if target.ndim > 1 and target.shape[1] > 1:
        return dataclasses.replace(data, arrays={**data.arrays, TARGET: target.astype(np.float32)})
    places = np.searchsorted(classes, target)
    wrong = np.flatnonzero(classes[np.minimum(places, len(classes) - 1)] != target)
    if wrong.size:
        raise GraphoptError(
            f"{data.source}: row {wrong[0]}: expected a class of {some([*map(cell_text, classes.tolist())])}, found "
            f"{cell_text(target[wrong[0]])!r}"
        )
    are_numbers = classes.dtype.kind in "iu" and (classes == np.arange(len(classes))).all()
    names = None if are_numbers else tuple(map(cell_text, classes.tolist()))
    arrays = {**data.arrays, TARGET: places.astype(np.int64)}
    return dataclasses.replace(data, arrays=arrays, classes=len(classes), labels=names)


def _network(data: Dataset, classes: np.ndarray | None, rows: Any, seed: int) -> ir.Model:
    """Return a perceptron; that of a regression starts at the mean of the target, in units of its deviation."""
    width = data.columns.width if data.columns is not None else 0
    if classes is not None:
        return models.mlp(width, len(classes), seed=seed)
    y = np.asarray(data.arrays[TARGET])[row_index(rows)].reshape(len(rows), -1)
    network = models.mlp(width, y.shape[1], seed=seed)
    mean, scale = mean_and_scale(y.astype(np.float64))
    (output,) = network.graph.outputs
    with Emitter(network) as op:
        scaled = op.Add(op.Mul(output, scale.astype(np.float32)), mean.astype(np.float32))
    name, output.name = name_of(output), f"{output.name}.scaled"
    scaled.name, scaled.type, scaled.shape = name, output.type, output.shape
    network.graph.outputs[:] = [scaled]
    return network


def _loss(model: ir.Model, classes: np.ndarray | None, weights: Any, *, several: bool) -> Step:
    """Return the loss that suits a target and the output of a model."""
    import passes

    if classes is None:
        return passes.MeanSquaredError()
    (output, *_) = model.graph.outputs
    node = output.producer()
    is_probability = node is not None and node.op_type in ("Softmax", "Sigmoid")
    is_single = [*dims_of(output)[1:]] in ([1], []) and len(classes) == 2
    kind: Any = passes.BinaryCrossEntropy if several or is_single else passes.CrossEntropy
    loss: Step = kind(from_logits=not is_probability, class_weights=weights)
    return loss
