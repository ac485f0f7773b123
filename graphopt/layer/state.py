"""Hold the state of a layer on a device: parameters, running statistics and counters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.names import next_of
from graphopt.graph.roles import STATE, with_role
from graphopt.graph.state import take_initial
from graphopt.runtime.device import Device
from graphopt.runtime.signature import InputSpec
from graphopt.runtime.tensors import Tensor, buffer, to_ort

if TYPE_CHECKING:
    import onnxruntime


class LayerState:
    """Hold values by name. Values are replaced, never overwritten, so that open forward passes keep theirs.

    Args:
        model: a graph, from which the initial values are removed.
    """

    def __init__(self, device: Device, model: ir.Model) -> None:
        self._device = device
        self._accepted = {str(x.name): InputSpec(x, "state") for x in with_role(model, *STATE)}
        self.values = {name: buffer(device, array) for name, array in take_initial(model).items()}

    def arrays(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Return copies of the state, or of part of it, by name."""
        return {
            name: np.array(self.values[name].numpy()) for name in (self.values if names is None else names)
        }

    def checked(
        self, arrays: Mapping[str, Tensor], names: Collection[str]
    ) -> dict[str, onnxruntime.OrtValue]:
        """Return values for the states `names`. Arrays are copied; other tensors are used in place.

        Raises:
            GraphoptError: a name is unknown, or a tensor has the wrong type or shape.
        """
        for name in arrays:
            if name not in names:
                raise GraphoptError(unknown("parameter", name, names))
        return {
            name: fitting(self._device, self._accepted[name], x, copied=True) for name, x in arrays.items()
        }

    def advance(self, results: Mapping[str, onnxruntime.OrtValue]) -> None:
        """Remove the new state from the results of a forward pass and store it."""
        self.values |= {name: results[next_of(name)] for name in self.values if next_of(name) in results}


def fitting(device: Device, accepted: InputSpec, tensor: Tensor, *, copied: bool) -> onnxruntime.OrtValue:
    """Return a tensor on a device; copy an array if it must outlive the call.

    Raises:
        GraphoptError: the tensor has the wrong type or shape.
    """
    if accepted.shape == () and isinstance(tensor, (int, float, np.number, np.ndarray)):
        tensor = np.asarray(tensor, accepted.dtype)
    if isinstance(tensor, np.ndarray):
        accepted.check_type(tensor.dtype, tensor.shape)
        return buffer(device, tensor) if copied else to_ort(device, tensor, accepted.dtype)
    return accepted.converted(device, tensor)
