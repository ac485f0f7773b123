"""Define scikit-learn estimators with `partial_fit`, exported by skl2onnx."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from comparison import Batch, Case, Model, Training
from skl2onnx import to_onnx
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

import passes

FEATURES = 6
HALF_SQUARES = passes.Elastic(0.0, 0.5)  # scikit-learn's squared error is half the square


@dataclass(frozen=True)
class ScikitLearnCase(Case):
    """Describe an estimator with `partial_fit`.

    Args:
        classes: the number of classes; 0 for a regression.
        scaler: the transformer before the estimator; it is fitted once.
        batch: the number of rows of a batch; linear estimators take one step per row.
    """

    build: Callable[[], Any]
    classes: int = field(default=0, kw_only=True)
    scaler: Any = field(default=None, kw_only=True)
    batch: int = field(default=8, kw_only=True)

    exporters = ("skl2onnx",)

    def model(self, exporter: str) -> ScikitLearnModel:
        first = self.draw(24, 0)
        scaler = self.scaler and self.scaler.fit(first.inputs["X"])
        model = ScikitLearnModel(self, self.build(), scaler)
        model.fit(model.estimator, first)
        random = np.random.default_rng(0)
        for weight in model.weights(model.estimator).values():
            weight += random.normal(0, 0.05, weight.shape)
        if hasattr(model.estimator, "_optimizer"):
            del model.estimator._optimizer  # its moments; the next batch creates a new one
        return model

    def draw(self, rows: int, seed: int) -> Batch:
        random = np.random.default_rng(seed)
        x = random.normal(0, 1, (rows, FEATURES)).astype(np.float32)
        if self.classes:
            return Batch({"X": x}, random.integers(0, self.classes, rows))
        return Batch({"X": x}, random.normal(0, 1, (rows, 1)).astype(np.float32))


@dataclass(frozen=True)
class ScikitLearnModel(Model):
    case: ScikitLearnCase
    estimator: Any
    scaler: Any

    def batches(self, count: int) -> list[Batch]:
        return [self.case.draw(self.case.batch, seed) for seed in range(1, count + 1)]

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: weight.astype(np.float32) for name, weight in self.weights(self.estimator).items()}

    def export(self) -> onnx.ModelProto:
        whole = make_pipeline(self.scaler, self.estimator) if self.scaler else self.estimator
        options = {id(self.estimator): {"zipmap": False}} if self.case.classes else None
        return to_onnx(whole, self.case.draw(1, 0).inputs["X"], options=options, target_opset={"": 21, "ai.onnx.ml": 1})

    def train(self, optimizer: Any, batches: Sequence[Batch], double: bool) -> Training:
        estimator = copy.deepcopy(self.estimator)
        if double:
            vars(estimator).update({name: doubled(value) for name, value in vars(estimator).items()})
        losses = [self.fit(estimator, batch, double) for batch in batches[:-1]]
        trained = self.weights(estimator)
        predictions = self.predict(estimator, self.features(batches[-1], double))
        return Training(losses, trained, predictions, {name: weight.size for name, weight in trained.items()})

    def fit(self, estimator: Any, batch: Batch, double: bool = False) -> float:
        """Take a step and return the loss before it."""
        x, y = self.features(batch, double), batch.target
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        classes = {"classes": np.arange(self.case.classes)} if self.case.classes else {}
        before = self.predict(estimator, x) if hasattr(estimator, "coef_") else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator.partial_fit(x, y, **classes)
        if before is None:
            return float(getattr(estimator, "loss_", 0.0))
        if self.case.classes:
            return float(-np.log(before[np.arange(len(y)), y]).mean())
        return float(((before[:, 0] - y) ** 2).mean() / 2)

    def features(self, batch: Batch, double: bool) -> np.ndarray:
        x = batch.inputs["X"].astype(np.float64 if double else np.float32)
        return self.scaler.transform(x) if self.scaler else x

    def predict(self, estimator: Any, x: np.ndarray) -> np.ndarray:
        if self.case.classes:
            return np.asarray(estimator.predict_proba(x))
        return np.asarray(estimator.predict(x)).reshape(len(x), -1)

    @staticmethod
    def weights(estimator: Any) -> dict[str, np.ndarray]:
        """Return the trained arrays, without copying."""
        if hasattr(estimator, "coefs_"):
            both = {"coefs_": estimator.coefs_, "intercepts_": estimator.intercepts_}
            return {f"{name}.{i}": x for name, arrays in both.items() for i, x in enumerate(arrays)}
        return {"coef_": estimator.coef_, "intercept_": estimator.intercept_}


def doubled(value: Any) -> Any:
    """Return an array of float32, or a list of them, in float64."""
    if isinstance(value, list):
        return [doubled(one) for one in value]
    return value.astype(np.float64) if getattr(value, "dtype", None) == np.float32 else value


def perceptron(kind: type, **options: Any) -> Callable[[], Any]:
    fixed = {"alpha": 0, "shuffle": False, "random_state": 0, "nesterovs_momentum": False, "batch_size": 24}
    return lambda: kind(**{"solver": "sgd", "hidden_layer_sizes": (7,), **fixed, "learning_rate_init": 0.01, **options})


def linear(kind: type, loss: str) -> Callable[[], Any]:
    return lambda: kind(loss=loss, penalty=None, learning_rate="constant", eta0=0.01, shuffle=False, random_state=0)


PLAIN, ADAM = {"optimizers": (passes.SGD(0.01),)}, {"optimizers": (passes.Adam(0.01),)}
MOMENTUM = {"optimizers": (passes.SGD(0.01, momentum=0.9),)}
REGRESSION = {"loss": HALF_SQUARES}
CLASSES = {"loss": passes.CrossEntropy(from_logits=False)}
ROWS = {"batch": 1, **PLAIN}

CASES = {
    "MLPRegressor, relu": ScikitLearnCase(perceptron(MLPRegressor), **MOMENTUM, **REGRESSION),
    "MLPRegressor, tanh, Adam": ScikitLearnCase(
        perceptron(MLPRegressor, activation="tanh", solver="adam"), **ADAM, **REGRESSION
    ),
    "MLPRegressor, logistic, two layers": ScikitLearnCase(
        perceptron(MLPRegressor, activation="logistic", hidden_layer_sizes=(7, 5)), **MOMENTUM, **REGRESSION
    ),
    "MLPRegressor, identity": ScikitLearnCase(
        perceptron(MLPRegressor, activation="identity"), **MOMENTUM, **REGRESSION
    ),
    "MLPRegressor, no momentum": ScikitLearnCase(perceptron(MLPRegressor, momentum=0), **PLAIN, **REGRESSION),
    "MLPRegressor after StandardScaler": ScikitLearnCase(
        perceptron(MLPRegressor), scaler=StandardScaler(), **MOMENTUM, **REGRESSION
    ),
    "MLPClassifier, two classes": ScikitLearnCase(perceptron(MLPClassifier), classes=2, **MOMENTUM, **CLASSES),
    "MLPClassifier, three classes": ScikitLearnCase(perceptron(MLPClassifier), classes=3, **MOMENTUM, **CLASSES),
    "MLPClassifier after MinMaxScaler, Adam": ScikitLearnCase(
        perceptron(MLPClassifier, solver="adam"), classes=3, scaler=MinMaxScaler(), **ADAM, **CLASSES
    ),
    "SGDRegressor": ScikitLearnCase(linear(SGDRegressor, "squared_error"), **REGRESSION, **ROWS),
    "SGDClassifier, log loss": ScikitLearnCase(linear(SGDClassifier, "log_loss"), classes=2, **CLASSES, **ROWS),
}  # fmt: skip
