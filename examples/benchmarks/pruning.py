"""Measure what pruning costs in accuracy and gains in bytes and time, on scikit-learn's digits.

    python examples/benchmarks/pruning.py

Each line is the held-out accuracy after 12 epochs of AdamW: the mean and the range over seeds. One core takes two
minutes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx

import graphopt
import passes
from graphopt import models

SEEDS = range(5)
EPOCHS, BATCH = 12, 32
DIGITS = graphopt.data.digits()
STEPS = EPOCHS * -(-round(0.8 * len(DIGITS)) // BATCH)
NETWORKS = {"MLP": models.mlp, "CNN": models.cnn}


def train(network: str, seed: int, epochs: int = EPOCHS, **steps: Any) -> tuple[graphopt.Executor, float]:
    """Train a network, and return its executor and its held-out accuracy."""
    step = graphopt.compile(
        NETWORKS[network]((1, 8, 8), 10, seed=seed),
        **{"loss": passes.CrossEntropy(), "optimizer": passes.AdamW(3e-3), **steps},
    )
    executor = graphopt.Executor(step, threads=1, verify=False)
    records = graphopt.fit(executor, DIGITS, epochs=epochs, batch_size=BATCH, seed=seed, verbose=False)
    return executor, records[-1]["accuracy"]


def tell(what: str, accuracies: Iterable[float], note: str = "") -> None:
    found = [*accuracies]
    print(f"| {what} | {np.mean(found):.3f} | {min(found):.3f} to {max(found):.3f} | {note} |", flush=True)


def microseconds(model: onnx.ModelProto, rows: int = 256) -> float:
    """Return the time of a batch in ONNX Runtime itself, the least of several."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    x = {"x": DIGITS.arrays["x"][:rows].astype(np.float32)}

    def once(run: Callable[[], object]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    return 1e6 * min(once(lambda: session.run(None, x)) for _ in range(100))


def main() -> None:
    warnings.simplefilter("ignore")
    end = STEPS * 3 // 4
    print(f"{STEPS} updates; schedules end after {end}\n\n| network | accuracy | range | |\n|---|---|---|---|")
    for network in NETWORKS:
        tell(f"{network}, dense", (train(network, seed)[1] for seed in SEEDS))
    cases = [
        *(("MLP", share, scope, how) for share in (0.9, 0.95) for scope in ("layer", "global") for how in (None, end)),
        *(("CNN", 0.9, scope, how) for scope in ("layer", "global") for how in (None, end)),
    ]
    for network, share, scope, how in cases:
        pruning = passes.Prune(share, scope=scope, end=how)
        when = "at once" if how is None else "cubic"
        tell(
            f"{network}, {share:.0%} of each {scope}, {when}".replace("each global", "all"),
            (train(network, seed, prune=pruning)[1] for seed in SEEDS),
        )
    for network in NETWORKS:
        tell(
            f"{network}, 2:4",
            (train(network, seed, prune=passes.Prune(structure="2:4"))[1] for seed in SEEDS),
        )
    channels()
    low_rank()
    lottery(end)


def channels() -> None:
    pruning = passes.Prune(0.5, structure="channel", end=STEPS // 2)
    executors, accuracies = zip(*(train("CNN", seed, prune=pruning) for seed in SEEDS), strict=True)
    trained = executors[0].trained()
    small = graphopt.remove_channels(trained)
    sizes = [len(model.SerializeToString()) / 1000 for model in (trained, small)]
    times = [microseconds(model) for model in (trained, small)]
    x = DIGITS.arrays["x"].astype(np.float32)
    gap = np.abs(graphopt.run(small, {"x": x})["y"] - graphopt.run(trained, {"x": x})["y"]).max()
    note = f"{sizes[0]:.1f} -> {sizes[1]:.1f} KB; 256 rows {times[0]:.0f} -> {times[1]:.0f} us; outputs {gap:.0e} apart"
    tell("CNN, half of the channels", accuracies, note)


def low_rank() -> None:
    for network in NETWORKS:
        for energy in (0.9, 0.7):
            before, after, note = [], [], ""
            for seed in SEEDS:
                dense = train(network, seed)[0]
                factors = passes.LowRank(energy=energy)
                source = dense.trained()
                step = graphopt.compile(
                    source, quantize=factors, loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3)
                )
                executor = graphopt.Executor(step, threads=1, verify=False)
                x, target = DIGITS.arrays["x"].astype(np.float32), DIGITS.arrays["target"]
                before.append(float((executor.predict(x=x)["y"].argmax(1) == target).mean()))
                records = graphopt.fit(executor, DIGITS, epochs=4, batch_size=BATCH, seed=seed, verbose=False)
                after.append(records[-1]["accuracy"])
                sizes = [len(model.SerializeToString()) / 1000 for model in (source, executor.trained())]
                note = f"{sizes[0]:.0f} -> {sizes[1]:.0f} KB; on all rows {np.mean(before):.3f} before 4 epochs"
            tell(f"{network}, low rank, energy {energy}", after, note)


def lottery(end: int) -> None:
    tickets, others = [], []
    for seed in SEEDS:
        first = train("MLP", seed, epochs=2 * EPOCHS, prune=passes.Prune(0.92, scope="global", end=2 * end))[0]
        masks = {name.removesuffix(".mask"): x for name, x in first.state.items() if name.endswith(".mask")}
        rng = np.random.default_rng(seed)
        shuffled = {name: rng.permuted(mask.ravel()).reshape(mask.shape) for name, mask in masks.items()}
        tickets.append(train("MLP", seed, prune=passes.Prune(masks=masks))[1])
        others.append(train("MLP", seed, prune=passes.Prune(masks=shuffled))[1])
    tell("MLP, 92% of all, a lottery ticket from its first weights", tickets)
    tell("MLP, 92% of all, the same shares of each layer at random", others)


if __name__ == "__main__":
    main()
