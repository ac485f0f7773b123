"""Modules that graphopt.export writes train here as in PyTorch, to rounding: every parameter and every buffer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import messages
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, weight_norm

import graphopt
import passes
from graphopt.graph.traversal import is_sorted
from passes.weights import read_origins

EXPORTERS = ("dynamo", "torchscript")
STEPS = 5


class Function(nn.Module):
    """A function of the module's parts and buffers, and of x."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x):
        return self.function(self, x)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.5)


def sines(rows: int, columns: int) -> torch.Tensor:
    angles = torch.arange(rows)[:, None] / 100 ** (torch.arange(columns // 2) / (columns // 2))
    return torch.cat([torch.sin(angles), torch.cos(angles)], 1)


def frozen(module: nn.Module, *paths: str) -> nn.Module:
    for path, weight in module.named_parameters():
        weight.requires_grad_(not path.startswith(paths))
    return module


def in_eval(module: nn.Module, *paths: str) -> nn.Module:
    for path, part in module.named_modules():
        if path in paths:
            part.eval()
    return module


class Block(nn.Module):
    """A residual block with a layer scale, as of CaiT and ConvNeXt, all with equal first values."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(4, 4, 3, padding=1)
        self.gamma = nn.Parameter(0.1 * torch.ones(4))

    def forward(self, x):
        return x + self.c(x) * self.gamma.reshape(1, -1, 1, 1)


def no_gradient(self, x):
    h = self.a(x)
    with torch.no_grad():
        target = torch.tanh(self.b(h))
        with torch.enable_grad():
            seen = torch.sigmoid(self.b(h))
    return h * target + seen + self.frozen(h)


@torch.no_grad()
def teacher(self, x):
    return torch.tanh(self.b(x))


def quantiles(self, x):
    level = (torch.bucketize(x, self.edges) + 0.5) / 8
    return self.o(functional.one_hot(torch.bucketize(x, self.edges), 8).float().mean(1) + level.mean(1, True))


def attention(self, x):
    y, _ = self.attend(x, x, x)
    return self.o(y)


def counted_positions(self, x):
    """Embed words and their positions, as RoBERTa, in which padding has no position."""
    real = x.ne(2).int()[torch.arange(x.shape[0])]
    h = self.words(x) + self.positions((real.cumsum(1) * real).long())
    rows, length, _ = h.shape
    heads = h.view(rows, length, 2, 2).transpose(1, 2)
    return self.o(torch.softmax(heads @ heads.transpose(2, 3), -1).reshape(rows, 2 * length * length))


def recurrent(self, x):
    return self.o(self.r(x)[0])


def quantized(self, x):
    z = self.a(x)
    nearest = (z[:, None] - self.codebook).pow(2).sum(-1).argmin(-1)
    q = self.codebook[nearest]
    return self.o(z + (q - z).detach()) + (q - z.detach()).pow(2).mean()


def tied() -> nn.Module:
    module = Function(lambda s, x: s.e(x).mean(1) @ s.h.weight.T, e=nn.Embedding(7, 4), h=nn.Linear(4, 7, bias=False))
    module.h.weight = module.e.weight
    return module


def one_after_another() -> nn.Module:
    shared = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 3))


def arcface(self, x):
    cosines = functional.linear(functional.normalize(self.a(x)), functional.normalize(self.w))
    return 8.0 * cosines - 0.3 * torch.sin(cosines)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3))


L, Vector = nn.Linear, (8, 4)
WORDS = "words"
# What a module is, how to build it, and the shape of its input.
MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "BatchNormalization, cumulative": (
        lambda: nn.Sequential(L(4, 5), nn.BatchNorm1d(5, momentum=None), L(5, 3)),
        Vector,
    ),
    "BatchNormalization, momentum 0.3": (
        lambda: nn.Sequential(L(4, 5), nn.BatchNorm1d(5, momentum=0.3), L(5, 3)),
        Vector,
    ),
    "BatchNormalization, partly in eval": (
        lambda: in_eval(nn.Sequential(L(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.BatchNorm1d(5), L(5, 3)), "1"),
        Vector,
    ),
    "BatchNormalization in eval": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), L(36, 3)).eval(),
        (4, 2, 5, 5),
    ),
    "BatchNormalization behind a convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), L(36, 3)),
        (4, 2, 5, 5),
    ),
    "BatchNormalization without weights": (
        lambda: nn.Sequential(L(4, 5), nn.BatchNorm1d(5, affine=False), L(5, 3)),
        Vector,
    ),
    "BatchNormalization without statistics": (
        lambda: nn.Sequential(L(4, 5), nn.BatchNorm1d(5, track_running_stats=False), L(5, 3)),
        Vector,
    ),
    "BatchNormalization, shared": (
        lambda: Function(
            lambda s, x: s.o(s.n(torch.tanh(s.n(s.a(x))))),
            a=L(4, 5),
            n=nn.BatchNorm1d(5, momentum=None),
            o=L(5, 3),
        ),
        Vector,
    ),
    "frozen layers": (
        lambda: frozen(nn.Sequential(L(4, 5), nn.BatchNorm1d(5), nn.ReLU(), L(5, 3)), "0", "1.bias"),
        Vector,
    ),
    "frozen, equal to one that trains": (
        lambda: frozen(nn.Sequential(nn.LayerNorm(4), L(4, 4), nn.LayerNorm(4), L(4, 3)), "0"),
        Vector,
    ),
    "weights shared by two layers": (tied, WORDS),
    "a Sequential called twice": (one_after_another, Vector),
    "a Sequential called twice on sequences": (one_after_another, (6, 5, 4)),
    "a frozen BatchNormalization of buffers": (
        lambda: Function(
            lambda s, x: s.o(functional.batch_norm(s.a(x), s.running_mean, s.running_var, s.weight, s.bias)),
            a=L(4, 5),
            weight=torch.rand(5) + 0.5,
            bias=torch.randn(5),
            running_mean=torch.randn(5),
            running_var=torch.rand(5) + 0.5,
            o=L(5, 3),
        ),
        Vector,
    ),
    "buffers that look like weights": (
        lambda: Function(
            lambda s, x: s.o(torch.tanh(functional.linear(x, s.weight, s.bias))),
            weight=torch.randn(5, 4),
            bias=torch.randn(5),
            o=L(5, 3),
        ),
        Vector,
    ),
    "weights that look like buffers": (
        lambda: Function(
            lambda s, x: s.o(torch.tanh((x + s.pe) * s.running_mean) @ s.mask),
            pe=nn.Parameter(sines(6, 4)),
            running_mean=nn.Parameter(torch.ones(4)),
            mask=nn.Parameter(torch.tril(torch.ones(4, 4))),
            o=L(4, 3),
        ),
        (8, 6, 4),
    ),
    "one number": (
        lambda: Function(
            lambda s, x: s.o(x) * s.t.exp() + s.b,
            t=nn.Parameter(torch.tensor(0.5)),
            b=nn.Parameter(torch.zeros(1)),
            o=L(4, 3),
        ),
        Vector,
    ),
    "dropout in eval": (lambda: nn.Sequential(L(4, 5), nn.Dropout(0.5), L(5, 3)).eval(), Vector),
    "layer scales": (lambda: nn.Sequential(Block(), Block(), nn.Flatten(), L(100, 3)), (4, 4, 5, 5)),
    "detach": (
        lambda: Function(
            lambda s, x: s.o(s.a(x).detach() * torch.tanh(s.a(x))) + s.a(x).data.mean(), a=L(4, 4), o=L(4, 3)
        ),
        Vector,
    ),
    "no_grad": (lambda: Function(no_gradient, a=L(4, 4), b=L(4, 4), frozen=L(4, 4)), Vector),
    "a teacher without gradients": (
        lambda: Function(lambda s, x: s.a(x) - teacher(s, x), a=L(4, 3), b=L(4, 3)),
        Vector,
    ),
    "a codebook, straight through": (
        lambda: Function(quantized, a=L(4, 4), o=L(4, 3), codebook=parameter(6, 4)),
        Vector,
    ),
    "a padded embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Flatten(), L(12, 3)),
        WORDS,
    ),
    "two padded embeddings": (
        lambda: Function(
            counted_positions,
            words=nn.Embedding(7, 4, padding_idx=2),
            positions=nn.Embedding(4, 4, padding_idx=0),
            o=L(18, 3),
        ),
        WORDS,
    ),
    "bags of words": (lambda: nn.Sequential(nn.EmbeddingBag(7, 4, mode="mean"), L(4, 3)), WORDS),
    "a pruned layer": (lambda: prune.l1_unstructured(L(4, 3), "weight", 0.5), Vector),
    "weight norm": (
        lambda: nn.Sequential(weight_norm(L(4, 5)), nn.Tanh(), parametrizations.weight_norm(L(5, 3))),
        Vector,
    ),
    "spectral norm in eval": (
        lambda: nn.Sequential(parametrizations.spectral_norm(L(4, 5)), nn.Tanh(), L(5, 3)).eval(),
        Vector,
    ),
    "orthogonal": (
        lambda: Function(lambda s, x: s.o(functional.normalize(s.w, dim=0).mul(x)), w=parameter(4), o=L(4, 3)),
        Vector,
    ),
    "GRU": (lambda: Function(recurrent, r=nn.GRU(4, 5, batch_first=True), o=L(5, 3)), (6, 5, 4)),
    "LSTM of two layers, both ways": (
        lambda: Function(recurrent, r=nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), o=L(10, 3)),
        (6, 5, 4),
    ),
    "attention": (
        lambda: Function(attention, attend=nn.MultiheadAttention(4, 2, batch_first=True), o=L(4, 3)),
        (6, 5, 4),
    ),
    "a transformer's layer": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), L(4, 3)),
        (6, 5, 4),
    ),
    "a head of cosines": (lambda: Function(arcface, a=L(4, 5), w=parameter(3, 5)), Vector),
    "lazy modules": (lazy, Vector),
    "a table of quantiles": (lambda: Function(quantiles, edges=torch.linspace(-1, 1, 7), o=L(8, 3)), Vector),
    "folds of one parameter": (
        lambda: Function(
            lambda s, x: s.o(x * torch.exp(s.w.clamp(max=0.3)) - functional.softplus(s.v) * x),
            w=parameter(4),
            v=parameter(4),
            o=L(4, 3),
        ),
        Vector,
    ),
    "softmax of weights": (
        lambda: Function(
            lambda s, x: s.o((torch.softmax(s.w, 0)[:, None, None] * torch.stack([x, x.tanh(), x.relu()])).sum(0)),
            w=parameter(3),
            o=L(4, 3),
        ),
        Vector,
    ),
    "a mask": (
        lambda: Function(
            lambda s, x: functional.linear(torch.tanh(x), s.w * s.keep),
            w=parameter(3, 4),
            keep=(torch.rand(3, 4) > 0.5).float(),
        ),
        Vector,
    ),
    "a causal mixer": (
        lambda: Function(
            lambda s, x: (torch.exp(s.w) * torch.tril(torch.ones(5, 5))) @ s.o(x),
            w=parameter(5, 5),
            o=L(4, 3),
        ),
        (6, 5, 4),
    ),
    "an attribute that is no buffer": (
        lambda: Function(lambda s, x: s.o(x * torch.tensor([1.0, 2.0, 0.5, 1.5])), o=L(4, 3)),
        Vector,
    ),
}
REFUSED_BY_TORCHSCRIPT = {"BatchNormalization without statistics", "spectral norm in eval"}


def drawn(shape: Any, rows: int | None = None) -> torch.Tensor:
    if shape == WORDS:
        return torch.randint(0, 7, (rows or 8, 3))
    return torch.randn(rows or shape[0], *shape[1:])


def train_here(model: Any, batches: list[tuple[torch.Tensor, torch.Tensor]], **steps: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = graphopt.compile(model, loss=passes.MeanSquaredError(), **steps)
    executor = graphopt.Executor(step, native=False)
    name = model.graph.inputs[0].name
    losses = [executor.step({name: x.numpy(), "target": y.numpy()})["loss"] for x, y in batches]
    return executor, losses


def train_there(module: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], optimizer: Any) -> list[float]:
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.slow
@pytest.mark.sample(21)
def test_trains_as_in_pytorch(name: str, exporter: str) -> None:
    build, shape = MODULES[name]
    exporter = "dynamo" if name in REFUSED_BY_TORCHSCRIPT else exporter
    torch.manual_seed(0)
    module = build()
    model = graphopt.export(module, drawn(shape), exporter=exporter)
    example = drawn(shape)
    batches = []
    for i in range(STEPS):
        x = drawn(shape, len(example) - i % 2)
        (prediction,) = graphopt.run(model, {model.graph.inputs[0].name: x.numpy()}).values()
        batches.append((x, torch.randn(prediction.shape)))
    executor, losses = train_here(model, batches, optimizer=passes.SGD(0.1))
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    np.testing.assert_allclose(losses, train_there(module, batches, optimizer), rtol=1e-5)
    trains = [p for p in module.parameters() if p.grad is not None]
    assert sum(map(np.size, executor.parameters.values())) == sum(p.numel() for p in trains)
    trained = executor.trained()
    found = {x.name: onnx.numpy_helper.to_array(x) for x in trained.graph.initializer}
    weights = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    seen = weights.keys() & found.keys()
    assert {id(weights[path]) for path in seen} >= {id(p) for p in trains}
    for path in seen:
        np.testing.assert_allclose(found[path], weights[path].detach().numpy(), rtol=1e-4, atol=1e-5, err_msg=path)
    x = drawn(shape)
    session = onnxruntime.InferenceSession(trained.SerializeToString())
    predicted = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    np.testing.assert_allclose(predicted, module.eval()(x).detach().numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_nodes_at_padding_are_sorted(exporter: str) -> None:
    module = nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Flatten(), L(12, 3))
    model = graphopt.export(module, drawn(WORDS), exporter=exporter)
    read_origins(model)
    assert [node.op_type for node in model.graph].count("Where") == 1 and is_sorted(model.graph)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


alias = Reverse.apply


class Changing(nn.Module):
    """Changes a parameter's identity, or a buffer, in forward."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.a = what, L(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.what == "a parameter":
            self.a.weight = nn.Parameter(self.a.weight * 1.0)
        elif self.what == "a buffer":
            self.count += 1
        else:
            with torch.no_grad():
                self.a.weight.mul_(0.9)
        return self.a(x)


def data_dependent(self, x):
    return self.a(x) if x.sum() > 0 else -self.a(x)


def with_penalty(self, x):
    y = self.a(x).pow(2)
    (slope,) = torch.autograd.grad(y.sum(), [self.a.weight], create_graph=True)
    return y + slope.pow(2).sum()


def with_hook(self, x):
    y = self.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)
    return y


def parameter_hook() -> nn.Module:
    module = L(4, 3)
    module.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return module


def backward_hook() -> nn.Module:
    module = nn.Sequential(L(4, 3))
    module[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    return module


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = L(4, 4)

    def forward(self, x):
        if not self.training:
            return x + self.a(x)
        return x + self.a(x) * torch.rand(len(x), 1, device=x.device).lt(0.8)


# What cannot be recorded, and a part of the message about it.
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "an autograd function": (
        lambda: Function(lambda s, x: Reverse.apply(s.a(x)), a=L(4, 3)),
        Vector,
        "Reverse",
    ),
    "a hook of a value": (lambda: Function(with_hook, a=L(4, 3)), Vector, "hook"),
    "a hook of a parameter": (parameter_hook, Vector, "parameter weight"),
    "a hook of a module": (backward_hook, Vector, "backward hook of 0"),
    "a parameter that changes": (lambda: Changing("a parameter"), Vector, "weight"),
    "a buffer that changes": (lambda: Changing("a buffer"), Vector, "count"),
    "a parameter that changes in place": (lambda: Changing("in place"), Vector, "mul_"),
    "gradients in forward": (
        lambda: Function(with_penalty, a=L(4, 3)),
        Vector,
        "gradients that forward computes",
    ),
    "dropout in a recurrence": (
        lambda: Function(recurrent, r=nn.GRU(4, 5, 2, dropout=0.3), o=L(5, 3)),
        (6, 5, 4),
        "dropout",
    ),
    "dropout of channels": (lambda: nn.Sequential(L(4, 3), nn.Dropout1d(0.3)), Vector, "dropout1d"),
    "instance statistics": (
        lambda: nn.Sequential(nn.InstanceNorm1d(5, track_running_stats=True), L(4, 3)),
        (6, 5, 4),
        "running",
    ),
    "a norm's limit": (lambda: nn.Sequential(nn.Embedding(7, 4, max_norm=1.0), L(4, 3)), WORDS, "max_norm"),
    "gradients by frequency": (
        lambda: nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True), L(4, 3)),
        WORDS,
        "scale_grad_by_freq",
    ),
    "stochastic depth": (StochasticDepth, Vector, "random"),
    "no numbers": (lambda: L(4, 3, device="meta"), Vector, "meta"),
}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_file_records_is_refused(name: str, exporter: str) -> None:
    build, shape, part = REFUSED[name]
    with pytest.raises(graphopt.GraphoptError, match=r"^export: .*") as caught:
        graphopt.export(build(), drawn(shape), exporter=exporter)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_control_flow_that_a_trace_fixes_is_seen_by_other_rows() -> None:
    example = torch.tensor([[1.0, 2, 3, 4], [-2.0, -3, -4, -5], [5.0, 1, 1, 1]])  # its sum, without the last row twice
    with (
        pytest.warns(torch.jit.TracerWarning),
        pytest.raises(graphopt.GraphoptError, match="another function"),
    ):
        graphopt.export(
            Function(lambda s, x: s.a(x) if x[0].sum() > 9 else -s.a(x), a=L(4, 3)),
            example,
            exporter="torchscript",
        )


def test_an_autograd_function_without_a_gradient_is_recorded() -> None:
    module = Function(lambda s, x: s.a(x) + alias(s.a(x)).detach(), a=L(4, 3))
    model = graphopt.export(module, drawn(Vector))
    batches = [(drawn(Vector), torch.randn(8, 3)) for _ in range(STEPS)]
    _, losses = train_here(model, batches, optimizer=passes.SGD(0.1))
    there = train_there(module, batches, torch.optim.SGD(module.parameters(), 0.1))
    np.testing.assert_allclose(losses, there, rtol=1e-5)


def test_control_flow_of_pytorch_is_recorded() -> None:
    def branch(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: -self.a(x), (x,))

    module = Function(branch, a=L(4, 3)).eval()
    model = graphopt.export(module, drawn(Vector))
    x = drawn(Vector)
    (y,) = graphopt.run(model, {"x": x.numpy()}).values()
    np.testing.assert_allclose(y, module(x).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("export_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("export_mistakes", call, globals())
