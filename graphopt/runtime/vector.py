"""Convert parameters to one contiguous vector, for MPI and for optimizers of other packages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.metadata import UNTRAINED


def join(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Concatenate arrays into one vector.

    Raises:
        GraphoptError: the arrays have different types.
    """
    types = {array.dtype for array in arrays.values()}
    if len(types) > 1:
        raise GraphoptError(
            f"contiguous: expected parameters of one type, found {', '.join(map(str, types))}"
        )
    return np.concatenate([array.ravel() for array in arrays.values()])


def split(vector: np.ndarray, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cut a vector from `join` into parts with the names and shapes of arrays.

    Raises:
        GraphoptError: the vector has the wrong type or size.
    """
    expected = join(arrays)
    if vector.shape != expected.shape or vector.dtype != expected.dtype:
        raise GraphoptError(
            f"set_contiguous: expected {expected.dtype}{list(expected.shape)}, found "
            f"{vector.dtype}{list(vector.shape)}"
        )
    ends = np.cumsum([array.size for array in arrays.values()])[:-1]
    parts = zip(arrays, np.split(vector, ends), strict=True)
    return {name: part.reshape(arrays[name].shape) for name, part in parts}


def untrained(model: ir.Model) -> dict[str, np.ndarray]:
    """Return the weights of a training graph that do not train, by name."""
    return {
        str(value.name): value.const_value.numpy()
        for value in model.graph.initializers.values()
        if UNTRAINED.is_set(value) and value.const_value is not None
    }
