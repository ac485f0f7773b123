"""A training graph on a device, bound to the buffers of its state."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.folding import fold
from graphopt.graph.roles import FED, Role, with_role
from graphopt.runtime.device import Device, Tensor
from graphopt.runtime.signature import Input, Signature, description
from graphopt.runtime.state_buffers import Buffers

if TYPE_CHECKING:
    import onnxruntime

Reported = dict[str, Any]
Values = Mapping[str, "onnxruntime.OrtValue"]

SMALL = 65536  # bytes


class Program:
    """Runs a training graph from one set of state buffers to the other.

    Everything that is the same in each call is bound once: buffers of state, of hyperparameters and of the numbers
    that are reported. Data are read where they are.

    Args:
        buffers: of the state; a call reads one set and writes the other.
        report: the outputs to return.
        static_shapes: a session for each set of shapes that is fed, which the runtime knows beforehand.
        as_numpy: return arrays; otherwise values on the device.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: Buffers,
        report: Sequence[str],
        *,
        static_shapes: bool = False,
        as_numpy: bool = True,
    ) -> None:
        self._device = device
        self.inputs = {str(x.name): x for x in with_role(model, *FED)}
        self._signature = Signature(device, list(self.inputs.values()))
        self._static = static_shapes
        self._bound: dict[Any, Bound] = {}
        self._bind = functools.partial(Bound, device, model, buffers, report, as_numpy)
        self._chosen = None if static_shapes else self._bind({})
        self._checked: list[Any] | None = None  # the names, shapes and types that were last found to fit

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        """Tell whether tensors have the names, shapes and types of those that were checked last."""
        return self._checked == [
            (name, getattr(x, "shape", None), getattr(x, "dtype", None)) for name, x in feeds.items()
        ]

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Raise an error unless tensors fit; the same names, shapes and types are looked at once."""
        if self.fits(feeds):
            return
        shapes = self._signature.check(feeds)
        if self._static:
            key = tuple(sorted(shapes.items()))
            if key not in self._bound:
                self._bound[key] = self._bind(shapes)
            self._chosen = self._bound[key]
        self._checked = description(feeds)

    def run(self, source: int, feeds: Mapping[str, Any]) -> Reported:
        """Read state of set `source`, write the other, and return what is reported; numbers as Python's.

        Args:
            feeds: what `check` has just let through.
        """
        assert self._chosen is not None
        return self._chosen.run(source, feeds)

    def placement(self) -> dict[str, dict[str, int]]:
        """Return `Device.placement` of the session that ran last."""
        if self._chosen is None:
            raise GraphoptError("placement: expected a step before, since shapes are static, found none")
        return self._chosen.placement()


class Bound:
    """A session with what is bound for all its runs; data, where a CUDA graph is captured, to buffers of its own.

    Args:
        shapes: the shapes of the data, by name, where they are the same in every run.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: Buffers,
        report: Sequence[str],
        as_numpy: bool,
        shapes: Mapping[str, Sequence[int]],
    ) -> None:
        self._device = device
        inputs = {str(x.name): x for x in with_role(model, *FED)}
        outputs = {str(y.name): y for y in model.graph.outputs}
        self._types = {name: Input(x).dtype for name, x in inputs.items()}
        if shapes:
            model = _fixed(model, shapes)
            outputs = {str(y.name): y for y in model.graph.outputs}
        self._session = device.session(model)
        self._report, self._as_numpy = list(report), as_numpy
        following = {str(y.name) for y in with_role(model, Role.NEXT)}
        self._numbers: dict[str, Any] = {}  # arrays in the host's memory, or buffers on the GPU
        self._fixed: dict[str, onnxruntime.OrtValue] = {}  # outputs with a buffer of their own
        for name in report:
            y = outputs[name]
            assert y.dtype is not None
            if device.cuda_graph:
                array = np.zeros(_shape(y), y.dtype.numpy())
                self._fixed[name] = device.buffer(array)
            elif y.shape == ():
                array = np.zeros((), y.dtype.numpy())
                self._fixed[name] = device.shared(array)
                self._numbers[name] = array
        self._held: dict[str, np.ndarray] = {}  # small inputs, which are quicker copied than bound
        self._data: dict[str, onnxruntime.OrtValue] = {}
        if device.cuda_graph:
            self._data = {
                name: device.buffer(np.zeros(shapes[name], dtype)) for name, dtype in self._types.items()
            }
        self._places = {name: i for i, name in enumerate(report) if name not in self._fixed}
        self._bindings = [
            self._bind(
                {**buffers.sets[source], **buffers.fed, **self._data},
                {
                    f"{name}.next": x
                    for name, x in buffers.sets[1 - source].items()
                    if f"{name}.next" in following
                },
            )
            for source in range(2)
        ]
        self._options = [device.captured(source + 1) for source in range(2)]

    def run(self, source: int, feeds: Mapping[str, Any]) -> Reported:
        binding = self._bindings[source]
        kept = []
        for name, tensor in feeds.items():
            held = self._held.get(name)
            if held is not None and isinstance(tensor, np.ndarray) and held.shape == tensor.shape:
                held[...] = tensor
            elif name in self._data:
                self._device.fill(self._data[name], tensor, self._types[name])
            else:
                kept.append(self._feed(binding, name, tensor))
        for name in self._places:
            self._device.bind_output(binding, name, on_host=self._as_numpy)
        self._device.run(self._session, binding, self._options[source])
        if not self._places and not self._device.cuda_graph:
            return {name: array.item() for name, array in self._numbers.items()}
        values = binding.get_outputs() if self._places else []
        reported: Reported = {}
        for name in self._report:
            if name in self._numbers:
                reported[name] = self._numbers[name].item()
            else:
                value = self._fixed[name] if name in self._fixed else values[self._places[name]]
                if self._as_numpy or not value.shape():
                    array = value.numpy()
                    reported[name] = array if array.ndim else array.item()
                else:
                    reported[name] = self._device.kept(value)
        return reported

    def placement(self) -> dict[str, dict[str, int]]:
        return self._device.placement(self._session)

    def _feed(self, binding: onnxruntime.IOBinding, name: str, tensor: Tensor) -> Any:
        """Bind an input to a tensor, or to a small one's copy for the steps to come; return what has to live."""
        self._held.pop(name, None)
        if self._device.kind != "cpu" or not isinstance(tensor, np.ndarray) or tensor.nbytes > SMALL:
            return self._device.bind(binding, name, tensor, self._types[name])
        self._held[name] = np.array(tensor, self._types[name], order="C")
        value = self._device.shared(self._held[name])
        for each in self._bindings:
            each.bind_ortvalue_input(name, value)
        return value

    def _bind(self, inputs: Values, outputs: Values) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        for name in self._report:
            if name in self._fixed:
                binding.bind_ortvalue_output(name, self._fixed[name])
            else:
                binding.bind_output(name, "cpu")
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return binding


def _fixed(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> ir.Model:
    """Return a training graph for data of some shapes, and what follows from them folded."""
    model = model.clone()
    sizes = {}
    for value in with_role(model, *FED):
        for dim, size in zip(value.shape or (), shapes[str(value.name)], strict=False):
            if not isinstance(dim, int) and dim.value is not None:
                sizes[dim.value] = size
        value.shape = ir.Shape(shapes[str(value.name)])
    for value in ir.convenience.create_value_mapping(model.graph).values():
        if value.shape is not None:
            value.shape = ir.Shape(
                [d if isinstance(d, int) else sizes.get(str(d.value), d) for d in value.shape]
            )
    fold(model)
    return model


def _shape(value: ir.Value) -> tuple[int, ...]:
    """Return an output's shape, which a CUDA graph has to know."""
    if value.shape is None or not value.shape.is_static():
        raise GraphoptError(
            f"output {value.name!r}: expected a shape that the batch's tells, as a CUDA graph needs, found "
            f"{value.shape}: leave it out of `report`"
        )
    return tuple(value.shape.numpy())


class Pace:
    """Chooses how many steps a call does, by the time of a step alone and of a step among several.

    At first steps run alone, then in calls of as many as take `CALL` seconds; they go on alone unless calls were
    faster by a `MARGIN`.
    """

    CALL = 4e-3
    MOST = 256
    MARGIN = 0.9
    TRIED = 5  # steps alone, and calls of several

    def __init__(self) -> None:
        self._alone: list[float] = []
        self._together: list[float] = []

    @property
    def steps(self) -> int:
        if len(self._alone) < self.TRIED:
            return 1
        alone = min(self._alone)  # the first ones take longer, and others may run beside
        together = min(self._together) if len(self._together) == self.TRIED else 0.0
        if together > self.MARGIN * alone:
            return 1
        return max(1, min(self.MOST, int(self.CALL / alone)))

    @property
    def alone(self) -> bool:
        """Whether steps stay alone."""
        return self.steps == 1 and len(self._alone) == self.TRIED

    @contextlib.contextmanager
    def timed(self, steps: int = 1) -> Iterator[None]:
        """Take the time of a call of some steps."""
        taken = self._alone if steps == 1 else self._together
        start = time.perf_counter()
        yield
        if len(taken) < self.TRIED:
            taken.append((time.perf_counter() - start) / steps)
