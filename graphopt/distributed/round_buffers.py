"""Hold a worker's own weights beside those of the last synchronisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.names import value_of
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.device import Device
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.tensors import buffer

if TYPE_CHECKING:
    import onnxruntime


class RoundBuffers(StateBuffers):
    """Hold the state of a worker that trains on its own from one synchronisation to the next.

    A step reads and writes the worker's own weights, in `sets`. All methods give the weights of the last
    synchronisation and the state of the outer optimizer.

    Args:
        model: a training graph, from which the initial values are removed.
        outer: its outer step, from which they are removed, too.
        workers: the number of workers.

    Attributes:
        flat: what the workers sum in a synchronisation: `changed`, and a number for each worker.
        present: the part of `flat` with a number for each worker.
    """

    def __init__(self, device: Device, model: ir.Model, outer: ir.Model, workers: int) -> None:
        super().__init__(device, model)
        self._met = StateBuffers(device, outer)
        gradients = [x for x in outer.graph.inputs if x in with_role(outer, Role.GRADIENT)]
        zeros = {str(x.name): np.zeros(x.shape.numpy(), x.dtype.numpy()) for x in gradients}  # type: ignore[union-attr]
        self._weights = [value_of(name) for name in zeros]
        taken = sorted(set(self._met.names) & set(super().names) - set(self._weights))
        if taken:
            raise GraphoptError(
                f"state {taken[0]!r}: expected no name that the outer optimizer needs, found it: rename the weight"
            )
        self._gradients = {name: buffer(device, x) for name, x in zeros.items()}
        # All workers run the same form of the update, so that their weights stay the same bits.
        self._outer = StepRunner(
            device, outer, self._met, [], fixed=self._gradients, native=False, verified=False
        )
        self._outer.check({})
        ends = np.cumsum([x.size for x in zeros.values()])
        self.flat = np.zeros(int(ends[-1]) + workers, np.result_type(*zeros.values()))
        *parts, self.present = np.split(self.flat, ends)
        self._parts = [part.reshape(x.shape) for part, x in zip(parts, zeros.values(), strict=True)]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*super().names, *self._met.names]))

    def read(self) -> dict[str, onnxruntime.OrtValue]:
        met = self._met.read()
        return super().read() | {name: met[name] for name in self._weights}

    def arrays(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        names = self.names if names is None else list(names)
        met = self._met.arrays(name for name in names if name in self._met.sets[0])
        own = super().arrays(name for name in names if name not in met)
        return {name: met[name] if name in met else own[name] for name in names}

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace part of the state by name. New weights move the worker's own weights along."""
        met = {name: x for name, x in arrays.items() if name in self._met.sets[0]}
        self._met.check(met)
        own = {name: x for name, x in arrays.items() if name not in met}
        for name in met.keys() & set(self._weights):
            own[name] = np.asarray(met[name] + (self._own(name) - self._met.arrays([name])[name]))
        super().update(own)
        self._met.update(met)

    def begin(self) -> None:
        """Give the worker the weights of the last synchronisation."""
        super().update(self._met.arrays(self._weights))

    def collect(self) -> bool:
        """Write what the worker has subtracted from the weights to `flat`; return whether it is finite."""
        met = self._met.arrays(self._weights)
        for name, part in zip(self._weights, self._parts, strict=True):
            np.subtract(met[name], self._own(name), out=part, dtype=part.dtype)
        return bool(np.isfinite(self.flat).all())

    def apply(self) -> bool:
        """Update the weights by `flat`, the mean over the workers, if the new ones are finite; return whether."""
        if not np.isfinite(self.flat).all():
            return False
        for value, part in zip(self._gradients.values(), self._parts, strict=True):
            value.update_inplace(np.ascontiguousarray(part, value.numpy().dtype).reshape(part.shape))
        self._outer.step(self._met.current, {})
        if self._met.spoiled() is not None:
            return False
        self._met.swap()
        return True

    def _own(self, name: str) -> np.ndarray:
        return super().arrays([name])[name]
