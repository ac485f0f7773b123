"""Read Parquet and Arrow files, and measure them by their metadata before anything in them is expanded."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.files import (
    EXPANSION,
    check_ratio,
    imported,
    of_columns,
    reading,
    refuse_twice,
    used_columns,
)
from graphopt.errors import GraphoptError

_ROWS = 65_536  # of a Parquet file, that are read at once
_NUMBER = 8  # bytes
_PARQUET = b"PAR1"  # the start of a Parquet file
_ARROW = b"ARROW1"  # the start and the end of a file in Arrow's file format
_TEXTS = ("string", "large_string", "binary", "large_binary")

_Used = Callable[[list[str]], list[str]]  # returns the columns to read


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
    used = functools.partial(
        used_columns, path, target=target, features=features, sample_weight=sample_weight
    )
    with reading(path, "a Parquet file or an Arrow file", pyarrow.ArrowException):
        with open(path, "rb") as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
        table = (_parquet_table if is_parquet else _arrow_table)(pyarrow, path, expansion, used)
        columns = {
            name: _array(pyarrow, path, name, table[name].combine_chunks()) for name in table.column_names
        }
    return of_columns(path, columns, target, features, sample_weight, labels)


arrow = parquet


def _parquet_table(pyarrow: Any, path: str, expansion: int, used: _Used) -> Any:
    """Return the columns of a Parquet file that are used."""
    with pyarrow.parquet.ParquetFile(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    cells = _cells(pyarrow, path, schema)
    check_ratio(path, max(_NUMBER * metadata.num_rows * cells, _values_size(metadata)), expansion)
    names = used(schema.names)
    texts = [name for name in names if str(schema.field(name).type) in _TEXTS]
    with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:  # each text once
        return _table(pyarrow, path, file.iter_batches(_ROWS, columns=names, use_threads=False), expansion)


def _arrow_table(pyarrow: Any, path: str, expansion: int, used: _Used) -> Any:
    """Return the columns of an Arrow file that are used."""
    with pyarrow.memory_map(path) as file:
        is_file = file.read(len(_ARROW)) == _ARROW
        open_file = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        file.seek(0)
        schema = open_file(file).schema
        cells, size = _cells(pyarrow, path, schema), 0
        for rows, buffers in map(_expanded_sizes, _batches(pyarrow, file, is_file)):
            size += max(_NUMBER * rows * cells, buffers)
            check_ratio(path, size, expansion)
        fields = [schema.get_field_index(name) for name in used(schema.names)]
        file.seek(0)
        opened = open_file(file, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))
        batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
        table = _table(pyarrow, path, batches, expansion, opened.schema)
        table.validate(full=True)  # a damaged file may point beyond its end
        return table


def _cells(pyarrow: Any, path: str, schema: Any) -> int:
    """Return the number of cells of a row, whose columns have cells, or arrays of them, and different names."""
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
    sizes = [max(_NUMBER, metadata.schema.column(i).length or 0) for i in range(metadata.num_columns)]
    return sum(
        max(size * chunk.num_values, chunk.total_uncompressed_size)
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for size, chunk in zip(sizes, map(group.column, range(group.num_columns)), strict=True)
    )


# Metadata of Arrow are flatbuffers, which pyarrow has verified: `Message` and `Footer` of the Arrow specification
# (format/Message.fbs, File.fbs).


def _batches(pyarrow: Any, file: Any, is_file: bool) -> Iterator[Any]:
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


def _expanded_sizes(message: Any) -> tuple[int, int]:
    """Return the rows of a batch, and the bytes of its buffers after expansion."""
    data, body = memoryview(message.metadata), memoryview(message.body or b"")
    batch = _followed(data, _place(data, _followed(data, 0), 2))
    if message.type == "dictionary":
        batch = _followed(data, _place(data, batch, 1))
    rows, is_compressed = _place(data, batch, 0), _place(data, batch, 3) is not None
    size = 0
    for offset, length in _structures(data, batch, 2, "<qq"):
        if min(offset, length) < 0 or offset + length > len(body):
            raise ValueError("a buffer is outside its batch")
        # The size stands before the compressed bytes; a negative one says that they are not compressed.
        expanded = struct.unpack_from("<q", body, offset)[0] if is_compressed and length else -1
        size += length if expanded < 0 else expanded
    return 0 if rows is None else int(struct.unpack_from("<q", data, rows)[0]), size


def _place(data: memoryview, table: int, field: int) -> int | None:
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
    place = _place(data, table, field)
    if place is None:
        return iter(())
    start = _followed(data, place)
    size = struct.unpack_from("<I", data, start)[0] * struct.calcsize(layout)
    return struct.iter_unpack(layout, data[start + 4 : start + 4 + size])


def _table(pyarrow: Any, path: str, batches: Iterable[Any], expansion: int, schema: Any = None) -> Any:
    """Return batches as a table, unless they expand too far."""
    parts, size = [], 0
    for batch in batches:
        size += batch.nbytes
        check_ratio(path, size, expansion)
        parts.append(batch)
    return pyarrow.Table.from_batches(parts, schema)


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
