"""Influence of rows and the Fisher information beside autograd in PyTorch; tests/peers has captum's influence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from steps import exported
from torch import nn

import graphopt
import passes

LOSS = passes.CrossEntropy()
ROWS, TESTED = 150, 5


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 4, 3), nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.avg_pool2d(torch.tanh(self.first(x)), 2).flatten(1))


def network(seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    module = Images().eval()
    open_batch = {"dynamic_shapes": ({0: torch.export.Dim("n")},)}
    return module, exported(module, torch.randn(3, 1, 8, 8), dynamo=True, **open_batch)


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((count, 1, 8, 8), np.float32), "target": rng.integers(0, 5, count)}


def gradients(module: nn.Module, data: dict[str, np.ndarray]) -> torch.Tensor:
    found = []
    for x, label in zip(torch.tensor(data["x"]), torch.tensor(data["target"]), strict=True):
        loss = nn.functional.cross_entropy(module(x[None]), label[None])
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    return torch.stack(found)


def test_influence_is_the_inner_product_of_gradients_summed_over_checkpoints() -> None:
    modules, files = zip(*(network(seed) for seed in (0, 1)), strict=True)
    train, test = rows(ROWS, 0), rows(TESTED, 1)
    expected = sum(gradients(module, test) @ gradients(module, train).T for module in modules)
    found = graphopt.influence(files[0], train, test, LOSS, checkpoints=files)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    alone = graphopt.influence(files[0], train, None, LOSS)
    np.testing.assert_allclose(alone, gradients(modules[0], train).square().sum(1), rtol=2e-6)


def test_example_gradients_are_those_of_autograd() -> None:
    module, file = network()
    step = graphopt.compile(file, loss=LOSS, gradient=passes.ExampleGradients())
    data = rows(7, 2)
    found = graphopt.run(step, data)["example_gradients"]
    expected = gradients(module, data)
    assert found.shape == tuple(expected.shape)
    np.testing.assert_allclose(np.sort(found, 1), np.sort(expected.numpy(), 1), rtol=1e-4, atol=1e-6)


def test_a_projection_keeps_influence_in_the_mean() -> None:
    _, file = network()
    train, test = rows(40, 0), rows(TESTED, 1)
    whole = graphopt.influence(file, train, test, LOSS)
    projected = graphopt.influence(file, train, test, LOSS, project=2000)
    assert np.corrcoef(whole.ravel(), projected.ravel())[0, 1] > 0.95


def test_the_fisher_information_is_the_mean_of_squared_gradients() -> None:
    module, file = network()
    data = rows(ROWS, 0)
    expected = gradients(module, data).square().mean(0)
    found = graphopt.fisher(file, data, LOSS)
    flat = np.concatenate([found[name].ravel() for name, _ in module.named_parameters()])
    np.testing.assert_allclose(flat, expected, rtol=0, atol=1e-6 * float(expected.max()))


def test_losses_with_elastic_weights_are_those_of_pytorch() -> None:
    module, file = network()
    data, later = rows(ROWS, 0), rows(16, 1)
    information = graphopt.fisher(file, data, LOSS)
    step = graphopt.compile(
        file, loss=LOSS, regularizer=passes.ElasticWeights(information, 50.0), optimizer=passes.SGD(0.05)
    )
    executor = graphopt.Executor(step, verify=False)
    starts = {name: w.detach().clone() for name, w in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.tensor(later["x"])), torch.tensor(later["target"]))
        for name, w in module.named_parameters():
            loss = loss + 25.0 * (torch.tensor(information[name]) * (w - starts[name]) ** 2).sum()
        loss.backward()
        optimizer.step()
        assert float(executor.step(later)["loss"]) == pytest.approx(float(loss), rel=1e-6)


def test_mislabelled_rows_are_among_those_of_largest_influence_on_themselves() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 150)
    x = (np.eye(3)[labels] * 3 + rng.standard_normal((150, 3))).astype(np.float32)
    wrong = rng.choice(150, 15, replace=False)
    given = labels.copy()
    given[wrong] = (labels[wrong] + 1) % 3
    data = {"x": x, "target": given}
    step = graphopt.compile(graphopt.models.mlp((3,), 3), loss=LOSS, optimizer=passes.AdamW(1e-2))
    executor = graphopt.Executor(step, verify=False)
    for _ in range(30):
        executor.step(data)
    largest = np.argsort(-graphopt.influence(executor.trained(), data, None, LOSS))[:15]
    assert len({*largest} & {*wrong}) >= 10


def test_wrong_data_and_wrong_information_are_named() -> None:
    _, file = network()
    with pytest.raises(graphopt.GraphoptError, match="same number of rows, found"):
        graphopt.fisher(file, {**rows(5, 0), "target": np.zeros(4, np.int64)}, LOSS)
    held = passes.ElasticWeights({"head.bias": np.zeros(2)})
    unheld = passes.ElasticWeights({"head.bia": np.zeros(5)})
    with pytest.raises(graphopt.GraphoptError, match=r"ElasticWeights: unknown parameter 'head\.bia'"):
        graphopt.compile(file, loss=LOSS, regularizer=unheld)
    with pytest.raises(graphopt.GraphoptError, match=r"ElasticWeights: expected the information of 'head\.bias'"):
        graphopt.compile(file, loss=LOSS, regularizer=held)
