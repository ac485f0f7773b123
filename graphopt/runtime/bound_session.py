"""Bind everything that is the same in every step to a session once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.folding import fold
from graphopt.graph.names import next_of
from graphopt.graph.roles import FED, Role, with_role
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, bind, bind_output, buffer, fill, keep, share

if TYPE_CHECKING:
    import onnxruntime

Reported = dict[str, Any]
Values = Mapping[str, "onnxruntime.OrtValue"]

SMALL = 65536  # bytes


class BoundSession:
    """Compute a step from one set of state buffers to the other, with a binding for each direction.

    How an input is fed:

    ====================  ==================================================  ==========================
    input                 what a call does                                    where it lies
    ====================  ==================================================  ==========================
    state, fed numbers    nothing: bound once                                 `buffers`
    `fixed`               nothing: bound once                                 the caller's memory
    small array, CPU      copies it, which is quicker than binding it         `_small_inputs`, bound once
    any, CUDA graph       copies it, since the graph has the address          `_graph_inputs`, bound once
    any other             binds it where it is                                the caller's memory
    ====================  ==================================================  ==========================

    How an output is fetched:

    ====================  ==================================================  ==========================
    output                what a call does                                    where it lies
    ====================  ==================================================  ==========================
    new state             nothing: bound once                                 `buffers`, the other set
    `fixed`               nothing: bound once                                 the caller's memory
    number                reads it                                            `_numbers`, bound once
    any, CUDA graph       reads it, or returns the buffer itself              `_own_outputs`, bound once
    any other             has the runtime allocate it                         `_places` in the results
    ====================  ==================================================  ==========================

    Args:
        report: the outputs to return.
        as_numpy: return NumPy arrays; otherwise values on the device. Scalars are Python numbers in both cases.
        library: a library of the kernels that the graph calls.
        check: the name of an output that is finite if the new state is.
        shared: the names of the state that the graph writes in place.
        fixed: values for inputs and outputs of the graph that stay where they are.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: StateBuffers,
        report: Sequence[str],
        as_numpy: bool,
        library: Path | None = None,
        check: str | None = None,
        shared: Sequence[str] = (),
        fixed: Values | None = None,
    ) -> None:
        self._device, self._report, self._as_numpy = device, list(report), as_numpy
        self._types = {str(x.name): InputSpec(x).dtype for x in with_role(model, *FED)}
        self.session = Session(device, model, library=library)
        self._small_inputs: dict[str, np.ndarray] = {}
        self._graph_inputs: dict[str, onnxruntime.OrtValue] = {}
        if device.cuda_graph:
            self._graph_inputs = {
                str(x.name): buffer(device, np.zeros(_static_shape(x), self._types[str(x.name)]))
                for x in with_role(model, *FED)
            }
        self._numbers: dict[str, np.ndarray] = {}
        self._own_outputs: dict[str, onnxruntime.OrtValue] = {}
        self._check_name = check or ""
        self._check = None if check is None else np.zeros((), np.float32)
        self._make_outputs({str(y.name): y for y in model.graph.outputs})
        self._places = {name: i for i, name in enumerate(report) if name not in self._own_outputs}
        following = {str(y.name) for y in with_role(model, Role.NEXT)}
        inputs = {str(x.name) for x in model.graph.inputs}
        given = {name: x for name, x in (fixed or {}).items() if name in inputs}
        taken = {str(y.name): fixed[str(y.name)] for y in model.graph.outputs if fixed and y.name in fixed}
        self._bindings = []
        buffers.share(shared)
        for source in range(2):
            read, written = buffers.sets[source], buffers.sets[1 - source]
            after = {next_of(name): x for name, x in written.items() if next_of(name) in following}
            bound = {name: x for name, x in {**read, **buffers.fed}.items() if name in inputs}
            self._bindings.append(self._binding({**bound, **self._graph_inputs, **given}, {**after, **taken}))
        self._options = [_captured(device, source + 1) for source in range(2)]

    @property
    def state_is_finite(self) -> bool:
        """Return whether the latest call found its new state to be finite; not all sessions look."""
        return self._check is not None and math.isfinite(self._check)

    def call(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Read the state from set `source`, write the other set, and return the reported outputs.

        Args:
            feeds: tensors that have been checked.
        """
        binding = self._bindings[source]
        alive = []  # keeps memory alive until the run
        for name, tensor in feeds.items():
            small = self._small_inputs.get(name)
            if small is not None and isinstance(tensor, np.ndarray) and small.shape == tensor.shape:
                small[...] = tensor
            elif name in self._graph_inputs:
                fill(self._device, self._graph_inputs[name], tensor, self._types[name])
            else:
                alive.append(self._feed(binding, name, tensor))
        for name in self._places:
            bind_output(self._device, binding, name, on_host=self._as_numpy)
        self.session.execute(binding, self._options[source])
        if not self._places and not self._device.cuda_graph:
            return {name: array.item() for name, array in self._numbers.items()}
        values = binding.get_outputs() if self._places else []
        reported: Reported = {}
        for name in self._report:
            if name in self._numbers:
                reported[name] = self._numbers[name].item()
                continue
            value = self._own_outputs[name] if name in self._own_outputs else values[self._places[name]]
            if self._as_numpy or not value.shape():
                array = value.numpy()
                reported[name] = array if array.ndim else array.item()
            else:
                reported[name] = keep(self._device, value)
        return reported

    def _feed(self, binding: onnxruntime.IOBinding, name: str, tensor: Tensor) -> Any:
        """Bind an input to a tensor, or to a reusable copy of a small tensor; return the object to keep alive."""
        self._small_inputs.pop(name, None)
        if self._device.kind != "cpu" or not isinstance(tensor, np.ndarray) or tensor.nbytes > SMALL:
            return bind(self._device, binding, name, tensor, self._types[name])
        self._small_inputs[name] = np.array(tensor, self._types[name], order="C")
        value = share(self._device, self._small_inputs[name])
        for each in self._bindings:
            each.bind_ortvalue_input(name, value)
        return value

    def _make_outputs(self, outputs: Mapping[str, ir.Value]) -> None:
        """Allocate the reported outputs whose shapes are known: scalars, and all outputs of a CUDA graph."""
        for name in self._report:
            y = outputs[name]
            assert y.dtype is not None
            if self._device.cuda_graph:
                self._own_outputs[name] = buffer(self._device, np.zeros(_static_shape(y), y.dtype.numpy()))
            elif y.shape == ():
                self._numbers[name] = np.zeros((), y.dtype.numpy())
                self._own_outputs[name] = share(self._device, self._numbers[name])

    def _binding(self, inputs: Values, outputs: Values) -> onnxruntime.IOBinding:
        """Return a binding of the inputs and outputs that are the same in every call."""
        binding = self.session.ort.io_binding()
        for name in self._report:
            if name in self._own_outputs:
                binding.bind_ortvalue_output(name, self._own_outputs[name])
            else:
                binding.bind_output(name, "cpu")
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        if self._check is not None:
            binding.bind_ortvalue_output(self._check_name, share(self._device, self._check))
        return binding


def with_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> ir.Model:
    """Return a training graph for fixed data shapes, with the constants that follow folded."""
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


def _static_shape(value: ir.Value) -> tuple[int, ...]:
    """Return an output's static shape, which a CUDA graph requires."""
    if value.shape is None or not value.shape.is_static():
        raise GraphoptError(
            f"output {value.name!r}: expected a shape that follows from the batch's, as a CUDA graph needs, found "
            f"{value.shape}: leave it out of `report`"
        )
    return tuple(value.shape.numpy())


def _captured(device: Device, graph: int) -> onnxruntime.RunOptions | None:
    """Return the run options that capture or replay the session's CUDA graph number `graph`."""
    if not device.cuda_graph:
        return None
    options = device.ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
