"""Read data sets from files."""

from __future__ import annotations

import contextlib
import csv as reader
import lzma
import stat
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.data.dataset import TARGET, Dataset
from graphopt.errors import GraphoptError, line, unknown

ARROW = b"ARROW1"  # the start of a file in the IPC file format
EXPANSION = 100  # bytes of data for each byte of a compressed file
NUMBER = 8  # bytes
UNSUSPICIOUS = 2**30  # bytes of data that a file of any size may expand to

# Exceptions of NumPy and the decompressors for damaged or malicious files.
BROKEN = (
    ValueError,
    EOFError,
    OverflowError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    tokenize.TokenError,
)


def npz(path: str, *, expansion: int = EXPANSION) -> Dataset:
    """Read the arrays of a NumPy archive: the model's inputs by name, and `target`.

    Args:
        expansion: the maximum ratio of the arrays' size to the file's size; arrays of up to 1 GiB are always
            accepted.

    Raises:
        GraphoptError: the file is missing, is not a NumPy archive of plain arrays, or expands too far.
    """
    archive = _load(Path(path), "a NumPy archive (.npz)")
    if isinstance(archive, np.ndarray):
        raise GraphoptError(f"{path}: expected a NumPy archive (.npz), found one array: use data=npy")
    with archive:
        members = archive.zip.infolist()
        _check_expansion(path, sum(member.file_size for member in members), expansion)
        refuse_twice(path, "array", archive.files)
        try:
            arrays = {name: archive[name] for name in archive.files}
        except OSError as error:
            raise GraphoptError(f"{path}: {reason(error)}") from error
        except (*BROKEN, RuntimeError) as error:  # RuntimeError: the archive is encrypted
            raise GraphoptError(f"{path}: expected arrays of numbers: {_problem(error)}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise GraphoptError(f"{path}: expected arrays of numbers, found {name!r}, which is not an array")
    return Dataset(arrays)


def npy(path: str) -> Dataset:
    """Memory-map the arrays of a folder of `NAME.npy` files, so that each batch reads only its own rows.

    Raises:
        GraphoptError: the folder is missing or has no such files, or a file is not an array of numbers.
    """
    files = sorted(Path(path).glob("*.npy"))
    if not files:
        raise GraphoptError(f"{path}: expected a folder with a file NAME.npy per input, found none")
    return Dataset({file.stem: _load(file, "a NumPy array (.npy)", "r") for file in files})


def csv(
    path: str,
    *,
    target: str | int | Sequence[str | int] | None = TARGET,
    features: Sequence[str | int] | Mapping[str, Any] | None = None,
    sample_weight: str | int | None = None,
    labels: Sequence[str] | None = None,
    delimiter: str = ",",
    header: bool = True,
) -> Dataset:
    """Read columns of a text file.

    Args:
        target: the column or columns to predict; None if the file has none, for predictions.
        features: the columns to predict from, all others by default; or a mapping from the model's inputs to columns.
        sample_weight: the column of sample weights.
        labels: the classes in order, if the target column is text.
        delimiter: the character between two columns.
        header: read the names of columns from the first line; otherwise the names are 0, 1, ...

    Raises:
        GraphoptError: the file or a column is missing, or a field is not a number. Empty fields are NaN.
    """
    if len(delimiter) != 1 or delimiter in '\r\n"\0':
        raise GraphoptError(
            f"data.delimiter: expected one character that separates columns, found {delimiter!r}"
        )
    check_regular(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in reader.reader(file, delimiter=delimiter) if row]
    except OSError as error:
        raise GraphoptError(f"{path}: {reason(error)}") from error
    except (UnicodeDecodeError, reader.Error) as error:
        raise GraphoptError(f"{path}: expected a text file of columns: {error}") from error
    if not rows:
        raise GraphoptError(f"{path}: expected rows, found an empty file")
    names = rows.pop(0) if header else [str(i) for i in range(len(rows[0]))]
    for i, row in enumerate(rows):
        if len(row) != len(names):
            raise GraphoptError(f"{path}: row {i}: expected {len(names)} columns, found {len(row)}")
    names = [name.strip() for name in names]
    refuse_twice(path, "column", names)
    columns = {name: [row[i].strip() for row in rows] for i, name in enumerate(names)}
    return of_columns(path, columns, target, features, sample_weight, labels)


def parquet(
    path: str,
    *,
    target: str | Sequence[str] | None = TARGET,
    features: Sequence[str] | Mapping[str, Any] | None = None,
    sample_weight: str | None = None,
    labels: Sequence[str] | None = None,
    expansion: int = EXPANSION,
) -> Dataset:
    """Read columns of a Parquet file; see `csv` and `npz` for the arguments.

    A column of lists of a fixed size is one of arrays.

    Raises:
        GraphoptError: pyarrow is not installed, the file or a column is missing, a column is not numeric, or the file
            expands too far.
    """
    pyarrow = pyarrow_for("data=parquet")
    check_regular(path)
    with _read_by(pyarrow, path, "a Parquet file"), pyarrow.parquet.ParquetFile(path) as file:
        cells = _cells(pyarrow, path, file.schema_arrow)
        _check_expansion(path, NUMBER * file.metadata.num_rows * cells, expansion)
        columns = _columns(path, file.read())
    return of_columns(path, columns, target, features, sample_weight, labels)


def arrow(
    path: str,
    *,
    target: str | Sequence[str] | None = TARGET,
    features: Sequence[str] | Mapping[str, Any] | None = None,
    sample_weight: str | None = None,
    labels: Sequence[str] | None = None,
    expansion: int = EXPANSION,
) -> Dataset:
    """Read columns of an Arrow file: the IPC file format, which Feather V2 is, or the stream format.

    See `csv` and `npz` for the arguments. A column of lists of a fixed size is one of arrays.

    Raises:
        GraphoptError: pyarrow is not installed, the file or a column is missing, a column is not numeric, or the file
            expands too far.
    """
    pyarrow = pyarrow_for("data=arrow")
    check_regular(path)
    with _read_by(pyarrow, path, "an Arrow file"), pyarrow.memory_map(path) as file:
        is_file = file.read(len(ARROW)) == ARROW
        file.seek(0)
        reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        _cells(pyarrow, path, reader.schema)
        batches, size = [], 0
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            size += batch.get_total_buffer_size()
            _check_expansion(path, size, expansion)
            batches.append(batch)
        table = pyarrow.Table.from_batches(batches, reader.schema)
        table.validate(full=True)  # a damaged file may point beyond its end
        columns = _columns(path, table)
    return of_columns(path, columns, target, features, sample_weight, labels)


@contextlib.contextmanager
def _read_by(pyarrow: Any, path: str, kind: str) -> Iterator[None]:
    """Raise pyarrow's errors as those of a file."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of pyarrow
            raise GraphoptError(f"{path}: {reason(error)}") from error
        raise GraphoptError(f"{path}: expected {kind}: {_problem(error)}") from error


def _cells(pyarrow: Any, path: str, schema: Any) -> int:
    """Return the number of cells of a row.

    Raises:
        GraphoptError: two columns have the same name, or a row of one holds neither a cell nor an array of them.
    """
    refuse_twice(path, "column", schema.names)
    cells = 0
    for column in schema:
        item, size = column.type, 1
        while pyarrow.types.is_fixed_size_list(item):
            item, size = item.value_type, size * item.list_size
        if pyarrow.types.is_nested(item):
            raise GraphoptError(f"{path}: column {column.name!r}: expected numbers, found {column.type}")
        cells += size
    return cells


def _columns(path: str, table: Any) -> dict[str, np.ndarray]:
    return {name: _array(path, name, table[name].combine_chunks()) for name in table.column_names}


def _array(path: str, name: str, column: Any) -> np.ndarray:
    """Return a column of cells, or of lists of a fixed size, as an array."""
    size = getattr(column.type, "list_size", None)
    if size is None:
        return np.asarray(column)
    if column.null_count:
        raise GraphoptError(f"{path}: column {name!r}: expected a list in every row, found rows without")
    items = _array(path, name, column.flatten())
    return items.reshape(len(column), size, *items.shape[1:])


def pyarrow_for(what: str) -> Any:
    """Return the package pyarrow, with its modules.

    Args:
        what: what needs it.

    Raises:
        GraphoptError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise GraphoptError(
            f"{what}: expected the package pyarrow, found none: pip install pyarrow"
        ) from error
    return pyarrow


def check_regular(path: str | Path) -> None:
    """Raise an error unless a path is a regular file: a device or a pipe may never end."""
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError as error:
        raise GraphoptError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise GraphoptError(f"{path}: {getattr(error, 'strerror', None) or line(error)}") from error
    if not stat.S_ISREG(mode):
        found = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise GraphoptError(f"{path}: expected a file, found {found}")


def reason(error: OSError) -> str:
    """Return the reason why a file cannot be read."""
    return "no such file" if isinstance(error, FileNotFoundError) else error.strerror or line(error)


def _load(path: Path, kind: str, mmap_mode: Any = None) -> Any:
    check_regular(path)
    try:
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except OSError as error:
        raise GraphoptError(f"{path}: {reason(error)}") from error
    except BROKEN as error:
        raise GraphoptError(f"{path}: expected {kind} of numbers, found another file") from error


def _problem(error: Exception) -> str:
    return "more than fits into memory" if isinstance(error, MemoryError) else line(error)


def _check_expansion(path: str, size: int, expansion: int) -> None:
    """Raise an error if a file expands to far more data than its size."""
    file_size = Path(path).stat().st_size
    if size > max(UNSUSPICIOUS, expansion * file_size):
        raise GraphoptError(
            f"{path}: expected data of at most {expansion} times the file of {file_size:,} bytes, found {size:,}: "
            f"set data.expansion={-(-size // file_size)} to read it"
        )


def refuse_twice(path: str, kind: str, names: Iterable[str]) -> None:
    """Raise an error if a name comes twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise GraphoptError(f"{path}: expected one {kind} {name!r}, found {count}")


def of_columns(
    path: str,
    columns: Mapping[str, Any],
    target: str | int | Sequence[str | int] | None,
    features: Sequence[str | int] | Mapping[str, Any] | None = None,
    sample_weight: str | int | None = None,
    labels: Sequence[str] | None = None,
) -> Dataset:
    """Return a data set of a table's columns; see `csv` for the arguments.

    Args:
        path: what errors name.
    """
    targets = [] if target is None else _names(target)
    weights = [] if sample_weight is None else _names(sample_weight)
    if features is None:
        features = [name for name in columns if name not in (*targets, *weights)]
    inputs = dict(features) if isinstance(features, Mapping) else {"x": features}
    for name in [*targets, *weights, *(name for names in inputs.values() for name in _names(names))]:
        if name not in columns:
            raise GraphoptError(f"{path}: {unknown('column', name, columns)}")
    if target is not None and (not targets or (labels is not None and len(targets) > 1)):
        expected = "a target column" if labels is None else "one target column, whose classes are named"
        raise GraphoptError(f"{path}: expected {expected}, found {', '.join(targets) or 'none'}")
    refuse_twice(path, "label", map(str, labels or ()))
    arrays = {name: _stack(path, columns, _names(names)) for name, names in inputs.items()}
    if target is not None and labels is None:
        arrays[TARGET] = _vector(_stack(path, columns, targets, labelled=len(targets) == 1))
    elif labels is not None and target is not None:
        arrays[TARGET] = _classes(path, targets[0], columns[targets[0]], labels)
    if weights:
        arrays["sample_weight"] = _vector(_stack(path, columns, weights))
    classes = None if labels is None else len(labels)
    named = None if labels is None else tuple(map(str, labels))
    return Dataset(arrays, None if isinstance(features, Mapping) else "x", classes, named)


def _names(names: str | int | Sequence[str | int]) -> list[str]:
    return [str(names)] if isinstance(names, str | int) else [str(name) for name in names]


def _stack(path: str, columns: Mapping[str, Any], names: Sequence[str], labelled: bool = False) -> np.ndarray:
    if not names:
        raise GraphoptError(f"{path}: expected feature columns, found none")
    arrays = [_numbers(path, name, columns[name], labelled) for name in names]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    if any(array.ndim > 2 for array in arrays):
        shapes = ", ".join(
            f"{name!r} {list(array.shape[1:])}" for name, array in zip(names, arrays, strict=True)
        )
        raise GraphoptError(
            f"{path}: expected columns of cells or lists to join, found {shapes}: name one column per input in "
            "data.features"
        )
    return np.column_stack(arrays)


def _vector(stacked: np.ndarray) -> np.ndarray:
    return stacked[:, 0] if stacked.shape[1:] == (1,) else stacked


def _numbers(path: str, name: str, column: Any, labelled: bool) -> np.ndarray:
    """Return a column as int64 if all numbers are whole, otherwise as float64."""
    array = np.asarray(column)
    if array.dtype.kind in "iufb":
        return array
    texts = ["nan" if text in ("", None) else str(text) for text in column]
    for dtype in (np.int64, np.float64):
        try:
            return np.array(texts, dtype)
        except (ValueError, OverflowError):  # also for whole numbers beyond int64
            continue
    row, text = next((i, text) for i, text in enumerate(texts) if not _is_number(text))
    classes = sorted({text for text in texts if not _is_number(text)})
    mend = f": name the classes, data.labels=[{','.join(classes[:20])}]" if labelled else ""
    raise GraphoptError(f"{path}: column {name!r}, row {row}: expected a number, found {text!r}{mend}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _classes(path: str, name: str, column: Any, labels: Sequence[str]) -> np.ndarray:
    """Return the index of each text in `labels`."""
    places = {str(label): i for i, label in enumerate(labels)}
    for i, text in enumerate(column):
        if str(text) not in places:
            known_labels = ", ".join(places)
            raise GraphoptError(
                f"{path}: column {name!r}, row {i}: expected a label of {known_labels}, found {str(text)!r}"
            )
    return np.array([places[str(text)] for text in column], np.int64)
