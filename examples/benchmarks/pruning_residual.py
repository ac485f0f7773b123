"""Prune half of the channels of a trained residual network, beside Torch-Pruning, on scikit-learn's digits.

    pip install torch torch-pruning
    python examples/benchmarks/pruning_residual.py

Both start from the same weights, which PyTorch has trained for 6 epochs. They prune at once, by the Euclidean norm of
filters, and train 4 epochs more. One core takes two minutes.
"""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
import torch_pruning
from torch import nn

import graphopt
import passes

SEEDS, BATCH = range(3), 32


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.c2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.b1, self.b2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if stride == 1 else shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b2(self.c2(torch.relu(self.b1(self.c1(x)))))
        return torch.relu(y + self.shortcut(x))


def network() -> nn.Sequential:
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(net: nn.Module, x: torch.Tensor, t: torch.Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), t[rows]).backward()
            optimizer.step()
    net.eval()


def run(model: onnx.ModelProto, x: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the outputs, and the least processor time of 20 calls in milliseconds, on one thread."""
    options, times = onnxruntime.SessionOptions(), []
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    for _ in range(20):
        start = time.process_time()
        (y,) = session.run(None, {session.get_inputs()[0].name: x})
        times.append(time.process_time() - start)
    return y, 1000 * min(times)


def exported(net: nn.Module, x: torch.Tensor) -> onnx.ModelProto:
    return onnx_ir.to_proto(graphopt.export(net, (x[:2],)))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    digits = graphopt.data.digits()
    x, t = digits.arrays["x"].astype(np.float32), digits.arrays["target"]
    rows: dict[str, list[Any]] = {"dense": [], "graphopt": [], "Torch-Pruning": []}
    for seed in SEEDS:
        torch.manual_seed(seed)
        order = np.random.default_rng(seed).permutation(len(x))
        held, own = order[: len(x) // 5], order[len(x) // 5 :]
        fed, labels = torch.tensor(x[own]), torch.tensor(t[own])
        net = network()
        train(net, fed, labels, 6, 3e-3)
        dense = exported(net, fed)

        step = graphopt.compile(
            dense,
            training=passes.TrainingMode(),
            loss=passes.CrossEntropy(),
            optimizer=passes.AdamW(1e-3),
            prune=passes.Prune(0.5, structure="channel"),
        )
        executor = graphopt.Executor(step, threads=1, verify=False)
        name = next(iter(executor.inputs))
        data = {name: x[own], "target": t[own]}
        graphopt.fit(executor, data, epochs=4, batch_size=BATCH, validation=None, seed=seed, verbose=False)

        other = copy.deepcopy(net)
        importance = torch_pruning.importance.MagnitudeImportance(p=2)
        pruner = torch_pruning.pruner.BasePruner(
            other, fed[:2], importance, pruning_ratio=0.5, ignored_layers=[other[-1]]
        )
        pruner.step()
        train(other, fed, labels, 4, 1e-3)

        whole = executor.trained()
        files = dense, graphopt.remove_channels(whole), exported(other, fed)
        for what, file in zip(rows, files, strict=True):
            y, _ = run(file, x[held])
            count = sum(int(np.prod(w.dims)) for w in file.graph.initializer if w.data_type == onnx.TensorProto.FLOAT)
            rows[what].append(((y.argmax(1) == t[held]).mean(), count))
    print("| network | held-out accuracy | range | numbers in weights |\n|---|---|---|---|")
    for what, found in rows.items():
        accuracies, counts = zip(*found, strict=True)
        print(
            f"| {what} | {np.mean(accuracies):.3f} | {min(accuracies):.3f} to {max(accuracies):.3f} | {counts[0]:,} |"
        )
    sizes, times = zip(*((file.ByteSize() / 1000, run(file, x[held])[1]) for file in (whole, files[1])), strict=True)
    print(f"\nfile {sizes[0]:.0f} -> {sizes[1]:.0f} KB, {len(held)} rows {times[0]:.2f} -> {times[1]:.2f} ms")


if __name__ == "__main__":
    main()
