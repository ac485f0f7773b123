"""Cut a data set into batches that match the inputs of a training graph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.data.dataset import WEIGHT, Array, Dataset, LazyArray
from graphopt.data.foreign import as_dataset
from graphopt.errors import GraphoptError
from graphopt.graph.roles import Role, labels_of, role_of
from graphopt.graph.values import name_of
from graphopt.moments import row_index

Rows = range | np.ndarray
_CHUNK = 4096
HASHED_BYTES = 2**26  # of each array


class Batches:
    """Check a data set against a training graph's inputs, and cut it into batches of the graph's types.

    Arrays in memory are checked at once. Memory-mapped and lazy arrays are checked batch by batch.

    Args:
        data: a data set, or arrays by name.
        inputs: the inputs of the graph, by name: `Executor.inputs`.
        allow_nan: accept NaN and infinities.

    Attributes:
        fixed_size: the batch size if the graph's batch dimension is static, otherwise None.
        is_lazy: whether rows of any array are read when a batch needs them.

    Raises:
        GraphoptError: an array has the wrong name, shape, type or labels, or contains NaN or infinities.
    """

    def __init__(
        self, data: Dataset | Mapping[str, Array], inputs: Mapping[str, ir.Value], *, allow_nan: bool = False
    ) -> None:
        data = as_dataset(data)
        self._columns = [
            _Column(value, array, allow_nan) for value, array in zip(*_match(data, inputs), strict=True)
        ]
        self._count, self.fixed_size = len(data), fixed_batch(inputs)
        self.is_lazy = any(column.lazy for column in self._columns)
        for column in self._columns:
            if not column.lazy:
                for rows in self.split(range(self._count), _CHUNK):
                    column.check(rows, column.array[row_index(rows)])

    def __len__(self) -> int:
        return self._count

    def digest(self) -> str:
        """Return the SHA-256 sum of the types, shapes and numbers; of large arrays, of some of their rows."""
        checksum = hashlib.sha256()
        for column in self._columns:
            array = column.array
            checksum.update(f"{column.name} {array.dtype} {array.shape}".encode())
            rows = np.linspace(
                0, len(array) - 1, min(len(array), HASHED_BYTES * len(array) // (array.nbytes + 1) + 1)
            )
            checksum.update(np.ascontiguousarray(array[rows.astype(np.int64)]).tobytes())
        return checksum.hexdigest()

    @staticmethod
    def split(rows: Rows, size: int) -> Iterator[Rows]:
        """Cut rows into runs of `size` rows; the last run may be shorter."""
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return rows by name in the graph's types and shapes; do not copy ranges of the right type."""
        return {column.name: column.take(rows) for column in self._columns}


def fixed_batch(inputs: Mapping[str, ir.Value]) -> int | None:
    """Return the batch size if the batch dimension of a graph's inputs is static, otherwise None."""
    sizes = [value.shape[0] for value in inputs.values() if value.shape]
    return next((size for size in sizes if isinstance(size, int)), None)


def _match(data: Dataset, inputs: Mapping[str, ir.Value]) -> tuple[list[ir.Value], list[Array]]:
    """Pair the graph's inputs with arrays by name."""
    arrays = data.feeding([name for name, value in inputs.items() if role_of(value) is Role.DATA])
    for role in (Role.TARGET, Role.SAMPLE_WEIGHT):  # a model that computes its own loss may use other names
        own = [name for name, value in inputs.items() if role_of(value) is role and name not in arrays]
        if len(own) == 1 and role.value in arrays and role.value not in inputs:
            arrays[own[0]] = arrays.pop(role.value)
    if set(arrays) != set(inputs):
        is_extra = WEIGHT in arrays and WEIGHT not in inputs
        extra = " (set sample_weight of the loss to use weights)" if is_extra else ""
        expected, found = (", ".join(map(repr, names)) for names in (inputs, arrays))
        raise GraphoptError(
            f"data: expected arrays {expected}, found {found}{extra}: rename, add or remove arrays"
        )
    return list(inputs.values()), [arrays[name] for name in inputs]


class _Column:
    """Pair an array with the input that it feeds."""

    def __init__(self, value: ir.Value, array: Array, allow_nan: bool) -> None:
        assert value.dtype is not None
        self.name = name_of(value)
        self.array = array
        self.lazy = isinstance(array, np.memmap | LazyArray)
        self._dtype = np.dtype(value.dtype.numpy())
        self._allow_nan = allow_nan
        self._labels = labels_of(value)
        self._check_type(value.dtype)
        self._shape = self._row_shape(value.shape)

    def take(self, rows: Rows) -> np.ndarray:
        part = self.array[row_index(rows)]
        if self.lazy:
            self.check(rows, part)
        part = np.asarray(part).astype(self._dtype, copy=False)
        return np.ascontiguousarray(part).reshape(len(rows), *self._shape)

    def check(self, rows: Rows, part: np.ndarray) -> None:
        """Raise an error if numbers are not finite in the graph's type, or labels are outside the classes.

        Rows of a lazy array may also have another type or shape than its first one.
        """
        if (part.dtype, part.shape[1:]) != (self.array.dtype, self.array.shape[1:]):
            found, expected = (f"{x.dtype} rows of shape {_text(x.shape[1:])}" for x in (part, self.array))
            raise GraphoptError(f"data {self.name!r}: expected {expected} as the first, found {found}")
        if part.dtype.kind == "f" and not self._allow_nan:
            with np.errstate(over="ignore"):
                wrong = ~np.isfinite(part.astype(self._dtype, copy=False))
            self._refuse(rows, part, wrong, "finite numbers", "; set allow_nan to train with it")
        if self._labels is not None:
            self._refuse(rows, part, self._labels.wrong(part), str(self._labels))

    def _refuse(self, rows: Rows, part: np.ndarray, wrong: np.ndarray, expected: str, mend: str = "") -> None:
        if wrong.any():
            place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            found = str(part[place]).replace("nan", "NaN")
            raise GraphoptError(
                f"data {self.name!r}: expected {expected}, found {found} in row {int(rows[place[0]])}{mend}"
            )

    def _check_type(self, expected: ir.DataType) -> None:
        found = self.array.dtype
        if found.kind == "f" and expected.is_floating_point():
            return
        if found.kind not in "iufb" or not np.can_cast(found, self._dtype, casting="same_kind"):
            raise GraphoptError(f"data {self.name!r}: expected {self._dtype}, found {found}")

    def _row_shape(self, shape: ir.Shape | None) -> tuple[int, ...]:
        """Return the shape of a row; add or drop a last axis of size 1 if the input requires it."""
        found = self.array.shape[1:]
        if shape is None:
            return found
        for candidate in (found, (*found, 1), found[:-1] if found[-1:] == (1,) else found):
            dims = zip(list(shape)[1:], candidate, strict=False)
            if len(candidate) == len(shape) - 1 and all(
                not isinstance(dim, int) or dim == size for dim, size in dims
            ):
                return candidate
        raise GraphoptError(
            f"data {self.name!r}: expected rows of shape {_text(list(shape)[1:])}, found {_text(found)}"
        )


def _text(dims: Any) -> str:
    return f"[{', '.join(str(dim) if isinstance(dim, int) else str(dim.value or '?') for dim in dims)}]"
