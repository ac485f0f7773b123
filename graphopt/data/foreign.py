"""Convert data sets and tables of other libraries, which it recognizes by their methods, without importing them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.data.columnar import arrays_of_arrow
from graphopt.data.dataset import FEATURES, TARGET, WEIGHT, Array, Dataset, LazyArray, with_rows
from graphopt.data.tables import Columns, cells, is_frame, names_in
from graphopt.data.tabular import IN_MEMORY, of_columns
from graphopt.errors import GraphoptError, kind_of, line, some
from graphopt.graph.metadata import column_names_in
from graphopt.graph.roles import Role, role_of

# Methods of a data set with rows.
HUGGING_FACE = ("__len__", "__getitem__", "column_names", "features", "with_format")
_Read = Callable[[tuple[int, ...]], dict[str, Any]]  # returns rows of all columns
_X = "X"  # the array that feeds the only input


def has_rows(data: object) -> bool:
    """Return whether data has rows that can be read in any order, and is no iterable of batches.

    A tuple is `(X, y)` or `(X, y, sample_weight)`, unless it ends with a mapping, which is a batch.
    """
    if isinstance(data, tuple) and data:
        return not isinstance(data[-1], Mapping)
    known = isinstance(data, Dataset | Mapping | np.ndarray | LazyArray)
    return known or _is_hugging_face(data) or is_frame(data)


def as_dataset(data: Any, inputs: Mapping[str, ir.Value] | None = None, names: Sequence[str] | None = None) -> Dataset:
    """Return data as a data set, with the plain columns of a table in the order of those that trained, by their names.

    Args:
        data: a data set; arrays by name; a Hugging Face data set with rows, whose columns are the arrays and are read
            batch by batch; a DataFrame, whose columns are the features, `target` and `sample_weight`; or a tuple
            `(X, y)` or `(X, y, sample_weight)`, whose X feeds the only input, or is arrays by name.
        inputs: the inputs of the model, which decide what the columns of a DataFrame feed: those of several inputs
            have the names of columns, and one of strings reads all.
        names: the names of the columns that train; by default, those that the only input notes, if it does.

    Raises:
        GraphoptError: it is none of these, its columns are not numbers, or they have other names.
    """
    wanted = _data_inputs(inputs)
    names = column_names_in([*wanted.values()]) if names is None else names
    if isinstance(data, Dataset):
        if data.columns is not None and not data.columns.has_learnt:
            raise GraphoptError(
                f"{data.source}: expected columns that have learnt from training rows, found others: data = "
                "data.learn(rows), with the first rows of graphopt.data.hold_out"
            )
        return data if names is None else _in_order(data, names, next(iter(wanted), FEATURES))
    if isinstance(data, Mapping):
        return Dataset({name: with_rows(x) for name, x in data.items()})
    if _is_hugging_face(data):
        return _of_hugging_face(data)
    if is_frame(data):
        target, weight = (name if name in data.columns else None for name in (TARGET, WEIGHT))
        features = _features_by_input(names_in(data), wanted, names)
        return table(data, target=target, features=features, sample_weight=weight)
    if isinstance(data, tuple):
        return _of_tuple(data, inputs)
    raise GraphoptError(
        f"data: expected (X, y), arrays by name such as {{'x': X, 'target': y}}, a DataFrame or a data set, found "
        f"{kind_of(data)}"
    )


def _in_order(data: Dataset, names: Sequence[str], input_: str) -> Dataset:
    """Return plain columns of a table in the order of those that trained; arrays without names are read by place.

    Raises:
        GraphoptError: one of them is missing.
    """
    found = data.column_names
    if found is None or found == [*names]:
        return data
    _check_there(data.source, names, found)
    key = input_ if input_ in data.arrays or data.features is None else data.features
    array = data.arrays.get(key)
    if not isinstance(array, np.ndarray) or array.shape[1:] != (len(found),):
        raise GraphoptError(
            f"{data.source}: expected the columns {some(names, 10)} in this order, found {some(found, 10)}: "
            "name them so"
        )
    places = [found.index(name) for name in names]
    return replace(data, arrays={**data.arrays, key: array[:, places]}, names=[*names])


def _check_there(source: str, names: Sequence[str], found: Sequence[str]) -> None:
    """Raise an error if one of the columns that trained is missing in others."""
    if missing := [name for name in names if name not in found]:
        raise GraphoptError(
            f"{source}: expected the column {missing[0]!r}, on which the model was trained, found {some(found, 20)}: "
            "rename a column, or give an array, which is read by place"
        )


def _features_by_input(
    columns: Mapping[str, object], wanted: Mapping[str, ir.Value], names: Sequence[str] | None
) -> Any:
    """Return the columns of a DataFrame by the inputs that read them, or None for one array of all features."""
    if len(wanted) == 1 and _reads_strings(wanted):
        return {only: [name for name in columns if name not in (TARGET, WEIGHT)] for only in wanted}
    if names is not None:
        _check_there(IN_MEMORY, names, [name for name in columns if name not in (TARGET, WEIGHT)])
        return names
    return {name: name for name in wanted} if len(wanted) > 1 and columns.keys() >= wanted.keys() else None


def _data_inputs(inputs: Mapping[str, ir.Value] | None) -> dict[str, ir.Value]:
    """Return the inputs of a model, without those that a loss reads."""
    return {name: x for name, x in (inputs or {}).items() if role_of(x) in (None, Role.DATA)}


def _reads_strings(inputs: Mapping[str, ir.Value]) -> bool:
    return any(x.dtype is ir.DataType.STRING for x in inputs.values())


def features_of(data: object, inputs: Mapping[str, ir.Value] | None = None) -> Dataset:
    """Return the arrays for a model's inputs as a data set, without targets and weights, from such data or from X.

    `inputs` is as in `as_dataset`.
    """
    is_alone = not has_rows(data) or isinstance(data, np.ndarray | LazyArray)
    dataset = _of_features(data, inputs) if is_alone else as_dataset(data, inputs)
    arrays = dataset.inputs()
    if not arrays:
        raise GraphoptError(f"data: expected arrays for the model's inputs, found {', '.join(dataset.arrays)} alone")
    return replace(dataset, arrays=arrays)


def relabelled(data: Dataset, labels: Sequence[str] | None, name: str) -> Dataset:
    """Return data whose classes have the numbers that they have in `labels`; `name` is the use of the data."""
    if labels is None or data.labels is None or list(data.labels) == list(labels):
        return data
    if missing := [label for label in data.labels if label not in labels]:
        raise GraphoptError(
            f"{name}: expected the classes {', '.join(map(str, labels))}, found {', '.join(map(str, missing))}"
        )
    places = np.array([list(labels).index(label) for label in data.labels])
    target = np.asarray(data.arrays[TARGET])
    named = (target >= 0) & (target < len(places))  # not those that a loss ignores
    arrays = {**data.arrays, TARGET: np.where(named, places[np.where(named, target, 0)], target)}
    return replace(data, arrays=arrays, classes=len(labels), labels=tuple(labels))


def check_both_named(data: Dataset, labels: Sequence[str] | None, name: str) -> None:
    """Raise an error unless classes have names here and in other data, or in neither: numbers may be others' places."""
    if TARGET in data.arrays and (data.labels is None) != (labels is None):
        found = "those without" if data.labels is None else f"the names {', '.join(map(str, data.labels))}"
        others = "numbers alone" if labels is None else f"the names {', '.join(map(str, labels))}"
        raise GraphoptError(
            f"{name}: expected classes as in the other data, which have {others}, found {found}: name both in the "
            "order of the numbers, by data.labels=[...] or graphopt.data.Dataset(arrays, labels=[...])"
        )


def _of_tuple(data: tuple[object, ...], wanted: Mapping[str, ir.Value] | None) -> Dataset:
    """Return `(X, y)` or `(X, y, sample_weight)` as a data set; y may be the names of classes."""
    if len(data) not in (2, 3) or any(part is None for part in data):
        found = ", ".join(map(kind_of, data))
        raise GraphoptError(f"data: expected (X, y) or (X, y, sample_weight), found ({found})")
    inputs, labels = _of_features(data[0], wanted), None
    target: Any = _as_array("y", data[1])
    if is_text(target):
        labels, target = by_name(target)
    arrays = {**inputs.arrays, TARGET: _numeric("y", target)}
    if len(data) == 3:
        arrays[WEIGHT] = _numeric("sample_weight", data[2])
    return replace(inputs, arrays=arrays, classes=None if labels is None else len(labels), labels=labels)


def is_text(array: Array) -> bool:
    """Return whether an array holds strings."""
    return array.dtype.kind in "UST" or (
        array.dtype == object and all(isinstance(x, str) for x in np.asarray(array).flat)
    )


def by_name(target: Array) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of classes, sorted, and the number of that of each row."""
    texts: Any = np.asarray(target)
    names, numbers = np.unique(np.array(texts.tolist(), str), return_inverse=True)
    return tuple(map(str, names)), numbers


def _of_features(data: object, inputs: Mapping[str, ir.Value] | None) -> Dataset:
    """Return X: arrays by name, a table, or one array, which feeds the only input."""
    if isinstance(data, Mapping):
        return Dataset({name: _numbers_or_texts(f"X[{name!r}]", x) for name, x in data.items()})
    if is_frame(data):
        table = as_dataset(data, inputs)
        return replace(table, arrays=table.inputs())
    array = _numbers_or_texts if _reads_strings(_data_inputs(inputs)) else _numeric
    return Dataset({_X: array(_X, data)}, _X)


def _as_array(name: str, data: object) -> Array:
    """Return an array, or what NumPy makes one of: a list, a Series, a tensor in host memory."""
    data = with_rows(data)
    if isinstance(data, np.ndarray | LazyArray):
        return data
    try:
        return np.asarray(data)
    except (ValueError, TypeError, RuntimeError) as error:
        raise GraphoptError(f"data: {name}: expected an array, found {kind_of(data)}: {line(error)}") from error


def _numeric(name: str, data: object) -> Array:
    """Return an array of numbers, or raise an error."""
    array = _as_array(name, data)
    if array.dtype.kind in "OUSTMm" or not array.ndim:
        found = kind_of(np.asarray(array).item()) if not array.ndim else f"type {array.dtype}"
        raise GraphoptError(f"data: {name}: expected an array of numbers with a row each, found {found}")
    return array


def _numbers_or_texts(name: str, data: object) -> Array:
    """Return an array of numbers or of strings, or raise an error."""
    array = _as_array(name, data)
    return array if array.ndim and array.dtype.kind != "S" and is_text(array) else _numeric(name, array)


@checked()
def table(
    frame: Any,
    *,
    target: str | int | Sequence[str | int] | None = TARGET,
    features: Sequence[str | int] | Mapping[str, Any] | None = None,
    sample_weight: str | int | None = None,
    labels: Sequence[str | int | float | bool] | None = None,
    columns: Columns | Mapping[str, Any] | str | None = None,
) -> Dataset:
    """Return the columns of a table in memory as a data set.

    Args:
        frame: a DataFrame of pandas or Polars, a table of pyarrow, or a mapping from names to arrays or lists of cells.
        target, features, sample_weight, labels, columns: as in `graphopt.data.csv`.

    Raises:
        GraphoptError: a column is missing, or a cell is not what its column expects.

    >>> people = graphopt.data.table({"age": [20, None], "bought": ["no", "yes"]}, target="bought", columns="auto")
    >>> people.learn().arrays["x"].tolist(), people.arrays["target"].tolist(), people.labels
    ([[0.0], [0.0]], [0, 1], ('no', 'yes'))
    """
    frame = as_columns(frame)
    keys = names_in(frame)

    def read(names: list[str]) -> dict[str, np.ndarray]:
        found = {name: frame[keys[name]] for name in names}
        return {name: x.to_numpy() if hasattr(x, "to_numpy") else cells(name, x) for name, x in found.items()}

    names = [str(name) for name in getattr(frame, "columns", frame)]  # of which two may be the same
    return of_columns(IN_MEMORY, names, read, target, features, sample_weight, labels, columns)


def as_columns(table: Any) -> Any:
    """Return a table of pyarrow as arrays by name, and every other table as it is."""
    if not all(hasattr(table, name) for name in ("column_names", "schema", "to_pydict")):
        return table
    return arrays_of_arrow(table)


def _is_hugging_face(data: object) -> bool:
    return all(hasattr(data, name) for name in HUGGING_FACE)


def _of_hugging_face(data: Any) -> Dataset:
    if not len(data):
        raise GraphoptError("data: expected rows, found none")
    if data.format["type"] == "custom":  # a transform, which makes all columns at once
        read = _reader(data)
        readers = dict.fromkeys(read((0,)), read)
    else:
        readers = {name: _reader(_formatted(data, name)) for name in data.format["columns"]}
    arrays = {name: _HubColumn(len(data), read, name) for name, read in readers.items()}
    names = getattr(data.features.get(TARGET), "names", None)  # of a ClassLabel
    return Dataset(arrays) if names is None else Dataset(arrays, classes=len(names), labels=tuple(names))


def _formatted(data: Any, name: str) -> object:
    """Return a column in NumPy's types, of which Hugging Face makes float64 float32 unless it is named."""
    leaf = data.features[name]
    while hasattr(leaf, "feature"):  # of a list
        leaf = leaf.feature
    exact = {"dtype": np.float64} if getattr(leaf, "dtype", None) == "float64" else {}
    return data.with_format("numpy", columns=[name], **exact)


def _reader(data: Any) -> _Read:
    """Return a function that reads rows of a Hugging Face data set, and keeps the last ones for all columns."""
    return functools.lru_cache(maxsize=1)(lambda rows: data[list(rows)])


class _HubColumn(LazyArray):
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
            raise GraphoptError(f"data {self._name!r}: expected arrays of one shape: {line(error)}") from error
