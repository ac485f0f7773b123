"""Denormal numbers count as 0 in steps, and nowhere else."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import mlp, model
from steps import assert_equal

import graphopt
import passes
from graphopt.runtime.denormals import Flushing, supported
from graphopt.targets.native import toolchain

pytestmark = pytest.mark.skipif(not supported(), reason="Linux on x86-64 alone")
TINY = np.finfo(np.float32).tiny


def embedding() -> Any:
    table = np.random.default_rng(0).standard_normal((4000, 16)).astype(np.float32)
    return model("g (int64[N] x) => (float[N,16] y) { y = Gather(table, x) }", table=table)


def batch(rows: Any) -> dict[str, np.ndarray]:
    return {"x": np.array(rows), "target": np.zeros((len(rows), 16), np.float32)}


def denormal() -> bool:
    """Tell whether this thread has denormal numbers."""
    return bool(np.full(4, 1e-30, np.float32)[0] * np.float32(1e-10) > 0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "slot"),
    [
        (passes.SGD(0.01, momentum=0.5), "table.momentum"),
        (passes.Adam(0.01, beta1=0.5, beta2=0.5), "table.exp_sum"),
    ],
    ids=["SGD", "Adam"],
)
def test_moments_of_rows_seen_once_end_at_zero(optimizer: Any, slot: str, threads: int) -> None:
    """Halved two hundred times a moment would be denormal, and a processor of some kinds slow with it."""
    step = graphopt.compile(embedding(), loss=passes.MeanSquaredError(), optimizer=optimizer)
    for flush in (True, False):
        executor = graphopt.Executor(step, threads=threads, flush_denormals=flush, steps_per_call=1)
        executor.step(batch([*range(4000)]))
        seen = 0
        for _ in executor.iterate([batch([0])] * 140):
            moments = np.abs(executor.state[slot])
            seen += int(np.any((moments > 0) & (moments < TINY)))
        assert bool(seen) == (not flush)
        assert np.any(moments[0] > TINY) and (not flush or not np.any(moments[1:] > 0))
        assert denormal()


@pytest.mark.parametrize("native", [False, True])
def test_several_steps_in_a_call_and_predictions_flush_as_well(native: bool) -> None:
    """In one form: by default, a machine may take kernels for several steps alone, which round otherwise."""
    if native and toolchain.compiler() is None:
        pytest.skip("needs a C compiler")
    step = graphopt.compile(embedding(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01, momentum=0.5))
    one, several = (graphopt.Executor(step, threads=1, steps_per_call=n, native=native) for n in (1, 16))
    batches = [batch([*range(40)]), *[batch([7] * 40)] * 200]
    losses = [[x["loss"] for x in executor.iterate(batches)] for executor in (one, several)]
    assert losses[0] == losses[1]
    assert_equal(several.state, one.state)
    several.update_state({"table": np.full((4000, 16), 1e-40, np.float32)})
    twice = graphopt.compile(
        model("g (float[N,4] x) => (float[N,4] y) { y = Mul(x, w) }", w=np.full(4, 1e-20)),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    x = np.full((2, 4), 1e-20, np.float32)
    assert not graphopt.Executor(twice).predict(x=x)["y"].any()
    assert graphopt.Executor(twice, flush_denormals=False).predict(x=x)["y"].all()


def test_training_goes_on_bit_for_bit_among_denormals(tmp_path: Path) -> None:
    step = graphopt.compile(
        embedding(), loss=passes.MeanSquaredError(), optimizer=passes.Adam(0.01, beta1=0.5, beta2=0.7)
    )
    whole = graphopt.Executor(step, threads=1)
    for n in range(300):
        if n == 150:
            whole.save(tmp_path / "state")
        whole.step(batch([n % 7, n]))
    again = graphopt.Executor(step, threads=1)
    again.load(tmp_path / "state")
    for n in range(150, 300):
        again.step(batch([n % 7, n]))
    assert_equal(again.state, whole.state)


def test_modes_that_the_caller_has_set_stay_as_they_are() -> None:
    """FE_UPWARD is 0x800 in C's headers for x86; PyTorch's `set_flush_denormal` would set FTZ and DAZ."""
    libc, seen = ctypes.PyDLL(None), []

    def rounded_upward() -> None:
        executor = graphopt.Executor(
            graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)), threads=1
        )
        libc.fesetround(0x800)
        for _ in range(3):
            executor.step(x=np.ones((2, 4), np.float32), target=np.zeros((2, 3), np.float32))
        seen.append((libc.fegetround(), denormal()))
        with Flushing():
            executor.step(x=np.ones((2, 4), np.float32), target=np.zeros((2, 3), np.float32))
            seen.append((libc.fegetround(), denormal()))

    thread = threading.Thread(target=rounded_upward)
    thread.start()
    thread.join()
    assert seen == [(0x800, True), (0x800, False)]


@pytest.mark.slow
def test_the_calling_thread_keeps_its_numbers(tmp_path: Path) -> None:
    """ONNX Runtime's own option changes the thread that makes the first session of a process: in one of its own."""
    graphopt.save(
        graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)),
        tmp_path / "step.onnx",
    )
    program = f"""
import numpy as np, graphopt
def denormal():
    return bool(np.full(4, 1e-30, np.float32)[0] * np.float32(1e-10) > 0)
executor = graphopt.Executor({str(tmp_path / "step.onnx")!r}, threads=2)
assert denormal(), "after the first session"
executor.step(x=np.ones((2, 4), np.float32), target=np.zeros((2, 3), np.float32))
assert denormal(), "after a step"
try:
    executor.step(x=np.full((2, 4), np.nan, np.float32), target=np.zeros((2, 3), np.float32))
except graphopt.NonFiniteLoss:
    assert denormal(), "after an error"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_threads_have_it_each_to_themselves() -> None:
    step = graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
    executor = graphopt.Executor(step, threads=1)
    feeds = {"x": np.ones((8, 4), np.float32), "target": np.zeros((8, 3), np.float32)}
    found = []

    def work() -> None:
        for _ in range(50):
            executor.step(feeds)
            found.append(denormal())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert denormal()
    assert len(found) == 200 and all(found)
