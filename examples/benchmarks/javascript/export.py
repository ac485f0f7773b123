"""Write the host folders and the batches of the benchmark: python examples/benchmarks/javascript/export.py"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import graphopt
import graphopt.models
import passes

BUILD = Path(__file__).parent / "build"
MODELS = {
    "mlp": (graphopt.models.mlp((64,), 10, hidden=(256, 256)), 32, (64,)),
    "transformer": (graphopt.models.transformer((32,), 10, width=64, layers=2, causal=False), 8, (32,)),
    "cnn": (graphopt.models.cnn((1, 28, 28), 10, channels=(32, 64), hidden=128), 64, (1, 28, 28)),
}
BATCHES = 16


def main() -> None:
    for name, (model, rows, features) in MODELS.items():
        loss = passes.CrossEntropy(axis=-1 if name == "transformer" else 1)
        step = graphopt.compile(model, loss=loss, optimizer=passes.Adam(learning_rate=1e-3))
        graphopt.export_hosts(step, BUILD / name)
        graphopt.export_hosts(step, BUILD / f"{name}_webgpu", target="webgpu")
        random = np.random.default_rng(0)
        x = random.standard_normal((BATCHES, rows, *features)).astype(np.float32)
        labels: tuple[int, ...] = (BATCHES, rows)
        if name == "transformer":
            x, labels = random.integers(0, 10, x.shape).astype(np.float32), x.shape
        target = random.integers(0, 10, labels).astype(np.uint8)
        for folder in (BUILD / name, BUILD / f"{name}_webgpu"):
            (folder / "x.bin").write_bytes(x.tobytes())
            (folder / "target.bin").write_bytes(target.tobytes())


if __name__ == "__main__":
    main()
