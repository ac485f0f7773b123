"""What a graph's inputs accept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError

Dimension = tuple[str, list[tuple[str, int]]]  # its name, and the inputs and axes that share it


def shared_dimensions(values: Iterable[ir.Value]) -> list[Dimension]:
    """Return the symbolic dimensions that several inputs share, and where each stands."""
    places: dict[str, list[tuple[str, int]]] = {}
    for value in values:
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, int) and dim.value is not None:
                places.setdefault(dim.value, []).append((str(value.name), axis))
    return [(dimension, found) for dimension, found in places.items() if len(found) > 1]


def check_shared(dimensions: Iterable[Dimension], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise an error unless each of some shared dimensions has one size in `shapes`."""
    for dimension, places in dimensions:
        sizes = {name: shapes[name][axis] for name, axis in places}
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{size} in {name!r}" for name, size in sizes.items())
            raise GraphoptError(f"dimension {dimension!r}: expected one size in all inputs, found {found}")


class Input:
    """The element type and shape that an input accepts; errors call it by `kind` and name."""

    def __init__(self, value: ir.Value, kind: str = "input") -> None:
        assert value.dtype is not None
        self.name = value.name
        self._kind = kind
        self.dtype = np.dtype(value.dtype.numpy())
        self.shape = (
            None if value.shape is None else tuple(d if isinstance(d, int) else None for d in value.shape)
        )
        self._text = str(value.shape)

    def __str__(self) -> str:
        return f"{self._kind} {self.name!r}"

    def check(self, array: np.ndarray) -> None:
        """Raise an error unless `array` fits."""
        if not isinstance(array, np.ndarray):
            raise GraphoptError(f"{self}: expected a NumPy array, found {type(array).__name__}")
        self.fit(array.dtype, array.shape)

    def fit(self, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        """Raise an error unless an element type and a shape fit; a scalar may be of any type."""
        if dtype != self.dtype and self.shape != ():
            raise GraphoptError(f"{self}: expected {self.dtype}, found {dtype}: convert it with .astype")
        if self.shape is not None and (
            len(self.shape) != len(shape)
            or any(want not in (None, have) for want, have in zip(self.shape, shape, strict=True))
        ):
            raise GraphoptError(f"{self}: expected shape {self._text}, found {list(shape)}")
