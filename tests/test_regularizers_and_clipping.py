"""Penalties and clipped gradients, each pass alone and together."""

from __future__ import annotations

import messages
import numpy as np
import onnx
import pytest
import torch
from builders import linear, mlp, run

import graphopt
import passes

RNG = np.random.default_rng(2)
X, T = RNG.standard_normal((8, 3)), RNG.standard_normal((8, 2))
WEIGHTS = {t.name: onnx.numpy_helper.to_array(t) for t in linear(dtype=np.float64).graph.initializer}


def step(**steps):
    return graphopt.compile(
        linear(dtype=np.float64), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1), **steps
    )


def data_gradients():
    dy = 2 * (X @ WEIGHTS["w"] + WEIGHTS["b"] - T) / T.size
    return {"w": X.T @ dy, "b": dy.sum(0)}


def gradients(outputs):
    return {name: (WEIGHTS[name] - outputs[f"{name}.next"]) / 0.1 for name in WEIGHTS}


@pytest.mark.parametrize(
    ("regularizer", "penalty", "derivative"),
    [
        (passes.L1(0.3), lambda w: 0.3 * abs(w).sum(), lambda w: 0.3 * np.sign(w)),
        (passes.L2(0.3), lambda w: 0.3 * (w**2).sum(), lambda w: 0.6 * w),
        (
            passes.ElasticPenalty(0.1, 0.2),
            lambda w: 0.1 * abs(w).sum() + 0.2 * (w**2).sum(),
            lambda w: 0.1 * np.sign(w) + 0.4 * w,
        ),
    ],
    ids=["l1", "l2", "elastic"],
)
def test_penalty_of_all_parameters(regularizer, penalty, derivative):
    outputs = run(step(regularizer=regularizer), 1, {"x": X, "target": T})[0]
    expected = penalty(WEIGHTS["w"]) + penalty(WEIGHTS["b"])
    np.testing.assert_allclose(outputs["penalty"], expected)
    np.testing.assert_allclose(outputs["loss"], outputs["data_loss"] + expected)
    for name, gradient in gradients(outputs).items():
        np.testing.assert_allclose(gradient, data_gradients()[name] + derivative(WEIGHTS[name]))


def test_different_penalties_of_chosen_parameters_add_up():
    both = [passes.L1(0.3, parameters="w"), passes.L2(0.2, parameters=["b", "nothing"])]
    training = step(regularizer=both)
    outputs = run(training, 1, {"x": X, "target": T})[0]
    np.testing.assert_allclose(outputs["penalty"], 0.3 * abs(WEIGHTS["w"]).sum() + 0.2 * (WEIGHTS["b"] ** 2).sum())
    np.testing.assert_allclose(outputs["loss"], outputs["data_loss"] + outputs["penalty"])
    names = [value.name for value in training.graph.outputs]
    assert names[:4] == ["loss", "data_loss", "penalty", "y"]


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_the_global_norm_is_pytorchs(max_norm):
    outputs = run(step(clip=passes.ClipGlobalNorm(max_norm)), 1, {"x": X, "target": T})[0]
    twins = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in data_gradients().values()]
    for twin, gradient in zip(twins, data_gradients().values(), strict=True):
        twin.grad = torch.tensor(gradient)
    norm = torch.nn.utils.clip_grad_norm_(twins, max_norm)
    np.testing.assert_allclose(outputs["gradient_norm"], norm.item())
    for gradient, twin in zip(gradients(outputs).values(), twins, strict=True):
        np.testing.assert_allclose(gradient, twin.grad.numpy(), rtol=1e-7)


def test_values_are_clipped():
    outputs = run(step(clip=passes.ClipValue(0.05)), 1, {"x": X, "target": T})[0]
    for name, gradient in gradients(outputs).items():
        np.testing.assert_allclose(gradient, np.clip(data_gradients()[name], -0.05, 0.05), atol=1e-12)


def test_half_precision_gradients_are_summed_in_single():
    training = graphopt.compile(
        mlp(dtype=np.float16),
        loss=passes.MeanSquaredError(),
        clip=passes.ClipGlobalNorm(),
        optimizer=passes.SGD(),
    )
    feeds = {"x": np.full((4, 4), 30, np.float16), "target": np.full((4, 3), 200, np.float16)}
    assert np.isfinite(run(training, 1, feeds)[0]["gradient_norm"])


@pytest.mark.parametrize("a_pass", [passes.L2(), passes.Cosine(), passes.Gradient()], ids=repr)
def test_passes_that_need_another_say_so(a_pass):
    model = graphopt.load(linear())
    passes.Parameters()(model)
    with pytest.raises(graphopt.GraphoptError, match=r"first|needs a loss, found none"):
        a_pass(model)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("regularizers_and_clipping_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("regularizers_and_clipping_mistakes", call, globals())
