"""Evaluations run in the fastest of three forms, and compute what ONNX Runtime does with the trained model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from builders import attention, mlp, model
from steps import outputs

import graphopt
import passes
from graphopt.runtime import contest, evaluation
from graphopt.runtime.evaluation import NEVER, ChosenEvaluation, Evaluation
from graphopt.targets.native import operators, toolchain

RNG = np.random.default_rng(0)
needs_compiler = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
pytestmark = pytest.mark.usefixtures("parts")
CONVOLUTION = """g (float[N,3,10,12] x) => (float[N,3] y) {
    c = Conv(x, w) n = BatchNormalization(c, s, b, m, v) r = Relu(n) f = Flatten(r) y = MatMul(f, o)
}"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, which remembers nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GRAPHOPT_VERIFY", raising=False)
    return tmp_path / "cache" / "graphopt" / "native"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the forms in the second call; find kernels faster than the graph as it is, and constants than both."""
    seconds = {"constant weights": 1.0, "kernels": 2.0, "plain": 3.0}
    monkeypatch.setattr(evaluation, "MEASURING_SECONDS", 0.0)
    monkeypatch.setattr(
        contest, "measured", lambda calls, _: {name: seconds[name] for name in seconds if name in calls}
    )


def convolution() -> Any:
    weights = {"w": RNG.standard_normal((4, 3, 3, 3)) * 0.3, "o": RNG.standard_normal((320, 3)) * 0.1}
    statistics = {"s": np.ones(4) + 0.1, "b": np.zeros(4), "m": np.full(4, 0.2), "v": np.full(4, 2.0)}
    return model(CONVOLUTION, **weights, **statistics)


NETWORKS = {
    "convolution": (convolution, lambda rows: {"x": (rows, 3, 10, 12), "target": (rows, 3)}),
    "mlp": (mlp, lambda rows: {"x": (rows, 4), "target": (rows, 3)}),
    "attention": (attention, lambda rows: {"x": (rows, 6, 4), "target": (rows, 6, 4)}),
}


def opened(network: Any, **options: Any) -> graphopt.Executor:
    step = graphopt.compile(
        network,
        training=passes.TrainingMode(),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.05, momentum=0.5),
    )
    return graphopt.Executor(step, **{"threads": 1, **options})


def drawn(shapes: Any) -> dict[str, np.ndarray]:
    return {name: RNG.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def assert_predicts(executor: graphopt.Executor, batch: dict[str, np.ndarray]) -> None:
    expected = assert_predicts_as_trained(executor, batch["x"])
    found = executor.evaluate(batch)
    np.testing.assert_allclose(found["y"], expected, rtol=1e-4, atol=1e-5)
    assert found["loss"] == pytest.approx(((expected - batch["target"]) ** 2).mean(), rel=1e-4)
    assert executor.losses(batch)["loss"] == pytest.approx(found["loss"], rel=1e-5)


def assert_predicts_as_trained(executor: graphopt.Executor, x: np.ndarray) -> np.ndarray:
    """Compare with ONNX Runtime's own session of the trained model, and return its outputs."""
    (expected,) = outputs(executor.trained(), {"x": x}).values()
    np.testing.assert_allclose(executor.predict(x=x)["y"], expected, rtol=1e-4, atol=1e-5)
    return expected


def form_of(executor: graphopt.Executor, call: str = "predict") -> ChosenEvaluation:
    chosen = executor._evaluations.opened[call]
    assert isinstance(chosen, ChosenEvaluation)
    return chosen


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_are_those_of_the_trained_model_in_each_form(name: str, native: bool, at_once: None) -> None:
    build, shapes = NETWORKS[name]
    executor = opened(build(), native=native)
    for rows in (4, 4, 4, 4, 1, 1, 4, 1):
        batch = drawn(shapes(rows))
        assert_predicts(executor, batch)
        assert_predicts(executor, batch)
        executor.step(drawn(shapes(5)))
        assert_predicts(executor, batch)


@pytest.mark.parametrize("waits", [0, 2])
def test_constant_weights_are_those_of_the_state(waits: int, at_once: None, monkeypatch: Any) -> None:
    """They are opened after so many calls with one state, and dropped with it, however it changes."""
    monkeypatch.setattr(math, "ceil", lambda _: waits)
    executor = opened(mlp())
    batch = drawn({"x": (4, 4), "target": (4, 3)})
    changes = [
        lambda: executor.step(batch),
        lambda: executor.run([batch, batch]),
        lambda: executor.update_state({"fc0.bias": np.ones(8, np.float32)}),
        lambda: executor.set_contiguous(2 * executor.contiguous()),
    ]
    executor.predict(x=batch["x"])
    for change in [lambda: None, *changes]:
        change()
        for calls in range(1, 5):
            assert_predicts(executor, batch)
            chosen = form_of(executor)
            assert chosen._constants.is_open == (calls > waits)


@needs_compiler
def test_kernels_that_write_in_place_and_fail_leave_no_constants_behind(at_once: None) -> None:
    executor = opened(mlp(), native=True, in_place=True)
    batch = drawn({"x": (4, 4), "target": (4, 3)})
    for _ in range(3):
        executor.step(batch)
        assert_predicts(executor, batch)
    with pytest.raises(graphopt.NonFiniteLoss):
        executor.step(x=batch["x"], target=np.float32(1e20) * batch["target"])
    assert np.abs(executor.predict(x=batch["x"])["y"]).max() > 1e15
    assert_predicts_as_trained(executor, batch["x"])


def test_the_machine_remembers_the_choice(at_once: None, cache: Path, monkeypatch: Any) -> None:
    batch = drawn({"x": (4, 4), "target": (4, 3)})
    first = opened(mlp())
    first.predict(x=batch["x"])
    assert not [*cache.glob("*.time.json")]
    first.predict(x=batch["x"])
    (note,) = map(json.loads, map(Path.read_text, cache.glob("*.time.json")))
    assert note["seconds"].keys() >= {"plain", "constant weights", "opening"}
    monkeypatch.setattr(contest, "measured", lambda *_: pytest.fail("measured again"))
    second = opened(mlp())
    for _ in range(3):
        assert_predicts_as_trained(second, batch["x"])
    choice = form_of(second)._choice
    assert choice is not None and choice == form_of(first)._choice and choice.waits >= 0
    second.predict(x=batch["x"][:1])
    assert form_of(second)._choice is None  # of other shapes


def test_deterministic_evaluations_keep_one_form(at_once: None) -> None:
    executor = opened(mlp(), deterministic=True)
    x = RNG.standard_normal((4, 4), np.float32)
    first = executor.predict(x=x)["y"]
    assert all(np.array_equal(executor.predict(x=x)["y"], first) for _ in range(5))
    choice = form_of(executor)._choice
    assert choice is not None and (choice.kernels, choice.waits) == (False, NEVER)


@needs_compiler
def test_wrong_kernels_are_not_taken(at_once: None, monkeypatch: Any) -> None:
    monkeypatch.setitem(operators.OF_ANY, "Mul", "{0} * {1} * ({C})1.01")
    gated = model("g (float[N,4] x) => (float[N,4] y) { p = MatMul(x, w) a = Tanh(p) y = Mul(a, p) }", w=np.eye(4))
    executor = opened(gated, native=True)
    batch = drawn({"x": (4, 4), "target": (4, 4)})
    executor.predict(x=batch["x"])
    with pytest.warns(UserWarning, match="kernels: expected the numbers of the plain step, found 'y' off by"):
        executor.predict(x=batch["x"])
    assert form_of(executor)._kernels.agrees is False
    assert_predicts_as_trained(executor, batch["x"])


def test_hyperparameters_and_values_of_the_runtime_reach_each_form(at_once: None) -> None:
    """A target of a name that predictions do not read is checked and left out."""
    batch = drawn({"x": (4, 4), "target": (4, 3)})
    arrays, values = opened(mlp()), opened(mlp(), as_numpy=False)
    for _ in range(4):
        expected = arrays.predict(batch)["y"]
        fed = onnxruntime.OrtValue.ortvalue_from_numpy(batch["x"])
        np.testing.assert_allclose(values.predict(x=batch["x"])["y"].numpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(arrays.predict(x=fed)["y"], expected, rtol=1e-5)
        assert isinstance(values.evaluate(batch)["loss"], float)
        arrays.evaluate({**batch, "learning_rate": 0.25})
        assert arrays.learning_rate == 0.25
    with pytest.raises(graphopt.GraphoptError, match=r"input 'target': expected shape \[N,3\], found \[4, 2\]"):
        arrays.predict(x=batch["x"], target=batch["target"][:, :2])


def test_several_workers_and_other_providers_evaluate_the_graph_as_it_is() -> None:
    executor = opened(mlp())
    executor.predict(x=np.zeros((1, 4), np.float32))
    made = evaluation.evaluation_of(
        executor.device_options, executor.model, executor._parts.buffers, ["y"], as_numpy=True, alone=False
    )
    assert type(made) is Evaluation and type(form_of(executor)) is ChosenEvaluation
