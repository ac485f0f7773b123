"""Kernels whose rows are channels: BatchNormalization with its statistics, and its gradient."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from builders import model
from precisions import UNIT
from test_native_kernels import lowered, run
from torch import nn

import graphopt
import passes
from graphopt.targets.native.lowering import plan

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMALIZATIONS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Residual(nn.Module):
    """Two normalized convolutions with a shortcut."""

    def __init__(self, channels: int, axes: int) -> None:
        super().__init__()
        self.first = CONVOLUTIONS[axes](2, channels, 3, padding=1)
        self.second = CONVOLUTIONS[axes](channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(NORMALIZATIONS[axes](channels) for _ in range(2))
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        x = torch.relu(self.norms[1](self.second(x)) + x)
        return self.head(x.flatten(2).mean(2))


def compiled(network: nn.Module, x: torch.Tensor, path, optimizer: passes.Pass) -> onnx.ModelProto:
    torch.onnx.export(
        network, (x,), path, dynamo=False, do_constant_folding=False, opset_version=17, input_names=["x"],
        training=torch.onnx.TrainingMode.TRAINING, output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
    )  # fmt: skip
    return graphopt.compile(path, training=passes.TrainingMode(), loss=passes.CrossEntropy(), optimizer=optimizer)


def kernels_of_channels(step: onnx.ModelProto) -> int:
    return sum("stride = plane" in kernel.code for kernel in plan(graphopt.load(step)).kernels)


@pytest.mark.parametrize(
    ("channels", "space"),
    [(5, (40,)), (20, (7, 7)), (3, (4, 4)), (16, (6, 9)), (33, (5, 4)), (4, (3, 3, 4))],
    ids=str,
)
@pytest.mark.slow
def test_steps_are_pytorchs(channels: int, space: tuple[int, ...], tmp_path) -> None:
    torch.manual_seed(0)
    network = Residual(channels, len(space))
    step = compiled(network, torch.randn(4, 2, *space), str(tmp_path / "x.onnx"), passes.SGD(0.05))
    assert kernels_of_channels(step) == 4
    random = np.random.default_rng(0)
    executors = [graphopt.Executor(step, threads=threads, native=True) for threads in (1, 3)]
    state = {name: torch.from_numpy(array) for name, array in executors[0].state.items()}
    exact = network.double()
    exact.load_state_dict(state, strict=False)  # the exporter has run it
    optimizer = torch.optim.SGD(exact.parameters(), 0.05)
    for rows in (6, 6, 1, 9, 2):
        x, target = random.standard_normal((rows, 2, *space), np.float32), random.integers(0, 5, rows)
        found = [executor.step(x=x, target=target)["loss"] for executor in executors]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(exact(torch.from_numpy(x).double()), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        assert found[0] == found[1] == pytest.approx(loss.item(), rel=max(1e-5, UNIT))
    states = [executor.state for executor in executors]
    for name, array in exact.state_dict().items():
        if name in states[0]:
            np.testing.assert_array_equal(states[0][name], states[1][name])
            bounds = {"rtol": max(1e-4, 8 * UNIT), "atol": max(1e-5, UNIT)}
            np.testing.assert_allclose(states[0][name], array.numpy(), **bounds)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    text = """g (float[N,3,6,6] x) => (float[N,3,6,6] y) {
        m = ReduceMean(x, axes)
        c = Sub(x, m)
        s = Mul(c, c)
        v = ReduceMean(s, axes)
        d = Sqrt(v)
        y = Div(c, d)
    }"""
    source = model(text, axes=np.array([0, 2, 3]))
    step = graphopt.load(source)
    assert sum("stride = plane" in kernel.code for kernel in plan(step).kernels) == 1
    x = (1000 + np.random.default_rng(0).standard_normal((8, 3, 6, 6))).astype(np.float32)
    exact = x.astype(np.float64)
    exact = (exact - exact.mean((0, 2, 3), keepdims=True)) / exact.std((0, 2, 3), keepdims=True)
    found = run(lowered(source)[0], {"x": x})["y"]
    np.testing.assert_allclose(found, exact, atol=1e-3)
