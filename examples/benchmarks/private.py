"""Measure a step of private training beside a plain one, and beside Opacus' ghost clipping, on one thread, in turns.

Run it: python examples/benchmarks/private.py [--seconds 5]. Without opacus, the columns of PyTorch are empty.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import graphopt
import passes

try:
    from opacus import PrivacyEngine
except ImportError:
    PrivacyEngine = None

ROWS, NORM, MULTIPLIER = 64, 1.0, 1.1
STEPS = ("plain", "private", "private with noise", "PyTorch", "Opacus")


class Block(nn.Module):
    """A block of an encoder, of layers that Opacus knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        q, k, v = (layer(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(3)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.feed(self.second(x))


class Encoder(nn.Module):
    def __init__(self, words: int = 1000, width: int = 128) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(x)).mean(1))


def cnn() -> nn.Module:
    layers = [
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 64, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "MLP 784-512-512-10": (mlp, lambda: torch.randn(ROWS, 784)),
    "CNN, 3 x 32 x 32": (cnn, lambda: torch.randn(ROWS, 3, 32, 32)),
    "transformer, 32 words": (Encoder, lambda: torch.randint(0, 1000, (ROWS, 32))),
}


def step_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor, native: bool, **parts: object) -> Callable[[], object]:
    """Return a function that makes a step of a file."""
    file = graphopt.export(module, x[:3])
    step = graphopt.compile(file, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.01), **parts)
    executor = graphopt.Executor(step, native=native, threads=1)
    batch = {step.graph.inputs[0].name: x.numpy(), "target": y.numpy()}
    if "noise_key" in executor.hyperparameters:
        executor.set_hyperparameters(noise_key=np.int32([1, 2]))
    return lambda: executor.step(batch)


def step_of_torch(module: nn.Module, x: torch.Tensor, y: torch.Tensor, private: bool) -> Callable[[], object]:
    """Return a function that makes a step of PyTorch, private by Opacus or plain."""
    optimizer, loss = torch.optim.SGD(module.train().parameters(), 0.01), nn.CrossEntropyLoss()
    if private:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), ROWS)
        module, optimizer, loss, _ = PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            criterion=loss,
            data_loader=loader,
            noise_multiplier=MULTIPLIER,
            max_grad_norm=NORM,
            grad_sample_mode="ghost",
            poisson_sampling=False,
        )

    def step() -> None:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()

    return step


def milliseconds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median processor time of calls that take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * float(np.median(found)) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5)
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(f"| network | kernels | {', ms | '.join(STEPS)}, ms | private / plain | Opacus / private |")
    print(f"| --- | --- | {'---: | ' * (len(STEPS) + 2)}")
    for name, (make, draw) in NETWORKS.items():
        for native in (False, True):
            torch.manual_seed(0)
            module, x, y = make().eval(), draw(), torch.arange(ROWS) % 10
            private = {"gradient": passes.PrivateGradient(NORM, rows=ROWS)}
            calls = {
                "plain": step_of(module, x, y, native),
                "private": step_of(module, x, y, native, **private),
                "private with noise": step_of(module, x, y, native, **private, clip=passes.GaussianNoise(MULTIPLIER)),
            }
            if PrivacyEngine is not None:
                calls["PyTorch"] = step_of_torch(make(), x, y, private=False)
                calls["Opacus"] = step_of_torch(make(), x, y, private=True)
            found = milliseconds(calls, seconds)
            cells = [f"{found[step]:.1f}" if step in found else "" for step in STEPS]
            noisy = found["private with noise"]
            peer = f"{found['Opacus'] / noisy:.1f}" if "Opacus" in found else ""
            print(
                f"| {name} | {'compiled' if native else 'ONNX Runtime'} | {' | '.join(cells)} "
                f"| {noisy / found['plain']:.2f} | {peer} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
