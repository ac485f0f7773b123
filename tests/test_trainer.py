"""The trainer is an estimator: fit, predict, score, states, and scikit-learn's tools."""

from __future__ import annotations

import pickle

import messages
import numpy as np
import onnx
import pytest
from builders import linear, mlp
from onnx.reference import ReferenceEvaluator
from sklearn.base import clone
from sklearn.datasets import make_regression
from sklearn.linear_model import LogisticRegression, SGDRegressor
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.utils import estimator_checks

import graphopt
import passes
from graphopt import models
from graphopt.training.fit import fit

RNG = np.random.default_rng(0)
X = RNG.standard_normal((103, 3))
W = RNG.standard_normal((3, 2))
Y = X @ W + 0.5
LABELS = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)


def regression(**options):
    options = {"optimizer": passes.SGD(0.1), "max_iter": 20, **options}
    return graphopt.Trainer(linear(), **options)


def classification(**options):
    network = models.mlp([3], 3, hidden=[16])
    return graphopt.Trainer(network, loss=passes.CrossEntropy(), optimizer=passes.AdamW(0.01), max_iter=20, **options)


def test_a_regression_is_learned():
    trainer = regression().fit(X, Y)
    assert trainer.score(X, Y) > 0.9999
    assert trainer.n_iter_ == len(trainer.train_losses_) == 20
    assert trainer.train_losses_[-1] < 1e-4 < trainer.train_losses_[0]
    np.testing.assert_allclose(trainer.predict(X), Y, atol=0.05)
    weights = {x.name: onnx.numpy_helper.to_array(x) for x in trainer.get_trained_onnx().graph.initializer}
    np.testing.assert_allclose(weights["w"], W, atol=0.02)
    (y,) = ReferenceEvaluator(trainer.get_trained_onnx()).run(None, {"x": X.astype(np.float32)})
    np.testing.assert_allclose(trainer.predict(X), y, rtol=1e-4, atol=1e-5)


def test_a_fixed_batch_predicts_any_number_of_rows():
    network = linear()
    for value in (*network.graph.input, *network.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 10
    fixed, free = (graphopt.Trainer(x, max_iter=1, batch_size=10).fit(X[:100], Y[:100]) for x in (network, linear()))
    np.testing.assert_allclose(fixed.predict(X), free.predict(X), rtol=1e-5)
    np.testing.assert_allclose(fixed.losses(X, Y), free.losses(X, Y), rtol=1e-5)


def test_a_classification_is_learned_and_predicts_classes():
    trainer = classification().fit(X, LABELS)
    assert trainer.predict(X).shape == (103,)
    assert trainer.score(X, LABELS) == accuracy_score(LABELS, trainer.predict(X)) > 0.9


def test_scores_are_scikit_learns():
    weights = RNG.uniform(0, 1, 103)
    trainer = regression(max_iter=2).fit(X, Y)
    assert trainer.score(X, Y, weights) == pytest.approx(
        r2_score(Y, trainer.predict(X), sample_weight=weights), rel=1e-9
    )
    trainer = classification().fit(X, LABELS)
    expected = accuracy_score(LABELS, trainer.predict(X), sample_weight=weights)
    assert trainer.score(X, LABELS, weights) == pytest.approx(expected)


def test_losses_are_of_each_row():
    trainer = regression(max_iter=1).fit(X, Y)
    expected = ((trainer.predict(X) - Y) ** 2).mean(axis=1)
    np.testing.assert_allclose(trainer.losses(X, Y), expected, rtol=1e-4)
    weights = RNG.uniform(0, 1, 103)
    np.testing.assert_allclose(trainer.losses(X, Y, weights), weights * expected, rtol=1e-4)
    trainer = classification()
    logits = graphopt.Executor(
        graphopt.compile(trainer.model, loss=passes.CrossEntropy(), optimizer=passes.SGD())
    ).predict(x=X.astype(np.float32))["y"]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(trainer.losses(X, LABELS), -log_p[np.arange(103), LABELS], rtol=1e-4)


def test_weights_of_rows_count():
    noise = np.where(np.arange(103)[:, None] % 2, 100.0, 0.0)
    weights = np.where(np.arange(103) % 2, 0.0, 1.0)
    trainer = regression().fit(X, Y + noise, weights, X_val=X, y_val=Y)
    assert trainer.score(X, Y) > 0.999
    assert trainer.validation_losses_[-1] == pytest.approx(trainer.losses(X, Y).mean(), rel=1e-3)


def test_validation_every_so_many_epochs():
    trainer = regression(validation_every=4, max_iter=10).fit(X[:80], Y[:80], X_val=X[80:], y_val=Y[80:])
    assert len(trainer.train_losses_) == 10
    assert len(trainer.validation_losses_) == 3  # epochs 4, 8 and the last
    mean = np.mean((trainer.predict(X[80:]) - Y[80:]) ** 2)
    assert trainer.validation_losses_[-1] == pytest.approx(mean, rel=1e-4)


@pytest.mark.slow
def test_fit_starts_from_the_models_weights_unless_warm():
    trainer = regression(max_iter=3)
    first = trainer.fit(X, Y).train_losses_
    assert trainer.fit(X, Y).train_losses_ == first
    again = trainer.set_params(warm_start=True).fit(X, Y).train_losses_
    assert again[0] < first[-1]
    assert trainer.partial_fit(X, Y).train_losses_[0] < again[-1]
    initial = regression().losses(X, Y).mean()
    assert initial == pytest.approx(((X @ _weight(linear(), "w") + _weight(linear(), "b") - Y) ** 2).mean(), rel=1e-4)


def test_a_fit_starts_with_the_first_rate_again():
    trainer = regression(schedule="adaptive", max_iter=40)
    first = trainer.fit(X, Y).history_
    assert first[-1]["learning_rate"] < first[0]["learning_rate"]
    assert trainer.fit(X, Y).train_losses_ == [record["loss"] for record in first]


def _weight(model: onnx.ModelProto, name: str) -> np.ndarray:
    return next(onnx.numpy_helper.to_array(x) for x in model.graph.initializer if x.name == name)


def test_states_are_read_and_set():
    trainer = regression(optimizer=passes.SGD(0.1, momentum=0.9), max_iter=3, warm_start=True).fit(X, Y)
    state = trainer.get_state()
    assert set(state) == {"w", "b", "w.momentum", "b.momentum", "step"}
    other = regression(optimizer=passes.SGD(0.1, momentum=0.9), max_iter=3, warm_start=True)
    other.set_state(state)
    assert other.fit(X, Y).train_losses_ == trainer.fit(X, Y).train_losses_
    with pytest.raises(graphopt.GraphoptError, match="state 'z': unknown"):
        other.set_state({"z": X})


def test_weights_go_into_another_model_of_the_same_names():
    trainer = regression().fit(X, Y)
    other = linear(seed=5)
    (y,) = ReferenceEvaluator(trainer.get_trained_onnx(other)).run(None, {"x": X.astype(np.float32)})
    np.testing.assert_allclose(y, trainer.predict(X), rtol=1e-5, atol=1e-6)
    with pytest.raises(graphopt.GraphoptError, match=r"with the trained weights .*, found none"):
        trainer.get_trained_onnx(mlp())
    with pytest.raises(
        graphopt.GraphoptError, match=r"weight 'w': expected type 1 and shape \[3, 2\], found 1 and \[4, 2\]"
    ):
        trainer.get_trained_onnx(linear(features=4))


@pytest.mark.slow
def test_scikit_learns_tools_take_it():
    trainer = classification()
    search = GridSearchCV(trainer, {"optimizer__learning_rate": [1e-6, 0.03], "batch_size": [16]}, cv=2)
    search.fit(X, LABELS)
    assert search.best_params_["optimizer__learning_rate"] == 0.03
    assert search.best_score_ > 0.7
    copy = clone(trainer)
    assert copy is not trainer
    assert copy.get_params(deep=False).keys() == trainer.get_params(deep=False).keys()
    assert len(cross_val_score(regression(), X, Y, cv=2)) == 2
    assert "Trainer(" in repr(trainer)
    assert "batch_size" not in repr(trainer)


def test_a_pickle_goes_on_where_it_was():
    trainer = regression(optimizer=passes.AdamW(0.01), max_iter=2, warm_start=True).fit(X, Y)
    copy = pickle.loads(pickle.dumps(trainer))
    assert copy.train_losses_ == trainer.train_losses_
    assert copy.fit(X, Y).train_losses_ == trainer.fit(X, Y).train_losses_


@pytest.mark.parametrize("schedule", ["constant", "invscaling", "optimal", "adaptive"])
def test_schedules_are_scikit_learns(schedule):
    x, y = make_regression(60, 4, random_state=0)
    x, y, eta, alpha = 0.3 * x, y / 50, 0.01, 1.0
    steps = {"optimal": passes.Optimal(alpha=alpha)}
    epochs = 60 if schedule == "adaptive" else 3
    theirs = SGDRegressor(
        max_iter=epochs,
        tol=1e-3 if schedule == "adaptive" else None,  # as ours
        learning_rate=schedule,
        eta0=eta,
        alpha=alpha,
        shuffle=False,
        penalty="l2" if schedule == "optimal" else None,
    ).fit(x, y)
    model = linear(4, 1)
    for weight in model.graph.initializer:
        weight.CopyFrom(onnx.numpy_helper.from_array(np.zeros(weight.dims, np.float32), weight.name))
    trainer = graphopt.Trainer(
        model,
        loss=passes.CustomLoss(lambda op, p, t: 0.5 * (p - t) * (p - t)),
        regularizer=passes.L2(alpha / 2, parameters="w") if schedule == "optimal" else None,
        optimizer=passes.SGD(eta),
        schedule=steps.get(schedule, schedule),
        batch_size=1,
        shuffle=False,
        max_iter=epochs,
    ).fit(x, y)
    if schedule == "adaptive":
        assert len({record["learning_rate"] for record in trainer.history_}) > 3
    state = trainer.get_state()
    np.testing.assert_allclose(state["w"].ravel(), theirs.coef_, rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(state["b"].ravel(), theirs.intercept_, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("call", messages.calls("trainer_mistakes"))
def test_what_is_wrong_is_said(call: str) -> None:
    messages.refused("trainer_mistakes", call, globals())


@pytest.mark.parametrize("shape", [(103,), (103, 1)])
@pytest.mark.slow
def test_a_prediction_has_the_shape_of_the_targets(shape):
    y = (X @ W[:, :1] + 0.5).reshape(shape)
    trainer = graphopt.Trainer(linear(3, 1), optimizer=passes.SGD(0.1), max_iter=20)
    assert trainer.predict(X).shape == (103, 1)  # the model's own, before it has seen targets
    assert trainer.fit(X, y).predict(X).shape == shape
    assert np.mean((y - trainer.predict(X)) ** 2) < 1e-4
    assert pickle.loads(pickle.dumps(trainer)).predict(X).shape == shape
    assert trainer.score(X, y) == pytest.approx(r2_score(y, trainer.predict(X)))
    scores = cross_val_score(trainer, X, y, cv=3, scoring="neg_mean_squared_error")
    assert (scores > -1e-3).all()


def binary(loss, low, dtype=int):
    labels = np.where(X[:, 0] + X[:, 1] > 0, 1, low).astype(dtype)
    options = {"optimizer": passes.AdamW(0.03), "max_iter": 20}
    return graphopt.Trainer(linear(3, 1), loss=loss, **options), labels


CLASSIFIERS = {
    "cross entropy": lambda: (classification(), LABELS),
    "binary cross entropy": lambda: binary(passes.BinaryCrossEntropy(), 0),
    "hinge": lambda: binary(passes.Hinge(), -1),
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.slow
def test_scikit_learns_scoring_of_classifiers(kind):
    """Accuracy by scikit-learn's own folds, scorers and metrics is that of the predictions."""
    trainer, labels = CLASSIFIERS[kind]()
    assert not hasattr(trainer, "classes_")
    folds = StratifiedKFold(3)
    scores = cross_val_score(trainer, X, labels, cv=folds, scoring="accuracy")
    expected = []
    for train, test in folds.split(X, labels):
        fitted = clone(trainer).fit(X[train], labels[train])
        assert fitted.predict(X[test]).shape == labels[test].shape
        assert (fitted.predict(X[test]) == labels[test]).mean() == fitted.score(X[test], labels[test])
        expected.append(accuracy_score(labels[test], fitted.predict(X[test])))
    np.testing.assert_allclose(scores, expected)
    assert scores.min() > 0.7
    np.testing.assert_array_equal(fitted.classes_, np.unique(labels))
    assert (cross_val_score(trainer, X, labels, cv=folds, scoring="f1_macro") > 0.6).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_are_scikit_learns(classes):
    labels = np.arange(len(X)) % classes
    weights = LogisticRegression().fit(X, labels)
    logits = linear(3, 1 if classes == 2 else 3)
    for initializer, array in zip(logits.graph.initializer, (weights.coef_.T, weights.intercept_), strict=True):
        initializer.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), initializer.name))
    loss = passes.BinaryCrossEntropy() if classes == 2 else passes.CrossEntropy()
    trainer = graphopt.Trainer(logits, loss=loss, optimizer=passes.SGD(0.1), max_iter=2)
    np.testing.assert_allclose(trainer.predict_proba(X), weights.predict_proba(X), atol=1e-6)
    found = cross_val_score(trainer, X, labels, cv=3, scoring="neg_log_loss")
    assert np.isfinite(found).all() and found.min() > -2


@pytest.mark.parametrize(
    "check", ["check_no_attributes_set_in_init", "check_get_params_invariance", "check_set_params"]
)
def test_scikit_learns_own_checks_of_what_does_not_depend_on_data(check):
    getattr(estimator_checks, check)("Trainer", classification())


@pytest.mark.parametrize("shuffle", [True, "consecutive"])
@pytest.mark.slow
def test_two_epochs_and_two_more_are_four_bit_for_bit(shuffle, tmp_path):
    options = {"optimizer": passes.AdamW(0.01), "schedule": passes.Cosine(steps=60), "shuffle": shuffle}
    four = regression(**options, max_iter=4).fit(X, Y)
    twice = regression(**options, max_iter=2, warm_start=True).fit(X, Y)
    losses = [*twice.train_losses_, *twice.fit(X, Y).train_losses_]
    assert losses == four.train_losses_
    restored = pickle.loads(pickle.dumps(regression(**options, max_iter=2, warm_start=True).fit(X, Y)))
    restored.fit(X, Y)
    apart = regression(**options)
    for _ in range(4):
        apart.partial_fit(X, Y)
    for other in (twice, restored, apart):
        for name, array in four.get_state().items():
            np.testing.assert_array_equal(other.get_state()[name], array)


@pytest.mark.parametrize("validation", [None, 0.2])
def test_a_fit_goes_on_from_a_checkpoint_as_one_longer_fit(validation, tmp_path):
    step = graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.Adam(0.01))
    data = {"x": X.astype(np.float32), "target": Y.astype(np.float32)}

    def epochs(count, executor):
        options = {"batch_size": 10, "validation": validation, "seed": 3}
        return [record["loss"] for record in fit(executor, data, epochs=count, **options)]

    whole = graphopt.Executor(step, threads=1)
    expected = epochs(4, whole)
    first = graphopt.Executor(step, threads=1)
    losses = epochs(2, first)
    first.save(tmp_path / "state.safetensors")
    second = graphopt.Executor(step, threads=1)
    second.load(tmp_path / "state.safetensors")
    assert losses + epochs(2, second) == expected
    for name, array in whole.state.items():
        np.testing.assert_array_equal(second.state[name], array)
