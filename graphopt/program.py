"""A training graph on a device, bound to the buffers of its state."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.device import Device
from graphopt.errors import GraphoptError
from graphopt.feeds import Input, check_shared, shared_dimensions
from graphopt.roles import Role, with_role

if TYPE_CHECKING:
    import onnxruntime

Reported = dict[str, Any]
Buffers = Mapping[str, "onnxruntime.OrtValue"]

FED = (Role.DATA, Role.TARGET, Role.SAMPLE_WEIGHT)


class Program:
    """Runs a training graph from one set of state buffers to the other.

    Everything that is the same in each call is bound once: buffers of state, of hyperparameters and of the numbers
    that are reported. Data are read where they are.

    Args:
        state: the two sets of buffers; a call reads one and writes the other.
        report: the outputs to return.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        state: Sequence[Buffers],
        hyperparameters: Buffers,
        report: Sequence[str],
    ) -> None:
        self._device = device
        self._session = device.session(model)
        self.inputs = {str(x.name): x for x in with_role(model, *FED)}
        self._accepts = {name: Input(x) for name, x in self.inputs.items()}
        self._shared = shared_dimensions(self.inputs.values())
        self._checked: list[Any] | None = None  # the names, shapes and types that were last found to fit
        outputs = {str(y.name): y for y in model.graph.outputs}
        self._reported = list(report)
        self._numbers = {
            name: device.host(np.zeros((), y.dtype.numpy()))
            for name in report
            if (y := outputs[name]).shape == () and y.dtype is not None
        }
        self._arrays = {name: i for i, name in enumerate(report) if name not in self._numbers}
        following = {str(y.name) for y in with_role(model, Role.NEXT)}
        self._bindings = [
            self._bind(
                {**state[source], **hyperparameters},
                {f"{name}.next": x for name, x in state[1 - source].items() if f"{name}.next" in following},
            )
            for source in range(2)
        ]

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Raise an error unless arrays fit; the same names, shapes and types are looked at once."""
        found = [(name, getattr(x, "shape", None), getattr(x, "dtype", None)) for name, x in feeds.items()]
        if found == self._checked:
            return
        for name, array in feeds.items():
            if name not in self._accepts:
                raise GraphoptError(f"input {name!r}: unknown; the graph takes {', '.join(self.inputs)}")
            self._accepts[name].check(array)
        for name in self.inputs:
            if name not in feeds:
                raise GraphoptError(f"input {name!r}: missing; found {', '.join(feeds) or 'nothing'}")
        check_shared(self._shared, {name: array.shape for name, array in feeds.items()})
        self._checked = found

    def run(self, source: int, feeds: Mapping[str, np.ndarray]) -> Reported:
        """Read state of set `source`, write the other, and return what is reported; numbers as Python's."""
        binding = self._bindings[source]
        for name, array in feeds.items():
            self._device.bind(binding, name, array)
        for name in self._arrays:
            binding.bind_output(name, "cpu")
        self._device.run(self._session, binding)
        reported: Reported = {name: value.numpy().item() for name, value in self._numbers.items()}
        if self._arrays:
            values = binding.get_outputs()
            reported |= {name: values[i].numpy() for name, i in self._arrays.items()}
            reported = {name: reported[name] for name in self._reported}
        return reported

    def _bind(self, inputs: Buffers, outputs: Buffers) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        for name in self._reported:
            if name in self._numbers:
                binding.bind_ortvalue_output(name, self._numbers[name])
            else:
                binding.bind_output(name, "cpu")
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return binding


class Pace:
    """Chooses how many steps a call does: as many as take `CALL` seconds, by the time of the first steps."""

    CALL = 2e-3
    MOST = 64

    def __init__(self) -> None:
        self._seconds: list[float] = []

    @property
    def steps(self) -> int:
        if len(self._seconds) < 5:
            return 1
        return max(1, min(self.MOST, int(self.CALL / statistics.median(self._seconds))))

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if len(self._seconds) < 5:
            self._seconds.append(time.perf_counter() - start)
