"""Compare training graphs on each execution provider of the installed ONNX Runtime with its CPU provider.

Providers take turns in every round. The ratio is the median over rounds. Below 1, the provider is faster. The program
prints the errors of providers. Install packages with other providers in separate environments: onnxruntime-openvino,
onnxruntime-gpu, onnxruntime-directml.

Run it: python examples/benchmarks/providers.py [--threads 1] [--rounds 9] [--batch 32]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import onnxruntime

import graphopt
import passes
from graphopt.models import cnn, mlp, transformer

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def workloads(batch: int) -> dict[str, tuple[Any, Any, np.ndarray, np.ndarray]]:
    """Return models, losses, inputs and targets, by name."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, batch)
    images = random.standard_normal((batch, 1, 16, 16), np.float32)
    tokens = random.integers(0, 100, (batch, 32))
    return {
        "mlp": (
            mlp((256,), 10, hidden=(256, 128)),
            passes.CrossEntropy(),
            images.reshape(batch, 256),
            labels,
        ),
        "cnn": (cnn((1, 16, 16), 10), passes.CrossEntropy(), images, labels),
        "transformer": (
            transformer((32,), 100),
            passes.CrossEntropy(axis=-1),
            tokens,
            tokens[:, ::-1].copy(),
        ),
    }


def seconds(executor: graphopt.Executor, feeds: dict[str, np.ndarray], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        executor.step(feeds)
    return (time.perf_counter() - start) / steps


def main(threads: int = 1, rounds: int = 9, batch: int = 32) -> dict[tuple[str, str], float]:
    """Print a line per model and provider; return the ratios."""
    others = [p for p in onnxruntime.get_available_providers() if p not in (CPU, "AzureExecutionProvider")]
    print(f"{'model':<13}{'provider':<28}{'CPU ms':>8}{'ms':>9}{'ratio':>7}  loss differs by; nodes on the CPU")
    found = {}
    for name, (model, loss, x, target) in workloads(batch).items():
        step = graphopt.compile(model, loss=loss, optimizer=passes.AdamW(1e-3))
        for provider in [CPU, *others]:
            plain = graphopt.Executor(step, threads=threads, report=["loss"])
            feeds = dict(zip(plain.inputs, (x, target), strict=True))
            try:
                other = graphopt.Executor(
                    step,
                    device="cuda" if provider == CUDA else "cpu",
                    threads=threads,
                    report=["loss"],
                    provider=provider,
                    static_shapes=provider != CPU,
                )
                losses = [(plain.step(feeds)["loss"], other.step(feeds)["loss"]) for _ in range(5)]
            except graphopt.GraphoptError as error:
                print(f"{name:<13}{provider:<28}refused: ...{str(error)[-160:]}", flush=True)
                continue
            apart = max(abs(b - a) / abs(a) for a, b in losses)
            steps = max(1, int(0.05 / seconds(plain, feeds, 3)))
            times = [(seconds(plain, feeds, steps), seconds(other, feeds, steps)) for _ in range(rounds)]
            found[name, provider] = statistics.median(b / a for a, b in times)
            first, second = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
            hosted = "" if provider == CPU else other.placement().get(CPU, {})
            line = f"{name:<13}{provider:<28}{first:>8.2f}{second:>9.2f}{found[name, provider]:>7.2f}"
            print(f"{line}  {apart:.0e}; {hosted}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=32)
    main(**vars(parser.parse_args()))
