"""Tests that plain steps run while another process lowers a graph and compiles its kernels."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import mlp

import graphopt
import passes
from graphopt.graph import storage
from graphopt.runtime import forms, rehearsal, translation
from graphopt.runtime.contest import KERNELS, MEASURED_STEPS, Clock
from graphopt.runtime.translation import Mistranslated, Translation
from graphopt.targets.native import toolchain
from graphopt.testing import strict

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")

RNG = np.random.default_rng(0)
BATCHES = [
    {
        "x": RNG.standard_normal((8, 4)).astype(np.float32),
        "target": RNG.standard_normal((8, 3)).astype(np.float32),
    }
    for _ in range(4)
]


@pytest.fixture
def step(cache, parts, monkeypatch):
    """Return a small training graph that counts as one that takes long to lower."""
    monkeypatch.setattr(forms, "REHEARSED_NODES", 1)
    network = mlp((4, 200, 60, 3))  # which learns so slowly that its losses stay far above their rounding
    return graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.AdamW(1e-4))


def rehearsal_of(executor):
    return executor._steps.runner._forms._contest.candidates[KERNELS].rehearsal


def lowered_meanwhile(executor, steps=2000):
    """Return the losses of steps, the first of which run while another process lowers the graph."""
    losses = []
    for batch in itertools.cycle(BATCHES):
        losses.append(executor.step(batch)["loss"])
        if executor._steps.runner.native is not None or len(losses) == steps:
            return losses
        time.sleep(0.05)


@pytest.mark.slow
def test_plain_steps_run_while_another_process_lowers_and_compares(cache, step, monkeypatch):
    """Losses and state are those of a run without kernels, whose state goes on where forms change."""
    with monkeypatch.context() as patched:
        patched.setattr(Translation, "_difference", lambda *_: pytest.fail("this process compares"))
        executor = graphopt.Executor(step, native="auto")
        assert executor._steps.runner.native is None
        process = rehearsal_of(executor)._process.pid
        losses = lowered_meanwhile(executor)
    plain = graphopt.Executor(step, native=False)
    assert executor._steps.runner.native is not None
    assert not Path("/proc").exists() or not Path(f"/proc/{process}").exists()
    assert [*cache.glob("*.so")] and [*cache.glob("*.time.json")]
    assert [*cache.parent.glob("steps/*.verified.json")]
    assert not [path for path in cache.iterdir() if path.is_dir()]
    expected = [plain.step(batch)["loss"] for batch, _ in zip(itertools.cycle(BATCHES), losses, strict=False)]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert executor.state.keys() == plain.state.keys()
    for name, array in plain.state.items():
        np.testing.assert_allclose(executor.state[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.fixture
def frozen_step(cache, parts, monkeypatch):
    """Return a training graph of adapters, whose other weights stay where they are, beyond those that are sent."""
    monkeypatch.setattr(forms, "REHEARSED_NODES", 1)
    monkeypatch.setattr(rehearsal, "LARGEST_WEIGHTS", 0)
    monkeypatch.setattr(translation, "LARGEST_WEIGHTS", 0)
    adapter, loss = passes.LoRA("fc1.weight", rank=16), passes.MeanSquaredError()
    return graphopt.compile(mlp((4, 300, 600, 3)), adapter=adapter, loss=loss, optimizer=passes.AdamW(1e-4))


@pytest.mark.slow
def test_plain_steps_of_frozen_weights_run_while_another_process_lowers(frozen_step):
    executor = graphopt.Executor(frozen_step, native="auto", frozen="low")
    assert executor._steps.runner.native is None
    losses = lowered_meanwhile(executor)
    assert executor._steps.runner.native is True  # nothing is measured
    waiting = graphopt.Executor(frozen_step, native=True, frozen="low")
    batches = [batch for batch, _ in zip(itertools.cycle(BATCHES), losses, strict=False)]
    np.testing.assert_allclose(losses, [waiting.step(batch)["loss"] for batch in batches], rtol=1e-5)


@pytest.mark.slow
def test_if_the_process_lacks_weights_this_one_lowers(frozen_step, monkeypatch):
    executor = graphopt.Executor(frozen_step, native="auto", frozen="low")
    rehearsal_of(executor)._process.kill()
    assert len(lowered_meanwhile(executor)) == 1
    assert executor._steps.runner.native is True


@pytest.mark.slow
def test_a_plain_step_that_takes_much_memory_waits_for_kernels(frozen_step, monkeypatch):
    monkeypatch.setattr(forms, "FEW_NUMBERS", 0)
    executor = graphopt.Executor(frozen_step, native="auto", frozen="low")
    executor.step(BATCHES[0])
    assert executor._steps.runner.native is None  # on 8 rows, it does not
    monkeypatch.setattr(forms, "step_bytes", lambda *_: 2**40)
    executor.step({name: x[:3] for name, x in BATCHES[0].items()})
    assert executor._steps.runner.native is True


@pytest.mark.slow
def test_the_first_small_graph_on_a_machine_does_not_wait_either(cache, monkeypatch):
    network = mlp((4, 200, 60, 3))
    with strict(False):
        step = graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.01))
        executor = graphopt.Executor(step, native="auto")
        assert executor._steps.runner.native is None
        lowered_meanwhile(executor)
        other = graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
        assert graphopt.Executor(other, native="auto")._steps.runner._forms._live is None


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the compiler is a script of the shell")
def test_kernels_that_the_other_process_finds_to_be_wrong_are_refused(cache, step, monkeypatch, tmp_path):
    wrong = tmp_path / "cc"
    found = toolchain.compiler()[0]
    wrong.write_text(
        f'#!/bin/sh\nfor x in "$@"; do case $x in *.c) sed -i "s/ - / + /" $x;; esac; done\nexec {found} "$@"\n'
    )
    wrong.chmod(0o700)
    monkeypatch.setenv("CC", str(wrong))
    toolchain.compiler.cache_clear()
    executor = graphopt.Executor(step, native="auto")
    with pytest.warns(UserWarning, match=r"kernels: expected the numbers of the plain step, found '.*' off by"):
        losses = lowered_meanwhile(executor)
    toolchain.compiler.cache_clear()
    assert executor._steps.runner.native is False
    plain = graphopt.Executor(step, native=False)
    expected = [plain.step(batch)["loss"] for batch, _ in zip(itertools.cycle(BATCHES), losses, strict=False)]
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


@pytest.mark.slow
def test_batches_of_another_shape_do_not_count_in_a_race(cache, step, monkeypatch):
    clocks, add = [], Clock.add
    monkeypatch.setattr(Clock, "add", lambda clock, *call: clocks.append(clock) or add(clock, *call))
    executor = graphopt.Executor(step, native="auto")
    small = {name: x[:3] for name, x in BATCHES[0].items()}
    steps = 0
    while executor._steps.runner.native is None:
        for batch in (small, BATCHES[0]):
            executor.step(batch)
            steps += bool(clocks)
        time.sleep(0.02)
    assert len(clocks) <= steps / 2 + 1
    assert all(clocks.count(clock) <= 2 * (MEASURED_STEPS + 1) for clock in clocks)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes")
def test_no_process_is_left(cache, step):
    executor = graphopt.Executor(step, native="auto")
    process = rehearsal_of(executor)._process.pid
    executor.step(BATCHES[0])
    del executor
    assert not Path(f"/proc/{process}").exists()
    assert not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"native": True}, {"deterministic": True}, {"in_place": True}])
def test_steps_wait_for_kernels_that_they_must_have(cache, step, options):
    executor = graphopt.Executor(step, **{"native": "auto", **options})
    assert executor._steps.runner.native is True
    assert [*cache.glob("*.so")]


@pytest.mark.slow
def test_calls_of_several_steps_wait_for_kernels_and_single_steps_follow(cache, step):
    executor = graphopt.Executor(step, native="auto", steps_per_call=3)
    found = [reported["loss"] for reported in executor.run(BATCHES)]  # the last one alone
    assert [*cache.glob("*.so")]
    found += lowered_meanwhile(executor)
    plain = graphopt.Executor(step, native=False)
    batches = [*BATCHES, *(batch for batch, _ in zip(itertools.cycle(BATCHES), found[4:], strict=False))]
    np.testing.assert_allclose(found, [plain.step(batch)["loss"] for batch in batches], rtol=1e-4)


@pytest.mark.slow
def test_an_error_of_a_comparison_comes_again(cache, step, monkeypatch):
    """With verify=True, kernels that differ are an error of each step, and never run."""

    def differ(*_):
        raise Mistranslated("kernels differ")

    monkeypatch.setattr(Translation, "agrees", differ)
    executor = graphopt.Executor(step, native="auto", verify=True)
    rehearsal_of(executor).wait()
    before = executor.state
    for _ in range(2):
        with pytest.raises(graphopt.GraphoptError, match="kernels differ"):
            executor.step(BATCHES[0])
    for name, array in executor.state.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.slow
def test_if_the_process_that_lowers_ends_plain_steps_go_on(cache, step):
    executor = graphopt.Executor(step, native="auto")
    rehearsal_of(executor)._process.kill()
    with pytest.warns(UserWarning, match="the process that compiles ended with -?[0-9]+; steps run without"):
        lowered_meanwhile(executor)
    assert executor._steps.runner.native is False


@pytest.mark.slow
def test_if_the_process_that_lowers_fails_its_error_is_told(cache, step, monkeypatch):
    monkeypatch.setenv("CC", "false")
    toolchain.compiler.cache_clear()
    executor = graphopt.Executor(step, native="auto")
    with pytest.warns(UserWarning, match="false does not compile the kernels"):
        lowered_meanwhile(executor)
    toolchain.compiler.cache_clear()
    assert executor._steps.runner.native is False


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="asks the system for processes")
def test_the_process_that_lowers_ends_with_the_one_that_trains(cache, step, tmp_path):
    graphopt.save(step, tmp_path / "step.onnx")
    program = f"""import graphopt, time
from graphopt.runtime import forms, rehearsal, translation
forms.REHEARSED_NODES = 1
executor = graphopt.Executor({str(tmp_path / "step.onnx")!r}, native="auto")
print(executor._steps.runner._forms._contest.candidates["kernels"].rehearsal._process.pid, flush=True)
time.sleep(60)"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parents[1])}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)
    inner = int(process.stdout.readline())
    process.kill()
    process.communicate()
    for _ in range(100):
        try:
            os.kill(inner, 0)
            state = Path(f"/proc/{inner}/stat")
            if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("it runs on")


def test_the_process_that_lowers_knows_the_graph_by_the_same_content(frozen_step):
    executor = graphopt.Executor(frozen_step, native="auto", frozen="low")
    written = Path(rehearsal_of(executor)._folder.name) / "step.onnx"
    content, _ = storage.identity_of(ir.from_proto(onnx.load_model(written, load_external_data=False)))
    assert content == written.read_bytes()
    assert content == storage.identity_of(executor._steps.runner._parts[1])[0]
