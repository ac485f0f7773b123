"""Create and run sessions of ONNX Runtime, and report its errors in one line."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph import storage
from graphopt.graph.mapped import files_of
from graphopt.graph.metadata import RUNTIME
from graphopt.graph.roles import TRAINING_RUNTIME
from graphopt.runtime.denormals import AS_THEY_ARE, modes
from graphopt.runtime.device import Device
from graphopt.runtime.frozen import FrozenPlacement, is_packed, is_shareable, placement_of, shared
from graphopt.runtime.optimizers import disabled_optimizers
from graphopt.runtime.tensors import OrtValues

if TYPE_CHECKING:
    import onnxruntime


class Session:
    """Run a graph on a device.

    Attributes:
        inputs: the names of the graph's inputs.
        outputs: the names of its outputs.
        frozen: where the weights of the graph lie: `packed`, `mapped` or `low`.

    Args:
        options: modified options of the session, whose weights are then packed; by default
            `Device.new_session_options()`.
        library: a library of the kernels that the graph calls.
        captures: whether the session captures its graph.
        optimized: let the runtime optimize the graph.

    Raises:
        GraphoptError: the runtime rejects the graph, or the provider does not start.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        options: onnxruntime.SessionOptions | None = None,
        library: Path | None = None,
        *,
        captures: bool = False,
        optimized: bool = True,
    ) -> None:
        self.device = device
        self.frozen: FrozenPlacement = "packed" if options is not None else placement_of(device, model)
        self._files = files_of(model)
        try:
            options = options or device.new_session_options(
                captures=captures, low_memory=self.frozen == "low", optimized=optimized
            )
            if library is not None:
                options.register_custom_ops_library(str(library))
            if not captures:
                device.machine.place_nodes(options, model)
            weights: storage.Weights = {}
            if self.frozen == "packed":
                content, weights = self._packed(model, options)
            else:
                is_taken = functools.partial(is_shareable, device)
                content, weights = storage.message_without_weights(model, is_taken)
            # The first session would change denormals in this thread permanently.
            with device.flushing or contextlib.nullcontext():
                self.ort: onnxruntime.InferenceSession = device.open(
                    content, options, disabled_optimizers(device, model), captures=captures
                )
        except Exception as error:
            raise _refusal(device, model, error) from error
        self._options = device.ort.RunOptions()
        if device.execution_provider not in self.ort.get_providers():
            raise device.machine.not_started()
        self._all_inputs = [x.name for x in self.ort.get_inputs()]
        self.inputs = [name for name in self._all_inputs if name not in weights]
        self.outputs = [y.name for y in self.ort.get_outputs()]
        self._passed = [i for i, name in enumerate(self.outputs) if name in self._all_inputs]
        on_host = {*self._all_inputs} if device.machine.in_host_memory else {*self.inputs_on_host()}
        self._shared = {name: shared(device, tensor, on_host=name in on_host) for name, tensor in weights.items()}

    def _packed(self, model: ir.Model, options: onnxruntime.SessionOptions) -> tuple[bytes, storage.Weights]:
        """Return a graph whose weights are constants, except for those of 4 bits, and these.

        Weights that are too large for its message are registered.
        """
        if not storage.is_large(model):
            return storage.message_without_weights(model, functools.partial(is_packed, self.device))
        content, weights = storage.message(model)
        # They stay alive as long as the session reads them.
        self._registered = [self.device.ort.OrtValue.ortvalue_from_numpy(x.numpy()) for x in weights.values()]
        if weights:
            options.add_external_initializers([*weights], self._registered)
        return content, {}

    def io_binding(self) -> onnxruntime.IOBinding:
        """Return a binding of the weights that the session shares with others, and of nothing else."""
        binding = self.ort.io_binding()
        for name, weight in self._shared.items():
            binding.bind_ortvalue_input(name, weight.value)
        return binding

    def prepared(
        self,
        binding: onnxruntime.IOBinding,
        options: onnxruntime.RunOptions | None = None,
        readers: Iterable[tuple[str, Callable[[], object]]] = (),
    ) -> Callable[[], dict[str, object]]:
        """Return a function that runs once on a binding, and returns what `readers` read then, by name.

        Its calls must not overlap. It raises a GraphoptError if the runtime fails, or if a file of weights has changed.
        What it needs is looked up here, since a step takes only some microseconds.
        """
        # The wrapper of `run` in Python takes 0.3 us; without options, it makes new ones for each run, in 0.7 us.
        run, bound, chosen = self.ort._sess.run_with_iobinding, binding._iobinding, options or self._options
        if self.device.machine.lock is not None:
            run = _holding(self.device.machine.lock, run)
        get, put, before, flushing = modes() if self.device.flushing else AS_THEY_ARE
        files = self._files

        def once() -> dict[str, object]:
            if files:
                self._check_files()
            get(before)
            put(flushing)
            try:
                run(bound, chosen)
            except RuntimeError as error:
                raise self.stopped(error) from error
            finally:
                put(before)
            outputs = {}
            for name, read in readers:
                outputs[name] = read()
            return outputs

        return once

    def _check_files(self) -> None:
        """Raise an error if a file of weights has changed that the session reads."""
        for file in self._files:
            file.check()

    def stopped(self, error: Exception) -> GraphoptError:
        """Return the error for a run, or a copy to the device, that the runtime ends with an error."""
        if "requires f16" in str(error):
            return GraphoptError(
                f"device {self.device.name!r}: expected a graphics adapter with 16-bit floats, found one without: "
                f"leave out the precision"
            )
        return GraphoptError(f"onnxruntime stopped: {line(error)}")

    def inputs_on_host(self) -> list[str]:
        """Return the names of all inputs that are read in host memory: by operators on the CPU, or as shapes."""
        if not hasattr(self.ort, "get_input_memory_infos"):  # onnxruntime 1.22 and older
            return self.inputs
        return [
            name
            for name, x in zip(self._all_inputs, self.ort.get_input_memory_infos(), strict=True)
            if "cpu" in x.name.lower()
        ]

    def compute(self, feeds: OrtValues, leave_out: Container[str] = ()) -> dict[str, onnxruntime.OrtValue]:
        """Run once on values and return the outputs by name, which stay on the device; ignore what is not an input.

        Values may stand for weights that the session shares with others. If the sessions of the process share memory,
        the system gets back what is free of it.

        Args:
            leave_out: names of outputs that are not wanted.
        """
        binding = self.io_binding()
        self.device.machine.await_writers(binding)
        try:
            for name in (*self.inputs, *(name for name in self._shared if name in feeds)):
                binding.bind_ortvalue_input(name, feeds[name])
        except RuntimeError as error:  # binding may copy
            raise self.stopped(error) from error
        names = [name for name in self.outputs if name not in leave_out]
        for name in names:
            binding.bind_output(name, *self.device.machine.place)
        self.prepared(binding, self.device.machine.run_options(low_memory=self.frozen == "low"))()
        return dict(zip(names, binding.get_outputs(), strict=True))

    def compute_arrays(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once on arrays and return all outputs by name; ignore what is not an input."""
        if not set(self.inputs) <= set(feeds):
            raise GraphoptError(f"inputs: expected {', '.join(self.inputs)}, found {', '.join(feeds) or 'none'}")
        return dict(zip(self.outputs, self.run({name: feeds[name] for name in self.inputs}), strict=True))

    def run(self, feeds: Mapping[str, object]) -> list[np.ndarray]:
        """Run once on arrays for all inputs, and return all outputs in order.

        Raises:
            GraphoptError: the runtime fails, or a file of weights has changed.
        """
        if self._shared:
            feeds = {**feeds, **{name: weight.value for name, weight in self._shared.items()}}
        if self._files:
            self._check_files()
        if not self.outputs:
            return []
        run = self.ort._sess.run
        try:
            with self.device.flushing or contextlib.nullcontext():
                outputs: list[np.ndarray] = run(self.outputs, feeds, self._options)
        except Exception as error:  # of which onnxruntime's own are direct subclasses
            raise self.stopped(error) from error
        for i in self._passed:  # an output that is an input has the memory of what was fed
            outputs[i] = outputs[i].copy()
        return outputs


def _holding(lock: contextlib.AbstractContextManager[object], run: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls another and holds a lock."""

    def held(*arguments: object) -> None:
        with lock:
            run(*arguments)

    return held


def _refusal(device: Device, model: ir.Model, error: Exception) -> GraphoptError:
    """Return the error for a graph that the runtime rejects."""
    version = device.ort.__version__
    if RUNTIME.read(model) == TRAINING_RUNTIME and not device.trains:
        return GraphoptError(
            f"the graph needs {TRAINING_RUNTIME}, found onnxruntime {version}: pip install "
            f"onnxruntime-training==1.19.2 in an environment of its own, or compile without OrtGradient and "
            f"fused kernels"
        )
    reason = line(error)
    if "NOT_IMPLEMENTED" in reason or "node_provider_type" in reason:
        reason += ", for these element types: take another precision, runtime or provider"
    if "control flow nodes" in reason:
        reason += ": leave out graph_capture, or write loops out with passes.UnrollLoops"
    if "is not a registered function/op" in reason:
        reason += ": name the library of this custom operator with custom_ops"
    return GraphoptError(f"{device.machine.title} refuses the graph: {reason}")
