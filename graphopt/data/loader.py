"""Iterate over batches: each epoch visits every row once, in a new random order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from graphopt.data.batches import Batches, Rows
from graphopt.data.dataset import Dataset
from graphopt.data.foreign import as_dataset
from graphopt.errors import GraphoptError

Shuffle = bool | Literal["consecutive"]


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
