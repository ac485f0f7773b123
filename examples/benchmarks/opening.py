"""Count the steps that a fresh process with an empty cache trains in a minute, with `native=auto` and without kernels.

The minute begins when the executor opens; importing and compiling are the same in both and do not count. A pause is
how much longer than the median of its neighbours a later step takes.

Run it: python examples/benchmarks/opening.py [MODEL.onnx ...] [--seconds 60] [--threads 1] [--batch 8]

Models are classifiers whose first input has the batch as its first axis. Without one, a perceptron and a deep one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import graphopt
import passes
from graphopt import models

HEADER = (
    "model",
    "nodes",
    "opened, first step (s)",
    "kernels after (s)",
    "longest pause (ms)",
    "step without kernels, last step (ms)",
    "steps without kernels",
    "steps with auto",
    "ratio",
)


def batch_of(path: Path, rows: int, classes: int = 4) -> dict[str, np.ndarray]:
    """Return a random batch for a classifier's training graph."""
    graph, rng = onnx.load(path, load_external_data=False).graph, np.random.default_rng(0)
    x = graph.input[0]
    dims = [rows, *(dim.dim_value or 1 for dim in x.type.tensor_type.shape.dim[1:])]
    is_float = x.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    target = next(x for x in graph.input if x.name == "target")
    shape = [rows, *(dim.dim_value or dims[1] for dim in target.type.tensor_type.shape.dim[1:])]
    first = rng.standard_normal(dims).astype(np.float32) if is_float else rng.integers(0, 60, dims)
    return {x.name: first, "target": rng.integers(0, classes, shape)}


def child(path: Path, native: str, seconds: float, threads: int, rows: int) -> None:
    """Train in this process, and print what happened as JSON."""
    batch = batch_of(path, rows)
    begun = time.perf_counter()
    executor = graphopt.Executor(
        path, report=["loss"], native={"auto": "auto", "false": False}[native], threads=threads
    )
    ends, kernels = [time.perf_counter() - begun], None
    while ends[-1] < seconds or len(ends) == 1:
        executor.step(batch)
        ends.append(time.perf_counter() - begun)
        if kernels is None and any(
            node.domain == "ai.graphopt" for node in executor._steps.runner.forms[0].model.graph
        ):
            kernels = ends[-1]
    times = np.diff(ends).tolist()
    usual = [statistics.median(times[max(0, i - 5) : i + 6]) for i in range(len(times))]
    pause = max((t - u for t, u in zip(times[1:], usual[1:], strict=True)), default=0.0)
    last = statistics.median(times[-20:])
    print(json.dumps({"opened": ends[1], "kernels": kernels, "pause": pause, "last": last, "steps": len(times)}))


def trained(path: Path, native: str, options: argparse.Namespace) -> dict[str, float]:
    """Train in a fresh process with an empty cache."""
    facts = [str(path), "--child", native, f"--seconds={options.seconds}", f"--threads={options.threads}"]
    with tempfile.TemporaryDirectory() as cache:
        found = subprocess.run(
            [sys.executable, __file__, *facts, f"--batch={options.batch}"],
            env={**os.environ, "XDG_CACHE_HOME": cache, "LOCALAPPDATA": cache, "GRAPHOPT_NATIVE": "auto"},
            stdout=subprocess.PIPE,
            check=True,
        )
    return json.loads(found.stdout)


def row(name: str, model: str | Path | ir.Model, options: argparse.Namespace) -> list[str]:
    """Return the numbers of a model."""
    step = graphopt.compile(
        model, training=passes.TrainingMode(), loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.onnx"
        graphopt.save(step, path)
        plain, auto = trained(path, "false", options), trained(path, "auto", options)
    kernels = "-" if auto["kernels"] is None else f"{auto['kernels']:.1f}"
    return [
        *(name, f"{len(step.graph)}", f"{auto['opened']:.2f}", kernels, f"{1e3 * auto['pause']:.0f}"),
        f"{1e3 * plain['last']:.1f}, {1e3 * auto['last']:.1f}",
        *(f"{plain['steps']}", f"{auto['steps']}", f"{auto['steps'] / plain['steps']:.2f}"),
    ]


def main(*arguments: str) -> list[list[str]]:
    """Print a table, and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.models[0], options.child, options.seconds, options.threads, options.batch)
        return []
    wanted = [(path.stem, path) for path in options.models] or [
        ("perceptron 64-256-256-4", models.mlp((64,), 4, hidden=(256, 256))),
        ("perceptron of 60 layers of 64", models.mlp((64,), 4, hidden=(64,) * 60)),
    ]
    print("| " + " | ".join(HEADER) + " |\n| ---" + " | ---:" * (len(HEADER) - 1) + " |")
    rows = []
    for name, model in wanted:
        rows.append(row(name, model, options))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
