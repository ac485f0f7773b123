"""Train the model of an estimator epoch by epoch, as scikit-learn trains its networks."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_array, check_consistent_length, check_random_state, gen_batches, shuffle
from sklearn.utils.validation import check_is_fitted, validate_data

from graphopt.compiler import DEFAULT
from graphopt.data.dataset import TARGET, WEIGHT
from graphopt.errors import GraphoptError
from graphopt.graph.roles import Role, labels_of, with_role
from graphopt.graph.values import dims_of, dtype_of, name_of, rank
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks.callback import copied_weights
from graphopt.training.estimator import CHUNK, Estimator, Structure
from graphopt.training.sklearn import network
from graphopt.training.sklearn.options import EstimatorOptions, WeightPenalty

_SLOWEST = 1e-6  # the rate at which `adaptive` ends training

# What is the same in a fitted network of scikit-learn.
LEARNED = (
    *("n_features_in_", "feature_names_in_", "n_outputs_", "out_activation_", "t_", "n_iter_", "loss_"),
    *("loss_curve_", "best_loss_", "validation_scores_", "best_validation_score_"),
)

_Self = TypeVar("_Self", bound="Fitting")


class Fitting(EstimatorOptions, Estimator, BaseEstimator):  # type: ignore[misc]
    """Train and run a model. A subclass encodes targets and decodes predictions."""

    _network: ClassVar[Any]  # of scikit-learn
    _output_name: ClassVar[str]  # of the perceptron

    # Class attributes, because scikit-learn expects __init__ to set its arguments only.
    _interface: network.Interface | None = None  # of a model that was given
    _dtype = "float64"  # of the features
    numeric = False  # whether targets have to be numbers

    def fit(self: _Self, X: Any, y: Any, sample_weight: Any = None) -> _Self:
        """Train on rows of features and targets, and return the estimator."""
        return self._fit(X, y, sample_weight)

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted labels or numbers of each row, in the form of the targets."""
        return self._decoded(self._output(self._features(X)))

    def to_onnx(self) -> onnx.ModelProto:
        """Return the trained model: the model given, or a perceptron that computes probabilities or numbers."""
        check_is_fitted(self)
        return self._running().trained()

    @classmethod
    def from_sklearn(cls: type[_Self], fitted: Any, **options: Any) -> _Self:
        """Return an estimator that continues a fitted network; see `graphopt.from_sklearn`."""
        if not isinstance(fitted, cls._network):
            raise GraphoptError(
                f"{cls.__name__}.from_sklearn: expected a fitted {cls._network.__name__}, found "
                f"{type(fitted).__name__}"
            )
        check_is_fitted(fitted)
        names = {field.name for field in dataclasses.fields(cls)}
        taken = {name: value for name, value in fitted.get_params().items() if name in names}
        if taken["solver"] == "lbfgs":  # which does not train batch by batch
            taken["solver"] = "adam"
        estimator = cls(**{**taken, **options})
        estimator._begin()
        for name in LEARNED:
            if hasattr(fitted, name):  # the solver lbfgs has no curve, for example
                setattr(estimator, name, copy.copy(getattr(fitted, name)))
        estimator._dtype = fitted.coefs_[0].dtype.name
        estimator._take_targets(fitted)
        optimizer = getattr(fitted, "_optimizer", None)
        estimator._waited = getattr(fitted, "_no_improvement_count", 0)
        estimator._rate = (
            optimizer.learning_rate if estimator.solver == "sgd" and optimizer else estimator._base_rate()
        )
        structure = estimator._structure_of(estimator._perceptron(), has_weights=False)
        estimator._use(structure, structure.executor(), network.network_state(fitted, estimator.solver))
        return estimator

    @abstractmethod
    def _learn_targets(self, y: np.ndarray, classes: Any) -> None:
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
    def _take_targets(self, fitted: Any) -> None:
        """Set the other attributes that describe targets from those of a network of scikit-learn."""

    @abstractmethod
    def _validation_score(self, y: np.ndarray, predicted: np.ndarray, weights: np.ndarray | None) -> float:
        """Return the score of held-out rows, given encoded targets and decoded predictions."""

    def _shown_loss(self, values: Mapping[str, Any]) -> float:
        """Return the loss of a step as scikit-learn shows it."""
        return float(values["loss"])

    def _weights(self, y: np.ndarray, sample_weight: Any, *, incremental: bool) -> np.ndarray | None:
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
        self: _Self, X: Any, y: Any, sample_weight: Any, *, incremental: bool = False, classes: Any = None
    ) -> _Self:
        self._check_options()
        if incremental and self.early_stopping:
            raise GraphoptError("partial_fit: expected early_stopping=False, found True: use fit")
        first = self._structure is None or not (self.warm_start or incremental)
        model = network.serialized(self.model) if first and self.model is not None else None
        if first:
            self._interface = None if model is None else network.interface(model)
        X, y = self._validated(X, y, reset=first)
        if first:
            self._dtype = X.dtype.name
            self._learn_targets(y, classes)
        target = self._encoded(y)
        weights = self._weights(y, sample_weight, incremental=incremental)
        random = check_random_state(self.random_state)
        self._prepare(model, random, first=first, incremental=incremental, has_weights=weights is not None)
        if first:
            self._begin()
        if first or not incremental:
            self._rate = self._base_rate()
        self._train(X, target, weights, random, epochs=1 if incremental else self.max_iter)
        return self

    def _begin(self) -> None:
        """Start to count epochs, rows and losses."""
        self.t_ = self._waited = 0
        self.loss_curve_: list[float] = []
        self.best_loss_ = None if self.early_stopping else math.inf
        self.validation_scores_: list[float] | None = [] if self.early_stopping else None
        self.best_validation_score_ = -math.inf if self.early_stopping else None

    def _prepare(
        self, model: bytes | None, random: Any, *, first: bool, incremental: bool, has_weights: bool
    ) -> None:
        """Have an executor with new weights, or with those of the last training."""
        start: Mapping[str, np.ndarray] = {}
        if not first:
            assert self._structure is not None
            executor = self._running()
            start = executor.state if incremental else copied_weights(executor)
            assert isinstance(self._structure.model, bytes)
            model = self._structure.model
        elif model is None:
            model = self._perceptron()
            start = network.initial_weights(self._sizes(), self.activation, self._dtype, random)
        structure = self._structure_of(model, has_weights=has_weights)
        if not (incremental and structure == self._structure):
            self._use(structure, structure.executor(), start)

    def _perceptron(self) -> bytes:
        """Return the perceptron for `n_features_in_` and `n_outputs_`."""
        activations = self.activation, self.out_activation_
        return network.perceptron(self._sizes(), *activations, self._dtype, self._output_name)

    def _sizes(self) -> tuple[int, ...]:
        """Return the number of units in each layer of the perceptron."""
        hidden = (int(size) for size in np.atleast_1d(self.hidden_layer_sizes))
        return (self.n_features_in_, *hidden, self.n_outputs_)

    def _structure_of(self, model: bytes, *, has_weights: bool) -> Structure:
        steps = {
            "parameters": self.parameters or DEFAULT,
            "training": self.training or DEFAULT,
            "loss": dataclasses.replace(self._loss(), sample_weight=has_weights),
            "regularizer": WeightPenalty(self.alpha) if self.alpha else None,
            "optimizer": self._optimizer(),
            "schedule": None if isinstance(self.learning_rate, str) else self.learning_rate,
        }
        return Structure(model, tuple(steps.items()), self.device, self.threads)

    def _running(self) -> Executor:
        if self._executor is None:
            assert self._structure is not None and self._kept is not None
            return self._use(self._structure, self._structure.executor(), self._kept)
        return self._executor

    def _train(
        self, X: np.ndarray, y: np.ndarray, weights: np.ndarray | None, random: Any, epochs: int
    ) -> None:
        """Train, and draw the random numbers that scikit-learn's networks would draw."""
        executor, held_out, best = self._running(), None, None
        if self.early_stopping:
            X, y, weights, held_out = self._split(X, y, weights, random)
        feeds = self._feeds(executor, X, y, weights)
        rows = len(X)
        size = min(200 if self.batch_size == "auto" else int(self.batch_size), rows)
        order = np.arange(rows)
        rates = [name for name in executor.hyperparameters if name.endswith("learning_rate")]
        self.n_iter_ = 0
        try:
            for _ in range(epochs):
                executor.set_hyperparameters(**dict.fromkeys(rates, self._rate))
                if self.shuffle:
                    order = shuffle(order, random_state=random)
                total = 0.0
                for batch in gen_batches(rows, size):
                    taken = order[batch] if self.shuffle else batch
                    fed = {name: array[taken] for name, array in feeds.items()}
                    if WEIGHT not in fed or fed[WEIGHT].any():
                        total += self._shown_loss(executor.step(fed)) * (batch.stop - batch.start)
                self._count(total / rows, rows)
                if held_out is not None and self._improved(*held_out):
                    best = copied_weights(executor)
                if self._waited > self.n_iter_no_change and self._stops():
                    break
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

    def _count(self, loss: float, rows: int) -> None:
        """Record the loss of an epoch, and set the rate of the next one."""
        self.n_iter_ += 1
        self.t_ += rows
        self.loss_ = loss
        self.loss_curve_.append(loss)
        if self.verbose:
            print(f"Iteration {self.n_iter_}, loss = {loss:.8f}")
        if self.best_loss_ is not None:
            self._waited = self._waited + 1 if loss > self.best_loss_ - self.tol else 0
            self.best_loss_ = min(self.best_loss_, loss)
        if self.learning_rate == "invscaling" and self.solver != "adam":
            self._rate = self._base_rate() / (self.t_ + 1) ** self.power_t

    def _improved(self, X: np.ndarray, y: np.ndarray, weights: np.ndarray | None) -> bool:
        """Record the score of held-out rows, and return whether it is the best one."""
        assert self.validation_scores_ is not None and self.best_validation_score_ is not None
        score = self._validation_score(y, self._decoded(self._output(X)), weights)
        self.validation_scores_.append(score)
        if self.verbose:
            print(f"Validation score: {score:f}")
        self._waited = self._waited + 1 if score < self.best_validation_score_ + self.tol else 0
        is_best = score > self.best_validation_score_
        self.best_validation_score_ = max(score, self.best_validation_score_)
        return is_best

    def _stops(self) -> bool:
        """Return whether to end training without improvement, rather than to divide the rate."""
        if self.learning_rate != "adaptive" or self.solver == "adam" or self._rate <= _SLOWEST:
            return True
        self._rate /= 5
        self._waited = 0
        return False

    def _split(self, X: np.ndarray, y: np.ndarray, weights: np.ndarray | None, random: Any) -> Any:
        """Return the features, targets and weights to train on, and those of the rows to hold out."""
        parts = train_test_split(
            *([X, y] if weights is None else [X, y, weights]),
            random_state=random,
            test_size=self.validation_fraction,
            stratify=y if self.n_outputs_ == 1 and not self.numeric else None,
        )
        if len(parts[1]) < 2:
            raise GraphoptError(
                f"validation_fraction: expected a share of at least 2 rows, found {self.validation_fraction} of "
                f"{len(X)} rows"
            )
        nothing = [None] if weights is None else []
        return *parts[::2], *nothing, (*parts[1::2], *nothing)

    def _feeds(
        self, executor: Executor, X: np.ndarray, y: np.ndarray, weights: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Return all rows by the names, and in the types and shapes, of the graph's inputs."""
        target = executor.inputs[TARGET]
        labels = labels_of(target)
        if labels is not None and not labels.several:
            y = np.where(y, labels.high, labels.low)
        known: dict[str, Any] = {TARGET: y, WEIGHT: weights}
        return {name: _as_fed(known.get(name, X), value) for name, value in executor.inputs.items()}

    def _output(self, X: np.ndarray) -> np.ndarray:
        """Return the model's output for validated rows."""
        (data,) = with_role(self._running().model, Role.DATA)
        array = _as_fed(X, data)
        return self._predictions({name_of(data): array[rows]} for rows in gen_batches(len(array), CHUNK))

    def _validated(self, X: Any, *y: Any, reset: bool = False) -> Any:
        """Return features, and targets if they are given, as arrays; `reset` learns the features' number and names."""
        interface = self._interface
        kind: Any = self._dtype
        if reset and interface is not None:
            kind = interface.dtype
        elif reset:
            kind = [np.float64, np.float32] if self.dtype == "auto" else self.dtype
        return validate_data(
            self,
            X,
            *y,
            reset=reset,
            dtype=kind,
            allow_nd=interface is not None and interface.axes != 2,
            **({"multi_output": True, "y_numeric": self.numeric} if y else {}),
        )

    def _features(self, X: Any) -> np.ndarray:
        """Return the features of a fitted estimator's rows."""
        check_is_fitted(self)
        features: np.ndarray = self._validated(X)
        return features


def _as_fed(array: np.ndarray, value: ir.Value) -> np.ndarray:
    """Return rows in the type and the shape of a graph's input."""
    row = [dim for dim in dims_of(value)[1:] if isinstance(dim, int)]
    if len(row) == rank(value) - 1 and math.prod(row) == math.prod(array.shape[1:]):
        array = array.reshape(len(array), *row)
    return np.ascontiguousarray(array, dtype_of(value).numpy())
