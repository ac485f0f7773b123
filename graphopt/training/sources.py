"""Draw the batches of the epochs of `fit`: from rows, or from an iterable in its order."""

from __future__ import annotations

import math
import secrets
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphopt.data import Batches
from graphopt.data.foreign import has_rows
from graphopt.data.loader import Rows, draw
from graphopt.data.streams import Drawn, Stream
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.state import EXPECTED_ROWS
from graphopt.runtime.executor import Executor
from graphopt.runtime.tensors import rows_of
from graphopt.training.advice import advise
from graphopt.training.options import FitOptions

COLUMNS = "columns"  # of an identity: the names of the plain columns of a table that train, if they have names


def read_batches(
    data: Any, executor: Executor, allow_nan: bool, steps: int | None = None, *, keep_positions: bool = False
) -> Batches | Stream:
    """Return the batches that data with rows is cut into, or the stream of an iterable."""
    if not has_rows(data):
        return Stream(data, executor.inputs, allow_nan=allow_nan, steps=steps, keep_positions=keep_positions)
    if steps is not None:
        raise GraphoptError(
            f"steps_per_epoch={steps}: expected an iterable of batches, found rows, all of which are an epoch: leave "
            "it out"
        )
    return Batches(data, executor.inputs, allow_nan=allow_nan)


class Epochs(ABC):
    """Draw the batches of the epochs of a run."""

    options: FitOptions
    executor: Executor
    count: int | None = None  # the number of rows of an epoch, if the data tells
    sampled_rows: int | None = None  # of which batches are drawn, if each row is drawn by itself
    steps: int | None  # the number of steps of an epoch, if the data tells
    names: Sequence[str] | None = None  # of the features, if the data has them
    row_tokens: float | None = None  # the mean number of tokens of a row of text
    is_lazy = False  # whether rows are read when a batch needs them
    reads_state = False  # whether a batch depends on the weights, so that none is drawn before the step that it follows
    identity: Mapping[str, object]  # what a checkpoint and the run that continues it have in common
    before = 0  # the number of epochs in earlier calls of `fit`
    end: Any = None  # the position after an epoch; None if the number of rows and the option `seed` say enough

    @abstractmethod
    def draw(self, epoch: int, start: int) -> Iterator[Drawn]:
        """Yield the batches of an epoch, from a row on: this worker's part of each."""

    def peek(self, epoch: int, start: int) -> Iterator[Drawn]:
        """Yield the batches that `draw` will yield."""
        return self.draw(epoch, start)

    def load(self, before: int, position: object) -> None:
        """Continue a run from its checkpoint."""
        self.before = before

    def _transformed(self, drawn: Drawn, epoch: int, row: int) -> Drawn:
        """Return a batch as the option `transform` makes it, by random numbers that depend on where the batch is."""
        transform, executor = self.options.transform, self.executor
        rows = rows_of(drawn.arrays)
        if transform is None or not rows:
            return drawn
        random = np.random.default_rng([self.options.seed, epoch, row, executor.workers.rank])
        given = transform({name: np.array(x) for name, x in drawn.arrays.items()}, random)
        try:
            if not isinstance(given, Mapping):
                raise GraphoptError(f"expected arrays by name, found {kind_of(given)}: return the batch")
            arrays = {name: np.asarray(x) for name, x in given.items()}
            batches = Batches(arrays, executor.inputs, allow_nan=self.options.allow_nan)
            if len(batches) != rows:
                raise GraphoptError(f"expected the {rows} rows of the batch, found {len(batches)}")
            return drawn._replace(arrays=batches.take(range(rows)))
        except GraphoptError as error:
            raise GraphoptError(f"transform: {error}") from error


class RowEpochs(Epochs):
    """Draw rows, in an order that depends on the seed, the epoch and the rows; workers share those of each batch."""

    def __init__(self, batches: Batches, rows: Rows, options: FitOptions, executor: Executor) -> None:
        advise(batches, len(rows), options.batch_size)
        self.batches, self._rows, self.options, self.executor = batches, rows, options, executor
        self._workers = executor.workers
        self.count, self.steps = len(rows), math.ceil(len(rows) / options.batch_size)
        self.is_lazy, self.names = batches.is_lazy, batches.data.names
        tokens = batches.data.tokens
        self.row_tokens = None if tokens is None else tokens / len(batches.data)
        self.identity = {"seed": options.seed, "shuffle": options.shuffle, "rows": len(rows)}
        if batches.data.column_names is not None:
            self.identity = {**self.identity, COLUMNS: batches.data.column_names}
        if options.sampling == "poisson":
            self.identity = {**self.identity, "sampling": "poisson"}
            self.end = secrets.randbits(64)  # the seed of the batches, which a checkpoint keeps
            # How many rows an epoch has is known only when they are drawn.
            self.count, self.sampled_rows = None, len(rows)
        if options.sampling == "poisson" or EXPECTED_ROWS in executor.hyperparameters:
            self.identity = {**self.identity, "batch_size": options.batch_size}
        self.before = round(executor.batches / self.steps)

    def draw(self, epoch: int, start: int) -> Iterator[Drawn]:
        options = self.options
        random = np.random.default_rng([options.seed if self.end is None else self.end, self.before + epoch])
        how = "poisson" if options.sampling == "poisson" else options.shuffle
        for rows in draw(self._rows, options.batch_size, how, random, start):
            if isinstance(rows, np.ndarray):
                rows.sort()  # read memory-mapped rows in the file's order
            drawn = Drawn(len(rows), self.batches.take(rows[self._workers.share(len(rows))]), self.end)
            yield self._transformed(drawn, self.before + epoch, start)
            start += len(rows)

    def load(self, before: int, position: object) -> None:
        super().load(before, position)
        self.end = self.end if position is None else position


class StreamEpochs(Epochs):
    """Draw the batches of an iterable, in its own order."""

    def __init__(self, stream: Stream, options: FitOptions, executor: Executor) -> None:
        self._stream, self.steps, self.options, self.executor = stream, stream.steps, options, executor
        self.reads_state = stream.reads_state
        if self.reads_state and options.prefetch:
            raise GraphoptError(
                f"prefetch: expected 0 for batches that depend on the weights, found {options.prefetch}: leave it out"
            )
        steps_per_epoch = options.steps_per_epoch
        self.identity = {"rows": None, "steps_per_epoch": steps_per_epoch}
        if steps_per_epoch is None and self.steps:
            stream.passes = round(executor.batches / self.steps)

    @property
    def end(self) -> Any:
        return self._stream.end

    def draw(self, epoch: int, start: int) -> Iterator[Drawn]:
        return self._each(self._stream.draw(epoch), epoch, start)

    def peek(self, epoch: int, start: int) -> Iterator[Drawn]:
        return self._each(self._stream.peek(epoch), epoch, start)

    def _each(self, drawn: Iterator[Drawn], epoch: int, row: int) -> Iterator[Drawn]:
        for batch in drawn:
            yield self._transformed(batch, epoch, row)
            row += batch.rows

    def load(self, before: int, position: object) -> None:
        super().load(before, position)
        if position is not None and not self._stream.load(position):
            warnings.warn(
                f"data: {self._stream.name} has no state_dict and load_state_dict: it starts over",
                stacklevel=4,
            )
