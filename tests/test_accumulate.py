"""Gradients accumulated over several steps give one update, that of the whole batch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from builders import mlp, model
from steps import assert_close, assert_equal

import graphopt
import passes

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 4)).astype(np.float32)
T = np.tanh(X[:, :3])
STEPS = {
    "loss": passes.MeanSquaredError(),
    "clip": passes.ClipGlobalNorm(0.3),
    "optimizer": passes.AdamW(0.01),
    "schedule": passes.Cosine(steps=20, warmup=2),
}


def quarters():
    return [{"x": X[i : i + 8], "target": T[i : i + 8]} for i in range(0, 32, 8)]


@pytest.mark.slow
def test_four_quarters_of_a_batch_are_a_batch():
    whole = graphopt.Executor(graphopt.compile(mlp(), **STEPS))
    parts = graphopt.Executor(graphopt.compile(mlp(), **STEPS, accumulate=passes.Accumulate(4)))
    for update in range(5):
        whole.step(x=X, target=T)
        for number, quarter in enumerate(quarters()):
            assert parts.state["step"] == update
            assert parts.state["accumulated"] == number
            parts.step(quarter)
    assert_close({name: parts.state[name] for name in whole.state}, whole.state, atol=1e-7)


@pytest.mark.slow
def test_steps_are_updates_and_batches_are_counted_apart_after_load_too(tmp_path):
    parts = graphopt.Executor(graphopt.compile(mlp(), **STEPS, accumulate=passes.Accumulate(4)), steps_per_call=3)
    parts.run(quarters() + quarters()[:2])
    assert (parts.steps, parts.batches) == (parts.state["step"], 6) == (1, 6)
    parts.save(tmp_path / "state.safetensors")
    again = graphopt.Executor(graphopt.compile(mlp(), **STEPS, accumulate=passes.Accumulate(4)))
    again.load(tmp_path / "state.safetensors")
    assert (again.steps, again.batches, again.properties) == (1, 6, {})
    for executor in (parts, again):
        executor.run(quarters()[2:])
        assert (executor.steps, executor.batches) == (executor.state["step"], 8) == (2, 8)


@pytest.mark.slow
def test_gradients_add_up_until_the_update_is_asked_for():
    whole = graphopt.Executor(graphopt.compile(mlp(), **STEPS))
    parts = graphopt.Executor(graphopt.compile(mlp(), **STEPS, accumulate=passes.Accumulate()))
    before = parts.parameters
    parts.step(quarters()[0], apply=False)
    parts.reset_gradients()
    for quarter in quarters()[:3]:
        parts.step(quarter)  # apply stays as it was fed
    assert_equal(parts.parameters, before)
    parts.step(quarters()[3], apply=True)
    whole.step(x=X, target=T)
    assert_close({name: parts.state[name] for name in whole.state}, whole.state, atol=1e-7)
    assert not np.any(parts.state["fc0.weight.accumulated"])


def test_a_sum_of_gradients_is_as_many_times_the_mean():
    steps = {"loss": passes.MeanSquaredError()}
    sums = graphopt.compile(mlp(), **steps, optimizer=passes.SGD(0.01), accumulate=passes.Accumulate(4, mean=False))
    means = graphopt.compile(mlp(), **steps, optimizer=passes.SGD(0.04), accumulate=passes.Accumulate(4))
    executors = [graphopt.Executor(step) for step in (sums, means)]
    for quarter in quarters():
        for executor in executors:
            executor.step(quarter)
    assert_close(executors[1].parameters, executors[0].parameters, atol=1e-7)


def dropped():
    return model(
        """g (float[N,64] x) => (float[N,64] y) {
            ratio = Constant<value_float = 0.5>()
            d = Dropout(x, ratio)
            y = Mul(d, w)
        }""",
        w=np.ones(64),
    )


@pytest.mark.slow
def test_dropout_draws_a_mask_a_step():
    step = graphopt.compile(
        dropped(),
        training=passes.TrainingMode(),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.0),
        accumulate=passes.Accumulate(2),
    )
    executor = graphopt.Executor(step)
    ones = np.ones((1, 64), np.float32)
    outputs = [executor.step(x=ones, target=ones)["y"] for _ in range(4)]
    assert len({y.tobytes() for y in outputs}) == 4
    assert executor.state["step"] == 2
    assert executor.state["forward_step"] == 4
    assert [y.name for y in executor.trained().graph.output] == ["y"]


def test_what_is_wrong_is_said():
    with pytest.raises(
        graphopt.GraphoptError, match=r"Accumulate\(steps=0\): expected a whole number in \[1, inf\), found 0"
    ):
        passes.Accumulate(0)
    with pytest.raises(graphopt.GraphoptError, match="run the optimizer first"):
        graphopt.compile(mlp(), loss=passes.MeanSquaredError(), accumulate=passes.Accumulate())
    executor = graphopt.Executor(graphopt.compile(mlp(), **STEPS))
    with pytest.raises(graphopt.GraphoptError, match="expected a graph that accumulates gradients, found none"):
        executor.reset_gradients()


class Summing(passes.Optimizer):
    """Descend along the sum of all gradients."""

    def slots(self):
        return {"accumulated": 0.0}

    def update(self, op, w, g, rate, t, total):
        return w - rate * (total + g), total + g


def test_a_slot_of_ones_own_may_be_called_as_those_of_accumulate():
    step = graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=Summing(0.01))
    for source in (step, without_owners(step)):
        executor = graphopt.Executor(source)
        executor.step(x=X, target=T)
        with pytest.raises(graphopt.GraphoptError, match="expected a graph that accumulates gradients"):
            executor.reset_gradients()
        assert any(array.any() for name, array in executor.state.items() if name.endswith(".accumulated"))


def test_a_graph_without_the_owners_of_slots_accumulates_as_before():
    step = graphopt.compile(mlp(), **STEPS, accumulate=passes.Accumulate(4))
    executor = graphopt.Executor(without_owners(step))
    executor.step(quarters()[0])
    executor.reset_gradients()
    assert not any(array.any() for name, array in executor.state.items() if name.rpartition(".")[2] == "accumulated")


def without_owners(step):
    """Return a training graph as it was saved before slots had owners."""
    proto = ir.to_proto(step)
    for value in proto.graph.input:
        kept = [x for x in value.metadata_props if x.key not in ("graphopt.owner", "graphopt.kind")]
        del value.metadata_props[:]
        value.metadata_props.extend(kept)
    return proto
