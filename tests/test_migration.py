"""What the guide promises to those who come from onnxruntime-training, onnxcustom and scikit-learn."""

from __future__ import annotations

from typing import Any

import messages
import numpy as np
import onnx
import onnxruntime
import pytest
from builders import linear, mlp, run
from sklearn.neural_network._stochastic_optimizers import SGDOptimizer

import graphopt
import passes
from graphopt.data import Dataset
from graphopt.training.fit import fit

TRAINS = hasattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder")
X = np.random.default_rng(1).standard_normal((16, 4))
T = np.tanh(X[:, :3])
FEEDS = {"x": X.astype(np.float32), "target": T.astype(np.float32)}


def weights(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {x.name: onnx.numpy_helper.to_array(x).copy() for x in proto.graph.initializer}


def gradients(w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the gradients of the summed squares of the two-layer network, by hand."""
    hidden = np.tanh(X @ w["fc0.weight"].T + w["fc0.bias"])
    dy = 2 * (hidden @ w["fc1.weight"].T + w["fc1.bias"] - T)
    dh = dy @ w["fc1.weight"] * (1 - hidden**2)
    return {"fc0.weight": dh.T @ X, "fc0.bias": dh.sum(0), "fc1.weight": dy.T @ hidden, "fc1.bias": dy.sum(0)}


SUMS = {
    "SquareLearningLoss": (passes.MeanSquaredError(reduction="sum"), lambda d: np.sum(d**2)),
    "AbsoluteLearningLoss": (passes.MeanAbsoluteError(reduction="sum"), lambda d: np.sum(np.abs(d))),
    "ElasticLearningLoss": (
        passes.Elastic(0.2, 0.8, reduction="sum"),
        lambda d: np.sum(0.2 * np.abs(d) + 0.8 * d**2),
    ),
}


@pytest.mark.parametrize("old", SUMS)
def test_onnxcustoms_losses_are_sums(old: str) -> None:
    loss, expected = SUMS[old]
    proto = linear(4, 3, dtype=np.float64)
    w = weights(proto)
    (found,) = run(graphopt.compile(proto, loss=loss, optimizer=passes.SGD(0.1)), 1, {"x": X, "target": T})
    np.testing.assert_allclose(found["loss"], expected(X @ w["w"] + w["b"] - T), rtol=1e-12)


def test_inverse_scaling_by_epochs() -> None:
    """eta0 / e^power in epoch e = 1, 2, ...: every step of an epoch at one rate."""
    step = graphopt.compile(
        mlp((4, 3), dtype=np.float64),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.05),
        schedule=passes.InverseScaling(power=0.3, every=4),
    )
    rates = [outputs["learning_rate"] for outputs in run(step, 12, {"x": X, "target": T})]
    np.testing.assert_allclose(rates, 0.05 / np.repeat([1.0, 2.0, 3.0], 4) ** 0.3, rtol=1e-7)


@pytest.mark.parametrize("schedule", [None, passes.InverseScaling(power=0.5), passes.StepDecay(every=3)], ids=repr)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_momentum_with_the_rate_inside_is_scikit_learns(nesterov: bool, momentum: float, schedule: Any) -> None:
    if nesterov and not momentum:
        return
    proto = mlp(dtype=np.float64)
    w = weights(proto)
    step = graphopt.compile(
        proto,
        loss=passes.MeanSquaredError(reduction="sum"),
        optimizer=passes.SGD(0.01, momentum=momentum, nesterov=nesterov, rate_in_velocity=True),
        schedule=schedule,
    )
    names = list(w)
    theirs = SGDOptimizer([w[name] for name in names], 0.01, momentum=momentum, nesterov=nesterov)
    for found in run(step, 12, {"x": X, "target": T}):
        theirs.learning_rate = float(found.get("learning_rate", 0.01))
        by_name = gradients(w)
        theirs.update_params([w[name] for name in names], [by_name[name] for name in names])
    for name in names:
        np.testing.assert_allclose(found[f"{name}.next"], w[name], rtol=1e-9, atol=1e-12)


def test_the_two_forms_of_momentum_are_one_at_a_constant_rate() -> None:
    found = []
    for inside in (False, True):
        optimizer = passes.SGD(0.05, momentum=0.9, nesterov=True, rate_in_velocity=inside)
        executor = graphopt.Executor(
            graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=optimizer), threads=1
        )
        found.append([executor.step(FEEDS)["loss"] for _ in range(20)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


def linear_rates(steps: int, warmup: int, count: int) -> np.ndarray:
    step = graphopt.compile(
        linear(3, 1),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
        schedule=passes.Linear(steps=steps, warmup=warmup, warmup_from_zero=True),
    )
    executor = graphopt.Executor(step, threads=1)
    feeds = {"x": np.ones((2, 3), np.float32), "target": np.zeros((2, 1), np.float32)}
    return np.array([executor.step(feeds)["learning_rate"] for _ in range(count)])


@pytest.mark.parametrize(("steps", "warmup"), [(12, 4), (9, 1), (7, 6)])
def test_a_warmup_from_zero_is_hugging_faces_and_linear_lr_schedulers(steps: int, warmup: int) -> None:
    """Step / warmup, then (steps - step) / (steps - warmup), of steps counted from 0."""
    done = np.arange(14)
    falling = np.maximum(0.0, (steps - done) / (steps - warmup))
    expected = 0.1 * np.where(done < warmup, done / warmup, falling)
    np.testing.assert_allclose(linear_rates(steps, warmup, 14), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.skipif(not TRAINS, reason="onnxruntime-training is not installed")
@pytest.mark.parametrize(("steps", "warmup"), [(12, 4), (9, 1)])
def test_linear_lr_scheduler_itself(tmp_path: Any, steps: int, warmup: int) -> None:
    """The class of onnxruntime-training 1.19.2 hands its two counts over in the wrong order: exchanged, they count."""
    from onnxruntime.training import api

    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.1))
    graphopt.export_artifacts(linear(3, 1), pipeline, tmp_path)
    state = api.CheckpointState.load_checkpoint(str(tmp_path / "checkpoint"))
    module = api.Module(str(tmp_path / "training_model.onnx"), state, str(tmp_path / "eval_model.onnx"))
    optimizer = api.Optimizer(str(tmp_path / "optimizer_model.onnx"), module)
    scheduler = api.LinearLRScheduler(optimizer, steps, warmup, 0.1)
    rates = []
    for _ in range(14):
        module.train()
        module(np.ones((2, 3), np.float32), np.zeros((2, 1), np.float32))
        rates.append(optimizer.get_learning_rate())
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(linear_rates(steps, warmup, 14), rates, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_gradients_and_their_norm_are_reported_and_change_nothing(dtype: Any) -> None:
    """By ReportGradients and GradientNorm, without clipping; the gradients by hand."""
    proto = mlp(dtype=dtype)
    w = weights(proto)
    steps = {"loss": passes.MeanSquaredError(reduction="sum"), "optimizer": passes.SGD(0.01, momentum=0.9)}
    watched = [passes.GradientNorm(), passes.ReportGradients()]
    plain, reporting = (
        graphopt.Executor(graphopt.compile(proto, **steps, **more), threads=1) for more in ({}, {"clip": watched})
    )
    feeds = {"x": X.astype(dtype), "target": T.astype(dtype)}
    expected = gradients(w)
    found = reporting.step(feeds)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[f"{name}.gradient"], gradient, rtol=1e-4, atol=1e-4)
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in expected.values()))
    assert found["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    plain.step(feeds)
    for name, array in plain.state.items():
        np.testing.assert_allclose(reporting.state[name], array, rtol=1e-5, atol=1e-6)
    records = fit(reporting, feeds, epochs=2, batch_size=4, validation=None)
    assert records[-1]["gradient_norm"] > 0 and "fc0.weight.gradient" not in records[-1]


def test_gradients_before_and_after_clipping() -> None:
    clip = [passes.GradientNorm(), passes.ClipValue(0.01), passes.ReportGradients("fc1.*")]
    step = graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1), clip=clip)
    found = graphopt.Executor(step, threads=1).step(FEEDS)
    assert sorted(name for name in found if "gradient" in name) == [
        *("fc1.bias.gradient", "fc1.weight.gradient", "gradient_norm")
    ]
    assert np.abs(found["fc1.bias.gradient"]).max() <= np.float32(0.01) < found["gradient_norm"]
    with pytest.raises(graphopt.GraphoptError, match=r"ReportGradients\(.*matches no parameter; the model trains"):
        graphopt.compile(mlp(), loss=passes.MeanSquaredError(), clip=passes.ReportGradients("nothing"))
    with pytest.raises(graphopt.GraphoptError, match="GradientNorm needs gradients"):
        passes.GradientNorm()(graphopt.load(mlp()))


def executor(**options: Any) -> graphopt.Executor:
    step = graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.01))
    return graphopt.Executor(step, threads=1, **options)


def test_session_options_reach_the_runtime() -> None:
    chosen = executor(session_options={"inter_op_num_threads": 3, "session.intra_op.allow_spinning": "0"})
    assert chosen.step(FEEDS)["loss"] == executor().step(FEEDS)["loss"]
    options = chosen._steps.runner.forms[0].session.ort.get_session_options()
    assert options.inter_op_num_threads == 3
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_ort_values_come_out_where_they_are_asked_for() -> None:
    """Numbers as Python's, arrays as OrtValues, which go in again and to any package that speaks DLPack."""
    plain, values = executor(steps_per_call=3), executor(steps_per_call=3, as_numpy=False)
    for _ in range(3):
        expected, found = plain.step(FEEDS), values.step(FEEDS)
        assert found["loss"] == expected["loss"]
        assert isinstance(found["y"], onnxruntime.OrtValue)
        np.testing.assert_array_equal(found["y"].numpy(), expected["y"])
    kept = found["y"].numpy().copy()
    runs = [each.run([FEEDS] * 6) for each in (plain, values)]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(other["y"].numpy(), one["y"])
    np.testing.assert_array_equal(found["y"].numpy(), kept)
    predicted = values.predict(x=FEEDS["x"])["y"]
    np.testing.assert_array_equal(predicted.numpy(), plain.predict(x=FEEDS["x"])["y"])
    evaluated = values.evaluate(x=FEEDS["x"], target=predicted)
    assert evaluated["loss"] == 0.0 and isinstance(evaluated["y"], onnxruntime.OrtValue)
    assert values.step(x=FEEDS["x"], target=predicted)["loss"] == 0.0


def test_the_adaptive_schedule_as_a_callback() -> None:
    step = graphopt.compile(linear(4, 3), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.5))
    trained = graphopt.Executor(step, threads=1)
    noisy = Dataset({"x": FEEDS["x"], "target": np.sign(FEEDS["target"])})
    adaptive = graphopt.callbacks.Adaptive(patience=2, tolerance=1e-4)
    records = fit(trained, noisy, epochs=40, batch_size=4, validation=None, callbacks=[adaptive])
    rates = [record["learning_rate"] for record in records]
    assert rates[0] == pytest.approx(0.5) and rates == sorted(rates, reverse=True)
    least, waited = np.inf, 0
    for record, after in zip(records, [*rates[1:], trained.learning_rate], strict=True):
        waited = waited + 1 if record["loss"] > least - 1e-4 else 0
        least = min(least, record["loss"])
        falls = waited >= 2 and record["learning_rate"] > 1e-6
        assert after == pytest.approx(record["learning_rate"] / (5 if falls else 1), rel=1e-5)
        waited = 0 if falls else waited


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("migration_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("migration_mistakes", call, globals())
