"""Kernels that write the new state over the old one: the bits of steps with two sets of state."""

from __future__ import annotations

import numpy as np
import pytest
from builders import attention, linear, mlp, model
from test_native import STEPS, batches, step_of

import graphopt
import passes
from graphopt.graph.loading import load
from graphopt.graph.values import next_of
from graphopt.targets.native import kernels, toolchain
from graphopt.targets.native.lowering import plan
from graphopt.targets.native.new_state import write_in_place

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")


def pair(step, **options):
    """Return executors with two sets of state, and with one."""
    return [graphopt.Executor(step, native=True, in_place=kind, **options) for kind in (False, True)]


def assert_same(expected, found):
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_same_state(executors):
    assert_same(*(executor.state for executor in executors))


def shared(executor):
    first, second = executor._parts.buffers.sets
    return {name for name, value in first.items() if second[name] is value}


@pytest.mark.parametrize("name", [name for name in STEPS if name != "static"])
@pytest.mark.slow
def test_steps_in_place_are_those_of_two_sets(name):
    steps, options = STEPS[name]
    executors = pair(step_of(**steps), **options)
    for batch in batches():
        assert_same(*(executor.step(batch) for executor in executors))
    assert_same_state(executors)
    if name != "accumulated":  # an If updates the state
        assert set(executors[0].parameters) <= shared(executors[1])
    assert not set(executors[0].parameters) & shared(executors[0])


TIED = """g (float[N,4] x) => (float[N,4] y) {
    a = MatMul(x, w) b = Tanh(a) t = Transpose<perm = [1, 0]>(w) c = MatMul(b, t) y = Add(c, d)
}"""
RNG = np.random.default_rng(1)
MODELS = {
    "attention": lambda: (attention(), (6, 4), (6, 4)),
    "tied": lambda: (
        model(TIED, w=RNG.standard_normal((4, 64)), d=np.zeros(4)),
        (4,),
        (4,),
    ),
    "deep": lambda: (mlp((4, 64, 64, 64, 3)), (4,), (3,)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_models_in_place(name):
    proto, shape, out = MODELS[name]()
    executors = pair(step_of(proto))
    for batch in batches(shape=shape, out=out):
        assert_same(*(executor.step(batch) for executor in executors))
    assert_same_state(executors)


def test_kernels_wait_for_all_that_read_the_state():
    """The gradient of a layer's input reads its weight, and does not come before the weight's update."""
    found = plan(load(step_of(mlp((4, 64, 64, 3)))))
    names, variants = write_in_place(found.model, found.calls)
    assert "fc1.weight" in names and variants
    graph = found.model.graph
    weight = next(x for x in graph.inputs if x.name == "fc1.weight")
    update = next(y.producer() for y in graph.outputs if y.name == next_of("fc1.weight"))
    before, waiting = set(), [update]
    while waiting:
        for x in waiting.pop().inputs:
            if x is not None and (node := x.producer()) is not None and node not in before:
                before.add(node)
                waiting.append(node)
    assert all(use.node is update or use.node in before for use in weight.uses())
    assert len([*weight.uses()]) > 2


def test_a_state_that_something_else_returns_keeps_two_buffers():
    step = step_of()
    plain = load(step)
    weight = next(x for x in plain.graph.inputs if x.name == "fc0.weight")
    plain.graph.outputs.append(weight)
    found = plan(plain)
    names, _ = write_in_place(found.model, found.calls)
    assert "fc0.weight" not in names and "fc1.weight" in names


VIEWED = """g (float[N,1] x) => (float[N,64] y) { r = Reshape(w, s) a = Mul(x, r) y = Tanh(a) }"""


@pytest.mark.slow
def test_a_kernel_that_reads_a_view_of_the_state_is_no_exception():
    """Each number of the state is read for each row."""
    executors = pair(step_of(model(VIEWED, w=np.ones((8, 8)), s=np.array([1, 64], np.int64))))
    for batch in batches(shape=(1,), out=(64,)):
        assert_same(*(executor.step(batch) for executor in executors))
    assert_same_state(executors)


@pytest.mark.slow
def test_runs_checkpoints_and_evaluation_in_place(tmp_path):
    executors = pair(step_of())
    data = batches(8)
    for executor in executors:
        executor.run(data[:4])
        executor.save(tmp_path / "state")
        executor.run(data[4:])
        executor.load(tmp_path / "state")
        executor.run(data[4:])
        executor.set_contiguous(executor.contiguous() * 2)
        executor.learning_rate = 0.05
        executor.run(data)
    assert_same_state(executors)
    losses = [executor.evaluate(data[0])["loss"] for executor in executors]
    assert losses[0] == losses[1]


def test_a_step_that_is_not_finite_has_changed_the_state():
    step = step_of(linear(4, 3), optimizer=passes.Adam(0.1))
    executor = graphopt.Executor(step, native=True, in_place=True)
    x, target = batches(1)[0].values()
    with pytest.raises(graphopt.NonFiniteLoss, match="the state has changed in place"):
        executor.step(x=x * 1e12, target=target)
    assert not all(np.isfinite(value).all() for value in executor.state.values())


@pytest.mark.parametrize("options", [{"on_nonfinite": "skip"}, {"static_shapes": True}, {"native": False}], ids=str)
def test_what_needs_two_sets_of_state_is_refused(options):
    with pytest.raises(graphopt.GraphoptError, match="in_place: expected"):
        graphopt.Executor(step_of(), in_place=True, **options)


def test_small_models_have_two_sets():
    """`auto` does not lower them."""
    executor = graphopt.Executor(step_of(mlp((4, 8, 3))), in_place=True, native="auto")
    executor.run(batches())
    assert not shared(executor)


@pytest.mark.parametrize(("megabytes", "is_far"), [(32, True), (105, False)])
def test_state_is_stored_past_a_cache_that_does_not_keep_both_of_its_sets(monkeypatch, megabytes, is_far):
    """5.6 million numbers: AMD EPYC has 32 MB for a group of cores, an Intel Xeon 105 MB for all."""
    monkeypatch.setattr(kernels, "last_cache_bytes", lambda: megabytes * 2**20)
    code = [kernel.code for kernel in plan(step_of(mlp((784, 1024, 1024, 10)), optimizer=passes.AdamW())).kernels]
    assert any("store_far" in text for text in code) == is_far


def test_predictions_are_not_state():
    """What calls the session reads them next, however large they are."""
    graph = load(model("g (float[64,1048576] x) => (float[64,1048576] y) { a = Exp(x) y = Mul(a, x) }"))
    (kernel,) = plan(graph).kernels
    assert "store_far" not in kernel.code


@pytest.mark.parametrize("text", ["32768K\n", "0K\n", "", "many", None], ids=repr)
def test_the_size_of_the_last_cache(monkeypatch, tmp_path, text):
    path = tmp_path / "size"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(kernels, "_LAST_CACHE", path)
    assert kernels.last_cache_bytes.__wrapped__() == (2**25 if text == "32768K\n" else 2**27)


@pytest.mark.slow
def test_large_state_is_stored_past_the_caches(monkeypatch, cache, parts):
    """Of sizes that no vector divides, on one thread, on two, in place, and as the runtime computes it."""
    monkeypatch.setattr(kernels, "last_cache_bytes", lambda: 2**23)
    sgd = passes.SGD(0.01, momentum=0.9)
    step = graphopt.compile(mlp((641, 901, 3)), loss=passes.MeanSquaredError(), optimizer=sgd)
    assert any("store_far" in kernel.code for kernel in plan(step).kernels)
    rng = np.random.default_rng(2)
    batch = {name: rng.standard_normal((7, size)).astype(np.float32) for name, size in (("x", 641), ("target", 3))}
    executors = [*pair(step, threads=1), graphopt.Executor(step, native=True, threads=2)]
    plain = graphopt.Executor(step, native=False, threads=1)
    for _ in range(4):
        for executor in (*executors, plain):
            executor.step(batch)
    assert_same_state(executors[:2])
    assert_same_state(executors[1:])
    for name, value in plain.state.items():
        np.testing.assert_allclose(executors[0].state[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
