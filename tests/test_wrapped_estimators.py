"""Calibrated classifiers and regressors of transformed targets are one file, equal to scikit-learn's predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    PowerTransformer,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
)

import graphopt
from graphopt import GraphoptError

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"age": RNG.uniform(18, 80, 150), "city": RNG.choice(["Bern", "Oslo", "Rome"], 150)})
NEW = pd.DataFrame({"age": RNG.uniform(10, 90, 200), "city": RNG.choice(["Bern", "Oslo", "Paris"], 200)})
SCORE = FRAME["age"] + 20 * (FRAME["city"] == "Oslo") + RNG.normal(0, 8, 150)
TARGETS = {"two": np.where(SCORE > 55, "yes", "no"), "three": np.digitize(SCORE, [40, 65])}
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:Found unknown categories"),
]


def pipeline(last: Any) -> Any:
    encoder = make_column_transformer((OneHotEncoder(handle_unknown="ignore"), ["city"]), (StandardScaler(), ["age"]))
    return make_pipeline(encoder, last)


def classifier() -> Any:
    return graphopt.OnnxClassifier(hidden_layer_sizes=(4,), max_iter=10, random_state=0, batch_size=50)


def regressor() -> Any:
    return graphopt.OnnxRegressor(
        hidden_layer_sizes=(4,), max_iter=10, random_state=0, batch_size=50, learning_rate_init=0.05
    )


def outputs(fitted: Any, dtype: str) -> list[np.ndarray]:
    model = graphopt.to_onnx(fitted, FRAME, dtype)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {"age": NEW[["age"]].to_numpy(dtype), "city": NEW[["city"]].to_numpy(object)})


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("ensemble", [True, False])
@pytest.mark.parametrize("method", ["sigmoid", "isotonic", "temperature"])
def test_a_calibrated_pipeline(method: str, ensemble: bool, target: str) -> None:
    y = TARGETS[target]
    fitted = CalibratedClassifierCV(pipeline(classifier()), method=method, ensemble=ensemble, cv=2).fit(FRAME, y)
    label, probabilities = outputs(fitted, "float64")
    np.testing.assert_allclose(probabilities, fitted.predict_proba(NEW), rtol=1e-9, atol=1e-12)
    assert label.tolist() == fitted.predict(NEW).tolist()
    label, probabilities = outputs(fitted, "float32")
    tolerance = 1e-3 if method == "isotonic" else 1e-6  # whose steps are steep
    np.testing.assert_allclose(probabilities, fitted.predict_proba(NEW.astype({"age": "float32"})), atol=tolerance)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind", ["in a pipeline", "frozen", "in a search", "another classifier", "another classifier of three"]
)
def test_where_a_calibration_stands(kind: str) -> None:
    y = TARGETS["three" if "three" in kind else "two"]
    calibrated = CalibratedClassifierCV(pipeline(classifier()), cv=2)
    if kind == "in a pipeline":
        fitted = pipeline(CalibratedClassifierCV(classifier(), cv=2)).fit(FRAME, y)
    elif kind == "frozen":
        fitted = CalibratedClassifierCV(FrozenEstimator(pipeline(classifier()).fit(FRAME, y)), method="isotonic")
        fitted.fit(FRAME, y)
    elif kind == "in a search":
        fitted = GridSearchCV(calibrated, {"method": ["sigmoid"]}, cv=2).fit(FRAME, y)
    else:
        fitted = CalibratedClassifierCV(pipeline(LogisticRegression()), method="isotonic", cv=2).fit(FRAME, y)
    label, probabilities = outputs(fitted, "float64")
    np.testing.assert_allclose(probabilities, fitted.predict_proba(NEW), rtol=1e-7, atol=1e-7)
    assert label.tolist() == fitted.predict(NEW).tolist()


INVERSES: dict[str, dict[str, Any]] = {
    "standard": {"transformer": StandardScaler()},
    "standard without mean": {"transformer": StandardScaler(with_mean=False)},
    "robust without centre": {"transformer": RobustScaler(with_centering=False)},
    "standard without deviation": {"transformer": StandardScaler(with_std=False)},
    "minmax": {"transformer": MinMaxScaler((-1, 2))},
    "robust": {"transformer": RobustScaler()},
    "maxabs": {"transformer": MaxAbsScaler()},
    "yeo-johnson": {"transformer": PowerTransformer()},
    "box-cox": {"transformer": PowerTransformer("box-cox", standardize=False)},
    "functions": {"func": np.log1p, "inverse_func": np.expm1},
    "two steps": {
        "transformer": make_pipeline(FunctionTransformer(np.log, np.exp, check_inverse=False), StandardScaler())
    },
    "none": {},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("name", INVERSES)
def test_a_regressor_of_a_transformed_target(name: str, columns: int) -> None:
    y = np.exp(SCORE.to_numpy() / 25) + 1
    y = y if columns == 1 else np.stack([y, 100 - y], axis=1)
    fitted = TransformedTargetRegressor(pipeline(regressor()), **INVERSES[name]).fit(FRAME, y)
    expected = fitted.predict(NEW)
    for dtype, tolerance in (("float64", 1e-9), ("float32", 1e-4)):
        (predicted,) = outputs(fitted, dtype)
        np.testing.assert_allclose(predicted, expected.reshape(predicted.shape), rtol=tolerance, atol=tolerance)
    assert predicted.shape == (len(NEW), columns)


def test_a_transformed_target_in_a_pipeline() -> None:
    y = SCORE.to_numpy()
    fitted = pipeline(TransformedTargetRegressor(regressor(), transformer=StandardScaler())).fit(FRAME, y)
    (predicted,) = outputs(fitted, "float64")
    np.testing.assert_allclose(predicted[:, 0], fitted.predict(NEW), rtol=1e-9)


class Namesake(StandardScaler):
    """A scaler with the name of scikit-learn's, whose inverse is another."""

    def inverse_transform(self, X: Any, copy: Any = None) -> Any:
        return 2 * super().inverse_transform(X, copy)


Namesake.__name__ = "StandardScaler"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"transformer": Namesake(), "check_inverse": False},
            r"found test_wrapped\w+\.StandardScaler: export",
        ),
        (
            {"func": np.log10, "inverse_func": lambda x: 10**x},
            "inverse_func=.*found '<lambda>', which no operator",
        ),
        (
            {"transformer": QuantileTransformer(n_quantiles=9)},
            r"found sklearn[\w.]+\.QuantileTransformer: export the regressor",
        ),
    ],
)
def test_inverses_that_no_operator_computes(options: Any, said: str) -> None:
    fitted = TransformedTargetRegressor(pipeline(regressor()), **options).fit(FRAME, SCORE.to_numpy())
    with pytest.raises(GraphoptError, match=said):
        graphopt.to_onnx(fitted, FRAME)
    assert graphopt.to_onnx(fitted.regressor_, FRAME).graph.output[0].name == "variable"
