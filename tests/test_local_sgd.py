"""Workers that train apart and meet every few steps: the outer step, dropped rounds, `fit`, and real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx_ir as ir
import pytest
import torch
from builders import linear, mlp
from steps import assert_close, assert_equal, exported, weights

import graphopt
import passes
from graphopt.communicator import Communicator
from passes.parts.halves import outer_update  # noqa: F401 - of a listing

RNG = np.random.default_rng(0)
X = RNG.standard_normal((96, 3)).astype(np.float32)
DATA = {"x": X, "target": (X @ RNG.standard_normal((3, 2)) + 1).astype(np.float32)}
NESTEROV = passes.SGD(0.7, momentum=0.9, nesterov=True)


class Table:
    """Where threads that are workers put down what they sum; `lost` says whose part of which sum gets lost."""

    def __init__(self, size: int, lost: set[tuple[int, int]] = frozenset()) -> None:  # type: ignore[assignment]
        self.parts: list[Any] = [None] * size
        self.lost, self.sums = lost, 0
        self.barrier = threading.Barrier(size, timeout=60)
        self.turn = threading.Lock()  # one thread runs at a time: onnx_ir emits in one only


class Thread(Communicator):
    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.size = table, rank, len(table.parts)
        self.sent: list[int] = []

    def exchange(self, part: Any) -> list[Any]:
        self.table.parts[self.rank] = part
        self.wait()
        found = list(self.table.parts)
        self.wait()
        return found

    def wait(self) -> None:
        self.table.turn.release()
        try:
            self.table.barrier.wait()
        finally:
            self.table.turn.acquire()

    def sum(self, array: np.ndarray) -> None:
        self.sent.append(array.nbytes)
        lost = {rank for rank, at in self.table.lost if at == len(self.sent)}
        parts = self.exchange(array.copy())
        array[...] = sum(part for rank, part in enumerate(parts) if rank not in lost)

    def gather(self, content: bytes) -> list[bytes]:
        return self.exchange(content)


def compiled(model: Any = None, optimizer: Any = None) -> Any:
    loss = passes.MeanSquaredError()
    step = graphopt.compile(model or linear(), loss=loss, optimizer=optimizer or passes.SGD(0.05))
    return ir.to_proto(step)  # which threads can share


def together(work: Any, size: int = 2, lost: Any = frozenset()) -> list[Any]:
    """Run work(communicator) in a thread for each worker."""
    table = Table(size, lost)

    def run(rank: int) -> Any:
        with table.turn:
            return work(Thread(table, rank))

    with ThreadPoolExecutor(size) as threads:
        return [each.result() for each in [threads.submit(run, rank) for rank in range(size)]]


def batch(step: int, worker: int = 0, workers: int = 1) -> dict[str, np.ndarray]:
    rows = np.arange(8 * step, 8 * step + 8) % len(X)
    return {name: array[np.array_split(rows, workers)[worker]] for name, array in DATA.items()}


@pytest.mark.parametrize(
    ("outer", "theirs"),
    [
        (None, lambda p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True)),
        (NESTEROV, lambda p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True)),
        (passes.SGD(1.0), lambda p: torch.optim.SGD(p, 1.0)),
        (passes.Adam(0.02), lambda p: torch.optim.Adam(p, 0.02)),
    ],
    ids=["default", "nesterov", "average", "adam"],
)
def test_the_outer_optimizer_is_pytorchs_on_what_workers_have_changed(outer: Any, theirs: Any) -> None:
    step, every, rounds = compiled(), 3, 4

    def work(workers: Communicator) -> dict[str, np.ndarray]:
        executor = graphopt.LocalSGD(step, communicator=workers, sync_every=every, outer=outer)
        for i in range(rounds * every):
            assert executor.is_synchronized == (i % every == 0)
            executor.step(batch(i, workers.rank, 2))
        return executor.parameters

    found = together(work)
    alone = graphopt.Executor(step)
    weights = {name: torch.tensor(array) for name, array in alone.parameters.items()}
    optimizer = theirs(list(weights.values()))
    for number in range(rounds):
        start = {name: tensor.numpy().copy() for name, tensor in weights.items()}
        changed = []
        for worker in range(2):
            alone.update_state(start)
            for i in range(number * every, (number + 1) * every):
                alone.step(batch(i, worker, 2))
            changed.append({name: start[name] - array for name, array in alone.parameters.items()})
        for name, tensor in weights.items():
            tensor.grad = torch.tensor((changed[0][name] + changed[1][name]) / 2)
        optimizer.step()
    for name, tensor in weights.items():
        np.testing.assert_allclose(found[0][name], tensor.numpy(), atol=2e-6)
        np.testing.assert_array_equal(found[0][name], found[1][name])


def test_one_worker_that_replaces_its_weights_by_their_mean_trains_as_alone() -> None:
    step = compiled(optimizer=passes.AdamW(0.05))
    options = {"epochs": 4, "batch_size": 20, "validation": 0.25}
    apart = graphopt.LocalSGD(step, sync_every=7, outer=passes.SGD(1.0))
    alone = graphopt.Executor(step)
    ours, theirs = (graphopt.fit(executor, DATA, **options) for executor in (apart, alone))
    assert_close(apart.parameters, alone.parameters, rtol=1e-7)
    assert apart.is_synchronized  # the last epoch ends with a synchronisation
    np.testing.assert_allclose(ours[-1]["validation_loss"], theirs[-1]["validation_loss"], atol=1e-6)
    np.testing.assert_allclose([x["loss"] for x in ours], [x["loss"] for x in theirs], atol=1e-6)


def test_everything_but_a_step_has_the_weights_of_the_last_synchronisation(tmp_path: Path) -> None:
    executor = graphopt.LocalSGD(compiled(), sync_every=3, outer=passes.SGD(1.0))
    plain = graphopt.Executor(compiled())
    held = {**batch(0)}
    for i in range(3):
        executor.step(batch(i))
        plain.step(batch(i))
    known, loss = executor.parameters, executor.evaluate(held)["loss"]
    path = tmp_path / "state"
    executor.save(path)
    np.testing.assert_allclose(loss, plain.evaluate(held)["loss"], rtol=1e-6)
    for i in range(3, 5):
        np.testing.assert_allclose(executor.step(batch(i))["loss"], plain.step(batch(i))["loss"], rtol=1e-5)
    assert executor.evaluate(held)["loss"] == loss
    for name, array in known.items():
        np.testing.assert_array_equal(executor.state[name], array)
        assert not np.array_equal(array, plain.parameters[name])
    np.testing.assert_array_equal(weights(executor.trained())["w"], known["w"])
    executor.update_state({name: array + 1 for name, array in known.items()})  # as a callback that averages weights
    executor.update_state(known)
    executor.step(batch(5))
    plain.step(batch(5))
    assert_close(executor.parameters, plain.parameters, rtol=1e-7)
    executor.step(batch(6))
    executor.load(path)  # the steps of this round are gone
    assert executor.is_synchronized
    executor.synchronize()
    assert_equal(executor.parameters, known)


def test_the_outer_momentum_is_saved(tmp_path: Path) -> None:
    first, second = (graphopt.LocalSGD(compiled(), sync_every=2) for _ in range(2))
    for i in range(4):
        first.step(batch(i))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert np.abs(second.state["outer.w.momentum"]).max() > 0
    for i in range(4, 8):
        first.step(batch(i))
        second.step(batch(i))
    assert_equal(second.state, first.state)
    with pytest.raises(graphopt.GraphoptError, match="expected the state of this training graph, found another's"):
        graphopt.Executor(compiled()).load(tmp_path / "state")


@pytest.mark.slow
def test_running_statistics_are_averaged() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    proto = exported(net.eval(), torch.zeros(4, 3), dynamo=True, dynamic_shapes=({0: "N"},), optimize=False)
    loss, sgd = passes.MeanSquaredError(), passes.SGD(0.0)
    step = graphopt.compile(proto, training=passes.TrainingMode(), loss=loss, optimizer=sgd)
    running = next(x for x in graphopt.Executor(step).state if "running_mean" in x)
    single = [graphopt.Executor(step) for _ in range(2)]
    for worker, executor in enumerate(single):
        for i in range(2):
            executor.step(batch(i, worker, 2))

    def work(workers: Communicator) -> np.ndarray:
        executor = graphopt.LocalSGD(step, communicator=workers, sync_every=2)
        for i in range(2):
            executor.step(batch(i, workers.rank, 2))
        return executor.state[running]

    expected = (single[0].state[running] + single[1].state[running]) / 2
    for found in together(work):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_weights_in_16_bits_meet_in_float32() -> None:
    step = compiled(linear(dtype=np.float16))
    executor = graphopt.LocalSGD(step, sync_every=2, outer=passes.SGD(1.0))
    plain = graphopt.Executor(step)
    for i in range(4):
        half = {name: array.astype(np.float16) for name, array in batch(i).items()}
        executor.step(half)
        plain.step(half)
    assert executor.bytes_per_step == 4 * (3 * 2 + 2 + 1) / 2
    assert_close(executor.parameters, plain.parameters, rtol=1e-7, atol=2e-3)


def test_bytes_are_fewer_by_the_number_of_steps() -> None:
    step = compiled(mlp((3, 64, 2)))

    def work(workers: Thread) -> tuple[float, list[int]]:
        executor = graphopt.LocalSGD(step, communicator=workers, sync_every=5)
        workers.sent.clear()
        for i in range(10):
            executor.step(batch(i, workers.rank, 2))
        return executor.bytes_per_step, workers.sent

    size = 4 * (3 * 64 + 64 + 64 * 2 + 2 + 2)  # weights, and a number for each of two workers
    for bytes_per_step, sent in together(work):
        assert (bytes_per_step, sent) == (size / 5, [size, size])


def quiet(work: Any, **options: Any) -> tuple[list[Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = together(work, **options)
    return found, [str(each.message) for each in caught]


def test_a_round_with_a_worker_that_is_not_finite_is_dropped_by_all() -> None:
    step = compiled()

    def work(workers: Communicator) -> list[Any]:
        executor = graphopt.LocalSGD(step, communicator=workers, sync_every=2, outer=passes.SGD(1.0))
        states = [executor.parameters]
        for i in range(6):
            data = batch(i, workers.rank, 2)
            if (i, workers.rank) == (2, 1):
                data["x"] = np.full_like(data["x"], np.nan)
            executor.step(data)
            if executor.is_synchronized:
                states.append(executor.parameters)
        return states

    found, messages = quiet(work)
    for name in found[0][0]:
        for states in found:
            assert not np.array_equal(states[0][name], states[1][name])
            np.testing.assert_array_equal(states[1][name], states[2][name])
            assert not np.array_equal(states[2][name], states[3][name])
            assert np.isfinite(states[3][name]).all()
        np.testing.assert_array_equal(found[0][3][name], found[1][3][name])
    assert len(messages) == 2 and all("worker 1" in x and "round of 2 steps dropped" in x for x in messages)
    assert sum("expected a finite loss, found nan" in x for x in messages) == 1  # of the worker itself


def test_a_round_without_what_a_worker_has_computed_is_dropped_by_all() -> None:
    step = compiled()

    def work(workers: Thread) -> list[Any]:
        executor = graphopt.LocalSGD(step, communicator=workers, sync_every=2)
        workers.sent.clear()
        states = [executor.state]
        for i in range(6):
            executor.step(batch(i, workers.rank, 2))
            if executor.is_synchronized:
                states.append(executor.state)
        return states

    found, messages = quiet(work, lost={(0, 2)})  # the second synchronisation
    names = [name for name in found[0][0] if name.startswith("outer.") or not name.startswith("step")]
    assert "outer.w.momentum" in names
    for name in names:
        for states in found:
            np.testing.assert_array_equal(states[1][name], states[2][name])
            assert not np.array_equal(states[2][name], states[3][name])
        np.testing.assert_array_equal(found[0][3][name], found[1][3][name])
    assert len(messages) == 1 and "worker 0" in messages[0]


def test_the_third_dropped_round_in_succession_is_an_error_for_all_workers() -> None:
    step = compiled()

    def work(workers: Communicator) -> tuple[int, str]:
        executor = graphopt.LocalSGD(step, communicator=workers, sync_every=2)
        before, steps = executor.parameters, 0

        def train() -> None:
            nonlocal steps
            for steps in range(1, 20):
                data = batch(steps, workers.rank, 2)
                executor.step({**data, "x": data["x"] * np.float32(np.inf)} if workers.rank else data)

        with pytest.raises(graphopt.NonFiniteLoss) as caught:
            train()
        assert_equal(before, executor.parameters)
        executor.step(batch(0))  # of a new round
        return steps, str(caught.value)

    found, _ = quiet(work)
    assert [steps for steps, _ in found] == [6, 6]
    assert all("worker 1" in text and "third time in succession" in text for _, text in found)


def test_a_skipped_step_does_not_cost_the_round() -> None:
    step = compiled()

    def work(workers: Communicator) -> bool:
        executor = graphopt.LocalSGD(step, communicator=workers, sync_every=2, on_nonfinite="skip")
        before = executor.parameters
        for i in range(2):
            data = batch(i, workers.rank, 2)
            if workers.rank and i:
                data["x"] = np.full_like(data["x"], np.nan)
            executor.step(data)
        return any(not np.array_equal(before[name], x) for name, x in executor.parameters.items())

    found, messages = quiet(work)
    assert found == [True, True]
    assert [x for x in messages if "dropped" in x] == []


def test_workers_meet_in_a_loop_of_several_steps_per_call_too() -> None:
    step = compiled()

    def work(workers: Communicator) -> dict[str, np.ndarray]:
        executor = graphopt.LocalSGD(step, communicator=workers, sync_every=3, steps_per_call=4)
        executor.run([batch(i, workers.rank, 2) for i in range(6)])
        assert executor.is_synchronized
        return executor.parameters

    first, second = together(work)
    assert_equal(first, second)


@pytest.mark.parametrize("apart", [True, False])
def test_a_worker_without_rows_waits_for_the_others(apart: bool) -> None:
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.05))
    halves = graphopt.split_step(pipeline, linear())

    def work(workers: Communicator) -> list[dict[str, Any]]:
        executor: graphopt.Executor = graphopt.DataParallel(halves, communicator=workers)
        if apart:
            executor = graphopt.LocalSGD(halves.step, communicator=workers, sync_every=4)
        return graphopt.fit(
            executor, {name: x[:9] for name, x in DATA.items()}, epochs=2, batch_size=4, validation=None
        )

    first, second = together(work)
    for ours, theirs in zip(first, second, strict=True):
        assert (ours["step"], ours["loss"]) == (theirs["step"], theirs["loss"])
        assert np.isfinite(ours["loss"])


def test_what_is_asked_for_and_checkpoints_wait_for_a_synchronisation(tmp_path: Path) -> None:
    class Asks(graphopt.Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int]] = []

        def on_step_end(self, run: Any, record: Any) -> None:
            run.control.should_evaluate = run.control.should_evaluate or run.step == 2
            if run.step == 6:
                run.stop("enough")

        def on_evaluate_begin(self, run: Any) -> None:
            self.seen.append(("evaluate", run.step))

        def on_save_begin(self, run: Any) -> None:
            self.seen.append(("save", run.step))

    asks = Asks()
    executor = graphopt.LocalSGD(compiled(), sync_every=4)
    checkpoint = graphopt.Checkpoints(tmp_path, every="3 steps")
    graphopt.fit(executor, DATA, epochs=2, batch_size=4, callbacks=[asks], checkpoint=checkpoint)
    assert asks.seen == [("evaluate", 4), ("save", 4), ("save", 8), ("evaluate", 8)]


def test_workers_with_other_options_are_errors() -> None:
    step = compiled()

    def work(workers: Communicator) -> str:
        with pytest.raises(graphopt.GraphoptError) as caught:
            graphopt.LocalSGD(step, communicator=workers, sync_every=2 + workers.rank)
        return str(caught.value)

    assert "worker 1: expected sync_every 2 as worker 0 has, found 3" in together(work)[0]


# Real processes, which `mpiexec` starts.

PROGRAM = r"""
import hashlib, json, os, signal, sys, time
import numpy as np
import graphopt, passes
from graphopt import models

job, folder = sys.argv[1:]
rng = np.random.default_rng(0)
x = rng.standard_normal((160, 3)).astype(np.float32)
data = {"x": x, "target": (x @ rng.standard_normal((3, 2)) + 1).astype(np.float32)}
workers = graphopt.MPI(timeout=60)
pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.05))
model = models.mlp((3,), 2, hidden=(8,))


def digest(executor):
    return hashlib.sha256(b"".join(array.tobytes() for array in executor.parameters.values())).hexdigest()


def say(**values):  # in one piece: the workers' lines do not mix
    os.write(1, (json.dumps({"rank": workers.rank, **values}) + "\n").encode())


class Watch(graphopt.Callback):
    def on_fit_begin(self, run):
        say(at=run.step, weights=digest(run.executor))

    def on_step_end(self, run, record):
        if run.executor.is_synchronized:
            say(at=run.step, weights=digest(run.executor))
        if job == "dies" and workers.rank == 1 and run.step == 17:
            end = time.monotonic() + 60
            while graphopt.Checkpoints(folder).newest() is None and time.monotonic() < end:
                time.sleep(0.1)  # the first worker writes it in a thread
            os.kill(os.getpid(), signal.SIGKILL)


if job == "equal":
    apart = graphopt.LocalSGD(pipeline(model), communicator=workers, sync_every=1, outer=passes.SGD(1.0))
    together = graphopt.DataParallel(graphopt.split_step(pipeline, model), communicator=workers)
    options = {"epochs": 3, "batch_size": 16, "validation": 0.25}
    records = [graphopt.fit(executor, data, **options) for executor in (apart, together)]
    ours, theirs = apart.parameters, together.parameters
    difference = max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
    say(difference=difference, weights=digest(apart),
        records=[[{k: r[k] for k in ("loss", "validation_loss")} for r in each] for each in records])
else:
    executor = graphopt.LocalSGD(pipeline(model), communicator=workers, sync_every=5)
    checkpoint = graphopt.Checkpoints(folder, every="5 steps")
    graphopt.fit(executor, data, epochs=3, batch_size=16, validation=None, callbacks=[Watch()],
                 checkpoint=checkpoint, resume=job == "resumes")
    say(at=executor.batches, weights=digest(executor))
"""
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
PROCESSES = pytest.mark.skipif(MPIEXEC is None, reason="expected mpiexec, of the extra mpi")


def processes(job: str, folder: Path, count: int = 2) -> tuple[int, list[dict[str, Any]], str]:
    """Run the program in several processes; return the exit code, what they say, and their errors."""
    (folder / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    command = [MPIEXEC, "-n", str(count), sys.executable, "program.py", job, "checkpoints"]
    done = subprocess.run(  # type: ignore[call-overload]
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, said, done.stderr


@PROCESSES
@pytest.mark.slow
def test_processes_that_meet_after_each_step_train_as_together(tmp_path: Path) -> None:
    code, said, errors = processes("equal", tmp_path)
    assert code == 0, errors
    first, second = sorted(said, key=lambda each: each["rank"])
    assert first["difference"] < 1e-6
    assert (first["weights"], first["records"]) == (second["weights"], second["records"])
    ours, theirs = first["records"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


@PROCESSES
@pytest.mark.slow
def test_after_the_death_of_a_process_training_resumes_from_the_last_synchronisation(tmp_path: Path) -> None:
    code, said, _ = processes("dies", tmp_path)
    assert code != 0
    synchronized = {each["at"]: each["weights"] for each in said if each["rank"] == 0}
    assert {0, 5, 10, 15} <= set(synchronized)
    code, said, errors = processes("resumes", tmp_path)
    assert code == 0, errors
    first, second = ([each for each in said if each["rank"] == rank] for rank in (0, 1))
    start = first[0]["at"]
    assert start > 0  # the last checkpoint that was complete
    assert first[0]["weights"] == second[0]["weights"] == synchronized[start]
    assert first[-1]["at"] == 30
    assert first[-1]["weights"] == second[-1]["weights"]


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("local_sgd_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("local_sgd_mistakes", call, globals())
