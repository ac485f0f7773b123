"""SAM and adversarial training beside the same loops in PyTorch, with batch statistics; masks of Dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import mlp
from steps import exported
from torch import nn

import graphopt
import passes

STEPS = 20
X, LABELS = torch.rand(8, 1, 8, 8), torch.arange(8) % 5
FEEDS = {"x": X.numpy(), "target": LABELS.numpy()}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.avg_pool2d(torch.tanh(self.norm(self.first(x))), 2).flatten(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Images()


def training(module: nn.Module, **steps: Any) -> graphopt.Executor:
    dynamo = steps.pop("dynamo", True)
    kept = {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
    file = exported(copy.deepcopy(module).eval(), X, dynamo=dynamo, **({"optimize": False} if dynamo else kept))
    steps = {"loss": passes.CrossEntropy(), "training": passes.TrainingMode(), **steps}
    optimizer = passes.SGD(0.1, momentum=0.9)
    return graphopt.Executor(graphopt.compile(file, optimizer=optimizer, **steps), verify=False)


def descended(module: nn.Module, step: Callable[[], torch.Tensor]) -> list[float]:
    """Return the losses of PyTorch, where `step` leaves gradients."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step()))
        optimizer.step()
    return losses


def statistics(module: nn.Module, train: bool) -> None:
    module.norm.momentum = 0.1 if train else 0.0


@pytest.mark.parametrize("dynamo", [True, False], ids=["exporter", "torchscript"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_sharpness_aware_losses_are_those_of_two_closures_in_pytorch(adaptive: bool, dynamo: bool) -> None:
    module, rho = network(), 0.5 if adaptive else 0.05
    executor = training(module, gradient=passes.SharpnessAware(rho, adaptive), dynamo=dynamo)
    found = [float(executor.step(FEEDS)["loss"]) for _ in range(STEPS)]

    def step() -> torch.Tensor:
        statistics(module, True)
        loss = nn.functional.cross_entropy(module(X), LABELS)
        loss.backward()
        parameters = list(module.parameters())
        gradients = [w.grad.clone() for w in parameters]
        scaled = [w.detach().abs() * g if adaptive else g for w, g in zip(parameters, gradients, strict=True)]
        norm = torch.stack([g.norm() for g in scaled]).norm() + 1e-12
        places = [w.detach().clone() for w in parameters]
        with torch.no_grad():
            for w, g in zip(parameters, scaled, strict=True):
                w += rho * g / norm * (w.abs() if adaptive else 1)
        module.zero_grad()
        statistics(module, False)
        nn.functional.cross_entropy(module(X), LABELS).backward()
        with torch.no_grad():
            for w, place in zip(parameters, places, strict=True):
                w.copy_(place)
        return loss.detach()

    expected = descended(module, step)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    (prediction,) = graphopt.run(executor.trained(), {"x": FEEDS["x"]}).values()
    with torch.no_grad():
        np.testing.assert_allclose(prediction, module.eval()(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("steps", "share"), [(1, 1.0), (1, 0.5), (4, 0.5)])
def test_adversarial_losses_are_those_of_a_loop_in_pytorch(steps: int, share: float) -> None:
    module, size = network(), 0.05 if steps == 1 else 2.5 * 0.05 / 4
    penalty = passes.AdversarialTraining(0.05, steps, share=share, low=0.0, high=1.0)
    executor = training(module, regularizer=penalty)
    found = [float(executor.step(FEEDS)["loss"]) for _ in range(STEPS)]

    def step() -> torch.Tensor:
        statistics(module, True)
        clean = nn.functional.cross_entropy(module(X), LABELS)
        statistics(module, False)
        at = X
        for _ in range(steps):
            at = at.detach().requires_grad_()
            (slope,) = torch.autograd.grad(nn.functional.cross_entropy(module(at), LABELS), at)
            at = torch.clamp(torch.clamp(at + size * slope.sign(), X - 0.05, X + 0.05), 0, 1)
        moved = nn.functional.cross_entropy(module(at.detach()), LABELS)
        loss = (1 - share) * clean + share * moved
        loss.backward()
        return loss.detach()

    np.testing.assert_allclose(found, descended(module, step), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        clean = nn.functional.cross_entropy(module.eval()(X), LABELS)
    evaluated = executor.evaluate(FEEDS)["loss"]
    np.testing.assert_allclose(evaluated, clean, rtol=1e-4, atol=1e-5)


def test_both_passes_have_the_same_mask() -> None:
    """The graph computes no second mask, so that no random number occurs more often than in a plain step."""
    counts = []
    for gradient in (passes.Gradient(), passes.SharpnessAware(0.1)):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 5))
        mode = torch.onnx.TrainingMode.PRESERVE
        file = exported(module.train(), X, dynamo=False, training=mode, do_constant_folding=False)
        steps = {"loss": passes.CrossEntropy(), "training": passes.TrainingMode(), "gradient": gradient}
        step = graphopt.compile(file, optimizer=passes.SGD(0.1), **steps)
        counts.append(sum(node.op_type == "Range" for node in step.graph))
    assert counts == [1, 1]


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))


class Adapted(nn.Module):
    """A frozen layer beside a change of low rank, with the weights that a graph starts from."""

    def __init__(self, layer: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.a, self.b, self.scale = layer.requires_grad_(False), nn.Parameter(a), nn.Parameter(b), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.a @ self.b * self.scale


def sharp_gradients(module: nn.Module, rho: float, x: torch.Tensor, y: torch.Tensor, share: float) -> torch.Tensor:
    """Add `share` times the gradients of SAM to those of the parameters, as its optimizers in PyTorch do."""
    parameters = [w for w in module.parameters() if w.requires_grad]
    loss = nn.functional.cross_entropy(module(x), y)
    first = torch.autograd.grad(loss, parameters)
    scale = rho / (torch.stack([g.norm() for g in first]).norm() + 1e-12)
    places = [w.detach().clone() for w in parameters]
    with torch.no_grad():
        for w, g in zip(parameters, first, strict=True):
            w += scale * g
    second = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
    with torch.no_grad():
        for w, place, g in zip(parameters, places, second, strict=True):
            w.copy_(place)
            w.grad = share * g if w.grad is None else w.grad + share * g
    return loss.detach()


BESIDE: dict[str, tuple[dict[str, Any], float]] = {
    "accumulated": ({"accumulate": passes.Accumulate(2)}, 2e-6),
    "clipped": ({"clip": passes.ClipGlobalNorm(0.3)}, 2e-6),
    "adapters": ({"adapter": passes.LoRA("*weight", rank=2, alpha=4)}, 2e-6),
    "bfloat16": ({"precision": passes.MixedPrecision("bfloat16")}, 2e-2),
    "float16": (
        {"precision": passes.MixedPrecision("float16"), "loss_scale": passes.DynamicLossScale()}
        | {"gradient": passes.SharpnessAware(0.5, loss_scale=2.0**10)},
        3e-3,
    ),
    "all of float32": (
        {
            "accumulate": passes.Accumulate(2),
            "clip": passes.ClipGlobalNorm(0.3),
            "adapter": passes.LoRA("*weight", rank=2, alpha=4),
        },
        2e-6,
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_sharpness_aware_losses_beside_other_steps_are_those_of_pytorch(name: str) -> None:
    steps, tolerance = BESIDE[name]
    module, x, y = dense(), torch.randn(6, 8, 12), torch.arange(8) % 5
    steps = {"loss": passes.CrossEntropy(), "gradient": passes.SharpnessAware(0.5)} | steps
    step = graphopt.compile(exported(module, x[0], dynamo=True), optimizer=passes.SGD(0.5, momentum=0.9), **steps)
    executor = graphopt.Executor(step, verify=False)
    if "adapter" in steps:
        for i in (0, 2):
            pair = (torch.tensor(executor.parameters[f"{i}.weight.lora_{each}"]) for each in "AB")
            module[i] = Adapted(module[i], *pair, 4 / 2)
    found = [float(executor.step({"x": rows.numpy(), "target": y.numpy()})["loss"]) for rows in x]
    optimizer = torch.optim.SGD([w for w in module.parameters() if w.requires_grad], 0.5, momentum=0.9)
    every = 2 if "accumulate" in steps else 1
    expected = []
    for i, rows in enumerate(x):
        expected.append(float(sharp_gradients(module, 0.5, rows, y, 1 / every)))
        if i % every == every - 1:
            if "clip" in steps:
                nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    np.testing.assert_allclose(found, expected, rtol=tolerance)


COMPOSED: dict[str, dict[str, Any]] = {
    "loss scale": {"gradient": passes.SharpnessAware(0.1, loss_scale=1024.0)},
    "recomputed": {"recompute": passes.Recompute()},
    "a penalty": {"regularizer": passes.L2(0.0)},
    "lowered": {"fuse": passes.Fuse()},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_other_steps_leave_sharpness_aware_losses_as_they_are(name: str) -> None:
    steps = {"gradient": passes.SharpnessAware(0.1)}
    plain, other = (training(network(), **{**steps, **more}) for more in ({}, COMPOSED[name]))
    found = [[float(executor.step(FEEDS)["loss"]) for _ in range(5)] for executor in (plain, other)]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_blocks_of_tokens_are_computed_at_the_second_place_too() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (4, 8))
    found = []
    for blocks in (None, 2):
        network = graphopt.models.transformer((8,), 50, vocabulary=50, width=16, heads=2, layers=1, causal=True)
        loss = passes.CausalLanguageModel(blocks=blocks)
        steps = {"loss": loss, "gradient": passes.SharpnessAware(0.5), "optimizer": passes.SGD(0.5)}
        executor = graphopt.Executor(graphopt.compile(network, **steps), verify=False)
        found.append([float(executor.step({"x": tokens})["loss"]) for _ in range(5)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input": "other"},
            r"AdversarialTraining\(input='other'\): expected the name of one floating-point input",
        ),
        ({"low": 1.0, "high": 0.0}, "PGD: expected low < high"),
        ({"share": 0.0}, "share"),
    ],
)
def test_what_an_attack_cannot_change_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(graphopt.GraphoptError, match=message):
        graphopt.compile(
            mlp((6, 4, 3)), loss=passes.CrossEntropy(), regularizer=passes.AdversarialTraining(0.1, **change)
        )
