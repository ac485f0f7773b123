"""Compile the training graphs of estimators, keep their executors, and train with scikit-learn's interface."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.arguments import Checked, checked
from graphopt.compiler import DEFAULT, check_family, compile
from graphopt.data import Batches, Dataset
from graphopt.data.dataset import TARGET, WEIGHT, SparseRows, is_sparse
from graphopt.data.loader import Shuffle
from graphopt.errors import GraphoptError, unknown
from graphopt.graph import weight_kinds
from graphopt.graph.inference import replace_weights
from graphopt.graph.loading import Source, load
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import FED, Role, TargetSpec, labels_of, role_of, with_role
from graphopt.graph.storage import model_digest
from graphopt.graph.strictness import check_remembered, is_strict
from graphopt.graph.values import dtype_of, is_floating, name_of
from graphopt.pipeline import Step
from graphopt.runtime.device import Device
from graphopt.runtime.device_options import NATIVE_VARIABLE
from graphopt.runtime.executor import Executor, run
from graphopt.runtime.inputs import encoding_of
from graphopt.training.callbacks import Adaptive, Record
from graphopt.training.evaluation import by_batches, reported
from graphopt.training.fit import fit
from graphopt.training.metrics import Metrics, metrics, weighted_accuracy, weighted_r2
from graphopt.training.predictor import predictor

_Steps = tuple[tuple[str, Any], ...]  # the arguments of `compile`
_Arrays = np.ndarray | Mapping[str, np.ndarray]
FEATURES = "X"

# scikit-learn's schedules, and the classes of `passes` that implement them
SCHEDULES = {"constant": None, "adaptive": None, "invscaling": "InverseScaling", "optimal": "Optimal"}

_Self = TypeVar("_Self", bound="Estimator")

PREDICTOR_TYPES = ("float32", "float64")
CHUNK = 1024  # rows that are predicted at a time
_SHORT_STEP_OPERATIONS = 3e8  # operations of a step, a few milliseconds: a second thread would wait more than work
_SHORT_FIT_OPERATIONS = (
    2e11  # operations of a training, a few seconds: compiling kernels would take longer than they save
)
_MOST_SHARED_BYTES = 2**22  # of a model, whose training graph other estimators may share
_MOST_SHARED_GRAPHS = 32


@dataclass(frozen=True)
class Structure:
    """Describe the facts that determine an executor: a model, the steps of `compile`, and a device.

    Args:
        model: the model, or its bytes; equal structures have equal digests.
        digest: the digest of the model when it was read; see `digest_of`.
        rows: the rows of a batch. Short steps run in one thread, unless `threads` says otherwise.
        planned: the rows of all epochs, or 0 if they are unknown. Short trainings compile no kernels.
    """

    model: Source | bytes = field(compare=False)
    digest: str
    steps: _Steps
    device: str
    threads: int | None
    rows: int = 0
    planned: int = 0

    @property
    def is_complete(self) -> bool:
        """Return whether equal structures have equal training graphs: no step reads more than its fields."""
        from passes.gradients.registry import REPLACED

        return not (REPLACED or weight_kinds.REGISTERED) and all(_is_plain(step) for _, step in self.steps)

    def step(self) -> ir.Model:
        """Return the training graph, which complete structures of small models share."""
        if self.is_complete and isinstance(self.model, bytes) and len(self.model) <= _MOST_SHARED_BYTES:
            shared = _shared(self.model, self.steps)
            if is_strict():
                check_remembered("the training graph that estimators share", shared, _compiled(self.model, self.steps))
            return shared
        return _compiled(self.model, self.steps)

    def executor(self, step: ir.Model) -> Executor:
        """Return a new executor of the training graph, which reports the losses."""
        threads, native = self.threads, None
        if threads is None and self.device == "cpu":
            threads = 1 if _operations(step, self.rows) < _SHORT_STEP_OPERATIONS else _allowed_threads()
        if self.planned and NATIVE_VARIABLE not in os.environ:
            native = False if _operations(step, self.planned) < _SHORT_FIT_OPERATIONS else None
        return Executor(step, device=self.device, threads=threads, native=native, report=reported(step))


def file_digest(model: Source | bytes) -> str:
    """Return the digest of a model, or of the file that a path names, as it is now."""
    return hashlib.sha256(model).hexdigest() if isinstance(model, bytes) else model_digest(load(model))


def _is_plain(option: object) -> bool:
    """Return whether an option is a number, or a pass of the library that is described by numbers.

    Everything else may stand for something that changes: a function, a class of the user's, the name of a file.
    """
    if option is None or option is DEFAULT or isinstance(option, bool | int | float):
        return True
    library = type(option).__module__.partition(".")[0] in ("graphopt", "passes")
    return (
        library
        and not _is_patched(type(option))
        and dataclasses.is_dataclass(option)
        and all(
            _is_plain(value) or (isinstance(field.default, str | tuple) and value == field.default)
            for field in dataclasses.fields(option)
            for value in [getattr(option, field.name)]
        )
    )


def _is_patched(kind: type) -> bool:
    """Return whether a program has replaced a method of a class, or of one of its bases."""
    return any(
        isinstance(method, FunctionType) and method.__module__.split(".")[0] != base.__module__.split(".")[0]
        for base in kind.__mro__
        for method in vars(base).values()
    )


def _operations(step: ir.Model, rows: int) -> float:
    """Return about how many float32 operations rows take; infinite unless a row uses each weight once."""
    weights, data = with_role(step, Role.PARAMETER), with_role(step, Role.DATA)
    if any(x.shape is None or len(x.shape) > 2 or not is_floating(x) for x in [*weights, *data]):
        return math.inf  # filters and sequences use weights more often
    return 6.0 * rows * sum(math.prod(x.shape.numpy()) * dtype_of(x).itemsize / 4 for x in weights if x.shape)


def _allowed_threads() -> int | None:
    """Return the number of threads that joblib leaves to each of its workers; None for all processors."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(limit), os.cpu_count() or 1) or None if limit.isdigit() else None


def _compiled(model: Source | bytes, steps: _Steps) -> ir.Model:
    source = onnx.load_model_from_string(model) if isinstance(model, bytes) else model
    return compile(source, **dict(steps))


_shared = functools.lru_cache(_MOST_SHARED_GRAPHS)(_compiled)


class Estimator(Checked):
    """Keep an executor through changes of options, and its state through pickling.

    A subclass is a dataclass, whose fields are the options. All attributes are of the class, because scikit-learn
    expects __init__ to set its arguments only.
    """

    model: Source | None
    _structure: Structure | None = None
    _executor: Executor | None = None
    _compiled: str | None = None  # the digest of its training graph, unless the structure is complete
    _kept: Mapping[str, np.ndarray] | None = None  # the state of an estimator that was pickled
    _initial: tuple[Mapping[str, np.ndarray], Mapping[str, Any]] = ({}, {})  # state and hyperparameters

    _transient: ClassVar[Sequence[str]] = ("_executor", "_initial")  # what pickling leaves out

    def get_params(self, deep: bool = True) -> dict[str, object]:
        """Return the options by name; with `deep`, also those of passes, such as `optimizer__learning_rate`."""
        params = _option_values(self)
        for name, step in list(params.items() if deep else ()):
            if dataclasses.is_dataclass(step):
                params |= {f"{name}__{field}": value for field, value in _option_values(step).items()}
        return params

    def set_params(self: _Self, **params: object) -> _Self:
        """Set options by name, including those of passes such as `optimizer__learning_rate`; return the estimator.

        Raises:
            GraphoptError: an option is unknown.
        """
        for name, value in params.items():
            if name not in self.get_params():
                raise GraphoptError(unknown("option", name, self.get_params()))
            own, _, field = name.partition("__")
            setattr(self, own, dataclasses.replace(getattr(self, own), **{field: value}) if field else value)
        return self

    def __repr__(self) -> str:
        default = {option.name: repr(option.default) for option in dataclasses.fields(self)}  # type: ignore[arg-type]
        shown = {name: repr(value) for name, value in _option_values(self).items() if name != "model"}
        changed = [f"{name}={text}" for name, text in shown.items() if text != default[name]]
        return f"{type(self).__name__}({', '.join(changed)})"

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in vars(self).items() if name not in self._transient}
        if isinstance(self.model, ir.Model):
            state["model"] = ir.to_proto(self.model)
        return state if self._executor is None else {**state, "_kept": self._executor.state}

    @staticmethod
    def _steps_of(schedule: object, epochs: int, rows: int, batch: int, *, goes_on: bool) -> int | None:
        """Return the steps of a training if a schedule needs their number, which is not known if it goes on later."""
        if not _needs_steps(schedule):
            return None
        if goes_on:
            raise GraphoptError(
                f"{type(schedule).__name__}(steps=None): expected the number of steps of the whole training, found "
                "none: partial_fit and warm_start do not know when it ends: write steps=..."
            )
        return epochs * math.ceil(rows / max(batch, 1))

    @staticmethod
    def _planned_by(schedule: Any, steps: int | None) -> Any:
        """Return a schedule for a training of so many steps; None before `fit` if it needs their number."""
        if not _needs_steps(schedule):
            return schedule
        return None if steps is None else schedule.planned(steps)

    @property
    def _trained_structure(self) -> Structure:
        """Return the structure of the last executor."""
        if self._structure is None:
            raise GraphoptError(f"{type(self).__name__}: expected a fitted estimator, found another: call fit")
        return self._structure

    def _running(self, structure: Structure | None = None, *, anew: bool = False) -> Executor:
        """Return the executor of a structure, or of the last one; a new executor continues the state, where it fits.

        Args:
            anew: compile a structure again whose steps read files or functions, which may have changed.
        """
        structure = structure or self._trained_structure
        is_same = self._executor is not None and structure == self._structure
        if self._executor is not None and is_same and (structure.is_complete or not anew):
            return self._executor
        step = structure.step()
        compiled = None if structure.is_complete else model_digest(step)
        if self._executor is None or not is_same or compiled != self._compiled:
            before = self._kept or {} if self._executor is None else self._executor.state
            executor = structure.executor(step)
            state = executor.state
            fitting = (name for name, x in before.items() if name in state and _has_same_form(x, state[name]))
            executor.update_state({name: before[name] for name in fitting})
            self._initial = state, dict(executor.hyperparameters)
            self._structure, self._executor, self._kept = structure, executor, None
            self._compiled = compiled
        return self._executor

    def _predictor(self, dtype: str, classes: np.ndarray | None) -> onnx.ModelProto:
        """Return the trained model with labels and probabilities, or numbers, as its outputs."""
        if dtype not in PREDICTOR_TYPES:
            raise GraphoptError(unknown("dtype", dtype, PREDICTOR_TYPES))
        target = self._running().inputs.get(TARGET)
        spec = None if target is None else TargetSpec.read(target)
        if spec is None:
            raise GraphoptError(
                "to_onnx: expected a loss that compares a prediction with a target, found a loss that the model "
                "computes: use get_trained_onnx"
            )
        loss = dict(self._trained_structure.steps)["loss"]
        return predictor(self._trained(spec.output, dtype), spec, loss, classes, dtype)

    def _labels(self) -> np.ndarray | None:
        """Return the labels that the model predicts; None for class numbers, 0 and 1 for each label, or numbers."""
        return getattr(self, "classes_", None)

    def _trained(self, output: str, dtype: str) -> onnx.ModelProto:
        """Return the trained model with one output, in its own type or, if that can be chosen, in `dtype`."""
        return self._running().trained([output])

    def _metric(self) -> tuple[str, Metrics] | None:
        """Return the name of the output that has targets, and the metric that compares the two, if known."""
        return metrics(self._running().inputs).get(TARGET)

    def _predictions(self, batches: Batches) -> np.ndarray:
        """Return the output that has targets, or the first one, for the rows of all batches."""
        executor, known = self._running(), self._metric()

        def compute(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            outputs = executor.predict(batch)
            return {"y": np.asarray(outputs[known[0] if known else next(iter(outputs))])}

        return by_batches(compute, batches, CHUNK)["y"]


@dataclass(kw_only=True, eq=False, repr=False)
class Trainer(Estimator):
    """Train an ONNX model on arrays: an estimator for scikit-learn's tools, such as clone, GridSearchCV and pickle.

    Args:
        model: the inference model: a path, an onnx.ModelProto or an onnx_ir.Model. Each `fit` reads it again.
        loss: a loss pass; `passes.MeanSquaredError()` by default.
        optimizer: an optimizer pass; `passes.SGD(0.01)` by default.
        regularizer, clip, training, adapter, parameters: passes of the standard pipeline, see `graphopt.compile`.
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
        device: see `Executor`.
        threads: the number of threads; by default, one for short steps, and otherwise the runtime's choice or what
            joblib leaves to each of its workers.

    Attributes:
        train_losses_: the mean loss of each epoch of the last `fit`.
        validation_losses_: the losses of its validations.
        history_: its records, one per epoch, as `graphopt.fit` returns them.
        n_iter_: the number of its epochs.
        classes_: for a classification, the labels that `predict` may return.

    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> trainer = graphopt.Trainer(models.linear((1,), 1), optimizer=passes.SGD(0.1)).fit(X, 2 * X + 1)
    >>> round(trainer.score(X, 2 * X + 1), 3)
    1.0
    """

    model: Source = field(kw_only=False)
    loss: Step | None = None
    optimizer: Step | None = None
    regularizer: Step | None = None
    clip: Step | None = None
    training: Step | None = None
    adapter: Step | None = None
    parameters: Step | None = None
    schedule: str | Step | None = "constant"
    max_iter: int = 100
    batch_size: int = 10
    shuffle: Shuffle = True
    validation_every: int = 1
    warm_start: bool = False
    random_state: int = 0
    device: str = "cpu"
    threads: int | None = None

    # Without annotations: these are no options.
    _weighted = False  # whether rows have weights
    _digest = ""  # of the model, as it was last read
    _steps = cast("int | None", None)  # of the last training, if the schedule needs their number
    _row = cast("tuple[int, ...] | None", None)  # the shape of a row of the targets
    _transient = (*Estimator._transient, "_structure")

    @checked()
    def fit(
        self,
        X: _Arrays,
        y: np.ndarray,
        sample_weight: np.ndarray | None = None,
        *,
        X_val: _Arrays | None = None,
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
            validation = _named_arrays(X_val, y_val, sample_weight_val)
        return self._fit(_named_arrays(X, y, sample_weight), validation, self.max_iter, self.warm_start)

    @checked()
    def partial_fit(self, X: _Arrays, y: np.ndarray, sample_weight: np.ndarray | None = None) -> Trainer:
        """Train for one more epoch, regardless of `warm_start` and `max_iter`."""
        return self._fit(_named_arrays(X, y, sample_weight), None, 1, True)

    def predict(self, X: _Arrays) -> np.ndarray:
        """Return predictions: class numbers for a classification, otherwise the model's output.

        After `fit`, each row has the shape of a row of the targets: for example one number, even if the model's
        output has a last axis of size 1. Before `fit`, it has the shape of the model's output.
        """
        predicted, known = self._output(X), self._metric()
        predicted = known[1].predicted(predicted) if known else predicted
        row = predicted.shape[1:] if self._row is None else self._row
        fits = predicted.size == len(predicted) * math.prod(row)
        return predicted.reshape(len(predicted), *row) if fits else predicted

    def predict_proba(self, X: _Arrays) -> np.ndarray:
        """Return the probabilities of the classes; for a binary classification, two columns for 0 and 1.

        Raises:
            GraphoptError: the loss is not a cross-entropy, so that the model does not predict probabilities.
        """
        loss = self._loss(False)
        if not hasattr(loss, "probabilities"):
            raise GraphoptError(
                f"predict_proba: expected CrossEntropy or BinaryCrossEntropy as the loss, found {loss!r}: use predict"
            )
        return probabilities_of(loss, self._output(X))

    @checked()
    def score(self, X: _Arrays, y: np.ndarray, sample_weight: np.ndarray | None = None) -> float:
        """Return the accuracy, or for a regression the mean R2 over the columns, as scikit-learn's scores do."""
        predicted = self.predict(X)
        target = np.asarray(y).reshape(predicted.shape)
        score = weighted_r2 if self._task == "regression" else weighted_accuracy
        return score(predicted, target, sample_weight)

    def losses(self, X: _Arrays, y: np.ndarray, sample_weight: np.ndarray | None = None) -> np.ndarray:
        """Return the loss of each row, multiplied by its sample weight if given."""
        loss = self._loss(sample_weight is not None, reduction="none")
        graph = compile(self.get_trained_onnx(), loss=loss, gradient=None)
        encoding = encoding_of(Device(), graph)
        inputs = {name_of(x): x for x in with_role(graph, *FED)} if encoding is None else encoding.inputs
        batches = Batches(Dataset(_named_arrays(X, y, sample_weight), features=FEATURES), inputs)

        def compute(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"loss": run(graph, batch if encoding is None else encoding.encoded(batch))["loss"]}

        return by_batches(compute, batches, CHUNK)["loss"]

    def get_state(self) -> dict[str, np.ndarray]:
        """Return copies of all state by name: parameters, optimizer slots and counters."""
        return {name: array.copy() for name, array in self._running().state.items()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace all or part of the state. A `fit` with `warm_start` continues from it.

        Raises:
            GraphoptError: a name is unknown, or an array has the wrong type or shape. Nothing is replaced.
        """
        self._running().update_state(state)

    def to_onnx(self, dtype: str = "float32") -> onnx.ModelProto:
        """Return the trained model as a predictor, which computes the results of `predict` and `predict_proba`.

        A classification has the outputs `label` and `probabilities`, or `scores` if the loss knows no probabilities; a
        regression has `variable`. These are the names that skl2onnx gives.

        Args:
            dtype: the type of features, probabilities and numbers: `float32` or `float64`.

        Raises:
            GraphoptError: the type is unknown, or the model computes its own loss.
        """
        return self._predictor(dtype, self._labels())

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

    def __sklearn_tags__(self) -> Any:
        from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

        kind = RegressorMixin if self._task == "regression" else ClassifierMixin
        return type("Tagged", (kind, BaseEstimator), {})().__sklearn_tags__()

    def _fit(
        self,
        data: Mapping[str, np.ndarray],
        validation: Mapping[str, np.ndarray] | None,
        epochs: int,
        warm: bool,
    ) -> Trainer:
        self._weighted = WEIGHT in data
        rows = len(next(iter(data.values())))
        self._steps = self._steps_of(self.schedule, epochs, rows, self.batch_size, goes_on=warm)
        executor = self._running(anew=True)
        state, hyperparameters = self._initial
        if not warm:
            executor.update_state(state)
        executor.set_hyperparameters(**hyperparameters)
        self.history_: list[Record] = fit(
            executor,
            Dataset(data, features=FEATURES),
            epochs=epochs,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            seed=self.random_state,
            validation=validation and Dataset(validation, features=FEATURES),
            validation_every=self.validation_every,
            callbacks=[Adaptive()] if self.schedule == "adaptive" else [],
            verbose=False,
        )
        self.train_losses_ = [record["loss"] for record in self.history_]
        self.validation_losses_ = [r["validation_loss"] for r in self.history_ if "validation_loss" in r]
        self.n_iter_ = len(self.history_)
        self._row = data[TARGET].shape[1:]
        target = executor.inputs.get(TARGET)  # a model's own loss may call it differently
        labels = None if target is None else labels_of(target)
        if labels is not None:
            self.classes_ = labels.all() if labels.high < math.inf else np.unique(data[TARGET])
        return self

    def _running(self, structure: Structure | None = None, *, anew: bool = False) -> Executor:
        """Return an executor for the current options; with `anew`, files and functions are read again."""
        import passes

        schedule = self.schedule
        if isinstance(schedule, str):
            if schedule not in SCHEDULES:
                raise GraphoptError(unknown("schedule", schedule, SCHEDULES))
            name = SCHEDULES[schedule]
            schedule = getattr(passes, name)() if name else None
        schedule = self._planned_by(schedule, self._steps)
        steps = {
            "loss": self._loss(self._weighted),
            "optimizer": self.optimizer or passes.SGD(0.01),
            "schedule": schedule,
            "regularizer": self.regularizer,
            "clip": self.clip,
            "training": self.training,
            "adapter": self.adapter,
            "parameters": DEFAULT if self.parameters is None else self.parameters,
        }
        last = self._structure
        if anew or last is None or last.model is not self.model:
            digest = file_digest(self.model)
            if self._kept is not None and not anew and digest != self._digest:
                raise GraphoptError(
                    "model: expected the model that the pickled trainer had trained, found another one, or other "
                    "weights in it: fit trains it"
                )
            self._digest = digest
        chosen = self.device, self.threads, self.batch_size
        return super()._running(Structure(self.model, self._digest, tuple(steps.items()), *chosen), anew=anew)

    def _loss(self, weighted: bool, **fields: object) -> Any:
        import passes

        loss: Any = self.loss or passes.MeanSquaredError()
        check_family("loss", loss)
        if isinstance(loss, passes.OwnLoss):  # its inputs and output are fixed
            if fields:
                raise GraphoptError(
                    "losses: expected a loss per row, found a loss that the model reduces: use a loss of `passes`"
                )
            return loss
        return dataclasses.replace(loss, sample_weight=weighted, **fields)

    @property
    def _task(self) -> str:
        return str(self._loss(False).task)

    def _output(self, X: _Arrays) -> np.ndarray:
        """Return the model's output for the rows."""
        inputs = {name: x for name, x in self._running().inputs.items() if role_of(x) is Role.DATA}
        return self._predictions(Batches(Dataset(_named_arrays(X), features=FEATURES), inputs))


def probabilities_of(loss: Any, output: np.ndarray) -> np.ndarray:
    """Return the probabilities of the classes, or those of the labels of a binary loss: two columns for one label."""
    probabilities: np.ndarray = loss.probabilities(output)
    if loss.task != "binary":
        return probabilities
    columns = probabilities.reshape(len(output), -1)
    return columns if columns.shape[1] > 1 else np.concatenate([1 - columns, columns], axis=1)


def _needs_steps(schedule: object) -> bool:
    return isinstance(schedule, Pass) and schedule.planned(2**31) is not schedule


def _has_same_form(x: np.ndarray, y: np.ndarray) -> bool:
    return (x.dtype, x.shape) == (y.dtype, y.shape)


def _option_values(options: Any) -> dict[str, object]:
    """Return the fields of a dataclass by name."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _named_arrays(X: _Arrays, *more: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return inputs, targets and weights in one dictionary by name."""
    arrays = dict(X) if isinstance(X, Mapping) else {FEATURES: X}
    arrays |= {name: x for name, x in zip((TARGET, WEIGHT), more, strict=False) if x is not None}
    return {name: _numeric_array(name, values) for name, values in arrays.items()}


def _numeric_array(name: str, values: Any) -> Any:
    """Return values as an array of numbers; rows of sparse features are made dense when they are read."""
    if is_sparse(values):
        return values.toarray() if name in (TARGET, WEIGHT) else SparseRows(values)
    array = np.asarray(values)
    if array.dtype.kind in "US" and name in (FEATURES, TARGET, WEIGHT):  # other inputs may read strings
        remedy = (
            "numpy.unique(y, return_inverse=True)[1] gives class numbers, and OnnxClassifier takes labels"
            if name == TARGET
            else "encode it in a step before, such as a ColumnTransformer with OneHotEncoder"
        )
        raise GraphoptError(f"{name}: expected numbers, found text such as {str(array.flat[0])!r}: {remedy}")
    return array
