"""Write and read adapter files of ONNX Runtime, whose tensors replace inputs of a model that have defaults.

This module imports onnxruntime, which checks the form of a file when it reads one.
Source: https://onnxruntime.ai/docs/genai/tutorials/finetune.html, and `onnxruntime.AdapterFormat`.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx

from graphopt.errors import GraphoptError, line
from graphopt.files import replacing

if TYPE_CHECKING:
    from onnxruntime import OrtValue

_VERSION = 1


def write_adapter_file(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write arrays by the names of inputs to an adapter file atomically."""
    runtime = _runtime(path)
    values = {name: _value(runtime, np.asarray(x, order="C")) for name, x in arrays.items()}
    file = runtime.AdapterFormat()
    file.set_adapter_version(_VERSION)
    file.set_model_version(_VERSION)
    file.set_parameters(values)
    with replacing(path) as temporary:
        file.export_adapter(temporary)


def located(arrays: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, int]]:
    """Return the content of an adapter file, and where the numbers of each array begin in it."""
    generator = np.random.default_rng(0)
    marks = {name: generator.standard_normal(x.shape).astype(x.dtype) for name, x in arrays.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_adapter_file(marks, path := Path(folder, "marks"))
        content = path.read_bytes()
    offsets = {name: content.index(mark.tobytes()) for name, mark in marks.items()}
    own = bytearray(content)
    for name, first in offsets.items():
        own[first : first + arrays[name].nbytes] = arrays[name].tobytes()
    return bytes(own), offsets


def read_adapter_file(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an adapter file by the names of inputs.

    Raises:
        GraphoptError: the file is missing or malformed, or has no numbers.
    """
    runtime = _runtime(path)
    if not path.is_file():
        raise GraphoptError(f"{path}: expected an adapter file of ONNX Runtime, found none")
    try:
        values = runtime.AdapterFormat.read_adapter(str(path)).get_parameters()
        arrays = {name: _array(value) for name, value in values.items()}
    except (RuntimeError, ValueError) as error:
        raise GraphoptError(
            f"{path}: expected an adapter file of ONNX Runtime, found another file: {line(error).rpartition(') ')[2]}"
        ) from error
    wrong = next((name for name, x in arrays.items() if x.dtype.kind not in "fV"), None)
    if wrong is not None:
        raise GraphoptError(f"{path}: {wrong!r}: expected floating-point numbers, found {arrays[wrong].dtype}")
    return arrays


def _value(runtime: ModuleType, array: np.ndarray) -> OrtValue:
    if array.dtype == ml_dtypes.bfloat16:
        kind = onnx.TensorProto.BFLOAT16
        return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), kind)
    return runtime.OrtValue.ortvalue_from_numpy(array)


def _array(value: OrtValue) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        return np.array(value.numpy())
    shape = value.shape()
    content = ctypes.string_at(value.data_ptr(), math.prod(shape) * np.dtype(ml_dtypes.bfloat16).itemsize)
    return np.frombuffer(content, ml_dtypes.bfloat16).reshape(shape)


def _runtime(path: Path) -> ModuleType:
    try:
        import onnxruntime
    except ImportError as error:
        raise GraphoptError(f"{path}: expected an ONNX Runtime, found none: pip install onnxruntime") from error
    if not hasattr(onnxruntime, "AdapterFormat"):
        raise GraphoptError(
            f"{path}: expected an ONNX Runtime with adapter files, found {onnxruntime.__version__}: install 1.20 or "
            "later, or save with form='peft'"
        )
    return onnxruntime
