"""Gradients of single examples beside torch.func, and private training on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from test_derivatives import Attention, Recurrent, exported
from torch import nn

import graphopt
import passes
from graphopt.graph import roles
from graphopt.graph.emitter import Emitter
from graphopt.graph.roles import Role
from graphopt.graph.shapes import ensure_typed
from passes.gradients.examples import Examples

N = 5


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, stride=2, padding=1)
        self.grouped, self.deep = (
            nn.Conv2d(6, 12, 3, groups=3, dilation=2, padding=2),
            nn.Conv2d(12, 12, 1, groups=12),
        )
        self.norm, self.head = nn.GroupNorm(3, 12), nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.rand(12, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(self.grouped(nn.functional.gelu(self.first(x))))
        return self.head((self.norm(self.deep(h)) * self.scale).mean((2, 3)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Tied(nn.Module):
    """A table that is read by tokens and multiplies the last state, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.positions = (
            nn.Embedding(4, 6),
            nn.Linear(6, 6),
            nn.Parameter(torch.rand(7, 6)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layer(self.table(x) + self.positions))
        return torch.tanh(self.layer(h)).mean(1) @ self.table.weight.T


class LastAxis(nn.Module):
    """Attention as of PyTorch without batch_first: rows are the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.head = nn.LayerNorm(8), nn.MultiheadAttention(8, 2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).transpose(0, 1)
        return self.head(self.attention(h, h, h)[0].mean(0))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), (6,)),
    "convolutions": (Convolutions, (2, 9, 9)),
    "recurrent": (Recurrent, (1, 8, 8)),
    "gated": (Gated, (3, 6)),
    "attention": (Attention, (3, 8)),
    "tied": (Tied, (7,)),
    "last-axis": (LastAxis, (5, 8)),
}


def batch_of(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    module = make().eval()
    if name == "recurrent":
        module.norm = nn.Identity()  # an exporter folds it
    x = torch.randint(0, 4, (N, *shape)) if name == "tied" else torch.randn(N, *shape)
    return module, x, torch.arange(N) % 4


def of_examples(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the gradients of examples as PyTorch computes them, in float64."""
    module, rows = module.double(), []
    for i in range(len(x)):
        row = x[i : i + 1]
        loss = nn.functional.cross_entropy(
            module(row if row.dtype == torch.int64 else row.double()), target[i : i + 1]
        )
        rows.append(torch.autograd.grad(loss, [*module.parameters()]))
    stacks = [torch.stack(each).numpy() for each in zip(*rows, strict=True)]
    return dict(zip(dict(module.named_parameters()), stacks, strict=True))


def norms_of(gradients: dict[str, np.ndarray]) -> np.ndarray:
    return np.sqrt(sum((each.reshape(len(each), -1) ** 2).sum(1) for each in gradients.values()))


def with_gradients(source: onnx.ModelProto | ir.Model, **options: bool) -> ir.Model:
    """Return a model with the gradients of examples as outputs."""
    step = graphopt.standard(loss=passes.CrossEntropy(), gradient=None, simplify=None)(source)
    ensure_typed(step)
    with Emitter(step) as op:
        loss, weights = roles.only(step, Role.LOSS, "test"), roles.with_role(step, Role.PARAMETER)
        for w, value in Examples(op, step, loss, weights, **options).gradients().items():
            step.graph.outputs.append(op.Identity(value, _outputs=[f"{w.name}.each"]))
    return step


@pytest.mark.parametrize("dynamo", [True, False], ids=["exporter", "torchscript"])
@pytest.mark.parametrize("name", NETWORKS)
def test_examples_have_the_norms_and_clipped_means_of_pytorch(name: str, dynamo: bool) -> None:
    module, x, target = batch_of(name)
    file = exported(module, x[:3], dynamo)
    gradient = passes.PrivateGradient(0.7, rows=N)
    step = graphopt.compile(file, loss=passes.CrossEntropy(), gradient=gradient, training=None)
    expected = of_examples(module, x, target)
    norms = norms_of(expected)
    found = graphopt.run(step, {"x": x.numpy(), "target": target.numpy()})
    np.testing.assert_allclose(found["example_norms"], norms, rtol=2e-6)
    factors = np.minimum(1, 0.7 / (norms + 1e-6))
    clipped = [np.tensordot(factors, each, 1) / N for each in expected.values()]
    own = sum(float(np.square(found[y]).sum()) for y in found if y.endswith(".grad"))
    np.testing.assert_allclose(own, sum(float(np.square(each).sum()) for each in clipped), rtol=1e-5)
    for weight, each in zip(expected, clipped, strict=True):
        if f"{weight}.grad" in found and found[f"{weight}.grad"].shape == each.shape:
            np.testing.assert_allclose(found[f"{weight}.grad"], each, atol=2e-6 * np.abs(each).max() + 1e-9)
