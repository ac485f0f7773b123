"""Define the protocol of peers: a JSON line when ready, and a JSON line of times for each line of standard input.

A peer passes to `serve` a function that takes a job and returns `step(i)`, which trains on batch i and returns the loss
as a Python number. The first line contains the losses of 20 steps, the seconds until the end of the first step, and
the rows of a batch. Each other line contains microseconds per step, one number per 20 ms, and the peak memory of the
process in MB. A line of input is the number of seconds to run.

Run a peer directly: echo 1 | python torch_peer.py FOLDER mlp-small adamw --threads 1
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

RATES = {"sgd": 0.02, "momentum": 3e-3, "adamw": 3e-4}  # momentum 0.9; AdamW as in PyTorch, weight decay 0.01
LOSS_SCALE = 2.0**10  # initial, for float16: it skips no step
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
STRETCH = 0.02

Step = Callable[[int], float]


@dataclass(frozen=True)
class Job:
    """Describe a job: the files of a workload, the optimizer `sgd`, `momentum` or `adamw`, and a variant of the peer.

    Args:
        threads: the number of threads; 0 for the peer's default.
        variant: words; `cuda`: on the GPU; a precision, in place of `float32`: `tf32` (float32, of which products read
            10 bits), `bfloat16` or `float16` (mixed precision).
    """

    folder: Path
    workload: str
    optimizer: str
    threads: int = 1
    variant: str = ""

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(self.variant.split())

    @property
    def device(self) -> str:
        return "cuda" if "cuda" in self.words else "cpu"

    @property
    def precision(self) -> str:
        return next((name for name in PRECISIONS if name in self.words), "float32")

    @property
    def family(self) -> str:
        return self.workload.split("-")[0]

    @property
    def rate(self) -> float:
        return RATES[self.optimizer]

    @property
    def model(self) -> str:
        return str(self.folder / f"{self.workload}.onnx")

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / f"{self.workload}.weights.npz"))

    @cached_property
    def data(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the batches: x, and targets, which are integers for classes and floating-point numbers otherwise."""
        arrays = np.load(self.folder / f"{self.workload}.data.npz")
        return list(zip(arrays["x"], arrays["target"], strict=True))

    @property
    def classifies(self) -> bool:
        return self.data[0][1].dtype == np.int64

    @property
    def depth(self) -> int:
        """Return the number of layers of a perceptron."""
        return sum(name.endswith(".weight") for name in self.weights)


def run(step: Step, first: int, count: int) -> float:
    """Return the seconds of some steps."""
    start = time.perf_counter()
    for i in range(first, first + count):
        step(i)
    return time.perf_counter() - start


def measure(step: Step, batches: int, seconds: float) -> list[float]:
    """Return microseconds per step for several stretches of steps; the first stretch is a warm-up."""
    count = 1
    while count < 1 << 14 and (taken := run(lambda i: step(i % batches), 0, count)) < STRETCH:
        count = min(max(2 * count, int(count * STRETCH / taken)), 1 << 14)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        found.append(1e6 * run(lambda i: step(i % batches), 0, count) / count)
    return found


def losses(build: Callable[[Job], Step], job: Job) -> tuple[Step, list[float], float]:
    """Return the result of `build`, the losses of a step on each batch, and the seconds until the first loss."""
    batches = len(job.data)
    start = time.perf_counter()
    step = build(job)
    curve = [step(0)]
    seconds = time.perf_counter() - start
    return step, curve + [step(i) for i in range(1, batches)], seconds


def say(**said: object) -> None:
    print(json.dumps(said), flush=True)


def arguments() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("workload")
    parser.add_argument("optimizer", choices=RATES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variant", default="")
    return Job(**vars(parser.parse_args()))


def serve(build: Callable[[Job], Step]) -> None:
    """Serve the requests of the command line and of standard input."""
    job = arguments()
    step, curve, seconds = losses(build, job)
    say(losses=curve, compile=seconds, samples=len(job.data[0][0]))
    for line in sys.stdin:
        times = measure(step, len(job.data), float(line))
        say(times=times, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
