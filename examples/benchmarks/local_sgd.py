"""Compare `graphopt.LocalSGD` with `graphopt.DataParallel`: the losses, and the bytes that a worker sends.

Both see the same batches and make the same number of steps from the same weights. A worker computes its part of each
batch. The loss is that of held-out rows after the last step, in the mean over seeds.

Run it: mpiexec -n 2 python examples/benchmarks/local_sgd.py [--task digits] [--sync-every 50] [--seeds 3]
"""

from __future__ import annotations

import argparse
import math
import statistics

import numpy as np

import graphopt
import graphopt.models
import passes
from graphopt.data import digits, text
from graphopt.data.samples import CHARACTERS

TASKS = {"digits": (100, 0.5), "text": (25, 0.2)}  # epochs, and the share of rows to hold out


class Counted(graphopt.MPI):
    """Count the bytes of the arrays that this worker sums with the others."""

    sent = 0

    def sum(self, array: np.ndarray) -> None:
        self.sent += array.nbytes
        super().sum(array)


def task(name: str, seed: int, steps: int) -> tuple[graphopt.Pipeline, object]:
    """Return the pipeline and the model of a task."""
    schedule = passes.Cosine(steps=steps, warmup=steps // 40)
    if name == "digits":
        loss, optimizer = passes.CrossEntropy(), passes.AdamW(2e-3)
        model = graphopt.models.cnn((1, 8, 8), 10, seed=seed)
        return graphopt.standard(loss=loss, optimizer=optimizer, schedule=schedule), model
    model = graphopt.models.transformer((64,), len(CHARACTERS), width=64, heads=4, layers=2, seed=seed)
    loss, clip = passes.CrossEntropy(axis=-1), passes.ClipGlobalNorm(1.0)
    optimizer = passes.AdamW(3e-3)
    return graphopt.standard(loss=loss, clip=clip, optimizer=optimizer, schedule=schedule), model


def main(
    name: str = "digits",
    sync_every: int = 50,
    seeds: int = 3,
    epochs: int | None = None,
    outer: passes.Optimizer | None = None,
) -> dict[str, tuple[float, int]]:
    """Print a line; return the mean loss and the bytes sent per step of each way to train."""
    epochs, share = epochs or TASKS[name][0], TASKS[name][1]
    data = digits(images=True) if name == "digits" else text(context=64)
    rows = np.random.default_rng(0).permutation(len(data))
    count = math.ceil(share * len(data))
    arrays = dict(data.arrays)
    held_out, training = (
        {key: x[part] for key, x in arrays.items()} for part in (rows[:count], rows[count:])
    )
    steps = epochs * math.ceil((len(rows) - count) / 32)
    losses: dict[str, list[float]] = {"synchronous": [], "local": []}
    sent = {}
    for seed in range(seeds):
        pipeline, model = task(name, seed, steps)
        for way, found in losses.items():
            workers = Counted()
            if way == "local":
                executor: graphopt.Executor = graphopt.LocalSGD(
                    pipeline(model), communicator=workers, sync_every=sync_every, outer=outer, threads=1
                )
            else:
                halves = graphopt.split_step(pipeline, model)
                executor = graphopt.DataParallel(halves, communicator=workers, threads=1)
            workers.sent = 0
            graphopt.fit(executor, training, epochs=epochs, batch_size=32, seed=seed, validation=None)
            sent[way] = workers.sent // steps
            found.append(graphopt.evaluate(executor, held_out)["loss"])
    means = {way: statistics.mean(found) for way, found in losses.items()}
    if workers.leads:
        a, b = means.values()
        spread = ", ".join(f"{y / x - 1:+.1%}" for x, y in zip(*losses.values(), strict=True))
        print(
            f"| {name} | {workers.size} | {steps:,} | {sync_every} | {a:.4f} | {b:.4f} | {b / a - 1:+.1%} ({spread}) "
            f"| {sent['synchronous']:,} | {sent['local']:,} | {sent['synchronous'] / sent['local']:.1f} |",
            flush=True,
        )
    return {way: (means[way], sent[way]) for way in losses}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", dest="name", choices=TASKS, default="digits")
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--momentum", type=float)
    options = vars(parser.parse_args())
    rate, momentum = options.pop("rate"), options.pop("momentum")
    if rate is not None:
        options["outer"] = passes.SGD(rate, momentum=momentum or 0.0, nesterov=bool(momentum))
    main(**options)
