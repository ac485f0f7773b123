"""Read, replace, save and load what an executor trains."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import Role, with_role
from graphopt.graph.state import ACCUMULATED, STEP
from graphopt.runtime.checkpoint import Property, save_state
from graphopt.runtime.device import Device
from graphopt.runtime.executor_options import ExecutorOptions
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.vector import join, split, untrained

_BATCHES = "graphopt.batches"  # a property of checkpoints


class ExecutorState(ExecutorOptions):
    """Hold a training graph, its state on a device, and the number of batches that led to the state."""

    def __post_init__(self, step: Source) -> None:
        super().__post_init__(step)
        self._device = Device.of(self.device, self)
        self.device = self._device.name
        self._model = load(step)
        self._lock = threading.RLock()
        self._batches = 0
        self.properties: dict[str, Property] = {}  # of the user's own, kept in checkpoints
        self._buffers = StateBuffers(self._device, self._model)

    @abstractmethod
    def _open(self) -> None:
        """Make the sessions that read the model's weights."""

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Copies of all state: parameters, optimizer slots and counters, by name."""
        with self._lock:
            return self._buffers.arrays()

    @state.setter
    def state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.update_state(arrays)

    def update_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace some of the state by name; nothing is written if one of the arrays does not fit.

        Raises:
            GraphoptError: a name is unknown, or an array is of another type or shape.
        """
        with self._lock:
            self._buffers.update(arrays)
            if STEP in arrays:
                self._batches = int(arrays[STEP])

    @property
    def steps(self) -> int:
        """How many updates of the parameters led to the state: its counter `step`, which schedules read.

        A batch whose gradients are only added up (`passes.Accumulate`) or that `passes.DynamicLossScale` skips is no
        update; `batches` counts it. A graph without that counter updates in each batch.
        """
        with self._lock:
            return self._buffers.counter(STEP, self._batches)

    @property
    def batches(self) -> int:
        """How many batches led to the state, those without an update of the parameters too; checkpoints hold it.

        A step that `on_nonfinite` refuses or skips leaves no trace in the state and is not counted. `update_state`
        with a counter `step` sets it to that number.
        """
        return self._batches

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters, by name, in alphabetical order."""
        with self._lock:
            return self._buffers.arrays(sorted(self._of(Role.PARAMETER)))

    def contiguous(self, *, frozen: bool = False) -> np.ndarray:
        """Return the parameters end to end in one vector, in alphabetical order.

        Args:
            frozen: with the weights of the model that do not train.

        Raises:
            GraphoptError: they are not of one type.
        """
        return join(self._weights(frozen))

    def set_contiguous(self, vector: np.ndarray, *, frozen: bool = False) -> None:
        """Replace the parameters by parts of a vector as `contiguous` returns it.

        Raises:
            GraphoptError: the vector is of another type or size; nothing is written.
        """
        new = split(vector, self._weights(frozen))
        trained = set(self._of(Role.PARAMETER))
        fixed = {name: array for name, array in new.items() if name not in trained}
        with self._lock:
            self.update_state({name: array for name, array in new.items() if name in trained})
            for name, array in fixed.items():
                value = self._model.graph.initializers[name]
                value.const_value = ir.tensor(np.array(array), name=name)
            if fixed:  # they are constants of the sessions
                self._open()

    def reset_gradients(self) -> None:
        """Forget the gradients that `passes.Accumulate` has added up since the last update."""
        names = [name for name in self._of(Role.SLOT) if name.split(".")[-1] == ACCUMULATED]
        if not names:
            raise GraphoptError("reset_gradients: the training graph accumulates none: add passes.Accumulate")
        with self._lock:
            arrays = self._buffers.arrays(names)
            self.update_state({name: np.zeros_like(array) for name, array in arrays.items()})

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What hyperparameters are fed, by name."""
        return self._buffers.hyperparameters

    def set_hyperparameters(self, **values: Any) -> None:
        """Feed hyperparameters for the steps to come.

        Raises:
            GraphoptError: there is no hyperparameter of that name, or the value does not fit, is not finite, or is a
                negative rate.
        """
        with self._lock:
            self._buffers.feed(values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all state and `properties` to a checkpoint, from which `load` goes on bit for bit."""
        with self._lock:
            arrays, properties = self._buffers.arrays(), {**self.properties, _BATCHES: self._batches}
        save_state(arrays, path, properties)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace all state and `properties` by those of a checkpoint.

        Raises:
            GraphoptError: the file is no checkpoint, is damaged, or is one of another training graph; nothing is
                replaced.
        """
        arrays, properties = self._buffers.load(path)
        with self._lock:
            self.update_state(arrays)
            self._batches = int(properties.pop(_BATCHES, self.steps))
            self.properties = properties

    def _of(self, *roles: Role) -> list[str]:
        """Return the names of the inputs and outputs of some roles."""
        return [str(value.name) for value in with_role(self._model, *roles)]

    def _weights(self, frozen: bool) -> dict[str, np.ndarray]:
        """Return the parameters, and the weights that do not train, in alphabetical order."""
        return dict(sorted({**self.parameters, **(untrained(self._model) if frozen else {})}.items()))
