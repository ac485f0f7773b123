"""Choose the rows that train, and read them for the passes that learn from them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from graphopt.data.batches import Batches, Rows
from graphopt.data.dataset import Dataset
from graphopt.data.loader import Shuffle
from graphopt.errors import GraphoptError
from graphopt.graph.values import name_of
from graphopt.moments import pieces


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
    """Return the number of rows to hold out for validation.

    Raises:
        GraphoptError: the share is not in [0, 1), or leaves no row to train on.
    """
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
    """Read the training rows of a data set in pieces, those of inputs in the types and shapes of a model.

    Args:
        data: the data set.
        model: the inference model.
        rows: the indices of the rows.
        allow_nan: accept NaN and infinities.
    """

    def __init__(self, data: Dataset, model: ir.Model, rows: Rows, *, allow_nan: bool = False) -> None:
        self._inputs = {name_of(x): x for x in model.graph.inputs if not x.is_initializer()}
        self._arrays = data.feeding(list(self._inputs))
        self._rows, self._allow_nan = rows, allow_nan

    def read(self, name: str) -> Iterator[np.ndarray]:
        """Yield the rows of an array.

        Raises:
            GraphoptError: there is no such array, or it does not fit the model's input.
        """
        if name not in self._arrays:
            found = ", ".join(map(repr, self._arrays))
            raise GraphoptError(f"data: expected an array {name!r} to learn from, found {found}")
        array = self._arrays[name]
        parts = pieces(self._rows, array[:1].size)
        if name not in self._inputs:
            yield from (
                array[rows.start : rows.stop] if isinstance(rows, range) else array[rows] for rows in parts
            )
            return
        batches = Batches({name: array}, {name: self._inputs[name]}, allow_nan=self._allow_nan)
        yield from (batches.take(rows)[name] for rows in parts)
