"""Hold tensors that workers sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from graphopt.runtime.device import Device
from graphopt.runtime.tensors import Allocate, allocated, buffers


class SummedBuffers:
    """Hold a buffer for each of some outputs of a graph; on the CPU, those of one type lie in one array.

    Attributes:
        values: the buffers by name.

    Args:
        outputs: outputs with static shapes.
        allocate: returns the memory of an array.
    """

    def __init__(self, device: Device, outputs: Iterable[ir.Value], allocate: Allocate = allocated) -> None:
        self.values, self._flat = buffers(device, {str(y.name): _zeros(y) for y in outputs}, allocate)

    @contextmanager
    def flat(self) -> Iterator[list[np.ndarray]]:
        """Return arrays with the contents of all buffers, whose changes the buffers have after the block."""
        if self._flat:
            yield self._flat
            return
        arrays = [value.numpy().ravel() for value in self.values.values()]
        yield arrays
        for value, array in zip(self.values.values(), arrays, strict=True):
            value.update_inplace(array.reshape(value.shape()))


def _zeros(y: ir.Value) -> np.ndarray:
    assert y.shape is not None and y.dtype is not None
    return np.zeros(y.shape.numpy(), y.dtype.numpy())
