"""Choose the rows that train, draw their order in each epoch, read them, and prepare batches ahead of time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir

from graphopt.data.batches import Batches, Rows
from graphopt.data.dataset import Dataset
from graphopt.data.foreign import as_dataset
from graphopt.errors import GraphoptError
from graphopt.graph.values import name_of
from graphopt.moments import pieces, row_index

Shuffle = bool | Literal["consecutive"]
T = TypeVar("T")


def hold_out(rows: int, share: float, *, shuffle: Shuffle = True, seed: int = 0) -> tuple[Rows, Rows]:
    """Return the indices of the rows to train on, and of those to hold out, each in order.

    `fit` holds out the same rows for the same arguments.

    Args:
        rows: the number of rows.
        share: the share to hold out, rounded up to whole rows.
        shuffle: draw the rows to hold out; False holds out the last ones.
        seed: the seed of what is drawn.

    Raises:
        GraphoptError: the share is not in [0, 1), or leaves no row to train on.

    >>> training, held_out = graphopt.data.hold_out(10, 0.25, shuffle=False)
    >>> list(training), list(held_out)
    ([0, 1, 2, 3, 4, 5, 6], [7, 8, 9])
    """
    count = held_out_rows(rows, share)
    if not shuffle or not count:
        return range(rows - count), range(rows - count, rows)
    chosen = np.sort(np.random.default_rng(seed).permutation(rows)[:count])
    return np.delete(np.arange(rows), chosen), chosen


def held_out_rows(rows: int, share: float) -> int:
    """Return the number of rows to hold out for validation."""
    if not 0 <= share < 1:
        raise GraphoptError(
            f"validation: expected a share of the rows, at least 0 and less than 1, found {share}"
        )
    count = math.ceil(rows * share)
    if count >= rows:
        raise GraphoptError(
            f"validation: expected a share that leaves rows to train on, found {share} of {rows} rows"
        )
    return count


class TrainingRows:
    """Read the training rows of a data set in pieces, those of inputs in the types and shapes of a model."""

    def __init__(self, data: Dataset, model: ir.Model, rows: Rows, *, allow_nan: bool = False) -> None:
        self._inputs = {name_of(x): x for x in model.graph.inputs if not x.is_initializer()}
        self._arrays = data.feeding(list(self._inputs))
        self._rows, self._allow_nan = rows, allow_nan

    def read(self, name: str) -> Iterator[np.ndarray]:
        """Yield the rows of an array, which has to fit the model's input."""
        if name not in self._arrays:
            found = ", ".join(map(repr, self._arrays))
            raise GraphoptError(f"data: expected an array {name!r} to learn from, found {found}")
        array = self._arrays[name]
        parts = pieces(self._rows, array[:1].size)
        if name not in self._inputs:
            yield from (array[row_index(rows)] for rows in parts)
            return
        batches = Batches({name: array}, {name: self._inputs[name]}, allow_nan=self._allow_nan)
        yield from (batches.take(rows)[name] for rows in parts)


def draw(
    rows: Rows, batch_size: int, shuffle: Shuffle, random: np.random.Generator, start: int = 0
) -> Iterator[Rows]:
    """Yield the rows of each batch of an epoch.

    Args:
        shuffle: True for rows in random order; `consecutive` for runs of neighbouring rows in random order, cut at
            new places in each epoch, which can be read in one piece; False for the order of the data.
        start: the number of rows of the epoch to leave out, because they have been drawn before.
    """
    if shuffle == "consecutive":
        batches = list(Batches.split(np.roll(rows, -random.integers(len(rows))), batch_size))
        for i in random.permutation(len(batches)):
            if start < len(batches[i]):
                yield batches[i][start:]
            start = max(start - len(batches[i]), 0)
    else:
        yield from Batches.split((random.permutation(rows) if shuffle else rows)[start:], batch_size)


class Loader:
    """Iterate over the batches of an epoch, as arrays by name. Each iteration is a new epoch.

    Args:
        data: a data set, or arrays by name.
        batch_size: the number of rows per batch; the last batch may have fewer.
        shuffle: as in `draw`.

    Raises:
        GraphoptError: the arrays have different numbers of rows, or `batch_size` is less than 1.
    """

    def __init__(
        self,
        data: Dataset | Mapping[str, np.ndarray],
        batch_size: int = 32,
        *,
        shuffle: Shuffle = True,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise GraphoptError(f"batch_size: expected 1 or more, found {batch_size}")
        if seed < 0:
            raise GraphoptError(f"seed: expected 0 or more, found {seed}")
        self._data = as_dataset(data)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return math.ceil(len(self._data) / self._batch_size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for rows in draw(range(len(self._data)), self._batch_size, self._shuffle, self._random):
            yield {name: np.asarray(array[np.asarray(rows)]) for name, array in self._data.arrays.items()}


def prefetched(batches: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yield the items of an iterable in order, while a thread prepares up to `depth` further items.

    An exception in the iterable is raised in place of its item. The thread ends after the last item, or when the
    iterator is closed.

    Args:
        depth: the number of items to prepare ahead; 0 for no thread.

    Raises:
        GraphoptError: `depth` is less than 0.
    """
    if depth < 0:
        raise GraphoptError(f"prefetch: expected 0 or more batches, found {depth}")
    return _ahead(iter(batches), depth)


def _ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    if not depth:
        yield from items
        return
    end: Any = object()
    with ThreadPoolExecutor(1, "graphopt-prefetch") as thread:
        coming = deque(thread.submit(next, items, end) for _ in range(depth))
        try:
            while (item := coming.popleft().result()) is not end:
                coming.append(thread.submit(next, items, end))
                yield item
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
