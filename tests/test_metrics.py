"""Metrics: on ragged batches, they equal scikit-learn's on all rows at once."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import messages
import numpy as np
import pytest
import sklearn.metrics as sk
from builders import mlp, model
from onnx.reference import ReferenceEvaluator
from scipy.special import log_softmax, softmax

import graphopt
import passes
from graphopt import cli
from graphopt.graph.roles import TargetSpec
from graphopt.models import transformer
from graphopt.training.metrics import METRICS, Metrics

ROWS = 211
CUTS = (0, 1, 7, 7, 100, 163, ROWS)  # ragged batches, one of them empty
CLASSES = TargetSpec("y", "classification", axis=1, classes=6)
PROBABILITIES = TargetSpec("y", "classification", axis=1, classes=6, from_logits=False)
SIGNS = TargetSpec("y", "binary", labels=(-1, 1), threshold=0.0)
NUMBERS = TargetSpec("y", "regression")


def measured(spec: TargetSpec, wanted: Any, prediction: np.ndarray, target: np.ndarray) -> Any:
    """Return the value of one metric over ragged batches."""
    metrics = Metrics(spec, [wanted])
    for start, end in itertools.pairwise(CUTS):
        metrics.add(prediction[start:end], target[start:end])
    (value,) = metrics.result().values()
    return value


def classified(seed: int, classes: int = 6, absent: tuple[int, ...] = (2, 4)) -> tuple[np.ndarray, np.ndarray]:
    """Return logits with many ties, and targets in which some classes are missing."""
    random = np.random.default_rng(seed)
    logits = random.integers(-2, 3, (ROWS, classes)).astype(np.float32) / 2
    present = [label for label in range(classes) if label not in absent]
    return logits, random.choice(present, ROWS)


def averaged(score: Callable[..., float], **options: Any) -> Callable[..., float]:
    return lambda target, logits: score(target, logits.argmax(1), zero_division=0, **options)


def calibration_error(p: np.ndarray, target: np.ndarray, bins: int) -> float:
    """Sum over the bins (low, high] of the largest probability, as Guo et al. 2017 do."""
    confidence, right = p.max(1), p.argmax(1) == target
    inside = [(confidence > i / bins) & (confidence <= (i + 1) / bins) for i in range(bins)]
    return sum(abs(right[rows].mean() - confidence[rows].mean()) * rows.mean() for rows in inside if rows.any())


OF_CLASSES: list[tuple[Any, Callable[[np.ndarray, np.ndarray], float]]] = [
    ("accuracy", lambda t, x: sk.accuracy_score(t, x.argmax(1))),
    ("balanced_accuracy", lambda t, x: sk.balanced_accuracy_score(t, x.argmax(1))),
    ("confusion_matrix", lambda t, x: sk.confusion_matrix(t, x.argmax(1), labels=range(6)).tolist()),
    ("perplexity", lambda t, x: np.exp(-log_softmax(x.astype(float), 1)[range(len(t)), t].mean())),
    ("log_loss", lambda t, x: sk.log_loss(t, softmax(x.astype(float), 1), labels=range(6))),
    ("brier", lambda t, x: sk.brier_score_loss(t, softmax(x.astype(float), 1), labels=range(6))),
    ("ece", lambda t, x: calibration_error(softmax(x.astype(float), 1), t, 15)),
    ({"ece": {"bins": 4}}, lambda t, x: calibration_error(softmax(x.astype(float), 1), t, 4)),
    *(
        ({name: {"average": average}}, averaged(score, average=average))
        for name, score in (
            ("f1", sk.f1_score),
            ("precision", sk.precision_score),
            ("recall", sk.recall_score),
        )
        for average in ("macro", "micro", "weighted")
    ),
    ("f1", averaged(sk.f1_score, average="macro")),
    *(
        ({"top_k": {"k": k}}, lambda t, x, k=k: sk.top_k_accuracy_score(t, x, k=k, labels=range(6)))
        for k in (1, 2, 3, 5)
    ),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("wanted", "oracle"), OF_CLASSES, ids=lambda one: str(one) if not callable(one) else "")
def test_metrics_of_classes(wanted: Any, oracle: Callable[..., float], seed: int) -> None:
    logits, target = classified(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = oracle(target, logits)
    np.testing.assert_allclose(measured(CLASSES, wanted, logits, target), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("wanted", "score"),
    [
        ("accuracy", sk.accuracy_score),
        ("balanced_accuracy", sk.balanced_accuracy_score),
        ("f1", sk.f1_score),
        ("precision", sk.precision_score),
        ({"recall": {"average": "binary"}}, sk.recall_score),
        ({"recall": {"average": "macro"}}, lambda t, p: sk.recall_score(t, p, average="macro")),
        ("confusion_matrix", lambda t, p: sk.confusion_matrix(t, p).tolist()),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_metrics_of_two_labels(wanted: Any, score: Callable[..., float], seed: int) -> None:
    random = np.random.default_rng(seed)
    prediction = random.integers(-2, 3, (ROWS, 1)).astype(np.float32)
    target = np.sign(prediction + random.integers(-4, 5, (ROWS, 1)) + 0.5)
    expected = score(target[:, 0], np.where(prediction[:, 0] > 0, 1.0, -1.0))
    np.testing.assert_allclose(measured(SIGNS, wanted, prediction, target), expected, rtol=1e-12)
    area = sk.roc_auc_score(target[:, 0], prediction[:, 0])
    assert measured(SIGNS, "roc_auc", prediction, target) == pytest.approx(area, rel=1e-12)
    logits = np.concatenate([0 * prediction, prediction], axis=1)
    two = TargetSpec("y", "classification", axis=1, classes=2)
    labels = (target[:, 0] > 0).astype(np.int64)
    assert measured(two, "roc_auc", logits, labels) == pytest.approx(area, rel=1e-12)
    f1 = sk.f1_score(labels, prediction[:, 0] > 0)
    assert measured(two, {"f1": {"average": "binary"}}, logits, labels) == pytest.approx(f1, rel=1e-12)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("coverage", lambda t, p: np.mean(t <= p)),
        ("mae", sk.mean_absolute_error),
        ("mse", sk.mean_squared_error),
        ("rmse", sk.root_mean_squared_error),
        ("r2", sk.r2_score),
    ],
)
def test_metrics_of_numbers(name: str, score: Callable[..., float], columns: int) -> None:
    random = np.random.default_rng(columns)
    target = (random.standard_normal((ROWS, columns)) * [1, 10, 0][:columns] + 1e4).astype(np.float32)
    prediction = target + random.standard_normal((ROWS, columns)).astype(np.float32)
    expected = score(target.astype(np.float64), prediction.astype(np.float64))
    assert measured(NUMBERS, name, prediction, target) == pytest.approx(expected, rel=1e-9)
    if columns == 1:  # a vector as the target of a column
        assert measured(NUMBERS, name, prediction, target[:, 0]) == pytest.approx(expected, rel=1e-9)


def test_every_metric_has_an_oracle() -> None:
    text = Path(__file__).read_text()
    assert not [name for name in METRICS if f'"{name}"' not in text]  # "mean_width": tests/test_calibration.py


def test_ignored_elements_and_positions_of_sequences() -> None:
    random = np.random.default_rng(0)
    prediction, target = random.standard_normal((ROWS, 6, 5)), random.integers(0, 6, (ROWS, 5))
    kept = target.reshape(-1) != 3
    logits = prediction.transpose(0, 2, 1).reshape(-1, 6)[kept]
    spec = TargetSpec("y", "classification", axis=1, ignore_index=3)
    labels = target.reshape(-1)[kept]
    assert measured(spec, "accuracy", prediction, target) == sk.accuracy_score(labels, logits.argmax(1))
    loss = sk.log_loss(labels, softmax(logits, axis=1), labels=range(6))
    assert measured(spec, "perplexity", prediction, target) == pytest.approx(np.exp(loss), rel=1e-12)
    assert Metrics(spec).result() == {}
    metrics = Metrics(spec)
    metrics.add(prediction[:2], np.full((2, 5), 3))
    assert metrics.result() == {}


def test_probabilities_in_predictions_and_targets() -> None:
    _, target = classified(0)
    logits = np.random.default_rng(0).standard_normal((ROWS, 6))
    p = softmax(logits, axis=1)
    for name in ("roc_auc", "perplexity", {"top_k": {"k": 2}}):
        found = measured(PROBABILITIES, name, p, target)
        assert found == pytest.approx(measured(CLASSES, name, logits, target), rel=1e-6)
    soft = TargetSpec("y", "classification", axis=1, classes=6, target_probabilities=True)
    q = softmax(np.random.default_rng(1).standard_normal((ROWS, 6)), axis=1)
    expected = np.exp(-(q * log_softmax(logits.astype(float), axis=1)).sum(1).mean())
    assert measured(soft, "perplexity", logits, q) == pytest.approx(expected, rel=1e-6)
    assert measured(soft, "accuracy", logits, q) == sk.accuracy_score(q.argmax(1), logits.argmax(1))


@pytest.mark.parametrize("seed", range(3))
def test_areas_of_classes(seed: int) -> None:
    """Rows are equal or differ clearly: rounding in a softmax must not decide which of two rows comes first."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((40, 6)).astype(np.float32)[random.integers(40, size=ROWS)]
    _, target = classified(seed)
    p = softmax(logits.astype(np.float64), axis=1)
    expected = np.mean([sk.roc_auc_score(target == label, p[:, label]) for label in np.unique(target)])
    assert measured(CLASSES, "roc_auc", logits, target) == pytest.approx(expected, rel=1e-12)


def test_areas_of_missing_classes() -> None:
    logits, _ = classified(0)
    assert np.isnan(measured(CLASSES, "roc_auc", logits, np.full(ROWS, 3)))


def matthews(target: np.ndarray, predicted: np.ndarray) -> float:
    return sk.matthews_corrcoef(target, predicted)


def test_numbers_of_other_types_and_shapes() -> None:
    target = np.array([0, 1])
    assert measured(PROBABILITIES, "log_loss", np.eye(6, dtype=np.int64)[target], target) < 1e-6
    with pytest.raises(graphopt.GraphoptError, match=r"prediction of shape \[2, 1\], as the target, found \[2, 2\]"):
        Metrics(NUMBERS, ["mae"]).add(np.zeros((2, 2)), np.zeros((2, 1)))


def test_a_function_of_one_s_own() -> None:
    logits, target = classified(0)
    expected = sk.matthews_corrcoef(target, logits.argmax(1))
    assert measured(CLASSES, matthews, logits, target) == pytest.approx(expected)
    numbers = np.random.default_rng(0).standard_normal((2, ROWS, 2))
    assert measured(NUMBERS, sk.median_absolute_error, *numbers) == (sk.median_absolute_error(numbers[1], numbers[0]))


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("metrics_mistakes"))
def test_wrong_metrics(call: str) -> None:
    messages.refused("metrics_mistakes", call, globals())


def test_fit_and_evaluate_compute_metrics_of_held_out_rows() -> None:
    random = np.random.default_rng(0)
    X, target = random.standard_normal((40, 3)).astype(np.float32), random.integers(0, 2, 40)
    step = graphopt.compile(mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step)
    wanted = ["accuracy", "f1", {"top_k": {"k": 1}}, "confusion_matrix", matthews]
    record = graphopt.fit(
        executor, {"x": X, "target": target}, epochs=2, metrics=wanted, validation=0.3, shuffle=False
    )[-1]
    predicted = ReferenceEvaluator(executor.trained()).run(None, {"x": X[28:]})[0].argmax(1)
    assert record["f1"] == pytest.approx(sk.f1_score(target[28:], predicted, average="macro"))
    assert record["top_1_accuracy"] == record["accuracy"] == sk.accuracy_score(target[28:], predicted)
    assert record["confusion_matrix"] == sk.confusion_matrix(target[28:], predicted).tolist()
    assert record["matthews"] == pytest.approx(sk.matthews_corrcoef(target[28:], predicted))
    held_out = {"x": X[28:], "target": target[28:]}
    found = graphopt.evaluate(executor, held_out, metrics=["f1"], batch_size=5)
    assert found["f1"] == record["f1"]
    with pytest.raises(graphopt.GraphoptError, match="mae: expected regression, found classification"):
        graphopt.evaluate(executor, held_out, metrics=["mae"])

    def loss(target: np.ndarray, predicted: np.ndarray) -> float:
        return 0.0

    with pytest.raises(graphopt.GraphoptError, match="expected a name that records do not have, found 'loss'"):
        graphopt.evaluate(executor, held_out, metrics=[loss])


@pytest.mark.parametrize(
    "loss",
    [
        passes.CrossEntropy(sample_weight=True),
        passes.CrossEntropy(class_weights=(1.0, 10.0, 0.1)),
        passes.CrossEntropy(ignore_index=0),
    ],
    ids=["rows", "classes", "ignored"],
)
def test_the_loss_of_rows_does_not_depend_on_the_batches_of_an_evaluation(loss: passes.CrossEntropy) -> None:
    """A mean of the means of batches would count rows without a weight, and forget weights in batches of one row."""
    random = np.random.default_rng(0)
    data = {"x": random.standard_normal((40, 3)).astype(np.float32), "target": np.arange(40) // 14}
    if loss.sample_weight:
        data["sample_weight"] = np.where(np.arange(40) < 10, 0, random.uniform(0, 3, 40)).astype(np.float32)
    steps = {"optimizer": passes.SGD(0.1), "regularizer": passes.L2(0.1)}
    executor = graphopt.Executor(graphopt.compile(mlp((3, 8, 3)), loss=loss, **steps))
    found = [graphopt.evaluate(executor, data, metrics=[], batch_size=rows) for rows in (16, 1)]
    assert len(executor._evaluations.opened) == 1  # no second pass for the weights
    expected = executor.evaluate(data)
    for measured in found:
        assert measured["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert measured["data_loss"] == pytest.approx(expected["data_loss"], rel=1e-5)


def test_what_is_reported_beside_a_loss_with_weights_is_a_mean_of_rows() -> None:
    """Rewards were weighed by the tokens of completions: 0.83 in place of 0.5, in batches of fewer rows."""
    random = np.random.default_rng(0)
    step = graphopt.compile(transformer((6,), 16, vocabulary=16), loss=passes.GRPO(), optimizer=passes.SGD(0.1))
    executor, mask = graphopt.Executor(step), np.zeros((4, 6), np.int64)
    mask[:2, 5], mask[2:, 1:] = 1, 1
    data = {
        "x": random.integers(0, 16, (4, 6)),
        "completion_mask": mask,
        "advantages": np.array([-1, -1, 1, 1], np.float32),
        "old_log_probabilities": np.full((4, 6), -2.7, np.float32),
        "rewards": np.array([0, 0, 1, 1], np.float32),
    }
    whole = executor.losses(data)
    for rows in (1, 2, 4):
        found = graphopt.evaluate(executor, data, metrics=[], batch_size=rows)
        assert (found["reward"], found["completion_length"]) == (0.5, 3)
        assert found["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_weights_of_many_elements_of_16_bits_are_summed_in_64() -> None:
    random, ignored = np.random.default_rng(0), -100
    text = "g (float16[N,T,3] x) => (float16[N,T,4] y) { y = MatMul(x, w) }"
    loss = passes.CrossEntropy(axis=2, ignore_index=ignored)
    network = model(text, w=random.standard_normal((3, 4)), dtype=np.float16)
    executor = graphopt.Executor(graphopt.compile(network, loss=loss, optimizer=passes.SGD(0.1)))
    data = {"x": random.standard_normal((256, 300, 3)).astype(np.float16), "target": random.integers(0, 4, (256, 300))}
    data["target"][:10] = ignored
    found = graphopt.evaluate(executor, data, metrics=[])["loss"]
    assert found == pytest.approx(executor.losses(data)["loss"])


def test_each_target_has_the_metrics_of_its_task() -> None:
    random = np.random.default_rng(0)
    two = model(
        "g (float[N,3] x) => (float[N,2] y, float[N,2] z) { y = MatMul(x, w)\n z = MatMul(x, v) }",
        w=random.standard_normal((3, 2)),
        v=random.standard_normal((3, 2)),
    )
    losses = passes.Losses({"y": passes.CrossEntropy(), "z": passes.MeanSquaredError()})
    executor = graphopt.Executor(graphopt.compile(two, loss=losses, optimizer=passes.SGD(0.1)))
    X = random.standard_normal((20, 3)).astype(np.float32)
    data = {"x": X, "target_y": (X[:, 0] > 0).astype(np.int64), "target_z": X[:, :2]}
    found = graphopt.evaluate(executor, data, metrics=["rmse", "accuracy"])
    assert {name for name in found if "." in name} == {"target_y.accuracy", "target_z.rmse"}


@pytest.mark.slow
def test_metrics_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("package_of_mine.py").write_text("def share(target, predicted):\n    return (predicted == 0).mean()\n")
    run = ["model=linear", "fit.epochs=1", "executor.threads=1"]
    chosen = "fit.metrics=[balanced_accuracy,{top_k:{k:3}},confusion_matrix,package_of_mine.share]"
    assert cli.main([*run, "folder=out", chosen, "trust=[package_of_mine]"]) == 0
    record = json.loads(Path("out/metrics.jsonl").read_text())
    assert {"balanced_accuracy", "top_3_accuracy", "confusion_matrix", "share"} <= set(record)
    assert "accuracy" not in record
    assert "top 3 accuracy" in capsys.readouterr().out
    assert cli.main([*run, "folder=wrong", "fit.metrics=[package_of_mine.share]"]) == 1
    assert "expected graphopt's own or trusted code, found 'package_of_mine.share'" in capsys.readouterr().err
    assert not Path("wrong/trained.onnx").exists()
