"""Compare `graphopt.LocalSGD` with `graphopt.DataParallel`: the losses, and the bytes that a worker sends.

Both see the same batches of 32 rows and make the same number of steps from the same weights. A worker computes its
part of each batch. The loss is that of held-out rows after the last step, in the mean over seeds. Workers are threads
that take turns: what they compute and send is what processes would, and nothing is timed.

Run it: python examples/benchmarks/local_sgd.py [--task digits] [--workers 2] [--sync-every 50] [--seeds 3]
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import graphopt
import graphopt.models
import passes
from graphopt.communicator import Communicator
from graphopt.data import digits, text
from graphopt.data.language.tokenizer import CHARACTERS

TASKS = {"digits": (100, 0.5), "text": (25, 0.2)}  # epochs, and the share of rows to hold out
BATCH = 32


class Room:
    """Where workers meet: what each has brought, and whose turn it is to run."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.door, self.turn = threading.Barrier(size), threading.Lock()


class Worker(Communicator):
    """Exchange numbers with other threads, and count the bytes that this one sends."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.size, self.room, self.sent = rank, len(room.brought), room, 0

    def sum(self, array: np.ndarray) -> None:
        self.sent += array.nbytes
        array[...] = sum(self._exchange(array.copy()))

    def gather(self, content: bytes) -> list[bytes]:
        return self._exchange(content)

    def _exchange(self, part: Any) -> list[Any]:
        self.room.brought[self.rank] = part
        self._wait()
        found = list(self.room.brought)
        self._wait()
        return found

    def _wait(self) -> None:
        self.room.turn.release()
        self.room.door.wait()
        self.room.turn.acquire()


def together(work: Callable[[Worker], Any], size: int) -> Any:
    """Let each of several workers run a function, and return what the first one's returns."""
    room = Room(size)

    def run(rank: int) -> Any:
        with room.turn:
            return work(Worker(room, rank))

    with ThreadPoolExecutor(size) as threads:
        first, *_ = threads.map(run, range(size))
        return first


def task(name: str, seed: int, steps: int) -> tuple[graphopt.Pipeline, Any]:
    """Return the pipeline and the model of a task."""
    schedule = passes.Cosine(steps=steps, warmup=steps // 40)
    if name == "digits":
        optimizer = passes.AdamW(2e-3)
        pipeline = graphopt.standard(loss=passes.CrossEntropy(), optimizer=optimizer, schedule=schedule)
        return pipeline, graphopt.models.cnn((1, 8, 8), 10, seed=seed)
    pipeline = graphopt.standard(
        loss=passes.CrossEntropy(axis=-1),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(3e-3),
        schedule=schedule,
    )
    return pipeline, graphopt.models.transformer((64,), len(CHARACTERS), seed=seed)


def main(
    name: str = "digits",
    workers: int = 2,
    sync_every: int = 50,
    seeds: int = 3,
    epochs: int | None = None,
    outer: passes.Optimizer | None = None,
) -> dict[str, tuple[float, int]]:
    """Print a line; return the mean loss, and the bytes that a worker sends in training, of each way."""
    epochs, share = epochs or TASKS[name][0], TASKS[name][1]
    data = digits(images=True) if name == "digits" else text(context=64)
    rows = np.random.default_rng(0).permutation(len(data))
    count = math.ceil(share * len(data))
    held_out, training = ({key: x[part] for key, x in data.arrays.items()} for part in (rows[:count], rows[count:]))
    steps = epochs * math.ceil((len(rows) - count) / BATCH)
    losses: dict[str, list[float]] = {"together": [], "apart": []}
    sent = {}
    for seed in range(seeds):
        pipeline, model = task(name, seed, steps)
        halves = graphopt.split_step(pipeline, model)

        def train(way: str, worker: Worker, seed: int = seed, halves: Any = halves) -> tuple[float, int]:
            if way == "together":
                executor: graphopt.Executor = graphopt.DataParallel(halves, communicator=worker, threads=1)
            else:
                options: dict[str, Any] = {"communicator": worker, "sync_every": sync_every, "outer": outer}
                executor = graphopt.LocalSGD(halves.step, threads=1, **options)
            worker.sent = 0
            graphopt.fit(executor, training, epochs=epochs, batch_size=BATCH, seed=seed, validation=None)
            sent = worker.sent
            return graphopt.evaluate(executor, held_out)["loss"], sent

        for way, found in losses.items():
            loss, sent[way] = together(lambda worker, way=way: train(way, worker), workers)  # type: ignore[misc]
            found.append(loss)
    a, b = (np.array(found) for found in losses.values())
    error = np.std(b - a, ddof=1) / math.sqrt(seeds) / a.mean() if seeds > 1 else math.nan
    print(
        f"| {name} | {workers} | {steps:,} | {a.mean():.4f} | {b.mean():.4f} | {b.mean() / a.mean() - 1:+.1%} "
        f"± {error:.1%} | {seeds} | {sent['together']:,} | {sent['apart']:,} "
        f"| {sent['together'] / sent['apart']:.1f} |",
        flush=True,
    )
    return {way: (float(np.mean(found)), sent[way]) for way, found in losses.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", dest="name", choices=TASKS, default="digits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--rate", type=float, help="of the outer optimizer")
    parser.add_argument("--momentum", type=float, help="Nesterov's, of the outer optimizer")
    options = vars(parser.parse_args())
    rate, momentum = options.pop("rate"), options.pop("momentum")
    if rate is not None:
        options["outer"] = passes.SGD(rate, momentum=momentum or 0.0, nesterov=bool(momentum))
    main(**options)
