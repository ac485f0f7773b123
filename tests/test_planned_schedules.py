"""Schedules of the whole training learn its steps: by `adapt`, in estimators and in recipes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from builders import mlp

import graphopt
import passes
from graphopt import GraphoptError, models

X = np.random.default_rng(0).standard_normal((90, 4)).astype(np.float32)
Y = X[:, :1] - X[:, 1:2]
SCHEDULES = [
    passes.Cosine(),
    passes.Linear(end=0.1),
    passes.Polynomial(),
    passes.OneCycle(),
    passes.Cosine(warmup=3),
]


def numbered(schedule: Any, steps: int) -> Any:
    """Return a schedule that was given its number of steps."""
    return dataclasses.replace(schedule, steps=steps)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize(("epochs", "batch_size", "validation"), [(3, 10, 0.2), (4, 32, None)])
def test_adapt_gives_a_schedule_the_steps_of_fit(
    schedule: Any, epochs: int, batch_size: int, validation: float | None
) -> None:
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1), schedule=schedule)
    model, data = models.mlp((4,), 1, hidden=[8]), {"x": X, "target": Y}
    options = {"epochs": epochs, "batch_size": batch_size, "validation": validation}
    executor = graphopt.Executor(graphopt.adapt(pipeline, model, data, **options)(model), native=False)
    records = graphopt.fit(executor, data, **options, verbose=False)
    steps = executor.steps
    rates = numbered(schedule, steps).rates(0.1, steps)
    assert records[-1]["learning_rate"] == pytest.approx(rates[-1], rel=1e-4, abs=1e-9)
    np.testing.assert_allclose(schedule.rates(0.1, steps), rates)


@pytest.mark.parametrize("schedule", SCHEDULES[:4], ids=repr)
@pytest.mark.filterwarnings("ignore:max_iter")
def test_estimators_know_the_steps_of_a_fit(schedule: Any) -> None:
    own = {"max_iter": 4, "batch_size": 16}
    trainer = graphopt.Trainer(models.mlp((4,), 1, hidden=[8]), optimizer=passes.SGD(0.1), schedule=schedule, **own)
    trainer.predict(X)
    given = graphopt.Trainer(
        models.mlp((4,), 1, hidden=[8]), optimizer=passes.SGD(0.1), schedule=numbered(schedule, 24), **own
    )
    assert trainer.fit(X, Y).train_losses_ == given.fit(X, Y).train_losses_
    assert trainer.fit(X[:50], Y[:50]).train_losses_ != given.fit(X[:50], Y[:50]).train_losses_
    for more, steps in (({}, 4 * 6), ({"early_stopping": True, "validation_fraction": 0.3}, 4 * 4)):
        fixed = {"solver": passes.SGD(0.1), "random_state": 0, "tol": 0.0, **own, **more}
        regressor = graphopt.OnnxRegressor(learning_rate=schedule, **fixed).fit(X, Y[:, 0])
        same = graphopt.OnnxRegressor(learning_rate=numbered(schedule, steps), **fixed).fit(X, Y[:, 0])
        assert regressor.loss_curve_ == same.loss_curve_


@pytest.mark.parametrize("schedule", SCHEDULES[:4], ids=repr)
def test_a_training_whose_length_is_not_known_is_one_line(schedule: Any) -> None:
    kind = type(schedule).__name__
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1), "schedule": schedule}
    with pytest.raises(GraphoptError, match=rf"^{kind}\(steps=None\): expected the number of steps of the training"):
        graphopt.compile(mlp((4, 8, 1)), **steps)
    trainer = graphopt.Trainer(mlp((4, 8, 1)), schedule=schedule)
    expected = rf"^{kind}\(steps=None\): expected the number of steps of the whole training.*partial_fit"
    for estimator in (trainer, graphopt.Trainer(mlp((4, 8, 1)), schedule=schedule, warm_start=True)):
        with pytest.raises(GraphoptError, match=expected):
            (estimator.fit if estimator.warm_start else estimator.partial_fit)(X, Y)
    regressor = graphopt.OnnxRegressor(solver=passes.SGD(0.1), learning_rate=schedule)
    with pytest.raises(GraphoptError, match=expected):
        regressor.partial_fit(X, Y[:, 0])
