"""Define PyTorch modules whose weights or products have 16 bits; PyTorch trains float32 masters of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparison import optimizers
from in_torch import BOTH, TorchCase
from in_torch import warm_up as warm_up
from torch import nn
from torch_own import Gpt, mlp, words

import passes


class Mixed(nn.Module):
    """Multiply in float16 between layers in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle = nn.Linear(6, 8), nn.Linear(8, 8).half()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.enter(x))
        return self.head(self.norm(h + self.middle(h.to(self.middle.weight.dtype)).to(h.dtype)))


class Autocast(nn.Module):
    """Cast products of float32 weights to 16 bits, as torch.autocast does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def product(self, layer, x):
        return nn.functional.linear(x.half(), layer.weight.half(), layer.bias.half())

    def forward(self, x):
        h = torch.relu(self.product(self.one, x)).to(x.dtype)
        return self.product(self.two, h).to(x.dtype)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.SiLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 3)).half()


def halves(*shape: int):
    return lambda batch: (torch.randn(batch, *shape).half(),)


def floats(*shape: int):
    return lambda batch: (torch.randn(batch, *shape),)


def case(build: Callable[[], nn.Module], inputs: Callable[..., Any], **options: Any) -> TorchCase:
    """Return a case with small steps, which 16-bit weights without masters would lose."""
    return TorchCase(build, inputs, **{"ways": BOTH, "optimizers": optimizers(1e-3), "tolerance": 2e-3, **options})


CASES = {
    "float16 perceptron": case(lambda: mlp().half(), halves(8), loss=passes.CrossEntropy()),
    "float16 convolutions": case(convolutions, halves(2, 6, 6), loss=passes.CrossEntropy()),
    "float16 GPT, tied head": case(lambda: Gpt(True).half(), words(6), loss=passes.CrossEntropy(axis=-1)),
    "float16 among float32": case(Mixed, floats(6)),
    "products in float16": case(Autocast, floats(6)),
}
