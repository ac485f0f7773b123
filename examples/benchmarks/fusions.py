"""Measure each rewriting of a target on ONNX Runtime and on compiled kernels: which of them belongs to which target.

A row compares a step with one rewriting more, or one less, than the target has. Times are medians of rounds in which
both forms take turns; a ratio above 1 says that the rewriting helps. Nodes are those that are left for ONNX Runtime.

Run it: python examples/benchmarks/fusions.py [--workloads cnn resnet ...] [--threads 1] [--rounds 7]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

import graphopt
import passes
from graphopt.targets.onnxruntime.fuse import FUSIONS
from graphopt.targets.target import ONNXRUNTIME, TARGETS
from graphopt.targets.updates import UPDATES

sys.path.append(str(Path(__file__).parent / "peers"))
import workloads

OPTIMIZERS = {"SGD": passes.SGD(1e-3), "AdamW": passes.AdamW(3e-4, weight_decay=0.01)}
SECONDS = 0.3  # of a round


def compiled(folder: Path, name: str, optimizer: str) -> ir.Model:
    """Return the plain step of a workload."""
    work = workloads.workload(name)
    return graphopt.compile(
        folder / f"{name}.onnx",
        training=passes.TrainingMode(),
        loss=passes.CrossEntropy() if work.classes else passes.MeanSquaredError(),
        optimizer=OPTIMIZERS[optimizer],
    )


def without(names: Sequence[str]) -> passes.Fuse:
    """Return the fusions without some."""
    return passes.Fuse(leave_out=list(names))


def alternating(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median time of each call in seconds, from rounds in which they take turns."""

    def seconds(call: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    repeats = max(1, int(SECONDS / max(seconds(call, 3) for call in calls)))
    times = [[seconds(call, repeats) for call in calls] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def changes(before: ir.Model, after: ir.Model) -> bool:
    """Return whether two graphs differ in their operators."""
    return [node.op_type for node in before.graph] != [node.op_type for node in after.graph]


def on_onnxruntime(step: ir.Model, name: str) -> tuple[ir.Model, ir.Model]:
    """Return a step without and with a rewriting, among all others of the target."""
    return graphopt.lower(step, graphopt.Target("other", graphopt.Pipeline(fuse=without([name])))), (
        ONNXRUNTIME.lower(step)
    )


def on_kernels(step: ir.Model, name: str) -> tuple[ir.Model, ir.Model]:
    """Return a plain step without and with a rewriting, which kernels are then made of."""
    others = [other for other in FUSIONS if other != name]
    alone = graphopt.lower(step, graphopt.Target("alone", graphopt.Pipeline(fuse=without(others))))
    return step, alone


def row(step: ir.Model, name: str, batch: dict[str, np.ndarray], threads: int, rounds: int) -> str:
    """Return what a rewriting does to a step on both targets, or an empty text if it does nothing."""
    cells = []
    for target, (before, after) in (
        ("plain", on_onnxruntime(step, name)),
        ("native", on_kernels(step, name)),
    ):
        if not changes(before, after):
            cells += ["-", "-"]
            continue
        executors = [
            graphopt.Executor(model, threads=threads, report=["loss"], target=target, verify=False)
            for model in (before, after)
        ]
        slow, fast = alternating([functools.partial(one.step, batch) for one in executors], rounds)
        nodes = [len(TARGETS[target].lower(model).graph) for model in (before, after)]
        cells += [f"{slow / fast:.2f}", f"{nodes[0]} {nodes[1]}"]
    return "" if cells == ["-"] * 4 else " | ".join(cells)


def main(names: Sequence[str] = tuple(workloads.WORKLOADS), threads: int = 1, rounds: int = 7) -> list[str]:
    """Print a table row for each rewriting that changes a workload, and return the rows."""
    print("| workload | optimizer | rewriting | ONNX Runtime | nodes | kernels | nodes | in both |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | --- |")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            workloads.write(Path(folder), name)
            with np.load(Path(folder, f"{name}.data.npz")) as data:
                batch = {"x": data["x"][0], "target": data["target"][0]}
            for optimizer in OPTIMIZERS:
                step = compiled(Path(folder), name, optimizer)
                for fusion in FUSIONS:
                    cells = row(step, fusion, batch, threads, rounds)
                    if cells:
                        rows.append(f"| {name} | {optimizer} | {fusion} | {cells} | {'yes' * (fusion in UPDATES)} |")
                        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", default=[*workloads.WORKLOADS], dest="names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    main(**vars(parser.parse_args()))
