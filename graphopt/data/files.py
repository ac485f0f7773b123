"""Read data sets from files."""

from __future__ import annotations

import contextlib
import csv as reader
import functools
import importlib
import itertools
import lzma
import stat
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.data.arrow_sizes import ARROW, expanded_sizes
from graphopt.data.dataset import TARGET, Dataset
from graphopt.errors import GraphoptError, line, unknown

ROWS = 65_536  # of a Parquet file, that are read at once
EXPANSION = 100  # bytes of data for each byte of a compressed file
LONGEST_NUMBER = 1_000  # characters
NUMBER = 8  # bytes
PARQUET = b"PAR1"  # the start of a Parquet file
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
        path: the archive, whose arrays have the names of the inputs.
        expansion: the maximum ratio of the arrays' size to the file's size; arrays of up to 1 GiB are always
            accepted.

    Raises:
        GraphoptError: the file is missing, is not a NumPy archive of plain arrays, or expands too far.
    """
    archive = _load(Path(path), "a NumPy archive (.npz)")
    if isinstance(archive, np.ndarray):
        raise GraphoptError(f"{path}: expected a NumPy archive (.npz), found one array: use data=npy")
    with (
        archive,
        reading(path, "arrays of numbers", RuntimeError),
    ):  # which says that the archive is encrypted
        check_expansion(path, sum(member.file_size for member in archive.zip.infolist()), expansion)
        refuse_twice(path, "array", archive.files)
        arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise GraphoptError(f"{path}: expected arrays of numbers, found {name!r}, which is not an array")
    return Dataset(arrays)


def npy(path: str) -> Dataset:
    """Memory-map the arrays of a folder of `NAME.npy` files, so that each batch reads only its own rows.

    Args:
        path: a folder with a file NAME.npy for each input, and target.npy.

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
        path: the file.
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
    with (
        reading(path, "a text file of columns", reader.Error),
        open(path, newline="", encoding="utf-8-sig") as file,
    ):
        rows = [row for row in reader.reader(file, delimiter=delimiter) if row]
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
    """Read columns of a Parquet file, or of an Arrow file: the IPC file format (Feather V2), or the stream format.

    The first bytes tell which it is; `arrow` is the same function. A column of lists of a fixed size is one of arrays.

    Args:
        path: the file.
        target, features, sample_weight, labels: as in `graphopt.data.csv`.
        expansion: as in `graphopt.data.npz`.

    Raises:
        GraphoptError: pyarrow is not installed, the file or a column is missing, a column is not numeric, or the file
            expands too far.
    """
    pyarrow = imported(path, "pyarrow")
    imported(path, "pyarrow.parquet")
    check_regular(path)
    used = functools.partial(_used, path, target=target, features=features, sample_weight=sample_weight)
    with reading(path, "a Parquet file or an Arrow file", pyarrow.ArrowException):
        with open(path, "rb") as file:
            is_parquet = file.read(len(PARQUET)) == PARQUET
        table = (_parquet_table if is_parquet else _arrow_table)(pyarrow, path, expansion, used)
        columns = {
            name: _array(pyarrow, path, name, table[name].combine_chunks()) for name in table.column_names
        }
    return of_columns(path, columns, target, features, sample_weight, labels)


arrow = parquet


def _parquet_table(pyarrow: Any, path: str, expansion: int, used: Callable[[list[str]], list[str]]) -> Any:
    """Return the columns of a Parquet file that are used."""
    with pyarrow.parquet.ParquetFile(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    cells = _cells(pyarrow, path, schema)
    check_expansion(path, max(NUMBER * metadata.num_rows * cells, _values_size(metadata)), expansion)
    names = used(schema.names)
    texts = [name for name in names if _is_text(pyarrow, schema.field(name).type)]
    with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:  # each text once
        return _table(pyarrow, path, file.iter_batches(ROWS, columns=names, use_threads=False), expansion)


def _arrow_table(pyarrow: Any, path: str, expansion: int, used: Callable[[list[str]], list[str]]) -> Any:
    """Return the columns of an Arrow file that are used."""
    with pyarrow.memory_map(path) as file:
        is_file = file.read(len(ARROW)) == ARROW
        open_file = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        file.seek(0)
        schema = open_file(file).schema
        cells, size = _cells(pyarrow, path, schema), 0
        for rows, buffers in expanded_sizes(pyarrow, file):
            size += max(NUMBER * rows * cells, buffers)
            check_expansion(path, size, expansion)
        fields = [schema.get_field_index(name) for name in used(schema.names)]
        file.seek(0)
        opened = open_file(file, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))
        batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
        table = _table(pyarrow, path, batches, expansion, opened.schema)
        table.validate(full=True)  # a damaged file may point beyond its end
        return table


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
        if pyarrow.types.is_nested(item) or pyarrow.types.is_run_end_encoded(item):
            raise GraphoptError(f"{path}: column {column.name!r}: expected numbers, found {column.type}")
        cells += size
    return cells


def _values_size(metadata: Any) -> int:
    """Return the bytes of all values of a Parquet file, texts as often as the file holds them."""
    sizes = [max(NUMBER, metadata.schema.column(i).length or 0) for i in range(metadata.num_columns)]
    total = 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        chunks = map(group.column, range(group.num_columns))
        total += sum(
            max(size * chunk.num_values, chunk.total_uncompressed_size)
            for size, chunk in zip(sizes, chunks, strict=True)
        )
    return total


def _is_text(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def _table(pyarrow: Any, path: str, batches: Iterable[Any], expansion: int, schema: Any = None) -> Any:
    """Return batches as a table, unless they expand too far."""
    found, size = [], 0
    for batch in batches:
        size += batch.nbytes
        check_expansion(path, size, expansion)
        found.append(batch)
    return pyarrow.Table.from_batches(found, schema)


def _array(pyarrow: Any, path: str, name: str, column: Any) -> np.ndarray:
    """Return a column of cells, or of lists of a fixed size, as an array."""
    if isinstance(column, pyarrow.ChunkedArray):  # of a type that cannot be combined
        column = pyarrow.concat_arrays(column.chunks)
    if pyarrow.types.is_dictionary(column.type):
        return _looked_up(column)
    size = getattr(column.type, "list_size", None)
    if size is None:
        return np.asarray(column)
    if column.null_count:
        raise GraphoptError(f"{path}: column {name!r}: expected a list in every row, found rows without")
    items = _array(pyarrow, path, name, column.flatten())
    return items.reshape(len(column), size, *items.shape[1:])


def _looked_up(column: Any) -> np.ndarray:
    """Return a column that is encoded by a dictionary; rows with the same text share it."""
    values = np.asarray(column.dictionary)
    if column.null_count == 0:
        return values[np.asarray(column.indices)]
    values = np.append(values.astype(object), [None])
    return values[np.asarray(column.indices.fill_null(len(values) - 1)).astype(np.int64)]


def imported(what: str, module: str, package: str = "") -> Any:
    """Return a module of a package that an option needs.

    Args:
        what: the option.
        package: the name of the package, if it is another one than the module's.

    Raises:
        GraphoptError: it is not installed.
    """
    package = package or module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GraphoptError(
            f"{what}: expected the package {package}, found none: pip install {package.lower()}"
        ) from error


@contextlib.contextmanager
def reading(path: str | Path, expected: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise what a library raises for a damaged file as an error of the file, in a `with` block.

    Args:
        expected: what the file should be.
        errors: exceptions of the library.
    """
    broken: tuple[type[Exception], ...] = (OSError, *BROKEN, *errors)
    try:
        yield
    except GraphoptError:
        raise
    except broken as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the library
            raise GraphoptError(f"{path}: {reason(error)}") from error
        problem = "more than fits into memory" if isinstance(error, MemoryError) else line(error)
        raise GraphoptError(f"{path}: expected {expected}: {problem}") from error


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


def check_expansion(path: str | Path, size: int, expansion: int, *, unsuspicious: int | None = None) -> None:
    """Raise an error if a file expands to far more data than its size.

    Args:
        size: the bytes after expansion.
        expansion: the maximum ratio.
        unsuspicious: the bytes to which a file of any size may expand; None for 1 GiB.
    """
    file_size = max(1, Path(path).stat().st_size)
    if size > max(UNSUSPICIOUS if unsuspicious is None else unsuspicious, expansion * file_size):
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
    inputs, targets, weights = _parts(path, columns, target, features, sample_weight)
    if target is not None and (not targets or (labels is not None and len(targets) > 1)):
        expected = "a target column" if labels is None else "one target column, whose classes are named"
        raise GraphoptError(f"{path}: expected {expected}, found {', '.join(targets) or 'none'}")
    refuse_twice(path, "label", map(str, labels or ()))
    arrays = {name: _stack(path, columns, names) for name, names in inputs.items()}
    if targets and labels is None:
        arrays[TARGET] = _vector(_stack(path, columns, targets, labelled=len(targets) == 1))
    elif targets and labels is not None:
        arrays[TARGET] = _classes(path, targets[0], columns[targets[0]], labels)
    if weights:
        arrays["sample_weight"] = _vector(_stack(path, columns, weights))
    only = None if isinstance(features, Mapping) else "x"
    return (
        Dataset(arrays, only)
        if labels is None
        else Dataset(arrays, only, len(labels), tuple(map(str, labels)))
    )


def _parts(
    path: str,
    columns: Collection[str],
    target: str | int | Sequence[str | int] | None,
    features: Sequence[str | int] | Mapping[str, Any] | None,
    sample_weight: str | int | None,
) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Return the columns of each input, those of the target, and that of the weights.

    Raises:
        GraphoptError: the table lacks one.
    """
    targets, weights = _names(target), _names(sample_weight)
    if features is None:
        features = [name for name in columns if name not in (*targets, *weights)]
    chosen = features if isinstance(features, Mapping) else {"x": features}
    inputs = {name: _names(names) for name, names in chosen.items()}
    for name in itertools.chain(targets, weights, *inputs.values()):
        if name not in columns:
            raise GraphoptError(f"{path}: {unknown('column', name, columns)}")
    return inputs, targets, weights


def _used(path: str, columns: Collection[str], **roles: Any) -> list[str]:
    """Return the columns that a data set reads, in the table's order; see `_parts` for the arguments."""
    inputs, targets, weights = _parts(path, columns, **roles)
    wanted = {*targets, *weights, *itertools.chain(*inputs.values())}
    return [name for name in columns if name in wanted]


def _names(names: str | int | Sequence[str | int] | None) -> list[str]:
    if names is None:
        return []
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
    if isinstance(column, np.ndarray) and column.dtype.kind in "iufb":
        return column
    texts = ["nan" if text in ("", None) else str(text) for text in column]
    for dtype in (np.int64, np.float64) if max(map(len, texts), default=0) <= LONGEST_NUMBER else ():
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
        float(text[: LONGEST_NUMBER + 1])
    except ValueError:
        return False
    return len(text) <= LONGEST_NUMBER


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
