"""Draw the batches of an epoch: from rows, in an order of their own, or from an iterable, in its order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphopt.communicator import Communicator
from graphopt.data import Batches, Dataset
from graphopt.data.batches import Rows
from graphopt.data.foreign import has_rows
from graphopt.data.loader import Shuffle, draw
from graphopt.data.streams import Drawn, Stream
from graphopt.errors import GraphoptError
from graphopt.runtime.executor import Executor

Data = Dataset | Mapping[str, np.ndarray] | Iterable[Mapping[str, Any]]


def read_batches(
    data: Any, executor: Executor, allow_nan: bool, steps: int | None = None, *, keep_positions: bool = False
) -> Batches | Stream:
    """Return what cuts the rows of data into batches, or draws the batches of an iterable."""
    if not has_rows(data):
        return Stream(data, executor.inputs, allow_nan=allow_nan, steps=steps, keep_positions=keep_positions)
    if steps is not None:
        raise GraphoptError(
            f"steps_per_epoch={steps}: expected an iterable of batches, found rows, all of which are an epoch: leave "
            "it out"
        )
    return Batches(data, executor.inputs, allow_nan=allow_nan)


@dataclass
class Order:
    """Draw rows in an order that depends on the seed, the epoch, and the rows themselves."""

    batches: Batches
    rows: Rows
    batch_size: int
    shuffle: Shuffle
    seed: int
    workers: Communicator
    before: int = 0  # epochs in previous calls of `fit`
    end = None  # the position after an epoch, of which the number of rows says enough

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def steps(self) -> int:
        return math.ceil(len(self.rows) / self.batch_size)

    @property
    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that continues it have in common."""
        return {"seed": self.seed, "shuffle": self.shuffle, "rows": len(self.rows)}

    def draw(self, epoch: int, start: int) -> Iterator[Drawn]:
        """Yield the batches of an epoch, from a row on: this worker's part of each."""
        random = np.random.default_rng([self.seed, self.before + epoch])
        for rows in draw(self.rows, self.batch_size, self.shuffle, random, start):
            if isinstance(rows, np.ndarray):
                rows.sort()  # read memory-mapped rows in the file's order
            yield Drawn(len(rows), self.batches.take(rows[self.workers.share(len(rows))]))

    peek = draw

    def load(self, position: Any) -> None:
        """Continue from a position: there is none."""


@dataclass
class Passes:
    """Draw the batches of an iterable, in its own order."""

    stream: Stream
    steps_per_epoch: int | None
    before = 0
    count = None

    @property
    def steps(self) -> int | None:
        return self.stream.steps

    @property
    def identity(self) -> dict[str, Any]:
        return {"rows": None, "steps_per_epoch": self.steps_per_epoch}

    @property
    def end(self) -> Any:
        return self.stream.end

    def draw(self, epoch: int, start: int) -> Iterator[Drawn]:
        return self.stream.draw(epoch)

    def peek(self, epoch: int, start: int) -> Iterator[Drawn]:
        return self.stream.peek(epoch)

    def load(self, position: Any) -> None:
        if not self.stream.load(position):
            warnings.warn(
                f"data: {self.stream.name} has no state_dict and load_state_dict: it starts over",
                stacklevel=4,
            )
