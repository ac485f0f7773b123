"""Averages of parameters in the graph, against PyTorch's AveragedModel."""

from __future__ import annotations

from typing import Any

import messages
import numpy as np
import pytest
import steps
import torch
from builders import mlp, model, run
from steps import assert_equal, weights
from test_optimizers import T, X, torch_loss, torch_mlp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from twins import descended

import graphopt
import passes

FEEDS = {"x": X.astype(np.float32), "target": T.astype(np.float32)}
STEPS = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1, momentum=0.9)}
AVERAGES = {
    "EMA": (passes.EMA(0.9), 1, 1, get_ema_multi_avg_fn(0.9)),
    "late EMA": (passes.EMA(0.8, start=11, every=3), 11, 3, get_ema_multi_avg_fn(0.8)),
    "SWA": (passes.SWA(), 1, 1, None),
    "late SWA": (passes.SWA(start=40, every=10), 40, 10, None),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.slow
def test_a_hundred_averages_are_pytorchs(name: str) -> None:
    average, start, every, function = AVERAGES[name]
    proto = mlp(dtype=np.float64)
    step = graphopt.compile(proto, average=average, **STEPS)
    weights = {name.replace(".", "_"): torch.nn.Parameter(w.detach()) for name, w in torch_mlp(proto).items()}
    module = torch.nn.ParameterDict(weights)
    averaged = AveragedModel(module, multi_avg_fn=function)
    reference = torch.optim.SGD(module.parameters(), 0.1, 0.9)
    for t, outputs in enumerate(run(step, 100, {"x": X, "target": T}), 1):
        descended(torch_loss({name.replace("_", "."): w for name, w in module.items()}), reference)
        if t >= start and (t - start) % every == 0:
            averaged.update_parameters(module)
        wanted = averaged.module if t >= start else module
        for key, w in wanted.items():
            found = outputs[f"{key.replace('_', '.')}.average.next"]
            np.testing.assert_allclose(found, w.detach().numpy(), rtol=1e-6, atol=1e-9)


def test_covariances_are_those_of_swag() -> None:
    """As wjmaddox/swa_gaussian collects them: means, squares, and the last deviations from the mean."""
    step = graphopt.compile(mlp(dtype=np.float64), average=passes.SWAG(start=4, every=2, rank=5), **STEPS)
    outputs = list(run(step, 30, {"x": X, "target": T}))
    name = "fc0.weight"
    mean, squares, deviations, count = 0.0, 0.0, [], 0
    for w in (outputs[t - 1][f"{name}.next"] for t in range(4, 31, 2)):
        mean, squares = (mean * count + w) / (count + 1), (squares * count + w * w) / (count + 1)
        deviations, count = [*deviations, w - mean][-5:], count + 1
    last = outputs[-1]
    np.testing.assert_allclose(last[f"{name}.average.next"], mean, rtol=1e-9)
    np.testing.assert_allclose(last[f"{name}.variance.next"], squares - mean**2, atol=1e-12)
    np.testing.assert_allclose(last[f"{name}.deviations.next"], deviations, atol=1e-12)


def test_drawn_models_have_the_mean_and_the_covariance() -> None:
    executor = trained(average=passes.SWAG(rank=3))
    before = executor.state
    models = passes.SWAG.drawn(executor, samples=600)
    assert_equal(executor.state, before)
    name = "fc1.weight"
    drawn = np.stack([weights(model)[name].ravel().astype(float) for model in models])
    rows = before[f"{name}.deviations"].reshape(3, -1).astype(float)
    expected = np.diag(before[f"{name}.variance"].ravel()) / 2 + rows.T @ rows / 2 / 2
    spread = np.sqrt(np.diag(expected))
    assert (np.abs(drawn.mean(0) - before[f"{name}.average"].ravel()) < 5 * spread / np.sqrt(600)).all()
    band = 5 * np.sqrt((np.square(expected) + np.outer(spread, spread) ** 2) / 600)
    assert (np.abs(np.cov(drawn.T) - expected) < band).all()
    again = weights(passes.SWAG.drawn(executor, samples=1)[0])
    np.testing.assert_array_equal(again[name].ravel(), drawn[0].astype(np.float32))
    unsure = graphopt.explain(models[0], passes.Ensemble(models[1:4], task="regression"))
    every = np.stack([graphopt.run(model, {"x": FEEDS["x"]})["y"] for model in models[:4]])
    np.testing.assert_allclose(
        graphopt.run(unsure, {"x": FEEDS["x"]})["y.variance"], every.var(0), rtol=1e-3, atol=1e-6
    )
    with pytest.raises(graphopt.GraphoptError, match=r"SWAG.drawn: expected an executor with average=passes.SWAG"):
        passes.SWAG.drawn(trained(average=passes.SWA()))
    with pytest.raises(graphopt.GraphoptError, match=r"SWAG.drawn: expected two averaged updates or more"):
        passes.SWAG.drawn(trained(average=passes.SWAG(start=10)))


def trained(**options: Any) -> graphopt.Executor:
    return steps.trained(mlp(), FEEDS, 10, **{**STEPS, **options})


def test_inference_has_the_averages_and_training_the_parameters() -> None:
    executor, plain = trained(average=passes.EMA(0.9)), trained()
    assert_equal(executor.parameters, plain.parameters)
    averages = {name: executor.state[f"{name}.average"] for name in plain.parameters}
    assert all(np.abs(averages[name] - array).max() > 1e-3 for name, array in plain.parameters.items())
    found = weights(executor.trained())
    assert found.keys() == weights(mlp()).keys()
    assert all(np.array_equal(found[name], array) for name, array in averages.items())
    y = graphopt.run(executor.trained(), {"x": FEEDS["x"]})["y"]
    np.testing.assert_array_equal(executor.predict(x=FEEDS["x"])["y"], y)
    assert executor.evaluate(FEEDS)["loss"] == pytest.approx(np.square(y - T).mean(), rel=1e-5)
    plain.update_state(averages)
    np.testing.assert_array_equal(plain.predict(x=FEEDS["x"])["y"], y)


def test_averages_may_be_state_alone_and_of_some_parameters() -> None:
    average = passes.EMA(0.9, parameters="*.weight", infer=False)
    executor = trained(average=average)
    assert {n for n in executor.state if "average" in n} == {"fc0.weight.average", "fc1.weight.average"}
    assert all(np.array_equal(x, executor.parameters[n]) for n, x in weights(executor.trained()).items())


def test_weights_of_16_bits_have_averages_of_32_and_are_exported_in_16() -> None:
    halves = {name: x.astype(np.float16) for name, x in FEEDS.items()}
    options = {"optimizer": passes.AdamW(0.01), "average": passes.EMA(0.9)}
    executor = steps.trained(mlp(dtype=np.float16), halves, 5, **options)
    for name, array in weights(executor.trained()).items():
        average = executor.state[f"{name}.average"]
        assert (average.dtype, array.dtype) == (np.float32, np.float16)
        np.testing.assert_array_equal(array, average.astype(np.float16))


def test_weights_in_a_body_and_in_dropout_s_inference_form_are_averaged() -> None:
    network = model(
        """g (float[N,4] x) => (float[N,3] y) {
            h = MatMul(x, w)  d = Dropout(h)  n = ReduceMax<keepdims=0>(x)  zero = Constant<value_float=0.0>()
            positive = Greater(n, zero)
            y = If(positive) <then_branch = a () => (float[N,3] p) { p = Add(d, b) },
                             else_branch = c () => (float[N,3] q) { q = Sub(d, b) }> }""",
        w=np.random.default_rng(0).standard_normal((4, 3)),
        b=np.ones(3),
    )
    options = {**STEPS, "average": passes.EMA(0.5), "training": passes.TrainingMode()}
    executor = steps.trained(network, FEEDS, 3, **options)
    found = weights(executor.trained())
    assert all(np.array_equal(found[name], executor.state[f"{name}.average"]) for name in ("w", "b"))
    y = graphopt.run(executor.trained(), {"x": FEEDS["x"]})["y"]
    np.testing.assert_allclose(y, FEEDS["x"] @ found["w"] + found["b"], atol=1e-5)


def test_the_best_epoch_s_averages_are_restored() -> None:
    """Weights that validation has measured are the averages."""
    executor = graphopt.Executor(graphopt.compile(mlp(), average=passes.EMA(0.9), **STEPS), threads=1)
    stop = graphopt.callbacks.EarlyStopping(patience=2)
    arrays = {"x": np.tile(FEEDS["x"], (4, 1)), "target": np.tile(FEEDS["target"], (4, 1))}
    arrays["target"][48:] *= -0.5  # so that validation soon grows worse
    options = {
        "epochs": 12,
        "batch_size": 16,
        "shuffle": False,
        "validation": {k: x[-16:] for k, x in arrays.items()},
    }
    train = {name: x[:48] for name, x in arrays.items()}
    records = graphopt.fit(executor, train, callbacks=[stop], **options)
    best = min(records, key=lambda record: record["validation_loss"])
    assert best is not records[-1]
    assert stop.record is not None
    assert stop.record["epoch"] == best["epoch"]
    rest = {name: x[-16:] for name, x in arrays.items()}
    assert executor.evaluate(rest)["loss"] == pytest.approx(best["validation_loss"], rel=1e-4)


def test_adapters_merge_by_their_averages() -> None:
    options = {"adapter": passes.LoRA("*.weight", rank=2), "average": passes.EMA(0.8)}
    options["optimizer"] = passes.AdamW(0.02)
    executor = trained(**options)
    y = graphopt.run(executor.trained(), {"x": FEEDS["x"]})["y"]
    np.testing.assert_allclose(executor.predict(x=FEEDS["x"])["y"], y, atol=1e-6)
    averages = {n.removesuffix(".average"): x for n, x in executor.state.items() if n.endswith(".average")}
    assert averages.keys() == executor.parameters.keys()
    executor.update_state(averages)
    np.testing.assert_allclose(graphopt.run(executor.trained(), {"x": FEEDS["x"]})["y"], y, atol=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("averages_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("averages_mistakes", call, globals())
