"""Show where a step's time goes on a GPU by WebGPU: calls, copies, kernels, reads, and the slowest operators.

One call records and submits a step, and one read waits for it. ONNX Runtime's profile has the nodes, the copies
between host and device, and, with the package onnxruntime-webgpu, the time of each kernel on the device, if the adapter
measures it. Without a GPU, the software adapter of Debian's package chromium computes: the counts are those of any
adapter, the times are not.

Run it: python examples/benchmarks/webgpu.py [--rounds 20] [--networks mlp cnn transformer]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from adapter import software_adapter

import graphopt
import passes
from graphopt import models

WEBGPU = "WebGpuExecutionProvider"


def workloads() -> dict[str, tuple[Any, Any, np.ndarray, np.ndarray]]:
    """Return models, losses, inputs and targets, by name."""
    random = np.random.default_rng(0)
    images = random.standard_normal((32, 1, 16, 16), np.float32)
    labels, tokens = random.integers(0, 10, 32), random.integers(0, 100, (32, 32))
    mlp, cnn = models.mlp((1, 16, 16), 10, hidden=(256, 128)), models.cnn((1, 16, 16), 10)
    of_tokens = models.transformer((32,), 100), passes.CrossEntropy(axis=-1), tokens, tokens[:, ::-1].copy()
    return {
        "mlp": (mlp, passes.CrossEntropy(), images, labels),
        "cnn": (cnn, passes.CrossEntropy(), images, labels),
        "transformer": of_tokens,
    }


def opened(step: Any, profile: Path | None = None, **options: Any) -> graphopt.Executor:
    """Return an executor on the GPU that writes a profile if it gets a path."""
    plain = graphopt.Device.new_session_options

    def profiled(device: graphopt.Device, **keywords: bool) -> Any:
        chosen = plain(device, **keywords)
        if device.kind == "webgpu":
            chosen.enable_profiling, chosen.profile_file_prefix = True, str(profile)
        return chosen

    graphopt.Device.new_session_options = profiled if profile else plain  # type: ignore[method-assign]
    try:
        return graphopt.Executor(step, device="webgpu", report=["loss"], **options)
    finally:
        graphopt.Device.new_session_options = plain  # type: ignore[method-assign]


def times(executor: graphopt.Executor, feeds: dict[str, np.ndarray], rounds: int) -> tuple[float, float]:
    """Return the medians, in milliseconds, of a step and of the call in it that submits its commands."""
    calls: list[float] = []
    for _ in range(3):
        executor.step(feeds)
    session = executor._steps.runner.forms[0].session
    execute = session.execute

    def timed(*arguments: Any) -> None:
        start = time.perf_counter()
        execute(*arguments)
        calls.append(time.perf_counter() - start)

    session.execute = timed  # type: ignore[method-assign]
    steps = []
    for _ in range(rounds):
        start = time.perf_counter()
        executor.step(feeds)
        steps.append(time.perf_counter() - start)
    session.execute = execute  # type: ignore[method-assign]
    return 1e3 * statistics.median(steps), 1e3 * statistics.median(calls)


def profiled(step: Any, feeds: dict[str, np.ndarray], steps: int = 4) -> tuple[Counter[str], Counter[str], int]:
    """Return per step: counts of nodes and copies, milliseconds of kernels by operator, and reads of the device."""
    with tempfile.TemporaryDirectory() as folder:
        executor = opened(step, Path(folder) / "profile", verify=False)
        executor.step(feeds)
        value = executor._device.ort.OrtValue
        reads, numpy = Counter[str](), value.numpy

        def counted(self: Any) -> np.ndarray:
            reads[self.device_name()] += 1
            return numpy(self)

        value.numpy = counted
        for _ in range(steps):
            executor.step(feeds)
        value.numpy = numpy
        session = executor._steps.runner.forms[0].session.ort
        events = json.loads(Path(session.end_profiling()).read_text())
    runs = sum(event["name"] == "model_run" for event in events)
    counts, kernels = Counter[str](), Counter[str]()
    for event in events:
        node = event.get("args", {})
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            counts[node["op_name"] if node["op_name"].startswith("Memcpy") else node["provider"]] += 1
        if event["cat"] == "Api" and event["name"].count("&") == 2:
            kernels[event["name"].split("&")[1]] += event["dur"]
            counts["kernels"] += 1
    average = Counter({name: round(count / runs) for name, count in counts.items()})
    return average, Counter({name: us / 1e3 / runs for name, us in kernels.items()}), reads.total() // steps


def main(rounds: int = 20, networks: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Print a table, and the operators that take longest; return the numbers."""
    if reason := software_adapter():
        raise SystemExit(reason)
    found: dict[str, dict[str, Any]] = {}
    for name, (model, loss, x, target) in workloads().items():
        if networks and name not in networks:
            continue
        step = graphopt.compile(model, loss=loss, optimizer=passes.AdamW(1e-3))
        plain = opened(step)
        feeds = dict(zip(plain.inputs, (x, target), strict=True))
        whole, call = times(plain, feeds, rounds)
        captured, _ = times(opened(step, graph_capture=True), feeds, rounds)
        counts, kernels, reads = profiled(step, feeds)
        found[name] = {
            "step, ms": whole,
            "its call": call,
            "its kernels": kernels.total() or None,
            "captured": captured,
            "nodes": counts[WEBGPU],
            "kernels": counts["kernels"] or None,
            "on the CPU": counts["CPUExecutionProvider"],
            "copies to the GPU": counts["MemcpyFromHost"] + len(feeds),
            "copies back": counts["MemcpyToHost"],
            "reads": reads,
            "slowest": kernels.most_common(5),
        }
    titles = [title for title in next(iter(found.values())) if title != "slowest"]
    print(f"| | {' | '.join(titles)} |\n| --- |{' ---: |' * len(titles)}")
    for name, row in found.items():
        cells = [row[title] for title in titles]
        texts = ["" if x is None else f"{x:.1f}" if isinstance(x, float) else str(x) for x in cells]
        print(f"| {name} | {' | '.join(texts)} |")
    for name, row in found.items():
        slowest = ", ".join(f"{operator} {ms:.1f}" for operator, ms in row["slowest"])
        print(f"\n{name}: {slowest or 'the runtime does not tell'} (ms a step)")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--networks", nargs="*")
    main(**vars(parser.parse_args()))
