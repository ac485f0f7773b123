"""Measure what lowering steps to the machine costs and saves, on the workloads of the benchmark against peers.

Times of opening an executor are with the cache folder warm. `compare` is what the first step takes longer because it is
compared with the plain step. Step times are medians of rounds in which both forms take
turns.

Run it: python examples/benchmarks/native.py [--workloads mlp-wide resnet ...] [--threads 1] [--rounds 7]
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import graphopt
import passes
from graphopt.targets.native.lowering import plan

sys.path.append(str(Path(__file__).parent / "peers"))
import workloads

OPTIMIZERS = {
    "linear": passes.SGD(0.01),
    "resnet": passes.SGD(3e-3, momentum=0.9),
}
SECONDS = 0.3  # of a round


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def measured(name: str, threads: int, rounds: int) -> dict[str, float]:
    """Return what is known of one workload; all times are in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        workloads.write(Path(folder), name)
        work = workloads.workload(name)
        loss = passes.CrossEntropy() if work.classes else passes.MeanSquaredError()
        optimizer = OPTIMIZERS.get(name, passes.AdamW(3e-4, weight_decay=0.01))
        model = Path(folder, f"{name}.onnx")
        step = graphopt.compile(model, training=passes.TrainingMode(), loss=loss, optimizer=optimizer)
        with np.load(Path(folder, f"{name}.data.npz")) as data:
            batch = {"x": data["x"][0], "target": data["target"][0]}

    def opened(native: bool, verify: bool = False) -> graphopt.Executor:
        return graphopt.Executor(step, threads=threads, report=["loss"], native=native, verify=verify)

    def first(verify: bool) -> float:
        executor = opened(True, verify)
        return seconds(lambda: executor.step(batch))

    planned = plan(step)
    found = {
        "nodes": len(step.graph),
        "lowered": len(planned.model.graph),
        "functions": len({kernel.name for kernel in planned.kernels}),
        "cold": seconds(lambda: opened(True)),
        "open plain": statistics.median(seconds(lambda: opened(False)) for _ in range(rounds)),
        "open": statistics.median(seconds(lambda: opened(True)) for _ in range(rounds)),
    }
    compared, alone = (statistics.median(first(kind) for _ in range(rounds)) for kind in (True, False))
    found["compare"] = compared - alone
    forms = {"plain": opened(False), "native": opened(True)}
    losses = {form: executor.step(batch)["loss"] for form, executor in forms.items()}
    np.testing.assert_allclose(losses["native"], losses["plain"], rtol=1e-5)
    times: dict[str, list[float]] = {form: [] for form in forms}
    repeats = max(1, int(SECONDS / seconds(lambda: forms["plain"].step(batch), 3)))
    for _ in range(rounds):
        for form, executor in forms.items():
            times[form].append(seconds(functools.partial(executor.step, batch), repeats))
    return found | {form: statistics.median(taken) for form, taken in times.items()}


def main(
    names: Sequence[str] = tuple(workloads.WORKLOADS), threads: int = 1, rounds: int = 7
) -> dict[str, dict[str, float]]:
    """Print a line per workload, and return what was measured."""
    print(
        "| workload | nodes | lowered | functions | first open, s | warm open | plain open | compare, s "
        "| step, us | plain | ratio |"
    )
    print("| --- |" + " ---: |" * 10)
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            for name in names:
                x = results[name] = measured(name, threads, rounds)
                opening = f"{x['cold']:.2f} | {x['open']:.2f} | {x['open plain']:.2f} | {x['compare']:.2f}"
                steps = f"{1e6 * x['native']:,.0f} | {1e6 * x['plain']:,.0f} | {x['plain'] / x['native']:.2f}"
                sizes = f"{x['nodes']:.0f} | {x['lowered']:.0f} | {x['functions']:.0f}"
                print(f"| {name} | {sizes} | {opening} | {steps} |", flush=True)
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", default=[*workloads.WORKLOADS], dest="names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    main(**vars(parser.parse_args()))
