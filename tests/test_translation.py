"""Executors compare the first step of each rewritten form with the plain step, and see the mistakes planted here."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnxruntime
import pytest
from builders import attention, linear, mlp, model

import graphopt
import passes
from graphopt.graph import unroll
from graphopt.runtime import forms
from graphopt.runtime.bound_session import BoundSession
from graphopt.targets import updates
from graphopt.targets.native import operators, toolchain
from graphopt.targets.onnxruntime import fuse as fusion
from graphopt.testing import strict

RNG = np.random.default_rng(0)
needs_compiler = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
pytestmark = pytest.mark.usefixtures("parts")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give each test a cache of its own, which has verified nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GRAPHOPT_VERIFY", raising=False)
    return tmp_path / "cache" / "graphopt" / "steps"


CONVOLUTION = """g (float[N,3,10,12] x) => (float[N,3] y) {
    c = Conv(x, w) r = Relu(c) f = Flatten(r) y = MatMul(f, m)
}"""


def image_step(**options):
    rng = np.random.default_rng(5)
    weights = {"w": rng.standard_normal((4, 3, 3, 3)) * 0.3, "m": rng.standard_normal((320, 3)) * 0.1}
    network = model(CONVOLUTION, **weights)
    return graphopt.compile(network, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.05), **options)


def images(count=6):
    return {"x": RNG.standard_normal((count, 3, 10, 12), np.float32), "target": RNG.integers(0, 3, count)}


def table_step(optimizer=None, **options):
    optimizer = optimizer or passes.SGD(0.1, momentum=0.9)
    return graphopt.compile(mlp((4, 8, 3)), loss=passes.MeanSquaredError(), optimizer=optimizer, **options)


def rows(count=16):
    return {name: RNG.standard_normal((count, n), np.float32) for name, n in {"x": 4, "target": 3}.items()}


def forget_an_update(monkeypatch):
    """Scale the gradient of the loss, but forget that one update still has a rate of its own: it goes uphill."""
    right = updates._ends
    monkeypatch.setattr(updates, "_ends", lambda *given: right(*given)[:-1])


def use_wrong_kernel(monkeypatch):
    """Compute another function in compiled kernels."""
    monkeypatch.setitem(operators.OF_ANY, "Mul", "{0} * {1} * ({C})1.01")


def lose_state(monkeypatch):
    """Carry a momentum on as it was in several steps per call."""
    right = unroll.state_of
    lost = "fc0.bias.momentum"
    monkeypatch.setattr(unroll, "state_of", lambda y: "lost" if right(y) == lost else right(y))


def assert_trains_as_plain(executor, plain, batches):
    for batch in batches:
        assert executor.step(batch)["loss"] == pytest.approx(plain.step(batch)["loss"], rel=1e-5)
    for name, value in plain.state.items():
        np.testing.assert_allclose(executor.state[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_an_update_that_goes_uphill_is_seen_and_the_plain_step_runs(cache, monkeypatch):
    forget_an_update(monkeypatch)
    executor = graphopt.Executor(image_step(), threads=1)
    batches = [images() for _ in range(4)]
    with pytest.warns(UserWarning, match=r"the step for onnxruntime: .*\.next' off by \S+ %: the plain step runs"):
        executor.step(batches[0])
    (folder,) = cache.glob("difference-*")
    assert sorted(path.name for path in folder.iterdir()) == [
        "difference.json",
        "inputs.npz",
        "plain.onnx",
        "rewritten.onnx",
    ]
    assert json.loads((folder / "difference.json").read_text())["form"] == "the step for onnxruntime"
    plain = graphopt.Executor(image_step(), threads=1, target="plain")
    plain.step(batches[0])
    assert_trains_as_plain(executor, plain, batches[1:])


def test_a_reproducer_runs(cache, monkeypatch):
    forget_an_update(monkeypatch)
    with pytest.warns(UserWarning, match="off by"):
        graphopt.Executor(image_step(), threads=1).step(images())
    (folder,) = cache.glob("difference-*")
    inputs = dict(np.load(folder / "inputs.npz")) | {"learning_rate": np.array(0.05, np.float32)}
    changes = {}
    for name in ("plain", "rewritten"):
        session = onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
        outputs = [y.name for y in session.get_outputs()]
        found = dict(
            zip(
                outputs,
                session.run(outputs, {x.name: inputs[x.name] for x in session.get_inputs()}),
                strict=True,
            )
        )
        changes[name] = found["w.next"] - inputs["w"]
    assert np.vdot(changes["plain"], changes["rewritten"]) < 0


@needs_compiler
@pytest.mark.slow
def test_a_wrong_kernel_is_seen_and_the_graph_runs_without_it(monkeypatch):
    use_wrong_kernel(monkeypatch)
    executor = graphopt.Executor(table_step(), native=True, threads=1)
    batches = [rows() for _ in range(4)]
    with pytest.warns(UserWarning, match="kernels: expected the numbers of the plain step"):
        executor.step(batches[0])
    plain = graphopt.Executor(table_step(), threads=1, target="plain")
    plain.step(batches[0])
    assert_trains_as_plain(executor, plain, batches[1:])


@needs_compiler
@pytest.mark.slow
def test_a_wrong_kernel_in_place_is_seen_before_the_state_changes(monkeypatch):
    use_wrong_kernel(monkeypatch)
    executor = graphopt.Executor(table_step(), native=True, in_place=True, threads=1)
    plain = graphopt.Executor(table_step(), threads=1, target="plain")
    with pytest.warns(UserWarning, match="kernels: expected the numbers of the plain step"):
        assert_trains_as_plain(executor, plain, [rows() for _ in range(4)])


@needs_compiler
@pytest.mark.slow
def test_in_place_steps_count_once_although_the_first_is_compared():
    executor = graphopt.Executor(table_step(), native=True, in_place=True, threads=1, verify=True)
    plain = graphopt.Executor(table_step(), threads=1, target="plain")
    assert_trains_as_plain(executor, plain, [rows() for _ in range(3)])


@pytest.mark.slow
def test_calls_that_lose_a_state_are_seen_and_steps_run_alone(monkeypatch):
    lose_state(monkeypatch)
    batches = [rows() for _ in range(6)]
    executor = graphopt.Executor(table_step(), threads=1, steps_per_call=3)
    with pytest.warns(UserWarning, match="several steps per call: expected the numbers of the plain step"):
        found = executor.run(batches)
    plain = graphopt.Executor(table_step(), threads=1, target="plain")
    expected = [plain.step(batch) for batch in batches]
    np.testing.assert_allclose([x["loss"] for x in found], [x["loss"] for x in expected], rtol=1e-5)


def test_true_raises_an_error_and_false_compares_nothing(monkeypatch):
    forget_an_update(monkeypatch)
    step, batch = image_step(), images()
    with pytest.raises(
        graphopt.GraphoptError, match="the step for onnxruntime: expected the numbers of the plain step"
    ):
        graphopt.Executor(step, threads=1, verify=True).step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphopt.Executor(step, threads=1, verify=False).step(batch)
    with pytest.raises(graphopt.GraphoptError, match="verify: expected auto, first, full, true or false, found 'of"):
        graphopt.Executor(step, verify="often")


def test_a_form_is_compared_once_on_a_machine(cache, monkeypatch):
    step, batch, opened = table_step(), rows(), []
    right = forms.Translation._stepped
    monkeypatch.setattr(forms.Translation, "_stepped", lambda *given: opened.append(1) or right(*given))
    graphopt.Executor(step, threads=1).step(batch)
    graphopt.Executor(step, threads=1).step(batch)
    assert len(opened) == 1
    graphopt.Executor(step, threads=1, verify=True).step(batch)
    assert len(opened) == 2
    (note,) = cache.glob("*.verified.json")
    note.write_text("damaged")
    graphopt.Executor(step, threads=1).step(batch)
    assert len(opened) == 3


def test_a_difference_is_remembered(monkeypatch):
    forget_an_update(monkeypatch)
    for _ in range(2):
        with pytest.warns(UserWarning, match="the plain step runs"):
            graphopt.Executor(image_step(), threads=1).step(images())


OPTIMIZERS = {
    "descent": passes.SGD(0.1),
    "small rate": passes.SGD(1e-6),
    "momentum": passes.SGD(0.1, momentum=0.9),
    "adamw": passes.AdamW(1e-3),
    "rmsprop": passes.RMSprop(1e-3),
    "adagrad": passes.Adagrad(1e-2),
    "lion": passes.Lion(1e-4),
}
NORMALIZED = """g (float[N,3,8,8] x) => (float[N,3] y) {
    c = Conv<pads = [1,1,1,1]>(x, w, b) n = BatchNormalization(c, scale, shift, mean, var)
    r = Relu(n) p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, m)
}"""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounding_is_no_difference(optimizer):
    """A bias before BatchNormalization has no gradient but rounding, of which these optimizers take the sign."""
    weights = {"w": RNG.standard_normal((32, 3, 3, 3)) / 5, "b": np.zeros(32), "scale": np.ones(32)}
    weights |= {
        "shift": np.zeros(32),
        "mean": np.zeros(32),
        "var": np.ones(32),
        "m": RNG.standard_normal((32, 3)),
    }
    network = model(NORMALIZED, **weights)
    step = graphopt.compile(
        network,
        training=passes.TrainingMode(),
        loss=passes.CrossEntropy(),
        optimizer=OPTIMIZERS[optimizer],
    )
    batch = {"x": RNG.standard_normal((8, 3, 8, 8), np.float32), "target": RNG.integers(0, 3, 8)}
    for steps_per_call in (1, 2):
        executor = graphopt.Executor(step, threads=1, verify=True, steps_per_call=steps_per_call)
        executor.run([batch] * 4)


CANCELLING = """g (int64[N,512] x) => (float[N,3] y) {
    e = Gather(table, x) squares = Mul(e, e) s = ReduceMean<keepdims = 0>(e, axis) s2 = Mul(s, s)
    q = ReduceMean<keepdims = 0>(squares, axis) v = Sub(q, s2) f = Sqrt(v) y = MatMul(f, m)
}"""


@needs_compiler
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sample(2)
@pytest.mark.slow
def test_what_frozen_weights_make_of_rounding_is_no_difference(optimizer):
    """Here, variance is what is left of large sums, as in some exported LayerNormalizations."""
    table = 60 + RNG.standard_normal((256, 16))
    network = model(CANCELLING, table=table, axis=np.array([1]), m=RNG.standard_normal((16, 3)))
    step = graphopt.compile(
        network,
        parameters=passes.Parameters(["m"]),
        loss=passes.CrossEntropy(),
        optimizer=OPTIMIZERS[optimizer],
    )
    batch = {"x": RNG.integers(0, 256, (8, 512)), "target": RNG.integers(0, 3, 8)}
    graphopt.Executor(step, threads=1, verify=True, native=True).step(**batch)


@needs_compiler
@pytest.mark.parametrize("network", [attention, linear, mlp])
@pytest.mark.slow
def test_kernels_are_compared_with_the_graph_before_its_fusion(network):
    step = graphopt.compile(network(), loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.01))
    x = next(x for x in step.graph.inputs if x.name == "x")
    y = next(y for y in step.graph.outputs if y.name == "y")
    batch = {
        name: RNG.standard_normal((5, *(d for d in value.shape if isinstance(d, int))), np.float32)
        for name, value in {"x": x, "target": y}.items()
    }
    graphopt.Executor(step, native=True, threads=1, verify=True).step(batch)


@pytest.mark.parametrize("error", [KeyError("unk__57"), RecursionError("too deep"), AssertionError()])
@pytest.mark.slow
def test_no_failure_of_a_lowering_reaches_the_user(monkeypatch, error):
    def fail(*given, **options):
        raise error

    monkeypatch.setattr(forms, "lower_to_kernels", fail)
    monkeypatch.setattr(forms, "COMPILED_PARAMETERS", 1)
    with pytest.warns(UserWarning, match=f"native: {type(error).__name__}.*; steps run without kernels"):
        executor = graphopt.Executor(table_step(), native="auto", threads=1)
    assert executor.step(rows())["loss"] > 0
    with pytest.raises(graphopt.GraphoptError, match=r"native: .*pass native=False"):
        graphopt.Executor(table_step(), native=True)


def test_a_fused_graph_that_the_runtime_refuses_runs_unfused(monkeypatch):
    def wrong(model):
        y = next(y for y in model.graph.outputs if y.name == "loss")
        y.producer().op_type = "NoSuchOperator"
        return 1

    monkeypatch.setitem(fusion.FUSIONS, "column_sums_as_product", wrong)
    step = table_step()
    with (
        strict(False),  # it finds the wrong node before the runtime does
        pytest.warns(UserWarning, match="refuses the graph.*; the step runs as it was before its fusion"),
    ):
        executor = graphopt.Executor(step, threads=1)
    assert executor.step(rows())["loss"] > 0


def test_a_provider_that_does_not_deliver_the_new_state_is_an_error(monkeypatch):
    """Some providers allocate outputs of their own instead of writing to the memory that they are given."""
    executor = graphopt.Executor(table_step(), threads=1)
    call = BoundSession.call

    def undelivered(self, source, feeds):
        written = executor._parts.buffers.sets[1 - source]
        before = {name: np.array(x.numpy()) for name, x in written.items()}
        reported = call(self, source, feeds)
        for name, array in before.items():
            written[name].update_inplace(array)
        return reported

    monkeypatch.setattr(BoundSession, "call", undelivered)
    monkeypatch.setattr(graphopt.Device, "on_cpu", False)
    before = executor.state
    with pytest.raises(graphopt.GraphoptError, match="expected the new state in the memory that it was given"):
        executor.step(rows())
    for name, value in executor.state.items():
        np.testing.assert_array_equal(value, before[name])
