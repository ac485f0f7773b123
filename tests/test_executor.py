"""The executor: the same numbers as the reference evaluator, and errors before anything runs."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import onnxruntime
import pytest
from builders import mlp, model, run
from steps import assert_close, assert_equal, outputs, weights

import graphopt
import passes
from graphopt.runtime.executor import run as execute
from graphopt.runtime.session import Session

RNG = np.random.default_rng(3)
X = RNG.standard_normal((8, 4)).astype(np.float32)
T = np.tanh(X[:, :3])
GPU = "CUDAExecutionProvider" in onnxruntime.get_available_providers() and Path("/dev/nvidia0").exists()


def compiled(proto=None, **steps):
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.AdamW(0.01), **steps}
    return graphopt.compile(proto or mlp(), **steps)


@pytest.fixture
def executor():
    return graphopt.Executor(compiled(), threads=1)


def test_the_runtime_loses_no_value_that_is_multiplied_by_a_reciprocal():
    """DivMulFusion of ONNX Runtime does, if the node that computes it is removed."""
    proto = model(
        "g (float[3] x, float[3] z) => (float[3] y) { a = Identity(x) b = Div(one, z) c = Mul(a, b) y = Add(c, x) }",
        one=np.ones(()),
    )
    x = np.array([1, 2, 4], np.float32)
    np.testing.assert_allclose(execute(proto, {"x": x, "z": 2 * x})["y"], x + 0.5)


def test_what_is_cut_out_of_a_transposed_value_trains():
    """Queries, keys and values of one product, as Swin has them; and a Pad with axes of the model's own."""
    rng = np.random.default_rng(7)
    proto = model(
        """g (float[N,5,4] x) => (float[N,5,6] y) {
            l = MatMul(x, w)
            s = Reshape(l, heads)
            t = Transpose<perm=[2,0,3,1,4]>(s)
            q = Gather(t, i0)
            k = Gather(t, i1)
            v = Gather(t, i2)
            kt = Transpose<perm=[0,1,3,2]>(k)
            a = MatMul(q, kt)
            p = Softmax(a)
            o = MatMul(p, v)
            r = Pad(o, ones, , last)
            ot = Transpose<perm=[0,2,1,3]>(r)
            y = Reshape(ot, out)
        }""",
        w=rng.standard_normal((4, 12)) / 2,
        heads=np.array([-1, 5, 3, 2, 2]),
        out=np.array([-1, 5, 6]),
        ones=np.array([1, 0]),
        last=np.array([-1]),
        **{f"i{i}": np.array(i) for i in range(3)},
    )
    step = compiled(proto, optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1)
    x, t = rng.standard_normal((2, 3, 5, 4)).astype(np.float32)
    t = np.concatenate([t, t[..., :2]], axis=-1)
    for expected in run(step, 5, {"x": x, "target": t}):
        np.testing.assert_allclose(executor.step(x=x, target=t)["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.slow
def test_an_embedding_of_positions_in_32_bits_trains():
    """As Keras exports text models: ids are int32, and rows are averaged."""
    rng = np.random.default_rng(8)
    proto = model(
        """g (int32[N,6] ids) => (float[N,2] y) {
            e = Gather(table, ids)
            m = ReduceMean<keepdims=0>(e, one)
            y = MatMul(m, w)
        }""",
        table=rng.standard_normal((20, 4)),
        w=rng.standard_normal((4, 2)),
        one=np.array([1]),
    )
    step = compiled(proto, optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1)
    ids, t = rng.integers(0, 20, (5, 6)).astype(np.int32), rng.standard_normal((5, 2)).astype(np.float32)
    for expected in run(step, 5, {"ids": ids, "target": t}):
        np.testing.assert_allclose(executor.step(ids=ids, target=t)["loss"], expected["loss"], rtol=1e-5)
    moved = np.flatnonzero(np.any(executor.state["table"] != weights(proto)["table"], axis=1))
    np.testing.assert_array_equal(moved, np.unique(ids))


def test_loss_comes_first_and_scalars_are_numbers(executor):
    outputs = executor.step(x=X, target=T)
    assert list(outputs) == ["loss", "y"]
    assert isinstance(outputs["loss"], float)
    assert outputs["y"].shape == (8, 3)


def test_two_outputs_that_are_one_value_keep_their_names():
    """`trained` gave both the second's name, in an invalid file, and `evaluate` and `predict` had no first."""
    text = "g (float[N,4] x) => (float[N,3] y, float[N,3] z) { y = MatMul(x, w) z = Identity(y) }"
    proto = model(text, w=np.eye(4, 3, dtype=np.float32))
    executor = graphopt.Executor(
        graphopt.compile(proto, loss=passes.CrossEntropy(output="y"), optimizer=passes.SGD(0.1))
    )
    feeds = {"x": np.eye(4, dtype=np.float32), "target": np.array([0, 1, 2, 0])}
    for found in (
        executor.predict(x=feeds["x"]),
        executor.evaluate(feeds),
        execute(executor.trained(), {"x": feeds["x"]}),
    ):
        np.testing.assert_array_equal(found["y"], np.eye(4, 3))
        np.testing.assert_array_equal(found["z"], found["y"])
    onnx.checker.check_model(executor.trained(), full_check=True)


def test_the_batch_is_dynamic_and_what_was_returned_stays(executor):
    first = executor.step(x=X, target=T)["y"]
    kept = first.copy()
    assert executor.step(x=X[:3], target=T[:3])["y"].shape == (3, 3)
    executor.step(x=X, target=T)
    np.testing.assert_array_equal(first, kept)


def test_state_is_copied_never_shared():
    """Buffers taken from one array would alias: training would be silently wrong."""
    weight = np.ones((4, 3), np.float32)
    proto = model("g (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }", w=weight)
    step = compiled(proto, optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step)
    before = executor.state["w"]
    for _ in range(3):
        executor.step(x=X, target=T)
    after = executor.state["w"]
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_array_equal(before, weight)
    again = graphopt.Executor(step)
    np.testing.assert_array_equal(again.state["w"], weight)


CHANGES = {
    "an array": lambda e: e.parameters["fc0.bias"].__setitem__(..., 7),
    "an item": lambda e: e.state["fc0.bias"].fill(7),
    "a name": lambda e: e.parameters.__setitem__("fc0.bias", np.full(8, 7, np.float32)),
    "a name of the state": lambda e: e.state.__setitem__("fc0.bias", np.full(8, 7, np.float32)),
    "several": lambda e: e.state.update({"fc0.bias": np.full(8, 7, np.float32)}),
    "a union": lambda e: e.state.__ior__({"fc0.bias": np.full(8, 7, np.float32)}),
    "a name less": lambda e: e.state.pop("fc0.bias"),
    "a hyperparameter": lambda e: e.hyperparameters.__setitem__("learning_rate", 7.0),
    "a view": lambda e: e.parameters["fc0.weight"].T.__setitem__(0, 7),
    "a counter": lambda e: e.state["step"].__iadd__(7),
    "all parameters": lambda e: setattr(e, "parameters", {"fc0.bias": np.full(8, 7, np.float32)}),
    "all hyperparameters": lambda e: setattr(e, "hyperparameters", {"learning_rate": 7.0}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_copy_of_the_state_cannot_be_changed(executor, change):
    before, rate = executor.state, executor.learning_rate
    with pytest.raises(ValueError, match=r"read-only|(write|call) executor\.(update_state|set_hyperparameters)\("):
        change(executor)
    assert executor.learning_rate == executor.hyperparameters["learning_rate"] == rate
    assert_equal(executor.state, before)
    kept = pickle.loads(pickle.dumps(copy.deepcopy(before)))
    kept["fc0.bias"] = np.full(before["fc0.bias"].shape, 7, np.float32)
    executor.state = kept
    executor.set_hyperparameters(learning_rate=0.5)
    assert (executor.parameters["fc0.bias"] == 7).all()
    assert executor.learning_rate == executor.hyperparameters["learning_rate"] == 0.5


def test_names_that_are_returned_cannot_be_changed(executor):
    """A name that is added to a copy would be reported by no step."""
    for names in (executor.outputs, executor.reported):
        with pytest.raises(AttributeError, match="'tuple' object"):
            names.append("y")


def test_state_can_be_read_and_put_back(executor):
    executor.step(x=X, target=T)
    saved = executor.state
    assert {"fc0.weight", "fc0.weight.exp_sum", "step"} <= set(saved)
    losses = [executor.step(x=X, target=T)["loss"] for _ in range(3)]
    executor.state = saved
    assert [executor.step(x=X, target=T)["loss"] for _ in range(3)] == losses


@pytest.mark.slow
def test_run_trains_when_it_is_called_and_iterate_when_it_is_read():
    executor, twin = (graphopt.Executor(compiled(), threads=1, steps_per_call=2) for _ in range(2))
    batches = [{"x": X, "target": T}] * 5
    records = executor.run(batches)
    assert isinstance(records, list) and executor.steps == 5
    iterator = twin.iterate(iter(batches))
    assert twin.steps == 0
    assert [record["loss"] for record in iterator] == [record["loss"] for record in records]
    assert twin.steps == 5
    assert executor.run([]) == [] == list(executor.iterate([]))


WRONG = {
    "unknown": ({"x": X, "target": T, "z": X}, "input 'z': unknown; the graph takes x, target"),
    "missing": ({"target": T}, "input 'x': missing; found target"),
    "type": ({"x": X.astype(float), "target": T}, "input 'x': expected float32, found float64"),
    "shape": ({"x": X[:, :2], "target": T}, r"input 'x': expected shape \[N,4\], found \[8, 2\]"),
    "state": ({"x": X, "target": T, "fc0.bias": X}, "input 'fc0.bias': unknown"),
    "rows": (
        {"x": X, "target": T[:3]},
        "dimension 'N': expected one size in all inputs, found 8 in 'x', 3 in 'target'",
    ),
    "no tensor": (
        {"x": X.tolist(), "target": T},
        "input 'x': expected an array, an OrtValue or a tensor with DLPack, found list",
    ),
    "rate": ({"x": X, "target": T, "learning_rate": -1.0}, "expected a finite number, 0 or more, found -1"),
}


@pytest.mark.parametrize("call", ["step", "run", "iterate", "evaluate", "predict"])
@pytest.mark.parametrize("wrong", WRONG)
def test_every_call_checks_its_inputs_alike_before_anything_runs(executor, call, wrong):
    feeds, message = WRONG[wrong]
    given = [feeds] if call in ("run", "iterate") else feeds
    for steps in range(2):  # before the first step, and after it
        before = executor.state
        with pytest.raises(graphopt.GraphoptError, match=message):
            getattr(executor, call)(given)
        assert executor.steps == steps
        assert executor.hyperparameters["learning_rate"] == np.float32(0.01)
        assert_equal(executor.state, before)
        executor.step(x=X, target=T)


def test_prediction_needs_no_target_and_checks_one_that_is_given():
    executor = graphopt.Executor(compiled(loss=passes.CrossEntropy()), threads=1)
    labels = np.arange(8) % 3
    with pytest.raises(graphopt.GraphoptError, match="input 'target': missing; found x"):
        executor.step(x=X)
    expected = executor.predict(x=X)["y"]
    np.testing.assert_array_equal(executor.predict(x=X, target=labels)["y"], expected)
    for call in (executor.predict, executor.evaluate):
        with pytest.raises(graphopt.GraphoptError, match="expected labels from 0 to 2, found 3"):
            call(x=X, target=labels + 1)
        with pytest.raises(graphopt.GraphoptError, match="dimension 'N': expected one size"):
            call(x=X, target=labels[:2])


def test_evaluation_feeds_hyperparameters_as_a_step_does(executor):
    executor.evaluate(x=X, target=T, learning_rate=0.5)
    assert executor.hyperparameters["learning_rate"] == 0.5


def test_a_damaged_or_foreign_checkpoint_is_refused(executor, tmp_path):
    path = tmp_path / "state.safetensors"
    executor.save(path)
    with pytest.raises(graphopt.GraphoptError, match="expected the state of this training graph, found another's"):
        graphopt.Executor(compiled(optimizer=passes.SGD())).load(path)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(graphopt.GraphoptError, match="the file is damaged"):
        executor.load(path)
    with pytest.raises(graphopt.GraphoptError, match="no such file"):
        executor.load(tmp_path / "nothing")
    path.write_text("nothing")
    with pytest.raises(graphopt.GraphoptError, match="expected a checkpoint"):
        executor.load(path)


def test_state_that_does_not_fit_changes_nothing(executor):
    before = executor.state
    good = np.zeros_like(before["fc0.bias"])
    for bad, message in [
        ({"fc0.bias": good, "nothing": good}, "state 'nothing': unknown"),
        (
            {"fc0.bias": good, "fc1.bias": np.zeros(7, np.float32)},
            r"'fc1.bias': expected shape \[3\], found \[7\]",
        ),
        ({"fc0.bias": good, "fc1.bias": np.zeros(3)}, "'fc1.bias': expected float32, found float64"),
    ]:
        with pytest.raises(graphopt.GraphoptError, match=message):
            executor.state = bad
        np.testing.assert_array_equal(executor.state["fc0.bias"], before["fc0.bias"])


def test_a_hyperparameter_is_fed_to_change_it(executor):
    before = executor.state["fc0.weight"]
    executor.step(x=X, target=T, learning_rate=0.0)
    np.testing.assert_array_equal(executor.state["fc0.weight"], before)
    assert executor.hyperparameters == {"learning_rate": 0.0}
    executor.step(x=X, target=T)
    np.testing.assert_array_equal(executor.state["fc0.weight"], before)
    executor.step(x=X, target=T, learning_rate=0.1)
    assert np.abs(executor.state["fc0.weight"] - before).max() > 0.01


def test_evaluate_and_predict_leave_the_state(executor):
    executor.step(x=X, target=T)
    before = executor.state
    loss = executor.evaluate(x=X, target=T)["loss"]
    prediction = executor.predict(x=X)["y"]
    np.testing.assert_allclose(loss, np.mean((prediction - T) ** 2), rtol=1e-5)
    assert_equal(executor.state, before)
    np.testing.assert_allclose(executor.step(x=X, target=T)["loss"], loss, rtol=1e-6)


@pytest.mark.slow
def test_an_executor_needs_the_file_alone(tmp_path):
    graphopt.save(compiled(), tmp_path / "step.onnx")
    program = f"""
import sys, numpy as np, graphopt
executor = graphopt.Executor({str(tmp_path / "step.onnx")!r})
x, t = np.ones((2, 4), np.float32), np.zeros((2, 3), np.float32)
losses = [executor.step(x=x, target=t)["loss"] for _ in range(3)]
assert losses[2] < losses[0] and executor.trained().graph.node
assert not {{"passes", "recipes", "hydra"}} & set(sys.modules), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_without_a_runtime_compiling_works_and_executing_names_the_extras(tmp_path):
    graphopt.save(mlp(), tmp_path / "mlp.onnx")
    program = f"""
import sys
from pathlib import Path
sys.modules["onnxruntime"] = None
import graphopt, passes
step = graphopt.compile({str(tmp_path / "mlp.onnx")!r}, loss=passes.MeanSquaredError(), optimizer=passes.SGD())
try:
    graphopt.Executor(step)
except graphopt.GraphoptError as error:
    assert all(extra in str(error) for extra in ("pip install onnxruntime,", "onnxruntime-gpu", "onnxruntime-training"))
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("policy", ["raise", "warn", "skip"])
def test_a_loss_that_is_not_finite(policy):
    executor = graphopt.Executor(compiled(), on_nonfinite=policy)
    executor.step(x=X, target=T)
    before = executor.state["fc0.weight"]
    bad = np.full_like(X, np.nan)
    if policy == "raise":
        with pytest.raises(graphopt.NonFiniteLoss, match="step 1: expected a finite loss, found nan"):
            executor.step(x=bad, target=T)
    else:
        with pytest.warns(UserWarning, match="step 1: expected a finite loss"):
            executor.step(x=bad, target=T)
    unchanged = np.array_equal(executor.state["fc0.weight"], before)
    assert unchanged == (policy != "warn")
    assert executor.steps == (2 if policy == "warn" else 1)


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_a_missing_gpu_is_named():
    with pytest.raises(
        graphopt.GraphoptError, match=r"device 'cuda:0': (expected|CUDAExecutionProvider did not start)"
    ):
        graphopt.Executor(compiled(), device="cuda:0")


def test_report_limits_what_comes_back():
    executor = graphopt.Executor(compiled(), report=["loss"])
    assert set(executor.step(x=X, target=T)) == {"loss"}


def test_deterministic_runs_are_equal():
    def losses():
        executor = graphopt.Executor(compiled(), deterministic=True, threads=2)
        return [executor.step(x=X, target=T)["loss"] for _ in range(5)]

    assert losses() == losses()


def test_parameters_are_one_vector_in_alphabetical_order(executor):
    vector = executor.contiguous()
    names = ["fc0.bias", "fc0.weight", "fc1.bias", "fc1.weight"]
    assert list(executor.parameters) == names
    np.testing.assert_array_equal(vector, np.concatenate([executor.state[name].ravel() for name in names]))
    executor.set_contiguous(2 * vector)
    np.testing.assert_array_equal(executor.contiguous(), 2 * vector)
    executor.step(x=X, target=T)
    for wrong in (vector[1:], vector.astype(np.float64)):
        with pytest.raises(graphopt.GraphoptError, match=r"set_contiguous: expected float32\[67\], found"):
            executor.set_contiguous(wrong)


def test_frozen_weights_are_in_the_vector_where_asked_for():
    executor = graphopt.Executor(compiled(parameters=passes.Parameters(freeze="fc0.*")))
    vector = executor.contiguous(frozen=True)
    assert executor.contiguous().size == 27
    assert vector.size == 67
    loss = executor.evaluate(x=X, target=T)["loss"]
    executor.set_contiguous(np.zeros_like(vector), frozen=True)
    assert executor.evaluate(x=X, target=T)["loss"] == pytest.approx(np.mean(T**2), rel=1e-5)
    assert not np.any(weights(executor.trained())["fc0.weight"])
    executor.set_contiguous(vector, frozen=True)
    assert executor.evaluate(x=X, target=T)["loss"] == loss
    executor.step(x=X, target=T)


def test_no_step_runs_until_sessions_have_the_new_frozen_weights(monkeypatch):
    executor = graphopt.Executor(compiled(parameters=passes.Parameters(freeze="fc0.*")))
    open_sessions, is_free = executor._steps.open, []

    def opened():
        with ThreadPoolExecutor(1) as other:
            is_free.append(other.submit(executor._parts.lock.acquire, False).result())
        open_sessions()

    monkeypatch.setattr(executor._steps, "open", opened)
    executor.set_contiguous(executor.contiguous(frozen=True), frozen=True)
    assert is_free == [False]


def test_the_learning_rate_is_read_and_set(executor):
    assert executor.learning_rate == pytest.approx(0.01)
    executor.learning_rate = 0.0
    before = executor.contiguous()
    executor.step(x=X, target=T)
    np.testing.assert_array_equal(executor.contiguous(), before)
    with pytest.raises(graphopt.GraphoptError, match="unknown hyperparameter 'momentum'"):
        executor.set_hyperparameters(momentum=0.9)


def test_a_schedule_tells_the_next_rate():
    executor = graphopt.Executor(compiled(schedule=passes.Linear(steps=10)))
    for _ in range(3):
        rate = executor.learning_rate
        assert executor.step(x=X, target=T)["learning_rate"] == pytest.approx(rate)
    assert rate == pytest.approx(0.008)
    with pytest.raises(graphopt.GraphoptError, match="feed base_learning_rate"):
        executor.learning_rate = 0.1
    executor.set_hyperparameters(base_learning_rate=1.0)
    assert executor.learning_rate == pytest.approx(0.7)


def test_properties_are_kept_in_checkpoints(tmp_path, executor):
    executor.properties = {"epoch": 3, "best": 0.25, "name": "run"}
    executor.save(tmp_path / "state.safetensors")
    other = graphopt.Executor(compiled())
    other.load(tmp_path / "state.safetensors")
    assert other.properties == executor.properties
    executor.properties["list"] = [1]
    with pytest.raises(graphopt.GraphoptError, match="property 'list': expected an int, a float or a string"):
        executor.save(tmp_path / "state.safetensors")


def test_the_trained_model_computes_what_is_asked_for(executor):
    executor.step(x=X, target=T)
    hidden, y = outputs(executor.trained(["a0", "y"]), {"x": X}).values()
    np.testing.assert_allclose(y, executor.predict(x=X)["y"], rtol=1e-6)
    assert hidden.shape == (8, 8)
    first = executor.trained(["a0"])
    assert {x.name for x in first.graph.initializer} == {"fc0.weight", "fc0.bias"}
    with pytest.raises(graphopt.GraphoptError, match="unknown value 'z'"):
        executor.trained(["z"])


def test_an_empty_report_reads_nothing(executor):
    silent = graphopt.Executor(compiled(), threads=1, report=[])
    for _ in range(3):
        assert silent.step(x=X, target=T) == {}
        executor.step(x=X, target=T)
    assert silent.steps == 3
    assert_equal(silent.state, executor.state)
    assert silent.step(x=np.full_like(X, np.nan), target=T) == {}


@pytest.mark.slow
def test_a_state_that_overflows_gives_no_warning_of_numpy() -> None:
    program = """
import numpy as np, graphopt, passes
from graphopt import models
step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
executor = graphopt.Executor(step, threads=1)
try:
    executor.step({"x": np.full((2, 4), 1e30, np.float32), "target": np.array([0, 1])})
    executor.step({"x": np.full((2, 4), 1e30, np.float32), "target": np.array([0, 1])})
except graphopt.NonFiniteLoss:
    print("refused")
"""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("refused\n", "")


@pytest.mark.slow
def test_tensors_of_other_packages_are_read_where_they_are(executor):
    torch = pytest.importorskip("torch")
    expected = executor.step(x=X, target=T)["loss"]
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    for x, target in (
        (torch.from_numpy(X), torch.from_numpy(T)),
        (value(X), value(T)),
        (X, torch.from_numpy(T)),
    ):
        other = graphopt.Executor(compiled(), threads=1, steps_per_call=3)
        assert other.evaluate(x=x, target=target)["loss"] == pytest.approx(expected, rel=1e-6)
        assert other.step(x=x, target=target)["loss"] == expected
        assert len(other.run([{"x": x, "target": target}] * 6)) == 6
        assert other.steps == 7
    shared = torch.from_numpy(X.copy())
    other = graphopt.Executor(compiled(), threads=1)
    other.step(x=shared, target=T, learning_rate=0.0)
    shared[:] = float("nan")
    with pytest.raises(graphopt.NonFiniteLoss):
        other.step(x=shared, target=T)
    with pytest.raises(graphopt.GraphoptError, match="input 'x': expected float32, found float64"):
        other.step(x=torch.from_numpy(X).double(), target=T)
    with pytest.raises(graphopt.GraphoptError, match=r"input 'x': expected shape \[N,4\], found \[8, 3\]"):
        other.step(x=value(T), target=T)
    with pytest.raises(graphopt.GraphoptError, match="found a view that is not contiguous: copy it"):
        other.step(x=torch.from_numpy(np.repeat(X, 2, axis=1))[:, ::2], target=T)


def test_small_arrays_of_changing_shapes_and_kinds_are_the_ones_fed(plain, executor):
    """Small ones are copied into bound buffers, large ones are bound: whichever came before, the new one counts."""
    sizes = [8, 8, 2, 5000, 8, 7, 9, 5000, 5000, 3, 8]
    for i, size in enumerate(sizes):
        x = np.resize(X * (i + 1), (size, 4))
        target = np.resize(T, (size, 3))
        feeds = {"x": np.asfortranarray(x), "target": target} if i % 2 else {"target": target, "x": x}
        expected = executor.evaluate(feeds)["loss"]
        assert executor.step(feeds)["loss"] == pytest.approx(expected, rel=1e-6)
    x, target = X.copy(), T.copy()
    executor.step(x=x, target=target)
    x[:] = 0
    assert executor.evaluate(x=x, target=target)["loss"] == pytest.approx(
        executor.step(x=x, target=target)["loss"], rel=1e-6
    )


@pytest.mark.parametrize("rows", [8, 5000])
def test_arrays_of_any_layout_and_values_are_read_as_they_are(executor, rows):
    """NumPy computes the loss; the layout changes between batches of one shape, and values come between arrays."""
    x, target = np.resize(X, (rows, 4)), np.resize(T, (rows, 3))
    layouts = [
        np.ascontiguousarray,
        np.ascontiguousarray,
        np.asfortranarray,
        lambda array: np.repeat(array, 2, axis=1)[:, ::2],
        onnxruntime.OrtValue.ortvalue_from_numpy,
        np.ascontiguousarray,
        lambda array: array[::-1][::-1],
        np.asfortranarray,
    ]
    for i, laid in enumerate(layouts):
        x = (x + np.float32(0.1 * i)).astype(np.float32)
        w = {name: array.astype(np.float64) for name, array in executor.state.items()}
        y = np.tanh(x @ w["fc0.weight"].T + w["fc0.bias"]) @ w["fc1.weight"].T + w["fc1.bias"]
        np.testing.assert_allclose(executor.predict(x=laid(x))["y"], y, rtol=1e-4, atol=1e-5)
        loss = executor.step(x=laid(x), target=target)["loss"]
        assert loss == pytest.approx(np.mean((y - target) ** 2), rel=1e-5)


def test_small_outputs_are_those_of_the_batch_and_stay(executor):
    """They are written to the same arrays as long as the shapes stay, and the caller has copies."""

    def expected(x):
        w = executor.state
        return np.tanh(x @ w["fc0.weight"].T + w["fc0.bias"]) @ w["fc1.weight"].T + w["fc1.bias"]

    kept = []
    for i, size in enumerate([8, 8, 8, 2, 2, 5000, 5000, 8, 3, 3, 7000, 3]):
        x, target = np.resize(X * (i + 1), (size, 4)), np.resize(T, (size, 3))
        kept.append((expected(x), executor.step(x=x, target=target)["y"]))
        kept += [(expected(x), executor.predict(x=x)["y"]) for _ in range(3)]
    for right, y in kept:
        np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)


def test_a_declared_shape_that_does_not_hold_is_no_error():
    """The runtime refuses an array of another shape than its output, so the array is only for outputs that fit."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        m (float[N, 4] x) => (float[N, 3] y, int64[N] found)
        <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[1] zero = {0}, int64[1] rest = {-1},
         bool[1] true = {1}>
        { y = MatMul(x, w)
          is_positive = Greater(y, zero)
          places = NonZero(is_positive)
          length = Compress(rest, true)
          found = Reshape(places, length) }
    """)
    step = graphopt.compile(model, loss=passes.MeanSquaredError(output="y"), optimizer=passes.SGD(0.0))
    executor = graphopt.Executor(step)
    for i in (2, 2, 4, 3, 0, 4):
        x = np.full((2, 4), -1, np.float32)
        x[:, :i] = 10
        expected = np.ravel(np.nonzero(x @ np.arange(1, 13, dtype=np.float32).reshape(4, 3) > 0))
        reported = executor.step(x=x, target=np.zeros((2, 3), np.float32))
        np.testing.assert_array_equal(reported["found"], expected)
        np.testing.assert_array_equal(executor.predict(x=x)["found"], expected)


def test_a_device_has_the_options_of_a_device(executor):
    device = graphopt.Device("cpu", threads=1)
    first, second = (graphopt.Executor(compiled(), device=device) for _ in range(2))
    expected = executor.step(x=X, target=T)["loss"]
    assert first.step(x=X, target=T)["loss"] == expected == second.step(x=X, target=T)["loss"]
    assert first.device == "cpu"
    assert len({first, second}) == 2
    layer = graphopt.ForwardBackward(mlp(), device=device)
    np.testing.assert_array_equal(layer.forward(X)["y"], graphopt.ForwardBackward(mlp(), threads=1).forward(X)["y"])
    with pytest.raises(graphopt.GraphoptError, match="threads: expected this option in the given Device, found 2"):
        graphopt.Executor(compiled(), device=device, threads=2)
    with pytest.raises(TypeError, match="unknown argument 'thread', nearest: 'threads'"):
        graphopt.Executor(compiled(), thread=2)


def test_an_executor_gives_its_memory_back_at_once():
    executor = graphopt.Executor(compiled(), threads=1, steps_per_call=2)
    executor.run([{"x": X, "target": T}] * 4)
    executor.predict(x=X)
    gone = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert gone() is None
    finally:
        gc.enable()


def test_several_steps_report_numbers_without_numpy():
    chosen = {"threads": 1, "report": ["loss"], "as_numpy": False}
    expected, found = (
        graphopt.Executor(compiled(), steps_per_call=steps, **chosen).run([{"x": X, "target": T}] * 4)
        for steps in (1, 2)
    )
    assert found == expected


def test_static_shapes_are_the_same_steps(executor):
    static = graphopt.Executor(compiled(), threads=1, static_shapes=True)
    for size in (8, 8, 3, 8, 3):
        expected = executor.step(x=X[:size], target=T[:size])
        np.testing.assert_allclose(static.step(x=X[:size], target=T[:size])["loss"], expected["loss"], rtol=1e-6)
    assert_close(static.state, executor.state, atol=1e-7)
    assert len(static._steps.runner._by_shapes) == 2


@pytest.mark.parametrize("provider", ["cpu", "CPU", "CPUExecutionProvider"])
def test_a_provider_by_its_name(executor, provider):
    named = graphopt.Executor(compiled(), threads=1, provider=provider)
    assert named.step(x=X, target=T)["loss"] == executor.step(x=X, target=T)["loss"]


def test_the_placement_of_operators():
    executor = graphopt.Executor(compiled(), native=False)
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24):
        with pytest.raises(graphopt.GraphoptError, match=r"placement: expected onnxruntime 1\.24 or later"):
            executor.placement()
        return
    assert list(executor.placement()) == ["CPUExecutionProvider"]
    assert executor.placement()["CPUExecutionProvider"]["Tanh"] == 1


@pytest.mark.parametrize(
    "provider",
    [name for name in onnxruntime.get_available_providers() if name in ("OpenVINOExecutionProvider",)]
    or [pytest.param("", marks=pytest.mark.skip(reason="onnxruntime-openvino is not installed"))],
)
@pytest.mark.parametrize("activation", ["Tanh", "Relu"])
def test_steps_on_other_providers_equal_those_on_the_cpu(provider, activation):
    step = compiled(mlp(activation=activation))
    on_cpu = graphopt.Executor(step, threads=1)
    other = graphopt.Executor(step, threads=1, provider=provider)
    assert other.placement()[provider]
    with pytest.raises(graphopt.GraphoptError, match=f"{provider} of onnxruntime .* refuses the graph"):
        graphopt.Executor(step, provider=provider, provider_options={"nothing": 1})
    for size in (8, 8, 3, 8):
        expected = on_cpu.step(x=X[:size], target=T[:size])["loss"]
        assert other.step(x=X[:size], target=T[:size])["loss"] == pytest.approx(expected, rel=1e-4)
    assert_close(other.state, on_cpu.state, rtol=1e-3, atol=1e-5)


def test_a_number_of_another_type_is_converted() -> None:
    """Buffers take bytes: an int32 or a Python number in them would become another number."""
    executor = graphopt.Executor(compiled())
    executor.update_state({"step": np.int32(7)})
    assert executor.steps == 7
    executor.update_state({"step": 9})
    assert executor.steps == 9


def test_an_output_that_is_an_input_has_memory_of_its_own():
    proto = model("g (float[N] x) => (float[N] x, float[N] y) { y = Neg(x) }")
    session, x = Session(graphopt.Device("cpu"), graphopt.load(proto)), np.ones(4, np.float32)
    found = session.run({"x": x})
    x[:] = 5
    np.testing.assert_array_equal(found, [[1] * 4, [-1] * 4])


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("executor_mistakes"))
def test_mistakes_are_told_in_a_line(call: str, executor: Any) -> None:
    messages.refused("executor_mistakes", call, {**globals(), "executor": executor})
