"""What an executor promises of its state: all of it finite, no update lost between threads, nothing half replaced."""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from builders import linear, mlp, model
from steps import assert_close, assert_equal

import graphopt
import passes
from graphopt.runtime.session import Session
from graphopt.runtime.state_buffers import _summed

ONES = np.ones((3, 2), np.float32)


def compiled(proto: Any, optimizer: Any, **steps: Any) -> Any:
    return graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=optimizer, **steps)


def root() -> Any:
    """Return y = sqrt(x w): its loss is finite where x is 0, its gradient is not."""
    return model("g (float[N,2] x) => (float[N,2] y) { p = Mul(x, w)\n y = Sqrt(p) }", w=np.ones(2))


OPTIMIZERS = [
    passes.SGD(0.1),
    passes.SGD(0.1, momentum=0.9),
    passes.AdamW(0.1),
    passes.Adam(0.1),
    passes.RMSprop(0.1),
    passes.Adagrad(0.1),
    passes.Lion(0.1),
]


@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_finite_loss_with_an_infinite_gradient_spoils_no_state(optimizer: Any, policy: Any) -> None:
    executor = graphopt.Executor(compiled(root(), optimizer), threads=1, on_nonfinite=policy)
    executor.step(x=ONES, target=2 * ONES)
    before = executor.state
    bad = {"x": ONES * np.array([0, 1], np.float32), "target": ONES}
    message = "step 1: expected finite numbers in state 'w.*', found others, though the loss is finite"
    if policy == "raise":
        with pytest.raises(graphopt.NonFiniteLoss, match=message):
            executor.step(bad)
    else:
        with pytest.warns(UserWarning, match=message):
            assert np.isfinite(executor.step(bad)["loss"])
    same = all(np.array_equal(array, before[name]) for name, array in executor.state.items())
    assert same == (policy != "warn")
    assert executor.steps == (2 if policy == "warn" else 1)
    if policy != "warn":
        assert np.isfinite(executor.step(x=ONES, target=2 * ONES)["loss"])


@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
@pytest.mark.parametrize("bad", [4, 6, 7])
def test_several_steps_in_a_call_do_what_single_steps_do(bad: int, policy: Any) -> None:
    """Wherever in a call the step is that spoils the state: those before it count, those after it if it is skipped."""
    batches = [{"x": ONES, "target": 2 * ONES}] * 8
    batches[bad] = {"x": 0 * ONES, "target": ONES}
    found = []
    for several in (1, 4):
        step, options = (
            compiled(root(), passes.AdamW(0.1)),
            {"on_nonfinite": policy, "steps_per_call": several},
        )
        executor = graphopt.Executor(step, threads=1, **options)
        losses, caught = [], None
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                for reported in executor.iterate(batches):
                    losses.append(reported["loss"])
            except graphopt.NonFiniteLoss as error:
                caught = str(error)
        state = {name: array.tolist() for name, array in executor.state.items()}
        found.append((losses, caught, [str(each.message) for each in warned], executor.steps, state))
    np.testing.assert_equal(found[1], found[0])
    assert found[0][3] == {"raise": bad, "skip": 7, "warn": 8}[policy]


def test_a_slot_that_overflows_is_found_though_no_parameter_does() -> None:
    """Adam's second moment of a gradient of 1e20 is infinite: its element would never move again."""
    proto = model("g (float[N,2] x) => (float[N,2] y) { y = Mul(x, w) }", w=np.ones(2))
    loss = passes.CustomLoss(lambda op, p, t: p * t)
    step = graphopt.compile(proto, loss=loss, optimizer=passes.Adam(0.1))
    executor = graphopt.Executor(step, threads=1)
    with pytest.raises(graphopt.NonFiniteLoss, match=r"in state 'w.exp_sum_sq'"):
        executor.step(x=ONES, target=np.float32(1e20) * ONES)


def test_accumulated_gradients_are_not_spoiled() -> None:
    step = compiled(root(), passes.SGD(0.1), accumulate=passes.Accumulate(steps=4))
    executor = graphopt.Executor(step, threads=1)
    executor.step(x=ONES, target=ONES)
    with pytest.raises(graphopt.NonFiniteLoss, match=r"in state 'w.accumulated'"):
        executor.step(x=0 * ONES, target=ONES)
    for _ in range(6):
        executor.step(x=ONES, target=2 * ONES)
    assert np.isfinite(executor.state["w"]).all()


def test_large_numbers_and_infinite_ones_that_were_there_before_are_no_error() -> None:
    """A mask of -inf is a parameter of some models; numbers of 1e30 have squares that overflow."""
    mask = np.array([-np.inf, 0.0, 1e30], np.float32)
    proto = model(
        "g (float[N,3] x) => (float[N,3] y) { p = Mul(x, w)\n q = Add(p, mask)\n y = Tanh(q) }",
        w=np.ones(3),
        mask=mask,
    )
    step = compiled(proto, passes.SGD(0.1), parameters=passes.Parameters(pattern="*"))
    executor = graphopt.Executor(step, threads=1)
    x = np.ones((4, 3), np.float32)
    for _ in range(3):
        executor.step(x=x, target=0 * x)
    np.testing.assert_array_equal(executor.state["mask"][[0, 2]], mask[[0, 2]])


@pytest.mark.slow
def test_the_sum_that_a_gpu_computes_is_finite_where_the_cpus_is() -> None:
    for wrong in (0.0, np.inf, -np.inf, np.nan):
        executor = graphopt.Executor(compiled(mlp(), passes.AdamW(0.1)), threads=1)
        executor.update_state({"fc1.bias": np.array([1, wrong, 2], np.float32)})
        buffers = executor._parts.buffers
        is_finite = buffers._are_finite[0]
        graph, values = _summed(buffers.sets[0])
        assert len(values) == len(buffers.sets[0]) - 1  # without the counter
        total = Session(executor._device, graph).compute(values)["total"].numpy()
        assert np.isfinite(total) == is_finite() == np.isfinite(wrong)


BATCH = {
    "x": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32),
    "target": np.zeros((8, 3), np.float32),
}


@pytest.fixture
def switching() -> Any:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_that_share_an_executor_lose_no_update(tmp_path: Any) -> None:
    """Six threads of steps and runs, three that look: as many updates as in one thread, and the same numbers."""
    step = compiled(mlp(), passes.SGD(0.01, momentum=0.5))
    executor, alone = (graphopt.Executor(step, threads=1, steps_per_call=n) for n in (7, None))
    count, losses, stop = 100, [], threading.Event()

    def steps() -> None:
        losses.extend(executor.step(BATCH)["loss"] for _ in range(count))

    def run() -> None:
        losses.extend(x["loss"] for x in executor.iterate([BATCH] * count))

    def look(number: int) -> None:
        path = tmp_path / f"{number}.safetensors"
        while not stop.is_set():
            state = executor.state
            assert np.isfinite(state["fc0.weight"]).all()
            assert executor.evaluate(BATCH)["loss"] >= 0
            assert executor.predict(x=BATCH["x"])["y"].shape == (8, 3)
            executor.set_hyperparameters(learning_rate=0.01)
            executor.save(path)
            assert executor.contiguous().size == 67

    with ThreadPoolExecutor(9) as pool:
        working = [pool.submit(steps) for _ in range(3)]
        working += [pool.submit(run) for _ in range(3)]
        looking = [pool.submit(look, number) for number in range(3)]
        for each in working:
            each.result()
        stop.set()
        for each in looking:
            each.result()
    assert executor.steps == int(executor.state["step"]) == len(losses) == 6 * count
    expected = [alone.step(BATCH)["loss"] for _ in range(6 * count)]
    np.testing.assert_allclose(sorted(losses), sorted(expected), rtol=1e-6)
    assert_close(executor.state, alone.state, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("switching")
def test_every_state_that_a_thread_sees_is_that_after_a_whole_step() -> None:
    """After n steps of a rate of 1 on the gradient 1, w and b are both -n: never one of them ahead."""
    loss = passes.CustomLoss(lambda op, p, t: p)
    step = graphopt.compile(linear(1, 1), loss=loss, optimizer=passes.SGD(1.0))
    executor = graphopt.Executor(step, threads=1, steps_per_call=3)
    executor.update_state({"w": np.zeros((1, 1), np.float32), "b": np.zeros(1, np.float32)})
    one = np.ones((1, 1), np.float32)
    done = threading.Event()

    def train() -> None:
        for _ in executor.iterate([{"x": one, "target": one}] * 1000):
            pass
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    seen = 0
    while not done.is_set():
        state = executor.state
        assert state["w"].item() == state["b"].item() == -int(state["step"])
        seen += 1
    thread.join()
    assert seen


@pytest.mark.usefixtures("switching")
@pytest.mark.slow
def test_threads_that_share_a_layer_lose_no_pass() -> None:
    """Six threads go forward and back, each its own way; all try to go back from one, which one of them may."""
    proto = model(
        "g (float[N,3] x) => (float[N,3] y) { p = Mul(x, w)\n y = Dropout(p, half) }",
        w=np.ones(3),
        half=np.float32(0.5),
    )
    parameters = passes.Parameters("w")
    layer = graphopt.ForwardBackward(proto, threads=1, training=passes.TrainingMode(), parameters=parameters)
    (counter,) = layer.state.keys() - layer.parameters.keys()
    before, count = int(layer.state[counter]), 100
    shared = layer.forward(x=np.ones((4, 3), np.float32))

    def there_and_back(number: int) -> int:
        x = np.full((4, 3), number, np.float32)
        for _ in range(count):
            passed = layer.forward(x=x)
            np.testing.assert_array_equal(passed.backward(y=x)["w"], (passed["y"] * number).sum(axis=0))
        try:
            shared.backward(y=x)
        except graphopt.GraphoptError:
            return 0
        return 1

    with ThreadPoolExecutor(6) as pool:
        went_back = sum(pool.map(there_and_back, range(1, 7)))
    assert (int(layer.state[counter]) - before, went_back) == (6 * count + 1, 1)


def test_a_step_between_the_steps_of_a_run_counts() -> None:
    step = compiled(mlp(), passes.AdamW(0.01))
    executor, alone = (graphopt.Executor(step, threads=1, steps_per_call=n) for n in (3, None))
    for _ in executor.iterate([BATCH] * 6):
        executor.step(BATCH)
    for _ in range(12):
        alone.step(BATCH)
    assert executor.steps == 12
    assert_close(executor.state, alone.state, rtol=1e-6, atol=0)


def test_a_refused_checkpoint_leaves_the_properties(tmp_path: Any) -> None:
    executor = graphopt.Executor(compiled(mlp(), passes.AdamW(0.01)), threads=1)
    executor.properties = {"epoch": 3}
    before = executor.state
    path = tmp_path / "other.safetensors"
    other = graphopt.Executor(compiled(mlp((4, 9, 3)), passes.AdamW(0.01)), threads=1)
    other.properties = {"epoch": 7}
    other.save(path)
    with pytest.raises(graphopt.GraphoptError, match="expected shape"):
        executor.load(path)
    assert executor.properties == {"epoch": 3}
    assert_equal(executor.state, before)
