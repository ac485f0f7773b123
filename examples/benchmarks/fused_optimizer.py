"""Compare the steps of onnxruntime-training's fused kernels and gradients with those of graphopt.

Each row compares one choice with the default on the same network. Both run in turn in every round, so that the machine
treats them alike. The ratio is the median over rounds. Below 1, the choice is faster.

Run it where onnxruntime-training is installed:
python examples/benchmarks/fused_optimizer.py [--threads 1] [--rounds 15] [--batch 32]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

import graphopt
import passes
from graphopt.models import mlp

NETWORKS = {"64-256-256-10": (64, (256, 256), 400), "784-1024-1024-10": (784, (1024, 1024), 10)}
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD(fused)": ({"optimizer": passes.SGD(0.01)}, {"optimizer": passes.SGD(0.01, fused=True)}),
    "AdamW(fused)": ({"optimizer": passes.AdamW()}, {"optimizer": passes.AdamW(fused=True)}),
    "ClipGlobalNorm(fused)": (
        {"optimizer": passes.SGD(0.01), "clip": passes.ClipGlobalNorm()},
        {"optimizer": passes.SGD(0.01), "clip": passes.ClipGlobalNorm(fused=True)},
    ),
    "OrtGradient": (
        {"optimizer": passes.SGD(0.01)},
        {"optimizer": passes.SGD(0.01), "gradient": passes.OrtGradient()},
    ),
}


def executor(features: int, hidden: tuple[int, ...], threads: int, steps: dict[str, Any]) -> graphopt.Executor:
    model = mlp((features,), 10, hidden=hidden)
    step = graphopt.compile(model, loss=passes.CrossEntropy(), **steps)
    return graphopt.Executor(step, threads=threads, report=["loss"])


def seconds(runner: graphopt.Executor, x: np.ndarray, target: np.ndarray, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        runner.step(x=x, target=target)
    return (time.perf_counter() - start) / steps


def main(threads: int = 1, rounds: int = 15, batch: int = 32) -> dict[tuple[str, str], float]:
    """Print a line per network and choice; return the ratios."""
    random = np.random.default_rng(0)
    print(f"{'network':<18}{'choice':<24}{'plain ms':>10}{'chosen ms':>11}{'ratio':>8}  quartiles")
    found = {}
    for network, (features, hidden, steps) in NETWORKS.items():
        x = random.standard_normal((batch, features), np.float32)
        target = random.integers(0, 10, batch)
        for choice, pair in CHOICES.items():
            runners = [executor(features, hidden, threads, options) for options in pair]
            for runner in runners:
                seconds(runner, x, target, steps)
            times = [[seconds(runner, x, target, steps) for runner in runners] for _ in range(rounds)]
            ratios = [chosen / plain for plain, chosen in times]
            low, ratio, high = statistics.quantiles(ratios, n=4)
            plain, chosen = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
            print(
                f"{network:<18}{choice:<24}{plain:>10.3f}{chosen:>11.3f}{ratio:>8.2f}  {low:.2f} to {high:.2f}",
                flush=True,
            )
            found[network, choice] = ratio
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    main(**vars(parser.parse_args()))
