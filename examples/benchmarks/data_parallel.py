"""Measure how much faster several processes of one thread train than one, and predict it from the bytes they exchange.

Each process trains on batches of the same size, so that N processes train on N times as many rows in a step. They
share one state in memory, or each has a copy and they sum their gradients, as on several machines. BatchNormalization
normalizes by the statistics of all rows, or of a worker's own ones. PyTorch's DistributedDataParallel runs beside them,
on gloo and with own statistics; its rows per second are divided by those of one process of graphopt. The prediction is
the step of one process, times the processes on each core, plus the time to sum the gradients, measured alone, for
copies.

The second table has machines that a network connects. As root on Linux, two are made of network namespaces, each with
one core. The time of a ring all-reduce is predicted as 2 (N - 1) / N times the
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import graphopt
import passes
from graphopt.distributed.launchers import ANY_CORE, AS_ROOT
from graphopt.graph.memory import bytes_of
from graphopt.graph.roles import Role, with_role

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))
import machines
import workloads

MODELS = ("mlp-wide", "cnn", "resnet")  # of workloads.py; the batch is that of one process
OWN = "shared, own statistics"  # of the network with BatchNormalization
TORCH = "PyTorch DDP"
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


def worker(name: str, form: str, address: str | None) -> None:
    """Print the seconds of a step and of the sum of the gradients, and the bytes of the latter."""
    communicator = graphopt.MPI()
    work = workloads.workload(name)
    random = np.random.default_rng(communicator.rank)
    x = random.standard_normal((work.batch, *work.row), np.float32)
    target = random.integers(0, work.classes, work.batch)
    model, _ = workloads.model(work)
    pipeline = graphopt.standard(
        loss=passes.CrossEntropy(), training=passes.TrainingMode(), optimizer=passes.AdamW(1e-3)
    )
    whose: Any = "local" if form == OWN else "synchronized"
    halves = graphopt.split_step(pipeline, model, statistics=whose)
    parameters = with_role(halves.step, Role.PARAMETER)
    numbers, summed = np.zeros(sum(map(bytes_of, parameters)) // 4, np.float32), 0.0
    if form == TORCH:
        step = per_call(torch_step(name, communicator, x, target, address), communicator)
    else:
        executor = graphopt.DataParallel(
            halves,
            communicator=communicator,
            threads=1,
            report=["loss"],
            share_state=form in ("shared", OWN),
        )
        step = per_call(lambda: executor.step(x=x, target=target), communicator)
        if communicator.size > 1 and not executor.share_state:
            summed = per_call(lambda: communicator.sum(numbers), communicator)
    if communicator.leads:
        print("FOUND", json.dumps({"step": step, "sum": summed, "bytes": numbers.nbytes}), flush=True)


def torch_step(
    name: str, communicator: graphopt.MPI, x: np.ndarray, target: np.ndarray, address: str | None
) -> Callable[[], float]:
    """Return a step of PyTorch's DistributedDataParallel on the backend gloo."""
    import torch
    import torch_peer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        workloads.write(Path(folder), name)
        network = torch_peer.network(torch_peer.Job(Path(folder), name, "adamw"))
    if communicator.size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if address else "lo"
        place = f"tcp://{address or '127.0.0.1'}:29555"
        torch.distributed.init_process_group("gloo", place, rank=communicator.rank, world_size=communicator.size)
        network = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
    rows, labels = torch.from_numpy(x), torch.from_numpy(target)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(rows), labels)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def measured(name: str, workers: int, state: str, network: machines.Machines | None = None) -> dict[str, float]:
    beside = str(Path(sys.executable).parent)
    mpiexec = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec") or "mpiexec"
    program = [sys.executable, __file__, "--worker", name, "--state", state]
    if network:
        run = network.start(mpiexec, *program, "--address", network.address(0))
    else:
        environment = {**ANY_CORE, **AS_ROOT, **os.environ}
        command = [mpiexec, "-n", str(workers), *program]
        run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
        states = ["shared", "copies", *([OWN] if name == "resnet" else [])]
        forms = [(1, "one"), *((n, state) for n in workers for state in states)]
        forms += [(n, TORCH) for n in (1, *workers)]
        found: dict[tuple[int, str], list[dict[str, float]]] = {form: [] for form in forms}
        for _ in range(rounds):
            for (n, state), runs in found.items():
                runs.append(measured(name, n, state))
        title = workloads.workload(name).title
        ones = found[1, "one"]
        one = statistics.median(run["step"] for run in ones)
        singles[name] = one, int(ones[0]["bytes"])
        for (n, state), runs in found.items():
            step, total = (statistics.median(run[key] for run in runs) for key in ("step", "sum"))
            expected = "" if state == TORCH else f"{n * one / (one * max(1, n / cores) + total):.2f}"
            print(
                f"| {title} | {n} | {state} | {1e3 * step:.2f} | {1e3 * total:.2f} | {faster(n, ones, runs):.2f} "
                f"| {expected} |",
                flush=True,
            )
    print("\n| model | MB | machines | Gbit/s | ms to sum, predicted | measured", end=" ")
    print("| rows/s by those of one, predicted | measured | PyTorch DDP |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, (one, size) in singles.items():
        for rate in NETWORKS:
            for n in (2, 8):
                sent = 2 * (n - 1) / n * size * 8 / (rate * 1e9)
                cells = [""] * 3
                if n == 2 and rate < NETWORKS[-1] and machines.can_build():
                    cells = between_two_machines(name, rate, rounds)
                title = workloads.workload(name).title
                print(
                    f"| {title} | {size / 1e6:.1f} | {n} | {rate} | {1e3 * sent:.2f} | {cells[0]} "
                    f"| {n * one / (one + sent):.2f} | {' | '.join(cells[1:])} |",
                    flush=True,
                )


def between_two_machines(name: str, rate: int, rounds: int) -> list[str]:
    """Return the milliseconds to sum, and the rows per second by those of one: ours, and PyTorch's."""
    found: dict[str, list[dict[str, float]]] = {"one": [], "copies": [], TORCH: []}
    with machines.machines(2, f"{rate}gbit") as network:
        for _ in range(rounds):
            for state, runs in found.items():
                place = (1, state) if state == "one" else (network.count, state, network)
                runs.append(measured(name, *place))
    total = statistics.median(run["sum"] for run in found["copies"])
    ratios = (faster(2, found["one"], found[state]) for state in ("copies", TORCH))
    return [f"{1e3 * total:.2f}", *(f"{ratio:.2f}" for ratio in ratios)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.state, options.address)
    else:
        main(options.rounds, tuple(options.workers))
