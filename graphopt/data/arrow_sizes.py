"""Measure an Arrow file by its metadata, before anything in it is expanded."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

ARROW = b"ARROW1"  # the start and the end of a file in the IPC file format
CONTINUED = 0xFFFFFFFF  # the start of a message; files of old versions have none
RAW = -1  # in place of a buffer's size: it is not compressed
_BATCHES = ("record batch", "dictionary")


def expanded_sizes(pyarrow: Any, file: Any) -> Iterator[tuple[int, int]]:
    """Yield the rows of each batch of a file, and the bytes of its buffers after expansion.

    The metadata are the flatbuffers `Message` and `Footer` of the Arrow specification (format/Message.fbs, File.fbs).

    Args:
        pyarrow: the package.
        file: an open file of pyarrow, in the file format or the stream format.

    Raises:
        struct.error: the metadata is damaged.
        ValueError: it is.
    """
    file.seek(0)
    if file.read(len(ARROW)) == ARROW:
        file.seek(0)
        data = memoryview(file.read_buffer())
        yield from (_sizes(*parts) for parts in _blocks(data))
        return
    file.seek(0)
    reader = pyarrow.ipc.MessageReader.open_stream(file)
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if message.type in _BATCHES:
            is_dictionary = message.type == _BATCHES[1]
            yield _sizes(memoryview(message.metadata), memoryview(message.body or b""), is_dictionary)


def _blocks(data: memoryview) -> Iterator[tuple[memoryview, memoryview, bool]]:
    """Yield the metadata and the body of each batch that the footer of a file names, and whether it is a dictionary."""
    end = len(data) - len(ARROW) - 4
    start = end - _unsigned(data, end)
    if start < 0:
        raise ValueError("the footer is outside the file")
    footer = data[start:end]
    table = _Table(footer, _unsigned(footer, 0))
    for field, is_dictionary in ((2, True), (3, False)):
        for offset, length, body in table.structures(field, "<qi4xq"):
            if min(offset, length, body) < 0 or offset + length + body > len(data):
                raise ValueError("a batch is outside the file")
            metadata = data[offset : offset + length]
            prefix = 8 if _unsigned(metadata, 0) == CONTINUED else 4
            yield metadata[prefix:], data[offset + length : offset + length + body], is_dictionary


def _sizes(metadata: memoryview, body: memoryview, is_dictionary: bool) -> tuple[int, int]:
    table = _Table(metadata, _unsigned(metadata, 0)).table(2)
    if is_dictionary:
        table = table.table(1)
    is_compressed = table.place(3) is not None
    sizes = (_size(body, at, length, is_compressed) for at, length in table.structures(2, "<qq"))
    return table.long(0), sum(sizes)


def _size(body: memoryview, offset: int, length: int, is_compressed: bool) -> int:
    if length < 0 or offset < 0 or offset + length > len(body):
        raise ValueError("a buffer is outside its batch")
    if not is_compressed or length == 0:
        return length
    size = int(struct.unpack_from("<q", body, offset)[0])  # before the compressed bytes
    if size < RAW:
        raise ValueError("a buffer has a negative size")
    return length if size == RAW else size


class _Table:
    """Read the fields of a flatbuffer's table."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - struct.unpack_from("<i", data, at)[0]

    def place(self, field: int) -> int | None:
        """Return where a field is, or None if the table leaves it out."""
        if self._fields < 0:
            raise ValueError("a table is outside its message")
        at = 4 + 2 * field
        if at >= struct.unpack_from("<H", self._data, self._fields)[0]:
            return None
        offset: int = struct.unpack_from("<H", self._data, self._fields + at)[0]
        return self._at + offset if offset else None

    def table(self, field: int) -> _Table:
        place = self.place(field)
        if place is None:
            raise ValueError("a message lacks its header")
        return _Table(self._data, place + _unsigned(self._data, place))

    def long(self, field: int) -> int:
        place = self.place(field)
        return 0 if place is None else int(struct.unpack_from("<q", self._data, place)[0])

    def structures(self, field: int, layout: str) -> Iterator[tuple[int, ...]]:
        """Yield the members of each structure of a vector."""
        place = self.place(field)
        if place is None:
            return
        start = place + _unsigned(self._data, place)
        for i in range(_unsigned(self._data, start)):
            yield struct.unpack_from(layout, self._data, start + 4 + struct.calcsize(layout) * i)


def _unsigned(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])
