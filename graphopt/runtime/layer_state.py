"""The state of a layer on a device: parameters, running statistics and counters, replaced as a whole."""

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
    """Hold values by name; a value that was read is never written to, so that passes on their way keep theirs.

    Args:
        model: a graph, out of which the initial values are taken.
    """

    def __init__(self, device: Device, model: ir.Model) -> None:
        self._device = device
        self._accepted = {str(x.name): InputSpec(x, "state") for x in with_role(model, *STATE)}
        self.values = {name: buffer(device, array) for name, array in take_initial(model).items()}

    def arrays(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Return copies of the state, or of some of it, by name."""
        return {
            name: np.array(self.values[name].numpy()) for name in (self.values if names is None else names)
        }

    def checked(
        self, arrays: Mapping[str, Tensor], names: Collection[str]
    ) -> dict[str, onnxruntime.OrtValue]:
        """Return values for states `names`: arrays are copied, other tensors stay where they are.

        Raises:
            GraphoptError: a name is unknown, or a tensor is of another type or shape.
        """
        for name in arrays:
            if name not in names:
                raise GraphoptError(unknown("parameter", name, names))
        return {
            name: fitting(self._device, self._accepted[name], x, copied=True) for name, x in arrays.items()
        }

    def go_on(self, results: Mapping[str, onnxruntime.OrtValue]) -> None:
        """Take the new state out of a forward pass's results."""
        self.values |= {name: results[next_of(name)] for name in self.values if next_of(name) in results}


def fitting(device: Device, accepted: InputSpec, tensor: Tensor, *, copied: bool) -> onnxruntime.OrtValue:
    """Return a tensor on a device; an array is copied if it is to outlive the call.

    Raises:
        GraphoptError: it is of another type or shape than is accepted.
    """
    if accepted.shape == () and isinstance(tensor, (int, float, np.number, np.ndarray)):
        tensor = np.asarray(tensor, accepted.dtype)
    if isinstance(tensor, np.ndarray):
        accepted.check_type(tensor.dtype, tensor.shape)
        return buffer(device, tensor) if copied else to_ort(device, tensor, accepted.dtype)
    try:
        value = to_ort(device, tensor, accepted.dtype)
    except GraphoptError as error:
        raise GraphoptError(f"{accepted}: {error}") from error
    accepted.check_type(np.dtype(ir.DataType(value.element_type()).numpy()), value.shape())
    return value
