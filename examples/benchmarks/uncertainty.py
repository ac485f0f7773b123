"""Measure what outputs that say how sure a file is cost beside a prediction, and LastLayerLaplace beside laplace-torch.

python examples/benchmarks/uncertainty.py prints tables; laplace-torch's row appears if it is installed. Times are
processor times of one thread, in turns; the median of ratios counts.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime

import graphopt
import passes
from graphopt import models

TURNS = 200


def opened(model: ir.Model) -> Callable[[np.ndarray], object]:
    """Return a function that runs a model on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    file = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})


def ratios(runs: dict[str, Callable[[np.ndarray], object]], x: np.ndarray) -> dict[str, float]:
    """Return the median time of each run relative to the first, and that of the first in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS):
        for name, run in runs.items():
            run(x)  # the weights of the run before have left the caches
            start = time.process_time()
            run(x)
            if turn >= TURNS // 10:
                times[name].append(time.process_time() - start)
    plain = np.array(next(iter(times.values())))
    found = {name: float(np.median(t) / np.median(plain)) for name, t in times.items()}
    return {**found, "microseconds": float(np.median(plain) * 1e6)}


def residual() -> ir.Model:
    """Return a residual network of 32x32 pictures with 512 features and 100 classes, as PyTorch exports it."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, width: int) -> None:
            super().__init__()
            stride = 1 if before == width else 2
            self.body = nn.Sequential(
                nn.Conv2d(before, width, 3, stride, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1)
            )
            self.short = nn.Identity() if stride == 1 else nn.Conv2d(before, width, 1, stride)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.body(x) + self.short(x))

    widths = [64, 64, 128, 256, 512]
    blocks = [Block(a, b) for a, b in itertools.pairwise(widths)]
    network = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 1, 1), nn.ReLU(), *blocks),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 100),
    )
    return graphopt.load(graphopt.export(network, torch.zeros(2, 3, 32, 32)))


def laplace(structure: str, features: int, outputs: int, rank: int | None = None) -> passes.LastLayerLaplace:
    """Return a pass that has learnt ones, in the shapes of a last layer: its time does not depend on the numbers."""
    inputs, groups = (features + 1, outputs) if structure == "full" else (features, 1)  # with a bias
    kept = (rank or inputs) * groups
    shapes = (
        [(features, outputs)] if structure == "diag" else [(inputs, kept), (kept, outputs), *[(outputs,)] * bool(rank)]
    )
    factors = tuple(np.ones(shape) for shape in [*shapes, (outputs,)])
    return passes.LastLayerLaplace(1.0, structure, rank=rank, factors=factors)


def costs() -> None:
    """Print what each output costs beside the network."""
    rng = np.random.default_rng(0)
    networks = {
        "MLP 784-512-512-10": (models.mlp((1, 28, 28), 10, hidden=[512, 512]), (1, 28, 28), 512, 10, (1, 64)),
        "CNN 28x28": (models.cnn((1, 28, 28), 10), (1, 28, 28), 64, 10, (1, 64)),
        "residual network 32x32, 512 features, 100 classes": (residual(), (3, 32, 32), 512, 100, (1, 16)),
    }
    names = ["lac", "aps", "diag", "kron", "kron, rank 16", "full", "full, rank 2"]
    print("| network | rows | us |", " | ".join(names), "|")
    print("|", " | ".join(["---", *["---:"] * (len(names) + 2)]), "|")
    for title, (network, shape, features, classes, sizes) in networks.items():
        (name,) = (x.name for x in network.graph.inputs if not x.is_initializer())
        rows = {name: rng.random((300, *shape), np.float32), "target": rng.integers(0, classes, 300)}
        runs = {"plain": opened(network)}
        for what, each in {
            **{score: passes.PredictionSet(0.1, score) for score in ("lac", "aps")},
            **{kind: laplace(kind, features, classes) for kind in ("diag", "kron", "full")},
            **{f"{kind}, rank {n}": laplace(kind, features, classes, n) for kind, n in (("kron", 16), ("full", 2))},
        }.items():
            try:
                runs[what] = opened(graphopt.calibrate(network, rows, each))
            except graphopt.GraphoptError:  # too many weights
                continue
        for count in sizes:
            found = ratios(runs, rng.random((count, *shape), np.float32))
            cells = [f"{found[k]:.2f}" if k in found else "-" for k in names]
            print(f"| {title} | {count} | {found['microseconds']:,.0f} | {' | '.join(cells)} |", flush=True)


def fits() -> None:
    """Print how long a file takes to learn its last layer's posterior, beside laplace-torch."""
    import torch

    torch.set_num_threads(1)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    x, y = torch.rand(10_000, 1, 28, 28), torch.randint(0, 10, (10_000,))
    start = time.process_time()
    file = graphopt.export(module, x[:2])
    print(f"export: {time.process_time() - start:.2f} s")
    (name,) = (value.name for value in graphopt.load(file).graph.inputs)
    for structure in ("full", "kron", "diag"):
        start = time.process_time()
        rows = {name: x.numpy(), "target": y.numpy()}
        graphopt.calibrate(file, rows, passes.LastLayerLaplace("marginal", structure))
        took = {"graphopt": time.process_time() - start}
        if importlib.util.find_spec("laplace"):
            import laplace

            data = torch.utils.data.TensorDataset(x, y)
            start = time.process_time()
            peer = laplace.Laplace(
                module, "classification", subset_of_weights="last_layer", hessian_structure=structure
            )
            peer.fit(torch.utils.data.DataLoader(data, batch_size=256))
            took["laplace-torch, fit"] = time.process_time() - start
            peer.optimize_prior_precision(method="marglik", pred_type="glm")
            took["laplace-torch, and its prior"] = time.process_time() - start
        print(structure, {who: f"{seconds:.2f} s" for who, seconds in took.items()}, flush=True)


if __name__ == "__main__":
    costs()
    fits()
