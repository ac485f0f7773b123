"""Prediction sets and intervals of a file equal MAPIE's, entry by entry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import StratifiedShuffleSplit

mapie = pytest.importorskip("mapie")
aps = pytest.importorskip("mapie.conformity_scores.sets.aps")

from mapie.classification import SplitConformalClassifier  # noqa: E402
from mapie.conformity_scores.sets import raps  # noqa: E402
from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor  # noqa: E402

import graphopt  # noqa: E402
import passes  # noqa: E402
from graphopt import models  # noqa: E402


class Network(ClassifierMixin, BaseEstimator):
    def __init__(self, file: Any = None) -> None:
        self.file, self.classes_, self.is_fitted_ = file, np.arange(10), True

    def fit(self, x: np.ndarray, y: np.ndarray) -> Network:
        return self

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        return graphopt.run(self.file, {"x": x.reshape(-1, 1, 8, 8).astype(np.float32)})["y"].astype(np.float64)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.predict_proba(x).argmax(1)


class Column(RegressorMixin, BaseEstimator):
    def __init__(self, column: int = 0) -> None:
        self.column, self.is_fitted_ = column, True

    def fit(self, x: np.ndarray, y: np.ndarray) -> Column:
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x[:, self.column]


@pytest.fixture(scope="module", params=["mlp", "cnn"])
def trained(request: pytest.FixtureRequest) -> Any:
    """Return a network of probabilities after a few epochs on 700 digits."""
    network = getattr(models, request.param)((1, 8, 8), 10)
    step = graphopt.compile(network, loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3))
    executor = graphopt.Executor(step)
    digits = graphopt.data.digits().arrays
    rows = {name: x[:700] for name, x in digits.items()}
    graphopt.fit(executor, rows, epochs=4, validation=None, verbose=False)
    file = executor.trained()
    file.graph.node.add(op_type="Softmax", input=["y"], output=["p"])
    file.graph.output[0].name = "p"
    for node in file.graph.node:
        node.output[:] = [{"y": "z", "p": "y"}.get(name, name) for name in node.output]
        node.input[:] = ["z" if name == "y" else name for name in node.input]
    file.graph.output[0].name = "y"
    file.metadata_props.clear()
    return file, digits["x"], digits["target"]


class Zeros:
    def uniform(self, size: Any) -> np.ndarray:
        return np.zeros(size)


@pytest.mark.parametrize("alpha", [0.1, 0.05])
@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_sets_are_mapies(trained: Any, score: str, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    file, x, y = trained
    monkeypatch.setattr(aps, "check_random_state", lambda seed: Zeros())  # scores without random numbers
    flat = x.reshape(len(x), -1)
    own = raps.RAPSConformityScore() if score == "raps" else score
    peer = SplitConformalClassifier(
        Network(file), confidence_level=1 - alpha, prefit=True, conformity_score=own, random_state=0
    )
    peer.conformalize(flat[700:1200], y[700:1200])
    options = {} if score == "lac" else {"conformity_score_params": {"include_last_label": False}}
    expected = peer.predict_set(flat[1200:], **options)[1][:, :, 0]
    sure, rows = passes.PredictionSet(alpha, score), np.arange(700, 1200)
    if score == "raps":  # MAPIE chooses the penalty and the rank by rows of their own
        kept, _ = next(StratifiedShuffleSplit(1, test_size=own.size_raps, random_state=0).split(rows, y[rows]))
        rank, rows = int(own.k_star[0]), rows[kept]
        sure = passes.PredictionSet(alpha, score, penalty=float(own.lambda_star), rank=rank)
    found = graphopt.run(graphopt.calibrate(file, (x[rows], y[rows]), sure), {"x": x[1200:]})["set"]
    if score != "lac":  # MAPIE leaves no set empty
        best = Network(file).predict(flat[1200:])[:, None] == np.arange(10)
        found = found | (best & ~found.any(1, keepdims=True))
    assert (found != expected).sum() == 0, (found != expected).sum()


@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.2])
def test_intervals_are_mapies(alpha: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 1)).astype(np.float32)
    target = (2 * x[:, 0] + rng.standard_normal(400)).astype(np.float32)
    line = models.linear((1,), 1)

    class Line(Column):
        def predict(self, x: np.ndarray) -> np.ndarray:
            return graphopt.run(line, {"x": x.astype(np.float32)})["y"][:, 0].astype(np.float64)

    sure = graphopt.calibrate(line, (x[:200], target[:200, None]), passes.PredictionInterval(alpha))
    found = graphopt.run(sure, {"x": x[200:]})
    peer = SplitConformalRegressor(Line(), confidence_level=1 - alpha, prefit=True)
    expected = peer.conformalize(x[:200], target[:200]).predict_interval(x[200:])[1][:, :, 0]
    np.testing.assert_allclose(found["lower"][:, 0], expected[:, 0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(found["upper"][:, 0], expected[:, 1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("alpha", [0.1, 0.2])
def test_conformalized_quantiles_are_mapies(alpha: float) -> None:
    import onnx

    rng = np.random.default_rng(0)
    x = np.sort(rng.standard_normal((400, 2)), axis=1).astype(np.float32)
    target = rng.standard_normal(400)
    text = "g (float[N,2] x) => (float[N,2] y) { y = Identity(x) }"
    file = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 21]> {text}')
    sure = graphopt.calibrate(file, (x[:200], target[:200]), passes.PredictionInterval(alpha, "cqr"))
    found = graphopt.run(sure, {"x": x[200:]})
    peer = ConformalizedQuantileRegressor([Column(0), Column(1), Column(0)], confidence_level=1 - alpha, prefit=True)
    peer.conformalize(x[:200].astype(np.float64), target[:200])
    expected = peer.predict_interval(x[200:].astype(np.float64), symmetric_correction=True)[1][:, :, 0]
    np.testing.assert_allclose(found["lower"][:, 0], expected[:, 0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(found["upper"][:, 0], expected[:, 1], rtol=0, atol=2e-6)
