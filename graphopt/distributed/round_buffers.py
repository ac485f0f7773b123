"""Hold a worker's own weights, and those of the last synchronization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.names import value_of
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.device import Device
from graphopt.runtime.state_buffers import State, StateBuffers
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.tensors import buffer

if TYPE_CHECKING:
    import onnxruntime


class RoundBuffers(State):
    """Hold the state of a worker that trains separately from one synchronization to the next.

    Users read and replace the weights of the last synchronization and the state of the outer optimizer.

    Args:
        model: a training graph, from which the initial values are removed.
        outer: its outer step, from which they are removed, too.
        workers: the number of workers.

    Attributes:
        own: what steps read and write: the worker's own weights and slots.
        flat: what the workers sum in a synchronization: `changed`, and a number for each worker.
        present: the part of `flat` with a number for each worker.
    """

    def __init__(self, device: Device, model: ir.Model, outer: ir.Model, workers: int) -> None:
        self.own, self._shared = StateBuffers(device, model), StateBuffers(device, outer)
        gradients = [x for x in outer.graph.inputs if x in with_role(outer, Role.GRADIENT)]
        zeros = {str(x.name): np.zeros(x.shape.numpy(), x.dtype.numpy()) for x in gradients}  # type: ignore[union-attr]
        self._weights = [value_of(name) for name in zeros]
        taken = sorted(set(self._shared.names) & set(self.own.names) - set(self._weights))
        if taken:
            raise GraphoptError(
                f"state {taken[0]!r}: expected no name that the outer optimizer needs, found it: rename the weight"
            )
        self._gradients = {name: buffer(device, x) for name, x in zeros.items()}
        # All workers run the same form of the update, so that their weights stay the same bits.
        self._outer = StepRunner(
            device, outer, self._shared, [], fixed=self._gradients, native=False, verified=False
        )
        self._outer.check({})
        ends = np.cumsum([x.size for x in zeros.values()])
        self.flat = np.zeros(int(ends[-1]) + workers, np.result_type(*zeros.values()))
        *parts, self.present = np.split(self.flat, ends)
        self._parts = [part.reshape(x.shape) for part, x in zip(parts, zeros.values(), strict=True)]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.own.names, *self._shared.names]))

    def read(self) -> dict[str, onnxruntime.OrtValue]:
        shared = self._shared.read()
        return self.own.read() | {name: shared[name] for name in self._weights}

    def arrays(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        names = self.names if names is None else list(names)
        shared = self._shared.arrays(name for name in names if name in self._shared.names)
        return {name: shared[name] if name in shared else self._own(name) for name in names}

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace part of the state by name. The worker's own weights change as much as the synchronized ones."""
        shared = {name: x for name, x in arrays.items() if name in self._shared.names}
        self._shared.check(shared)
        own = {name: x for name, x in arrays.items() if name not in shared}
        for name in shared.keys() & set(self._weights):
            own[name] = np.asarray(shared[name] + (self._own(name) - self._shared.arrays([name])[name]))
        self.own.update(own)
        self._shared.update(shared)

    def begin(self) -> None:
        """Give the worker the weights of the last synchronization."""
        self.own.update(self._shared.arrays(self._weights))

    def collect(self) -> bool:
        """Write what the worker has subtracted from the weights to `flat`; return whether it is finite."""
        shared = self._shared.arrays(self._weights)
        for name, part in zip(self._weights, self._parts, strict=True):
            np.subtract(shared[name], self._own(name), out=part, dtype=part.dtype)
        return bool(np.isfinite(self.flat).all())

    def apply(self) -> bool:
        """Update the weights by `flat`, the mean over the workers, if the new ones are finite; return whether."""
        if not np.isfinite(self.flat).all():
            return False
        for value, part in zip(self._gradients.values(), self._parts, strict=True):
            value.update_inplace(np.ascontiguousarray(part, value.numpy().dtype).reshape(part.shape))
        self._outer.step(self._shared.current, {})
        if self._shared.spoiled() is not None:
            return False
        self._shared.swap()
        return True

    def _own(self, name: str) -> np.ndarray:
        return self.own.arrays([name])[name]
