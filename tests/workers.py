"""Programs that `test_distributed.py` runs in several processes. Each writes what its first worker found as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np
from builders import model as parsed

import graphopt
import passes
from graphopt import models

ROWS = 203
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((ROWS, 1, 8, 8)).astype(np.float32)
T = RANDOM.integers(0, 10, ROWS)
WEIGHTS = RANDOM.uniform(0.1, 2, ROWS).astype(np.float32)
DATA = {"x": X, "target": T}

DROPOUT = parsed(
    """g (float[batch, 64] x) => (float[batch, 10] y) {
        r = Constant <value = float {0.5}> ()
        t = Constant <value = bool {1}> ()
        h = MatMul(x, v) a = Relu(h) d = Dropout(a, r, t) y = MatMul(d, w)
    }""",
    v=RANDOM.standard_normal((64, 32)).astype(np.float32) / 8,
    w=RANDOM.standard_normal((32, 10)).astype(np.float32) / 6,
)
NORMALIZED = parsed(
    """g (float[batch, 64] x) => (float[batch, 10] y) {
        h = MatMul(x, v) n = BatchNormalization(h, s, b, m, z) a = Relu(n) y = MatMul(a, w)
    }""",
    v=RANDOM.standard_normal((64, 32)).astype(np.float32) / 8,
    s=np.ones(32, np.float32),
    b=np.zeros(32, np.float32),
    m=np.zeros(32, np.float32),
    z=np.ones(32, np.float32),
    w=RANDOM.standard_normal((32, 10)).astype(np.float32) / 6,
)
FLAT = {"x": X.reshape(ROWS, 64), "target": T}

CASES: dict[str, tuple[dict[str, Any], Any, dict[str, np.ndarray]]] = {
    "adamw": ({"optimizer": passes.AdamW(1e-3)}, None, DATA),
    "clip and penalty": (
        {
            "optimizer": passes.SGD(0.1, momentum=0.9),
            "clip": passes.ClipGlobalNorm(0.5),
            "regularizer": passes.L2(1e-3),
        },
        None,
        DATA,
    ),
    "weights": (
        {
            "loss": passes.CrossEntropy(sample_weight=True, class_weights=tuple(np.linspace(0.5, 2, 10))),
            "optimizer": passes.SGD(0.1),
        },
        None,
        {**DATA, "sample_weight": WEIGHTS},
    ),
    "sum": (
        {"loss": passes.CrossEntropy(reduction="sum"), "optimizer": passes.SGD(1e-3)},
        None,
        DATA,
    ),
    "ignored": (
        {"loss": passes.CrossEntropy(ignore_index=3), "optimizer": passes.SGD(0.1)},
        None,
        DATA,
    ),
    "dropout": (
        {"training": passes.TrainingMode(seed=3), "optimizer": passes.SGD(0.1)},
        DROPOUT,
        FLAT,
    ),
}


def halves(name: str) -> tuple[graphopt.StepHalves, dict[str, np.ndarray]]:
    steps, source, data = CASES[name]
    pipeline = graphopt.standard(**{"loss": passes.CrossEntropy(), **steps})
    return graphopt.split_step(pipeline, source or models.mlp((1, 8, 8), 10)), data


def sums(communicator: graphopt.MPI, executor: graphopt.Executor) -> list[str]:
    """Return the digest of each worker's state."""
    state = executor.state
    content = b"".join(state[name].tobytes() for name in sorted(state))
    return communicator.gather_json(hashlib.sha256(content).hexdigest())


def equal(communicator: graphopt.MPI) -> dict[str, Any]:
    """Train on several workers and on one; return the largest differences."""
    found = {}
    for name in CASES:
        both, data = halves(name)
        together = graphopt.DataParallel(both, communicator=communicator, threads=1, report=["loss"])
        records = graphopt.fit(together, data, epochs=2, batch_size=32)
        digests = sums(communicator, together)
        if communicator.leads:
            alone = graphopt.Executor(both.step, threads=1, report=["loss"])
            expected = graphopt.fit(alone, data, epochs=2, batch_size=32)
            found[name] = {
                "states": len(set(digests)),
                "state": max(
                    float(np.abs(x - together.state[n]).max() / max(1, np.abs(x).max()))
                    for n, x in alone.state.items()
                ),
                "loss": max(
                    abs(a[key] - b[key]) / a[key]
                    for a, b in zip(expected, records, strict=True)
                    for key in ("loss", "validation_loss")
                ),
                "accuracy": [a["accuracy"] == b["accuracy"] for a, b in zip(expected, records, strict=True)],
            }
    return found


def few_rows(communicator: graphopt.MPI) -> dict[str, Any]:
    """Train on batches with fewer rows than workers: some have none."""
    both, data = halves("adamw")
    data = {name: array[:7] for name, array in data.items()}
    together = graphopt.DataParallel(both, communicator=communicator, threads=1, report=["loss"])
    records = graphopt.fit(together, data, epochs=3, batch_size=2, validation=None)
    digests = sums(communicator, together)
    alone = graphopt.Executor(both.step, threads=1, report=["loss"])
    expected = graphopt.fit(alone, data, epochs=3, batch_size=2, validation=None)
    return {
        "states": len(set(digests)),
        "loss": [abs(a["loss"] - b["loss"]) for a, b in zip(expected, records, strict=True)],
    }


def statistics(communicator: graphopt.MPI) -> dict[str, Any]:
    """Train with BatchNormalization; return how many different states there are, and the running means."""
    found: dict[str, Any] = {}
    pipeline = graphopt.standard(
        loss=passes.CrossEntropy(), training=passes.TrainingMode(), optimizer=passes.SGD(0.0)
    )
    both = graphopt.split_step(pipeline, NORMALIZED)
    for kind in ("synchronized", "local"):
        together = graphopt.DataParallel(both, communicator=communicator, threads=1, statistics=kind)
        for start in range(0, 128, 32):
            rows = range(start, start + 32)[communicator.share(32)]
            together.step({name: array[rows.start : rows.stop] for name, array in FLAT.items()})
        found[kind] = len(set(sums(communicator, together)))
        if communicator.leads and kind == "synchronized":
            alone = graphopt.Executor(both.step, threads=1)
            for start in range(0, 128, 32):
                alone.step({name: array[start : start + 32] for name, array in FLAT.items()})
            found["mean"] = float(np.abs(alone.state["m"] - together.state["m"]).max())
        if kind == "local":
            own = graphopt.Executor(both.step, threads=1)
            for start in range(0, 128, 32):
                rows = range(start, start + 32)[communicator.share(32)]
                own.step({name: array[rows.start : rows.stop] for name, array in FLAT.items()})
            before = own.state["m"]
            found["own"] = float(np.abs(before - together.state["m"]).max())
            few = 1 - communicator.rank  # the second worker has no row
            together.step({name: array[:few] for name, array in FLAT.items()})
            changes = communicator.gather_json(float(np.abs(together.state["m"] - before).max()))
            found["changes"] = changes
    return found


if __name__ == "__main__":
    workers = graphopt.MPI(60)
    result = {"equal": equal, "few_rows": few_rows, "statistics": statistics}[sys.argv[1]](workers)
    if workers.leads:
        print("RESULT", json.dumps(result), flush=True)
