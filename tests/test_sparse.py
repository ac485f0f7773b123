"""Sparse features of SciPy train as the dense ones, batch by batch, wherever scikit-learn's networks take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
from builders import mlp
from sklearn.datasets import load_digits
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline

import graphopt
import passes
from graphopt import GraphoptError, models
from graphopt.data.dataset import SparseRows

X, Y = load_digits(return_X_y=True)
X, Y = np.where(X > 4, X, 0.0)[:300] / 16, Y[:300]
FORMATS = [
    getattr(scipy.sparse, f"{form}_{kind}")
    for form in ("csr", "csc", "coo", "bsr", "dia", "dok", "lil")
    for kind in ("array", "matrix")
]
OPTIONS = {"max_iter": 4, "random_state": 0}
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if many rows are made dense at a time."""
    read = SparseRows.read

    def checked(self: SparseRows, rows: np.ndarray) -> np.ndarray:
        assert len(rows) <= 64
        return read(self, rows)

    monkeypatch.setattr(SparseRows, "read", checked)
    monkeypatch.setattr("graphopt.training.estimator.CHUNK", 64)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_classifier_trains_as_on_dense_rows(kind: Any, few_rows: None) -> None:
    options = {**OPTIONS, "early_stopping": True, "batch_size": 50}
    sparse, dense = (graphopt.OnnxClassifier(**options).fit(x, Y) for x in (kind(X), X))
    np.testing.assert_allclose(sparse.loss_curve_, dense.loss_curve_, rtol=1e-12)
    np.testing.assert_allclose(sparse.predict_proba(kind(X)), dense.predict_proba(X), rtol=1e-9)
    assert sparse.score(kind(X), Y) == dense.score(X, Y)
    theirs = MLPClassifier(**options).fit(scipy.sparse.csr_array(X), Y)
    np.testing.assert_allclose(sparse.loss_curve_, theirs.loss_curve_, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_partial_fit_and_regressions(dtype: str, few_rows: None) -> None:
    x = (16 * X).astype(dtype)
    options: dict[str, Any] = {"batch_size": 32, "random_state": 0, "solver": "sgd", "learning_rate_init": 1e-5}
    regressors = [graphopt.OnnxRegressor(max_iter=5, **options) for _ in "ab"]
    for given, regressor in zip((scipy.sparse.csc_matrix(x), x), regressors, strict=True):
        regressor.fit(given, Y).partial_fit(given, Y, sample_weight=np.linspace(0, 1, len(Y)))
    np.testing.assert_array_equal(regressors[0].loss_curve_, regressors[1].loss_curve_)


def test_a_model_of_one_s_own_and_a_trainer(few_rows: None) -> None:
    x = X.astype(np.float32)
    model = models.mlp((1, 8, 8), 10, hidden=[8])
    own = [graphopt.OnnxClassifier(model, batch_size=50, **OPTIONS) for _ in "ab"]
    np.testing.assert_array_equal(
        own[0].fit(scipy.sparse.csr_array(x), Y).predict_proba(scipy.sparse.coo_array(x)),
        own[1].fit(x.reshape(-1, 1, 8, 8), Y).predict_proba(x.reshape(-1, 1, 8, 8)),
    )
    flat = models.mlp((64,), 10, hidden=[8])
    trainers = [graphopt.Trainer(flat, loss=passes.CrossEntropy(), max_iter=2, batch_size=20) for _ in "ab"]
    trainers[0].fit(scipy.sparse.csr_array(x), Y, X_val=scipy.sparse.csr_array(x[:60]), y_val=Y[:60])
    trainers[1].fit(x, Y, X_val=x[:60], y_val=Y[:60])
    assert trainers[0].train_losses_ == trainers[1].train_losses_
    assert trainers[0].validation_losses_ == trainers[1].validation_losses_
    np.testing.assert_array_equal(trainers[0].predict(scipy.sparse.csr_array(x)), trainers[1].predict(x))


@pytest.mark.parametrize("given", ["tuple", "names"])
def test_fit_and_predict(given: str) -> None:
    x, sparse = X.astype(np.float32), scipy.sparse.csr_array(X.astype(np.float32))
    model, found = models.mlp((64,), 10, hidden=[8]), []
    for rows in (x, sparse):
        executor = graphopt.Executor(
            graphopt.compile(model, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1)), native=False
        )
        data = (rows, Y) if given == "tuple" else {"x": rows, "target": Y}
        records = graphopt.fit(executor, data, epochs=2, verbose=False)
        found.append([records[-1]["loss"], graphopt.predict(executor, rows)["y"]])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_words() -> None:
    texts = ["good day", "bad day", "good night", "bad night"] * 10
    pipeline = make_pipeline(
        TfidfVectorizer(), graphopt.OnnxClassifier(max_iter=60, random_state=0, learning_rate_init=0.05)
    )
    assert pipeline.fit(texts, [1, 0] * 20).score(texts, [1, 0] * 20) == 1.0


def test_a_wrong_width_is_one_line() -> None:
    with pytest.raises(ValueError, match="X has 3 features, but OnnxClassifier is expecting 64"):
        graphopt.OnnxClassifier(**OPTIONS).fit(scipy.sparse.csr_array(X), Y).predict(scipy.sparse.csr_array(X[:, :3]))
    with pytest.raises(GraphoptError, match="data 'x': expected"):
        graphopt.fit(
            graphopt.Executor(graphopt.compile(mlp((4, 3)), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))),
            (scipy.sparse.csr_array(X), Y),
        )
