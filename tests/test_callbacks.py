"""The built-in callbacks: each against an oracle, and each through an interruption in the middle of an epoch."""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import messages
import numpy as np
import pytest
import torch
import yaml
from builders import linear, mlp
from interruptions import alike
from sklearn import datasets
from sklearn.neural_network import MLPClassifier
from steps import compiled

import graphopt
import passes
import recipes
from graphopt import callbacks, cli
from graphopt.callbacks import Record, Run
from graphopt.cli.composition.validation import CALLBACKS
from graphopt.cli.help import DESCRIBED, described

RNG = np.random.default_rng(0)
X = RNG.standard_normal((203, 3)).astype(np.float32)
DATA = {"x": X, "target": (X.sum(axis=1) > 0).astype(np.int64)}
OPTIONS: dict[str, Any] = {"epochs": 4, "batch_size": 10}  # 17 steps an epoch


def executor(rate: float = 0.5, **options: Any) -> graphopt.Executor:
    step = compiled(mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.SGD(rate, momentum=0.5))
    return graphopt.Executor(step, threads=1, **options)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


class At(graphopt.Callback):
    """Does something after a step, and notes the weights after each epoch."""

    def __init__(self, step: int | None = None, act: Any = None) -> None:
        self.step, self.act, self.weights, self.steps = step, act, [], []

    def on_fit_begin(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, run: Run, record: Record) -> None:
        self.steps.append(run.executor.parameters)
        if record["step"] == self.step:
            self.act(run)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        self.weights.append(run.executor.parameters)


def fail(run: Run) -> None:
    raise RuntimeError("test")


def driven(callback: Any, values: list[float], runner: Any = None) -> tuple[Run, list[float]]:
    """Show a callback epochs with measures; return the run, and the rate after each epoch."""
    run = Run(runner or executor(), len(values), 1, 1, validation_rows=1)
    callback.on_fit_begin(run)
    rates = []
    for epoch, value in enumerate(values, 1):
        run.epoch = epoch
        callback.on_epoch_end(run, {"epoch": epoch, "loss": 0.0, "validation_loss": value})
        rates.append(run.executor.learning_rate)
        if run.control.should_stop:
            break
    return run, rates


# --- Interruptions ---


class Halve(graphopt.Callback):
    """A callback of one's own, which changes the rate and keeps a number and an array."""

    count, kept = 0, np.zeros(2)

    def on_step_end(self, run: Run, record: Record) -> None:
        self.count, self.kept = self.count + 1, self.kept + run.step
        if self.count % 10 == 0:
            run.executor.learning_rate *= 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "kept": self.kept}

    def load_state_dict(self, state: Any) -> None:
        self.count, self.kept = state["count"], state["kept"]


STATEFUL: dict[str, Any] = {
    "one's own": lambda folder: Halve(),
    "early_stopping": lambda folder: callbacks.EarlyStopping(patience=2, min_delta=0.02),
    "early_stopping of accuracy": lambda folder: callbacks.EarlyStopping("accuracy", patience=2),
    "reduce_on_plateau": lambda folder: callbacks.ReduceOnPlateau(patience=1, min_delta=0.1, cooldown=1),
    "adaptive": lambda folder: callbacks.Adaptive(patience=1, tolerance=0.1),
    "learning_rate_finder": lambda folder: callbacks.LearningRateFinder(steps=40),
    "weight_average": lambda folder: callbacks.WeightAverage(0.9, every=2),
    "jsonl": lambda folder: callbacks.JSONL(folder / "log", log_steps=True),
    "csv": lambda folder: callbacks.CSV(folder / "log", log_steps=True),
}


@pytest.mark.parametrize("act", [lambda run: run.stop("test"), fail], ids=["stopped", "failed"])
@pytest.mark.parametrize("step", [20, 34, 45])
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.sample(12)
def test_an_interrupted_run_continues_bit_for_bit(tmp_path: Path, name: str, step: int, act: Any) -> None:
    """The state, the rate, the records, the log and what a checkpoint keeps are those of a run in one go."""
    make, ends = STATEFUL[name], []
    for folder, steps in (("whole", ()), ("parts", (step,))):
        (tmp_path / folder).mkdir()
        options = {**OPTIONS, "epochs": 6, "checkpoint": tmp_path / folder}
        for at in steps:
            if act is fail:
                with pytest.raises(RuntimeError, match="test"):
                    graphopt.fit(executor(), DATA, **options, callbacks=[make(tmp_path / folder), At(at, act)])
            else:
                graphopt.fit(executor(), DATA, **options, callbacks=[make(tmp_path / folder), At(at, act)])
        runner, callback, seen = executor(), make(tmp_path / folder), At()
        records = graphopt.fit(runner, DATA, **options, resume=True, callbacks=[callback, seen])
        log = tmp_path / folder / "log"
        lines = read_log(name, log) if log.exists() else []
        ends.append((runner.state, runner.hyperparameters, alike(records), alike(lines), callback.state_dict(), seen))
    (state, rates, records, lines, kept, seen), (state2, rates2, records2, lines2, kept2, seen2) = ends
    assert same(state, state2)
    assert (rates, records, lines) == (rates2, records2, lines2)
    assert len(lines) in (0, 6 * 17 + 6)
    assert (seen.run.stopped, seen.run.restored and seen.run.restored["epoch"]) == (
        seen2.run.stopped,
        seen2.run.restored and seen2.run.restored["epoch"],
    )
    arrays = {key for key, x in kept.items() if isinstance(x, np.ndarray)}
    assert kept.keys() == kept2.keys()
    assert all((kept[key] == kept2[key]).all() for key in arrays)
    assert all(kept[key] == kept2[key] for key in kept.keys() - arrays - {"record"})
    if name == "weight_average":
        assert len(arrays) == 4


def read_log(name: str, path: Path) -> list[Record]:
    if name == "csv":
        with open(path, newline="") as file:
            return [{key: x for key, x in row.items() if x} for row in csv.DictReader(file)]
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name in STATEFUL if name != "one's own"])
def test_a_second_run_with_the_same_object_begins_anew(tmp_path: Path, name: str) -> None:
    callback, ends = STATEFUL[name](tmp_path), []
    for _ in range(2):
        runner = executor()
        ends.append((alike(graphopt.fit(runner, DATA, **OPTIONS, callbacks=[callback])), runner.state))
    assert ends[0][0] == ends[1][0] and same(ends[0][1], ends[1][1])


# --- Stopping ---


def test_early_stopping_stops_where_scikit_learn_does() -> None:
    """scikit-learn stops after more than n_iter_no_change epochs whose score is less than the best plus tol."""
    x, y = datasets.load_digits(return_X_y=True)
    for seed, patience in ((0, 2), (1, 4), (2, 7)):
        options = {"early_stopping": True, "n_iter_no_change": patience - 1, "tol": 1e-9}
        theirs = MLPClassifier((16,), random_state=seed, max_iter=300, **options).fit(x / 16, y)
        scores = [float(one) for one in theirs.validation_scores_]
        mine = callbacks.EarlyStopping(mode="max", patience=patience, restore_best=False)
        run, rates = driven(mine, [*scores, 1.0, 1.0])
        assert len(rates) == len(scores) < 300
        assert run.stopped == (
            f"validation loss has not improved in {patience} epoch{'s' * (patience > 1)}: the best was epoch "
            f"{scores.index(max(scores)) + 1}"
        )


def test_the_weights_of_the_best_epoch_come_back() -> None:
    runner, seen = executor(rate=2.0), At()
    stopping = callbacks.EarlyStopping(patience=3)
    records = graphopt.fit(runner, DATA, epochs=30, batch_size=10, callbacks=[stopping, seen])
    losses = [record["validation_loss"] for record in records]
    best = losses.index(min(losses))
    assert len(records) == best + 4 < 30
    assert same(runner.parameters, seen.weights[best]) and not same(runner.parameters, seen.weights[-1])
    assert seen.run.restored == records[best]
    assert seen.run.stopped == f"validation loss has not improved in 3 epochs: the best was epoch {best + 1}"


def test_the_best_weights_come_back_after_the_last_epoch_but_not_after_an_error(tmp_path: Path) -> None:
    kept = callbacks.EarlyStopping(patience=30)
    runner, seen = executor(rate=2.0), At()
    records = graphopt.fit(runner, DATA, epochs=12, batch_size=10, callbacks=[kept, seen], checkpoint=tmp_path)
    losses = [record["validation_loss"] for record in records]
    assert losses.index(min(losses)) < 11 and seen.run.stopped is None
    assert same(runner.parameters, seen.weights[losses.index(min(losses))])
    again, twin = executor(rate=2.0), executor(rate=2.0)  # the checkpoint has the last weights
    graphopt.fit(again, DATA, epochs=13, batch_size=10, checkpoint=tmp_path, resume=True)
    graphopt.fit(twin, DATA, epochs=13, batch_size=10)
    assert same(again.state, twin.state)
    failed, at = executor(rate=2.0), At(17 * 12, fail)
    with pytest.raises(RuntimeError):
        graphopt.fit(failed, DATA, epochs=13, batch_size=10, callbacks=[callbacks.EarlyStopping(), at])
    assert same(failed.parameters, at.steps[-1]) and at.run.restored is None


def test_a_stopped_run_stays_stopped_until_it_may_wait_longer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 30, "batch_size": 10, "checkpoint": tmp_path}

    def run(patience: int) -> tuple[graphopt.Executor, int]:
        runner = executor(rate=2.0)
        stopping = callbacks.EarlyStopping(patience=patience)
        return runner, len(graphopt.fit(runner, DATA, **options, resume=True, callbacks=[stopping]))

    (first, count), (again, count_again), (_, longer) = run(2), run(2), run(4)
    assert count == count_again < longer
    assert same(first.parameters, again.parameters)


def test_epochs_that_are_not_validated_do_not_count() -> None:
    options = {"epochs": 30, "batch_size": 10, "validation_every": 3}
    records = graphopt.fit(executor(2.0), DATA, **options, callbacks=[callbacks.EarlyStopping(patience=2)])
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert len(losses) == losses.index(min(losses)) + 3 == len(records) / 3


@pytest.mark.slow
def test_the_time_of_both_parts_of_a_run_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Tick(graphopt.Callback):
        def on_step_begin(self, run: Run) -> None:
            now[0] += 1.0

    def run(*more: graphopt.Callback, resume: bool = False) -> tuple[At, list[Record]]:
        limit, seen = callbacks.TimeLimit("0.5 min"), At()
        options = {**OPTIONS, "checkpoint": tmp_path, "resume": resume}
        records = graphopt.fit(executor(), DATA, **options, callbacks=[Tick(), limit, seen, *more])
        return seen, records

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seen, _ = run()
    assert len(seen.steps) == 30 and seen.run.stopped == "the time limit of 0.5 min has passed"
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    first, _ = run(At(20, lambda run: run.stop("test")))
    now[0] += 1000.0
    second, records = run(resume=True)
    assert len(first.steps) + len(second.steps) == 30
    assert [record["step"] for record in records] == [17, 30]


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    x = X.copy()
    x[[50, 60, 65]] = np.nan
    options: dict[str, Any] = {"shuffle": False, "validation": None, "allow_nan": True, "batch_size": 10}
    for patience, steps in ((1, 6), (2, 7), (3, 41)):
        seen = At()
        with pytest.warns(UserWarning, match="step skipped"):
            graphopt.fit(
                executor(on_nonfinite="skip"),
                {**DATA, "x": x},
                **options,
                epochs=1,
                callbacks=[callbacks.StopOnNaN(patience), seen],
            )
        assert len(seen.steps) == min(steps, 21)
        assert seen.run.stopped == (f"the loss of step {steps} is nan" if steps < 41 else None)


def test_a_validation_loss_that_is_not_finite_stops_the_run() -> None:
    seen = At()
    held_out = {**DATA, "x": np.full_like(X, np.inf)}
    options: dict[str, Any] = {**OPTIONS, "validation": held_out, "allow_nan": True}
    records = graphopt.fit(executor(), DATA, **options, callbacks=[callbacks.StopOnNaN(), seen])
    assert len(records) == 1 and seen.run.stopped == "the validation_loss after step 21 is nan"


# --- Rates ---


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.slow
def test_a_plateau_is_pytorch_s(mode: str) -> None:
    for seed in range(15):
        draw = np.random.default_rng(seed)
        values = [float(x) for x in draw.integers(0, 30, 60) / 10]
        patience, delta = int(draw.integers(1, 6)), float(draw.choice([0.0, 0.05, 0.3]))
        options: dict[str, Any] = {
            "cooldown": int(draw.integers(0, 4)),
            "factor": float(draw.choice([0.1, 0.5])),
        }
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer,
            mode,
            patience=patience - 1,
            threshold=delta,
            threshold_mode="abs",
            min_lr=1e-3,
            eps=0,
            **options,
        )
        expected = []
        for value in values:
            theirs.step(value)
            expected.append(optimizer.param_groups[0]["lr"])
        mine = callbacks.ReduceOnPlateau(
            patience=patience, min_delta=delta, min_learning_rate=1e-3, mode=mode, **options
        )
        np.testing.assert_allclose(driven(mine, values)[1], expected, rtol=1e-5)


def test_a_plateau_never_raises_the_rate() -> None:
    mine = callbacks.ReduceOnPlateau(patience=1, min_learning_rate=1.0)
    assert driven(mine, [1.0, 1.0, 1.0])[1] == [0.5] * 3


def test_a_range_test_is_that_of_steps_by_hand_and_leaves_no_trace() -> None:
    finder = callbacks.LearningRateFinder(max_learning_rate=100.0, steps=60)
    runner, twin, hand = executor(), executor(), executor()
    records = graphopt.fit(runner, DATA, **OPTIONS, shuffle=False, validation=None, callbacks=[finder])
    twin.learning_rate = finder.suggestion
    assert alike(graphopt.fit(twin, DATA, **OPTIONS, shuffle=False, validation=None)) == alike(records)
    assert same(runner.state, twin.state) and runner.batches == twin.batches
    for i, (rate, loss) in enumerate(zip(finder.rates, finder.losses, strict=True)):
        assert rate == pytest.approx(1e-7 * 1e9 ** (i / 59))
        hand.learning_rate = rate
        rows = slice(i % 21 * 10, i % 21 * 10 + 10)
        assert hand.step(x=X[rows], target=DATA["target"][rows])["loss"] == loss


def test_a_range_test_of_a_quadratic_ends_where_its_curvature_says() -> None:
    """Gradient descent on a quadratic diverges above 2 / the greatest eigenvalue of its Hessian."""
    x = np.random.default_rng(1).standard_normal((40, 3)).astype(np.float32)
    data = {"x": x, "target": x @ np.ones((3, 2), np.float32)}
    step = graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    finder = callbacks.LearningRateFinder(min_learning_rate=1e-5, max_learning_rate=1e4, smoothing=0.5)
    graphopt.fit(graphopt.Executor(step, threads=1), data, epochs=1, batch_size=40, validation=None, callbacks=[finder])
    design = np.concatenate([x, np.ones((40, 1))], axis=1)
    bound = 2 / np.linalg.eigvalsh(2 * design.T @ design / (40 * 2)).max()  # a mean over 2 outputs
    assert finder.suggestion is not None and bound / 100 < finder.suggestion < bound
    assert bound < finder.rates[-1] < 100 * bound


def test_a_range_test_without_a_fall_keeps_the_rate() -> None:
    runner = executor()
    finder = callbacks.LearningRateFinder(1e-30, 1e-29, steps=20)
    data = {"x": X[:10], "target": DATA["target"][:10]}
    with pytest.warns(UserWarning, match="found none; the rate stays 0.5"):
        graphopt.fit(runner, data, epochs=1, batch_size=10, validation=None, callbacks=[finder])
    assert runner.learning_rate == 0.5 and finder.suggestion is None


# --- Averages ---


@pytest.mark.parametrize("every", [1, 3])
def test_an_average_is_pytorch_s(every: int) -> None:
    average, seen, runner, plain = callbacks.WeightAverage(0.9, every=every), At(), executor(), executor()
    records = graphopt.fit(runner, DATA, **OPTIONS, callbacks=[average, seen])
    names = sorted(runner.parameters)
    module = torch.nn.ParameterList([torch.zeros(runner.parameters[name].shape) for name in names])
    theirs = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for step, weights in enumerate(seen.steps, 1):
        for tensor, name in zip(module, names, strict=True):
            tensor.data = torch.from_numpy(weights[name])
        if step % every == 0:
            theirs.update_parameters(module)
    for name, tensor in zip(names, theirs.module, strict=True):
        np.testing.assert_allclose(runner.parameters[name], tensor.detach().numpy(), rtol=1e-6, atol=1e-7)
    graphopt.fit(plain, DATA, **OPTIONS)
    assert same(seen.steps[-1], plain.parameters)  # training itself goes on without the average
    held = np.sort(np.random.default_rng(0).permutation(203)[:41])
    measured = graphopt.evaluate(runner, {name: array[held] for name, array in DATA.items()}, batch_size=10)
    assert measured["loss"] == pytest.approx(records[-1]["validation_loss"], rel=1e-6)
    assert records[-1]["validation_loss"] != graphopt.fit(executor(), DATA, **OPTIONS)[-1]["validation_loss"]


@pytest.mark.parametrize("first", ["average", "stopping"])
def test_early_stopping_restores_the_average_that_was_the_best(first: str) -> None:
    class Averages(graphopt.Callback):
        def on_fit_begin(self, run: Run) -> None:
            self.seen: list[dict[str, np.ndarray]] = []

        def on_evaluate_end(self, run: Run, record: Record) -> None:
            self.seen.append({name: np.array(x) for name, x in run.averaged.items()})

    used = [callbacks.WeightAverage(0.8), callbacks.EarlyStopping(patience=3)]
    runner, averages = executor(rate=2.0), Averages()
    used = used if first == "average" else used[::-1]
    records = graphopt.fit(runner, DATA, epochs=40, batch_size=10, callbacks=[*used, averages])
    losses = [record["validation_loss"] for record in records]
    assert losses.index(min(losses)) < len(losses) - 1
    assert same(runner.parameters, averages.seen[losses.index(min(losses))])


def test_an_error_during_the_validation_leaves_the_parameters_themselves(tmp_path: Path) -> None:
    class Fail(graphopt.Callback):
        def on_evaluate_end(self, run: Run, record: Record) -> None:
            if run.epoch == 2:
                fail(run)

    runner, twin, again, seen = executor(), executor(), executor(), At()
    options = {**OPTIONS, "checkpoint": tmp_path}
    with pytest.raises(RuntimeError):
        graphopt.fit(runner, DATA, **options, callbacks=[Fail(), callbacks.WeightAverage(0.9), seen])
    assert same(runner.parameters, seen.steps[-1])
    graphopt.fit(again, DATA, **options, resume=True, callbacks=[callbacks.WeightAverage(0.9)])
    graphopt.fit(twin, DATA, **OPTIONS, callbacks=[callbacks.WeightAverage(0.9)])
    assert same(again.state, twin.state)


# --- Logs ---


def test_logs_have_the_records(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 3, "batch_size": 10, "validation_every": 2}
    logs = [callbacks.JSONL(tmp_path / "a" / "log.jsonl"), callbacks.CSV(tmp_path / "log.csv")]
    logs += [
        callbacks.JSONL(tmp_path / "steps", log_steps=True),
        callbacks.CSV(tmp_path / "steps.csv", log_steps=True),
    ]
    records = graphopt.fit(executor(), DATA, **options, callbacks=logs)
    assert read_log("jsonl", tmp_path / "a" / "log.jsonl") == records
    rows = read_log("csv", tmp_path / "log.csv")
    assert [{name: float(x) for name, x in row.items()} for row in rows] == records
    assert "validation_loss" not in rows[0] and "validation_loss" in rows[1]
    assert (tmp_path / "log.csv").read_text().splitlines()[0].split(",") == [
        *rows[0],
        "validation_loss",
        "accuracy",
    ]
    lines, rows = read_log("jsonl", tmp_path / "steps"), read_log("csv", tmp_path / "steps.csv")
    assert [line["step"] for line in lines if "rows" in line] == list(range(1, 52))
    assert [line for line in lines if "rows" not in line] == records
    assert [{name: float(x) for name, x in row.items()} for row in rows] == lines


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    log = callbacks.JSONL(tmp_path / "log")
    log.log({"epoch": 1, "loss": math.nan, "seconds": math.inf})
    assert json.loads((tmp_path / "log").read_text()) == {"epoch": 1, "loss": None, "seconds": None}


@pytest.mark.parametrize("kind", [callbacks.JSONL, callbacks.CSV])
@pytest.mark.slow
def test_a_damaged_log_and_a_folder_in_its_place(tmp_path: Path, kind: Any) -> None:
    path, stop = tmp_path / "log", At(20, lambda run: run.stop("test"))
    options = {**OPTIONS, "checkpoint": tmp_path / "checkpoints"}
    graphopt.fit(executor(), DATA, **options, callbacks=[kind(path, log_steps=True), stop])
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*text[:-2], "\n", "not ours\n", text[-2], text[-1][:-5]]))
    graphopt.fit(executor(), DATA, **options, resume=True, callbacks=[kind(path, log_steps=True)])
    lines = read_log(kind.__name__.lower(), path)
    assert [int(line["step"]) for line in lines if "rows" in line] == list(range(1, 69))
    with pytest.raises(graphopt.GraphoptError, match="expected a file to write to, found something else"):
        graphopt.fit(executor(), DATA, **OPTIONS, callbacks=[kind(tmp_path)])
    with pytest.raises(graphopt.GraphoptError, match="expected a file to write to"):
        graphopt.fit(executor(), DATA, **OPTIONS, callbacks=[kind(path / "below")])


@pytest.mark.parametrize("kind", [callbacks.JSONL, callbacks.CSV])
def test_a_log_that_cannot_be_written_to_warns_once(tmp_path: Path, kind: Any) -> None:
    class Remove(graphopt.Callback):
        def on_epoch_begin(self, run: Run) -> None:
            if path.is_file():
                path.unlink()
                path.mkdir()

    path = tmp_path / "log"
    with pytest.warns(UserWarning, match="training goes on") as warned:
        records = graphopt.fit(executor(), DATA, **OPTIONS, callbacks=[kind(path), Remove()])
    assert len(records) == 4 and len(warned) == 1


# --- Trackers ---


def two_parts(folder: Path, make: Any) -> list[Record]:
    """Train with a callback until step 20, and continue with another one; return the records."""
    options = {**OPTIONS, "epochs": 3, "checkpoint": folder / "checkpoints"}
    with pytest.raises(RuntimeError):
        graphopt.fit(executor(), DATA, **options, callbacks=[make(), At(20, fail)])
    return graphopt.fit(executor(), DATA, **options, resume=True, callbacks=[make()])


class Recorder:
    """Records the calls that trackers have in common."""

    __name__ = "recorder"

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, project: str, name: str | None = None, config: Any = None, **more: Any) -> Recorder:
        self.inits.append({"project": project, "name": name, "config": config, **more})
        self.name = name or "chosen"
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


def test_a_tracker_gets_the_calls_that_wandb_and_trackio_share(tmp_path: Path) -> None:
    module = Recorder()
    options: dict[str, Any] = {"project": "mine", "config": {"rate": 0.5}, "init": {"group": "g"}}
    records = two_parts(tmp_path, lambda: callbacks.Tracker(module, log_steps=True, **options))
    first = {"project": "mine", "name": None, "config": {"rate": 0.5}, "group": "g"}
    assert module.inits == [first, {**first, "name": "chosen", "resume": "allow"}]
    assert module.finished == 2
    steps = {step: numbers for step, numbers in module.logged if "step/loss" in numbers}
    epochs = {step: numbers for step, numbers in module.logged if "epoch/loss" in numbers}
    assert list(steps) == list(range(1, 52)) and len(module.logged) == 54
    for record in records:
        left_out = ("epoch", "step")
        numbers = {f"epoch/{name}": value for name, value in record.items() if name not in left_out}
        assert epochs[record["step"]] == numbers
    assert steps[1].keys() == {"step/loss", "step/learning_rate"}


def test_a_tracker_that_cannot_begin_is_an_error_of_one_line() -> None:
    class Broken(Recorder):
        def init(self, **_: Any) -> Any:
            raise OSError("no\nnetwork")

    with pytest.raises(graphopt.GraphoptError, match=r"^Tracker: recorder.init: no network$"):
        graphopt.fit(executor(), DATA, **OPTIONS, callbacks=[callbacks.Tracker(Broken())])


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: callbacks.TensorBoard("x"), "tensorboardX"),
        (lambda: callbacks.Tracker("wandb"), "wandb"),
        (lambda: callbacks.Tracker("trackio"), "trackio"),
        (lambda: callbacks.MLflow(), "mlflow"),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, make: Any, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = f": expected the package {package}, found none: pip install {package.lower()}$"
    with pytest.raises(graphopt.GraphoptError, match=message):
        make()


def test_a_package_whose_import_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    message = r"package wandb, found one whose import fails \(RuntimeError: no licence\): reinstall it, .* wandb$"
    with pytest.raises(graphopt.GraphoptError, match=message):
        callbacks.Tracker("wandb")


@pytest.mark.slow
def test_tensorboard_reads_the_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    records = two_parts(tmp_path, lambda: callbacks.TensorBoard(tmp_path / "events", log_steps=True))
    events = reader.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 52))
    for name in ("loss", "validation_loss", "accuracy"):
        found = {event.step: event.value for event in events.Scalars(f"epoch/{name}")}
        assert found == {record["step"]: pytest.approx(record[name], rel=1e-6) for record in records}


def test_mlflow_has_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    options: dict[str, Any] = {"config": {"a": {"b": 1}, "c": "x"}, "tracking_uri": f"file://{tmp_path}/runs"}
    records = two_parts(tmp_path, lambda: callbacks.MLflow("mine", log_steps=True, **options))
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert run.info.status == "FINISHED" and run.data.params == {"a.b": "1", "c": "x"}
    history = mlflow.MlflowClient().get_metric_history
    found = {one.step: one.value for one in history(run.info.run_id, "epoch/validation_loss")}
    assert found == {record["step"]: record["validation_loss"] for record in records}
    assert [one.step for one in history(run.info.run_id, "step/loss")] == list(range(1, 52))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    with pytest.raises(graphopt.GraphoptError, match=r"^MLflow: ") as raised:
        graphopt.fit(executor(), DATA, **OPTIONS, callbacks=[callbacks.MLflow(tracking_uri=f"file://{tmp_path}/b")])
    assert "\n" not in str(raised.value)


# --- Options ---


def test_a_measure_that_is_not_there() -> None:
    with pytest.raises(
        graphopt.GraphoptError,
        match="EarlyStopping: unknown measure 'acuracy', nearest: 'accuracy'; known: accuracy",
    ):
        graphopt.fit(executor(), DATA, **OPTIONS, callbacks=[callbacks.EarlyStopping("acuracy")])
    with pytest.raises(graphopt.GraphoptError, match="expected rows held out, found none"):
        graphopt.fit(executor(), DATA, **OPTIONS, validation=None, callbacks=[callbacks.EarlyStopping()])
    records = graphopt.fit(executor(), DATA, **OPTIONS, validation=None, callbacks=[callbacks.EarlyStopping("loss")])
    assert len(records) == 4


# --- Recipes ---

RUN = ["fit.epochs=3", "executor.threads=1", "folder=out"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_name_all_callbacks() -> None:
    kinds = {f"graphopt.callbacks.{name}" for name in callbacks.__all__}
    bases = {
        f"graphopt.callbacks.{name}"
        for name in ("Callback", "Control", "Log", "Monitor", "ProgressBar", "Record", "Run")
    }
    assert set(CALLBACKS.values()) == kinds - bases
    folder = Path(recipes.__file__).parent
    assert set(yaml.safe_load((folder / "graphopt.yaml").read_text())["callbacks"]) == set(CALLBACKS)
    for name, kind in CALLBACKS.items():
        listed = DESCRIBED["callbacks"][name].rpartition(": ")[2].split(", ")
        fields = set(described(getattr(callbacks, kind.rpartition(".")[2])))
        assert set(listed) == fields - {"folder"}, name  # which is that of the sweep


@pytest.mark.slow
def test_a_recipe_s_callbacks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = [
        "callbacks.early_stopping={patience: 2}",
        "callbacks.jsonl=logs/mine.jsonl",
        "callbacks.csv=mine.csv",
    ]
    assert cli.main([*RUN, "fit.epochs=60", *used, "callbacks.time_limit=10 min"]) == 0
    said = capsys.readouterr().out
    lines = read_log("jsonl", here / "out/logs/mine.jsonl")
    best = min(lines, key=lambda line: line["validation_loss"])
    assert lines == read_log("jsonl", here / "out/metrics.jsonl") and len(lines) == best["epoch"] + 2 < 60
    assert f"stopped   validation loss has not improved in 2 epochs: the best was epoch {best['epoch']}\n" in said
    assert f"restored  the weights of epoch {best['epoch']}\n" in said
    assert f"held out  validation loss {best['validation_loss']:.4f}" in said
    assert len(read_log("csv", here / "out/mine.csv")) == len(lines)


@pytest.mark.slow
def test_a_class_of_your_own(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine.py").write_text(
        "import graphopt\nclass Stop(graphopt.Callback):\n    def __init__(self, after: int):\n"
        "        self.after = after\n    def on_epoch_end(self, run, record):\n"
        "        if run.epoch == self.after:\n            run.stop('enough')\nNothing = dict\n"
        "def nothing(): return {}\n"
    )
    monkeypatch.syspath_prepend(here)
    own = "+callbacks.stop={_target_: mine.Stop, after: 2}"
    assert cli.main([*RUN, own]) == 1
    assert "trust=[mine] on the command line" in capsys.readouterr().err
    assert cli.main([*RUN, own, "trust=[mine]"]) == 0
    assert "stopped   enough\n" in capsys.readouterr().out
    assert cli.main([*RUN, "folder=b", "+callbacks.no={_target_: mine.nothing}", "trust=[mine]"]) == 1
    assert "callbacks.no: expected a graphopt.Callback, found dict" in capsys.readouterr().err


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("callbacks_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("callbacks_mistakes", call, globals())
