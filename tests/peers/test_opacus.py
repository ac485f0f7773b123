"""A private step has Opacus' gradients, by its hooks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("opacus")

from opacus import GradSampleModule, layers
from test_private import Long, N, batch_of, exported
from torch import nn

import graphopt
import passes


@pytest.mark.parametrize("name", ["dense", "convolutions"])
def test_a_private_step_is_that_of_opacus(name: str) -> None:
    module, x, target = batch_of(name)
    if name == "convolutions":
        module.scale = None  # a parameter of no layer
        module.forward = lambda x: module.head(
            module.norm(module.deep(nn.functional.silu(module.grouped(nn.functional.gelu(module.first(x)))))).mean(
                (2, 3)
            )
        )
    step = graphopt.compile(
        exported(module, x[:3]),
        loss=passes.CrossEntropy(),
        gradient=passes.PrivateGradient(0.7, rows=N),
        training=None,
    )
    found = graphopt.run(step, {"x": x.numpy(), "target": target.numpy()})
    if name == "convolutions":
        inner = copy.deepcopy(
            nn.Sequential(module.first, nn.GELU(), module.grouped, nn.SiLU(), module.deep, module.norm)
        )
        oracle = nn.Sequential(*inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), copy.deepcopy(module.head))
        names = [
            f"{layer}.{kind}" for layer in ("first", "grouped", "deep", "norm", "head") for kind in ("weight", "bias")
        ]
    else:
        oracle, names = copy.deepcopy(module), [name for name, _ in module.named_parameters()]
    sampled = GradSampleModule(oracle.double().train(), loss_reduction="sum")
    nn.functional.cross_entropy(sampled(x.double()), target, reduction="sum").backward()
    samples = dict(zip(names, (p.grad_sample for p in sampled.parameters()), strict=True))
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in samples.values()]).norm(dim=0)
    np.testing.assert_allclose(found["example_norms"], norms, rtol=2e-6)
    factors = (0.7 / (norms + 1e-6)).clamp(max=1)
    for weight, each in samples.items():
        clipped = torch.einsum("n,n...->...", factors, each) / N
        if f"{weight}.grad" in found and found[f"{weight}.grad"].shape == tuple(clipped.shape):
            tolerance = 2e-6 * float(clipped.abs().max())
            np.testing.assert_allclose(found[f"{weight}.grad"], clipped, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_recurrent_layer_has_the_clipped_sum_of_opacus(kind: str) -> None:
    torch.manual_seed(0)
    module, x, target = Long(kind, 6, False).eval(), torch.randn(N, 7, 4), torch.arange(N) % 3
    step = graphopt.compile(
        exported(module, x[:3]), loss=passes.CrossEntropy(), gradient=passes.PrivateGradient(0.3, rows=N, scan=False)
    )
    found = graphopt.run(step, {"x": x.numpy(), "target": target.numpy()})
    oracle = copy.deepcopy(module).double().train()
    oracle.cell = getattr(layers, f"DP{kind}")(4, 6, batch_first=True).double()
    oracle.cell.load_state_dict(module.double().cell.state_dict())
    sampled = GradSampleModule(oracle, loss_reduction="sum")
    nn.functional.cross_entropy(sampled(x.double()), target, reduction="sum").backward()
    samples = [p.grad_sample for p in sampled.parameters()]
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in samples]).norm(dim=0)
    np.testing.assert_allclose(found["example_norms"], norms, rtol=2e-6)
    factors = (0.3 / (norms + 1e-6)).clamp(max=1) / N
    squares = sum(float(torch.einsum("n,n...->...", factors, each).square().sum()) for each in samples)
    own = sum(float((np.float64(g) ** 2).sum()) for name, g in found.items() if name.endswith(".grad"))
    np.testing.assert_allclose(own, squares, rtol=3e-6)
