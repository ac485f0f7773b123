"""Training on a GPU by WebGPU equals training on the CPU. Without a GPU, Chromium's software adapter computes.

The README's second command installs the plugin beside onnxruntime. For the package, in an environment of its own:
pip install -e ".[webgpu,sklearn]" pytest pytest-xdist, and pytest tests/test_webgpu.py tests/test_webgpu_forms.py.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnxruntime
import pytest
from adapter import missing
from builders import model
from host_graphs import GRAPHS, batches

import graphopt
import passes
from graphopt import models
from graphopt.cli.command import main
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role, with_role
from graphopt.training.fit import fit

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

X = np.random.default_rng(1).standard_normal((64, 1, 8, 8)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, 10, 64)
BATCHES = [{"x": X[i : i + 16], "target": LABELS[i : i + 16]} for i in range(0, 64, 16)]
NETWORKS = {"mlp": models.mlp((1, 8, 8), 10, hidden=(32,)), "cnn": models.cnn((1, 8, 8), 10)}


def compiled(network: str = "mlp", **steps: Any) -> Any:
    return graphopt.compile(NETWORKS[network], loss=passes.CrossEntropy(), **{"optimizer": passes.AdamW(1e-3), **steps})


def pair(step: Any, **options: Any) -> tuple[graphopt.Executor, graphopt.Executor]:
    """Return an executor on the CPU and one on the GPU."""
    return graphopt.Executor(step, threads=1), graphopt.Executor(step, device="webgpu", **options)


def losses(executor: graphopt.Executor, count: int = 4) -> list[float]:
    return [executor.step(BATCHES[i % 4])["loss"] for i in range(count)]


def same_state(first: graphopt.Executor, second: graphopt.Executor, rtol: float = 1e-3) -> None:
    """Check that states are equal, as far as another order of sums allows."""
    for name, x in first.state.items():
        scale = max(1e-3, float(np.abs(x).max(initial=0.0)))
        np.testing.assert_allclose(second.state[name], x, rtol=rtol, atol=rtol * scale, err_msg=name)


@pytest.fixture
def reads(monkeypatch: Any) -> Counter[str]:
    """Count the reads of values that lie on the device."""
    counts: Counter[str] = Counter()
    numpy = onnxruntime.OrtValue.numpy

    def counted(self: Any) -> np.ndarray:
        counts[self.device_name()] += 1
        return numpy(self)

    monkeypatch.setattr(onnxruntime.OrtValue, "numpy", counted)
    return counts


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.sample(4)
def test_the_graphs_of_the_hosts_train(name: str) -> None:
    on_cpu, on_gpu = pair(GRAPHS[name][0]())
    for batch in batches(name)[:20]:
        expected, found = on_cpu.step(batch), on_gpu.step(batch)
        assert list(found) == list(expected)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)  # an NVIDIA H200 needs 6e-5
    assert on_gpu.steps == 20
    for name, reason in on_gpu.fallbacks().items():
        assert "arithmetic on shapes" in reason or "loops and branches" in reason, (name, reason)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"report": ["loss"]},
        {"static_shapes": True},
        {"low_memory": True},
        {"as_numpy": False},
        {"graph_capture": True},
        {"graph_capture": True, "report": ["loss"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.sample(5)
def test_options_do_not_change_the_losses(network: str, options: dict[str, Any]) -> None:
    """Batches of two sizes, and evaluations between the steps."""
    on_cpu, on_gpu = pair(compiled(network, clip=passes.ClipGlobalNorm(0.5)), **options)
    for rows in (16, 16, 7, 16, 7):
        batch = {name: x[:rows] for name, x in BATCHES[rows % 4].items()}
        assert on_gpu.step(batch)["loss"] == pytest.approx(on_cpu.step(batch)["loss"], rel=1e-4)
        assert on_gpu.evaluate(batch)["loss"] == pytest.approx(on_cpu.evaluate(batch)["loss"], rel=1e-4)
    same_state(on_cpu, on_gpu)


@pytest.mark.parametrize("graph_capture", [False, True])
@pytest.mark.parametrize("frozen", ["packed", "mapped", "low"])
def test_sessions_on_the_device_share_frozen_weights(frozen: str, graph_capture: bool) -> None:
    step = compiled("mlp", parameters=passes.Parameters(freeze="layers.1.weight"))
    on_cpu, on_gpu = pair(step, frozen=frozen, graph_capture=graph_capture)
    for batch in BATCHES[:3]:
        assert on_gpu.step(batch)["loss"] == pytest.approx(on_cpu.step(batch)["loss"], rel=1e-4)
        assert on_gpu.evaluate(batch)["loss"] == pytest.approx(on_cpu.evaluate(batch)["loss"], rel=1e-4)
        on_gpu.predict(batch)
    assert (len(on_gpu.device_options.shared) > 0) == (frozen != "packed")


@pytest.mark.parametrize(
    "steps",
    [
        {"accumulate": passes.Accumulate(2)},
        {"optimizer": passes.SGD(0.02, momentum=0.9), "schedule": passes.Cosine(steps=4, warmup=2)},
        {"optimizer": passes.Lion(1e-3)},
        {"regularizer": passes.L2(1e-3), "recompute": passes.Recompute()},
        {"gradient": passes.Gradient(loss_scale=2.0**10), "loss_scale": passes.DynamicLossScale()},
    ],
    ids=lambda steps: "-".join(steps),
)
def test_pipelines_train(steps: dict[str, Any]) -> None:
    on_cpu, on_gpu = pair(compiled(**steps))
    assert losses(on_gpu, 6) == pytest.approx(losses(on_cpu, 6), rel=1e-5)
    same_state(on_cpu, on_gpu)


def test_state_that_the_cpu_reads_is_read_anew_in_each_step() -> None:
    """A binding copies to the CPU when it is made: without another, operators there see the first weights for ever."""
    step = compiled(optimizer=passes.SGD(0.02, momentum=0.9))
    first = graphopt.Executor(step, device="webgpu")
    (form,) = first._steps.runner.forms
    state = {x.name for x in with_role(form.model, Role.PARAMETER, Role.SLOT)}
    readers = [node.name for node in form.model.graph if state & {x.name for x in node.inputs if x is not None}]
    forced = {"forceCpuNodeNames": "\n".join(map(str, readers))}
    on_cpu, on_gpu = pair(step, provider_options=forced)
    assert set(readers) & set(on_gpu.fallbacks())
    assert losses(on_gpu, 6) == pytest.approx(losses(on_cpu, 6), rel=1e-5)
    same_state(on_cpu, on_gpu)


def test_several_steps_run_in_one_call_and_read_the_device_once(reads: Counter[str]) -> None:
    on_cpu, on_gpu = pair(compiled(), report=["loss"], steps_per_call=2)
    found = on_gpu.run(BATCHES)
    reads.clear()
    found += on_gpu.run(BATCHES)
    assert reads.total() == 2
    expected = [report["loss"] for report in on_cpu.run(BATCHES * 2)]
    assert [report["loss"] for report in found] == pytest.approx(expected, rel=1e-5)
    same_state(on_cpu, on_gpu)


def test_names_of_nodes_for_the_cpu_may_be_too_long_for_the_runtime() -> None:
    step = compiled()
    for node in step.graph.all_nodes():
        node.name += "x" * 9000
    on_cpu, on_gpu = pair(step)
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-5)


def test_outputs_may_have_the_names_of_the_vector_and_the_check() -> None:
    text = """g (float[N,64] x) => (float[N,10] y, float "graphopt.packed", float "graphopt.check") {
        y = MatMul(x, w) "graphopt.packed" = ReduceMean<keepdims=0>(y) "graphopt.check" = ReduceMax<keepdims=0>(y) }"""
    step = graphopt.compile(
        model(text, w=np.random.default_rng(0).standard_normal((64, 10)) / 8),
        loss=passes.CrossEntropy(output="y"),
        optimizer=passes.SGD(0.1),
    )
    on_cpu, on_gpu = pair(step)
    for batch in BATCHES:
        fed = {"x": batch["x"].reshape(-1, 64), "target": batch["target"]}
        expected, found = on_cpu.step(fed), on_gpu.step(fed)
        assert all(found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6) for name in expected)


def test_mixed_precision_trains_where_the_adapter_has_16_bit_floats() -> None:
    mixed = {"gradient": passes.Gradient(loss_scale=2.0**10), "loss_scale": passes.DynamicLossScale()}
    on_cpu, on_gpu = pair(compiled(precision=passes.MixedPrecision(), **mixed))
    found = None
    with contextlib.suppress(graphopt.GraphoptError):
        found = losses(on_gpu)
    if found is None:
        with pytest.raises(graphopt.GraphoptError, match="expected a graphics adapter with 16-bit floats"):
            losses(on_gpu)
        pytest.skip("the adapter has no 16-bit floats")
    assert found == pytest.approx(losses(on_cpu), rel=1e-2)


def test_a_step_reads_the_device_once(reads: Counter[str], tmp_path: Path, monkeypatch: Any) -> None:
    """By `numpy`, and by no copy to the host within the graph, as the runtime's profile says."""
    open_options = graphopt.Device.new_session_options

    def profiled(self: graphopt.Device, **captures: bool) -> Any:
        options = open_options(self, **captures)
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        return options

    monkeypatch.setattr(graphopt.Device, "new_session_options", profiled)
    step = compiled(clip=passes.ClipGlobalNorm(0.5), schedule=passes.Cosine(steps=20, warmup=3))
    on_gpu = graphopt.Executor(step, device="webgpu", report=["loss", "gradient_norm", "learning_rate"])
    losses(on_gpu)
    reads.clear()
    losses(on_gpu)
    assert reads.total() == 4
    (form,) = on_gpu._steps.runner.forms
    nodes = [x["args"] for x in json.loads(Path(form.session.ort.end_profiling()).read_text()) if x["cat"] == "Node"]
    assert sum(node.get("provider") == "WebGpuExecutionProvider" for node in nodes) > 100
    assert not any(node.get("op_name") == "MemcpyToHost" for node in nodes)


def test_a_step_without_a_report_reads_nothing(reads: Counter[str]) -> None:
    on_cpu, on_gpu = pair(compiled(), report=[])
    assert on_gpu.step(BATCHES[0]) == {}
    reads.clear()
    assert [on_gpu.step(batch) for batch in BATCHES[1:]] == [{}] * 3
    assert not reads
    losses(on_cpu)
    same_state(on_cpu, on_gpu)


def test_values_on_the_device_are_reported_and_fed() -> None:
    on_cpu, on_gpu = pair(compiled(), as_numpy=False)
    expected = [on_cpu.step(batch) for batch in BATCHES]
    found = [on_gpu.step(on_gpu.on_device(batch)) for batch in BATCHES]
    for want, have in zip(expected, found, strict=True):  # later steps do not overwrite what a step returned
        assert have["loss"] == pytest.approx(want["loss"], rel=1e-5)
        np.testing.assert_allclose(have["y"].numpy(), want["y"], rtol=1e-3, atol=1e-4)


def test_fit_and_checkpoints(tmp_path: Path) -> None:
    on_cpu, on_gpu = pair(compiled("cnn"), report=["loss"])
    data = {"x": X, "target": LABELS}
    records = [fit(each, data, epochs=2, batch_size=10, validation=0.25) for each in (on_cpu, on_gpu)]
    for expected, found in zip(*records, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-5)
    path = tmp_path / "state.safetensors"
    on_gpu.save(path)
    on_cpu.load(path)
    assert on_cpu.batches == on_gpu.batches == 10
    for name, x in on_cpu.state.items():
        np.testing.assert_array_equal(on_gpu.state[name], x)
    expected, found = losses(on_cpu), losses(on_gpu)
    assert found == pytest.approx(expected, rel=1e-5)
    on_cpu.save(path)
    on_gpu.load(path)
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-5)


def test_predictions_and_the_trained_model() -> None:
    on_cpu, on_gpu = pair(compiled("cnn"))
    losses(on_cpu), losses(on_gpu)
    np.testing.assert_allclose(on_gpu.predict(x=X)["y"], on_cpu.predict(x=X)["y"], rtol=1e-3, atol=1e-4)
    trained = graphopt.run(on_gpu.trained(), {"x": X})["y"]
    np.testing.assert_allclose(on_gpu.predict(x=X)["y"], trained, rtol=1e-3, atol=1e-4)


def test_predictions_do_not_depend_on_the_target_of_steps() -> None:
    vector = model("g (float[N,8] x) => (float[N] y) { y = MatMul(x, w) }", w=np.cos(np.arange(8.0)))
    step = graphopt.compile(vector, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    x = X.reshape(-1, 8)
    expected, found = (each.predict(x=x)["y"] for each in pair(step, target="plain"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_state_and_hyperparameters_are_replaced() -> None:
    on_cpu, on_gpu = pair(compiled(optimizer=passes.SGD(0.1)))
    for executor in (on_cpu, on_gpu):
        executor.learning_rate = 0.5
        executor.update_state({name: x / 2 for name, x in executor.parameters.items()})
        executor.step(BATCHES[0], learning_rate=0.25)
    assert on_gpu.learning_rate == 0.25
    same_state(on_cpu, on_gpu)


@pytest.mark.parametrize("chosen", ["raise", "skip"])
def test_a_step_that_is_not_finite_keeps_the_state(chosen: str) -> None:
    on_gpu = graphopt.Executor(compiled(optimizer=passes.SGD(1e25)), device="webgpu", on_nonfinite=chosen)
    on_gpu.step(BATCHES[0])
    before = on_gpu.state
    if chosen == "raise":
        with pytest.raises(graphopt.NonFiniteLoss):
            losses(on_gpu)
    else:
        with pytest.warns(UserWarning, match="step skipped"):
            losses(on_gpu)
    for name, x in before.items():
        np.testing.assert_array_equal(on_gpu.state[name], x)


def test_threads_do_not_disturb_each_other() -> None:
    executors = [graphopt.Executor(compiled(network), device="webgpu") for network in ("mlp", "cnn")]
    found: dict[int, list[float]] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: losses(executors[i], 8)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, network in enumerate(("mlp", "cnn")):
        assert found[i] == pytest.approx(losses(graphopt.Executor(compiled(network)), 8), rel=1e-4)


class Negated(Pass):
    """Train uphill: add to a parameter what is to be subtracted."""

    def rewrite(self, model: Any) -> None:
        from graphopt.graph.emitter import Emitter
        from graphopt.graph.values import swap

        y = next(y for y in with_role(model, Role.NEXT) if y.producer().op_type == "Sub")
        node = y.producer()
        with Emitter(model) as op:
            swap(y, op.Add(*node.inputs))
        model.graph.remove(node, safe=True)


def test_a_device_is_copied_with_its_options() -> None:
    device = graphopt.Device("webgpu", provider_options={"enableInt64": True}, low_memory=True)
    for copied in (copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert (copied.name, copied.provider_options, copied.low_memory) == (
            "webgpu",
            {"enableInt64": True},
            True,
        )
        assert losses(graphopt.Executor(compiled(), device=copied))


def test_the_command_trains_reports_and_evaluates(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    graphopt.save(NETWORKS["mlp"], "my.onnx")
    assert main(["report", "my.onnx", "executor=webgpu", "folder=report"]) == 0
    assert "on webgpu" in capsys.readouterr().out
    assert "nodes on the device" in Path("report/report.txt").read_text()
    assert main(["my.onnx", "data=digits", "executor=webgpu", "fit.epochs=1", "folder=run"]) == 0
    assert main(["evaluate", "folder=run", "executor=cpu"]) == 0
    on_cpu = json.loads(Path("run/metrics.json").read_text())
    assert main(["evaluate", "folder=run"]) == 0
    assert json.loads(Path("run/metrics.json").read_text()) == pytest.approx(on_cpu, rel=1e-5)


ENDINGS = {
    "returns": (0, "pass"),
    "raises": (1, "raise RuntimeError('mine')"),
    "fails on the device": (1, "executor.step(x=X, target=LABELS[:3])"),
    "is not finite": (1, "executor.step(x=X * np.nan, target=LABELS)"),
    "exits": (7, "sys.exit(7)"),
    "is interrupted": (-signal.SIGINT, "step_for_ever(signal.SIGINT)"),
    "is terminated": (-signal.SIGTERM, "step_for_ever(signal.SIGTERM)"),
    "trains in a daemon thread": (
        0,
        "threading.Thread(target=lambda: [step() for _ in range(9999)], daemon=True).start()",
    ),
    "holds what it reported": (0, "sys.modules['kept'] = [executor, *reported.values()]; del executor"),
    "holds a cycle": (0, "cycle = [reported]; cycle.append(cycle); del executor"),
}
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from adapter import software_adapter
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore interruptions
software_adapter()
import graphopt, passes
from graphopt import models
X, LABELS = np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)
def step():
    return executor.step(x=X, target=LABELS)
def step_for_ever(number):
    def ask():
        while True:  # Python drops an interruption of a callback
            time.sleep(0.2)
            os.kill(os.getpid(), number)
            time.sleep(20)
    threading.Thread(target=ask, daemon=True).start()
    while True:
        step()
graph = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
executor = graphopt.Executor(graph, device="webgpu", as_numpy=False, verify=False)
reported = step()
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_cleanly(ending: str) -> None:
    code, text = ENDINGS[ending]
    own = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    paths = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}{text}\n"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == code, done.stderr
    assert "terminate called" not in done.stderr


def test_a_machine_without_an_adapter_is_told_what_to_install(tmp_path: Path) -> None:
    hidden = {
        "VK_DRIVER_FILES": str(tmp_path),
        "VK_ICD_FILENAMES": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    program = "import graphopt; graphopt.Device('webgpu')"
    environment = {
        **os.environ,
        **hidden,
        "PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "device 'webgpu': expected a graphics adapter, found none" in last and "mesa-vulkan-drivers" in last


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("webgpu_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("webgpu_mistakes", call, globals())


def test_sets_of_classes_are_on_webgpu_those_of_the_cpu() -> None:
    for score in ("lac", "aps", "raps"):
        added = passes.PredictionSet(0.2, score)
        file = graphopt.calibrate(NETWORKS["cnn"], {"x": X, "target": LABELS}, passes.Temperature(0.3), added)
        found, due = (graphopt.predict(file, {"x": X}, device=device) for device in ("webgpu", "cpu"))
        assert found.keys() == due.keys()
        for name, y in due.items():
            np.testing.assert_allclose(found[name], y, rtol=1e-3, atol=1e-5, err_msg=f"{score}: {name}")
