"""The state of a training run in a file: safetensors, with a checksum that finds a flipped bit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from graphopt.errors import GraphoptError
from graphopt.loading import replacing

_CHECKSUM = "graphopt.sha256"


def save_state(state: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
    """Write arrays by name to one file, whole or not at all."""
    arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in state.items()}
    with replacing(path) as temporary:
        safetensors.numpy.save_file(arrays, temporary, metadata={_CHECKSUM: _checksum(arrays)})


def load_state(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file that `save_state` wrote.

    Raises:
        GraphoptError: the file is missing, is no checkpoint, or has changed since it was written.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            expected = (file.metadata() or {}).get(_CHECKSUM)
    except FileNotFoundError as error:
        raise GraphoptError(f"{path}: no such file") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise GraphoptError(f"{path}: expected a checkpoint in safetensors form: {error}") from error
    if expected != _checksum(arrays):
        raise GraphoptError(
            f"{path}: expected checksum {expected}, found another: the file is damaged; do not use it"
        )
    return arrays


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].dtype}:{arrays[name].shape};".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
