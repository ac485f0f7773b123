"""Bind everything that is the same in every step to a session once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy import ndarray

from graphopt.errors import GraphoptError
from graphopt.graph.roles import FED, with_role
from graphopt.graph.values import is_static, name_of, next_of
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import (
    OrtValues,
    Tensor,
    buffer,
    is_finite,
    number_or_array,
    overwrite,
    share,
    to_ort,
    zeros_of,
)
from graphopt.targets.native.lowering import Lowered
from graphopt.targets.packing import PACKED

if TYPE_CHECKING:
    import onnxruntime

Reported = dict[str, Any]
_COPIED, _SMALL = 16384, 65536  # bytes up to which arrays are copied in, and out


@dataclass(frozen=True, kw_only=True, eq=False)
class RunnerOptions:
    """Declare how a graph runs.

    Args:
        report: the outputs to return.
        as_numpy: return NumPy arrays; otherwise values on the device. Scalars are Python numbers in both cases.
        fixed: values for inputs and outputs of the graph that stay where they are.
        static_shapes: create a session for each set of shapes, so that the runtime knows them in advance.
        native: whether to run compiled kernels; by default, the device's option decides.
        in_place: let kernels write the new state over the old one; then take them without measuring.
        is_large: whether `auto` compiles kernels; by default, if the graph has enough parameters.
        verified: whether to compare lowered graphs with the plain one.
    """

    report: Sequence[str] = ()
    as_numpy: bool = True
    fixed: OrtValues = field(default_factory=dict)
    static_shapes: bool = False
    native: bool | None = None
    in_place: bool = False
    is_large: bool | None = None
    verified: bool = True


class BoundSession:
    """Compute a step from one set of state buffers to the other, with a binding for each direction.

    How an input is fed:

    ====================  ==================================================  ==========================
    input                 what a call does                                    where it lies
    ====================  ==================================================  ==========================
    state, fed numbers    nothing: bound once                                 `buffers`
    state, for the CPU    binds it again: binding copies it from the GPU      `buffers`
    `fixed`               nothing: bound once                                 the caller's memory
    small array, CPU      copies it, which is quicker than binding it         `_arrays`, bound once
    any, captured graph   copies it, since the graph has the address          `_graph_inputs`, bound once
    any other             binds it where it is                                the caller's memory
    ====================  ==================================================  ==========================

    How an output is fetched:

    ====================  ==================================================  ==========================
    output                what a call does                                    where it lies
    ====================  ==================================================  ==========================
    new state             nothing: bound once                                 `buffers`, the other set
    `fixed`               nothing: bound once                                 the caller's memory
    number, CPU           reads it                                            `_readers`, bound once
    numbers, GPU          reads them all at once, with the check              `_own_outputs`, bound once
    any, captured graph   reads it, or returns a copy                         `_own_outputs`, bound once
    small array, CPU      copies it, as long as inputs keep their shapes      `_readers`, bound by the first call
    any other             has the runtime allocate it                         `_places` in the results
    ====================  ==================================================  ==========================

    Args:
        name: what messages call this form of a step.
        lowered: the library of the kernels that the graph calls, and what they write.
        packed: the names of the numbers that the graph returns in one vector, `PACKED`.
        optimized: let the runtime optimize the graph.

    Attributes:
        state_is_finite: whether the latest call found its new state to be finite; not all sessions look.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: StateBuffers,
        options: RunnerOptions,
        name: str,
        lowered: Lowered | None = None,
        packed: Sequence[str] = (),
        *,
        optimized: bool = True,
    ) -> None:
        library, check, shared = (lowered.library, lowered.check, lowered.shared) if lowered else (None, None, [])
        self.model, self.name, self.library, self.shared, self._packed = model, name, library, shared, packed
        self._device, self._report, self._as_numpy = device, list(options.report), options.as_numpy
        self._fetched = [x for x in self._report if x not in packed] + [PACKED] * bool(packed)
        self.session = Session(device, model, library=library, captures=device.graph_capture, optimized=optimized)
        fed = with_role(model, *FED)
        self._types = {name_of(x): InputSpec(x).dtype for x in fed}
        # Of arrays that were fed last on the CPU: the copy of a small one, shape and element type; the same in a list
        # if all inputs were such arrays.
        self._arrays: dict[str, tuple[ndarray | None, tuple[int, ...], np.dtype[np.generic]]] = {}
        self._alike: list[tuple[str, ndarray | None, tuple[int, ...], np.dtype[np.generic]]] | None = None
        self._note_arrays()
        self._alive: dict[str, object] = {}  # what inputs are bound to
        self._graph_inputs: dict[str, onnxruntime.OrtValue] = {}
        if device.graph_capture:
            self._graph_inputs = {name_of(x): buffer(device, zeros_of(x)) for x in fed}
        self._readers: dict[str, Callable[[], object]] = {}
        self._own_outputs: dict[str, onnxruntime.OrtValue] = {}
        self.state_is_finite = False
        self._check: ndarray | None = np.zeros((), np.float32) if check else None
        if self._check is not None:
            self._own_outputs[str(check)] = share(device, self._check)
        outputs = {name_of(y): y for y in model.graph.outputs}
        for name in self._fetched:  # the shapes of numbers are known, and in a captured graph those of all
            if device.graph_capture or (name == PACKED and is_static(outputs[name])):
                self._own_outputs[name] = buffer(device, zeros_of(outputs[name]))
            elif outputs[name].shape == () and device.machine.in_host_memory:
                own = zeros_of(outputs[name])
                self._readers[name], self._own_outputs[name] = own.item, share(device, own)
        self._place = ("cpu", 0) if options.as_numpy else device.machine.place
        self._places = {name: i for i, name in enumerate(self._fetched) if name not in self._own_outputs}
        named = {str(dim) for x in fed for dim in x.shape or ()}
        may_reuse = device.machine.in_host_memory and options.as_numpy and not shared
        self._follow = [name for name in self._places if may_reuse and _follows(outputs[name], named)]
        self._reuses = self._reads_all = False
        buffers.share(shared)
        self._bindings, self._copied_by_binding = [], []
        on_host = [] if device.machine.in_host_memory else self.session.inputs_on_host()
        for source in range(2):
            after = {next_of(name): x for name, x in buffers.sets[1 - source].items()}
            inputs = {**buffers.sets[source], **buffers.fed, **self._graph_inputs, **options.fixed}
            self._bindings.append(self._binding(inputs, {**self._own_outputs, **after, **options.fixed}))
            self._copied_by_binding.append({name: inputs[name] for name in on_host if name in inputs})
        self._binders = [each._iobinding.bind_input for each in self._bindings]
        self._rebinds = bool(self._places or any(self._copied_by_binding))
        self._options: list[onnxruntime.RunOptions | None] = [None, None]
        if device.graph_capture:
            for number in (1, 2):
                run = self._options[number - 1] = device.ort.RunOptions()
                run.add_run_config_entry("gpu_graph_id", str(number))
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the run of each binding, after which what `_readers` read is known."""
        bound = zip(self._bindings, self._options, strict=True)
        self._runs = [self.session.prepared(each, run, [*self._readers.items()]) for each, run in bound]

    def again(
        self,
        source: int,
        feeds: Mapping[str, Tensor],
        check: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> Reported | None:
        """Do what `call` does for arrays like those of the latest call; return None if one is not like that.

        Args:
            check: raises an error if the arrays' numbers are wrong.
        """
        alike = self._alike
        if alike is None or len(feeds) != len(alike):
            return None
        for name, array, shape, dtype in alike:
            tensor = feeds.get(name)
            if not isinstance(tensor, ndarray) or tensor.shape != shape or tensor.dtype is not dtype:
                return None
            if array is not None:
                array[...] = tensor
            else:  # the runtime copies an array that is not contiguous
                self._binders[source](name, tensor)
                self._alive[name] = tensor
        if check is not None:
            check(feeds)
        if self._rebinds:
            self._bind(source, {})
        try:
            reported = self._runs[source]()
        except GraphoptError:
            if not self._reuses:
                raise
            self._release_outputs()  # the graph declares a shape that does not follow from the inputs'
            self._follow = []
            return None
        return reported if self._reads_all else self._completed(source, reported)

    def call(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Read the state from set `source`, write the other set, and return the reported outputs of checked tensors."""
        reported = self.again(source, feeds)
        if reported is None:
            self._bind(source, feeds)
            reported = self._completed(source, self._runs[source]())
        return reported

    def _completed(self, source: int, reported: Reported) -> Reported:
        """Return the outputs of a run, of which some have been read; look at its check, and prepare the next run."""
        if len(reported) < len(self._fetched):
            reported = self._fetch(self._bindings[source], reported)
        if self._check is not None:
            self.state_is_finite = is_finite(self._check)
        if self._follow and not self._reuses and self._alike is not None:
            self._reuse_arrays(reported)
        is_open = self._check is not None or (self._follow and not self._reuses)
        self._reads_all = not is_open and len(self._readers) == len(self._fetched)
        return reported

    def _fetch(self, binding: onnxruntime.IOBinding, read: Reported) -> Reported:
        """Return the outputs of a run, of which some have been read."""
        reported: Reported = {}
        values = binding.get_outputs() if self._places else []
        for name in self._fetched:
            if name in read:
                reported[name] = read[name]
                continue
            value = self._own_outputs[name] if name in self._own_outputs else values[self._places[name]]
            if name == PACKED and self._packed:
                reported |= self._unpacked(value.numpy())
            elif self._as_numpy or not value.shape():
                reported[name] = number_or_array(value.numpy())
            else:
                reported[name] = self._kept(value)
        return {name: reported[name] for name in self._report}

    def _reuse_arrays(self, reported: Reported) -> None:
        """Bind small outputs to arrays for the next calls, whose inputs have the same shapes."""
        readers = dict(self._readers)
        for name in self._follow:
            array = reported[name]
            is_array = isinstance(array, np.ndarray)  # a number if the declared rank is wrong for this batch
            if is_array and array.dtype.kind in "fiub" and 0 < array.nbytes <= _SMALL:
                reused = np.empty_like(array)
                readers[name] = reused.copy
                for each in self._bindings:
                    each.bind_ortvalue_output(name, share(self._device, reused))
        self._readers = {name: readers[name] for name in self._fetched if name in readers}
        self._reuses, self._rebinds = True, not self._places.keys() <= readers.keys()
        self._prepare()

    def _release_outputs(self) -> None:
        """Return the allocation of outputs to the runtime."""
        for each in self._bindings:
            for name in self._places:
                each.bind_output(name, *self._place)
        self._readers = {name: read for name, read in self._readers.items() if name not in self._places}
        self._reuses, self._reads_all, self._rebinds = False, False, True
        self._prepare()

    def _bind(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Bind what differs from call to call."""
        try:
            if feeds:
                self._alike = None
                self._bind_inputs(self._bindings[source], feeds)
            for name, value in self._copied_by_binding[source].items():
                self._bindings[source].bind_ortvalue_input(name, value)
        except RuntimeError as error:  # binding may copy
            raise self.session.stopped(error) from error
        for name in self._places:
            if name not in self._readers:
                self._bindings[source].bind_output(name, *self._place)

    def _bind_inputs(self, binding: onnxruntime.IOBinding, feeds: Mapping[str, Tensor]) -> None:
        """Bind inputs to tensors, or copy them to memory that is bound."""
        self._device.machine.await_writers(binding, feeds.values())
        if self._reuses:
            self._release_outputs()
        for name, tensor in feeds.items():
            small = self._arrays[name][0] if name in self._arrays else None
            if small is not None and isinstance(tensor, ndarray) and small.shape == tensor.shape:
                small[...] = tensor
            elif name in self._graph_inputs:
                array = tensor
                if not isinstance(tensor, ndarray):
                    array = to_ort(self._device, tensor, self._types[name]).numpy()
                overwrite(self._device, self._graph_inputs[name], np.asarray(array, self._types[name]))
            else:
                self._alive[name] = self._feed(binding, name, tensor)
        self._note_arrays()

    def _note_arrays(self) -> None:
        """Note what arrays have to be like for `again`."""
        is_whole = len(self._arrays) == len(self._types)
        self._alike = [(name, *facts) for name, facts in self._arrays.items()] if is_whole else None

    def _unpacked(self, vectors: ndarray) -> Reported:
        """Return the numbers of a step, or of each of several, by name; keep the check."""
        *numbers, self._check = vectors.T
        return {name: number_or_array(np.asarray(x)) for name, x in zip(self._packed, numbers, strict=False)}

    def _feed(self, binding: onnxruntime.IOBinding, name: str, tensor: Tensor) -> object:
        """Bind an input to a tensor, or to a reusable copy of a small tensor; return the object to keep alive."""
        self._arrays.pop(name, None)
        if not isinstance(tensor, ndarray):
            value = to_ort(self._device, tensor, self._types[name])
            binding.bind_ortvalue_input(name, value)
            return value
        on_host = self._device.machine.in_host_memory
        if not on_host or tensor.nbytes > _COPIED:
            array = tensor if tensor.flags.c_contiguous else np.ascontiguousarray(tensor)
            binding.bind_cpu_input(name, array)
            if on_host:
                self._arrays[name] = None, tensor.shape, tensor.dtype
            return array
        small = np.array(tensor, self._types[name], order="C")
        self._arrays[name] = small, small.shape, small.dtype
        value = share(self._device, small)
        for each in self._bindings:
            each.bind_ortvalue_input(name, value)
        return value

    def _kept(self, value: onnxruntime.OrtValue) -> onnxruntime.OrtValue:
        """Return an output that the next run does not overwrite, as a run of ONNX Runtime 1.19 would."""
        if self._device.graph_capture:
            return buffer(self._device, value.numpy())
        vector = self._device.ort.capi._pybind_state.OrtValueVector()
        try:
            vector.push_back(value._ortvalue)
        except RuntimeError:  # 1.32 refuses vectors of WebGPU's values, which it keeps by itself
            return value
        return self._device.ort.OrtValue(vector[0])

    def _binding(self, inputs: OrtValues, outputs: OrtValues) -> onnxruntime.IOBinding:
        """Return a binding of the inputs and outputs that are the same in every call, reported ones first."""
        binding = self.session.io_binding()
        for name in self.session.inputs:
            if name in inputs:
                binding.bind_ortvalue_input(name, inputs[name])
        for name in dict.fromkeys([*self._fetched, *self.session.outputs]):
            if name in outputs:
                binding.bind_ortvalue_output(name, outputs[name])
            elif name in self._places:
                binding.bind_output(name, *self._place)
        return binding


def _follows(output: ir.Value, named: Collection[str]) -> bool:
    """Return whether an array has a shape that follows from the inputs', which have dimensions of these names."""
    shape = output.shape
    return bool(shape) and all(isinstance(dim, int) or str(dim) in named for dim in shape or ())
