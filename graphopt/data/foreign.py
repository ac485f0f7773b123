"""Convert data sets and tables of other libraries, which are told by their methods, not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphopt.data.dataset import TARGET, WEIGHT, Dataset
from graphopt.data.files import of_columns, refuse_twice
from graphopt.data.lazy import LazyArray
from graphopt.errors import GraphoptError, line

# Methods of a data set with rows.
HUGGING_FACE = ("__len__", "__getitem__", "column_names", "features", "with_format")
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
        return data
    if isinstance(data, Mapping):
        return Dataset(data)
    if _has(data, HUGGING_FACE):
        return _of_hugging_face(data)
    if _has(data, FRAME):
        columns = {str(name): data[name].to_numpy() for name in data.columns}
        refuse_twice("data", "column", map(str, data.columns))
        return of_columns(
            "data",
            columns,
            target=TARGET if TARGET in columns else None,
            sample_weight=WEIGHT if WEIGHT in columns else None,
        )
    raise GraphoptError(f"data: expected a data set or arrays by name, found {type(data).__name__}")


def _has(data: Any, names: tuple[str, ...]) -> bool:
    return all(hasattr(data, name) for name in names)


def _of_hugging_face(data: Any) -> Dataset:
    if not len(data):
        raise GraphoptError("data: expected rows, found none")
    if data.format["type"] == "custom":  # a transform, which makes all columns at once
        rows = _Rows(data)
        arrays = {name: _Column(rows, name) for name in rows.read(np.array([0]))}
    else:
        arrays = {name: _Column(_Rows(_formatted(data, name)), name) for name in data.format["columns"]}
    names = getattr(data.features.get(TARGET), "names", None)  # of a ClassLabel
    return Dataset(arrays) if names is None else Dataset(arrays, classes=len(names), labels=tuple(names))


def _formatted(data: Any, name: str) -> Any:
    """Return a column in NumPy's types, of which Hugging Face makes float64 float32 unless it is named."""
    leaf = data.features[name]
    while hasattr(leaf, "feature"):  # of a list
        leaf = leaf.feature
    exact = {"dtype": np.float64} if getattr(leaf, "dtype", None) == "float64" else {}
    return data.with_format("numpy", columns=[name], **exact)


class _Rows:
    """Read rows of a Hugging Face data set, and keep the last ones until all columns have them."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self._last: tuple[bytes, dict[str, Any]] = (b"", {})

    def read(self, rows: np.ndarray) -> dict[str, Any]:
        last = self._last
        if last[0] != rows.tobytes():
            last = self._last = (rows.tobytes(), self.data[rows.tolist()])
        return last[1]


class _Column(LazyArray):
    """Read rows of a column."""

    def __init__(self, rows: _Rows, name: str) -> None:
        self._rows, self._name = rows, name
        first = self.read(np.array([0]))
        super().__init__((len(rows.data), *first.shape[1:]), first.dtype)

    def read(self, rows: np.ndarray) -> np.ndarray:
        found = self._rows.read(rows).get(self._name)
        try:
            return np.stack([*map(np.asarray, found)]) if isinstance(found, list) else np.asarray(found)
        except (ValueError, TypeError, RuntimeError) as error:
            raise GraphoptError(
                f"data {self._name!r}: expected arrays of one shape: {line(error)}"
            ) from error
