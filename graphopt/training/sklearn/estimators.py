"""Define the estimators. Nothing imports this file before one of them is asked for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import LabelBinarizer
from sklearn.utils import Tags, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target

import passes
from graphopt.data.dataset import TARGET
from graphopt.derivatives import normal_form
from graphopt.errors import GraphoptError, unknown
from graphopt.graph.roles import labels_of
from graphopt.intervals import within
from graphopt.training.callbacks.callback import Record
from graphopt.training.estimator import probabilities_of
from graphopt.training.sklearn.fitting import TEXT_TARGET, Fitting
from graphopt.training.sklearn.network import LogLoss, PoissonDeviance, SquaredError


def _has_probabilities(estimator: Fitting) -> bool:
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
        calibration: the share of rows that `fit` keeps from training, and by which `passes.Temperature` calibrates
            probabilities afterwards; None for none. `get_trained_onnx` returns the model as it trained. `partial_fit`
            undoes it. Weights of rows count for both. Rows without a mistake leave probabilities as they are, with a
            warning.

    Attributes:
        log_temperature_: the logarithm of the temperature, with `calibration`.
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
    ['label', 'probabilities']
    """

    class_weight: Any = None
    calibration: float | None = within("(0, 1)", None)

    _network, _output_name = MLPClassifier, "probabilities"
    _score_of = staticmethod(accuracy_score)
    _multilabel = False
    _temperature = passes.Temperature(log_temperature=0.0)

    def _fit(self, X: Any, y: Any, sample_weight: object, **options: Any) -> OnnxClassifier:
        self._temperature = passes.Temperature(log_temperature=0.0)
        self.__dict__.pop("log_temperature_", None)
        if self.calibration is None or options.get("incremental"):
            return super()._fit(X, y, sample_weight, **options)
        self._check_options()
        check_classification_targets(y)
        if type_of_target(y) == "multilabel-indicator" or not _has_probabilities(self):
            raise GraphoptError(
                "calibration: expected one label for each row and a loss of probabilities, found another: leave it out"
            )
        rows = [X, np.asarray(y), *([] if sample_weight is None else [np.asarray(sample_weight)])]
        parts = train_test_split(*rows, test_size=self.calibration, random_state=self.random_state, stratify=rows[1])
        train, held_out = parts[::2], parts[1::2]
        super()._fit(train[0], train[1], *(train[2:] or [None]), **options)
        try:
            self._temperature = passes.Temperature.of(
                self.predict_proba(held_out[0]), self._encoded(held_out[1])[:, 0], *held_out[2:]
            )
        except GraphoptError as error:
            warnings.warn(f"calibration: probabilities stay as they are: {error}", stacklevel=3)
        self.log_temperature_ = self._temperature.log_temperature
        return self

    def _trained(self, output: str, dtype: str) -> onnx.ModelProto:
        proto = super()._trained(output, dtype)
        if not self._temperature.log_temperature:
            return proto
        model = normal_form(proto)
        self._temperature.apply(model)
        return ir.to_proto(model)

    def partial_fit(
        self, X: object, y: object, classes: npt.ArrayLike | None = None, sample_weight: object = None
    ) -> OnnxClassifier:
        """Train for one more epoch, and return the estimator. The first call needs all `classes`."""
        if classes is None and self._structure is None:
            raise GraphoptError("partial_fit: expected classes in the first call, found None: list all labels")
        if not (classes is None or self._structure is None or np.array_equal(np.unique(classes), self.classes_)):
            raise GraphoptError(f"partial_fit: expected classes {self.classes_}, as before, found {classes}")
        return self._fit(X, y, sample_weight, incremental=True, classes=classes)

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: object) -> np.ndarray:
        """Return the probabilities of the labels, in columns."""
        output = self._output(self._validated(X))
        result = probabilities_of(dict(self._trained_structure.steps)["loss"], output).reshape(len(output), -1)
        if len(self.classes_) == 1:
            return np.ones_like(result[:, :1])
        return self._temperature.of_probabilities(result) if self._temperature.log_temperature else result

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: object) -> np.ndarray:
        """Return the logarithms of the probabilities of the labels, in columns."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = self.calibration is None
        return tags

    def _take_targets(self, fitted: MLPClassifier | MLPRegressor) -> None:
        self._multilabel = fitted.n_outputs_ > 1 and fitted.out_activation_ == "logistic"

    def _give_targets(self, fitted: MLPClassifier | MLPRegressor) -> None:
        several = np.eye(len(self.classes_), dtype=int)
        fitted._label_binarizer = LabelBinarizer().fit(several if self._multilabel else self.classes_)

    def _labels(self) -> np.ndarray | None:
        return None if self._multilabel else self.classes_

    def _learn_targets(self, y: np.ndarray, classes: npt.ArrayLike | None) -> None:
        kind = type_of_target(y)
        check_classification_targets(y)
        if kind == "multiclass-multioutput":
            raise GraphoptError("y: expected one label per row, or columns of 0 and 1, found columns of labels")
        self._multilabel = kind == "multilabel-indicator"
        self.classes_ = np.arange(y.shape[1]) if self._multilabel else np.unique(y if classes is None else classes)
        count = len(self.classes_)
        if count == 1:
            warnings.warn(
                f"y: expected two labels or more, found {self.classes_[0]} alone: predict returns it for all rows",
                stacklevel=4,
            )
        self.n_outputs_ = count if self._multilabel or count > 2 else 1
        interface = self._interface
        if interface is None:
            self.out_activation_ = "logistic" if self._multilabel or count < 3 else "softmax"
        elif interface.outputs is not None:
            if interface.outputs != count and (interface.outputs, self.n_outputs_) != (1, 1):
                raise GraphoptError(
                    f"model: expected an output for each of {count} labels, found {interface.outputs} outputs: change "
                    f"the model's last layer"
                )
            self.n_outputs_ = interface.outputs

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
        labels, known = labels_of(self._running().inputs[TARGET]), self._metric()
        assert labels is not None and known is not None
        predicted = known[1].predicted(output)
        if self._multilabel:
            return (predicted == labels.high).astype(int)
        codes = predicted if labels.several else predicted == labels.high
        return self.classes_[np.minimum(codes.reshape(len(output)).astype(int), len(self.classes_) - 1)]

    def _loss(self) -> object:
        if isinstance(self.loss, str):
            raise GraphoptError(
                f"loss: expected a loss pass, or None for that of MLPClassifier, found {self.loss!r}: a classifier has "
                f"no other loss by name"
            )
        if self.loss is not None:
            return self.loss
        computed_by = None if self._interface is None else self._interface.op_type
        if self._multilabel or self.n_outputs_ == 1:
            return LogLoss(from_logits=computed_by not in (None, "Sigmoid"))
        return passes.CrossEntropy(from_logits=computed_by not in (None, "Softmax"))

    def _weights(self, y: np.ndarray, sample_weight: object, *, incremental: bool) -> np.ndarray | None:
        weights = super()._weights(y, sample_weight, incremental=incremental)
        if self.class_weight is None:
            return weights
        if incremental and self.class_weight == "balanced":
            raise GraphoptError(
                "class_weight: expected a dictionary for partial_fit, found 'balanced', which needs all rows"
            )
        of_classes: np.ndarray = compute_sample_weight(self.class_weight, y)
        return of_classes if weights is None else of_classes * weights


@dataclass(kw_only=True, eq=False, repr=False)
class OnnxRegressor(RegressorMixin, Fitting):  # type: ignore[misc]
    """Train a perceptron, or any ONNX model, as a regressor of scikit-learn.

    Targets are numbers, or rows of numbers. `loss` is `squared_error`, the default, `poisson`, or a loss pass.

    Its attributes are those of `OnnxClassifier` but `classes_`. The scores of held-out rows are R2.

    Raises:
        GraphoptError: an option or the model is not valid, or the model does not fit the data.

    >>> X = numpy.linspace(-1, 1, 100)[:, None]
    >>> regressor = graphopt.OnnxRegressor(hidden_layer_sizes=(50,), learning_rate_init=0.05, random_state=0)
    >>> regressor.fit(X, X[:, 0] ** 2).score(X, X[:, 0] ** 2) > 0.95
    True
    """

    numeric = True
    _network, _output_name = MLPRegressor, "y"
    _score_of = staticmethod(r2_score)
    _row = cast("tuple[int, ...]", ())  # the shape of a row of the targets

    def partial_fit(self, X: object, y: object, sample_weight: object = None) -> OnnxRegressor:
        """Train for one more epoch, and return the estimator."""
        return self._fit(X, y, sample_weight, incremental=True)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _take_targets(self, fitted: MLPClassifier | MLPRegressor) -> None:
        self._row = () if fitted.n_outputs_ == 1 else (fitted.n_outputs_,)

    def _give_targets(self, fitted: MLPClassifier | MLPRegressor) -> None:
        """Do nothing: a regressor of scikit-learn takes the targets as they are."""

    def _learn_targets(self, y: np.ndarray, classes: npt.ArrayLike | None) -> None:
        y = self._columns(y)
        self._row = y.shape[1:]
        self.n_outputs_ = int(np.prod(self._row))
        if self._interface is None:
            self.out_activation_ = "exp" if self.loss == "poisson" else "identity"

    def _columns(self, y: np.ndarray) -> np.ndarray:
        if y.dtype.kind in "US":
            raise GraphoptError(TEXT_TARGET)
        return column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        y = self._columns(y)
        if y.shape[1:] != self._row:
            raise GraphoptError(f"y: expected rows of shape {list(self._row)}, as before, found {list(y.shape[1:])}")
        return y.reshape(len(y), -1)

    def _decoded(self, output: np.ndarray) -> np.ndarray:
        return output.reshape(len(output), *self._row)

    def _loss(self) -> Any:
        losses = {"squared_error": SquaredError, "poisson": PoissonDeviance}
        if isinstance(self.loss, str) and self.loss not in losses:
            raise GraphoptError(unknown("loss", self.loss, losses))
        return losses[self.loss or "squared_error"]() if isinstance(self.loss, str | None) else self.loss

    def _shown_loss(self, values: Record) -> float:
        """Return a squared error as the mean over outputs, as scikit-learn does, which trains on their sum."""
        loss = super()._shown_loss(values)
        if self.loss not in (None, "squared_error"):
            return loss
        data_loss = float(values.get("data_loss", loss))
        return loss - data_loss + data_loss / self.n_outputs_
