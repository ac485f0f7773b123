"""What a graph's inputs accept."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError


def shared_dimensions(values: Iterable[ir.Value]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return the symbolic dimensions that several inputs share, and where each stands."""
    places: dict[str, list[tuple[str, int]]] = {}
    for value in values:
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, int) and dim.value is not None:
                places.setdefault(dim.value, []).append((str(value.name), axis))
    return [(dimension, found) for dimension, found in places.items() if len(found) > 1]


class Input:
    """The element type and shape that an input accepts."""

    def __init__(self, value: ir.Value) -> None:
        assert value.dtype is not None
        self.name = value.name
        self.dtype = np.dtype(value.dtype.numpy())
        self.shape = (
            None if value.shape is None else tuple(d if isinstance(d, int) else None for d in value.shape)
        )
        self._text = str(value.shape)

    def check(self, array: np.ndarray) -> None:
        """Raise an error unless `array` fits."""
        if not isinstance(array, np.ndarray):
            raise GraphoptError(f"input {self.name!r}: expected a NumPy array, found {type(array).__name__}")
        if array.dtype != self.dtype and self.shape != ():
            raise GraphoptError(
                f"input {self.name!r}: expected {self.dtype}, found {array.dtype}: convert it with .astype"
            )
        if self.shape is not None and (
            len(self.shape) != array.ndim
            or any(want not in (None, have) for want, have in zip(self.shape, array.shape, strict=True))
        ):
            raise GraphoptError(
                f"input {self.name!r}: expected shape {self._text}, found {list(array.shape)}"
            )
