"""Convert, copy and bind tensors of NumPy, ONNX Runtime and packages that support DLPack."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.values import dtype_of
from graphopt.runtime.device import Device

if TYPE_CHECKING:
    import onnxruntime

Allocate = Callable[[int], np.ndarray]  # returns zeros of so many bytes
OrtValues: TypeAlias = "Mapping[str, onnxruntime.OrtValue]"
Tensor = Any  # an np.ndarray, an OrtValue of ONNX Runtime, or an object that supports DLPack
_HOST = 1  # DLPack's device type for host memory
_ALIGNED = 64  # bytes, the alignment of the runtime's own buffers
allocated: Allocate = functools.partial(np.zeros, dtype=np.uint8)
SUMMED = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16))


def buffer(device: Device, array: np.ndarray) -> onnxruntime.OrtValue:
    """Copy an array to a new buffer on a device; on the CPU, too, the buffer does not share the array's memory.

    Raises:
        GraphoptError: the device does not start.
    """
    return device.machine.allocate(array)


def overwrite(device: Device, value: onnxruntime.OrtValue, array: np.ndarray) -> None:
    """Copy an array into a buffer of its type and shape."""
    device.machine.overwrite(value, array)


def zeros_of(y: ir.Value) -> np.ndarray:
    """Return zeros of the type and the shape of a value.

    Raises:
        GraphoptError: the shape is not static, as it may be in a captured graph.
    """
    if y.shape is None or not y.shape.is_static():
        raise GraphoptError(
            f"output {y.name!r}: expected a shape that follows from the batch's, as a captured graph needs, found "
            f"{y.shape}: leave it out of `report`"
        )
    return np.zeros(y.shape.numpy(), dtype_of(y).numpy())


def buffers(
    device: Device, arrays: Mapping[str, np.ndarray], allocate: Allocate = allocated
) -> tuple[dict[str, onnxruntime.OrtValue], list[np.ndarray]]:
    """Copy arrays to buffers; on the CPU, place arrays of one type contiguously and also return this memory.

    Zeros between the arrays align each to `_ALIGNED` bytes.
    """
    values, memory = {}, []
    for dtype in SUMMED if device.machine.in_host_memory else ():
        alike = {name: array for name, array in arrays.items() if array.dtype == dtype}
        if not alike:
            continue
        sizes = [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in alike.values()]
        raw = allocate(sum(sizes) + _ALIGNED)
        start = -raw.ctypes.data % _ALIGNED
        flat = raw[start : start + sum(sizes)].view(dtype)
        parts = np.split(flat, np.cumsum(sizes)[:-1] // flat.itemsize)
        for (name, array), part in zip(alike.items(), parts, strict=True):
            part = part[: array.size].reshape(array.shape)
            part[...] = array
            values[name] = share(device, part)
        memory.append(flat)
    return {name: values.get(name) or buffer(device, array) for name, array in arrays.items()}, memory


def share(device: Device, array: np.ndarray) -> onnxruntime.OrtValue:
    """Return a value that shares the memory of an array.

    Raises:
        GraphoptError: the runtime does not support the array's element type.
    """
    return device.machine.share(array)


def to_ort(device: Device, tensor: Tensor, dtype: np.dtype[np.generic]) -> onnxruntime.OrtValue:
    """Return a tensor as a value of ONNX Runtime. Only arrays are copied, and only to a GPU.

    Raises:
        GraphoptError: the object is not a tensor, or its memory cannot be shared, for example if it is not
            contiguous.
    """
    if isinstance(tensor, np.ndarray):
        array = np.asarray(tensor, order="C")
        return share(device, array) if device.machine.in_host_memory else buffer(device, array)
    if isinstance(tensor, device.ort.OrtValue):
        return tensor
    c = device.ort.capi._pybind_state
    if isinstance(tensor, c.OrtValue):
        return device.ort.OrtValue(tensor)
    if not hasattr(tensor, "__dlpack__"):
        raise GraphoptError(
            f"expected an array, an OrtValue or a tensor with DLPack, found {type(tensor).__name__}: "
            "numpy.asarray makes one of it"
        )
    try:
        if dtype != np.bool_:
            return device.ort.OrtValue(c.OrtValue.from_dlpack(tensor.__dlpack__()))
        if (own := on_host(device, tensor)) is not None:
            return to_ort(device, own, dtype)
        return device.ort.OrtValue(c.OrtValue.from_dlpack(_as_bytes(tensor).__dlpack__(), True))
    except (AttributeError, BufferError, RuntimeError) as error:
        raise GraphoptError(f"expected a tensor to share: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return why a tensor cannot be shared, without the place in the source of ONNX Runtime that says so."""
    text = line(error)
    if "IsContiguousTensor" in text:
        return "found a view that is not contiguous: copy it, in PyTorch with .contiguous()"
    if "Unsupported DLPack data type" in text:
        return "found an element type that onnxruntime does not take through DLPack: convert the tensor"
    return text


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor of truth values on a GPU as one of bytes, which ONNX Runtime takes for them through DLPack.

    Raises:
        AttributeError: the tensor's package is not as PyTorch or CuPy.
    """
    package = sys.modules[type(tensor).__module__.partition(".")[0]]
    return tensor.view(package.uint8)


def on_host(device: Device, tensor: Tensor) -> np.ndarray | None:
    """Return a tensor as an array without a copy, or None if it is on a GPU."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, device.ort.OrtValue):
        return tensor.numpy() if tensor.device_name() == "cpu" else None
    if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] == _HOST:
        return np.from_dlpack(tensor)
    return None


def number_or_array(array: np.ndarray) -> object:
    """Return an array, or a Python number for an array of rank 0."""
    return array if array.ndim else array.item()


def is_finite(numbers: float | np.ndarray) -> bool:
    """Return whether a number, or each number of an array, is finite: `numpy.isfinite` takes a microsecond for one."""
    return isfinite(numbers) if np.ndim(numbers) == 0 else bool(np.isfinite(numbers).all())


def check_rows(feeds: Mapping[str, Tensor]) -> None:
    """Raise an error if a batch has no rows: its loss would be 0, or not a number."""
    if feeds and not rows_of(feeds):
        raise GraphoptError("batch: expected rows, found none: leave empty batches out")


def rows_of(feeds: Mapping[str, Tensor]) -> int:
    """Return the number of rows of a batch."""
    for x in feeds.values():
        shape = getattr(x, "shape", None)
        size = shape() if callable(shape) else shape  # a method of OrtValues
        if size:
            return int(size[0])
    return 1
