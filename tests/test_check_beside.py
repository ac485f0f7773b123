"""Where frozen weights are large, the first step is checked beside steps: its verdict comes before anything is kept."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from planted_mistakes import edited, times
from test_memory_limits import batch_of, language_model

import graphopt
from graphopt.runtime.checks import first_check
from graphopt.runtime.checks.first_check import FirstCheck

SLOPE = r"^parameter .m.: expected a gradient with the slope"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GRAPHOPT_VERIFY", raising=False)
    return tmp_path / "cache" / "graphopt" / "steps"


@pytest.fixture
def gate(monkeypatch):
    """Return an event for which checks wait."""
    opened, right = threading.Event(), FirstCheck.findings

    def findings(self, batch):
        assert opened.wait(60)
        return right(self, batch)

    monkeypatch.setattr(FirstCheck, "findings", findings)
    yield opened
    opened.set()


STEP = language_model()


def executor_of(factor=1.0, **options):
    step = STEP.clone()
    if factor != 1.0:
        edited(m=times(factor))(step)
    return graphopt.Executor(step, **{"frozen": "low", "native": False, "threads": 1, **options})


BATCH = batch_of(2, 200)
KEEPING = {
    "state": lambda executor, folder: executor.state,
    "parameters": lambda executor, folder: executor.parameters,
    "contiguous": lambda executor, folder: executor.contiguous(),
    "trained": lambda executor, folder: executor.trained(),
    "save_trained": lambda executor, folder: executor.save_trained(folder / "trained.onnx"),
    "save": lambda executor, folder: executor.save(folder / "state.safetensors"),
    "update_state": lambda executor, folder: executor.update_state({"m": np.ones((6, 7), np.float32)}),
    "evaluate": lambda executor, folder: executor.evaluate(BATCH),
    "losses": lambda executor, folder: executor.losses(BATCH),
    "predict": lambda executor, folder: executor.predict(x=BATCH["x"]),
}


@pytest.mark.parametrize("name", KEEPING)
def test_nothing_is_kept_from_a_step_that_is_wrong(name, gate, tmp_path):
    executor = executor_of(1.5)
    initial = executor_of(verify=False).state
    for _ in range(3):
        executor.step(BATCH)  # the check has not ended
    assert executor.batches == 3
    gate.set()
    before = {*tmp_path.glob("*")}
    with pytest.raises(graphopt.GraphoptError, match=SLOPE):
        KEEPING[name](executor, tmp_path)
    assert {*tmp_path.glob("*")} - before <= {tmp_path / "cache"}
    assert executor.batches == 0
    for x, array in executor.state.items():
        np.testing.assert_array_equal(array, initial[x])
    with pytest.raises(graphopt.GraphoptError, match=SLOPE):  # before it trains
        executor.step(BATCH)
    assert executor.batches == 0


def test_training_stops_at_a_step_after_the_verdict(gate):
    executor = executor_of(1.5)
    executor.step(BATCH)
    gate.set()
    executor._steps.beside._thread.join()
    with pytest.raises(graphopt.GraphoptError, match=SLOPE):
        executor.step(BATCH)
    assert executor.batches == 0


def test_a_mistake_is_told_before_its_numbers_overflow(gate):
    executor = executor_of(1e30)
    threading.Timer(0.5, gate.set).start()
    with pytest.raises(graphopt.GraphoptError, match=SLOPE):
        executor.run([BATCH] * 5)


def test_steps_go_on_as_without_a_check(gate):
    executor, other = executor_of(), executor_of(verify=False)
    losses = [executor.step(BATCH)["loss"] for _ in range(2)]
    assert executor._steps.first is not None
    gate.set()
    state = executor.state
    assert executor._steps.first is executor._steps.beside is None
    losses += [executor.step(BATCH)["loss"] for _ in range(2)]
    expected = [other.step(BATCH)["loss"] for _ in range(2)]
    np.testing.assert_equal(dict(state), dict(other.state))
    assert losses == expected + [other.step(BATCH)["loss"] for _ in range(2)]


def test_all_tokens_are_checked_between_steps_if_some_are_not_enough(monkeypatch):
    sizes, opened = [], first_check._Step.__init__

    def init(self, device, step, state, batch, is_full):
        sizes.append((batch["x"].shape, threading.current_thread() is threading.main_thread()))
        opened(self, device, step, state, batch, is_full)

    monkeypatch.setattr(first_check._Step, "__init__", init)
    monkeypatch.setattr(FirstCheck, "_agreed", lambda self, state, rows: [])
    executor = executor_of()
    executor.step(BATCH)
    executor.state  # noqa: B018
    assert sizes == [((2, 200), True)]
    assert executor._steps.first is None


@pytest.mark.parametrize("options", [{"verify": True}, {"verify": "full"}, {"frozen": "packed"}])
def test_other_checks_come_before_the_first_step(options):
    executor = executor_of(1.5, **options)
    with pytest.raises(graphopt.GraphoptError, match=SLOPE):
        executor.step(BATCH)
    assert executor.batches == 0
