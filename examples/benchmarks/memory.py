"""Measure activation checkpointing: the estimated and measured bytes of a step, and its time, for several budgets.

Each row is a network with a budget of `passes.Recompute`. The measured bytes are the growth of a new process's resident
memory during steps, after the executor has created the state. One column uses `Executor(low_memory=True)`, the next one
the default. Times are those of `low_memory=True`; all budgets of a network take turns in every round. Ratios compare
with the row that keeps everything; those of times are medians over rounds.

Run it, on Linux: python examples/benchmarks/memory.py [--batch 16] [--rounds 5] [--threads 1] [--networks cnn]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import graphopt
import passes
from graphopt.graph.memory import estimate
from graphopt.models import transformer

BUDGETS = (1.0, 0.7, 0.5, 0.35, None)  # from everything to the minimum
MALLOC = {  # a separate mapping for each array, which is returned to the system when freed
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
MEASURED: dict[str, Any] = {"report": ["loss"], "target": "onnxruntime", "verify": False}  # one form alone
WARM = 2  # steps before memory is read: ONNX Runtime plans a step's memory after the first


@dataclass(frozen=True)
class Row:
    """Hold measured bytes in addition to the state, and seconds."""

    estimated: int
    measured: int
    by_default: int
    seconds: float
    slower: float


def encoder() -> ir.Model:
    """Return an encoder with four layers of 256 units over 64 tokens."""
    return transformer((64,), 64, width=256, heads=4, layers=4, causal=False)


def cnn(depth: int = 16, channels: int = 32, size: int = 32) -> ir.Model:
    """Return 3x3 convolutions, each with BatchNormalization and ReLU, followed by a mean."""
    random = np.random.default_rng(0)
    lines, last, weights = [], "x", {}
    for i in range(depth):
        lines.append(f"c{i} = Conv<pads=[1,1,1,1]>({last}, w{i})")
        lines.append(f"n{i} = BatchNormalization(c{i}, scale{i}, shift{i}, mean{i}, var{i})  r{i} = Relu(n{i})")
        fan_in = channels if i else 3
        weights[f"w{i}"] = random.normal(0, (2 / 9 / fan_in) ** 0.5, (channels, fan_in, 3, 3))
        for name, number in (("scale", 1), ("shift", 0), ("mean", 0), ("var", 1)):
            weights[f"{name}{i}"] = np.full(channels, number)
        last = f"r{i}"
    lines.append(f"p = GlobalAveragePool({last})  f = Flatten(p)  y = Gemm(f, head)")
    weights["head"] = random.normal(0, channels**-0.5, (channels, 10))
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> '
        f"g (float[batch,3,{size},{size}] x) => (float[batch,10] y) {{ {' '.join(lines)} }}"
    )
    for name, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return graphopt.load(proto)


NETWORKS = {"encoder": encoder, "cnn": cnn}


def feeds(step: ir.Model, batch: int) -> dict[str, np.ndarray]:
    """Return a batch of random images or tokens and labels."""
    random = np.random.default_rng(0)
    x, target = (next(v for v in step.graph.inputs if v.name == name) for name in ("x", "target"))
    shapes = [[batch, *list(v.shape or ())[1:]] for v in (x, target)]
    tokens = x.dtype == ir.DataType.INT64
    images = random.integers(0, 64, shapes[0]) if tokens else random.standard_normal(shapes[0], np.float32)
    return {"x": images, "target": random.integers(0, 10, shapes[1])}


def grown(path: str, batch: int, threads: int, low_memory: bool) -> int:
    """Return the number of bytes by which steps make this process grow."""
    executor = graphopt.Executor(path, threads=threads, low_memory=low_memory, **MEASURED)
    data = feeds(executor.model, batch)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    for _ in range(WARM):
        executor.step(data)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def apart(*arguments: object) -> int:
    """Return the result of `grown` in a separate process."""
    command = [sys.executable, __file__, "--grown", *map(str, arguments)]
    return int(subprocess.check_output(command, env=os.environ | MALLOC))


def times(paths: Sequence[str], batch: int, threads: int, rounds: int) -> list[list[float]]:
    """Return the seconds of a step of each graph, in each round."""
    executors = [graphopt.Executor(path, threads=threads, low_memory=True, **MEASURED) for path in paths]
    data = feeds(executors[0].model, batch)
    found: list[list[float]] = []
    for _ in range(rounds + 1):
        found.append([])
        for executor in executors:
            start = time.perf_counter()
            executor.step(data)
            found[-1].append(time.perf_counter() - start)
    return found[1:]


def main(
    batch: int = 16, rounds: int = 5, threads: int = 1, networks: Sequence[str] = tuple(NETWORKS)
) -> dict[tuple[str, float | None], Row]:
    """Print a line per network and budget; return the rows."""
    print(
        f"{'network':<9}{'budget':>7}{'estimated MB':>14}{'measured MB':>13}{'ratio':>7}{'default MB':>12}"
        f"{'ratio':>7}{'ms':>7}{'ratio':>7}"
    )
    rows: dict[tuple[str, float | None], Row] = {}
    for network in networks:
        with tempfile.TemporaryDirectory() as folder:
            estimates, paths = [], []
            for budget in BUDGETS:
                step = graphopt.compile(
                    NETWORKS[network](),
                    training=passes.TrainingMode(),
                    loss=passes.CrossEntropy(axis=-1),
                    recompute=passes.Recompute(budget, batch),
                    optimizer=passes.AdamW(),
                )
                paths.append(f"{folder}/{budget}.onnx")
                graphopt.save(step, paths[-1])
                estimates.append(estimate(step, batch).step)
            taken = times(paths, batch, threads, rounds)
            for i, (budget, path) in enumerate(zip(BUDGETS, paths, strict=True)):
                low, usual = (apart(path, batch, threads, low) for low in (1, 0))
                slower = statistics.median(each[i] / each[0] for each in taken)
                seconds = statistics.median(each[i] for each in taken)
                row = rows[network, budget] = Row(estimates[i], low, usual, seconds, slower)
                plain = rows[network, 1.0]
                print(
                    f"{network:<9}{budget or 'least':>7}{row.estimated / 1e6:>14.1f}{row.measured / 1e6:>13.1f}"
                    f"{row.measured / plain.measured:>7.2f}{row.by_default / 1e6:>12.1f}"
                    f"{row.by_default / plain.by_default:>7.2f}{1e3 * row.seconds:>7.0f}{row.slower:>7.2f}",
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--grown", nargs=4, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    one = options.pop("grown")
    if one:
        print(grown(one[0], *map(int, one[1:3]), low_memory=one[3] == "1"))
    else:
        main(**options)
