"""Properties of all that a training graph can do: each row of `capabilities.py` has each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from capabilities import CAPABILITIES, batches, network, step
from steps import assert_close, assert_equal, outputs, weights
from test_hosts import Host

import graphopt
from graphopt.hosts import export
from graphopt.testing import properties

STEPS = 7
ROUNDS = {"16 bits": 2e-2, "bfloat16": 5e-2, "dynamic scale": 2e-2, "slots of 8 bits": 1e-3}
NO_KERNEL = "bfloat16"  # in ONNX Runtime alone, on a CPU
each = pytest.mark.parametrize("name", CAPABILITIES)
pytestmark = [pytest.mark.usefixtures("plain"), pytest.mark.filterwarnings("ignore:.*overflow")]


@each
def test_losses_and_state_are_those_of_the_reference_evaluator(name: str) -> None:
    graph, (batch,) = step(name), batches(name, 1)
    properties.is_valid(graph)
    properties.trains_as_the_reference(graph, batch, rounding=ROUNDS.get(name, 1e-5), steps=STEPS)


@each
def test_a_saved_step_goes_on_from_saved_state_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The state is saved where a run of several steps per call has ended, between two updates of sums."""
    fed = batches(name, STEPS)
    whole = graphopt.Executor(step(name), threads=1)
    graph = step(name)
    first = graphopt.Executor(graph, threads=1, steps_per_call=2)
    expected = whole.run(fed)
    assert [one["loss"] for one in first.run(fed[:4])] == [one["loss"] for one in expected[:4]]
    first.save(tmp_path / "state.safetensors")
    graphopt.save(graph, tmp_path / "step.onnx")
    second = graphopt.Executor(tmp_path / "step.onnx", threads=1)
    second.load(tmp_path / "state.safetensors")
    assert (second.steps, second.batches) == (first.steps, first.batches)
    assert [one["loss"] for one in second.run(fed[4:])] == [one["loss"] for one in expected[4:]]
    assert_equal(second.state, whole.state)
    assert second.trained().SerializeToString() == whole.trained().SerializeToString()


@each
@pytest.mark.sample(16)
def test_the_trained_model_has_the_interface_of_the_file_and_predicts_as_the_executor(name: str) -> None:
    executor, source, fed = graphopt.Executor(step(name), threads=1), network(name), batches(name, STEPS)
    executor.run(fed)
    trained = executor.trained()
    onnx.checker.check_model(trained, full_check=True)
    notes = [note.key for note in trained.metadata_props if note.key.startswith("graphopt")]
    assert notes == ["graphopt.metric"]  # how scores become labels
    own = onnx.ModelProto(ir_version=trained.ir_version, graph=trained.graph)
    # so that it is not standardized again, and the numbers before a head do not train
    assert ("graphopt" in str(own)) == (name in ("standardized", "a head"))
    for kind in ("input", "output"):
        assert [x.name for x in getattr(trained.graph, kind)] == [x.name for x in getattr(source.graph, kind)]
    assert weights(source).keys() <= weights(trained).keys()
    found = executor.predict(x=fed[0]["x"])
    assert_close(found, outputs(trained, fed[0]), ROUNDS.get(name, 1e-5), ROUNDS.get(name, 1e-5))
    assert not np.array_equal(found["y"], outputs(source, fed[0])["y"])


@pytest.mark.parametrize("name", [name for name in CAPABILITIES if name != NO_KERNEL])
@pytest.mark.slow
@pytest.mark.sample(16)
def test_a_host_trains_as_the_executor_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What proves a host, half of the time of an export, is in test_proofs.py."""
    monkeypatch.setattr(export, "proof_batch", lambda _: None)
    graph = step(name)
    graphopt.export_hosts(graph, tmp_path)
    executor, host = graphopt.Executor(graph, threads=1), Host(tmp_path)
    for batch in batches(name, STEPS):
        assert_close(host.run("train", batch), executor.step(batch), ROUNDS.get(name, 1e-5))
    assert_close(host.state, executor.state, 1e-4, ROUNDS.get(name, 1e-6))


@each
@pytest.mark.sample(16)
def test_the_first_check_finds_no_difference(name: str) -> None:
    table = graphopt.check(step(name), batches(name, 1)[0])
    verdicts = {x.verdict for x in table.findings if x.part == "gradient"}
    expected = {
        "fused": set(),
        "scales that train": {"agrees", "not checked"},
        "sharpness": {"not checked"},
        "sharpness of batches": {"not checked"},
        "attacked": {"not checked"},
    }  # whose slopes are no gradients on purpose
    assert verdicts == expected.get(name, {"agrees"}), str(table)
    assert table.agrees, str(table)
