"""Measure a step that trains adapters beside one that trains the whole model: its time, and its state.

The model is a transformer of graphopt. `full` trains all weights. The other forms train adapters of rank 8 of all
linear layers, or of two projections of each attention. All forms take turns in every round, with kernels of their own
where `auto` takes them. `trained` and `state` are what trains, and that with the optimizer's moments, in shares of the
model's numbers.

Run it: python examples/benchmarks/adapters.py [--width 256] [--layers 4] [--tokens 64] [--batch 8] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

import graphopt
import passes
from graphopt import models
from graphopt.graph.roles import STATE, Role, with_role

VOCABULARY = 1000
FORMS: dict[str, passes.Adapter | None] = {
    "full": None,
    "LoRA": passes.LoRA(),
    "DoRA": passes.LoRA(dora=True),
    "LoRA, q and v": passes.LoRA(["*query*", "*value*"]),
}


@dataclass(frozen=True)
class Row:
    """Hold the seconds of a step, its time and its nodes relative to the full step's, and the share of state."""

    seconds: float
    ratio: float
    nodes: int
    trained: float
    state: float


def count(values: list[ir.Value]) -> int:
    return sum(int(np.prod(x.shape.numpy())) for x in values if x.shape is not None)


def main(
    width: int = 256,
    layers: int = 4,
    tokens: int = 64,
    batch: int = 8,
    rounds: int = 9,
    threads: int = 1,
    native: bool | None = None,
) -> dict[str, Row]:
    """Print a line for each form, and return the rows."""
    model = models.transformer((tokens,), VOCABULARY, width=width, heads=width // 32, layers=layers)
    total = count([x for x in model.graph.initializers.values() if x.dtype is ir.DataType.FLOAT])
    random = np.random.default_rng(0)
    x = random.integers(0, VOCABULARY, (batch, tokens))
    executors = {}
    for form, adapter in FORMS.items():
        loss = passes.CrossEntropy(axis=-1)
        step = graphopt.compile(model, adapter=adapter, loss=loss, optimizer=passes.AdamW(1e-3))
        kernels = "auto" if native is None else native
        executors[form] = graphopt.Executor(step, threads=threads, native=kernels, report=["loss"])
    taken: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(rounds + 2):
        for form, executor in executors.items():
            feeds = {name: x for name in executor.inputs}
            start = time.perf_counter()
            executor.step(feeds)
            taken[form].append(time.perf_counter() - start)
    rows: dict[str, Row] = {}
    print(f"{'form':<16}{'ms':>8}{'ratio':>8}{'nodes':>8}{'trained':>9}{'state':>8}")
    for form, executor in executors.items():
        ratio = statistics.median(a / b for a, b in zip(taken[form][2:], taken["full"][2:], strict=True))
        trained = count(with_role(executor.model, Role.PARAMETER)) / total
        state = count(with_role(executor.model, *STATE)) / total
        seconds = statistics.median(taken[form][2:])
        row = rows[form] = Row(seconds, ratio, len(executor.model.graph), trained, state)
        print(f"{form:<16}{1e3 * seconds:>8.1f}{ratio:>8.2f}{row.nodes:>8}{trained:>9.2%}{state:>8.2%}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    sizes = {"width": 256, "layers": 4, "tokens": 64, "batch": 8, "rounds": 9, "threads": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--native", type=lambda text: text == "true")
    main(**vars(parser.parse_args()))
