"""Map files of weights into memory, each once for all tensors in it, and notice if a file changes."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.files import NO_LINKS
from graphopt.graph import metadata

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class MappedFile:
    """Map a file into memory, from which its tensors read.

    The mapping shows the file as it is at any time. A file that is replaced or deleted stays as it was here; one that
    is written to has another size or another time of its last change, which `check` finds.

    Raises:
        OSError: the file cannot be opened.
        GraphoptError: the path is a link, a pipe or a device, or the file has several links.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | NO_LINKS)
        weakref.finalize(self, os.close, self._handle)
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise GraphoptError(f"{path}: expected a regular file with one name, found another")
        self._facts = self._now()
        self.bytes = np.empty(0, np.uint8)
        if status.st_size:
            self.bytes = np.frombuffer(mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ), np.uint8)

    def check(self) -> None:
        """Raise an error if the file has changed since it was mapped."""
        if self._now() != self._facts:
            raise GraphoptError(
                f"{self.path}: expected the weights that were loaded, found a file that has changed since: load the "
                "model again, and write new weights to another file"
            )

    def check_size(self) -> None:
        """Raise an error if the file has become shorter since it was mapped."""
        if os.fstat(self._handle).st_size < self._facts[0]:
            self.check()

    def is_same(self, other: MappedFile) -> bool:
        """Return whether another mapping shows the same file, unchanged since both were made."""
        own, others = os.fstat(self._handle), os.fstat(other._handle)
        return os.path.samestat(own, others) and self._facts == other._facts == self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns

    def tensor(self, declared: ir.TensorProtocol, start: int) -> ir.TensorProtocol:
        """Return the tensor at an offset of the file that is declared like another."""
        dtype, part = declared.dtype, self.bytes[start : start + declared.nbytes]
        if part.nbytes != declared.nbytes:
            raise GraphoptError(
                f"tensor {declared.name!r}: expected {declared.nbytes:,} bytes at {start:,} of {self.path}, found "
                f"{part.nbytes:,}"
            )
        if dtype.bitwidth < 8:
            return like_tensor(RoomyTensor(part, dtype, declared.shape.numpy()), declared)
        if start % dtype.itemsize:
            part = np.array(part)
        array = part.view(dtype.numpy().newbyteorder("<")).reshape(declared.shape.numpy())
        return like_tensor(MappedTensor(array, dtype, file=self), declared)


def like_tensor(tensor: ir.TensorProtocol, declared: ir.TensorProtocol) -> ir.TensorProtocol:
    """Give a tensor the name, the documentation and the metadata of another, and return it."""
    tensor.name, tensor.doc_string = declared.name, declared.doc_string
    metadata.copy(declared, tensor)
    return tensor


class MappedTensor(ir.Tensor[np.ndarray]):
    """Hold a tensor that lies in a mapped file.

    Attributes:
        file: the file.
    """

    def __init__(self, array: np.ndarray, dtype: ir.DataType, *, file: MappedFile) -> None:
        super().__init__(array, dtype)
        self.file = file

    def numpy(self) -> np.ndarray:
        """Return the numbers; reading beyond the end of a file that was cut would end the process."""
        self.file.check_size()
        return super().numpy()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        self.file.check_size()
        return np.array(self._raw, dtype, copy=True) if copy else np.asarray(self._raw, dtype)

    def is_at_place_of(self, other: ir.TensorProtocol) -> bool:
        """Return whether another tensor has the same bytes of the same file."""
        return (
            isinstance(other, MappedTensor)
            and self.file.is_same(other.file)
            and (self._place(), self.nbytes) == (other._place(), other.nbytes)
        )

    def _place(self) -> int:
        return int(self.numpy().ctypes.data - self.file.bytes.ctypes.data)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy the numbers: another process does not share the mapping."""
        return ir.tensor, (np.array(self.numpy()), self.dtype, self.name)


class RoomyTensor(ir.PackedTensor[np.ndarray]):
    """Hold packed numbers of 4 bits in memory that a runtime takes without a copy.

    The runtime takes an array for a value of 4 bits only if it has a byte for each number. The second half of such an
    array is never written or read, so that it takes no memory.

    Attributes:
        room: the array, whose first half are the packed numbers.
    """

    def __init__(self, packed: np.ndarray, dtype: ir.DataType, shape: Sequence[int]) -> None:
        pages = mmap.mmap(-1, max(1, math.prod(shape)), **_PRIVATE)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_NOHUGEPAGE)
        self.room = np.frombuffer(pages, np.uint8, math.prod(shape)).reshape(shape)
        own = self.room.reshape(-1)[: packed.size]
        own[:] = packed.ravel()
        super().__init__(own, dtype, shape=shape)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy the packed numbers alone."""
        packed = np.frombuffer(self.tobytes(), np.uint8)
        return RoomyTensor, (packed, self.dtype, self.shape.numpy())


def files_of(model: ir.Model) -> list[MappedFile]:
    tensors = (x.const_value for x in model.graph.initializers.values())
    return list({id(x.file): x.file for x in tensors if isinstance(x, MappedTensor)}.values())
