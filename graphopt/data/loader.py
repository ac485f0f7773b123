"""Cut a data set into batches that match a training graph: choose its rows, order, check and read them."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir

from graphopt.arguments import Checked, checked
from graphopt.data.dataset import TARGET, WEIGHT, Array, Dataset, LazyArray
from graphopt.data.foreign import as_dataset
from graphopt.data.language.preferences import FIELDS
from graphopt.data.tabular import ANY, IN_MEMORY, option, read_as_input
from graphopt.errors import GraphoptError, kind_of, some
from graphopt.graph.roles import Role, labels_of, role_of
from graphopt.graph.values import dtype_of, name_of
from graphopt.moments import pieces, row_index

Rows = range | np.ndarray
HASHED_BYTES = 2**26  # of each array
Shuffle = bool | Literal["consecutive"]
LEAST_POISSON = 24  # expected rows of a batch by Poisson sampling: one of 2.6e10 is empty
T = TypeVar("T")
Runs = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]  # computes outputs from inputs, by name
MOST_RUN, ROWS_AT_ONCE = 2048, 64  # rows on which a model runs for a pass that learns


class Batches:
    """Check a data set against a training graph's inputs, and cut it into batches of the graph's types.

    Arrays in memory are checked at once. Memory-mapped and lazy arrays are checked batch by batch.

    Args:
        data: a data set, or arrays by name.
        inputs: the inputs of the graph, by name: `Executor.inputs`.
        allow_nan: accept NaN and infinities.

    Attributes:
        data, inputs: the data set, and the inputs.
        fixed_size: the batch size if the graph's batch dimension is static, otherwise None.
        is_lazy: whether rows of any array are read when a batch needs them.

    Raises:
        GraphoptError: an array has the wrong name, shape, type or labels, or contains NaN or infinities.
    """

    def __init__(
        self, data: Dataset | Mapping[str, Array], inputs: Mapping[str, ir.Value], *, allow_nan: bool = False
    ) -> None:
        data = as_dataset(data, inputs)
        self._columns = [_Column(value, array, allow_nan, data) for value, array in _match(data, inputs)]
        self.data, self.inputs = data, inputs
        self._count, self.fixed_size = len(data), fixed_batch(inputs)
        self.is_lazy = any(column.lazy for column in self._columns)
        for column in self._columns:
            if not column.lazy:
                for rows in pieces(range(self._count), column.array[:1].size):
                    column.check(rows, column.array[row_index(rows)])

    def __len__(self) -> int:
        return self._count

    def digest(self) -> str:
        """Return the SHA-256 sum of the types, shapes and numbers; of large arrays, of some of their rows."""
        checksum = hashlib.sha256()
        for column in self._columns:
            array = column.array
            checksum.update(f"{column.name} {array.dtype} {array.shape}".encode())
            rows = np.linspace(0, len(array) - 1, min(len(array), HASHED_BYTES * len(array) // (array.nbytes + 1) + 1))
            read = array[rows.astype(np.int64)]
            read = read.astype(str) if read.dtype == object else read
            checksum.update(np.ascontiguousarray(read).tobytes())
        return checksum.hexdigest()

    @staticmethod
    def split(rows: Rows, size: int) -> Iterator[Rows]:
        """Cut rows into runs of `size` rows; the last run may be shorter."""
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return rows by name in the graph's types and shapes; do not copy ranges of the right type."""
        return {column.name: column.take(rows) for column in self._columns}


def other_shape(expected: Sequence[object], found: tuple[int, ...], name: str, *, are_pictures: bool = False) -> str:
    """Return how to give rows another shape, if that keeps neighbouring numbers together; else nothing.

    Args:
        are_pictures: whether `graphopt.data.images` reads the rows, which has an option for their size.
    """
    moves = set()
    for axis in range(len(found) if len(found) == len(expected) else 0):
        rest = [i for i in range(len(found)) if i != axis]
        orders = [(*rest[:to], axis, *rest[to:]) for to in range(len(found))]
        moves |= {
            order
            for order in orders
            if all(not isinstance(x, int) or x == found[i] for x, i in zip(expected, order, strict=True))
        }
    if len(moves) == 1:
        order = ", ".join(str(i + 1) for i in next(iter(moves)))
        return f": move the axes of each row, {name}.transpose(0, {order})"
    sizes = [x for x in expected if isinstance(x, int)]
    for axis in (0, 2) if are_pictures and len(sizes) == len(found) == 3 else ():
        if sizes[axis] == found[axis] and found[axis] in (1, 3):
            return f": resize the pictures, data.size=[{sizes[1 - axis // 2]},{sizes[2 - axis // 2]}]"
    long = [[x for x in shape if x != 1] for shape in (sizes, found)]
    if len(sizes) < len(expected) or math.prod(sizes) != math.prod(found) or not found:
        return ""
    keeps = long[0] == long[1] or min(map(len, long)) <= 1
    return ": reshape each row, which has as many numbers" if keeps else ""


def fixed_batch(inputs: Mapping[str, ir.Value]) -> int | None:
    """Return the batch size if the batch dimension of a graph's inputs is static, otherwise None."""
    sizes = [value.shape[0] for value in inputs.values() if value.shape]
    return next((size for size in sizes if isinstance(size, int)), None)


def _match(data: Dataset, inputs: Mapping[str, ir.Value]) -> list[tuple[ir.Value, Array]]:
    """Pair the graph's inputs with arrays by name."""
    features = [name for name, value in inputs.items() if role_of(value) is Role.DATA]
    ends = {name.removeprefix(f"{data.features}") for name in data.arrays}
    companions = [f"{name}{end}" for name in features for end in ends if end.startswith("_")]
    arrays = _fed_arrays(data, [*features, *(name for name in companions if name in inputs)], inputs)
    for role in (Role.TARGET, Role.SAMPLE_WEIGHT):  # a model that computes its own loss may use other names
        own = [name for name, value in inputs.items() if role_of(value) is role and name not in arrays]
        if len(own) == 1 and role.value in arrays and role.value not in inputs:
            arrays[own[0]] = arrays.pop(role.value)
    has_target = TARGET in inputs or any(role_of(x) is Role.TARGET for x in inputs.values())
    unread = [TARGET] if TARGET in arrays and not has_target else []
    arrays = {name: x for name, x in arrays.items() if name in inputs or name not in (*data.spare, *unread)}
    for names, warning in data.marks:
        if not any(name in arrays for name in names):
            warnings.warn(f"{data.source}: {warning}", stacklevel=2)
    if set(arrays) != set(inputs):
        is_extra = WEIGHT in arrays and WEIGHT not in inputs
        extra = " (set sample_weight of the loss to use weights)" if is_extra else ""
        lacking = [fields for end, fields in FIELDS.items() if any(x.endswith(end) for x in inputs.keys() - arrays)]
        extra += f" (of text: JSON lines with {lacking[0]})" if lacking else ""
        expected, found = (", ".join(map(repr, names)) for names in (inputs, arrays))
        if data.features in arrays and len(features) > 1:
            names = ", ".join(f"{name!r}: ..." for name in features)
            extra = f"{extra}: as X, write {{{names}}}"
        raise GraphoptError(f"data: expected arrays {expected}, found {found}{extra}: rename, add or remove arrays")
    if unread:
        warnings.warn(f"{data.source}: no input of the graph reads {TARGET!r}, which has no effect", stacklevel=2)
    return [(value, arrays[name]) for name, value in inputs.items()]


def _fed_arrays(data: Dataset, names: Sequence[str], inputs: Mapping[str, ir.Value]) -> dict[str, Array]:
    """Return the arrays by name, as `Dataset.feeding`, those of a table's cells as inputs of their types read them."""
    arrays = data.feeding(names)
    for name in data.cells_of:
        if name in arrays and name in inputs and (dtype := inputs[name].dtype) is not None:
            arrays[name] = read_as_input(data, name, dtype)
    return arrays


class _Column:
    """Pair an array with the input that it feeds."""

    def __init__(self, value: ir.Value, array: Array, allow_nan: bool, data: Dataset) -> None:
        self.name = name_of(value)
        self.array = array
        self.lazy = isinstance(array, np.memmap | LazyArray)
        self._dtype = np.dtype(dtype_of(value).numpy())
        self._allow_nan = allow_nan
        self._table = data if data.names and array is data.arrays.get(str(data.features)) else None
        self._labels, self._is_text = labels_of(value), data.tokens is not None
        self._is_picture = data.pixel_range is not None
        self._is_target = role_of(value) is Role.TARGET
        self._check_type(dtype_of(value))
        self._shape = self._row_shape(value.shape)

    def take(self, rows: Rows) -> np.ndarray:
        part = self.array[row_index(rows)]
        if self.lazy:
            self.check(rows, part)
        with np.errstate(over="ignore"):  # `check` tells
            part = np.asarray(part).astype(self._dtype, copy=False)
        return np.ascontiguousarray(part).reshape(len(rows), *self._shape)

    def check(self, rows: Rows, part: np.ndarray) -> None:
        """Raise an error if numbers are not finite in the graph's type, or labels are outside the classes.

        Rows of a lazy array may also have another type or shape than its first one.
        """
        if (part.dtype, part.shape[1:]) != (self.array.dtype, self.array.shape[1:]):
            found, expected = (f"{x.dtype} rows of shape {_shape_text(x.shape[1:])}" for x in (part, self.array))
            raise GraphoptError(f"data {self.name!r}: expected {expected} as the first, found {found}")
        if part.dtype.kind == "f" and not self._allow_nan:
            with np.errstate(over="ignore"):
                wrong = ~np.isfinite(part.astype(self._dtype, copy=False))
            in_range = f"numbers in the range of {self._dtype}"
            self._refuse(rows, part, wrong & np.isfinite(part), in_range, ": divide it by a number")
            self._refuse(rows, part, wrong, "finite numbers", "; set allow_nan to train with it")
        if part.dtype == object:
            wrong = np.array([not isinstance(x, str) for x in part.flat], bool).reshape(part.shape)
            self._refuse(rows, part, wrong, "strings", ": write missing ones as ''")
        if self._labels is not None:
            is_single = self._labels.several and self._labels.high == 0
            mend = "; a model with one output has one class: for quantities, choose loss=mean_squared_error, for two "
            mend = f"{mend}classes loss=binary_cross_entropy" if is_single else ""
            self._refuse(rows, part, self._labels.wrong(part), str(self._labels), mend)

    def _refuse(self, rows: Rows, part: np.ndarray, wrong: np.ndarray, expected: str, mend: str = "") -> None:
        if wrong.any():
            place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            found, row = str(part[place]).replace("nan", "NaN"), int(rows[place[0]])
            if self._table is not None and self._table.names is not None and part.ndim == 2:
                path, name = self._table.source, self._table.names[place[1]]
                is_missing = found == "NaN" or part.dtype == object
                fill = f", or fill it in: {option(path, 'columns', 'auto')}" if is_missing else ""
                raise GraphoptError(
                    f"{path}: column {name!r}, row {row}: expected {expected}, found {found}{mend}{fill}"
                )
            raise GraphoptError(f"data {self.name!r}: expected {expected}, found {found} in row {row}{mend}")

    def _check_type(self, expected: ir.DataType) -> None:
        found = self.array.dtype
        if (found.kind == "f" and expected.is_floating_point()) or (
            found.kind in "OUT" and expected is ir.DataType.STRING
        ):
            return
        if expected is ir.DataType.STRING:
            mend = "convert it with .astype(str)"
            if self._table is not None and self._table.names is not None:  # whose cells are gone
                columns = f"{{{self.name}: [{', '.join(self._table.names)}]}}"
                mend = f"name the columns that the input reads, {option(self._table.source, 'features', columns)}"
            raise GraphoptError(f"data {self.name!r}: expected strings, found {found}: {mend}")
        if found.kind not in "iufb" or not np.can_cast(found, self._dtype, casting="same_kind"):
            mend = ""
            if not self._is_target and found.kind in "OUSTM":
                mend = f": {option(IN_MEMORY, 'columns', 'auto')} makes features of text and dates"
            if self._is_target and self._dtype.kind in "iu" and found.kind in "fUSO":
                mend = ": number the classes from 0, as int64; for quantities, choose a loss such as mean_squared_error"
                if found.kind == "f" and self.array.ndim > 1:
                    mend = (
                        ": number the classes, with argmax(axis=1), or set target_probabilities of the loss; for "
                        "quantities, choose loss=mean_squared_error"
                    )
            raise GraphoptError(f"data {self.name!r}: expected {self._dtype}, found {found}{mend}")

    def _row_shape(self, shape: ir.Shape | None) -> tuple[int, ...]:
        """Return the shape of a row; add or drop a last axis of size 1 if the input requires it."""
        found = self.array.shape[1:]
        if shape is None:
            return found
        for candidate in (found, (*found, 1), found[:-1] if found[-1:] == (1,) else found):
            dims = zip(list(shape)[1:], candidate, strict=False)
            if len(candidate) == len(shape) - 1 and all(not isinstance(dim, int) or dim == size for dim, size in dims):
                return candidate
        static = [dim for dim in list(shape)[1:] if isinstance(dim, int)]
        is_class = self._is_target and self.array.dtype.kind in "iu" and found in ((), (1,))
        mend = ": for class numbers, choose loss=cross_entropy" if is_class else ""
        if self._is_target and self._labels is not None and self._labels.several and not shape[1:] and found:
            mend = (
                ": cross_entropy predicts one class of each row; for columns of 0 and 1, choose "
                "loss=binary_cross_entropy, for quantities loss=mean_squared_error"
            )
        mend = other_shape(list(shape)[1:], found, self.name, are_pictures=self._is_picture) or mend
        if self._table is not None and self._table.names and len(static) == len(found) == 1:
            ways = option(self._table.source, "features", ANY)
            named = some([name or repr(name) for name in self._table.names], 10)
            mend = f", of the columns {named}: {ways} names those that the model takes"
        if self._is_text and len(static) == len(found) == 1:
            mend = f": set context={static[0]} and pad_to=context of the data for rows of this length"
            if self._is_target:
                mend = ": set axis=-1 of the loss if logits have classes last, or choose loss=causal_language_model"
        raise GraphoptError(
            f"data {self.name!r}: expected rows of shape {_shape_text(list(shape)[1:])}, found "
            f"{_shape_text(found)}{mend}"
        )


def _shape_text(dims: Iterable[int | ir.SymbolicDim]) -> str:
    return f"[{', '.join(str(dim) if isinstance(dim, int) else str(dim.value or '?') for dim in dims)}]"


@checked()
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
    if not isinstance(rows, int | np.integer):
        raise GraphoptError(f"hold_out: expected the number of rows, found {kind_of(rows)}: give len(X)")
    if not 0 <= share < 1:
        raise GraphoptError(f"validation: expected a share of the rows, at least 0 and less than 1, found {share}")
    count = math.ceil(rows * share)
    if count >= rows:
        raise GraphoptError(
            f"validation: expected a share that leaves rows to train on, found {share} of {rows} rows: 0 holds none out"
        )
    if not shuffle or not count:
        return range(rows - count), range(rows - count, rows)
    chosen = np.sort(np.random.default_rng(seed).permutation(rows)[:count])
    return np.delete(np.arange(rows), chosen), chosen


class TrainingRows:
    """Read the training rows of a data set in pieces, those of inputs in the types and shapes of a model.

    Args:
        opened: returns a function that runs a model.
    """

    def __init__(
        self,
        data: Dataset,
        model: ir.Model,
        rows: Rows,
        opened: Callable[[ir.Model], Runs],
        *,
        allow_nan: bool = False,
    ) -> None:
        self._opened = opened
        self._inputs = {name_of(x): x for x in model.graph.inputs if not x.is_initializer()}
        self._arrays = _fed_arrays(data, list(self._inputs), self._inputs)
        self._rows, self._allow_nan = rows, allow_nan
        self.outputs = partial(data.outputs, "classification")

    def __call__(self, name: str, /) -> Iterator[np.ndarray]:
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

    def run(self, model: ir.Model, rows: int = MOST_RUN) -> Iterator[dict[str, np.ndarray]]:
        """Yield the outputs of a model on rows that are drawn, so many at most, by name."""
        inputs = {name_of(x): x for x in model.graph.inputs if not x.is_initializer()}
        if missing := [name for name in inputs if name not in self._arrays]:
            raise GraphoptError(
                f"data: expected an array {missing[0]!r} to learn from, found {', '.join(map(repr, self._arrays))}"
            )
        arrays = {name: self._arrays[name] for name in inputs}
        batches = Batches(arrays, inputs, allow_nan=self._allow_nan)
        compute, fixed = self._opened(model), fixed_batch(inputs)
        rows = max(rows, fixed or 0)
        drawn = np.random.default_rng(0).permutation(self._rows)[:rows]  # a folder has its rows by class
        for part in Batches.split(drawn, fixed or ROWS_AT_ONCE):
            found = compute(batches.take(np.resize(part, fixed or len(part))))
            if fixed in (None, len(part)):
                yield found
            elif all(np.ndim(y) and len(y) == fixed for y in found.values()):  # rows that fill it up are cut off
                yield {name: y[: len(part)] for name, y in found.items()}


def draw(
    rows: Rows,
    batch_size: int,
    shuffle: Shuffle | Literal["poisson"],
    random: np.random.Generator,
    start: int = 0,
) -> Iterator[Rows]:
    """Yield the rows of each batch of an epoch.

    Args:
        shuffle: True for rows in random order; `consecutive` for runs of neighbouring rows in random order, cut at
            new places in each epoch, which can be read in one piece; `poisson` for rows that are drawn for each batch
            by themselves; False for the order of the data.
        start: the number of rows of the epoch to leave out, because they have been drawn before.
    """
    if shuffle == "poisson":
        rows = np.asarray(rows)
        for _ in range(math.ceil(len(rows) / batch_size)):
            chosen = rows[:0]
            while not len(chosen):
                chosen = rows[random.random(len(rows)) * len(rows) < batch_size]
            if start <= 0:
                yield chosen
            start -= len(chosen)
    elif shuffle == "consecutive":
        batches = list(Batches.split(np.roll(rows, -random.integers(len(rows))), batch_size))
        for i in random.permutation(len(batches)):
            if start < len(batches[i]):
                yield batches[i][start:]
            start = max(start - len(batches[i]), 0)
    else:
        yield from Batches.split((random.permutation(rows) if shuffle else rows)[start:], batch_size)


class Loader(Checked):
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
        for name, number, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
            if not isinstance(number, int | np.integer) or number < least:
                raise GraphoptError(f"{name}: expected {least} or more, found {number!r}")
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
