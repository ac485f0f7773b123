"""Train networks of many shapes in PyTorch and in graphopt, and compare the time of a step.

PyTorch exports each network, and graphopt trains the file. Both use AdamW and start from the same weights. The program
checks that the losses of ten steps agree, and then times both in turns. Times are medians of rounds, in microseconds.
The ratio is PyTorch's time by graphopt's with kernels.

Run it: python examples/benchmarks/shapes.py [--only GPT ...] [--threads 1] [--rounds 5]
Install the extra `zoo`: pip install -e ".[cpu,zoo]".
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

SECONDS = 0.5  # of a round


def networks() -> dict[str, tuple[Callable, Callable, Callable]]:
    """Return for each name a function that makes the network, one that draws an input, and one that draws a target."""
    import torch
    from torch import nn
    from torch.nn import functional as f

    class Mlp(nn.Sequential):
        def __init__(self, *sizes, act=nn.ReLU, norm=None):
            layers = []
            for a, b in pairwise(sizes[:-1]):
                layers += [nn.Linear(a, b), *([norm(b)] if norm else []), act()]
            super().__init__(*layers, nn.Linear(*sizes[-2:]))

    class Recurrent(nn.Module):
        def __init__(self, cell, inputs, width, depth=1, classes=6, both=False):
            super().__init__()
            self.cell = cell(inputs, width, depth, batch_first=True, bidirectional=both)
            self.head = nn.Linear(width * (1 + both), classes)

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1])

    class Pooled(nn.Module):
        def __init__(self, body, width, classes=10):
            super().__init__()
            self.body, self.head = body, nn.Linear(width, classes)

        def forward(self, x):
            return self.head(self.body(x).flatten(2).mean(2))

    def depthwise(a, b, stride):
        return nn.Sequential(
            nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False),
            nn.BatchNorm2d(a),
            nn.ReLU6(),
            nn.Conv2d(a, b, 1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU6(),
        )

    def mobile():
        sizes = ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2))
        return Pooled(nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), *(depthwise(*size) for size in sizes)), 256)

    class Residual(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return x + self.body(x)

    class Last(nn.Module):
        """Apply a module to channels as the last axis."""

        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return self.body(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def convnext(width=48):
        def block():
            wide = Mlp(width, 4 * width, width, act=nn.GELU)
            return Residual(
                nn.Sequential(
                    nn.Conv2d(width, width, 7, padding=3, groups=width), Last(nn.LayerNorm(width)), Last(wide)
                )
            )

        return Pooled(nn.Sequential(nn.Conv2d(3, width, 4, 4), *(block() for _ in range(3))), width)

    def resnext():
        def block():
            return Residual(
                nn.Sequential(
                    nn.Conv2d(128, 64, 1, bias=False),
                    nn.BatchNorm2d(64),
                    nn.ReLU(),
                    nn.Conv2d(64, 64, 3, padding=1, groups=16, bias=False),
                    nn.BatchNorm2d(64),
                    nn.ReLU(),
                    nn.Conv2d(64, 128, 1, bias=False),
                )
            )

        return Pooled(nn.Sequential(nn.Conv2d(3, 128, 3, 2, 1), block(), nn.ReLU(), block()), 128)

    def twice(a, b):
        return [
            nn.Conv2d(a, b, 3, padding=1),
            nn.BatchNorm2d(b),
            nn.ReLU(),
            nn.Conv2d(b, b, 3, padding=1),
            nn.ReLU(),
        ]

    class UNet(nn.Module):
        def __init__(self, n=16):
            super().__init__()
            self.first, self.second = nn.Sequential(*twice(1, n)), nn.Sequential(*twice(n, 2 * n))
            self.middle = nn.Sequential(nn.MaxPool2d(2), *twice(2 * n, 4 * n), nn.ConvTranspose2d(4 * n, 2 * n, 2, 2))
            self.up = nn.Sequential(*twice(4 * n, 2 * n), nn.ConvTranspose2d(2 * n, n, 2, 2))
            self.last = nn.Sequential(*twice(2 * n, n), nn.Conv2d(n, 1, 1))

        def forward(self, x):
            first = self.first(x)
            second = self.second(f.max_pool2d(first, 2))
            up = self.up(torch.cat([self.middle(second), second], 1))
            return self.last(torch.cat([up, first], 1))

    def vgg():
        layers, depth = [], 3
        for width in (64, 128, 256):
            layers += [*twice(depth, width), nn.MaxPool2d(2)]
            depth = width
        return Pooled(nn.Sequential(*layers), 256)

    def temporal(n=64):
        body = [nn.Conv1d(12, n, 5, padding=2), nn.ReLU()]
        for d in (2, 4):
            body += [nn.Conv1d(n, n, 5, padding=2 * d, dilation=d), nn.ReLU()]
        return Pooled(nn.Sequential(*body), n)

    class Attention(nn.Module):
        def __init__(self, width, heads, causal):
            super().__init__()
            self.heads, self.causal = heads, causal
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            parts = [y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, 2)]
            return self.out(f.scaled_dot_product_attention(*parts, is_causal=self.causal).transpose(1, 2).flatten(2))

    def layers(width, heads, depth, causal=False):
        for _ in range(depth):
            yield Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, heads, causal)))
            yield Residual(nn.Sequential(nn.LayerNorm(width), Mlp(width, 4 * width, width, act=nn.GELU)))

    class Gpt(nn.Module):
        def __init__(self, words=96, width=128, length=128):
            super().__init__()
            self.words, self.places = (
                nn.Embedding(words, width),
                nn.Parameter(torch.randn(length, width) / 50),
            )
            self.body = nn.Sequential(*layers(width, 4, 2, causal=True), nn.LayerNorm(width), nn.Linear(width, words))

        def forward(self, x):
            return self.body(self.words(x) + self.places).transpose(1, 2)

    class Patches(nn.Module):
        def __init__(self, width=192):
            super().__init__()
            self.patches, self.places = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.randn(16, width) / 50)
            self.body, self.head = nn.Sequential(*layers(width, 3, 4)), nn.Linear(width, 10)

        def forward(self, x):
            return self.head(self.body(self.patches(x).flatten(2).transpose(1, 2) + self.places).mean(1))

    class Sine(nn.Module):
        def forward(self, x):
            return torch.sin(x)

    def real(*shape):
        return lambda: torch.randn(*shape)

    def labels(classes, *shape):
        return lambda: torch.randint(0, classes, shape)

    return {
        "perceptron, batch norm": (
            lambda: Mlp(64, 256, 256, 256, 10, norm=nn.BatchNorm1d),
            real(64, 64),
            labels(10, 64),
        ),
        "perceptron, layer norm": (
            lambda: Mlp(100, 512, 512, 20, act=nn.GELU, norm=nn.LayerNorm),
            real(32, 100),
            labels(20, 32),
        ),
        "perceptron, 20 layers": (lambda: Mlp(32, *[64] * 20, 5, act=nn.ELU), real(32, 32), labels(5, 32)),
        "perceptron, batch 4096": (lambda: Mlp(20, 64, 64, 3), real(4096, 20), labels(3, 4096)),
        "perceptron, 2048 wide": (
            lambda: Mlp(512, 2048, 2048, 512, 10, act=nn.SiLU),
            real(64, 512),
            labels(10, 64),
        ),
        "regression, tanh": (lambda: Mlp(30, 200, 200, 1, act=nn.Tanh), real(256, 30), real(256, 1)),
        "autoencoder": (lambda: Mlp(784, 128, 32, 128, 784, act=nn.Sigmoid), real(128, 784), real(128, 784)),
        "sines": (lambda: Mlp(2, 256, 256, 3, act=Sine), real(2048, 2), real(2048, 3)),
        "embedding": (
            lambda: nn.Sequential(nn.Embedding(5000, 32), nn.Flatten(), Mlp(256, 64, 2)),
            labels(5000, 64, 8),
            labels(2, 64),
        ),
        "GRU, 2 layers": (lambda: Recurrent(nn.GRU, 40, 96, 2), real(16, 50, 40), labels(6, 16)),
        "RNN": (lambda: Recurrent(nn.RNN, 20, 64), real(64, 28, 20), labels(6, 64)),
        "LSTM, both directions": (
            lambda: Recurrent(nn.LSTM, 64, 64, both=True),
            real(16, 30, 64),
            labels(6, 16),
        ),
        "temporal convolutions": (temporal, real(32, 12, 200), labels(10, 32)),
        "VGG": (vgg, real(8, 3, 32, 32), labels(10, 8)),
        "depthwise": (mobile, real(16, 3, 48, 48), labels(10, 16)),
        "ConvNeXt": (convnext, real(8, 3, 64, 64), labels(10, 8)),
        "ResNeXt": (resnext, real(8, 3, 32, 32), labels(10, 8)),
        "U-Net": (UNet, real(4, 1, 64, 64), real(4, 1, 64, 64)),
        "vision transformer": (Patches, real(16, 3, 32, 32), labels(10, 16)),
        "GPT": (Gpt, labels(96, 8, 128), labels(96, 8, 128)),
    }


def measured(name: str, threads: int, rounds: int) -> dict[str, float]:
    """Return the parameters of a network, and the median time of a step in each form, in microseconds."""
    import torch

    import graphopt
    import passes

    # With seed 0, two values in a window of VGG's last MaxPool differ by 1e-6, and rounding decides between them.
    torch.manual_seed(2)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # as graphopt does: a network that has learnt its batch has tiny gradients
    make, draw, draw_target = networks()[name]
    network, x, target = make(), draw(), draw_target()
    classifies = not target.dtype.is_floating_point
    measure = torch.nn.functional.cross_entropy if classifies else torch.nn.functional.mse_loss
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "network.onnx")
        torch.onnx.export(
            network, (x,), path, dynamo=False, do_constant_folding=False, opset_version=20, input_names=["x"],
            training=torch.onnx.TrainingMode.TRAINING, output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )  # fmt: skip
        step = graphopt.compile(
            path,
            training=passes.TrainingMode(),
            loss=passes.CrossEntropy() if classifies else passes.MeanSquaredError(),
            optimizer=passes.AdamW(1e-3, weight_decay=0.01),
        )
    optimizer = torch.optim.AdamW(network.train().parameters(), 1e-3, fused=True)
    batch = {"x": x.numpy(), "target": target.numpy()}
    forms = {
        "kernels": graphopt.Executor(step, threads=threads, report=["loss"], native=True),
        "in place": graphopt.Executor(step, threads=threads, report=["loss"], native=True, in_place=True),
        "plain": graphopt.Executor(step, threads=threads, report=["loss"], native=False),
    }

    def in_torch() -> float:
        optimizer.zero_grad()
        loss = measure(network(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    steps: dict[str, Callable[[], float]] = {"torch": in_torch}
    steps |= {form: (lambda e=executor: e.step(batch)["loss"]) for form, executor in forms.items()}
    losses = {form: [call() for _ in range(10)] for form, call in steps.items()}
    for form in forms:
        np.testing.assert_allclose(losses[form], losses["torch"], rtol=2e-3, atol=1e-4)
    times: dict[str, list[float]] = {form: [] for form in steps}
    for _ in range(rounds):
        for form, call in steps.items():
            taken, end = [], time.perf_counter() + SECONDS
            while time.perf_counter() < end:
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
            times[form].append(statistics.median(taken))
    found = {form: 1e6 * statistics.median(taken) for form, taken in times.items()}
    return found | {"parameters": sum(p.numel() for p in network.parameters())}


def main(names: Sequence[str] | None = None, threads: int = 1, rounds: int = 5) -> None:
    """Print a line per network."""
    print("| network | parameters | PyTorch | graphopt | `in_place` | `native=False` | ratio |")
    print("| --- |" + " ---: |" * 6)
    for name in names or networks():
        x = measured(name, threads, rounds)
        times = " | ".join(f"{x[form]:,.0f}" for form in ("torch", "kernels", "in place", "plain"))
        print(f"| {name} | {x['parameters']:,.0f} | {times} | {x['torch'] / x['kernels']:.2f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", dest="names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    main(**vars(options))
