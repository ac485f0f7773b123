"""Several steps in one call are the same steps: bit-equal state, all losses, any number of batches."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import linear, mlp, model, run

import graphopt
import passes
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.runners import ALONE, TOGETHER, Pace

RNG = np.random.default_rng(0)
X = RNG.standard_normal((50, 8, 4)).astype(np.float32)
T = np.tanh(X[..., :3])
BATCHES = [{"x": x, "target": t} for x, t in zip(X, T, strict=True)]
STEPS = {
    "plain": {"optimizer": passes.SGD(0.1)},
    "adamw": {
        "optimizer": passes.AdamW(0.01),
        "clip": passes.ClipGlobalNorm(0.5),
        "schedule": passes.Cosine(steps=60, warmup=5),
        "regularizer": passes.L2(1e-3),
    },
    "accumulate": {"optimizer": passes.SGD(0.1, momentum=0.9), "accumulate": passes.Accumulate(3)},
}


def compiled(**steps):
    return graphopt.compile(mlp(), loss=passes.MeanSquaredError(), **steps)


def equal(first, second):
    for name, value in first.state.items():
        np.testing.assert_array_equal(second.state[name], value, err_msg=name)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("count", [1, 7, 50, 64])
@pytest.mark.sample(4)
def test_calls_of_several_steps_are_single_steps(name, count):
    step = compiled(**STEPS[name])
    single, several = (graphopt.Executor(step, threads=1, steps_per_call=n) for n in (1, count))
    expected = [single.step(batch) for batch in BATCHES]
    found = several.run(BATCHES)
    assert len(found) == 50
    for one, other in zip(expected, found, strict=True):
        assert list(one) == list(other)
        for key, value in one.items():
            assert type(other[key]) is type(value)
            np.testing.assert_array_equal(other[key], value)
    equal(single, several)
    assert several.batches == single.batches == 50
    assert several.steps == single.steps == single.state["step"]
    single.step(BATCHES[0])
    several.step(BATCHES[0])
    equal(single, several)


def test_a_ragged_last_batch_has_a_call_of_its_own():
    step = compiled(optimizer=passes.AdamW(0.01))
    single, several = graphopt.Executor(step), graphopt.Executor(step, steps_per_call=4)
    batches = [*BATCHES[:9], {"x": X[9, :3], "target": T[9, :3]}]
    expected = [single.step(batch)["loss"] for batch in batches]
    assert [one["loss"] for one in several.run(iter(batches))] == expected
    equal(single, several)


def test_batches_before_one_that_cannot_be_drawn_train():
    step = compiled(optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1, steps_per_call=4)

    def drawn():
        yield from BATCHES[:3] * 2
        raise OSError("the file is gone")

    found = []
    with pytest.raises(OSError, match="the file is gone"):
        found.extend(reported["loss"] for reported in executor.iterate(drawn()))
    alone = graphopt.Executor(step, threads=1)
    assert found == [alone.step(batch)["loss"] for batch in BATCHES[:3] * 2]
    assert executor.batches == 6


def test_how_many_is_chosen_by_the_time_of_a_step():
    executor = graphopt.Executor(compiled(optimizer=passes.SGD()))
    assert len(executor.run(BATCHES)) == 50
    assert executor.steps == 50
    assert executor._steps.several.pace.steps > 1
    assert paced([1e-4] * 6).steps == 40
    assert paced([1.0] + [1e-4] * 5).steps == 40  # the first one takes longer
    assert paced([1e-4] * 6, [1e-4] * 6).steps == 1  # since a step among several takes as long
    assert paced([1e-4] * 6, [1.0] + [8e-5] * 5).steps == 40
    assert paced([0.1] * 6).steps == 1


def paced(alone, together=()):
    """Return a pace that has measured single steps, and steps among several."""
    pace = Pace()
    for name, times in {ALONE: alone, TOGETHER: together}.items():
        for seconds in times:
            pace.clock.add(name, seconds)
    return pace


def test_what_is_the_same_in_each_step_is_computed_once():
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    step = graphopt.lower(graphopt.compile(linear(), **steps), "onnxruntime")
    step.graph.outputs[:] = [y for y in step.graph.outputs if y.name != "y"]
    passes.Unroll()(step)
    (scan,) = [node for node in step.graph if node.op_type == "Scan"]
    body = [node.op_type for node in scan.attributes["body"].as_graph()]
    assert sorted(body) == ["Add", "Add", "Gemm", "MatMul", "Mul", "Mul", "ReduceMean", "ReduceSum", "Sub"]
    assert len(scan.outputs) == 3  # two parameters and the loss: no step counter


def test_random_numbers_are_drawn_in_each_step():
    proto = model(
        """g (float[N,4] x) => (float[N,3] y) {
            noise = RandomNormal<shape = [3]>()
            h = MatMul(x, w)
            y = Add(h, noise)
        }""",
        w=RNG.standard_normal((4, 3)),
    )
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.0))
    executor = graphopt.Executor(step, steps_per_call=4)
    losses = [report["loss"] for report in executor.run([BATCHES[0]] * 4)]
    assert len(set(losses)) == 4


def test_the_graph_stands_by_itself():
    step = compiled(**STEPS["adamw"])
    passes.Unroll(steps=5)(step)
    onnx.checker.check_model(ir.to_proto(step), full_check=True)
    assert [str(x.shape) for x in with_role(step, Role.DATA, Role.TARGET)] == ["[5,N,4]", "[5,N,3]"]
    executor = graphopt.Executor(compiled(**STEPS["adamw"]))
    losses = [executor.step(batch)["loss"] for batch in BATCHES[:10]]
    found = run(step, 2, {"x": X[:5], "target": T[:5]})
    np.testing.assert_allclose(found[0]["loss"], losses[:5], rtol=1e-5)
    whole = graphopt.Executor(step)
    for i in (0, 5):
        np.testing.assert_allclose(
            whole.step(x=X[i : i + 5], target=T[i : i + 5])["loss"], losses[i : i + 5], rtol=1e-6
        )


def test_names_differ_from_those_in_a_branch():
    """A graph that was copied does not know which names its branches took."""
    step = compiled(**STEPS["accumulate"])
    branches = [
        a.as_graph() for node in step.graph for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH
    ]
    inside = [y for branch in branches for node in branch for y in node.outputs]
    taken = {y.name for node in step.graph.all_nodes() for y in node.outputs}
    taken |= {name for graph in step.graphs() for name in graph.initializers}
    names = (name for i in range(1000) if (name := f"val_{i}") not in taken)
    for y, name in zip(inside, names, strict=False):
        y.name = name
    unrolled = passes.Unroll(steps=3)(step.clone()).model
    onnx.checker.check_model(ir.to_proto(unrolled), full_check=True)
    found = graphopt.Executor(step, steps_per_call=3).run(BATCHES[:6])
    single = graphopt.Executor(step)
    assert [one["loss"] for one in found] == [single.step(batch)["loss"] for batch in BATCHES[:6]]


def test_hyperparameters_in_batches_are_fed_step_by_step():
    step = compiled(optimizer=passes.SGD(0.1))
    single, several = graphopt.Executor(step), graphopt.Executor(step, steps_per_call=3)
    batches = [{**batch, "learning_rate": np.float32(0.1 / (i + 1))} for i, batch in enumerate(BATCHES[:6])]
    batches[0]["learning_rate"] = np.array(0.1, np.float32)
    expected = [single.step(batch)["loss"] for batch in batches]
    assert [one["loss"] for one in several.run(batches)] == expected
    equal(single, several)


def test_what_is_wrong_is_said():
    with pytest.raises(
        graphopt.GraphoptError, match=r"Unroll\(steps=0\): expected a whole number in \[1, inf\), found 0"
    ):
        passes.Unroll(0)
    with pytest.raises(graphopt.GraphoptError, match="Unroll needs a training graph"):
        passes.Unroll()(graphopt.compile(mlp(), loss=passes.MeanSquaredError()))
    with pytest.raises(graphopt.GraphoptError, match="steps_per_call: expected 1 or more, or None, found 0"):
        graphopt.Executor(compiled(optimizer=passes.SGD()), steps_per_call=0)
    executor = graphopt.Executor(compiled(optimizer=passes.SGD()), steps_per_call=2)
    with pytest.raises(graphopt.GraphoptError, match=r"input 'x': expected shape \[N,4\], found \[8, 3\]"):
        executor.run([{"x": X[0, :, :3], "target": T[0]}] * 2)
