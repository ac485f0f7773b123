"""Training on a data set: every row counts, validation, metrics, callbacks."""

from __future__ import annotations

import math
import threading
import warnings
from pathlib import Path
from typing import Any

import messages
import numpy as np
import pytest
import steps
from builders import linear, mlp
from steps import assert_equal

import graphopt
import passes
from graphopt.data import npy
from graphopt.training.callbacks import Run
from graphopt.training.evaluation import evaluate
from graphopt.training.fit import fit

RNG = np.random.default_rng(0)
X = RNG.standard_normal((50, 3)).astype(np.float32)
TARGET = (X @ RNG.standard_normal((3, 2)) + 1).astype(np.float32)
DATA = {"x": X, "target": TARGET}


def executor(model: Any = None, **options: Any) -> graphopt.Executor:
    return steps.executor(model or linear(), **options)


class Seen(graphopt.Callback):
    def __init__(self) -> None:
        self.started: dict[str, int] = {}
        self.steps: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []

    def on_fit_begin(self, run: Run) -> None:
        self.started = {name: getattr(run, name) for name in ("epochs", "steps", "rows", "validation_rows")}

    def on_step_end(self, run: Run, record: dict[str, Any]) -> None:
        self.steps.append(record)

    def on_epoch_end(self, run: Run, record: dict[str, Any]) -> None:
        self.epochs.append(record)


def test_learns_and_says_how() -> None:
    records = fit(executor(), DATA, epochs=30, batch_size=8)
    assert records[-1]["validation_loss"] < 1e-3 < records[0]["validation_loss"]
    assert records[-1]["r2"] > 0.999
    assert list(records[0]) == [
        *("epoch", "step", "loss", "learning_rate", "validation_loss", "r2", "mae"),
        *("seconds", "samples_per_second"),
    ]


def test_batches_of_x_and_y_train_as_batches_by_name() -> None:
    """PyTorch's DataLoader yields lists of two tensors."""
    pairs = [[X[i : i + 10], TARGET[i : i + 10]] for i in range(0, 50, 10)]
    named = [{"x": x, "target": y} for x, y in pairs]
    one, other = executor(), executor()
    fit(one, pairs, epochs=2, validation=None)
    fit(other, named, epochs=2, validation=named)
    assert_equal(one.state, other.state)
    assert evaluate(one, pairs) == evaluate(other, named)


def test_bytes_that_go_into_a_product_as_they_are_have_a_warning() -> None:
    slow = passes.SGD(1e-9)
    pixels = np.arange(150, dtype=np.uint8).reshape(50, 3)
    with pytest.warns(UserWarning, match=r"data 'x': whole numbers up to 149 go into MatMul node .*divide by 255"):
        fit(executor(optimizer=slow), {"x": pixels, "target": TARGET}, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(executor(), {"x": pixels % 2, "target": TARGET}, epochs=1)
        fit(executor(optimizer=slow), {"x": pixels.astype(np.float32), "target": TARGET}, epochs=1)
        scaled = passes.Standardize((70.0,) * 3, (40.0,) * 3)
        fit(executor(standardize=scaled), {"x": pixels, "target": TARGET}, epochs=1)


def test_names_of_classes_are_set_and_taken_back() -> None:
    one = executor()
    one.labels = ["a", "b"]
    assert one.labels == ["a", "b"]
    one.labels = None
    assert one.labels is None


def test_every_row_is_trained_on_the_last_too() -> None:
    seen = Seen()
    fit(executor(), DATA, epochs=2, batch_size=16, validation=None, callbacks=[seen])
    assert seen.started == {"epochs": 2, "steps": 4, "rows": 50, "validation_rows": 0}
    assert [record["rows"] for record in seen.steps] == [16, 16, 16, 2] * 2
    assert [record["step"] for record in seen.epochs] == [4, 8]


def test_without_shuffling_rows_stay_in_order() -> None:
    runner, twin = executor(), executor()
    fit(runner, DATA, epochs=1, batch_size=20, shuffle=False, validation=0.2)
    for start in (0, 20):
        twin.step(x=X[start : start + 20], target=TARGET[start : start + 20])
    assert all((runner.state[name] == twin.state[name]).all() for name in twin.state)


def test_the_seed_decides_the_run() -> None:
    losses = [fit(executor(), DATA, epochs=2, seed=seed)[-1]["loss"] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_validation_on_data_of_its_own() -> None:
    runner = executor()
    record = fit(runner, DATA, epochs=1, validation={"x": X[:7], "target": TARGET[:7]})[-1]
    assert record["validation_loss"] == pytest.approx(evaluate(runner, {"x": X[:7], "target": TARGET[:7]})["loss"])


def test_validation_leaves_the_penalty_out() -> None:
    runner = executor(regularizer=passes.L2(0.1))
    record = fit(runner, DATA, epochs=1, validation=DATA)[-1]
    assert record["loss"] == pytest.approx(record["data_loss"] + record["penalty"])
    assert record["validation_loss"] == pytest.approx(evaluate(runner, DATA)["data_loss"])


def test_the_rate_of_a_schedule_is_told() -> None:
    records = fit(executor(schedule=passes.Linear(steps=8)), DATA, epochs=2, batch_size=10, validation=0.2)
    assert records[-1]["learning_rate"] == pytest.approx(0.1 / 8)


def test_a_fixed_batch_must_fit() -> None:
    model = linear()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 5
    fit(executor(model), DATA, epochs=1, batch_size=5)
    with pytest.raises(graphopt.GraphoptError, match="expected 5, the batch of the model"):
        fit(executor(model), DATA, epochs=1, batch_size=8)


def test_accuracy_of_a_classifier() -> None:
    labels = (X.sum(axis=1) > 0).astype(np.int64)
    runner = executor(mlp((3, 8, 2)), loss=passes.CrossEntropy())
    record = fit(runner, {"x": X, "target": labels}, epochs=60, batch_size=8)[-1]
    assert record["accuracy"] > 0.8
    assert evaluate(runner, {"x": X, "target": labels})["accuracy"] > 0.9


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    with pytest.raises(graphopt.NonFiniteLoss):
        fit(executor(optimizer=passes.SGD(1e20)), DATA, epochs=3)


@pytest.mark.parametrize("reads_state", [None, True, False])
@pytest.mark.slow
def test_a_callback_sees_the_state_of_its_step(tmp_path: Path, reads_state: bool | None) -> None:
    """A checkpoint taken at step 7 is that of seven steps; who says not to look may see later ones."""

    class Checkpoints(Seen):
        def on_step_end(self, run: Run, record: dict[str, Any]) -> None:
            super().on_step_end(run, record)
            runner.save(tmp_path / f"{record['step']}")
            ahead.append(runner.steps - record["step"])

    runner, twin, ahead = executor(steps_per_call=4), executor(), []
    callback = Checkpoints()
    if reads_state is not None:
        callback.reads_state = reads_state
    fit(runner, DATA, epochs=2, batch_size=5, shuffle=False, validation=None, callbacks=[callback])
    assert [record["step"] for record in callback.steps] == list(range(1, 21))
    if reads_state is False:
        assert max(ahead) == 3
        return
    assert not any(ahead)
    for step in range(20):
        rows = slice(step % 10 * 5, step % 10 * 5 + 5)
        assert twin.step(x=X[rows], target=TARGET[rows])["loss"] == callback.steps[step]["loss"]
        again = executor()
        again.load(tmp_path / f"{step + 1}")
        assert all((again.state[name] == array).all() for name, array in twin.state.items())


def test_skipped_steps_do_not_stop_it() -> None:
    step = graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(1e-3))
    runner = graphopt.Executor(step, threads=1, on_nonfinite="skip")
    with pytest.warns(UserWarning, match="step skipped"):
        records = fit(
            runner,
            {"x": np.where(X > 1, np.nan, X), "target": TARGET},
            epochs=1,
            batch_size=5,
            allow_nan=True,
        )
    assert math.isnan(records[-1]["loss"])
    assert all(np.isfinite(array).all() for array in runner.state.values())


@pytest.mark.parametrize("shuffle", [True, "consecutive", False])
@pytest.mark.slow
def test_batches_made_ahead_are_the_same_training(tmp_path: Path, shuffle: Any) -> None:
    for name, array in DATA.items():
        np.save(tmp_path / f"{name}.npy", array)
    runs = []
    for data, prefetch in ((DATA, 0), (DATA, 3), (npy(str(tmp_path)), 0), (npy(str(tmp_path)), None)):
        trained = executor()
        records = fit(trained, data, epochs=3, batch_size=8, shuffle=shuffle, prefetch=prefetch)
        runs.append(([record["loss"] for record in records], trained.parameters))
    for losses, parameters in runs[1:]:
        assert losses == runs[0][0]
        assert_equal(parameters, runs[0][1])


def test_the_thread_ends_where_training_stops() -> None:
    before = threading.active_count()
    bad = {"x": np.where(np.arange(50)[:, None] == 30, np.nan, X).astype(np.float32), "target": TARGET}
    with pytest.raises(graphopt.NonFiniteLoss):
        fit(executor(), bad, batch_size=8, allow_nan=True, prefetch=2)
    assert threading.active_count() == before
    with pytest.raises(
        graphopt.GraphoptError, match=r"^fit\(prefetch=-1\): expected a whole number in \[0, inf\), found -1"
    ):
        fit(executor(), DATA, prefetch=-1)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("fit_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("fit_mistakes", call, globals())
