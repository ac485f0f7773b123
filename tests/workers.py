"""Programs that `test_distributed.py` runs in several processes. The first worker writes what they find as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
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
IMAGES = parsed(
    """g (float[batch, 1, 8, 8] x) => (float[batch, 10] y) {
        c = Conv<pads = [1, 1, 1, 1]>(x, k) n = BatchNormalization(c, s, b, m, z) a = Relu(n)
        d = Conv(a, l) o = BatchNormalization(d, t, e, p, q) u = Conv(a, r) i = BatchNormalization(u, f, g, j, n2)
        h = Add(o, i) g1 = GlobalAveragePool(h) h1 = Flatten(g1) y = MatMul(h1, w)
    }""",
    k=RANDOM.standard_normal((6, 1, 3, 3)).astype(np.float32) / 3,
    l=RANDOM.standard_normal((8, 6, 3, 3)).astype(np.float32) / 7,
    r=RANDOM.standard_normal((8, 6, 3, 3)).astype(np.float32) / 7,
    w=RANDOM.standard_normal((8, 10)).astype(np.float32) / 3,
    **{name: np.ones(6, np.float32) for name in ("s", "z")},
    **{name: np.zeros(6, np.float32) for name in ("b", "m")},
    **{name: np.ones(8, np.float32) for name in ("t", "q", "f", "n2")},
    **{name: np.zeros(8, np.float32) for name in ("e", "p", "g", "j")},
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
    "batch normalization": (
        {"training": passes.TrainingMode(unbiased_variance=True), "optimizer": passes.SGD(0.1)},
        NORMALIZED,
        {**FLAT, "x": 2 * FLAT["x"] + 5},
    ),
    "normalized images": (
        {
            "loss": passes.CrossEntropy(sample_weight=True),
            "training": passes.TrainingMode(),
            "optimizer": passes.SGD(0.1),
        },
        IMAGES,
        {**DATA, "sample_weight": np.where(np.arange(ROWS) % 32 < 16, WEIGHTS, 0)},
    ),
}


def halves(name: str, **options: Any) -> tuple[graphopt.StepHalves, dict[str, np.ndarray]]:
    steps, source, data = CASES[name]
    pipeline = graphopt.standard(**{"loss": passes.CrossEntropy(), **steps})
    return graphopt.split_step(pipeline, source or models.mlp((1, 8, 8), 10), **options), data


def sums(communicator: graphopt.MPI, executor: graphopt.Executor) -> list[str]:
    """Return the digest of each worker's state."""
    state = executor.state
    content = b"".join(state[name].tobytes() for name in sorted(state))
    return communicator.gather_json(hashlib.sha256(content).hexdigest())


FEW = ("adamw", "dropout", "normalized images")


def copies(communicator: graphopt.MPI) -> dict[str, Any]:
    return equal(communicator, share_state=False, names=FEW)


def with_kernels(communicator: graphopt.MPI) -> dict[str, Any]:
    return equal(communicator, names=FEW)


def equal(communicator: graphopt.MPI, share_state: bool = True, names: Iterable[str] = CASES) -> dict[str, Any]:
    """Train on several workers and on one; return the largest differences."""
    found = {}
    for name in names:
        both, data = halves(name)
        together = graphopt.DataParallel(
            both, communicator=communicator, threads=1, report=["loss"], share_state=share_state
        )
        assert together.share_state is share_state
        records = graphopt.fit(together, data, epochs=2, batch_size=31)
        digests = sums(communicator, together)
        if communicator.leads:
            alone = graphopt.Executor(both.step, threads=1, report=["loss"])
            expected = graphopt.fit(alone, data, epochs=2, batch_size=31)
            found[name] = {
                "states": len(set(digests)),
                "state": max(
                    float(np.abs(x - together.state[n]).max() / max(1, np.abs(x).max())) for n, x in alone.state.items()
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
    """Train on batches with fewer rows than workers, and parameters, too: some have none."""
    found = {}
    normalized = graphopt.standard(
        loss=passes.CrossEntropy(), training=passes.TrainingMode(), optimizer=passes.SGD(0.1)
    )
    linear = graphopt.standard(loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3))
    steps = {
        "linear": (graphopt.split_step(linear, models.linear((1, 8, 8), 10)), DATA),
        "normalized": (graphopt.split_step(normalized, IMAGES), DATA),
    }
    for name, (both, data) in steps.items():
        data = {key: array[:7] for key, array in data.items()}
        together = graphopt.DataParallel(both, communicator=communicator, threads=1, report=["loss"])
        records = graphopt.fit(together, data, epochs=3, batch_size=2, validation=None)
        digests = sums(communicator, together)
        alone = graphopt.Executor(both.step, threads=1, report=["loss"])
        expected = graphopt.fit(alone, data, epochs=3, batch_size=2, validation=None)
        found[name] = {
            "states": len(set(digests)),
            "loss": [abs(a["loss"] - b["loss"]) for a, b in zip(expected, records, strict=True)],
        }
    return found


class Late(graphopt.Callback):
    """Let the second worker come last to a validation."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_step_end(self, run: graphopt.Run, record: dict[str, Any]) -> None:
        time.sleep(0.02 * self._rank)

    def on_evaluate_begin(self, run: graphopt.Run) -> None:
        time.sleep(0.2 * self._rank)

    def on_evaluate_end(self, run: graphopt.Run, record: dict[str, Any]) -> None:
        time.sleep(0.2 * self._rank)


def replaced(communicator: graphopt.MPI) -> dict[str, Any]:
    """Replace weights for each validation while a late worker still reads the old ones."""
    both, data = halves("adamw")

    def trained(executor: graphopt.Executor, rank: int) -> tuple[list[Any], dict[str, np.ndarray]]:
        callbacks = [Late(rank), graphopt.callbacks.WeightAverage(decay=0.9)]
        records = graphopt.fit(executor, data, epochs=3, batch_size=64, callbacks=callbacks)
        return records, executor.parameters

    together = graphopt.DataParallel(both, communicator=communicator, threads=1, report=["loss"])
    found = trained(together, communicator.rank)
    expected = trained(graphopt.Executor(both.step, threads=1, report=["loss"]), 0)
    return {
        "states": len(set(sums(communicator, together))),
        "loss": [
            abs(a[key] - b[key])
            for a, b in zip(expected[0], found[0], strict=True)
            for key in ("loss", "validation_loss")
        ],
        "weights": max(float(np.abs(x - found[1][name]).max()) for name, x in expected[1].items()),
    }


def refused(communicator: graphopt.MPI) -> dict[str, Any]:
    """Take a step whose loss is finite, and whose new state is not, in one parameter: that of one worker."""
    source = parsed(
        "g (float[batch, 64] x) => (float[batch, 10] y) { h = MatMul(x, v) y = MatMul(h, w) }",
        v=np.full((64, 32), 1e-2, np.float32),
        w=np.full((32, 10), 1e-3, np.float32),
    )
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(3e37))
    both = graphopt.split_step(pipeline, source)
    together = graphopt.DataParallel(both, communicator=communicator, threads=1, report=["loss"])
    before = together.state
    feeds = {"x": X[:8].reshape(8, 64) * 1e3, "target": np.zeros((8, 10), np.float32)}
    message = ""
    try:
        together.step(feeds)
    except graphopt.NonFiniteLoss as error:
        message = str(error)
    same = all(np.array_equal(x, before[name]) for name, x in together.state.items())
    return {"messages": communicator.gather_json(message), "same": communicator.gather_json(same)}


class Dies(graphopt.Callback):
    """End the process as the second validation begins."""

    def on_evaluate_begin(self, run: graphopt.Run) -> None:
        if run.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def bereaved(communicator: graphopt.MPI) -> dict[str, Any]:
    """Train apart, and lose a worker in the last validation; return its result, and that of one process."""
    both, data = halves("adamw")
    held_out = {name: array[:50] for name, array in data.items()}
    executor = graphopt.LocalSGD(both.step, communicator=communicator, sync_every=5, threads=1)
    callbacks = [Dies()] if communicator.rank == 1 else []
    options = {"validation": held_out, "epochs": 2, "batch_size": 8, "callbacks": callbacks}
    records = graphopt.fit(executor, data, **options)
    alone = graphopt.Executor(both.step, threads=1)
    alone.update_state(executor.parameters)
    found = alone.evaluate(held_out)
    accuracy = float(np.mean(found["y"].argmax(1) == held_out["target"]))
    return {
        "workers": communicator.size,
        "found": [records[-1]["validation_loss"], records[-1]["accuracy"]],
        "expected": [found["loss"], accuracy],
    }


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:graphopt")


def memory(communicator: graphopt.MPI) -> dict[str, Any]:
    """Return how many blocks of shared memory a worker has, with an executor and without; and then refuse any."""
    both, data = halves("adamw")
    rows = slice(communicator.rank, None, communicator.size)

    def executor() -> graphopt.DataParallel:
        one = graphopt.DataParallel(both, communicator=communicator, threads=1, report=["loss"])
        one.step({name: array[rows] for name, array in data.items()})
        return one

    one = executor()
    found: dict[str, Any] = {
        "with": mapped(),
        "shares": one.share_state,
        "loss": [one.evaluate(data)["loss"]],
    }
    del one
    found["without"] = mapped()

    def refuse(name: str) -> int:
        raise OSError("refused")

    if communicator.leads:
        os.memfd_create = refuse  # type: ignore[assignment]
    one = executor()
    found["refused"] = communicator.gather_json(one.share_state)
    found["loss"].append(one.evaluate(data)["loss"])
    return found


if __name__ == "__main__":
    workers = graphopt.MPI(60)
    programs = (equal, with_kernels, copies, few_rows, replaced, refused, memory, bereaved)
    results = {one.__name__: one(workers) for one in programs if one.__name__ in sys.argv[1:]}
    if workers.leads:
        print("RESULT", json.dumps(results), flush=True)
