"""Save and load the state of a training run in safetensors files with a checksum."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from graphopt.errors import GraphoptError, kind_of
from graphopt.files import check_file, json_of, replacing

_CHECKSUM = "graphopt.sha256"
_PROPERTIES = "graphopt.properties"

Property = int | float | str


def save_state(
    state: Mapping[str, np.ndarray], path: str | os.PathLike[str], properties: Mapping[str, Property] | None
) -> None:
    """Write arrays by name to one file atomically; with properties, if any, and a checksum.

    Raises:
        GraphoptError: a property is neither a number nor a string.
    """
    for name, value in (properties or {}).items():
        if not isinstance(value, int | float | str):
            raise GraphoptError(
                f"property {name!r}: expected an int, a float or a string, found {type(value).__name__}"
            )
    arrays = _contiguous(state)
    metadata = None
    if properties is not None:
        written = json.dumps(dict(properties), sort_keys=True)
        metadata = {_PROPERTIES: written, _CHECKSUM: _checksum(arrays, written)}
    with replacing(path) as temporary:
        safetensors.numpy.save_file(arrays, temporary, metadata)


def state_bytes(state: Mapping[str, np.ndarray]) -> bytes:
    """Return a safetensors file of arrays by name, without a checksum and properties.

    Its layout depends only on names, types and shapes: files of other numbers have the same header.
    """
    return safetensors.numpy.save(_contiguous(state))


def load_state(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Property]]:
    """Return the arrays and the properties of a file that `save_state` or a host wrote; a host writes no checksum.

    Raises:
        GraphoptError: the file is missing, is not a checkpoint, or is damaged.
    """
    check_file(path)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is not a mapping
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        raise GraphoptError(f"{path}: no such file") from error
    except (OSError, safetensors.SafetensorError) as error:
        found = ", found a model: graphopt.load reads it" if str(path).endswith(".onnx") else f": {error}"
        raise GraphoptError(f"{path}: expected a checkpoint in safetensors form{found}") from error
    expected, written = metadata.get(_CHECKSUM), metadata.get(_PROPERTIES, "")
    if metadata and expected != _checksum(arrays, written):
        raise GraphoptError(f"{path}: expected checksum {expected}, found another: the file is damaged; do not use it")
    properties = json_of(written or "{}", f"{path}: {_PROPERTIES}")
    if not isinstance(properties, dict):
        raise GraphoptError(f"{path}: expected properties by name, found {kind_of(properties)}")
    return arrays, properties


def _contiguous(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays as safetensors needs them; it writes wrong numbers for others (tests/faults.py: safetensors)."""
    return {name: np.asarray(array, order="C") for name, array in state.items()}


def _checksum(arrays: Mapping[str, np.ndarray], properties: str) -> str:
    digest = hashlib.sha256(properties.encode())
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].dtype}:{arrays[name].shape};".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
