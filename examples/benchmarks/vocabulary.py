"""Measure the loss of a language model over a large vocabulary: the memory and the time of a step, in blocks or not.

The model is the head alone: a factor for each hidden number, which trains, and a product with the weights of all
classes, which train or do not. `CrossEntropy` is the loss of all logits at once, as is `blocks=None` of
`CausalLanguageModel`. The bytes are the growth of a new process's resident memory during steps, after the executor has
created the state. All forms of a head take turns in every round. The loss, and the largest error of a gradient in
units of its largest number, are compared with PyTorch's, if it is installed.

Run it, on Linux: python examples/benchmarks/vocabulary.py [--tokens 2048] [--classes 32000] [--width 512] [--rounds 5]
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import graphopt
import passes

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MEASURED: dict[str, Any] = {"report": ["loss"], "native": False, "verify": False}
ROWS, WARM, RATE = 4, 2, 1e4
FORMS: dict[str, passes.Loss] = {
    "CrossEntropy": passes.CrossEntropy(axis=-1, ignore_index=-100),
    "blocks=None": passes.CausalLanguageModel(labels=True, blocks=None),
    "blocks=auto": passes.CausalLanguageModel(labels=True),
    "blocks=32": passes.CausalLanguageModel(labels=True, blocks=32),
}


@dataclass(frozen=True)
class Row:
    """Hold the bytes in addition to the state, the seconds of a step, and the errors of the loss and of gradients."""

    measured: int
    seconds: float
    ratio: float
    loss_error: float
    gradient_error: float


def head(tokens: int, classes: int, width: int) -> onnx.ModelProto:
    """Return a model of the last product of a language model."""
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[rows,{tokens // ROWS},{width}] x) => '
        f"(float[rows,{tokens // ROWS},{classes}] logits) {{ h = Mul(x, scale)  logits = MatMul(h, head) }}"
    )
    weights = {"scale": np.ones(width), "head": random.standard_normal((width, classes)) * width**-0.5}
    for name, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return proto


def feeds(tokens: int, classes: int, width: int, shifted: bool = False) -> dict[str, np.ndarray]:
    """Return random hidden numbers and labels; `CrossEntropy` takes the labels shifted."""
    random = np.random.default_rng(1)
    x = random.standard_normal((ROWS, tokens // ROWS, width), np.float32)
    labels = random.integers(0, classes, x.shape[:2])
    if not shifted:
        return {"x": x, "labels": labels}
    return {"x": x, "target": np.concatenate([labels[:, 1:], np.full((ROWS, 1), -100)], axis=1)}


def grown(path: str, threads: int, *sizes: int) -> int:
    """Return the number of bytes by which steps make this process grow."""
    executor = graphopt.Executor(path, threads=threads, **MEASURED)
    data = feeds(*sizes, shifted="target" in executor.inputs)
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
    command = [sys.executable, __file__, "--grown", json.dumps(arguments)]
    return int(subprocess.check_output(command, env=os.environ | MALLOC))


def torch_step(data: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return PyTorch's loss and gradients."""
    import torch

    w = {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}
    logits = (torch.tensor(data["x"]) * w["scale"]) @ w["head"]
    target = torch.tensor(data["labels"])[:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(target), -1), target)
    loss.backward()
    return {
        "loss": loss.detach().numpy(),
        **{name: x.grad.numpy() for name, x in w.items() if x.grad is not None},
    }


def main(
    tokens: int = 2048, classes: int = 32000, width: int = 512, rounds: int = 5, threads: int = 1
) -> dict[tuple[str, str], Row]:
    """Print a line for each form of a frozen and of a trained head; return the rows."""
    sizes = (tokens, classes, width)
    print(f"{'head':<9}{'loss':<14}{'MB':>7}{'s':>8}{'ratio':>7}{'loss error':>12}{'gradient error':>16}")
    rows: dict[tuple[str, str], Row] = {}
    for kind, pattern in {"frozen": "scale", "trained": "*"}.items():
        with tempfile.TemporaryDirectory() as folder:
            paths, executors = {}, {}
            for form, loss in FORMS.items():
                parameters = passes.Parameters(pattern)
                step = graphopt.compile(head(*sizes), parameters=parameters, loss=loss, optimizer=passes.SGD(RATE))
                paths[form] = f"{folder}/{form}.onnx"
                graphopt.save(step, paths[form])
                executors[form] = graphopt.Executor(paths[form], threads=threads, **MEASURED)
            errors = {form: _errors(executor, sizes) for form, executor in executors.items()}
            taken: dict[str, list[float]] = {form: [] for form in FORMS}
            for _ in range(rounds):
                for form, executor in executors.items():
                    data = feeds(*sizes, shifted="target" in executor.inputs)
                    start = time.perf_counter()
                    executor.step(data)
                    taken[form].append(time.perf_counter() - start)
            executors.clear()
            for form, path in paths.items():
                pairs = zip(taken[form], taken["CrossEntropy"], strict=True)
                ratio = statistics.median(own / other for own, other in pairs)
                measured, seconds = apart(path, threads, *sizes), statistics.median(taken[form])
                row = rows[kind, form] = Row(measured, seconds, ratio, *errors[form])
                print(
                    f"{kind:<9}{form:<14}{row.measured / 1e6:>7.0f}{row.seconds:>8.2f}{row.ratio:>7.2f}"
                    f"{row.loss_error:>12.1e}{row.gradient_error:>16.1e}",
                    flush=True,
                )
    return rows


def _errors(executor: graphopt.Executor, sizes: tuple[int, int, int]) -> tuple[float, float]:
    """Run a step, and return the errors of its loss and of its gradients."""
    before = executor.parameters
    weights = {"head": onnx.numpy_helper.to_array(head(*sizes).graph.initializer[1]), **before}
    data = feeds(*sizes, shifted="target" in executor.inputs)
    loss = executor.step(data)["loss"]
    try:
        expected = torch_step(feeds(*sizes), weights)
    except ImportError:
        return float("nan"), float("nan")
    after = executor.parameters
    gradients = {name: (before[name] - after[name]) / RATE for name in before}
    errors = (abs(g - expected[name]).max() / abs(expected[name]).max() for name, g in gradients.items())
    return abs(loss / float(expected["loss"]) - 1), float(max(errors))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"tokens": 2048, "classes": 32000, "width": 512, "rounds": 5, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--grown", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    one = options.pop("grown")
    if one:
        print(grown(*json.loads(one)))
    else:
        main(**options)
