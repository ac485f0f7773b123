"""Measure how much faster several processes of one thread train than one, and predict it from the bytes they exchange.

Each process trains on batches of the same size, so that N processes train on N times as many rows in a step. They
share one state in memory, or each has a copy and they sum their gradients, as on several machines. BatchNormalization
normalizes by the statistics of all rows, or of a worker's own ones. The prediction is the step of one process, times
the processes on each core, plus the time to sum the gradients, measured alone, for copies.

The second table has machines that a network connects. As root on Linux, two are made of network namespaces, each with
one core, and measured with and without `overlap`. The time of a ring all-reduce is predicted as 2 (N - 1) / N times the
bytes by the rate (Patarasuk, Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations).

Run it: python examples/benchmarks/data_parallel.py [--rounds 5] [--workers 2 4]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import graphopt
import passes
from graphopt import models
from graphopt.distributed.launchers import ANY_CORE, AS_ROOT

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))
import machines
import workloads

RESIDUAL = workloads.workload("resnet")
MODELS: dict[str, tuple[Any, tuple[int, ...], int]] = {  # model, shape of a row, rows of a process's batch
    "wide MLP 784-1024-1024-10": (models.mlp((784,), 10, hidden=(1024, 1024)), (784,), 128),
    "CNN 28x28, 32 and 64 channels": (
        models.cnn((1, 28, 28), 10, channels=(32, 64), hidden=128),
        (1, 28, 28),
        64,
    ),
    "residual network 32x32, 15 BatchNormalizations": (
        workloads.model(RESIDUAL)[0],
        RESIDUAL.row,
        RESIDUAL.batch,
    ),
}
NORMALIZED = list(MODELS)[-1]
OWN = "shared, own statistics"
NETWORKS = (1, 10, 100)  # Gbit/s
SECONDS = 2.0  # of each measurement


def per_call(call: Any, communicator: graphopt.MPI) -> float:
    """Return the seconds of a call, from as many as fill `SECONDS`; all workers make the same number."""
    for _ in range(5):
        call()
    start = time.perf_counter()
    call()
    took = np.array([time.perf_counter() - start])
    communicator.sum(took)
    calls = max(10, round(SECONDS * communicator.size / float(took[0])))
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def worker(name: str, form: str) -> None:
    """Print the seconds of a step and of the sum of the gradients, and the bytes of the latter."""
    communicator = graphopt.MPI()
    model, shape, rows = MODELS[name]
    pipeline = graphopt.standard(
        loss=passes.CrossEntropy(), training=passes.TrainingMode(), optimizer=passes.AdamW(1e-3)
    )
    executor = graphopt.DataParallel(
        graphopt.split_step(
            pipeline,
            model,
            statistics="local" if form == OWN else "synchronized",
            overlap=form == "overlap",
        ),
        communicator=communicator,
        threads=1,
        report=["loss"],
        share_state=form in ("shared", OWN),
    )
    random = np.random.default_rng(communicator.rank)
    batch = {
        "x": random.standard_normal((rows, *shape), np.float32),
        "target": random.integers(0, 10, rows),
    }
    step = per_call(lambda: executor.step(batch), communicator)
    numbers = np.zeros(sum(array.size for array in executor.parameters.values()), np.float32)
    summed = 0.0
    if communicator.size > 1 and not executor.share_state:
        summed = per_call(lambda: communicator.sum(numbers), communicator)
    if communicator.leads:
        found = {"step": step, "sum": summed, "bytes": numbers.nbytes, "rows": rows * communicator.size}
        print("FOUND", json.dumps(found), flush=True)


def measured(
    name: str, workers: int, state: str, network: machines.Machines | None = None
) -> dict[str, float]:
    beside = str(Path(sys.executable).parent)
    mpiexec = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec") or "mpiexec"
    program = [sys.executable, __file__, "--worker", name, "--state", state]
    if network:
        run = network.start(mpiexec, *program)
    else:
        environment = {**ANY_CORE, **AS_ROOT, **os.environ}
        command = [mpiexec, "-n", str(workers), *program]
        run = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    out, err = run.communicate()
    if not (found := re.findall(r"FOUND (.*)", out)):
        raise RuntimeError(err)
    result: dict[str, float] = json.loads(found[0])
    return result


def faster(workers: int, ones: list[dict[str, float]], runs: list[dict[str, float]]) -> float:
    """Return the rows per second of several workers by those of one, the median over rounds."""
    return statistics.median(workers * one["step"] / run["step"] for one, run in zip(ones, runs, strict=True))


def main(rounds: int = 5, workers: tuple[int, ...] = (2, 4)) -> None:
    """Print a table of processes on this machine, and one of machines that a network connects."""
    cores = os.cpu_count() or 1
    singles = {}
    print("| model | workers | state | ms a step | ms to sum | rows/s by those of one | predicted |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for name in MODELS:
        states = ["shared", "copies", *([OWN] if name == NORMALIZED else [])]
        forms = [(1, "one"), *((n, state) for n in workers for state in states)]
        found: dict[tuple[int, str], list[dict[str, float]]] = {form: [] for form in forms}
        for _ in range(rounds):
            for (n, state), runs in found.items():
                runs.append(measured(name, n, state))
        ones = found[1, "one"]
        one = statistics.median(run["step"] for run in ones)
        singles[name] = one, int(ones[0]["bytes"])
        for (n, state), runs in found.items():
            step, total = (statistics.median(run[key] for run in runs) for key in ("step", "sum"))
            expected = n * one / (one * max(1, n / cores) + total)
            print(
                f"| {name} | {n} | {state} | {1e3 * step:.2f} | {1e3 * total:.2f} | {faster(n, ones, runs):.2f} "
                f"| {expected:.2f} |",
                flush=True,
            )
    print(
        "\n| model | MB | machines | Gbit/s | ms to sum | measured | rows/s by those of one | measured | overlap |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, (one, size) in singles.items():
        for rate in NETWORKS:
            for n in (2, 8):
                sent = 2 * (n - 1) / n * size * 8 / (rate * 1e9)
                cells = ["", "", ""]
                if n == 2 and rate < NETWORKS[-1] and machines.can_build():
                    cells = between_two_machines(name, rate, rounds)
                print(
                    f"| {name} | {size / 1e6:.1f} | {n} | {rate} | {1e3 * sent:.2f} | {cells[0]} "
                    f"| {n * one / (one + sent):.2f} | {cells[1]} | {cells[2]} |",
                    flush=True,
                )


def between_two_machines(name: str, rate: int, rounds: int) -> list[str]:
    """Return the milliseconds to sum, and the rows per second by those of one, without overlap and with it."""
    found: dict[str, list[dict[str, float]]] = {"one": [], "copies": [], "overlap": []}
    with machines.machines(2, f"{rate}gbit") as network:
        for _ in range(rounds):
            for state, runs in found.items():
                runs.append(measured(name, 1, state, network if state != "one" else None))
    total = statistics.median(run["sum"] for run in found["copies"])
    ratios = (faster(2, found["one"], found[state]) for state in ("copies", "overlap"))
    return [f"{1e3 * total:.2f}", *(f"{ratio:.2f}" for ratio in ratios)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.state)
    else:
        main(options.rounds, tuple(options.workers))
