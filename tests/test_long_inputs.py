"""Networks with open sizes train as in PyTorch at lengths far from those of the example that was exported.

A size that follows from a length by rounding, a minimum or a maximum is no number, whatever it is for short inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from steps import exported as export
from torch import nn
from torch.nn import functional

import graphopt
import passes
from graphopt.targets.native import toolchain

CHANNELS, CLASSES = 4, 3
NEEDS_COMPILER = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
LENGTHS = (300, 1600, 127, 128, 159, 160, 511)


class Net(nn.Module):
    """Compute classes from the mean over time of a sequence whose length an inner part changes."""

    def __init__(self, change: Callable[[nn.Module, torch.Tensor], torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.change, self.layers = change, nn.ModuleList(layers)
        self.first, self.last = nn.Conv1d(CHANNELS, CHANNELS, 1), nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.change(self, torch.tanh(self.first(x))))
        return self.last(h.flatten(2).mean(2))


def stack(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = torch.relu(layer(x))
    return x


def strided(count: int, kernel: int = 3, stride: int = 2, **options) -> list[nn.Module]:
    pad = kernel // 2
    return [nn.Conv1d(CHANNELS, CHANNELS, kernel, stride, pad, **options) for _ in range(count)]


def causal(net: Net, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(net.layers):
        x = torch.relu(layer(functional.pad(x, (2 * 2**i, 0)))) + x
    return x


def to_multiple(net: Net, x: torch.Tensor) -> torch.Tensor:
    padded = functional.pad(x, (0, (64 - x.shape[2] % 64) % 64))
    return padded.reshape(x.shape[0], CHANNELS, -1, 64).mean(3)


def framed(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.layers[0](functional.pad(x, (200, 200))) ** 2


def divided(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x[:, :, : x.shape[2] // 100 + 1]


def over_time(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.layers[0](x.transpose(1, 2))
    return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)


def masked(net: Net, x: torch.Tensor) -> torch.Tensor:
    q, k, v = net.layers[0](x.transpose(1, 2)).chunk(3, 2)
    size = x.shape[2]
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    scores = (q @ k.transpose(1, 2)).masked_fill(~seen, -1e9)
    return (scores.softmax(2) @ v).transpose(1, 2)


def placed(net: Net, x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[2])
    return x + net.layers[0](places).transpose(0, 1) + (places / x.shape[2]).sin()


def with_skip(net: Net, x: torch.Tensor) -> torch.Tensor:
    down, up = net.layers
    low = functional.interpolate(torch.relu(down(x)), scale_factor=2.0)
    return up(torch.cat([x, low[:, :, : x.shape[2]]], 1))


def as_image(net: Net, x: torch.Tensor) -> torch.Tensor:
    image = torch.stack([x, x.flip(2)], 2)
    return torch.relu(net.layers[0](image)).mean(2)


NETWORKS: dict[str, tuple[Callable, list[nn.Module], int]] = {  # with the least length
    "the first 128": (lambda net, x: x[:, :, :128], [], 1),
    "the last 100": (lambda net, x: x[:, :, -100:], [], 1),
    "from 100 on": (lambda net, x: x[:, :, 100:], [], 101),
    "every 128th": (lambda net, x: x[:, :, ::128], [], 1),
    "a hundredth": (divided, [], 1),
    "averages of 128": (lambda net, x: functional.avg_pool1d(x, 128), [], 128),
    "maxima": (lambda net, x: functional.max_pool2d(x[..., None], (64, 1), (50, 1))[..., 0], [], 64),
    "seven strides of 2": (stack, strided(7), 1),
    "patches": (stack, [nn.Conv1d(CHANNELS, CHANNELS, 64, 64)], 64),
    "frames, hop 160": (framed, [nn.Conv1d(CHANNELS, CHANNELS, 400, 160)], 1),
    "causal": (causal, [nn.Conv1d(CHANNELS, CHANNELS, 3, dilation=2**i) for i in range(3)], 1),
    "to half": (lambda net, x: functional.interpolate(x, scale_factor=0.5), [], 2),
    "to a 128th": (lambda net, x: functional.interpolate(x, scale_factor=1 / 128), [], 128),
    "padded to a multiple": (to_multiple, [], 1),
    "a transposed convolution": (
        stack, [nn.Conv1d(CHANNELS, CHANNELS, 4, 4), nn.ConvTranspose1d(CHANNELS, CHANNELS, 3, 2)], 4,
    ),
    "an LSTM": (over_time, [nn.LSTM(CHANNELS, CHANNELS // 2, batch_first=True, bidirectional=True)], 1),
    "a transformer": (over_time, [nn.TransformerEncoderLayer(CHANNELS, 2, 8, 0.0, batch_first=True)], 1),
    "attention to the past": (masked, [nn.Linear(CHANNELS, 3 * CHANNELS)], 1),
    "positions": (placed, [nn.Embedding(1600, CHANNELS)], 1),
    "a U-Net": (with_skip, [*strided(1), nn.Conv1d(2 * CHANNELS, CHANNELS, 3, padding=1)], 1),
    "an image": (as_image, [nn.Conv2d(CHANNELS, CHANNELS, (2, 5), (1, 3), (1, 2))], 1),
    "groups": (stack, [nn.GroupNorm(2, CHANNELS), *strided(1, 5, 4)], 1),
    "instances": (stack, [nn.InstanceNorm1d(CHANNELS, affine=True), *strided(1)], 2),
    "layers": (over_time, [nn.LayerNorm(CHANNELS)], 1),
    "shares of time": (lambda net, x: x.softmax(2) * x.shape[2], [], 1),
    "sums so far": (lambda net, x: x.cumsum(2) / x.shape[2], [], 1),
    "differences": (lambda net, x: x[:, :, 1:] - x[:, :, :-1], [], 2),
    "rolled": (lambda net, x: x * x.roll(3, 2), [], 3),
    "reflected": (lambda net, x: functional.pad(x, (40, 40), "reflect").square(), [], 41),
    "overlapping windows": (lambda net, x: x.unfold(2, 16, 8).amax(3), [], 16),
    "the largest ten": (lambda net, x: x.topk(10, 2).values, [], 10),
    "variances": (lambda net, x: x.var(2, keepdim=True) + x.std(2, keepdim=True), [], 2),
}  # fmt: skip


FIXED_BY_PYTORCH = {  # what its exporters refuse, or write for the example's length
    ("an LSTM", "optimized"),
    ("an LSTM", "not optimized"),
    ("a transformer", "TorchScript"),
    ("overlapping windows", "TorchScript"),
}


def exported(net: nn.Module, x: torch.Tensor, dynamo: bool, optimize: bool) -> onnx.ModelProto:
    if dynamo:
        dims = {"x": {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}}
        return export(net, x, dynamo=True, dynamic_shapes=dims, optimize=optimize)
    return export(net, x, dynamo=False, dynamic_axes={"x": {0: "N", 2: "S"}})


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("form", ["TorchScript", "optimized", "not optimized"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=NEEDS_COMPILER)], ids=["plain", "kernels"])
def test_gradients_at_any_length_are_pytorchs(native, name, form):
    if (name, form) in FIXED_BY_PYTORCH:
        pytest.skip("PyTorch's exporter fixes the length")
    torch.manual_seed(0)
    change, layers, least = NETWORKS[name]
    net = Net(change, *layers).eval()
    for parameter in net.parameters():
        parameter.data.mul_(2)
    example = torch.randn(2, CHANNELS, 400)
    proto = exported(net, example, form != "TorchScript", form == "optimized")
    step = graphopt.compile(proto, loss=passes.CrossEntropy(), clip=passes.ReportGradients(), optimizer=passes.SGD(0.0))
    executor = graphopt.Executor(step, native=native)
    rng = np.random.default_rng(0)
    for length in (n for n in LENGTHS if n >= least):
        x, target = (
            torch.tensor(rng.standard_normal((3, CHANNELS, length)), dtype=torch.float32),
            torch.arange(3),
        )
        net.zero_grad()
        loss = functional.cross_entropy(net(x), target)
        loss.backward()
        found = executor.step(x=x.numpy(), target=target.numpy())
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
        wanted = {name: p.grad.numpy() for name, p in net.named_parameters() if f"{name}.gradient" in found}
        assert wanted
        for key, gradient in wanted.items():
            np.testing.assert_allclose(
                found[f"{key}.gradient"], gradient, rtol=2e-3, atol=2e-6, err_msg=f"{length} {key}"
            )
