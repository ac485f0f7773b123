"""Measure how much longer training takes with a checkpoint every 100 steps than with one at its end only.

Run it: python examples/benchmarks/checkpoints.py [--rounds 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import graphopt
import passes
from graphopt import models

MODELS: dict[str, tuple[Any, tuple[int, ...], int, int]] = {  # model, shape of x, batch, rows
    "MLP 64-256-256-10, 0.08 M parameters": (models.mlp((64,), 10, hidden=(256, 256)), (64,), 32, 256_000),
    "MLP 784-1024-1024-10, 1.9 M parameters": (
        models.mlp((784,), 10, hidden=(1024, 1024)),
        (784,),
        128,
        128_000,
    ),
    "CNN 28x28, 0.4 M parameters": (
        models.cnn((1, 28, 28), 10, channels=(32, 64), hidden=128),
        (1, 28, 28),
        64,
        51_200,
    ),
}


class Count(graphopt.Callback):
    """Count the checkpoints of a run."""

    reads_state = False

    def __init__(self) -> None:
        self.written = 0

    def on_save_end(self, run: graphopt.Run, path: Path) -> None:
        """Count one."""
        self.written += 1


def measure(
    executor: graphopt.Executor, data: dict[str, np.ndarray], batch: int, every: str | None
) -> tuple[float, int]:
    """Return the seconds of an epoch, which ends with a whole checkpoint, and the number of checkpoints."""
    count = Count()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        options = {"checkpoint": graphopt.Checkpoints(folder, every=every), "callbacks": [count]}
        start = time.perf_counter()
        graphopt.fit(executor, data, epochs=1, batch_size=batch, validation=None, shuffle=False, **options)
        return time.perf_counter() - start, count.written


def main(rounds: int = 5, threads: int = 1) -> dict[str, float]:
    """Print a line per model; return the median ratios."""
    print("| model | steps | s, one at the end | s, every 100 steps | checkpoints written | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    found = {}
    random = np.random.default_rng(0)
    for name, (model, shape, batch, rows) in MODELS.items():
        step = graphopt.compile(model, loss=passes.CrossEntropy(), optimizer=passes.AdamW())
        executor = graphopt.Executor(step, threads=threads)
        x = random.standard_normal((rows, *shape), np.float32)
        data = {"x": x, "target": random.integers(0, 10, rows)}
        measure(executor, data, batch, None)
        pairs = [
            (measure(executor, data, batch, None), measure(executor, data, batch, "100 steps")) for _ in range(rounds)
        ]
        found[name] = statistics.median(with_[0] / without[0] for without, with_ in pairs)
        without, with_ = (statistics.median(run[0] for run in runs) for runs in zip(*pairs, strict=True))
        written = statistics.median(run[1] for _, run in pairs)
        steps = rows // batch
        cells = (
            f"{steps:,}",
            f"{without:.2f}",
            f"{with_:.2f}",
            f"{written:g} of {steps // 100}",
            f"{found[name]:.3f}",
        )
        print(f"| {name} | {' | '.join(cells)} |")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    main(**vars(parser.parse_args()))
