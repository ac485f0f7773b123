"""Convert, copy and bind tensors of NumPy, ONNX Runtime and packages that support DLPack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import GraphoptError
from graphopt.runtime.device import Device

if TYPE_CHECKING:
    import onnxruntime

Allocate = Callable[[int], np.ndarray]  # returns zeros of so many bytes
Tensor = Any  # an np.ndarray, an OrtValue of ONNX Runtime, or an object that supports DLPack
HOST = 1  # DLPack's device type for host memory
ALIGNED = 64  # bytes, the alignment of the runtime's own buffers
SUMMED = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16))


def buffer(device: Device, array: np.ndarray) -> onnxruntime.OrtValue:
    """Copy an array to a new buffer on a device; on the CPU, too, the buffer does not share the array's memory.

    Raises:
        GraphoptError: the device does not start.
    """
    try:
        value = device.ort.OrtValue.ortvalue_from_shape_and_type(
            list(array.shape), array.dtype.type, device.kind, device.index
        )
    except RuntimeError as error:
        raise device.not_started() from error
    value.update_inplace(np.ascontiguousarray(array).reshape(array.shape))
    return value


def allocated(size: int) -> np.ndarray:
    """Return zeros of so many bytes."""
    return np.zeros(size, np.uint8)


def buffers(
    device: Device, arrays: Mapping[str, np.ndarray], allocate: Allocate = allocated
) -> tuple[dict[str, onnxruntime.OrtValue], list[np.ndarray]]:
    """Copy arrays to buffers; on the CPU, place arrays of one type contiguously and also return this memory.

    Zeros between the arrays align each to `ALIGNED` bytes.

    Args:
        allocate: returns memory for the arrays of one type.
    """
    values, memory = {}, []
    for dtype in SUMMED if device.kind == "cpu" else ():
        alike = {name: array for name, array in arrays.items() if array.dtype == dtype}
        if not alike:
            continue
        sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in alike.values()]
        raw = allocate(sum(sizes) + ALIGNED)
        start = -raw.ctypes.data % ALIGNED
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
    try:
        return device.ort.OrtValue.ortvalue_from_numpy(array)
    except RuntimeError as error:
        raise GraphoptError(
            f"expected an element type that onnxruntime takes as an array, found {array.dtype}"
        ) from error


def to_ort(device: Device, tensor: Tensor, dtype: np.dtype[Any]) -> onnxruntime.OrtValue:
    """Return a tensor as a value of ONNX Runtime. Only arrays are copied, and only to a GPU.

    Raises:
        GraphoptError: the object is not a tensor, or its memory cannot be shared, for example if it is not
            contiguous.
    """
    c = device.ort.capi._pybind_state
    if isinstance(tensor, device.ort.OrtValue):
        return tensor
    if isinstance(tensor, c.OrtValue):
        return device.ort.OrtValue(tensor)
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor).reshape(tensor.shape)
        if device.kind == "cpu":
            return share(device, array)
        return device.ort.OrtValue.ortvalue_from_numpy(array, device.kind, device.index)
    if not hasattr(tensor, "__dlpack__"):
        raise GraphoptError(
            f"expected an array, an OrtValue or a tensor with DLPack, found {type(tensor).__name__}"
        )
    try:
        if dtype == np.bool_:  # ONNX Runtime does not accept bool through DLPack
            return to_ort(device, np.from_dlpack(tensor), dtype)
        return device.ort.OrtValue(c.OrtValue.from_dlpack(tensor.__dlpack__()))
    except (BufferError, RuntimeError) as error:
        raise GraphoptError(f"expected a tensor to share: {' '.join(str(error).split())}") from error


def on_host(device: Device, tensor: Tensor) -> np.ndarray | None:
    """Return a tensor as an array without a copy, or None if it is on a GPU."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, device.ort.OrtValue):
        return tensor.numpy() if tensor.device_name() == "cpu" else None
    if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] == HOST:
        return np.from_dlpack(tensor)
    return None


def on_device(device: Device, tensor: Tensor) -> Tensor:
    """Copy an array to a GPU; return other tensors, and arrays on the CPU, unchanged."""
    if device.kind == "cpu" or device.cuda_graph or not isinstance(tensor, np.ndarray):
        return tensor
    return to_ort(device, tensor, tensor.dtype)


def fill(device: Device, target: onnxruntime.OrtValue, tensor: Tensor, dtype: np.dtype[Any]) -> None:
    """Copy a tensor into a buffer of the same shape, through host memory."""
    array = tensor if isinstance(tensor, np.ndarray) else to_ort(device, tensor, dtype).numpy()
    target.update_inplace(np.ascontiguousarray(array).reshape(array.shape))


def bind(
    device: Device, binding: onnxruntime.IOBinding, name: str, tensor: Tensor, dtype: np.dtype[Any]
) -> Any:
    """Bind an input to a tensor; return the object to keep alive until the run."""
    if isinstance(tensor, np.ndarray):
        array = tensor if tensor.flags.c_contiguous else np.ascontiguousarray(tensor)
        binding.bind_cpu_input(name, array)
        return array
    value = to_ort(device, tensor, dtype)
    binding.bind_ortvalue_input(name, value)
    return value


def bind_output(device: Device, binding: onnxruntime.IOBinding, name: str, *, on_host: bool) -> None:
    """Let the next run allocate an output in host memory or on the device."""
    binding.bind_output(name, *(("cpu",) if on_host else (device.kind, device.index)))


def keep(device: Device, value: onnxruntime.OrtValue) -> onnxruntime.OrtValue:
    """Return an output that the next run does not overwrite, as a run of ONNX Runtime 1.19 would."""
    vector = device.ort.capi._pybind_state.OrtValueVector()
    vector.push_back(value._ortvalue)
    return device.ort.OrtValue(vector[0])


def number_or_array(array: np.ndarray) -> Any:
    """Return an array, or a Python number for an array of rank 0."""
    return array if array.ndim else array.item()


def rows_of(feeds: Mapping[str, Tensor]) -> int:
    """Return the number of rows of a batch."""
    shapes: list[Any] = [getattr(x, "shape", ()) for x in feeds.values()]
    sizes = (shape() if callable(shape) else shape for shape in shapes)
    return next((int(size[0]) for size in sizes if len(size)), 1)
