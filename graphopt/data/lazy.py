"""Declare arrays whose rows are read when they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class LazyArray(ABC):
    """Stand for an array whose rows are read when they are asked for, such as those of a folder of images.

    A data set checks its shape and type at once, and its rows batch by batch.

    Args:
        shape: the shape; the first axis is the rows.
        dtype: the type.

    >>> class Squares(graphopt.data.LazyArray):
    ...     def read(self, rows):
    ...         return (rows[:, None] ** 2).astype(self.dtype)
    >>> Squares((10, 1), "float32")[2:4].tolist()
    [[4.0], [9.0]]
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return rows by their indices, in the array's type."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        return self.read(np.arange(len(self))[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size of the whole array in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Array = np.ndarray | LazyArray
