"""Convert data sets and tables of other libraries, which it recognizes by their methods, without importing them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphopt.data.dataset import TARGET, WEIGHT, Dataset, LazyArray
from graphopt.data.tables import Columns, cells, names_in
from graphopt.data.tabular import IN_MEMORY, of_columns
from graphopt.errors import GraphoptError, line

# Methods of a data set with rows.
HUGGING_FACE = ("__len__", "__getitem__", "column_names", "features", "with_format")
_Read = Callable[[tuple[int, ...]], dict[str, Any]]  # returns rows of all columns
FRAME = ("columns", "to_numpy", "__getitem__")  # of pandas and Polars


def has_rows(data: Any) -> bool:
    """Return whether `as_dataset` accepts data, because its rows can be read in any order."""
    return isinstance(data, Dataset | Mapping) or _has(data, HUGGING_FACE) or _has(data, FRAME)


def as_dataset(data: Any) -> Dataset:
    """Return data as a data set.

    Args:
        data: a data set; arrays by name; a Hugging Face data set with rows, whose columns are the arrays and are read
            batch by batch; or a DataFrame, whose columns are the features, `target` and `sample_weight`.

    Raises:
        GraphoptError: it is none of these, or its columns are not numbers.
    """
    if isinstance(data, Dataset):
        if data.columns is not None and not data.columns.has_learnt:
            raise GraphoptError(
                f"{data.source}: expected columns that have learnt from training rows, found others: data = "
                "data.learn(rows), with the first rows of graphopt.data.hold_out"
            )
        return data
    if isinstance(data, Mapping):
        return Dataset(data)
    if _has(data, HUGGING_FACE):
        return _of_hugging_face(data)
    if _has(data, FRAME):
        target, weight = (name if name in data.columns else None for name in (TARGET, WEIGHT))
        return table(data, target=target, sample_weight=weight)
    raise GraphoptError(f"data: expected a data set or arrays by name, found {type(data).__name__}")


def table(
    frame: Any,
    *,
    target: str | int | Sequence[str | int] | None = TARGET,
    features: Sequence[str | int] | Mapping[str, Any] | None = None,
    sample_weight: str | int | None = None,
    labels: Sequence[str] | None = None,
    columns: Columns | Mapping[str, Any] | str | None = None,
) -> Dataset:
    """Return the columns of a table in memory as a data set.

    Args:
        frame: a DataFrame of pandas or Polars, or a mapping from names to arrays or lists of cells.
        target, features, sample_weight, labels, columns: as in `graphopt.data.csv`.

    Raises:
        GraphoptError: a column is missing, or a cell is not what its column expects.

    >>> people = graphopt.data.table({"age": [20, None], "bought": ["no", "yes"]}, target="bought", columns="auto")
    >>> people.learn().arrays["x"].tolist(), people.arrays["target"].tolist(), people.labels
    ([[0.0], [0.0]], [0, 1], ('no', 'yes'))
    """
    keys = names_in(frame)

    def read(names: list[str]) -> dict[str, np.ndarray]:
        found = {name: frame[keys[name]] for name in names}
        return {name: x.to_numpy() if hasattr(x, "to_numpy") else cells(name, x) for name, x in found.items()}

    return of_columns(IN_MEMORY, _named(frame), read, target, features, sample_weight, labels, columns)


def _named(frame: Any) -> list[str]:
    return [str(name) for name in getattr(frame, "columns", frame)]


def _has(data: Any, names: tuple[str, ...]) -> bool:
    return all(hasattr(data, name) for name in names)


def _of_hugging_face(data: Any) -> Dataset:
    if not len(data):
        raise GraphoptError("data: expected rows, found none")
    if data.format["type"] == "custom":  # a transform, which makes all columns at once
        read = _reader(data)
        readers = dict.fromkeys(read((0,)), read)
    else:
        readers = {name: _reader(_formatted(data, name)) for name in data.format["columns"]}
    arrays = {name: _Column(len(data), read, name) for name, read in readers.items()}
    names = getattr(data.features.get(TARGET), "names", None)  # of a ClassLabel
    return Dataset(arrays) if names is None else Dataset(arrays, classes=len(names), labels=tuple(names))


def _formatted(data: Any, name: str) -> Any:
    """Return a column in NumPy's types, of which Hugging Face makes float64 float32 unless it is named."""
    leaf = data.features[name]
    while hasattr(leaf, "feature"):  # of a list
        leaf = leaf.feature
    exact = {"dtype": np.float64} if getattr(leaf, "dtype", None) == "float64" else {}
    return data.with_format("numpy", columns=[name], **exact)


def _reader(data: Any) -> _Read:
    """Return what reads rows of a Hugging Face data set, and keeps the last ones until all columns have them."""
    return functools.lru_cache(maxsize=1)(lambda rows: data[list(rows)])


class _Column(LazyArray):
    """Read rows of a column."""

    def __init__(self, count: int, read: _Read, name: str) -> None:
        self._read, self._name = read, name
        first = self.read(np.array([0]))
        super().__init__((count, *first.shape[1:]), first.dtype)

    def read(self, rows: np.ndarray) -> np.ndarray:
        column = self._read(tuple(rows.tolist())).get(self._name)
        try:
            return np.stack([*map(np.asarray, column)]) if isinstance(column, list) else np.asarray(column)
        except (ValueError, TypeError, RuntimeError) as error:
            raise GraphoptError(
                f"data {self._name!r}: expected arrays of one shape: {line(error)}"
            ) from error
