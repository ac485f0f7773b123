"""The estimators train as scikit-learn's networks do, to the last digits, and pass scikit-learn's checks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import joblib
import messages
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from skl2onnx import to_onnx
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_iris,
    make_multilabel_classification,
)
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, OneHotEncoder, StandardScaler, scale
from sklearn.utils.estimator_checks import parametrize_with_checks
from twins import descended

import graphopt
import passes
from graphopt import models

OPTIONS: dict[str, Any] = {"max_iter": 8, "random_state": 0}
SOLVERS = [
    {"solver": "adam", "learning_rate_init": 0.01},
    {"solver": "adam", "alpha": 0.1, "beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-3},
    {"solver": "sgd", "learning_rate_init": 0.01},
    {"solver": "sgd", "momentum": 0.5, "nesterovs_momentum": False, "learning_rate_init": 0.01},
    {"solver": "sgd", "momentum": 0.0, "learning_rate_init": 0.1},
    {"solver": "sgd", "learning_rate": "invscaling", "learning_rate_init": 0.1},
    {"solver": "sgd", "learning_rate": "adaptive", "n_iter_no_change": 1, "tol": 0.05, "max_iter": 30},
    {"shuffle": False, "batch_size": 37},
    {"activation": "logistic"},
    {"activation": "tanh", "hidden_layer_sizes": (7, 5)},
    {"early_stopping": True, "n_iter_no_change": 2, "max_iter": 20, "learning_rate_init": 0.02},
]
X_IRIS, Y_IRIS = load_iris(return_X_y=True)
X_IRIS = scale(X_IRIS)
X_DIABETES, Y_DIABETES = load_diabetes(return_X_y=True)
Y_DIABETES = scale(Y_DIABETES)

pytestmark = pytest.mark.filterwarnings("ignore:.*(converge|convergence)")


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([graphopt.OnnxClassifier(), graphopt.OnnxRegressor()])
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([graphopt.OnnxClassifier(calibration=0.2)])
@pytest.mark.sample(20)
def test_scikit_learns_checks_of_calibration(estimator: Any, check: Any) -> None:
    if "sample_weight_equivalence" in str(check):
        pytest.skip("repeated rows are held out in another way, as in scikit-learn's CalibratedClassifierCV")
    check(estimator)


# --- The same numbers as scikit-learn's networks ---


def alike(ours: Any, theirs: Any, X: np.ndarray, rtol: float = 1e-6) -> None:
    np.testing.assert_allclose(ours.loss_curve_, theirs.loss_curve_, rtol=rtol)
    assert (ours.n_iter_, ours.t_, ours.n_outputs_) == (theirs.n_iter_, theirs.t_, theirs.n_outputs_)
    assert ours.out_activation_ == theirs.out_activation_
    if ours.early_stopping:
        np.testing.assert_allclose(ours.validation_scores_, theirs.validation_scores_, rtol=rtol)
    else:
        assert ours.best_loss_ == pytest.approx(theirs.best_loss_, rel=rtol)
    weights = [w for pair in zip(theirs.coefs_, theirs.intercepts_, strict=True) for w in pair]
    state = ours._running().parameters
    for w, (name, array) in zip(
        weights, sorted(state.items(), key=lambda one: (one[0][:9], "bias" in one[0])), strict=True
    ):
        np.testing.assert_allclose(array, w, rtol=1e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), rtol=1e-5)


@pytest.mark.parametrize("options", SOLVERS, ids=str)
def test_a_classifier_trains_as_scikit_learns(options: dict[str, Any]) -> None:
    given = {**OPTIONS, **options}
    ours = graphopt.OnnxClassifier(**given).fit(X_IRIS, Y_IRIS)
    theirs = MLPClassifier(**given).fit(X_IRIS, Y_IRIS)
    alike(ours, theirs, X_IRIS)
    np.testing.assert_allclose(ours.predict_proba(X_IRIS), theirs.predict_proba(X_IRIS), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("options", SOLVERS, ids=str)
def test_a_regressor_trains_as_scikit_learns(options: dict[str, Any]) -> None:
    given = {**OPTIONS, **options}
    ours = graphopt.OnnxRegressor(**given).fit(X_DIABETES, Y_DIABETES)
    alike(ours, MLPRegressor(**given).fit(X_DIABETES, Y_DIABETES), X_DIABETES)


def test_a_poisson_loss() -> None:
    y = np.abs(Y_DIABETES).round()
    ours = graphopt.OnnxRegressor(loss="poisson", **OPTIONS).fit(X_DIABETES, y)
    alike(ours, MLPRegressor(loss="poisson", **OPTIONS).fit(X_DIABETES, y), X_DIABETES)


def test_two_classes_and_several_labels() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    X = scale(X)
    names = np.array(["benign", "malign"])[y]
    ours = graphopt.OnnxClassifier(**OPTIONS).fit(X, names)
    theirs = MLPClassifier(**OPTIONS).fit(X, names)
    np.testing.assert_allclose(ours.loss_curve_, theirs.loss_curve_, rtol=1e-6)
    assert (ours.predict(X) == theirs.predict(X)).all() and set(ours.classes_) == set(names)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), rtol=1e-5, atol=1e-9)

    X, y = make_multilabel_classification(random_state=0)
    several = graphopt.OnnxClassifier(**OPTIONS).fit(X, y)
    alike(several, MLPClassifier(**OPTIONS).fit(X, y), X)


def test_several_numbers_per_row() -> None:
    y = np.stack([Y_DIABETES, Y_DIABETES**2], axis=1)
    ours = graphopt.OnnxRegressor(**OPTIONS).fit(X_DIABETES, y)
    alike(ours, MLPRegressor(**OPTIONS).fit(X_DIABETES, y), X_DIABETES)
    assert ours.predict(X_DIABETES).shape == y.shape


def test_float32() -> None:
    X = X_IRIS.astype(np.float32)
    ours = graphopt.OnnxClassifier(**OPTIONS).fit(X, Y_IRIS)
    alike(ours, MLPClassifier(**OPTIONS).fit(X, Y_IRIS), X, rtol=1e-4)
    assert all(array.dtype == np.float32 for array in ours._running().parameters.values())


def test_weights_of_rows_are_scikit_learns() -> None:
    weights = np.random.default_rng(0).integers(0, 4, len(X_IRIS)).astype(float)
    ours = graphopt.OnnxClassifier(**OPTIONS).fit(X_IRIS, Y_IRIS, sample_weight=weights)
    theirs = MLPClassifier(**OPTIONS).fit(X_IRIS, Y_IRIS, sample_weight=weights)
    np.testing.assert_allclose(ours.predict_proba(X_IRIS), theirs.predict_proba(X_IRIS), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("class_weight", ["balanced", {0: 1.0, 1: 5.0, 2: 0.5}])
def test_weights_of_classes_are_weights_of_rows(class_weight: Any) -> None:
    rows = slice(20, None)  # unbalanced
    X, y = X_IRIS[rows], Y_IRIS[rows]
    by_class = graphopt.OnnxClassifier(class_weight=class_weight, **OPTIONS).fit(X, y)
    counts = np.bincount(y)
    weights = len(y) / (3 * counts) if class_weight == "balanced" else np.array([1.0, 5.0, 0.5])
    by_row = graphopt.OnnxClassifier(**OPTIONS).fit(X, y, sample_weight=weights[y])
    np.testing.assert_allclose(by_class.predict_proba(X), by_row.predict_proba(X), rtol=1e-9)


def test_partial_fit_and_warm_start() -> None:
    ours, theirs = graphopt.OnnxClassifier(**OPTIONS), MLPClassifier(**OPTIONS)
    for part in np.array_split(np.random.default_rng(0).permutation(len(X_IRIS)), 4):
        for one in (ours, theirs):
            one.partial_fit(X_IRIS[part], Y_IRIS[part], classes=[0, 1, 2])
    np.testing.assert_allclose(ours.loss_curve_, theirs.loss_curve_, rtol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X_IRIS), theirs.predict_proba(X_IRIS), rtol=1e-5, atol=1e-9)
    warm = [cls(warm_start=True, **OPTIONS) for cls in (graphopt.OnnxClassifier, MLPClassifier)]
    for one in (*warm, *warm):
        one.fit(X_IRIS, Y_IRIS)
    np.testing.assert_allclose(warm[0].loss_curve_, warm[1].loss_curve_, rtol=1e-6)


# --- Continue what scikit-learn has fitted ---


@pytest.mark.parametrize("options", SOLVERS[:6], ids=str)
def test_a_fitted_classifier_continues(options: dict[str, Any]) -> None:
    theirs = MLPClassifier(**{**OPTIONS, **options}).fit(X_IRIS, Y_IRIS)
    ours = graphopt.OnnxClassifier.from_sklearn(theirs)
    np.testing.assert_allclose(ours.predict_proba(X_IRIS), theirs.predict_proba(X_IRIS), rtol=1e-9)
    for _ in range(3):
        ours.partial_fit(X_IRIS, Y_IRIS)
        theirs.partial_fit(X_IRIS, Y_IRIS)
    np.testing.assert_allclose(ours.loss_curve_, theirs.loss_curve_, rtol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X_IRIS), theirs.predict_proba(X_IRIS), rtol=1e-5, atol=1e-9)


def test_a_fitted_regressor_continues() -> None:
    theirs = MLPRegressor(**OPTIONS).fit(X_DIABETES, Y_DIABETES)
    ours = graphopt.OnnxRegressor.from_sklearn(theirs)
    for _ in range(3):
        ours.partial_fit(X_DIABETES, Y_DIABETES)
        theirs.partial_fit(X_DIABETES, Y_DIABETES)
    np.testing.assert_allclose(ours.predict(X_DIABETES), theirs.predict(X_DIABETES), rtol=1e-6)
    with pytest.raises(graphopt.GraphoptError, match="expected a fitted MLPRegressor, found LogisticRegression"):
        graphopt.OnnxRegressor.from_sklearn(LogisticRegression())
    with pytest.raises(NotFittedError):
        graphopt.OnnxRegressor.from_sklearn(MLPRegressor())


def test_a_network_of_lbfgs_continues_with_adam() -> None:
    theirs = MLPClassifier(solver="lbfgs", **OPTIONS).fit(X_IRIS, Y_IRIS)
    ours = graphopt.OnnxClassifier.from_sklearn(theirs, learning_rate_init=1e-3)
    before = ours._running().state
    np.testing.assert_allclose(ours.predict_proba(X_IRIS), theirs.predict_proba(X_IRIS), rtol=1e-9)
    ours.partial_fit(X_IRIS, Y_IRIS)
    assert ours.solver == "adam" and any((before[k] != x).any() for k, x in ours._running().state.items())


# --- The way back ---


@pytest.mark.parametrize("options", SOLVERS, ids=str)
def test_a_network_of_scikit_learn_continues_ours(options: dict[str, Any]) -> None:
    ours = graphopt.OnnxClassifier(**{**OPTIONS, **options}).fit(X_IRIS, Y_IRIS)
    theirs = ours.to_sklearn()
    reference = MLPClassifier(**{**OPTIONS, **options}).fit(X_IRIS, Y_IRIS)
    assert {name for name in vars(reference) if name.endswith("_")} == {
        name for name in vars(theirs) if name.endswith("_")
    }
    np.testing.assert_allclose(theirs.predict_proba(X_IRIS), ours.predict_proba(X_IRIS), rtol=1e-9)
    assert (theirs.predict(X_IRIS) == ours.predict(X_IRIS)).all() and ours.n_layers_ == theirs.n_layers_
    for kind in ("coefs_", "intercepts_"):
        for w, expected in zip(getattr(ours, kind), getattr(reference, kind), strict=True):
            np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-7)
    again = graphopt.from_sklearn(theirs)
    np.testing.assert_array_equal(again.predict_proba(X_IRIS), ours.predict_proba(X_IRIS))
    if not ours.early_stopping:
        for _ in range(2):
            ours.partial_fit(X_IRIS, Y_IRIS)
            theirs.partial_fit(X_IRIS, Y_IRIS)
        np.testing.assert_allclose(theirs.loss_curve_, ours.loss_curve_, rtol=1e-6)
    theirs.set_params(warm_start=True).fit(X_IRIS, Y_IRIS)


@pytest.mark.parametrize("y", [Y_DIABETES, np.stack([Y_DIABETES, Y_DIABETES**2], axis=1)], ids=["one", "two"])
def test_a_regressor_goes_back(y: np.ndarray) -> None:
    ours = graphopt.OnnxRegressor(solver="sgd", **OPTIONS).fit(X_DIABETES, y)
    theirs = ours.to_sklearn()
    np.testing.assert_allclose(theirs.predict(X_DIABETES), ours.predict(X_DIABETES), rtol=1e-9)
    for one in (ours, theirs):
        one.partial_fit(X_DIABETES, y)
    np.testing.assert_allclose(theirs.predict(X_DIABETES), ours.predict(X_DIABETES), rtol=1e-6)


@pytest.mark.parametrize(
    "y", [np.array(["no", "yes"])[Y_IRIS % 2], np.eye(3, dtype=int)[Y_IRIS]], ids=["two", "several"]
)
def test_labels_go_back(y: np.ndarray) -> None:
    ours = graphopt.OnnxClassifier(**OPTIONS).fit(X_IRIS, y)
    theirs = ours.to_sklearn()
    assert (theirs.predict(X_IRIS) == ours.predict(X_IRIS)).all()
    for one in (ours, theirs):
        one.partial_fit(X_IRIS, y)
    np.testing.assert_allclose(theirs.loss_curve_, ours.loss_curve_)


def test_a_model_of_one_s_own_has_no_layers() -> None:
    ours = graphopt.OnnxClassifier(models.mlp((4,), 3), **OPTIONS)
    assert not hasattr(ours, "coefs_") and not hasattr(graphopt.OnnxClassifier(), "n_layers_")
    ours.fit(X_IRIS.astype(np.float32), Y_IRIS)
    with pytest.raises(AttributeError, match=r"^coefs_: expected a perceptron made from hidden_layer_sizes"):
        _ = ours.coefs_
    with pytest.raises(graphopt.GraphoptError, match=r"^to_sklearn: expected a perceptron"):
        ours.to_sklearn()
    with pytest.raises(NotFittedError):
        graphopt.OnnxClassifier().to_sklearn()
    with pytest.warns(UserWarning, match="the loss expects logits"):
        logits = graphopt.OnnxClassifier(loss=passes.CrossEntropy(), **OPTIONS).fit(X_IRIS, Y_IRIS)
    with pytest.raises(graphopt.GraphoptError, match=r"^to_sklearn: expected a loss of probabilities"):
        logits.to_sklearn()


# --- One model of all steps ---


def run(proto: onnx.ModelProto, X: Any) -> dict[str, Any]:
    """Run a model on an array, or on the columns of a table, in the types that it asks for."""
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
    fed = {
        x.name: np.asarray(X if isinstance(X, np.ndarray) else X[[x.name]]).astype(kinds.get(x.type, object))
        for x in session.get_inputs()
    }
    return dict(zip([y.name for y in session.get_outputs()], session.run(None, fed), strict=True))


NAMES = np.array(["setosa", "versicolor", "virginica"])[Y_IRIS]
TARGETS = {
    "numbers": Y_IRIS,
    "text": NAMES,
    "objects": NAMES.astype(object),
    "two": NAMES == "setosa",
    "floats": 2.0 * Y_IRIS + 1,
    "negative": np.array([-1, 1])[Y_IRIS % 2],
    "several": np.eye(3, dtype=int)[Y_IRIS],
    "one": np.zeros(len(Y_IRIS), int),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore:y. expected two labels")
def test_a_pipeline_of_a_classifier_is_one_model(name: str, dtype: str) -> None:
    pipeline = make_pipeline(StandardScaler(), graphopt.OnnxClassifier(max_iter=3, random_state=0))
    pipeline.fit(X_IRIS, TARGETS[name])
    scaled, network = pipeline[0].transform(X_IRIS), pipeline[-1]
    whole = run(graphopt.to_onnx(pipeline, X_IRIS, dtype=dtype), X_IRIS)
    for found in (
        whole,
        run(graphopt.to_onnx(network, scaled, dtype), scaled),
        run(network.to_onnx(dtype), scaled),
    ):
        assert list(found) == ["label", "probabilities"]
        np.testing.assert_array_equal(found["label"], pipeline.predict(X_IRIS))
        np.testing.assert_allclose(found["probabilities"], pipeline.predict_proba(X_IRIS), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("y", [Y_DIABETES, np.stack([Y_DIABETES, -Y_DIABETES], axis=1)], ids=["one", "two"])
def test_a_search_of_a_regressor_is_one_model(y: np.ndarray) -> None:
    pipeline = make_pipeline(StandardScaler(), graphopt.OnnxRegressor(max_iter=3, random_state=0))
    search = GridSearchCV(pipeline, {"onnxregressor__alpha": [1e-4, 1.0]}, cv=2).fit(X_DIABETES, y)
    (found,) = run(graphopt.to_onnx(search, X_DIABETES), X_DIABETES).values()
    np.testing.assert_allclose(found.reshape(y.shape), search.predict(X_DIABETES), atol=1e-5)
    (alone,) = run(search.best_estimator_[-1].to_onnx(), X_DIABETES).values()
    assert alone.shape == found.shape == (len(y), y.size // len(y))


def test_a_table_of_text_and_numbers_is_one_model() -> None:
    pandas = pytest.importorskip("pandas")
    random = np.random.default_rng(0)
    table = pandas.DataFrame({"age": random.normal(40, 9, 200), "rooms": random.integers(1, 9, 200)})
    table["city"] = random.choice(["Bonn", "Oslo", "Rome"], 200)
    table.loc[::9, "age"] = np.nan
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    columns = ColumnTransformer(
        [
            ("numbers", numbers, ["age", "rooms"]),
            ("text", OneHotEncoder(handle_unknown="ignore"), ["city"]),
        ]
    )
    pipeline = make_pipeline(columns, graphopt.OnnxClassifier(random_state=0, max_iter=20))
    pipeline.fit(table, np.where(table.city == "Rome", "south", "north"))
    table.loc[3, "city"] = "Lima"
    found = run(graphopt.to_onnx(pipeline, table), table)
    np.testing.assert_array_equal(found["label"], pipeline.predict(table))
    np.testing.assert_allclose(found["probabilities"], pipeline.predict_proba(table), atol=1e-5)
    with pytest.raises(graphopt.GraphoptError, match=r"found text in input 'city': encode it in a step before"):
        graphopt.to_onnx(pipeline[-1], table)


@pytest.mark.parametrize(
    ("loss", "units", "y", "outputs"),
    [
        (passes.CrossEntropy(), 3, Y_IRIS, ["label", "probabilities"]),
        (passes.BinaryCrossEntropy(), 1, np.float32(Y_IRIS == 1)[:, None], ["label", "probabilities"]),
        (passes.Hinge(), 1, np.float32([-1, 1])[Y_IRIS % 2][:, None], ["label", "probabilities"]),
        (passes.MeanSquaredError(), 1, np.float32(X_IRIS[:, :1]), ["variable"]),
    ],
    ids=["classes", "two", "hinge", "numbers"],
)
def test_a_trainer_in_a_pipeline_is_one_model(loss: Any, units: int, y: np.ndarray, outputs: list[str]) -> None:
    X = X_IRIS.astype(np.float32)
    trainer = graphopt.Trainer(models.mlp((4,), units), loss=loss, max_iter=2)
    pipeline = make_pipeline(StandardScaler(), trainer).fit(X, y)
    found = run(graphopt.to_onnx(pipeline, X), X)
    assert list(found) == outputs
    predicted = pipeline.predict(X).reshape(len(y))
    np.testing.assert_allclose(found[outputs[0]].reshape(len(y)), predicted, atol=1e-5)
    if hasattr(loss, "probabilities"):
        np.testing.assert_allclose(found["probabilities"], pipeline.predict_proba(X), atol=1e-5)


def test_options_of_skl2onnx_are_heeded() -> None:
    pipeline = make_pipeline(StandardScaler(), graphopt.OnnxClassifier(**OPTIONS)).fit(X_IRIS, NAMES)
    graphopt.register_skl2onnx()
    X = X_IRIS.astype(np.float32)
    mapped = run(to_onnx(pipeline, X[:1], target_opset=21), X)
    assert list(mapped["output_probability"][0]) == list(pipeline.classes_)
    options = {id(pipeline[-1]): {"zipmap": False, "nocl": True}}
    numbered = run(to_onnx(pipeline, X[:1], options=options, target_opset=12), X)
    np.testing.assert_array_equal(pipeline.classes_[numbered["label"]], pipeline.predict(X))


def test_a_model_keeps_its_own_outputs_apart_from_the_predictor() -> None:
    start = models.cnn((1, 8, 8), 10)
    X, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(MaxAbsScaler(), graphopt.OnnxClassifier(start, max_iter=1, random_state=0))
    pipeline.fit(X[:300], y[:300])
    found = run(graphopt.to_onnx(pipeline, X), X)
    np.testing.assert_allclose(found["probabilities"], pipeline.predict_proba(X), atol=1e-5)
    own = [output.name for output in pipeline[-1].get_trained_onnx().graph.output]
    assert own == [output.name for output in graphopt.load(start).graph.outputs]
    again = graphopt.OnnxClassifier(pipeline[-1].to_onnx(), max_iter=1, random_state=0)
    assert list(again.fit(X[:300].reshape(-1, 1, 8, 8).astype(np.float32), y[:300]).classes_) == [*range(10)]


# --- Models from elsewhere ---


@pytest.mark.slow
def test_a_model_of_one_s_own() -> None:
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    network = graphopt.OnnxClassifier(models.cnn((1, 8, 8), 10), max_iter=12, random_state=0, learning_rate_init=5e-3)
    assert network.fit(X[:1500], y[:1500]).score(X[1500:], y[1500:]) > 0.9
    np.testing.assert_allclose(network.predict_proba(X).sum(axis=1), 1, rtol=1e-5)
    onnx.checker.check_model(network.to_onnx(), full_check=True)


def test_a_model_of_scikit_learns_converter(tmp_path: Path) -> None:
    X = X_IRIS.astype(np.float32)
    start = to_onnx(LogisticRegression().fit(X[::5], Y_IRIS[::5]), X[:1], options={"zipmap": False})
    onnx.save(start, tmp_path / "m.onnx")
    before = LogisticRegression().fit(X[::5], Y_IRIS[::5]).score(X, Y_IRIS)
    ours = graphopt.OnnxClassifier(tmp_path / "m.onnx", max_iter=30, random_state=0, learning_rate_init=0.05)
    assert ours.fit(X, Y_IRIS).score(X, Y_IRIS) > before
    assert list(ours.classes_) == [0, 1, 2]


def test_an_adapter_trains_as_pytorch_trains_it() -> None:
    X, lora = X_IRIS.astype(np.float32), passes.LoRA("layers.0*", rank=2, alpha=4)
    base = ir.to_proto(models.mlp((4,), 3, hidden=[8]))
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    start = graphopt.Executor(graphopt.compile(base, adapter=lora, **steps)).parameters
    a, b = (torch.tensor(start[f"layers.0.weight.lora_{x}"], requires_grad=True) for x in "AB")
    w = {x.name: torch.tensor(onnx.numpy_helper.to_array(x).copy()) for x in base.graph.initializer}
    optimizer, losses = torch.optim.AdamW([a, b], 0.05, weight_decay=0.01), []
    for _ in range(21):
        hidden = torch.tensor(X) @ (w["layers.0.weight"] + 2 * a @ b) + w["layers.0.bias"]
        logits = torch.relu(hidden) @ w["layers.2.weight"] + w["layers.2.bias"]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(Y_IRIS)))
        if len(losses) <= 20:
            descended(losses[-1], optimizer)
    options = {"solver": passes.AdamW(0.05), "batch_size": 150, "max_iter": 20, "alpha": 0.0}
    ours = graphopt.OnnxClassifier(base, adapter=lora, **options).fit(X, Y_IRIS)
    np.testing.assert_allclose(ours.loss_curve_, [x.item() for x in losses[:20]], rtol=2e-5)
    np.testing.assert_allclose(ours.predict_proba(X), logits.softmax(1).detach(), atol=1e-4)
    weights = {x.name: onnx.numpy_helper.to_array(x) for x in ours.get_trained_onnx().graph.initializer}
    assert set(weights) == set(w)
    for name in set(w) - {"layers.0.weight"}:
        np.testing.assert_array_equal(weights[name], w[name])
    assert clone(ours).adapter == lora and ours.get_params()["adapter__rank"] == 2
    assert ours.set_params(adapter__rank=4).fit(X, Y_IRIS).score(X, Y_IRIS) > 0.8


def test_a_head_predicts_other_classes() -> None:
    X = X_IRIS.astype(np.float32)
    ours = graphopt.OnnxClassifier(
        models.mlp((4,), 7), adapter=passes.Head(classes=3), learning_rate_init=0.05, **OPTIONS
    ).fit(X, Y_IRIS)
    assert ours.score(X, Y_IRIS) > 0.8 and ours.predict_proba(X).shape == (150, 3)
    target = Y_DIABETES.astype(np.float32)
    lora = passes.LoRA("layers.0*", rank=2)
    other = graphopt.OnnxRegressor(models.mlp((10,), 1), adapter=lora, learning_rate_init=0.01, **OPTIONS)
    curve = other.fit(X_DIABETES.astype(np.float32), target).loss_curve_
    assert curve[-1] < curve[0]


def test_passes_in_place_of_names() -> None:
    ours = graphopt.OnnxClassifier(
        solver=passes.AdamW(0.01), loss=passes.CrossEntropy(label_smoothing=0.1, from_logits=False), **OPTIONS
    )
    assert ours.fit(X_IRIS, Y_IRIS).score(X_IRIS, Y_IRIS) > 0.8


def test_fields_of_passes_are_options() -> None:
    ours = graphopt.OnnxClassifier(solver=passes.AdamW(0.01), **OPTIONS)
    assert ours.get_params()["solver__learning_rate"] == 0.01
    assert ours.set_params(solver__learning_rate=0.1).solver == passes.AdamW(0.1)
    with pytest.raises(graphopt.GraphoptError, match="unknown option 'solver__rate'"):
        ours.set_params(solver__rate=0.1)


def test_a_second_fit_keeps_the_executor_and_starts_anew() -> None:
    ours = graphopt.OnnxClassifier(**OPTIONS).fit(X_IRIS, Y_IRIS)
    executor, losses = ours._running(), ours.loss_curve_
    assert ours.fit(X_IRIS, Y_IRIS)._running() is executor
    np.testing.assert_allclose(ours.loss_curve_, losses, rtol=1e-12)
    assert ours.fit(X_IRIS.astype(np.float32), Y_IRIS)._running() is not executor
    ours.fit(X_IRIS[:, :2], Y_IRIS)
    theirs = MLPClassifier(**OPTIONS).fit(X_IRIS[:, :2], Y_IRIS)
    np.testing.assert_allclose(ours.loss_curve_, theirs.loss_curve_, rtol=1e-6)


TEXT = np.array([["Rome", "1"]] * len(X_IRIS), dtype=object)
TRAINER = graphopt.Trainer(models.mlp((4,), 3), loss=passes.CrossEntropy(), max_iter=1)


def test_one_label_alone_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="^y: expected two labels or more, found 0 alone"):
        graphopt.OnnxClassifier(max_iter=1).fit(X_IRIS, np.zeros(len(X_IRIS), int).tolist())


# --- scikit-learn's tools ---


@pytest.mark.parametrize("through", [pickle, joblib])
def test_it_survives_pickle(through: Any, tmp_path: Path) -> None:
    fitted = graphopt.OnnxClassifier(**OPTIONS).fit(X_IRIS, Y_IRIS)
    with open(tmp_path / "file", "wb") as file:
        through.dump(fitted, file)
    with open(tmp_path / "file", "rb") as file:
        again = through.load(file)
    assert (again.predict_proba(X_IRIS) == fitted.predict_proba(X_IRIS)).all()
    for one in (fitted, again):
        one.set_params(random_state=1).partial_fit(X_IRIS, Y_IRIS)
    assert (again.predict_proba(X_IRIS) == fitted.predict_proba(X_IRIS)).all()


@pytest.mark.slow
def test_searches_pipelines_and_clones() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    network = graphopt.OnnxClassifier((), max_iter=5, random_state=0) if False else graphopt.OnnxClassifier(**OPTIONS)
    pipeline = make_pipeline(StandardScaler(), network)
    search = GridSearchCV(pipeline, {"onnxclassifier__alpha": [1e-4, 1.0]}, cv=2, n_jobs=2).fit(X, y)
    assert search.best_score_ > 0.9
    theirs = make_pipeline(StandardScaler(), MLPClassifier(**OPTIONS))
    np.testing.assert_allclose(cross_val_score(pipeline, X, y, cv=3), cross_val_score(theirs, X, y, cv=3), atol=1e-9)
    assert clone(network).get_params() == network.get_params()
    assert repr(clone(network)) == repr(network) == "OnnxClassifier(max_iter=8, random_state=0)"


@pytest.mark.slow
def test_graphopt_imports_without_scikit_learn(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(\"No module named 'sklearn'\", name='sklearn')")
    program = (
        "import graphopt, sys; assert 'sklearn' not in sys.modules\n"
        "try: graphopt.OnnxClassifier()\n"
        "except graphopt.GraphoptError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("OnnxClassifier: expected scikit-learn"), done.stderr


# --- Threads and kernels suit the size of the work ---


def test_short_steps_take_one_thread_and_long_ones_what_joblib_leaves(monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small = graphopt.OnnxClassifier(**OPTIONS).fit(X_IRIS, Y_IRIS)
    assert small._running().options.threads == 1
    large = {"hidden_layer_sizes": (600, 600), "max_iter": 1, "random_state": 0}
    assert graphopt.OnnxClassifier(**large).fit(X_IRIS, Y_IRIS)._running().options.threads is None
    assert graphopt.OnnxClassifier(threads=2, **OPTIONS).fit(X_IRIS, Y_IRIS)._running().options.threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert graphopt.OnnxClassifier(**large).fit(X_IRIS, Y_IRIS)._running().options.threads == 1
    trainer = graphopt.Trainer(models.mlp((4,), 3), loss=passes.CrossEntropy(), max_iter=1)
    assert trainer.fit(X_IRIS.astype(np.float32), Y_IRIS)._running().options.threads == 1


def test_only_long_trainings_compile_kernels(monkeypatch: Any) -> None:
    monkeypatch.delenv("GRAPHOPT_NATIVE", raising=False)
    wide = {"hidden_layer_sizes": (3000,), "random_state": 0}
    assert graphopt.OnnxClassifier(max_iter=1, **wide).fit(X_IRIS, Y_IRIS)._running().options.native is False
    long = graphopt.OnnxClassifier(max_iter=10**5, tol=1e9, n_iter_no_change=1, **wide)
    assert long.fit(X_IRIS, Y_IRIS)._running().options.native is None
    monkeypatch.setenv("GRAPHOPT_NATIVE", "auto")
    assert graphopt.OnnxClassifier(max_iter=1, **wide).fit(X_IRIS, Y_IRIS)._running().options.native is None


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("estimators_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("estimators_mistakes", call, globals())
