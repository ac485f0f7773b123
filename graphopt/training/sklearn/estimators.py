"""Define the estimators. Nothing imports this file before one of them is asked for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer
from sklearn.utils import column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.labels import labels_of
from graphopt.training.sklearn import network
from graphopt.training.sklearn.fitting import TARGET, Fitting

# What is the same in a fitted network of scikit-learn.
LEARNED = (
    *("n_features_in_", "feature_names_in_", "n_outputs_", "out_activation_", "t_", "n_iter_", "loss_"),
    *("loss_curve_", "best_loss_", "validation_scores_", "best_validation_score_"),
)

Self = TypeVar("Self", bound=Fitting)


def _has_probabilities(estimator: Any) -> bool:
    return estimator.loss is None or hasattr(estimator.loss, "probabilities")


@dataclass(kw_only=True, eq=False, repr=False)
class OnnxClassifier(ClassifierMixin, Fitting):  # type: ignore[misc]
    """Train a perceptron, or any ONNX model, as a classifier of scikit-learn.

    Targets are labels of any type, or rows of 0 and 1 for several labels at once. A model that is given returns a
    number per class, or one for two classes: probabilities if a Softmax or Sigmoid computes them, otherwise logits. A
    `loss` says otherwise.

    Args:
        class_weight: weights of labels in a dictionary, or `balanced` for the inverse of their frequency. They
            multiply `sample_weight`.

    Attributes:
        classes_: the labels, in the order of `predict_proba`.
        n_iter_: the number of epochs of the last `fit`.
        loss_, best_loss_, loss_curve_: the mean loss of the last epoch, the least one, and those of all epochs.
        validation_scores_, best_validation_score_: the accuracies of held-out rows, with `early_stopping`.
        n_features_in_, feature_names_in_: the number of features and, for data with names, their names.
        n_outputs_, out_activation_: the number of outputs of the perceptron, and their activation.
        t_: the number of rows seen.

    Raises:
        GraphoptError: an option or the model is not valid, or the model does not fit the data.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = graphopt.OnnxClassifier(hidden_layer_sizes=(20,), learning_rate_init=0.02, random_state=0)
    >>> make_pipeline(StandardScaler(), classifier).fit(X, y).score(X, y) > 0.95
    True
    >>> [output.name for output in classifier.to_onnx().graph.output]
    ['probabilities']
    """

    class_weight: Any = None

    _multilabel = False

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxClassifier:
        """Train on rows of features and labels, and return the estimator."""
        return self._fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> OnnxClassifier:
        """Train for one more epoch, and return the estimator. The first call needs all `classes`."""
        if self._structure is None and classes is None:
            raise GraphoptError(
                "partial_fit: expected classes in the first call, found None: list all labels"
            )
        if (
            self._structure is not None
            and classes is not None
            and not np.array_equal(np.unique(classes), self.classes_)
        ):
            raise GraphoptError(f"partial_fit: expected classes {self.classes_}, as before, found {classes}")
        return self._fit(X, y, sample_weight, incremental=True, classes=classes)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each row, or 0 and 1 for each of several labels."""
        return self._decoded(self._output(self._features(X)))

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of the labels, in columns."""
        output = self._output(self._features(X))
        assert self._structure is not None
        found = self._structure.loss.probabilities(output).reshape(len(output), -1)
        if len(self.classes_) == 1:
            return np.ones_like(found[:, :1])
        return found if found.shape[1] > 1 else np.concatenate([1 - found, found], axis=1)

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of the probabilities of the labels, in columns."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    @classmethod
    def from_sklearn(cls, fitted: Any, **options: Any) -> OnnxClassifier:
        """Return an estimator that continues a fitted MLPClassifier, with its weights, options and optimizer.

        `partial_fit` continues its training. `fit` starts again, unless `warm_start` is set.

        Args:
            fitted: the MLPClassifier.
            options: options to change.

        Raises:
            GraphoptError: `fitted` is another estimator.
        """
        estimator = _like(cls, fitted, MLPClassifier, options)
        estimator.classes_ = fitted.classes_
        estimator._multilabel = fitted.n_outputs_ > 1 and fitted.out_activation_ == "logistic"
        return _continued(estimator, fitted)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _learn_targets(self, y: np.ndarray, classes: Any) -> None:
        kind = type_of_target(y)
        check_classification_targets(y)
        if kind == "multiclass-multioutput":
            raise GraphoptError(
                "y: expected one label per row, or columns of 0 and 1, found columns of labels"
            )
        self._multilabel = kind == "multilabel-indicator"
        self.classes_ = (
            np.arange(y.shape[1]) if self._multilabel else np.unique(y if classes is None else classes)
        )
        count = len(self.classes_)
        self.n_outputs_ = count if self._multilabel or count > 2 else 1
        given = self._interface
        if given is None:
            self.out_activation_ = "logistic" if self._multilabel or count < 3 else "softmax"
        elif given.outputs is not None:
            if given.outputs != count and (given.outputs, self.n_outputs_) != (1, 1):
                raise GraphoptError(
                    f"model: expected an output for each of {count} labels, found {given.outputs} outputs: change the "
                    f"model's last layer"
                )
            self.n_outputs_ = given.outputs

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        if self._multilabel:
            if y.ndim != 2 or y.shape[1] != len(self.classes_):
                raise GraphoptError(
                    f"y: expected {len(self.classes_)} columns of 0 and 1, found an array of shape {list(y.shape)}"
                )
            return y
        y = column_or_1d(y, warn=True)
        unknown_labels = np.setdiff1d(y, self.classes_)
        if len(unknown_labels):
            raise GraphoptError(f"y: expected labels {self.classes_}, as before, found {unknown_labels}")
        return np.searchsorted(self.classes_, y)[:, None]

    def _decoded(self, output: np.ndarray) -> np.ndarray:
        labels = labels_of(self._running().inputs[TARGET])
        assert labels is not None
        predicted = self._metric()[1].predicted(output)
        if self._multilabel:
            return (predicted == labels.high).astype(int)
        codes = predicted if labels.several else predicted == labels.high
        return self.classes_[np.minimum(codes.reshape(len(output)).astype(int), len(self.classes_) - 1)]

    def _loss(self) -> Any:
        import passes
        from graphopt.training.sklearn import objective

        if self.loss is not None:
            return self.loss
        computed_by = None if self._interface is None else self._interface.op_type
        if self._multilabel or self.n_outputs_ == 1:
            return objective.LogLoss(from_logits=computed_by not in (None, "Sigmoid"))
        return passes.CrossEntropy(from_logits=computed_by not in (None, "Softmax"))

    def _perceptron(self) -> bytes:
        sizes = self._sizes(self.n_features_in_, self.n_outputs_)
        return network.perceptron(sizes, self.activation, self.out_activation_, self._dtype, "probabilities")

    def _weights(self, y: np.ndarray, sample_weight: Any, *, incremental: bool) -> np.ndarray | None:
        weights = super()._weights(y, sample_weight, incremental=incremental)
        if self.class_weight is None:
            return weights
        if incremental and self.class_weight == "balanced":
            raise GraphoptError(
                "class_weight: expected a dictionary for partial_fit, found 'balanced', which needs all rows"
            )
        of_classes: np.ndarray = compute_sample_weight(self.class_weight, y)
        return of_classes if weights is None else of_classes * weights

    def _validation_score(self, y: np.ndarray, predicted: np.ndarray, weights: np.ndarray | None) -> float:
        truth = y if self._multilabel else self.classes_[y[:, 0]]
        return float(accuracy_score(truth, predicted, sample_weight=weights))


@dataclass(kw_only=True, eq=False, repr=False)
class OnnxRegressor(RegressorMixin, Fitting):  # type: ignore[misc]
    """Train a perceptron, or any ONNX model, as a regressor of scikit-learn.

    Targets are numbers, or rows of numbers. `loss` is `squared_error`, the default, `poisson`, or a loss pass.

    Attributes:
        n_iter_: the number of epochs of the last `fit`.
        loss_, best_loss_, loss_curve_: the mean loss of the last epoch, the least one, and those of all epochs.
        validation_scores_, best_validation_score_: the R2 of held-out rows, with `early_stopping`.
        n_features_in_, feature_names_in_: the number of features and, for data with names, their names.
        n_outputs_, out_activation_: the number of outputs, and the activation of the perceptron's.
        t_: the number of rows seen.

    Raises:
        GraphoptError: an option or the model is not valid, or the model does not fit the data.

    >>> import numpy
    >>> X = numpy.linspace(-1, 1, 100)[:, None]
    >>> regressor = graphopt.OnnxRegressor(hidden_layer_sizes=(50,), learning_rate_init=0.05, random_state=0)
    >>> regressor.fit(X, X[:, 0] ** 2).score(X, X[:, 0] ** 2) > 0.95
    True
    """

    numeric = True
    _row = cast("tuple[int, ...]", ())  # the shape of a row of the targets

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxRegressor:
        """Train on rows of features and targets, and return the estimator."""
        return self._fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxRegressor:
        """Train for one more epoch, and return the estimator."""
        return self._fit(X, y, sample_weight, incremental=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted numbers, a row of them if the targets were rows."""
        return self._decoded(self._output(self._features(X)))

    @classmethod
    def from_sklearn(cls, fitted: Any, **options: Any) -> OnnxRegressor:
        """Return an estimator that continues a fitted MLPRegressor, with its weights, options and optimizer.

        `partial_fit` continues its training. `fit` starts again, unless `warm_start` is set.

        Args:
            fitted: the MLPRegressor.
            options: options to change.

        Raises:
            GraphoptError: `fitted` is another estimator.
        """
        estimator = _like(cls, fitted, MLPRegressor, options)
        estimator._row = () if fitted.n_outputs_ == 1 else (fitted.n_outputs_,)
        return _continued(estimator, fitted)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _learn_targets(self, y: np.ndarray, classes: Any) -> None:
        y = self._columns(y)
        self._row = y.shape[1:]
        self.n_outputs_ = int(np.prod(self._row))
        if self._interface is None:
            self.out_activation_ = "exp" if self.loss == "poisson" else "identity"

    def _columns(self, y: np.ndarray) -> np.ndarray:
        return column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        y = self._columns(y)
        if y.shape[1:] != self._row:
            raise GraphoptError(
                f"y: expected rows of shape {list(self._row)}, as before, found {list(y.shape[1:])}"
            )
        return y.reshape(len(y), -1)

    def _decoded(self, output: np.ndarray) -> np.ndarray:
        return output.reshape(len(output), *self._row)

    def _loss(self) -> Any:
        from graphopt.training.sklearn import objective

        losses = {"squared_error": objective.SquaredError, "poisson": objective.PoissonDeviance}
        if isinstance(self.loss, str) and self.loss not in losses:
            raise GraphoptError(unknown("loss", self.loss, losses))
        return losses[self.loss or "squared_error"]() if isinstance(self.loss, str | None) else self.loss

    def _shown_loss(self, values: Mapping[str, Any]) -> float:
        """Return a squared error as the mean over outputs, as scikit-learn does, which trains on their sum."""
        loss = super()._shown_loss(values)
        if self.loss not in (None, "squared_error"):
            return loss
        data_loss = float(values.get("data_loss", loss))
        return loss - data_loss + data_loss / self.n_outputs_

    def _perceptron(self) -> bytes:
        sizes = self._sizes(self.n_features_in_, self.n_outputs_)
        return network.perceptron(sizes, self.activation, self.out_activation_, self._dtype, "y")

    def _validation_score(self, y: np.ndarray, predicted: np.ndarray, weights: np.ndarray | None) -> float:
        return float(r2_score(y, predicted.reshape(y.shape), sample_weight=weights))


def _like(cls: type[Self], fitted: Any, kind: Any, options: Mapping[str, Any]) -> Self:
    """Return a new estimator with the options of one of scikit-learn."""
    if not isinstance(fitted, kind):
        raise GraphoptError(
            f"{cls.__name__}.from_sklearn: expected a fitted {kind.__name__}, found {type(fitted).__name__}"
        )
    check_is_fitted(fitted)
    names = {field.name for field in dataclasses.fields(cls)}
    taken = {name: value for name, value in fitted.get_params().items() if name in names}
    if taken["solver"] == "lbfgs":  # which does not train batch by batch
        taken["solver"] = "adam"
    estimator = cls(**{**taken, **options})
    estimator._dtype = fitted.coefs_[0].dtype.name
    return estimator


def _continued(estimator: Self, fitted: Any) -> Self:
    """Give an estimator what one of scikit-learn has learned."""
    estimator._begin()
    for name in LEARNED:
        if hasattr(fitted, name):  # the solver lbfgs has no curve, for example
            setattr(estimator, name, copy.copy(getattr(fitted, name)))
    optimizer = getattr(fitted, "_optimizer", None)
    estimator._waited = getattr(fitted, "_no_improvement_count", 0)
    estimator._rate = (
        optimizer.learning_rate if estimator.solver == "sgd" and optimizer else estimator._base_rate()
    )
    state = network.named(fitted.coefs_, fitted.intercepts_)
    slots = {} if optimizer is None else _slots(estimator, optimizer, len(fitted.coefs_))
    estimator._use(estimator._structure_of(estimator._perceptron(), has_weights=False), {**state, **slots})
    return estimator


def _slots(estimator: Fitting, optimizer: Any, depth: int) -> dict[str, np.ndarray]:
    """Return the state of an optimizer of scikit-learn by graphopt's names: velocities, or sums for means."""

    def of(slot: str, factor: float, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        by_name = network.named(arrays[:depth], arrays[depth:])
        return {f"{name}.{slot}": (factor * array).astype(array.dtype) for name, array in by_name.items()}

    if isinstance(optimizer, SGDOptimizer) and estimator.solver == "sgd":
        return of("momentum", -1.0, optimizer.velocities)
    if isinstance(optimizer, AdamOptimizer) and estimator.solver == "adam":
        means = of("exp_sum", 1 / (1 - optimizer.beta_1), optimizer.ms)
        squares = of("exp_sum_sq", 1 / (1 - optimizer.beta_2), optimizer.vs)
        return {**means, **squares, "step": np.array(optimizer.t, np.int64)}
    return {}
