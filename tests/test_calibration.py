"""Calibrated probabilities, sets and intervals, beside scipy, scikit-learn and formulas; tests/peers has MAPIE's."""

from __future__ import annotations

import functools
import json
import re
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders import model
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss
from sklearn.model_selection import train_test_split
from sklearn.multiclass import OneVsOneClassifier
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

import graphopt
import passes
from graphopt import models
from graphopt.cli import command as cli
from graphopt.cli.composition.record import RunRecord
from graphopt.cli.rows import _is_same
from graphopt.errors import GraphoptError
from graphopt.graph.classified import class_name, class_names
from graphopt.graph.emitter import Emitter
from passes import calibration

LOGITS = "g (float[N,5] x) => (float[N,5] y) { y = Identity(x) }"


@functools.cache
def rows(count: int = 400, sharpness: float = 2.0) -> dict[str, np.ndarray]:
    """Return logits that are larger than the classes that are drawn from them allow."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((count, 5)) * 3 + [0, 0.5, 0, -0.5, 0]
    target = np.array([rng.choice(5, p=p) for p in softmax(z / sharpness, axis=1)])
    return {"x": z.astype(np.float32), "target": target}


def numbers(calibrated: ir.Model) -> dict[str, np.ndarray]:
    weights = calibrated.graph.initializers.values()
    return {x.name: x.const_value.numpy() for x in weights if x.name.startswith("y.")}


def cross_entropy(z: np.ndarray, target: np.ndarray) -> float:
    return -log_softmax(z, axis=1)[np.arange(len(z)), target].mean()


def test_the_temperature_is_that_of_scipy() -> None:
    z, target = rows()["x"].astype(np.float64), rows()["target"]
    calibrated = graphopt.calibrate(model(LOGITS), rows(), passes.Temperature())
    best = minimize_scalar(lambda t: cross_entropy(z / np.exp(t), target), bracket=(0, 1), tol=1e-12).x
    assert abs(numbers(calibrated)["y.log_temperature"] - best) < 1e-6
    found = graphopt.run(calibrated, {"x": rows()["x"]})["y"]
    np.testing.assert_allclose(found, z / np.exp(best), rtol=1e-5)


@pytest.mark.parametrize("kind", [models.mlp, models.cnn])
def test_probabilities_are_scikit_learns(kind: object) -> None:
    digits = graphopt.data.digits()
    x, target = digits.arrays["x"], digits.arrays["target"]
    network = kind((1, 8, 8), 10)
    step = graphopt.compile(network, loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-2))
    executor = graphopt.Executor(step)
    graphopt.fit(executor, (x[:900], target[:900]), epochs=3, validation=None, verbose=False)
    file = executor.trained()

    class Network(ClassifierMixin, BaseEstimator):
        classes_ = np.arange(10)

        def fit(self, x: np.ndarray, y: np.ndarray) -> Network:
            self.is_fitted_ = True
            return self

        def predict(self, x: np.ndarray) -> np.ndarray:
            return self.decision_function(x).argmax(1)

        def decision_function(self, x: np.ndarray) -> np.ndarray:
            return graphopt.run(file, {"x": x.astype(np.float32)})["y"].astype(np.float64)

    calibrated = graphopt.calibrate(file, (x[900:1300], target[900:1300]), passes.Temperature())
    held_out = x[1300:]
    found = softmax(graphopt.run(calibrated, {"x": held_out})["y"].astype(np.float64), axis=1)
    frozen = FrozenEstimator(Network().fit(x, target))
    peer = CalibratedClassifierCV(frozen, method="temperature").fit(x[900:1300], target[900:1300])
    np.testing.assert_allclose(found, peer.predict_proba(held_out), rtol=0, atol=2e-4)  # scikit-learn's tolerance
    z = graphopt.run(file, {"x": x[900:1300]})["y"].astype(np.float64)
    best = minimize_scalar(lambda t: cross_entropy(z / np.exp(t), target[900:1300]), bracket=(0, 1), tol=1e-12).x
    assert abs(numbers(calibrated)["y.log_temperature"] - best) < 1e-5
    z = graphopt.run(file, {"x": held_out})["y"].astype(np.float64)
    np.testing.assert_allclose(found, softmax(z / np.exp(best), axis=1), atol=1e-5)


def test_scales_of_classes_are_those_of_scipy() -> None:
    z, target = rows()["x"].astype(np.float64), rows()["target"]
    calibrated = graphopt.calibrate(model(LOGITS), rows(), passes.VectorScaling())
    best = minimize(lambda w: cross_entropy(w[:5] * z + w[5:], target), np.r_[np.ones(5), np.zeros(5)], tol=1e-12)
    found = numbers(calibrated)
    own = found["y.scale"] * z + found["y.bias"]
    assert cross_entropy(own, target) < best.fun + 1e-9
    np.testing.assert_allclose(softmax(own, axis=1), softmax(best.x[:5] * z + best.x[5:], axis=1), atol=1e-4)


@pytest.mark.parametrize("form", ["logit", "column", "sigmoid", "rates"])
def test_platts_line_is_that_of_scipy_for_every_form_of_the_output(form: str) -> None:
    rng = np.random.default_rng(1)
    z = (rng.standard_normal((300, 1)) * 3).astype(np.float32)
    target = (rng.random(300) < expit(0.4 * z[:, 0] - 0.5)).astype(np.int64)
    text = {
        "logit": "g (float[N,1] x) => (float[N] y) { a = Constant<value_ints = [1]>() y = Squeeze(x, a) }",
        "column": "g (float[N,1] x) => (float[N,1] y) { y = Identity(x) }",
        "sigmoid": "g (float[N,1] x) => (float[N,1] y) { y = Sigmoid(x) }",
        "rates": "g (float[N,1] x) => (float[N,2] y) { p = Sigmoid(x) i = Constant<value_float = 1.0>() q = Sub(i, p) "
        "y = Concat<axis = 1>(q, p) }",
    }[form]
    two = form == "rates"
    calibration = passes.VectorScaling() if two else passes.Platt()
    found = graphopt.run(graphopt.calibrate(model(text), {"x": z, "target": target}, calibration), {"x": z})["y"]
    x = z[:, 0].astype(np.float64)

    def loss(w: np.ndarray) -> float:
        if two:  # the logarithms of both rates have scales of their own
            logits = np.stack([w[0] * -np.logaddexp(0, x), w[1] * -np.logaddexp(0, -x) + w[2]], 1)
            return cross_entropy(logits, target)
        return cross_entropy(np.stack([0 * x, w[0] * x + w[1]], 1), target)

    w = minimize(loss, [1.0, 1.0, 0.0] if two else [1.0, 0.0], tol=1e-12).x
    expected = (
        softmax(np.stack([w[0] * -np.logaddexp(0, x), w[1] * -np.logaddexp(0, -x) + w[2]], 1), axis=1)[:, 1]
        if two
        else expit(w[0] * x + w[1])
    )
    rate = found[:, 1:] if two else found if form == "sigmoid" else expit(found)
    np.testing.assert_allclose(rate.reshape(-1), expected, atol=1e-4)


def test_a_softmax_is_applied_once() -> None:
    """Its logits are divided, and the output stays probabilities."""
    x = rows()["x"]
    plain = graphopt.calibrate(model(LOGITS), rows(), passes.Temperature(), passes.PredictionSet())
    rates = graphopt.calibrate(
        model("g (float[N,5] x) => (float[N,5] y) { y = Softmax(x) }"),
        rows(),
        passes.Temperature(),
        passes.PredictionSet(),
    )
    a, b = (graphopt.run(each, {"x": x}) for each in (plain, rates))
    np.testing.assert_allclose(a["probability"].sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(b["y"], a["probability"], atol=1e-6)
    np.testing.assert_array_equal(b["set"], a["set"])
    assert cross_entropy(np.log(b["y"].astype(float)), rows()["target"]) < cross_entropy(x, rows()["target"]) - 0.1


def test_other_readers_of_the_output_get_the_calibrated_one_and_the_file_checks() -> None:
    nodes = "y = Add(x, x) label = ArgMax<axis = 1, keepdims = 0>(y)"
    text = f"g (float[N,5] x) => (float[N,5] y, int64[N] label) {{ {nodes} }}"
    calibrated = graphopt.calibrate(model(text), rows(), passes.VectorScaling())
    found = graphopt.run(calibrated, {"x": rows()["x"]})
    np.testing.assert_array_equal(found["label"], found["y"].argmax(1))
    onnx.checker.check_model(ir.to_proto(calibrated), full_check=True)


def test_a_calibrated_temperature_trains_on_by_its_name_alone() -> None:
    """The number is an initializer, which the existing step trains alone: it stays at the optimum."""
    calibrated = graphopt.calibrate(model(LOGITS), rows(), passes.Temperature())
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    network = graphopt.calibrate(models.mlp((5,), 5), rows(), passes.Temperature(0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no rule is unsure whether it trains
        trained = graphopt.Executor(graphopt.compile(network, **steps))
    assert not [name for name in trained.parameters if "temperature" in name] and trained.parameters
    step = graphopt.compile(calibrated, parameters=passes.Parameters(pattern="*temperature"), **steps)
    executor = graphopt.Executor(step)
    before = float(executor.state["y.log_temperature"])
    graphopt.fit(executor, rows(), epochs=3, batch_size=400, validation=None, verbose=False)
    assert abs(float(executor.state["y.log_temperature"]) - before) < 1e-5


def kth(scores: np.ndarray, alpha: float) -> float:
    """Count: so many scores are at most the threshold that a new one is with probability 1 - alpha."""
    ordered = sorted(scores)
    return next(s for i, s in enumerate(ordered, 1) if i / (len(scores) + 1) >= 1 - alpha - 1e-12)


def scores_of(p: np.ndarray, score: str) -> np.ndarray:
    if score == "lac":
        return 1 - p
    sums = np.array([[row[row >= q].sum() for q in row] for row in p])
    ranks = (p[:, :, None] <= p[:, None, :]).sum(2)
    return sums + (0.05 * np.maximum(ranks - 2, 0) if score == "raps" else 0)


@pytest.mark.parametrize("alpha", [0.1, 0.05])
@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("by_class", [False, True])
def test_sets_are_those_of_the_formula(score: str, alpha: float, by_class: bool) -> None:
    data = rows(1000)
    sure = passes.PredictionSet(alpha, score, by_class, penalty=0.05, rank=2)
    calibrated = graphopt.calibrate(model(LOGITS), {k: v[:500] for k, v in data.items()}, sure)
    found = graphopt.run(calibrated, {"x": data["x"][500:]})
    scores = scores_of(softmax(data["x"].astype(np.float64), axis=1), score)
    target = data["target"][:500]
    own = scores[:500][np.arange(500), target]
    most = np.array([kth(own[target == c] if by_class else own, alpha) for c in range(5)])
    differs = found["set"] != (scores[500:] <= most)
    assert (np.abs(scores[500:] - most)[differs] < 1e-6).all()  # by rounding, which leaves no class out
    covered = found["set"][np.arange(500), data["target"][500:]].mean()
    assert covered > 1 - alpha - 0.05


@pytest.mark.parametrize("score", ["aps", "raps"])
def test_the_least_likely_class_of_all_rows_has_the_same_score(score: str) -> None:
    """Sums of all probabilities differed by rounding, and with them the sets of a classifier near chance."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x, target = (rng.standard_normal((60, 5)) * 0.3).astype(np.float32), rng.integers(0, 5, 60)
        sure = passes.PredictionSet(0.2, score, penalty=0.05, rank=2)
        found = graphopt.run(graphopt.calibrate(model(LOGITS), {"x": x, "target": target}, sure), {"x": x})["set"]
        scores = scores_of(softmax(x.astype(np.float64), axis=1), score)
        np.testing.assert_array_equal(found, scores <= kth(scores[np.arange(60), target], 0.2) + 1e-12)


@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.2])
def test_coverage_over_splits_is_in_the_band_of_theory(alpha: float) -> None:
    """An interpolated quantile covers less: (n - 1)(1 - alpha) + 1 of n + 1, not ceil((n + 1)(1 - alpha))."""
    rng, n = np.random.default_rng(0), 60
    most = [passes.PredictionInterval(alpha).threshold_of(rng.random(n)) for _ in range(2000)]
    k = np.ceil((n + 1) * (1 - alpha) - 1e-9)
    band = np.sqrt(k * (n + 1 - k) / (n + 1) ** 2 / (n + 2) / 2000)  # of the mean of a beta distribution
    assert abs(np.mean(most) - k / (n + 1)) < 4 * band
    assert np.mean(most) > 1 - alpha - 4 * band


def test_the_least_score_is_the_threshold_if_nearly_all_rows_may_be_left_out() -> None:
    assert passes.PredictionInterval(1 - 1e-12).threshold_of(np.array([3.0, 1.0, 2.0])) == 1


@pytest.mark.parametrize("shape", [(), (1,)])
def test_intervals_are_as_wide_as_the_kth_smallest_error(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 2)).astype(np.float32)
    target = (x.sum(1) + rng.standard_normal(60)).astype(np.float32).reshape(60, *shape)
    dims, nodes = ",1" if shape else "", f"y = ReduceSum<keepdims = {len(shape)}>(x, a)"
    text = f"g (float[N,2] x) => (float[N{dims}] y) {{ a = Constant<value_ints = [1]>() {nodes} }}"
    found = graphopt.run(
        graphopt.calibrate(model(text), {"x": x, "target": target}, passes.PredictionInterval(0.2)), {"x": x}
    )
    margin = kth(np.abs(found["y"] - target).reshape(-1), 0.2)
    np.testing.assert_allclose(found["upper"] - found["y"], margin, rtol=1e-5)
    np.testing.assert_allclose(found["y"] - found["lower"], margin, rtol=1e-5)
    assert found["lower"].shape == (60, *shape)


def test_quantiles_move_by_the_kth_smallest_excess() -> None:
    rng = np.random.default_rng(0)
    x = np.sort(rng.standard_normal((80, 2)), axis=1).astype(np.float32)
    target = rng.standard_normal(80)
    text = "g (float[N,2] x) => (float[N,2] y) { y = Identity(x) }"
    interval = passes.PredictionInterval(0.1, "cqr")
    found = graphopt.run(graphopt.calibrate(model(text), {"x": x, "target": target}, interval), {"x": x})
    margin = kth(np.maximum(x[:, 0] - target, target - x[:, 1]), 0.1)
    np.testing.assert_allclose(found["lower"][:, 0], x[:, 0] - margin, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["upper"][:, 0], x[:, 1] + margin, rtol=1e-5, atol=1e-6)


def test_variances_are_mean_squared_errors_and_are_scaled_by_ratios() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 2)).astype(np.float32)
    target = rng.standard_normal((50, 2))
    plain = model("g (float[N,2] x) => (float[N,2] y) { y = Identity(x) }")
    found = graphopt.run(graphopt.calibrate(plain, {"x": x, "target": target}, passes.VarianceScaling()), {"x": x})
    np.testing.assert_allclose(found["y.variance"], np.tile(np.square(x - target).mean(0), (50, 1)), rtol=1e-5)
    own = model("g (float[N,2] x) => (float[N,2] y, float[N,2] v) { y = Identity(x) v = Exp(x) }")
    found = graphopt.run(
        graphopt.calibrate(own, {"x": x, "target": target}, passes.VarianceScaling(variance="v")), {"x": x}
    )
    ratio = np.mean(np.square(x - target) / np.exp(x))
    np.testing.assert_allclose(found["v"], ratio * np.exp(x), rtol=1e-5)


def test_an_output_of_more_axes_has_a_variance_of_each_element() -> None:
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((50, 2, 3)).astype(np.float32), rng.standard_normal((50, 2, 3))
    plain = model("g (float[N,2,3] x) => (float[N,2,3] y) { y = Identity(x) }")
    found = graphopt.run(graphopt.calibrate(plain, {"x": x, "target": target}, passes.VarianceScaling()), {"x": x})
    np.testing.assert_allclose(found["y.variance"][7], np.square(x - target).mean(0), rtol=1e-5)


def test_a_variance_of_elements_of_open_sizes_is_refused() -> None:
    """Sizes came from the number of variances, whose order was guessed."""
    rows = {"x": np.zeros((5, 2, 1), np.float32), "target": np.ones((5, 2, 1), np.float32)}
    with pytest.raises(GraphoptError, match="'y' with known sizes behind its rows, found shape"):
        graphopt.calibrate(
            model("g (float[N,C,L] x) => (float[N,C,L] y) { y = Neg(x) }"), rows, passes.VarianceScaling()
        )
    columns = {name: array[:, :, 0] for name, array in rows.items()}
    file = graphopt.calibrate(
        model("g (float[N,C] x) => (float[N,C] y) { y = Neg(x) }"), columns, passes.VarianceScaling()
    )
    np.testing.assert_array_equal(graphopt.run(file, {"x": columns["x"]})["y.variance"], np.ones((5, 2)))


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_the_set_of_a_row_that_is_not_a_number_has_every_class(score: str) -> None:
    sure = graphopt.calibrate(model(LOGITS), rows(), passes.PredictionSet(score=score))
    assert graphopt.run(sure, {"x": np.full((1, 5), np.nan, np.float32)})["set"].all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (passes.PredictionSet(threshold=(0.1, 0.2)), "PredictionSet: threshold: expected 1 or 5 numbers, found 2"),
        (passes.VectorScaling((0.5, 0.5)), "VectorScaling: scale: expected 5 numbers, found 2"),
        (passes.VectorScaling((0.5,) * 5, (0.5,)), "VectorScaling: bias: expected 5 numbers, found 1"),
        (passes.VarianceScaling((1.0, 2.0)), "VarianceScaling: scale: expected 5 numbers, found 2"),
        (
            passes.VarianceScaling((1.0, 100.0), output="y", variance="v"),
            "VarianceScaling: scale: expected 1 number, found 2",
        ),
        (
            passes.LastLayerLaplace(factors=(np.ones(5), np.ones(2))),
            "LastLayerLaplace: factors: expected arrays of shapes [(5, 25), (25, 5), (5,)], found [(5,), (2,)]",
        ),
        (
            passes.LastLayerLaplace(structure="diag", factors=(np.ones((4, 5)), np.ones(5))),
            "LastLayerLaplace: factors: expected arrays of shapes [(5, 5), (5,)], found [(4, 5), (5,)]",
        ),
        (passes.PredictionInterval(threshold=()), "PredictionInterval: threshold: expected 1 number, found 0"),
    ],
)
def test_numbers_that_are_given_by_hand_are_as_many_as_are_learnt(given: passes.Calibration, message: str) -> None:
    text = "g (float[N] x) => (float[N] y) { y = Identity(x) }" if "Interval" in message else LOGITS
    file = model(text)
    if "Laplace" in message:
        file = model("g (float[N,5] x) => (float[N,5] y) { y = MatMul(x, w) }", w=np.eye(5, dtype=np.float32))
    if getattr(given, "variance", None):
        file = model("g (float[N] x) => (float[N] y, float[N] v) { y = Identity(x) v = Exp(x) }")
    with pytest.raises(GraphoptError) as error:
        given(graphopt.load(file))
    assert str(error.value) == message


@pytest.mark.parametrize(("columns", "ending"), [("1", "Squeeze(e, one)"), ("2", "Slice(e, zero, one, one)")])
def test_one_variance_a_row_is_scaled_by_ratios_of_its_row(columns: str, ending: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, int(columns))).astype(np.float32)
    target = rng.standard_normal(x.shape)
    text = f"g (float[N,{columns}] x) => (float[N,{columns}] y, float{'[N,1]' if columns == '2' else '[N]'} v)"
    constants = {name: np.array([i]) for i, name in enumerate(("zero", "one")) if f" {name}" in ending}
    own = model(f"{text} {{ y = Identity(x) e = Exp(x) v = {ending} }}", **constants)
    scaling = passes.VarianceScaling(output="y", variance="v")
    found = graphopt.run(graphopt.calibrate(own, {"x": x, "target": target}, scaling), {"x": x})["v"]
    variance = np.exp(x[:, :1])
    expected = np.mean(np.square(x - target) / variance) * variance
    np.testing.assert_allclose(found.ravel(), expected.ravel(), rtol=1e-5)


def some(count: int, data: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    return {name: x[:count] for name, x in (data or rows()).items()}


TWO = "g (float[N,5] x) => (float[N,5] y, float[N,5] z) { y = Identity(x) z = Exp(x) }"
INSIDE = "g (float[N,5] x) => (double[N,5] y) { z = Add(x, x) p = Softmax(z) y = Cast<to = 11>(p) }"
LOGARITHM = "g (float[N,5] x) => (float[N,5] y) { p = Softmax(x) y = Log(p) }"
BYTES = "s = Constant<value_float = 0.004>() o = Constant<value = uint8 {0}>() q = QuantizeLinear(p, s, o)"
BYTES = f"g (float[N,5] x) => (float[N,5] y) {{ p = Softmax(x) {BYTES} y = DequantizeLinear(q, s, o) }}"
PERCENT = "g (float[N,5] x) => (float[N,5] y) { p = Softmax(x) c = Constant<value_float = 100.0>() y = Mul(p, c) }"
COLUMN = "g (float[N,5] x) => (float[N,1] y) { a = Constant<value_ints = [1]>() y = ReduceSum(x, a) }"
SIGMOIDS = "g (float[N,5] x) => (float[N,5] y) { y = Sigmoid(x) }"
RATE = "g (float[N,1] x) => (float[N,1] y) { y = HardSigmoid(x) }"
ROWS = "g (float[N,5] x) => (float[N,5] y) { y = Softmax<axis = 0>(x) }"
IMAGES = "g (float[N,5] x) => (float[N,5,1] y) { a = Constant<value_ints = [2]>() y = Unsqueeze(x, a) }"


def two() -> dict[str, np.ndarray]:
    return {"x": rows()["x"][:, :1], "target": rows()["target"] // 3}


@pytest.mark.parametrize(
    ("text", "data", "calibration", "message"),
    [
        (TWO, rows(), passes.Temperature(), "output=None: expected the name of one floating-point output"),
        (
            INSIDE,
            rows(),
            passes.Temperature(),
            "comes out of the Softmax 'p': make 'z', the value before it, the outp",
        ),
        *(
            (text, rows(), given, "found that 'y' comes out of the Softmax 'p': make 'x', the value before it, the out")
            for text in (LOGARITHM, BYTES)
            for given in (passes.Temperature(), passes.PredictionSet())
        ),
        (PERCENT, rows(), passes.Temperature(), "probabilities that sum to 1, found that each row of 'y' sums to 100"),
        (
            IMAGES,
            rows(),
            passes.Temperature(),
            "expected an output [N, classes], or [N] or [N, 1] of two classes, fo",
        ),
        (LOGITS, some(10), passes.PredictionSet(0.05), "needs at least 19 rows for alpha=0.05, found 10"),
        (LOGITS, some(18), passes.PredictionSet(0.05), "needs at least 19 rows for alpha=0.05, found 18"),
        (
            LOGITS,
            some(40),
            passes.PredictionSet(0.05, by_class=True),
            "needs at least 19 rows of class 0 for alpha=",
        ),
        (
            LOGITS,
            {**rows(), "target": rows()["x"].argmax(1)},
            passes.Temperature(),
            "expected rows with mistakes",
        ),
        (
            LOGITS,
            {**rows(), "target": np.where(np.arange(400) % 4, rows()["x"].argmin(1), rows()["target"])},
            passes.Temperature(),
            "expected larger logits of the right classes, found a best scale of -",
        ),
        (
            LOGITS,
            {**rows(), "target": rows()["target"] + 1},
            passes.Temperature(),
            "expected a class from 0 to 4 as th",
        ),
        (
            LOGITS,
            {**rows(), "target": rows()["target"] // 4},
            passes.VectorScaling(),
            "found none of class 2",
        ),
        (
            LOGITS,
            {"x": rows()["x"]},
            passes.Temperature(),
            "expected an array 'target' to learn from, found 'x'",
        ),
        (LOGITS, rows(), passes.Platt(), "found 'y' of shape [N,5]: take passes.VectorScaling"),
        (COLUMN, rows(), passes.VectorScaling(), "found 'y' of shape [N,1]: take passes.Platt"),
        (
            LOGITS,
            rows(),
            passes.PredictionInterval(0.1),
            "PredictionInterval: expected an output [N] or [N, 1], found",
        ),
        (
            COLUMN,
            rows(),
            passes.PredictionInterval(0.1, "cqr"),
            "expected an output [N, 2], a lower and an upper qu",
        ),
        (LOGITS, rows(), passes.VarianceScaling(), "expected targets of shape [400, 5], found [400]"),
        (
            SIGMOIDS,
            rows(),
            passes.Temperature(),
            "one label for each row, found a Sigmoid for each of 5 columns of 'y'",
        ),
        (
            SIGMOIDS,
            rows(),
            passes.PredictionSet(),
            "one label for each row, found a Sigmoid for each of 5 columns",
        ),
        (
            RATE,
            two(),
            passes.Platt(),
            "expected from_logits=true or false, since 'y' is between 0 and 1 in all rows",
        ),
        (
            ROWS,
            rows(),
            passes.Temperature(),
            "expected a Softmax over the classes of each row, found 'y' of shape",
        ),
        (
            LOGITS,
            {**rows(), "sample_weight": np.ones(400)},
            passes.Temperature(),
            "expected rows that count alike, found an array 'sample_weight': leave it out",
        ),
        (
            LOGITS.replace("x", "target"),
            rows(),
            passes.Temperature(),
            "expected a model without an input 'target'",
        ),
    ],
)
def test_bad_input_is_answered_in_one_line(
    text: str, data: dict[str, np.ndarray], calibration: passes.Calibration, message: str
) -> None:
    file = model(text)
    with pytest.raises(GraphoptError) as error:
        graphopt.calibrate(file, data, calibration)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("first", [passes.PredictionSet(), passes.LastLayerLaplace(1.0)], ids=["sets", "laplace"])
def test_the_record_in_the_file_tells_what_was_learnt(first: passes.PredictionSet, tmp_path: Path) -> None:
    """Names told it: an output of the file that was called `probability` was never calibrated."""
    file = model("g (float[N,5] x) => (float[N,5] y) { y = MatMul(x, w) }", w=np.eye(5, dtype=np.float32))
    graphopt.save(graphopt.calibrate(file, rows(), first), tmp_path / "sure.onnx")
    with pytest.raises(GraphoptError, match=r"learnt, found the output '(y\.variance|probability)': calibrate before"):
        graphopt.calibrate(tmp_path / "sure.onnx", rows(), passes.Temperature())
    with pytest.raises(GraphoptError, match=r"without the output 'probability', which it adds"):
        graphopt.calibrate(tmp_path / "sure.onnx", rows(), passes.PredictionSet())
    step = graphopt.compile(tmp_path / "sure.onnx", loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    again = graphopt.Executor(step).trained()
    with pytest.raises(GraphoptError, match="nothing has been learnt"):
        graphopt.calibrate(again, rows(), passes.Temperature())
    own = model(LOGITS.replace(" y)", " probability)").replace("y =", "probability ="))
    found = graphopt.run(graphopt.calibrate(own, rows(), passes.Temperature()), {"x": rows()["x"]})
    expected = graphopt.run(graphopt.calibrate(model(LOGITS), rows(), passes.Temperature()), {"x": rows()["x"]})
    np.testing.assert_array_equal(found["probability"], expected["y"])


def test_passes_are_needed_and_learn_by_calibrate_alone() -> None:
    with pytest.raises(GraphoptError, match=r"expected passes after the data, such as .*, found none"):
        graphopt.calibrate(model(LOGITS), rows())
    with pytest.raises(GraphoptError, match=r"Temperature learns from rows that did not train: call"):
        graphopt.compile(models.linear((2,), 3), training=passes.Temperature(), loss=passes.CrossEntropy())


def probabilities() -> dict[str, np.ndarray]:
    return {**rows(), "x": softmax(rows()["x"].astype(np.float64), axis=1).astype(np.float32)}


@pytest.mark.parametrize("passed", [passes.Temperature(), passes.VectorScaling(), passes.PredictionSet(0.1)], ids=repr)
def test_an_output_of_unknown_origin_that_sums_to_1_has_probabilities(passed: passes.Calibration) -> None:
    """A tree's were taken for logits, so that calibrated ones summed to another number."""
    found = graphopt.run(graphopt.calibrate(model(LOGITS), probabilities(), passed), {"x": probabilities()["x"]})
    logits = {**rows(), "x": np.log(probabilities()["x"])}
    peer = graphopt.run(graphopt.calibrate(model(LOGITS), logits, passed), {"x": logits["x"]})
    if "set" in found:
        np.testing.assert_array_equal(found["set"], peer["set"])
    y, expected = (found["probability"], peer["probability"]) if "set" in found else (found["y"], softmax(peer["y"], 1))
    np.testing.assert_allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize("ending", ["LogSoftmax<axis = 1>(x)", "Softmax<axis = 1>(x)"])
def test_a_logarithm_of_probabilities_stays_one(ending: str) -> None:
    text = f"g (float[N,5] x) => (float[N,5] y) {{ y = {ending} }}"
    found = graphopt.run(
        graphopt.calibrate(model(text), rows(), passes.Temperature(), passes.PredictionSet(0.1)),
        {"x": rows()["x"]},
    )
    p = np.exp(found["y"]) if "Log" in ending else found["y"]
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(found["probability"], p, atol=1e-6)


def test_a_label_that_reads_the_logits_agrees() -> None:
    text = "y = Softmax<axis = 1>(z) label = ArgMax<axis = 1, keepdims = 0>(z)"
    text = f"g (float[N,5] x) => (float[N,5] y, int64[N] label) {{ z = Identity(x) {text} }}"
    found = graphopt.run(graphopt.calibrate(model(text), rows(), passes.VectorScaling()), {"x": rows()["x"]})
    np.testing.assert_array_equal(found["label"], found["y"].argmax(1))
    assert (found["label"] != rows()["x"].argmax(1)).any()


def test_a_variance_and_an_interval_are_learnt_together_and_again() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 5)).astype(np.float32)
    data = {"x": x, "target": x.sum(1, keepdims=True) + rng.standard_normal((60, 1))}
    both = graphopt.calibrate(model(COLUMN), data, passes.VarianceScaling(), passes.PredictionInterval(0.1))
    again = graphopt.run(graphopt.calibrate(both, data, passes.VarianceScaling()), {"x": x})
    np.testing.assert_allclose(again["y.variance"], np.square(x.sum(1) - data["target"][:, 0]).mean(), rtol=1e-5)
    assert {"lower", "upper"} <= again.keys()


def test_a_file_of_scikit_learn_keeps_its_outputs_and_its_opset() -> None:
    """The label was lost, and an inner value took its place."""
    nodes = "z = Mul(x, x) y = Softmax<axis = 1>(z) n = ArgMax<axis = 1, keepdims = 0>(z)"
    text = f"g (float[N,3] x) => (string[N] label, float[N,3] y) {{ {nodes} label = Gather(names, n) }}"
    file = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 15]> {text}')
    file.graph.initializer.append(onnx.helper.make_tensor("names", onnx.TensorProto.STRING, [3], [b"a", b"b", b"c"]))
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((60, 3)).astype(np.float32), "target": rng.integers(0, 3, 60)}
    calibrated = graphopt.calibrate(file, data, passes.VectorScaling(), passes.PredictionSet(0.1))
    assert [y.name for y in calibrated.graph.outputs] == ["label", "y", "probability", "set"]
    assert (calibrated.opset_imports[""], calibrated.ir_version) == (15, 8)
    found = graphopt.run(calibrated, {"x": data["x"]})
    np.testing.assert_array_equal(found["label"], np.array(["a", "b", "c"])[found["y"].argmax(1)])
    explained = graphopt.explain(file, passes.Ensemble([file]))
    assert [y.name for y in explained.graph.outputs][:2] == ["label", "y"]
    assert explained.opset_imports[""] == 15


def test_a_fixed_batch_learns_from_all_rows() -> None:
    """The last three rows were left out."""
    fixed = model("g (float[7,5] x) => (float[7,5] y) { y = Identity(x) }")
    found, expected = (graphopt.calibrate(each, some(10), passes.Temperature()) for each in (fixed, model(LOGITS)))
    np.testing.assert_allclose(*(numbers(each)["y.log_temperature"] for each in (found, expected)), rtol=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_classifier_calibrates_with_rows_of_its_own(classes: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, 4))
    y = np.array(["a", "b", "c"])[(x[:, 0] + rng.standard_normal(600) > 0).astype(int) + (classes > 2) * (x[:, 1] > 1)]
    options = {"hidden_layer_sizes": (30,), "learning_rate_init": 0.05, "max_iter": 15, "random_state": 0}
    sure = graphopt.OnnxClassifier(calibration=0.3, **options).fit(x, y)
    kept, held_out, target, own = train_test_split(x, y, test_size=0.3, random_state=0, stratify=y)
    plain = graphopt.OnnxClassifier(**options).fit(kept, target)
    log_p, numbers = np.log(plain.predict_proba(held_out)), np.searchsorted(plain.classes_, own)
    best = minimize_scalar(lambda t: cross_entropy(log_p / np.exp(t), numbers), bracket=(0, 1), tol=1e-12).x
    assert abs(sure.log_temperature_ - best) < 1e-5
    assert abs(best) > 0.01
    expected = softmax(np.log(plain.predict_proba(x)) / np.exp(best), axis=1)
    np.testing.assert_allclose(sure.predict_proba(x), expected, atol=1e-6)
    np.testing.assert_array_equal(sure.predict(x), plain.predict(x))
    found = graphopt.run(sure.to_onnx(), {"X": x.astype(np.float32)})
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-5)
    np.testing.assert_array_equal(found["label"], sure.predict(x))


def test_the_classifier_calibrates_by_the_weights_of_rows() -> None:
    """They counted in the training alone."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 4))
    y = (x[:, 0] + rng.standard_normal(400) > 0).astype(int)
    weights = np.where(x[:, 1] > 0, 3.0, 0.1)
    options = {"hidden_layer_sizes": (30,), "learning_rate_init": 0.05, "max_iter": 15, "random_state": 0}
    sure = graphopt.OnnxClassifier(calibration=0.3, **options).fit(x, y, weights)
    parts = train_test_split(x, y, weights, test_size=0.3, random_state=0, stratify=y)
    plain = graphopt.OnnxClassifier(**options).fit(*parts[::2])
    log_p, weight = np.log(plain.predict_proba(parts[1])), parts[5]

    def loss(t: float) -> float:
        return -np.average(log_softmax(log_p / np.exp(t), axis=1)[np.arange(len(weight)), parts[3]], weights=weight)

    best = minimize_scalar(loss, bracket=(0, 1), tol=1e-12).x
    assert abs(sure.log_temperature_ - best) < 1e-5


def test_the_classifier_that_makes_no_mistake_keeps_its_probabilities() -> None:
    x = np.repeat([-1.0, 1.0], 50)[:, None]
    options = {"hidden_layer_sizes": (), "learning_rate_init": 0.5, "max_iter": 200, "random_state": 0}
    classifier = graphopt.OnnxClassifier(calibration=0.2, tol=0, **options)
    with pytest.warns(UserWarning, match="calibration: probabilities stay as they are: Temperature: expected rows"):
        classifier.fit(x, x[:, 0] > 0)
    assert classifier.log_temperature_ == 0
    classifier.partial_fit(x, x[:, 0] > 0)
    assert not hasattr(classifier, "log_temperature_")


def test_the_classifier_refuses_to_calibrate_several_labels() -> None:
    with pytest.raises(GraphoptError, match="calibration: expected one label for each row"):
        graphopt.OnnxClassifier(calibration=0.1).fit(np.zeros((20, 2)), np.eye(2, dtype=int)[np.arange(20) % 2])


def test_an_output_that_has_lost_its_role_is_named() -> None:
    """Without it, `trained` returned the training graph, with the input `target`, without a word."""

    class Doubled(passes.Parameters):
        def rewrite(self, model: ir.Model) -> None:
            super().rewrite(model)
            with Emitter(model) as op:
                y = model.graph.outputs[0]
                y.name = "before"
                model.graph.outputs[0] = op.Mul(y, 2.0, _outputs=["y"])

    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    executor = graphopt.Executor(graphopt.compile(models.linear((2,), 3), parameters=Doubled(), **steps))
    with pytest.raises(GraphoptError, match="expected the role 'prediction' of the output 'y', found none"):
        executor.trained()


def test_a_run_is_calibrated_on_the_rows_that_it_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A threshold of the rows that trained would be smaller."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["folder=run", "fit.epochs=3", "quiet=true", "fit.seed=4", "executor.native=false"]) == 0
    assert cli.main(["calibrate", "run", "conformal=prediction_set"]) == 0
    assert "360 rows held out by the run" in capsys.readouterr().out
    _, held_out = graphopt.data.hold_out(1797, 0.2, seed=4)
    digits = graphopt.data.digits().arrays
    rows = {name: x[held_out] for name, x in digits.items()}
    expected = graphopt.calibrate("run/trained.onnx", rows, passes.Temperature(), passes.PredictionSet())
    found = graphopt.load("run/calibrated.onnx")
    assert numbers(found) == numbers(expected)
    a, b = (graphopt.run(each, {"x": digits["x"]}) for each in (found, expected))
    np.testing.assert_array_equal(a["set"], b["set"])
    page = Path("run/calibration.html").read_text()
    assert page.count("<svg") == 2
    assert "log_loss" in page
    for words, message in (
        *(
            (
                ["calibrate", "run", f"fit.{word}"],
                f"the run's own seed, shuffle and validation, found fit.{word}: leave",
            )
            for word in ("seed=2", "validation=0.3")
        ),
        (["calibrate", "run", "rows=trained"], "rows=trained: expected rows that did not train"),
        (
            ["calibrate", "run", "calibrate=none"],
            "expected calibrate or conformal, found calibrate=none conformal=n",
        ),
        (["calibrate", "run", "calibrate=platt"], "take passes.VectorScaling"),
    ):
        assert cli.main(words) == 1
        assert message in capsys.readouterr().err
    assert cli.main(["folder=all", "fit.epochs=1", "fit.validation=null", "quiet=true", "executor.native=false"]) == 0
    assert cli.main(["calibrate", "all"]) == 1
    assert "expected a run that held rows out, found one that trained on all 1,797" in capsys.readouterr().err
    assert not Path("all/calibrated.onnx").exists()


def test_the_same_rows_under_another_path_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They counted as other rows, so that a temperature was learnt from those that trained."""
    monkeypatch.chdir(tmp_path)
    drawn = np.random.default_rng(0).permutation(400)
    for name, order in (("rows", range(400)), ("copy", range(400)), ("others", drawn)):
        np.savez(f"{name}.npz", x=rows()["x"][order], target=rows()["target"][order])
    words = ["data=npz", "data.path=rows.npz", "model=linear", "fit.epochs=2", "fit.validation=0.25"]
    assert cli.main([*words, "folder=run", "quiet=true", "executor.native=false"]) == 0
    for name, about in (("copy", "100 rows held out by the run"), ("others", "400 rows")):
        assert cli.main(["calibrate", "run", f"data.path={name}.npz"]) == 0
        assert f"{about}. " in Path("run/calibration.html").read_text(), name
    capsys.readouterr()


def test_the_first_difference_ends_the_comparison_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that a record names may be `/`."""
    for name in ("run", "copy", "other"):
        (tmp_path / name / "cat").mkdir(parents=True)
        (tmp_path / name / "cat" / "1.png").write_text(name[:2])
    (tmp_path / "run" / "again").symlink_to(tmp_path / "run")
    (tmp_path / "copy" / "cat" / "1.png").write_text("ru")
    record = functools.partial(RunRecord, tmp_path, {}, started_in=str(tmp_path))

    def is_same(then: str, now: str) -> bool:
        return _is_same(record(resolved={"data": {"path": then}}), {"path": str(tmp_path / now)})

    assert is_same("run", "run") and is_same("copy/../run", "run") and is_same("run/cat", "copy/cat")
    assert not is_same("run", "copy") and not is_same("other", "copy") and not is_same("none", "copy")
    (tmp_path / "copy" / "again").symlink_to(tmp_path / "copy")
    assert not is_same("run", "copy")  # a circle is not known to be the same
    walked = []
    monkeypatch.setattr("os.listdir", lambda place: walked.append(place) or [str(place)])
    assert not is_same("/", "copy")
    assert len(walked) == 2


def measures(page: str) -> dict[str, list[float]]:
    """Return the numbers of the table of calibration.html, by measure."""
    lines = re.findall(r"<tr><td>(\w+)</td>(.*?)</tr>", Path(page).read_text())
    return {name: [float(x) for x in re.findall(r"<td[^>]*>([^<]+)</td>", cells)] for name, cells in lines}


def test_quantiles_of_a_file_are_measured_by_their_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two columns were reshaped to the one of the target, a traceback."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    graphopt.save(model("g (float[N,2] x) => (float[N,2] y) { y = Identity(x) }"), "q.onnx")
    x = np.sort(rng.standard_normal((100, 2)), axis=1).astype(np.float32)
    np.savez("d.npz", x=x, target=rng.standard_normal((100, 1)).astype(np.float32))
    words = ["calibrate", "q.onnx", "data=npz", "data.path=d.npz", "calibrate=none", "folder=run"]
    assert cli.main([*words, "conformal=prediction_interval", "conformal.score=cqr"]) == 0
    found = measures("run/calibration.html")
    assert {*found} == {"coverage", "mean_width"}
    assert 0.8 < found["coverage"][0] <= 1


@pytest.mark.parametrize("chosen", ["calibrate=none conformal=prediction_set", "calibrate=temperature"])
def test_probabilities_of_a_file_are_measured_before(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run has noted of its output what it is."""
    monkeypatch.chdir(tmp_path)
    text = "g (float[N,5] x) => (float[N,5] probabilities) { probabilities = Softmax<axis=1>(x) }"
    graphopt.save(model(text), "c.onnx")
    np.savez("c.npz", **rows())
    assert cli.main(["calibrate", "c.onnx", "data=npz", "data.path=c.npz", "folder=run", *chosen.split()]) == 0
    found, p = measures("run/calibration.html"), softmax(rows()["x"].astype(float), axis=1)
    assert found["log_loss"][0] == pytest.approx(log_loss(rows()["target"], p), rel=1e-3)
    assert found["accuracy"] == pytest.approx([(p.argmax(1) == rows()["target"]).mean()] * 2, rel=1e-3)
    assert "set" in chosen or found["log_loss"][1] < found["log_loss"][0]


@pytest.mark.parametrize("score", ["lac", "aps"])
@pytest.mark.parametrize("ending", ["y = MatMul(x, w)", "z = MatMul(x, w) y = Softmax(z)"])
def test_a_file_with_sets_is_evaluated(ending: str, score: str) -> None:
    """Of a Softmax, `probability` is the output: a traceback, and a trained file with two outputs of one name."""
    data = rows(600)
    learnt, others = ({k: v[part] for k, v in data.items()} for part in (slice(300), slice(300, 600)))
    network = model(f"g (float[N,5] x) => (float[N,5] y) {{ {ending} }}", w=np.eye(5, dtype=np.float32))
    sure = graphopt.calibrate(network, learnt, passes.Temperature(), passes.PredictionSet(0.2, score))
    loss = passes.CrossEntropy(from_logits="Softmax" not in ending)
    executor = graphopt.Executor(graphopt.compile(sure, loss=loss, optimizer=passes.SGD(0.1)))
    assert [y.name for y in executor.trained().graph.output] == ["y", "probability", "set"]
    names = ["coverage", "mean_width", "ece", "brier", "log_loss"]
    found = graphopt.evaluate(executor, others, metrics=names, batch_size=70)
    outputs = graphopt.run(sure, {"x": others["x"]})
    chosen, p, own = outputs["set"], outputs["probability"], others["target"]
    assert found["coverage"] == pytest.approx(chosen[np.arange(300), own].mean())
    assert found["mean_width"] == pytest.approx(chosen.sum(1).mean())
    assert found["log_loss"] == pytest.approx(log_loss(own, p), rel=1e-5)
    assert found["brier"] == pytest.approx(brier_score_loss(own, p, labels=range(5)), rel=1e-5)
    plain = graphopt.Executor(graphopt.compile(network, loss=loss, optimizer=passes.SGD(0.1)))
    for name, due in (
        ("coverage", "prediction sets of classes"),
        ("mean_width", "prediction sets or intervals"),
    ):
        with pytest.raises(GraphoptError, match=f"metrics: {name}: expected {due}, found none: calibrate the file"):
            graphopt.evaluate(plain, others, metrics=[name])


def test_a_file_with_intervals_is_evaluated() -> None:
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((60, 5)).astype(np.float32), "target": rng.standard_normal((60, 1))}
    network = model("g (float[N,5] x) => (float[N,1] y) { y = MatMul(x, w) }", w=np.ones((5, 1), np.float32))
    sure = graphopt.calibrate(network, data, passes.PredictionInterval(0.3))
    step = graphopt.compile(sure, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    found = graphopt.evaluate(graphopt.Executor(step), data, metrics=["coverage", "mean_width"])
    ends = graphopt.run(sure, {"x": data["x"]})
    inside = (ends["lower"] <= data["target"]) & (data["target"] <= ends["upper"])
    assert found["coverage"] == pytest.approx(inside.mean())
    assert found["mean_width"] == pytest.approx((ends["upper"] - ends["lower"]).mean())


def test_a_table_s_run_is_calibrated_behind_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = [
        f"{c},{a:.3f},{'yes' if a + rng.standard_normal() > 0 else 'no'}"
        for a, c in zip(rng.standard_normal(300), rng.choice(["u", "v"], 300), strict=True)
    ]
    Path("rows.csv").write_text("\n".join(["kind,size,bought", *lines]) + "\n")
    run = [
        "data=csv",
        "data.path=rows.csv",
        "data.target=bought",
        "data.columns=auto",
        "fit.epochs=3",
        "folder=run",
    ]
    assert cli.main([*run, "quiet=true", "executor.native=false"]) == 0
    assert cli.main(["calibrate", "run"]) == 0
    before, after = (graphopt.load(f"run/{name}.onnx") for name in ("trained", "calibrated"))
    assert [y.name for y in before.graph.outputs] == [y.name for y in after.graph.outputs]
    assert any("temperature" in name for name in after.graph.initializers)


@pytest.mark.parametrize("dtype", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
@pytest.mark.parametrize("score", ["lac", "aps"])
def test_outputs_of_16_bits_are_calibrated_in_float32(dtype: int, score: str) -> None:
    """NumPy has no bfloat16 that ONNX Runtime returns, and sums of float16 are rounded to a thousandth."""
    narrow, word = onnx.helper.tensor_dtype_to_np_dtype(dtype), {10: "float16", 16: "bfloat16"}[dtype]
    file = model(f"g (float[N,5] x) => ({word}[N,5] y) {{ y = Cast<to = {dtype}>(x) }}")
    data = {**rows(), "x": rows()["x"].astype(narrow).astype(np.float32)}
    steps = passes.Temperature(), passes.PredictionSet(0.1, score)
    plain, sure = (graphopt.calibrate(each, data, *steps) for each in (model(LOGITS), file))
    assert {y.name: y.dtype.name for y in sure.graph.outputs}["y"] == onnx.TensorProto.DataType.Name(dtype)
    session = onnxruntime.InferenceSession(ir.to_proto(sure).SerializeToString(), providers=["CPUExecutionProvider"])
    p, chosen = session.run(["probability", "set"], {"x": data["x"]})
    expected = graphopt.run(plain, {"x": data["x"]})
    assert p.dtype == np.float32
    np.testing.assert_allclose(p, expected["probability"], atol=1e-2)  # y is rounded after the temperature
    assert (chosen == expected["set"]).mean() > 0.98
    assert chosen[np.arange(len(p)), data["target"]].mean() >= 0.9


def test_each_output_of_a_network_gets_a_set_of_its_own() -> None:
    """The second output's are called OUTPUT.KIND, since the names of the first are taken."""
    text = "g (float[N,5] x) => (float[N,5] a, float[N,5] b) { a = Identity(x) b = Neg(x) }"
    data = rows()
    with pytest.raises(GraphoptError, match="PredictionSet: expected a model without the output 'probability'"):
        graphopt.calibrate(model(text), data, *[passes.PredictionSet(output="a")] * 2)
    both = graphopt.calibrate(model(text), data, passes.PredictionSet(output="a"), passes.PredictionSet(output="b"))
    assert [y.name for y in both.graph.outputs] == ["a", "b", "probability", "set", "b.probability", "b.set"]
    found = graphopt.run(both, {"x": data["x"]})
    for name, set_of in (("a", "set"), ("b", "b.set")):
        alone = graphopt.calibrate(model(text), data, passes.PredictionSet(output=name))
        np.testing.assert_array_equal(found[set_of], graphopt.run(alone, {"x": data["x"]})["set"])


def test_a_forest_of_skl2onnx_stays_a_distribution() -> None:
    """ONNX Runtime sums its trees to -7e-7 where scikit-learn has 0: such rates were taken for logits."""
    from sklearn.ensemble import RandomForestClassifier

    skl2onnx = pytest.importorskip("skl2onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 4)).astype(np.float32)
    target = (x[:, 0] + rng.standard_normal(400) > 0).astype(np.int64)
    forest = RandomForestClassifier(20, max_depth=4, random_state=0).fit(x[:200], target[:200])
    file = skl2onnx.to_onnx(forest, x[:2], options={"zipmap": False}, target_opset={"": 18, "ai.onnx.ml": 3})
    (name,) = (i.name for i in file.graph.input)
    temperature = passes.Temperature(output="probabilities")
    found = graphopt.run(graphopt.calibrate(file, (x[200:], target[200:]), temperature), {name: x[200:]})
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, atol=1e-5)
    peer = CalibratedClassifierCV(FrozenEstimator(forest), method="temperature").fit(x[200:], target[200:])
    np.testing.assert_allclose(found["probabilities"], peer.predict_proba(x[200:]), atol=2e-3)
    np.testing.assert_array_equal(found["label"], forest.predict(x[200:]))


def test_a_file_with_dictionaries_returns_what_is_calibrated() -> None:
    """skl2onnx's ZipMap, which it adds by default, was left out, and with it the only trace of the calibration."""
    skl2onnx = pytest.importorskip("skl2onnx")
    x, target = rows()["x"], rows()["target"]
    fitted = LogisticRegression().fit(x[:100], target[:100])
    opset = {"": 18, "ai.onnx.ml": 3}
    plain, mapped = (skl2onnx.to_onnx(fitted, x[:1], options={"zipmap": y}, target_opset=opset) for y in (False, True))
    expected = graphopt.calibrate(plain, (x[100:], target[100:]), passes.Temperature())
    with pytest.warns(UserWarning, match="left out of the new one: output_probability"):
        calibrated = graphopt.calibrate(mapped, (x[100:], target[100:]), passes.Temperature())
    assert [y.name for y in calibrated.graph.outputs] == ["output_label", "probabilities"]
    found = graphopt.run(calibrated, {"X": x})
    np.testing.assert_array_equal(found["probabilities"], graphopt.run(expected, {"X": x})["probabilities"])
    onnx.checker.check_model(ir.to_proto(calibrated), full_check=True)


@pytest.mark.parametrize("names", [["ham", "eggs", "spam"], [1, 2, 3], [-1, 5, 7]], ids=str)
@pytest.mark.parametrize("source", ["skl2onnx", "OnnxClassifier"])
def test_classes_have_the_numbers_that_the_file_gives_them(source: str, names: list[object]) -> None:
    """Names were numbered by the rows alone: without a row of the first class, all were off by one, without a word."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, 4)).astype(np.float32)
    target = (2 * x[:, :3] + rng.gumbel(size=(600, 3))).argmax(1)
    own = np.sort(np.array(names))[target]
    if source == "skl2onnx":
        skl2onnx, fitted = pytest.importorskip("skl2onnx"), LogisticRegression().fit(x[:200], own[:200])
        file = skl2onnx.to_onnx(fitted, x[:1], options={"zipmap": False}, target_opset={"": 18, "ai.onnx.ml": 3})
    else:
        classifier = graphopt.OnnxClassifier(hidden_layer_sizes=(), learning_rate_init=0.05, max_iter=20)
        file = classifier.fit(x[:200], own[:200]).to_onnx()
    sets = passes.PredictionSet(0.2, output="probabilities")
    for rows in (np.arange(200, 600), 200 + np.flatnonzero(target[200:] != 0)):
        (name,) = (value.name for value in file.graph.input)
        text = np.array([str(label) for label in own])[rows]
        forms = [(x[rows], own[rows]), (x[rows], text), {name: x[rows], "target": text.astype(object)}]
        arrays = {name: x[rows], "target": target[rows]}
        numbered = graphopt.data.Dataset(arrays, labels=[str(label) for label in sorted(names)])
        expected = graphopt.run(graphopt.calibrate(file, numbered, sets), {name: x})["set"]
        covered = expected[rows, target[rows]].mean()
        assert 0.8 <= covered < 0.85
        for data in forms:
            np.testing.assert_array_equal(
                graphopt.run(graphopt.calibrate(file, data, sets), {name: x})["set"], expected
            )


def test_rows_without_a_class_are_measured_by_the_names_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CSV numbered its own names, an accuracy of 0.21 in place of 0.62, and sets were taken for labels."""
    skl2onnx = pytest.importorskip("skl2onnx")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, 4)).astype(np.float32)
    target = (2 * x[:, :3] + rng.gumbel(size=(600, 3))).argmax(1)
    own = np.array(["eggs", "ham", "spam"])[target]
    fitted = LogisticRegression().fit(x[:200], own[:200])
    file = skl2onnx.to_onnx(fitted, x[:1], options={"zipmap": False}, target_opset={"": 18, "ai.onnx.ml": 3})
    onnx.save(file, "file.onnx")
    rest = 200 + np.flatnonzero(target[200:] != 0)
    lines = [",".join([*map(repr, map(float, x[i])), own[i]]) for i in rest]
    Path("rows.csv").write_text("\n".join(["a,b,c,d,kind", *lines]))
    of = ["data=csv", "data.path=rows.csv", "data.target=kind"]
    assert cli.main(["calibrate", "file.onnx", *of, "conformal=prediction_set", "folder=sure"]) == 0
    assert cli.main(["evaluate", "sure/calibrated.onnx", *of, "fit.metrics=[accuracy,coverage]", "folder=after"]) == 0
    assert cli.main(["evaluate", "file.onnx", *of, "fit.metrics=[accuracy]", "folder=before"]) == 0
    before, after = (json.loads(Path(name, "metrics.json").read_text()) for name in ("before", "after"))
    accuracy = fitted.score(x[rest], own[rest])
    assert before["accuracy"] == after["accuracy"] == pytest.approx(accuracy)
    assert measures("sure/calibration.html")["accuracy"][0] == pytest.approx(accuracy, rel=1e-3)
    assert 0.9 <= after["coverage"] < 0.92


def test_names_and_numbers_that_may_be_others_are_refused() -> None:
    names = '["1", "2", "3", "4", "5"]'
    file = model(LOGITS)
    file.metadata_props.add(key="labels", value=names)
    x, target = rows()["x"], rows()["target"]
    few = np.isin(target, [1, 2])
    for of, y, message in (
        (file, np.array([*"12345"])[target].astype(int)[few], "found 2, 3, which may be both: give the names as text"),
        (file, np.array([*"abcde"])[target], "expected the classes 1, 2, 3, 4, 5, found a, b, c, d, e"),
        (
            model(LOGITS),
            np.array([*"abcde"])[target][few],
            "the names of all classes of a file that names none, found b",
        ),
    ):
        for data in ((x[: len(y)], y), {"x": x[: len(y)], "target": y}):
            with pytest.raises(GraphoptError, match=message):
                graphopt.calibrate(of, data, passes.Temperature())
    expected = numbers(graphopt.calibrate(model(LOGITS), rows(), passes.Temperature()))
    for of, y in ((file, target), (file, target + 1)):
        assert numbers(graphopt.calibrate(of, (x, y), passes.Temperature())) == expected
    ordered = graphopt.data.Dataset({"x": x, "target": target}, labels=[*"edcba"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers(graphopt.calibrate(model(LOGITS), ordered, passes.Temperature())) == expected
    text = np.array([*"abcde"])[target]
    for data in ((x, text), {"x": x, "target": text}):
        with pytest.warns(UserWarning, match="a, b, c, d, e are taken for its classes from 0 on, in this order"):
            assert numbers(graphopt.calibrate(model(LOGITS), data, passes.Temperature())) == expected


def test_constants_that_operators_read_are_no_names_of_classes() -> None:
    """A regressor's training targets were, and went into the file; so were the classes of one of its classifiers."""
    skl2onnx = pytest.importorskip("skl2onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 3)).astype(np.float32)
    y = (np.clip(np.round(2.5 + x[:, 0] + 0.5 * rng.standard_normal(200)), 1, 4) + 0.5).astype(np.float32)
    file = skl2onnx.to_onnx(KNeighborsRegressor(3).fit(x[:60], y[:60]), x[:1], target_opset={"": 18, "ai.onnx.ml": 3})
    calibrated = graphopt.calibrate(file, (x[60:], y[60:]), passes.PredictionInterval(0.1))
    found = graphopt.run(calibrated, {"X": x[60:]})
    assert "labels" not in calibrated.metadata_props
    error = np.sort(np.abs(found["variable"][:, 0] - y[60:]))[126]  # the 127th of 140
    np.testing.assert_allclose(found["upper"] - found["lower"], 2 * error, rtol=1e-5)
    assert class_names(graphopt.load(file)) is None
    target = x.argmax(1)
    pairs = OneVsOneClassifier(LogisticRegression()).fit(x, target)
    assert class_names(graphopt.load(skl2onnx.to_onnx(pairs, x[:1], options={"zipmap": False}))) is None
    for fitted in (KNeighborsClassifier(3), LogisticRegression()):
        for names in (["a", "b", "c"], [1, 2, 3]):
            proto = skl2onnx.to_onnx(fitted.fit(x, np.array(names)[target]), x[:1], options={"zipmap": False})
            assert class_names(graphopt.load(proto)) == [*map(str, names)]
            del proto.graph.output[0]
            assert class_names(graphopt.load(proto)) is None


def test_large_whole_numbers_name_classes() -> None:
    """Through float64, three classes were all called 1e+17."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((90, 3)).astype(np.float32)
    names = 10**17 + np.arange(3)
    own = names[x.argmax(1)]
    file = graphopt.OnnxClassifier(hidden_layer_sizes=(), max_iter=20).fit(x, own).to_onnx()
    texts = [*map(str, names)]
    assert [p.value for p in file.metadata_props if p.key == "labels"] == [json.dumps(texts)]
    sets, rows = passes.PredictionSet(0.2, output="probabilities"), own != names[0]
    found = [graphopt.calibrate(file, (x[rows], y[rows]), sets) for y in (own, own.astype(str))]
    assert numbers(found[0]) == numbers(found[1])
    assert [class_name(y) for y in (True, np.int64(-3), 2.0, np.float32(0.5), "a", b"b")] == [
        "1",
        "-3",
        "2",
        "0.5",
        "a",
        "b",
    ]


@pytest.mark.parametrize("score", ["aps", "raps"])
def test_sets_of_sure_networks_are_those_of_float64(score: Literal["aps", "raps"]) -> None:
    """A tolerance beside 1 was as large as what is less likely than the first class: all ten were in each set."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((2000, 10)).astype(np.float32)
    target = (4 * z + rng.gumbel(size=z.shape)).argmax(1)
    z *= 30
    file = model("g (float[N,10] x) => (float[N,10] y) { y = Identity(x) }")
    sure = passes.PredictionSet(0.1, score, from_logits=True, penalty=1e-12, rank=3)
    found = graphopt.run(graphopt.calibrate(file, (z[:1000], target[:1000]), sure), {"x": z[1000:]})["set"]
    p = softmax(z.astype(np.float64), axis=1)
    order = np.argsort(-p, axis=1)
    falling = np.take_along_axis(p, order, axis=1)
    less = np.cumsum(np.c_[np.zeros(2000), falling[:, :0:-1]], axis=1)[:, ::-1]
    if score == "raps":
        less = less - 1e-12 * np.maximum(np.arange(1, 11) - 3, 0)
    likelihoods = np.empty_like(p)
    np.put_along_axis(likelihoods, order, less, axis=1)
    own = np.sort(likelihoods[np.arange(1000), target[:1000]])
    expected = likelihoods[1000:] >= own[1000 - 901] * (1 - 1e-6 * np.sign(own[1000 - 901]))
    assert expected.sum(1).mean() < 6
    assert (found != expected).mean() < 1e-3  # float32 rounds the less likely ones


def test_rates_that_rounding_makes_negative_are_rates() -> None:
    p = softmax(rows()["x"].astype(float), axis=1).astype(np.float32)
    below = np.where(p < 1e-4, np.float32(-7e-7), p)
    for passes_ in ([passes.Temperature()], [passes.PredictionSet()]):
        calibrated = graphopt.calibrate(model(LOGITS), {"x": below, "target": rows()["target"]}, *passes_)
        found = graphopt.run(calibrated, {"x": below})
        np.testing.assert_allclose(found.get("probability", found["y"]).sum(1), 1, atol=1e-3)


def test_a_thousand_classes_of_which_two_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's method ends where rounding hides what a step gains: it took 1,900 turns of its line search."""
    rng, count = np.random.default_rng(0), []
    z = (rng.standard_normal((600, 1000)) * 2).astype(np.float32)
    p = np.exp(z)
    p[:, [3, 997]] = 0
    target = np.array([rng.choice(1000, p=row / row.sum()) for row in p.astype(np.float64)])
    turn = calibration._log_softmax
    monkeypatch.setattr(calibration, "_log_softmax", lambda z: (count.append(1), turn(z))[1])
    file = model("g (float[N,1000] x) => (float[N,1000] y) { y = Mul(x, two) }", two=np.float32(2))
    data = {"x": z, "target": target}
    calibrated = graphopt.calibrate(file, data, passes.Temperature(), passes.PredictionSet(0.1, "aps"))
    best = minimize_scalar(lambda t: cross_entropy(2.0 * z / np.exp(t), target), bracket=(0, 1), tol=1e-12).x
    assert abs(numbers(calibrated)["y.log_temperature"] - best) < 1e-5
    assert len(count) < 40
    assert graphopt.run(calibrated, {"x": z})["set"][np.arange(600), target].mean() >= 0.9
    with pytest.raises(GraphoptError, match="expected rows of each of 1000 classes, found none of class"):
        graphopt.calibrate(file, data, passes.VectorScaling())
