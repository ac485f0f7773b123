"""Define a data set: named arrays with the same number of rows, some of which are read when they are needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.arguments import Checked
from graphopt.data.tables import Columns
from graphopt.errors import GraphoptError, kind_of, naming

FEATURES, TARGET, WEIGHT = "x", "target", "sample_weight"


class LazyArray(Checked):
    """Stand for an array whose rows are read when they are asked for, such as those of a folder of images.

    A data set checks its shape and type at once, and its rows batch by batch.

    Args:
        shape: the shape; the first axis is the rows.
        dtype: the type.

    >>> class Squares(graphopt.data.LazyArray):
    ...     def read(self, rows):
    ...         return (rows[:, None] ** 2).astype(self.dtype)
    >>> Squares((10, 1), "float32")[2:4].tolist()
    [[4.0], [9.0]]
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return rows by their indices, in the array's type."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        return self.read(np.arange(len(self))[rows])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size of the whole array in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Array = np.ndarray | LazyArray


def is_sparse(array: object) -> bool:
    """Return whether an object is a sparse array or matrix of SciPy."""
    return hasattr(array, "tocsr") and hasattr(array, "toarray")


class SparseRows(LazyArray):
    """Read rows of a sparse array, which are made dense batch by batch.

    Args:
        array: the array, in any format of SciPy, with two axes.
        row: the shape of a row that is read, of as many numbers; by default, one axis.
        dtype: the type of the rows; by default, that of the array.
    """

    def __init__(self, array: Any, row: Sequence[int] | None = None, dtype: npt.DTypeLike | None = None) -> None:
        self._rows = array.tocsr()
        super().__init__((array.shape[0], *(array.shape[1:] if row is None else row)), dtype or array.dtype)

    def read(self, rows: np.ndarray) -> np.ndarray:
        dense: np.ndarray = self._rows[rows].toarray().astype(self.dtype, copy=False)
        return dense.reshape(len(rows), *self.shape[1:])


def with_rows(array: object) -> Any:
    """Return the reader of a sparse array's rows, and every other thing as it is."""
    return SparseRows(array) if is_sparse(array) else array


@dataclass(frozen=True)
class Dataset(Checked):
    """Hold arrays by name: the model's inputs, `target`, and optionally `sample_weight`.

    Args:
        arrays: the arrays, in memory, memory-mapped or lazy; the first axis is the rows.
        features: the name of the array that feeds a model with a single input, regardless of that input's name.
        classes: the number of classes of the labels; the largest label + 1 by default.
        labels: the names of the classes in order, if they have names.
        columns: what makes the features of the columns of `table`.
        table: columns of cells by name, from which `columns` or a model's input makes features; pages show them.
        names: the names of the features.
        source: what errors call the data, such as the path of a file.
        spare: the names of arrays that a graph reads only if it has inputs of these names.
        marks: groups of names of arrays that tell what counts in a row, each with the warning for a graph that reads
            none of the group.
        tokens: the number of tokens of all rows of text, without padding.
        pixel_range: how the pixels of images are scaled, as ONNX's metadata `Image.NominalPixelRange` says it.
        cells_of: the columns of `table` that an array is made of, which a model's input reads as strings or as numbers.
        are_places: whether `names` only count the columns of a table without names.

    Raises:
        GraphoptError: the arrays have no rows, or different numbers of rows.
    """

    arrays: Mapping[str, Array]
    features: str | None = None
    classes: int | None = None
    labels: Sequence[str] | None = None
    columns: Columns | None = None
    table: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    names: Sequence[str] | None = None
    source: str = "data"
    spare: Collection[str] = ()
    marks: Sequence[tuple[Collection[str], str]] = ()
    tokens: int | None = None
    pixel_range: str | None = None
    cells_of: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    are_places: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.arrays, Mapping):
            raise GraphoptError(f"data: expected arrays by name, found {kind_of(self.arrays)}")
        for name, array in self.arrays.items():
            if not isinstance(array, np.ndarray | LazyArray) or array.ndim == 0:
                found = "a scalar" if isinstance(array, np.ndarray) else type(array).__name__
                mend = ": numpy.asarray makes one of it" if isinstance(array, list | tuple) else ""
                raise GraphoptError(f"data {name!r}: expected an array of rows, found {found}{mend}")
        rows = {name: len(array) for name, array in [*self.arrays.items(), *self.table.items()]}
        if len(set(rows.values())) > 1:
            found = ", ".join(f"{name!r} {count}" for name, count in rows.items())
            raise GraphoptError(f"data: expected the same number of rows in every array, found {found}")
        if not any(rows.values()):
            raise GraphoptError(f"{self.source}: expected rows, found none")

    def __len__(self) -> int:
        return len(next(iter([*self.arrays.values(), *self.table.values()])))

    def learn(self, rows: range | np.ndarray | None = None) -> Dataset:
        """Return the data with the features of `columns`, which learn from rows of the table.

        Args:
            rows: the indices of the rows that train, the first that `graphopt.data.hold_out` returns; all by default.

        Raises:
            GraphoptError: the data has no columns, or a cell is not what its column expects.

        >>> people = graphopt.data.table({"age": [20, 40], "city": ["Bern", "Oslo"], "target": [0, 1]}, columns="auto")
        >>> people.learn().arrays["x"].tolist()
        [[-1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
        """
        if self.columns is None:
            raise GraphoptError("data: expected columns that learn, found none: read it with columns='auto'")
        with naming(self.source):
            columns = self.columns.learn(self.table, rows)
        return self.encoded(columns)

    def encoded(self, columns: Columns) -> Dataset:
        """Return the data with the features of columns that have learnt."""
        with naming(self.source):
            arrays = {**self.arrays, FEATURES: columns.encode(self.table)}
        return replace(self, arrays=arrays, features=FEATURES, columns=columns, names=columns.names)

    @property
    def column_names(self) -> list[str] | None:
        """Return the names of the plain columns of a table that are the features, by which others are read, or None."""
        return None if self.names is None or self.are_places or self.columns is not None else [*self.names]

    def inputs(self) -> dict[str, Array]:
        """Return the arrays for the model's inputs, without targets and sample weights."""
        return {
            name: array
            for name, array in self.arrays.items()
            if name != TARGET and not name.startswith(f"{TARGET}_") and name != WEIGHT
        }

    def feeding(self, names: Collection[str]) -> dict[str, Array]:
        """Return the arrays by name, the features under the name of the only input that has no array.

        If inputs without arrays are companions of one of them, such as `NAME_rejected`, arrays are renamed alike.

        Args:
            names: the names of the model's inputs.
        """
        missing = [name for name in names if name not in self.arrays]
        if self.features is None or self.features in names or not missing:
            return dict(self.arrays)
        first = min(missing, key=len)
        renamed = {f"{self.features}{name.removeprefix(first)}": name for name in missing}
        if not all(name.startswith(first) for name in missing) or not set(renamed) <= set(self.arrays):
            return dict(self.arrays)
        return {renamed.get(name, name): x for name, x in self.arrays.items()}

    def outputs(self, task: str) -> int:
        """Return the number of outputs that a model needs per row, or per position of a sequence.

        Args:
            task: `classification` for one output per class; otherwise one per column of the target.
        """
        if TARGET not in self.arrays:
            raise GraphoptError(f"data: expected an array 'target', found {', '.join(self.arrays)}")
        target = self.arrays[TARGET]
        if task == "classification" and target.dtype.kind in "iub":
            return self.classes or int(np.max(target)) + 1
        return int(np.prod(target.shape[1:], dtype=np.int64))
