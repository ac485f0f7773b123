"""Declare the options of the estimators, and train as scikit-learn trains its networks."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.utils import Tags, check_array, check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

import passes
from graphopt.arguments import checked
from graphopt.compiler import DEFAULT
from graphopt.data import Batches, Dataset
from graphopt.data.dataset import TARGET, WEIGHT, Array, LazyArray, SparseRows, is_sparse
from graphopt.data.loader import other_shape
from graphopt.errors import GraphoptError, some, unknown
from graphopt.fields import check_intervals
from graphopt.graph.loading import Source
from graphopt.graph.roles import Role, labels_of, with_role
from graphopt.graph.values import dims_of, dtype_of, name_of, rank
from graphopt.intervals import within
from graphopt.pipeline import Step
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks.callback import Record, copied_weights
from graphopt.training.callbacks.steering import ADAPTIVE_DIVISOR, ADAPTIVE_LEAST_RATE
from graphopt.training.estimator import FEATURES, Estimator, Structure, file_digest
from graphopt.training.sklearn import network

RATES = ("constant", "invscaling", "adaptive")
SOLVERS = ("adam", "sgd")
_TYPES = ("auto", "float32", "float64")
_AUTO_BATCH = 200  # rows; scikit-learn's `auto`
_OWN = ("coefs_", "intercepts_", "n_layers_")  # attributes that only scikit-learn's networks have

TEXT_TARGET = "y: expected numbers, found text: a regression takes numbers, and OnnxClassifier takes labels"

_Self = TypeVar("_Self", bound="Fitting")


class NoPerceptron(GraphoptError, AttributeError):
    """Report that a model of the user's has no attribute of a perceptron."""


@dataclass(kw_only=True, eq=False, repr=False)
class EstimatorOptions:
    """Declare the arguments of `OnnxClassifier` and `OnnxRegressor`; names and meanings are MLPClassifier's.

    Args:
        model: the model to train: a path, an onnx.ModelProto or an onnx_ir.Model with one input and a batch of any
            size. None trains a perceptron with `hidden_layer_sizes`.
        hidden_layer_sizes: the number of units in each hidden layer of the perceptron.
        activation: the activation of its hidden layers: `identity`, `logistic`, `tanh` or `relu`.
        loss: a loss pass. By default, the loss of scikit-learn's networks.
        solver: `adam`, `sgd`, or an optimizer pass with a rate and options of its own.
        alpha: the strength of the L2 penalty of all weights except vectors, divided by the rows of a batch.
        batch_size: the number of rows of a batch; `auto` for 200, or all rows if there are fewer.
        learning_rate: `constant`; `invscaling` for the rate divided by the number of rows so far, raised to `power_t`;
            `adaptive` to divide the rate by 5 each time when training would stop; or a schedule pass. The solver
            `adam` takes no notice of `invscaling` and `adaptive`.
        learning_rate_init: the initial rate of the solvers `adam` and `sgd`.
        power_t: the exponent of `invscaling`.
        max_iter: the largest number of epochs.
        shuffle: train on the rows in a new random order in each epoch.
        random_state: a seed, a numpy.random.RandomState or None, for the initial weights, the rows that are held out
            and the order of rows. All of them are drawn as scikit-learn draws them.
        tol: the amount by which the loss, or the validation score, has to improve.
        verbose: print the loss of each epoch.
        warm_start: let `fit` start from the weights of the last `fit`, with a new optimizer.
        momentum, nesterovs_momentum: the momentum of the solver `sgd`, and whether it is Nesterov's.
        early_stopping: hold out rows, stop when their score does not improve, and keep the weights of the best score.
        validation_fraction: the share of rows that `early_stopping` holds out.
        beta_1, beta_2, epsilon: options of the solver `adam`.
        n_iter_no_change: the number of epochs without improvement after which training stops.
        adapter, training, parameters: passes of the standard pipeline, see `graphopt.compile`. An adapter needs a
            `model`.
        dtype: the type of the perceptron's numbers: `float32`, `float64`, or `auto` for float32 if the features are of
            this type and float64 otherwise, as in scikit-learn. Most runtimes want float32. A model has its own type.
        device: see `Executor`.
        threads: the number of threads; by default, one for short steps, and otherwise the runtime's choice or what
            joblib leaves to each of its workers.
    """

    model: Source | None = field(default=None, kw_only=False)
    hidden_layer_sizes: int | Sequence[int] = within("[1, inf)", (100,), whole=True, kw_only=False)
    activation: str = field(default="relu", kw_only=False)
    loss: str | Step | None = None
    solver: str | Step = "adam"
    alpha: float = within("[0, inf)", 1e-4)
    batch_size: int | Literal["auto"] = "auto"
    learning_rate: str | Step = "constant"
    learning_rate_init: float = within("(0, inf)", 1e-3)
    power_t: float = within("(0, inf)", 0.5)
    max_iter: int = within("[1, inf)", 200)
    shuffle: bool = True
    random_state: int | np.random.RandomState | None = None
    tol: float = within("[0, inf)", 1e-4)
    verbose: bool | int = False
    warm_start: bool = False
    momentum: float = within("[0, 1]", 0.9)
    nesterovs_momentum: bool = True
    early_stopping: bool = False
    validation_fraction: float = within("(0, 1)", 0.1)
    beta_1: float = within("[0, 1)", 0.9)
    beta_2: float = within("[0, 1)", 0.999)
    epsilon: float = within("(0, inf)", 1e-8)
    n_iter_no_change: float = within("[1, inf]", 10, whole=False)
    adapter: Step | Sequence[Step] | None = None
    training: Step | None = None
    parameters: Step | None = None
    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None

    def _check_options(self) -> None:
        """Raise an error unless all options are valid."""
        check_intervals(self)
        choices = {"activation": network.HIDDEN, "solver": SOLVERS, "learning_rate": RATES, "dtype": _TYPES}
        for name, known in choices.items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in known:
                raise GraphoptError(unknown(name, value, known))
        for name in ("loss", "solver", "learning_rate", "adapter", "training", "parameters"):
            value = getattr(self, name)
            if isinstance(value, type):
                raise GraphoptError(
                    f"{name}: expected a pass, found the class {value.__name__}: create it, {value.__name__}(...)"
                )
            if isinstance(value, Real):
                raise GraphoptError(
                    f"{name}: expected a name or a pass, found the number {value}: learning_rate_init is the rate"
                )
        if isinstance(self.model, Integral | Sequence) and not isinstance(self.model, str | bytes):
            raise GraphoptError(
                f"model: expected a path or an ONNX model, found {self.model!r}: for a perceptron with these hidden "
                f"layers, write hidden_layer_sizes={self.model!r}"
            )
        size = self.batch_size
        if size != "auto" and not (isinstance(size, Integral) and size >= 1):
            raise GraphoptError(f"batch_size: expected 'auto', or 1 or more, found {size!r}")

    def _optimizer(self) -> object:
        if self.solver == "adam":
            return network.ScikitLearnAdam(1e-3, self.beta_1, self.beta_2, self.epsilon)
        if self.solver == "sgd":
            return passes.SGD(
                1e-3,
                self.momentum,
                nesterov=bool(self.nesterovs_momentum and self.momentum),
                rate_in_velocity=bool(self.momentum),
            )
        return self.solver

    def _base_rate(self) -> float:
        """Return the initial learning rate."""
        return self.learning_rate_init if isinstance(self.solver, str) else self.solver.learning_rate  # type: ignore[attr-defined]


class Fitting(EstimatorOptions, Estimator, BaseEstimator):  # type: ignore[misc]
    """Train and run a model. A subclass encodes targets and decodes predictions."""

    _network: ClassVar[type[MLPClassifier] | type[MLPRegressor]]  # of scikit-learn
    _output_name: ClassVar[str]  # of the perceptron
    _score_of: ClassVar[Callable[..., float]]  # the function that scores held-out rows

    # Class attributes, because scikit-learn expects __init__ to set its arguments only.
    _interface: network.Interface | None = None  # of a model that was given
    _dtype = "float64"  # of the features
    _planned = 0  # rows of all epochs of the first fit
    _steps: int | None = None  # of the last training, if the schedule needs their number
    numeric = False  # whether targets have to be numbers

    @checked()
    def fit(self: _Self, X: object, y: object, sample_weight: object = None) -> _Self:
        """Train on rows of features and targets, and return the estimator."""
        return self._fit(X, y, sample_weight)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def predict(self, X: object) -> np.ndarray:
        """Return the predicted labels or numbers of each row, in the form of the targets."""
        return self._decoded(self._output(self._validated(X)))

    def to_onnx(self, dtype: str = "float32") -> onnx.ModelProto:
        """Return a predictor, whose outputs skl2onnx's names have: `label` and `probabilities`, or `variable`.

        It takes any number of rows. `graphopt.to_onnx` exports a Pipeline that ends in the estimator.

        Args:
            dtype: the type of features, probabilities and numbers: `float32` or `float64`. A perceptron computes in
                it; another model computes in its own type.

        Raises:
            GraphoptError: the type is unknown.
        """
        check_is_fitted(self)
        return self._predictor(dtype, self._labels())

    def get_trained_onnx(self) -> onnx.ModelProto:
        """Return the model that was given, or the perceptron, with trained weights, and with its own outputs."""
        check_is_fitted(self)
        return self._running().trained()

    def to_sklearn(self) -> MLPClassifier | MLPRegressor:
        """Return a fitted MLPClassifier or MLPRegressor with the weights, the records and the optimizer's state.

        It predicts the same, and `partial_fit` or `warm_start` continue the training, as in the other direction
        `graphopt.from_sklearn` does. Options that scikit-learn lacks are left out.

        Raises:
            GraphoptError: the estimator trains a model of your own, or a loss of logits.
        """
        coefs, intercepts = self._layers("to_sklearn")
        if getattr(self._loss(), "from_logits", False):
            raise GraphoptError(
                "to_sklearn: expected a loss of probabilities, as in scikit-learn, found one of logits: set "
                "from_logits=False"
            )
        names = self._network().get_params()
        taken = {name: value for name, value in self.get_params(deep=False).items() if name in names}
        taken |= {"solver": self.solver if isinstance(self.solver, str) else "adam"}
        taken |= {"learning_rate": self.learning_rate if isinstance(self.learning_rate, str) else "constant"}
        fitted = self._network(**{name: value for name, value in taken.items() if value is not None})
        for name, value in vars(self).items():
            if name.endswith("_") and not name.startswith("_"):
                setattr(fitted, name, copy.copy(value))
        state = self._running().state
        network.fill(fitted, coefs, intercepts, state, waited=self._waited, rate=self._rate)
        self._give_targets(fitted)
        return fitted

    @property
    def coefs_(self) -> list[np.ndarray]:
        """Return the weights of each layer of the perceptron, as MLPClassifier has them."""
        return self._layers("coefs_")[0]

    @property
    def intercepts_(self) -> list[np.ndarray]:
        """Return the biases of each layer of the perceptron."""
        return self._layers("intercepts_")[1]

    @property
    def n_layers_(self) -> int:
        """Return the number of layers of the perceptron, with its input."""
        return len(self._layers("n_layers_")[0]) + 1

    @classmethod
    def from_sklearn(cls: type[_Self], fitted: object, **options: object) -> _Self:
        """Return an estimator that continues a fitted network; see `graphopt.from_sklearn`."""
        if not isinstance(fitted, cls._network):
            raise GraphoptError(
                f"{cls.__name__}.from_sklearn: expected a fitted {cls._network.__name__}, found {type(fitted).__name__}"
            )
        check_is_fitted(fitted)
        names = {field.name for field in dataclasses.fields(cls)}
        taken = {name: value for name, value in fitted.get_params().items() if name in names}
        if taken["solver"] == "lbfgs":  # which does not train batch by batch
            taken["solver"] = "adam"
        estimator = cls(**{**taken, **options})
        estimator._begin()
        for name, value in vars(fitted).items():
            if name.endswith("_") and name not in _OWN:
                setattr(estimator, name, copy.copy(value))
        estimator._dtype = fitted.coefs_[0].dtype.name
        estimator._take_targets(fitted)
        optimizer: Any = getattr(fitted, "_optimizer", None)
        estimator._waited = getattr(fitted, "_no_improvement_count", 0)
        goes_on = optimizer and estimator.solver == "sgd"
        estimator._rate = optimizer.learning_rate if goes_on else estimator._base_rate()
        estimator._kept = network.network_state(fitted, estimator.solver)
        estimator._running(estimator._structure_of(estimator._perceptron(), has_weights=False))
        return estimator

    def _layers(self, needed_by: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the weights and the biases of the perceptron's layers."""
        check_is_fitted(self)
        if self._interface is not None:
            raise NoPerceptron(
                f"{needed_by}: expected a perceptron made from hidden_layer_sizes, found a model of your own: use "
                f"get_trained_onnx"
            )
        arrays = [np.array(onnx.numpy_helper.to_array(x)) for x in self._running().trained().graph.initializer]
        return arrays[::2], arrays[1::2]

    def _trained(self, output: str, dtype: str) -> onnx.ModelProto:
        if self._interface is not None:
            return super()._trained(output, dtype)
        activations = self.activation, self.out_activation_
        proto = onnx.load_model_from_string(network.perceptron(self._sizes(), *activations, dtype, output))
        layers = zip(*self._layers("to_onnx"), strict=True)
        for tensor, array in zip(proto.graph.initializer, itertools.chain(*layers), strict=True):
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(dtype), tensor.name))
        return proto

    @abstractmethod
    def _give_targets(self, fitted: MLPClassifier | MLPRegressor) -> None:
        """Set the attributes that describe targets in a network of scikit-learn."""

    @abstractmethod
    def _learn_targets(self, y: np.ndarray, classes: npt.ArrayLike | None) -> None:
        """Set the attributes that describe targets, such as `classes_`, `n_outputs_` and `out_activation_`."""

    @abstractmethod
    def _encoded(self, y: np.ndarray) -> np.ndarray:
        """Return targets as numbers: class numbers, labels 0 and 1, or the targets of a regression, in columns."""

    @abstractmethod
    def _decoded(self, output: np.ndarray) -> np.ndarray:
        """Return the predictions that a model's output stands for."""

    @abstractmethod
    def _loss(self) -> Any:
        """Return the loss pass, without weights."""

    @abstractmethod
    def _take_targets(self, fitted: MLPClassifier | MLPRegressor) -> None:
        """Set the other attributes that describe targets from those of a network of scikit-learn."""

    def _shown_loss(self, values: Record) -> float:
        """Return the loss of a step as scikit-learn shows it."""
        return float(values["loss"])

    def _weights(self, y: np.ndarray, sample_weight: object, *, incremental: bool) -> np.ndarray | None:
        """Return a weight for each row, or None for equal weights."""
        if sample_weight is None:
            return None
        weights = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name=WEIGHT)
        check_consistent_length(y, weights)
        if weights.ndim != 1 or (weights < 0).any() or not weights.any():
            raise GraphoptError(
                f"sample_weight: expected one weight per row, 0 or more, and not zero in all rows, found an array of "
                f"shape {list(weights.shape)} from {weights.min()} to {weights.max()}"
            )
        return weights

    def _fit(
        self: _Self,
        X: Any,
        y: Any,
        sample_weight: object,
        *,
        incremental: bool = False,
        classes: npt.ArrayLike | None = None,
    ) -> _Self:
        self._check_options()
        if incremental and self.early_stopping:
            raise GraphoptError("partial_fit: expected early_stopping=False, found True: use fit")
        first = self._structure is None or not (self.warm_start or incremental)
        model = network.serialized(self.model) if first and self.model is not None else None
        if first:
            self._interface = None if model is None else network.interface(model, self.adapter)
        X, y = self._validated(X, y, reset=first)
        if first:
            self._dtype, self._planned = X.dtype.name, X.shape[0] * self.max_iter
            self._learn_targets(y, classes)
            self._begin()
        rows = {FEATURES: X, "y": y, TARGET: self._encoded(y)}
        weights = self._weights(y, sample_weight, incremental=incremental)
        if weights is not None:
            rows[WEIGHT] = weights
        count = len(y) - math.ceil(len(y) * self.validation_fraction if self.early_stopping else 0)
        length = self.max_iter, count, min(self._batch_rows(), count)
        self._steps = self._steps_of(self.learning_rate, *length, goes_on=incremental or self.warm_start)
        random = check_random_state(self.random_state)
        start: Mapping[str, np.ndarray] = {}
        if not first:
            start, model = copied_weights(self._running()), self._same_model()
        elif model is None:
            start = network.initial_weights(self._sizes(), self.activation, self._dtype, random)
            model = self._perceptron()
        structure = self._structure_of(model, has_weights=weights is not None)
        executor = self._running(structure, anew=True)
        if first or not incremental:
            executor.update_state({**self._initial[0], **start})
            self._rate = self._base_rate()
        self._train(rows, random, epochs=1 if incremental else self.max_iter)
        return self

    def _begin(self) -> None:
        """Start to count epochs, rows and losses."""
        self.t_ = self._waited = 0
        self.loss_curve_: list[float] = []
        self.best_loss_ = None if self.early_stopping else math.inf
        self.validation_scores_: list[float] | None = [] if self.early_stopping else None
        self.best_validation_score_ = -math.inf if self.early_stopping else None

    def _perceptron(self) -> bytes:
        """Return the perceptron for `n_features_in_` and `n_outputs_`."""
        activations = self.activation, self.out_activation_
        return network.perceptron(self._sizes(), *activations, self._dtype, self._output_name)

    def _sizes(self) -> tuple[int, ...]:
        """Return the number of units in each layer of the perceptron."""
        hidden = (int(size) for size in np.atleast_1d(self.hidden_layer_sizes))
        return (self.n_features_in_, *hidden, self.n_outputs_)

    def _structure_of(self, model: bytes, *, has_weights: bool) -> Structure:
        if self.adapter is not None and self._interface is None:
            raise GraphoptError("adapter: expected a model whose weights it adapts, found a new perceptron: set model")
        schedule = self._planned_by(self.learning_rate, self._steps)
        steps = {
            "adapter": self.adapter,
            "parameters": self.parameters or DEFAULT,
            "training": self.training or DEFAULT,
            "loss": dataclasses.replace(self._loss(), sample_weight=has_weights),
            "regularizer": network.WeightPenalty(self.alpha) if self.alpha else None,
            "optimizer": self._optimizer(),
            "schedule": None if isinstance(self.learning_rate, str) else schedule,
        }
        rows = self._batch_rows()
        chosen = self.device, self.threads, rows, self._planned
        return Structure(model, file_digest(model), tuple(steps.items()), *chosen)

    def _batch_rows(self) -> int:
        return _AUTO_BATCH if self.batch_size == "auto" else int(self.batch_size)

    def _same_model(self) -> bytes:
        """Return the model that trains, or raise an error if `model` is another one now."""
        assert self._structure is not None and isinstance(self._structure.model, bytes)
        if self.model is not None and file_digest(network.serialized(self.model)) != self._structure.digest:
            raise GraphoptError(
                "model: expected the model that the last fit has trained, found another one, or other weights in it: "
                "warm_start=False and fit begin with it"
            )
        return self._structure.model

    def _train(self, rows: dict[str, Any], random: np.random.RandomState, epochs: int) -> None:
        """Train, and draw the random numbers that scikit-learn's networks would draw."""
        executor, held_out, best = self._running(), None, None
        if self.early_stopping:
            rows, held_out = self._split(rows, random)
        feeds = self._feeds(executor, rows)
        count = rows[FEATURES].shape[0]
        size = min(self._batch_rows(), count)
        order = np.arange(count)
        rates = [name for name in executor.hyperparameters if name.endswith("learning_rate")]
        self.n_iter_ = 0
        try:
            for _ in range(epochs):
                executor.set_hyperparameters(**dict.fromkeys(rates, self._rate))
                if self.shuffle:  # as sklearn.utils.shuffle, which checks its arguments for longer than it draws
                    random.shuffle(drawn := np.arange(count))
                    order = order[drawn]
                total = 0.0
                for start in range(0, count, size):
                    taken = order[start : start + size]
                    fed = {name: _taken(array, taken) for name, array in feeds.items()}
                    if WEIGHT not in fed or fed[WEIGHT].any():
                        total += self._shown_loss(executor.step(fed)) * len(taken)
                if self._count(total / count, count, held_out) and held_out is not None:
                    best = copied_weights(executor)
                if self._waited > self.n_iter_no_change:
                    if self.learning_rate != "adaptive" or self.solver == "adam" or self._rate <= ADAPTIVE_LEAST_RATE:
                        break
                    self._rate, self._waited = self._rate / ADAPTIVE_DIVISOR, 0
            else:
                if epochs > 1:
                    warnings.warn(
                        f"max_iter: expected enough epochs to converge, found {epochs}: raise max_iter or tol",
                        ConvergenceWarning,
                        stacklevel=4,
                    )
        except KeyboardInterrupt:
            warnings.warn("training was interrupted: the estimator keeps its last weights", stacklevel=4)
        if best is not None:
            executor.update_state(best)

    def _count(self, loss: float, rows: int, held_out: Mapping[str, np.ndarray] | None) -> bool:
        """Record an epoch, set the rate of the next one, and return whether this epoch is the best one so far."""
        self.n_iter_ += 1
        self.t_ += rows
        self.loss_ = measure = loss
        self.loss_curve_.append(loss)
        if self.verbose:
            print(f"Iteration {self.n_iter_}, loss = {loss:.8f}")
        best = math.inf if self.best_loss_ is None else self.best_loss_
        self.best_loss_ = None if self.best_loss_ is None else min(loss, best)
        if held_out is not None:
            assert self.validation_scores_ is not None and self.best_validation_score_ is not None
            predicted = self._decoded(self._output(held_out[FEATURES]))
            score = float(self._score_of(held_out["y"], predicted, sample_weight=held_out.get(WEIGHT)))
            self.validation_scores_.append(score)
            if self.verbose:
                print(f"Validation score: {score:f}")
            measure, best = -score, -self.best_validation_score_
            self.best_validation_score_ = max(score, self.best_validation_score_)
        self._waited = self._waited + 1 if measure > best - self.tol else 0
        if self.learning_rate == "invscaling" and self.solver != "adam":
            self._rate = self._base_rate() / (self.t_ + 1) ** self.power_t
        return measure < best

    def _split(self, rows: dict[str, Any], random: object) -> tuple[dict[str, Any], ...]:
        """Return the rows to train on, and those to hold out."""
        parts = train_test_split(
            *rows.values(),
            random_state=random,
            test_size=self.validation_fraction,
            stratify=rows[TARGET] if self.n_outputs_ == 1 and not self.numeric else None,
        )
        if parts[1].shape[0] < 2:
            raise GraphoptError(
                f"validation_fraction: expected a share of at least 2 rows, found {self.validation_fraction} of "
                f"{len(rows[TARGET])} rows"
            )
        return dict(zip(rows, parts[::2], strict=True)), dict(zip(rows, parts[1::2], strict=True))

    def _feeds(self, executor: Executor, rows: Mapping[str, Any]) -> dict[str, Array]:
        """Return all rows by the names, and in the types and shapes, of the graph's inputs."""
        labels = labels_of(executor.inputs[TARGET])
        if labels is not None and not labels.several:
            rows = {**rows, TARGET: np.where(rows[TARGET], labels.high, labels.low)}
        return {name: _as_fed(rows.get(name, rows[FEATURES]), x) for name, x in executor.inputs.items()}

    def _output(self, X: object) -> np.ndarray:
        """Return the model's output for validated rows."""
        (data,) = with_role(self._running().model, Role.DATA)
        rows = Dataset({name_of(data): _as_fed(X, data)})
        return self._predictions(Batches(rows, {name_of(data): data}, allow_nan=True))

    def _validated(self, X: object, *y: object, reset: bool = False) -> Any:
        """Return features, and targets if they are given, as arrays; `reset` learns the features' number and names."""
        if not reset:
            check_is_fitted(self)
        interface, kind = self._interface, cast("Any", self._dtype)
        if reset and interface is not None:
            kind = interface.dtype
        elif reset:
            kind = [np.float64, np.float32] if self.dtype == "auto" else self.dtype
        try:
            return validate_data(
                self,
                X,
                *y,
                reset=reset,
                dtype=kind,
                accept_sparse="csr",
                allow_nd=interface is not None and interface.axes != 2,
                **({"multi_output": True, "y_numeric": self.numeric} if y else {}),
            )
        except ValueError as error:
            explained = _data_problem(X, str(error))
            if explained is None:
                raise
            raise GraphoptError(explained) from error


def _data_problem(X: Any, error: str) -> str | None:
    """Return in one line what is wrong with data, and what to do, for errors of scikit-learn that do not say it."""
    if error.startswith("could not convert string"):
        kinds = getattr(X, "dtypes", None)
        found = [name for name, kind in dict(() if kinds is None else kinds).items() if kind.kind not in "biuf"]
        if not found and np.asarray(X).dtype.kind not in "OUS":
            return TEXT_TARGET
        columns = f" in {some([*map(repr, found)])}" if found else ""
        return (
            f"X: expected numbers, found text{columns}: encode it in a step before, such as a ColumnTransformer with "
            f"OneHotEncoder"
        )
    if error.startswith("Input X contains NaN"):
        return (
            "Input X contains NaN, expected finite numbers: fill missing values in a step before, such as a "
            "SimpleImputer, or leave out their rows"
        )
    if error.startswith("Expected 2D array"):
        return (
            f"X: expected a 2D array of rows and features, found shape {list(np.shape(X))}. Reshape your data: "
            f"X.reshape(-1, 1) for one feature, X.reshape(1, -1) for one row"
        )
    return None


def _taken(array: Array, rows: np.ndarray) -> np.ndarray:
    return array.read(rows) if isinstance(array, LazyArray) else array.take(rows, axis=0)


def _as_fed(array: Any, value: ir.Value) -> Array:
    """Return rows in the type and the shape of a graph's input; those of a sparse array are made dense when read."""
    row = [dim for dim in dims_of(value)[1:] if isinstance(dim, int)]
    if is_sparse(array):
        fits = len(row) == rank(value) - 1 and math.prod(row) == array.shape[1]
        return SparseRows(array, row if fits else None, dtype_of(value).numpy())
    if len(row) == rank(value) - 1 and math.prod(row) == math.prod(array.shape[1:]):
        mend = other_shape(row, array.shape[1:], "X")
        if array.ndim > 2 and "reshape" not in mend and array.shape[1:] != (*row,):
            raise GraphoptError(f"X: expected rows of shape {row}, found {list(array.shape[1:])}{mend}")
        array = array.reshape(len(array), *row)
    return np.ascontiguousarray(array, dtype_of(value).numpy())
