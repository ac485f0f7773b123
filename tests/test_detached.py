"""Gradients stop where the module that PyTorch's exporter wrote detaches a value."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from steps import exported as export
from torch import nn
from torch.nn import functional
from twins import descended

import graphopt
import passes
from graphopt import GraphoptError
from graphopt.inspection.report import report

LEARNING_RATE = 0.05


class Network(nn.Module):
    """Two layers and a codebook, whose use a function defines."""

    def __init__(self, use: Callable) -> None:
        super().__init__()
        self.f, self.g, self.codes = nn.Linear(6, 4), nn.Linear(4, 4), nn.Embedding(8, 4)
        self.use = use

    def forward(self, x, y):
        return self.use(self, x, y)


def siamese(m, x, y):
    return ((m.g(m.f(x)) - m.f(y).detach()) ** 2).mean()


def first_argument(m, x, y):
    return (m.f(y).detach() - m.g(m.f(x))).square().mean()


def same_value_twice(m, x, y):
    h = m.f(x)
    return (h.detach().t() @ h - m.g.weight).square().mean()


def twice_detached(m, x, y):
    return (m.g(m.f(x)) * m.f(y).detach().detach()).mean()


def several_readers(m, x, y):
    h = m.f(x)
    d = h.detach()
    return (m.g(h) * d + h * torch.sigmoid(d) + d.reshape(-1, 4)).square().mean()


def straight_through(m, x, y):
    h = m.f(x)
    return m.g(h + (h.round() - h).detach()).square().mean()


def detached_weight(m, x, y):
    return (functional.linear(m.g(m.f(x)), m.g.weight.detach(), m.g.bias) * m.g.bias.detach()).square().mean()


def detached_part_of_a_weight(m, x, y):
    return functional.linear(m.f(x), m.f.weight.detach()[:4, :4]).square().mean()


def detached_unit_scale(m, x, y):
    h = functional.layer_norm(m.f(x), (4,), m.scale.detach(), m.g.bias)
    return (h * m.scale + m.g(h)).square().mean()


def cast(m, x, y):
    return (m.g(m.f(x)) * m.f(y).detach().double().float()).square().mean()


def composite_operators(m, x, y):
    h = m.f(x)
    scaled = functional.layer_norm(m.g(h), (4,), h.detach().mean(0), m.g.bias.detach())
    return (scaled + functional.gelu(h.detach(), approximate="tanh")).square().mean()


def branch(m, x, y):
    h = m.f(x)
    return torch.cond(x.sum() > 0, lambda h: m.g(h.detach()) + h, lambda h: h * 2, (h,)).square().mean()


def module_called_twice(m, x, y):
    def gate(h):
        return m.g(h) * h.detach() + h

    return gate(gate(m.f(x))).square().mean()


def codebook(m, x, y):
    z = m.f(x)
    q = m.codes((z[:, None] - m.codes.weight).square().sum(-1).argmin(-1))
    loss = functional.mse_loss(q, z.detach()) + 0.25 * functional.mse_loss(q.detach(), z)
    return loss + m.g(z + (q - z).detach()).square().mean()


USES = (
    siamese, first_argument, same_value_twice, twice_detached, several_readers, straight_through,
    detached_weight, detached_part_of_a_weight, detached_unit_scale, cast, composite_operators, branch,
    module_called_twice,
)  # fmt: skip


def network(use: Callable) -> Network:
    torch.manual_seed(0)
    made = use(None) if isinstance(use, type) else Network(use)
    made.scale = nn.Parameter(torch.ones(4))
    return made.eval()


def batch(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, generator=generator) for _ in "xy"]


@functools.cache
def exported(use: Callable, optimize: bool, dynamic: bool = False) -> onnx.ModelProto:
    shapes = {"dynamic_shapes": [{0: torch.export.Dim.DYNAMIC}] * 2} if dynamic else {}
    named = {"names": ["a", "b"], "outputs": ["objective"]}
    return export(network(use), *batch(0), dynamo=True, optimize=optimize, **named, **shapes)


def compiled(proto: onnx.ModelProto, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options |= {"loss": passes.OwnLoss(), "optimizer": passes.SGD(LEARNING_RATE)}
        step = graphopt.compile(proto, **options)
    return step, [str(warning.message) for warning in caught]


def assert_trains_as_pytorch(use: Callable, step) -> None:
    executor, twin = graphopt.Executor(step, threads=1), network(use)
    optimizer = torch.optim.SGD(twin.parameters(), LEARNING_RATE)
    for seed in range(4):
        x, y = batch(seed)
        loss = twin(x, y)
        descended(loss, optimizer)
        given = {name: array.numpy() for name, array in zip("ab", (x, y), strict=True)}
        fed = {name: array for name, array in given.items() if name in {v.name for v in step.graph.inputs}}
        assert executor.step(**fed)["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6), seed
    expected = dict(twin.named_parameters())
    for name, found in executor.parameters.items():
        np.testing.assert_allclose(found, expected[name].detach().numpy(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("use", USES)
@pytest.mark.sample(6)
@pytest.mark.slow
def test_detached_values_get_no_gradient(use: Callable, optimize: bool, dynamic: bool) -> None:
    step, _ = compiled(exported(use, optimize, dynamic))
    assert_trains_as_pytorch(use, step)


@pytest.mark.slow
def test_values_merged_across_a_detach_are_refused_until_the_file_keeps_them() -> None:
    with pytest.raises(GraphoptError, match=r"merged or dropped 'mse_loss_1'.*optimize=False"):
        compiled(exported(codebook, True))
    step, _ = compiled(exported(codebook, False))
    assert_trains_as_pytorch(codebook, step)


@pytest.mark.slow
def test_a_detach_without_a_record_is_said() -> None:
    class Viewed(Network):
        def forward(self, x, y):
            h = self.g(self.f(x)) - self.f(y).detach().view(2, -1).view(-1, 4).double()
            return h.square().mean().float()

    _, said = compiled(exported(Viewed, True))
    assert any("no record of a detach() in" in line and "self.f(y).detach().view" in line for line in said)
    step, said = compiled(exported(Viewed, False))
    assert not said
    assert_trains_as_pytorch(Viewed, step)


@pytest.mark.slow
def test_a_block_without_gradients_is_said_and_can_be_stopped() -> None:
    def teacher(m, x, y):
        h = m.g(m.f(x))
        with torch.no_grad():
            target = m.f(y).tanh()
        return (h - target).square().mean()

    _, said = compiled(exported(teacher, True))
    assert any("no_grad" in line and "StopGradient(['tanh'])" in line for line in said)
    stops = [passes.StopGradient(["tanh"]), passes.Gradient()]
    step, _ = compiled(exported(teacher, True), gradient=stops)
    assert_trains_as_pytorch(teacher, step)


@pytest.mark.slow
def test_a_detached_output_gives_no_gradient() -> None:
    def outputs(m, x, y):
        h = m.f(x)
        return m.g(h).square().mean(), h.detach().square().mean(), h.mean().detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for optimize in (False, True):
            proto = torch.onnx.export(
                network(outputs), tuple(batch(0)), dynamo=True, optimize=optimize, verbose=False
            ).model_proto
            last = proto.graph.output[2].name
            with pytest.raises(GraphoptError, match="does not depend on"):
                graphopt.compile(proto, loss=passes.OwnLoss(last), optimizer=passes.SGD(0.1))


@pytest.mark.slow
def test_the_report_names_what_stands_in_no_file() -> None:
    found = report(exported(siamese, True), graphopt.standard(loss=passes.OwnLoss())).summary()
    assert "not known  requires_grad=False, torch.no_grad() and the modes of modules" in found
    assert "parameters.freeze" in found
