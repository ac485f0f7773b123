"""Train with scikit-learn's estimator interface: `fit`, `predict`, `score`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.compiler import compile
from graphopt.data import Batches, Dataset
from graphopt.errors import GraphoptError
from graphopt.graph.inference import replace_weights
from graphopt.graph.labels import labels_of
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.executor import Executor, run
from graphopt.training.callbacks import Adaptive, Record
from graphopt.training.evaluation import reported
from graphopt.training.fit import fit
from graphopt.training.metrics import Metrics, metrics, weighted_accuracy, weighted_r2
from graphopt.training.trainer_options import TrainerOptions

Arrays = np.ndarray | Mapping[str, np.ndarray]
FEATURES, TARGET, WEIGHT = "X", "target", "sample_weight"
ROWS = 1024  # how many are predicted at a time


@dataclass(frozen=True)
class _Compiled:
    """Hold an executor, the options that its graph was compiled from, and its initial state."""

    executor: Executor
    options: tuple[Any, ...]
    initial: Mapping[str, np.ndarray]
    hyperparameters: Mapping[str, Any]


class Trainer(TrainerOptions):
    """Train an ONNX model on arrays: an estimator for scikit-learn's tools, such as clone, GridSearchCV and pickle.

    Args:
        model: the inference model: a path, an onnx.ModelProto or an onnx_ir.Model.
        loss: a loss pass; `passes.MeanSquaredError()` by default.
        optimizer: an optimizer pass; `passes.SGD(0.01)` by default.
        regularizer, clip, training, parameters: passes of the standard pipeline, see `graphopt.compile`.
        schedule: `constant`, `invscaling`, `optimal` or `adaptive`, as in scikit-learn's SGDRegressor, or a schedule
            pass. `invscaling` counts steps; SGDRegressor has one step per row. `adaptive` counts epochs of `fit`.
        max_iter: the number of epochs.
        batch_size: the number of rows of a batch; the last batch of an epoch may have fewer, and no row is left out.
        shuffle: True for rows in random order, `consecutive` for batches of neighbouring rows in random order.
        validation_every: the number of epochs from one validation to the next.
        warm_start: let `fit` continue where the last one ended, with the optimizer's state and the row order of the
            next epoch. Two epochs followed by two more equal four, bit for bit, except with `adaptive`, which starts
            again. Otherwise each `fit` starts from the model's own weights.
        random_state: the seed of the order of rows.
        device, threads: see `Executor`.

    Attributes:
        train_losses_: the mean loss of each epoch of the last `fit`.
        validation_losses_: the losses of its validations.
        history_: its records, one per epoch, as `graphopt.fit` returns them.
        n_iter_: the number of its epochs.
        classes_: for a classification, the labels that `predict` may return.

    >>> import numpy
    >>> from graphopt import models
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> trainer = graphopt.Trainer(models.linear((1,), 1), optimizer=passes.SGD(0.1)).fit(X, 2 * X + 1)
    >>> round(trainer.score(X, 2 * X + 1), 3)
    1.0
    """

    # Class attributes, because scikit-learn expects __init__ to set its arguments only.
    _compiled: _Compiled | None = None
    _kept: Mapping[str, np.ndarray] | None = None  # the state of a trainer that was pickled
    _weighted = False  # whether rows have weights
    _row: tuple[int, ...] | None = None  # the shape of a row of the targets

    def fit(
        self,
        X: Arrays,
        y: np.ndarray,
        sample_weight: np.ndarray | None = None,
        *,
        X_val: Arrays | None = None,
        y_val: np.ndarray | None = None,
        sample_weight_val: np.ndarray | None = None,
    ) -> Trainer:
        """Train on the rows of arrays, validate on others where they are given, and return the trainer.

        Args:
            X: the model's input, or its inputs by name.
            y: the targets: numbers, or class numbers from 0.
            sample_weight: a weight per row; the weights of validation rows are 1 by default.

        Raises:
            GraphoptError: an option or an array is invalid.
            NonFiniteLoss: the loss or the new state is infinite or NaN.
        """
        validation = None
        if X_val is not None:
            if sample_weight is not None and sample_weight_val is None and y_val is not None:
                sample_weight_val = np.ones(len(y_val))
            validation = _named(X_val, **{TARGET: y_val, WEIGHT: sample_weight_val})
        data = _named(X, **{TARGET: y, WEIGHT: sample_weight})
        return self._fit(data, validation, self.max_iter, self.warm_start)

    def partial_fit(self, X: Arrays, y: np.ndarray, sample_weight: np.ndarray | None = None) -> Trainer:
        """Train for one more epoch, regardless of `warm_start` and `max_iter`."""
        return self._fit(_named(X, **{TARGET: y, WEIGHT: sample_weight}), None, 1, True)

    def predict(self, X: Arrays) -> np.ndarray:
        """Return predictions: class numbers for a classification, otherwise the model's output.

        After `fit`, each row has the shape of a row of the targets: for example one number, even if the model's
        output has a last axis of size 1. Before `fit`, it has the shape of the model's output.
        """
        predicted, metric = self._predict(X)
        predicted = metric.predicted(predicted) if metric else predicted
        row = predicted.shape[1:] if self._row is None else self._row
        return predicted.reshape(len(predicted), *row) if _equal_but_ones(row, predicted) else predicted

    def predict_proba(self, X: Arrays) -> np.ndarray:
        """Return the probabilities of the classes; for a binary classification, two columns for 0 and 1.

        Raises:
            GraphoptError: the loss is not a cross-entropy, so that the model does not predict probabilities.
        """
        loss = self._loss(False)
        if not hasattr(loss, "probabilities"):
            raise GraphoptError(
                f"predict_proba: expected CrossEntropy or BinaryCrossEntropy as the loss, found {loss!r}: use predict"
            )
        probabilities: np.ndarray = loss.probabilities(self._predict(X)[0])
        if loss.task == "binary":
            second = probabilities.reshape(len(probabilities), -1)
            return np.concatenate([1 - second, second], axis=1)
        return probabilities

    def score(self, X: Arrays, y: np.ndarray, sample_weight: np.ndarray | None = None) -> float:
        """Return the accuracy, or for a regression the mean R2 over the columns, as scikit-learn's scores do."""
        predicted = self.predict(X)
        target = np.asarray(y).reshape(predicted.shape)
        score = weighted_r2 if self._task == "regression" else weighted_accuracy
        return score(predicted, target, sample_weight)

    def losses(self, X: Arrays, y: np.ndarray, sample_weight: np.ndarray | None = None) -> np.ndarray:
        """Return the loss of each row, multiplied by its sample weight if given."""
        loss = self._loss(sample_weight is not None, reduction="none")
        graph = compile(self.get_trained_onnx(), loss=loss, gradient=None)
        inputs = {str(x.name): x for x in with_role(graph, Role.DATA, Role.TARGET, Role.SAMPLE_WEIGHT)}
        data = _named(X, **{TARGET: y, WEIGHT: sample_weight})
        return np.concatenate([run(graph, batch)["loss"] for batch in _batches(data, inputs)])

    def get_state(self) -> dict[str, np.ndarray]:
        """Return copies of all state by name: parameters, optimizer slots and counters."""
        return self._running().state

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace all or part of the state. A `fit` with `warm_start` continues from it.

        Raises:
            GraphoptError: a name is unknown, or an array has the wrong type or shape. Nothing is replaced.
        """
        self._running().update_state(state)

    def get_trained_onnx(self, model: Source | None = None) -> onnx.ModelProto:
        """Return the model with its trained weights, or another model with the weights of the same names replaced.

        Raises:
            GraphoptError: the other model has none of these weights, or one with a different type or shape.
        """
        trained = self._running().trained()
        if model is None:
            return trained
        other = ir.to_proto(load(model))
        replace_weights(other, trained)
        return other

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "_compiled"}
        if isinstance(self.model, ir.Model):
            kept["model"] = ir.to_proto(self.model)
        return {**kept, "_kept": self._compiled.executor.state if self._compiled else self._kept}

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags

        regression = self._task == "regression"
        return Tags(
            estimator_type="regressor" if regression else "classifier",
            target_tags=TargetTags(required=True),
            regressor_tags=RegressorTags() if regression else None,
            classifier_tags=None if regression else ClassifierTags(),
        )

    def _predict(self, X: Arrays) -> tuple[np.ndarray, Metrics | None]:
        """Return the model's output for the rows, and the metric that compares it with targets, if known."""
        executor = self._running()
        known = metrics(executor.inputs).get(TARGET)
        inputs = {str(x.name): x for x in with_role(executor.model, Role.DATA)}
        parts = [executor.predict(batch) for batch in _batches(_named(X), inputs)]
        output = (
            known[0] if known else next(iter(parts[0]))
        )  # the metadata of a model's own loss has no metric
        return np.concatenate([part[output] for part in parts]), known and known[1]

    def _fit(
        self,
        data: Mapping[str, np.ndarray],
        validation: Mapping[str, np.ndarray] | None,
        epochs: int,
        warm: bool,
    ) -> Trainer:
        compiled = self._compile(weighted=WEIGHT in data)
        executor = compiled.executor
        if not warm:
            executor.update_state(compiled.initial)
        executor.set_hyperparameters(**compiled.hyperparameters)
        history = fit(
            executor,
            Dataset(data, features=FEATURES),
            epochs=epochs,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            seed=self.random_state,
            validation=validation and Dataset(validation, features=FEATURES),
            validation_every=self.validation_every,
            callbacks=[Adaptive()] if self.schedule == "adaptive" else [],
        )
        self._row = data[TARGET].shape[1:]
        target = executor.inputs.get(TARGET)  # a model's own loss may call it differently
        labels = None if target is None else labels_of(target)
        if labels is not None:
            self.classes_ = labels.all() if labels.high < math.inf else np.unique(data[TARGET])
        self.history_: list[Record] = history
        self.train_losses_ = [record["loss"] for record in history]
        self.validation_losses_ = [r["validation_loss"] for r in history if "validation_loss" in r]
        self.n_iter_ = len(history)
        return self

    def _running(self) -> Executor:
        """Return an executor for the current options."""
        return self._compile().executor

    def _compile(self, weighted: bool | None = None) -> _Compiled:
        """Compile with the current options and keep the state of the previous executor."""
        self._weighted = self._weighted if weighted is None else weighted
        names = ("model", "loss", "optimizer", "regularizer", "clip", "training", "parameters", "schedule")
        options = (*(getattr(self, name) for name in (*names, "device", "threads")), self._weighted)
        before = self._compiled
        if before is not None and all(a is b for a, b in zip(options, before.options, strict=True)):
            return before
        step = compile(self.model, **self._steps(self._weighted))
        executor = Executor(step, device=self.device, threads=self.threads, report=reported(step))
        initial = executor.state
        state = before.executor.state if before else self._kept or {}
        executor.update_state({name: x for name, x in state.items() if name in initial})
        self._compiled = _Compiled(executor, options, initial, dict(executor.hyperparameters))
        self._kept = None
        return self._compiled


def _equal_but_ones(row: tuple[int, ...], array: np.ndarray) -> bool:
    """Return whether a row has the shape of an array's rows, if axes of size 1 are ignored."""
    return [size for size in row if size != 1] == [size for size in array.shape[1:] if size != 1]


def _named(X: Arrays, **more: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return inputs, targets and weights in one dictionary by name."""
    arrays = dict(X) if isinstance(X, Mapping) else {FEATURES: np.asarray(X)}
    return arrays | {name: np.asarray(array) for name, array in more.items() if array is not None}


def _batches(
    data: Mapping[str, np.ndarray], inputs: Mapping[str, ir.Value]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield all rows in order, as `inputs` take them."""
    batches = Batches(Dataset(data, features=FEATURES), inputs)
    for rows in Batches.split(range(len(batches)), batches.fixed_size or ROWS):
        yield batches.take(rows)
