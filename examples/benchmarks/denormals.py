"""Measure steps before and after moments decay to denormal numbers, with and without `flush_denormals`.

Each batch reads 8 rows of an embedding with 4000 rows of 16 numbers. The first 500 steps read each row once, all later
steps the first eight rows. The moments of the other rows decay by a factor in each step until they are denormal.

Run it: python examples/benchmarks/denormals.py [--steps 20000] [--threads 1]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import onnx

import graphopt
import passes

ROWS, WIDTH, BATCH, TIMED = 4000, 16, 8, 200
OPTIMIZERS = {
    "SGD, momentum 0.9": passes.SGD(0.01, momentum=0.9),
    "Adam, beta2 0.9": passes.Adam(0.01, beta2=0.9),
    "AdamW": passes.AdamW(0.01),
}


def embedding() -> onnx.ModelProto:
    """Return a model of an embedding: y is the rows x of a table."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 21]>
        g (int64[N] x) => (float[N,{WIDTH}] y) {{ y = Gather(table, x) }}"""
    )
    table = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    return proto


def microseconds(executor: graphopt.Executor, first: int, steps: int) -> float:
    """Return the median time of some steps; step n reads the rows from n * BATCH on, or the first rows."""
    target = np.zeros((BATCH, WIDTH), np.float32)
    times = []
    for step in range(first, first + steps):
        x = np.arange(BATCH) + (step * BATCH if (step + 1) * BATCH <= ROWS else 0)
        start = time.perf_counter()
        executor.step(x=x, target=target)
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times))


def main(steps: int = 20000, threads: int = 1) -> dict[tuple[str, bool], tuple[float, float]]:
    """Print a line per optimizer and option; return the microseconds of the first and last steps."""
    print(f"| optimizer | flush_denormals | us, first {TIMED} steps | us, last {TIMED} of {steps:,} | ratio |")
    print("| --- | --- | ---: | ---: | ---: |")
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        step = graphopt.compile(embedding(), loss=passes.MeanSquaredError(), optimizer=optimizer)
        for flush in (False, True):
            executor = graphopt.Executor(step, threads=threads, report=["loss"], flush_denormals=flush)
            first = microseconds(executor, 0, TIMED)
            microseconds(executor, TIMED, steps - 2 * TIMED)
            last = microseconds(executor, steps - TIMED, TIMED)
            print(f"| {name} | {flush} | {first:.0f} | {last:.0f} | {last / first:.2f} |", flush=True)
            found[name, flush] = first, last
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--threads", type=int, default=1)
    main(**vars(parser.parse_args()))
