"""Read Parquet and Arrow files, and measure them by their metadata before anything in them is expanded."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.arguments import checked
from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.files import EXPANSION, check_ratio, imported, reading
from graphopt.data.tables import Columns
from graphopt.data.tabular import of_columns
from graphopt.errors import GraphoptError
from graphopt.files import ReadName

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

__all__ = ["arrow", "parquet"]

ENDINGS = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
}
_ROWS_AT_ONCE = 65_536  # read from a Parquet file
_NUMBER_BYTES = 8  # of a number in NumPy, at most
_LARGEST_EXACT = 2**53  # float64, NumPy's type beside missing numbers, has all whole numbers up to it
_PARQUET = b"PAR1"  # the start of a Parquet file
_ARROW = b"ARROW1"  # the start and the end of a file in Arrow's file format

# The names of the columns of a file, and what reads some of them.
_Opened = tuple[list[str], Callable[[list[str]], dict[str, np.ndarray]]]


@checked()
def parquet(
    path: ReadName,
    *,
    target: str | Sequence[str] | None = TARGET,
    features: Sequence[str] | Mapping[str, Any] | None = None,
    sample_weight: str | None = None,
    labels: Sequence[str | int | float | bool] | None = None,
    columns: Columns | Mapping[str, Any] | str | None = None,
    expansion: int = EXPANSION,
) -> Dataset:
    """Read columns of a Parquet file, or of an Arrow file: the IPC file format (Feather V2), or the stream format.

    The first bytes tell which it is; `arrow` is the same function. A column of lists of a fixed size is one of arrays.

    Args:
        path: the file.
        target, features, sample_weight, labels, columns: as in `graphopt.data.csv`.
        expansion: as in `graphopt.data.npz`.

    Raises:
        GraphoptError: pyarrow is not installed, the file or a column is missing, a column is not numeric, or the file
            expands too far.
    """
    with _opened(path, expansion) as (names, read):
        return of_columns(path, names, read, target, features, sample_weight, labels, columns)


arrow = parquet


def column_names(path: str) -> list[str]:
    """Return the names of the columns of a file that `parquet` reads."""
    with _opened(path, EXPANSION) as (names, _):
        return names


@contextlib.contextmanager
def _opened(path: str, expansion: int) -> Iterator[_Opened]:
    pyarrow = imported(path, "pyarrow")
    imported(path, "pyarrow.parquet")
    with reading(path, "a Parquet file or an Arrow file", pyarrow.ArrowException):
        with open(Path(path), "rb") as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
        yield (_parquet if is_parquet else _arrow)(pyarrow, path, expansion)


def arrays_of_arrow(table: Any) -> dict[str, np.ndarray]:
    """Return the columns of a table or a record batch of pyarrow in memory as arrays."""
    pyarrow = imported("data", "pyarrow")
    table = pyarrow.Table.from_batches([table]) if isinstance(table, pyarrow.RecordBatch) else table
    names = table.column_names
    return {name: _to_numpy(pyarrow, "data", name, table[name].combine_chunks()) for name in names}


def _parquet(pyarrow: ModuleType, path: str, expansion: int) -> _Opened:
    """Measure a Parquet file; return its columns and their reader."""
    with pyarrow.parquet.ParquetFile(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    size = max(_NUMBER_BYTES * metadata.num_rows * _cells(pyarrow, path, schema), _values_size(metadata))
    check_ratio(path, size, expansion)

    def read(names: list[str]) -> dict[str, np.ndarray]:
        plain = [name for name in names if not pyarrow.types.is_nested(schema.field(name).type)]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=plain) as file:  # each text once
            batches = file.iter_batches(_ROWS_AT_ONCE, columns=names, use_threads=False)
            return _joined_columns(pyarrow, path, batches, expansion)

    return schema.names, read


def _arrow(pyarrow: ModuleType, path: str, expansion: int) -> _Opened:
    """Measure an Arrow file; return its columns and their reader."""
    file = pyarrow.memory_map(path)
    is_file = file.read(len(_ARROW)) == _ARROW
    open_file = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    file.seek(0)
    schema = open_file(file).schema
    cells, size = _cells(pyarrow, path, schema), 0
    for rows, buffers in map(_expanded_sizes, _messages(pyarrow, file, is_file)):
        size += max(_NUMBER_BYTES * rows * cells, buffers)
        check_ratio(path, size, expansion)

    def read(names: list[str]) -> dict[str, np.ndarray]:
        fields = [schema.get_field_index(name) for name in names]
        file.seek(0)
        opened = open_file(file, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))
        batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
        return _joined_columns(pyarrow, path, batches, expansion, opened.schema)

    return schema.names, read


def _cells(pyarrow: ModuleType, path: str, schema: pyarrow.Schema) -> int:
    """Return the number of cells of a row, whose columns have cells, or arrays of them."""
    cells = 0
    for column in schema:
        item, size = column.type, 1
        while pyarrow.types.is_fixed_size_list(item):
            item, size = item.value_type, size * item.list_size
        if pyarrow.types.is_nested(item) or pyarrow.types.is_run_end_encoded(item):
            raise GraphoptError(f"{path}: column {column.name!r}: expected numbers, found {column.type}")
        cells += size
    return cells


def _values_size(metadata: pyarrow.parquet.FileMetaData) -> int:
    """Return the bytes of all values of a Parquet file, texts as often as the file holds them."""
    sizes = [max(_NUMBER_BYTES, metadata.schema.column(i).length or 0) for i in range(metadata.num_columns)]
    return sum(
        max(size * chunk.num_values, chunk.total_uncompressed_size)
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for size, chunk in zip(sizes, map(group.column, range(group.num_columns)), strict=True)
    )


# Metadata of Arrow are flatbuffers, which pyarrow has verified: `Message` and `Footer` of the Arrow specification
# (format/Message.fbs, File.fbs).


def _messages(pyarrow: ModuleType, file: pyarrow.NativeFile, is_file: bool) -> Iterator[pyarrow.Message]:
    """Yield the messages of an Arrow stream, or of those that the footer of a file names, that hold batches."""
    file.seek(0)
    messages = pyarrow.ipc.MessageReader.open_stream(file)
    if is_file:
        data = memoryview(file.read_buffer())
        end = len(data) - len(_ARROW) - 4
        footer = data[end - struct.unpack_from("<I", data, end)[0] : end]
        blocks = [x for field in (2, 3) for x in _structures(footer, _followed(footer, 0), field, "<qi4xq")]
        messages = (pyarrow.ipc.read_message(data[at : at + head + body]) for at, head, body in blocks)
    return (message for message in messages if message.type in ("record batch", "dictionary"))


def _expanded_sizes(message: pyarrow.Message) -> tuple[int, int]:
    """Return the rows of a batch, and the bytes of its buffers after expansion."""
    data, body = memoryview(message.metadata), memoryview(message.body or b"")
    batch = _followed(data, _field_place(data, _followed(data, 0), 2))
    if message.type == "dictionary":
        batch = _followed(data, _field_place(data, batch, 1))
    rows, is_compressed = _field_place(data, batch, 0), _field_place(data, batch, 3) is not None
    size = 0
    for offset, length in _structures(data, batch, 2, "<qq"):
        if min(offset, length) < 0 or offset + length > len(body):
            raise ValueError("a buffer is outside its batch")
        # The size stands before the compressed bytes; a negative one says that they are not compressed.
        expanded = struct.unpack_from("<q", body, offset)[0] if is_compressed and length else -1
        size += length if expanded < 0 else expanded
    return 0 if rows is None else int(struct.unpack_from("<q", data, rows)[0]), size


def _field_place(data: memoryview, table: int, field: int) -> int | None:
    """Return where a table of a flatbuffer has a field, or None if it leaves it out."""
    layout, at = table - struct.unpack_from("<i", data, table)[0], 4 + 2 * field
    size: int = struct.unpack_from("<H", data, layout)[0]
    offset: int = struct.unpack_from("<H", data, layout + at)[0] if at < size else 0
    return table + offset if offset else None


def _followed(data: memoryview, place: Any) -> int:
    """Return where an offset at a place leads."""
    return int(place + struct.unpack_from("<I", data, place)[0])


def _structures(data: memoryview, table: int, field: int, layout: str) -> Iterator[tuple[int, ...]]:
    """Return the members of each structure of a vector."""
    place = _field_place(data, table, field)
    if place is None:
        return iter(())
    start = _followed(data, place)
    size = struct.unpack_from("<I", data, start)[0] * struct.calcsize(layout)
    return struct.iter_unpack(layout, data[start + 4 : start + 4 + size])


def _joined_columns(
    pyarrow: ModuleType,
    path: str,
    batches: Iterable[pyarrow.RecordBatch],
    expansion: int,
    schema: pyarrow.Schema | None = None,
) -> dict[str, np.ndarray]:
    """Return the columns of batches, unless they expand too far."""
    parts, size = [], 0
    for batch in batches:
        size += batch.nbytes
        check_ratio(path, size, expansion)
        parts.append(batch)
    table = pyarrow.Table.from_batches(parts, schema)
    if schema is not None:
        table.validate(full=True)  # a damaged Arrow file may point beyond its end
    return {name: _to_numpy(pyarrow, path, name, table[name].combine_chunks()) for name in table.column_names}


def _to_numpy(pyarrow: ModuleType, path: str, name: str, column: pyarrow.Array) -> np.ndarray:
    """Return a column of cells, or of lists of a fixed size, as an array."""
    if isinstance(column, pyarrow.ChunkedArray):  # of a type that cannot be combined
        column = pyarrow.concat_arrays(column.chunks)
    if pyarrow.types.is_dictionary(column.type):  # rows with the same text share it
        values, indices = np.asarray(column.dictionary), column.indices
        if column.null_count:
            values = np.append(values.astype(object), [None])
            indices = indices.fill_null(len(values) - 1)
        return values[np.asarray(indices).astype(np.int64)]
    size = getattr(column.type, "list_size", None)
    if size is None and column.null_count and pyarrow.types.is_integer(column.type):
        whole = np.asarray(column.drop_null())
        if whole.size and max(int(whole.max()), -int(whole.min())) > _LARGEST_EXACT:
            return np.array(column.to_pylist(), object)
    if size is None:
        return np.asarray(column)
    if column.null_count:
        raise GraphoptError(f"{path}: column {name!r}: expected a list in every row, found rows without")
    items = _to_numpy(pyarrow, path, name, column.flatten())
    return items.reshape(len(column), size, *items.shape[1:])
