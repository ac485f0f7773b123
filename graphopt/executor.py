"""Runs training graphs on ONNX Runtime."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from graphopt import inference
from graphopt.checkpoint import load_state, save_state
from graphopt.device import Device
from graphopt.errors import GraphoptError
from graphopt.feeds import Input, check_shared, shared_dimensions
from graphopt.loading import Source, load
from graphopt.roles import STATE, Role, role_of, with_role
from graphopt.state import STEP, take_initial

if TYPE_CHECKING:
    import onnxruntime

Reported = dict[str, Any]


def run(model: Source, inputs: Mapping[str, np.ndarray], threads: int = 1) -> dict[str, np.ndarray]:
    """Run any graph once, on the CPU, and return its outputs by name.

    Raises:
        GraphoptError: no ONNX Runtime is installed, or it has no kernel for an operator.
    """
    session = Device("cpu", threads, deterministic=False).session(load(model))
    taken = {x.name: inputs[x.name] for x in session.get_inputs()}
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, taken), strict=True)) if names else {}


class NonFiniteLoss(GraphoptError):
    """A step's loss is infinite or not a number; the state is that before the step."""


class Executor:
    """Runs a training graph step by step; its state lives on the device.

    Args:
        step: a training graph: a path, an onnx.ModelProto or an onnx_ir.Model.
        device: `cpu`, `cuda` or `cuda:N`.
        threads: threads an operator may use; the runtime's choice by default.
        deterministic: ask the runtime for kernels that give the same numbers each run.
        on_nonfinite: what a loss that is not finite does: `raise` an error, `warn` and go on, or `skip` the step;
            with `raise` and `skip` the state stays as it was.
        report: the outputs to return from each step; all but the state by default.

    Raises:
        GraphoptError: no ONNX Runtime is installed, the device is not available, or the graph trains nothing.
    """

    def __init__(
        self,
        step: Source,
        *,
        device: str = "cpu",
        threads: int | None = None,
        deterministic: bool = False,
        on_nonfinite: Literal["raise", "warn", "skip"] = "raise",
        report: Sequence[str] | None = None,
    ) -> None:
        if on_nonfinite not in ("raise", "warn", "skip"):
            raise GraphoptError(f"on_nonfinite: expected 'raise', 'warn' or 'skip', found {on_nonfinite!r}")
        self._on_nonfinite = on_nonfinite
        self._device = Device(device, threads, deterministic)
        self._model = load(step)
        self._current = 0  # which of the two sets of state buffers the next step reads
        self.steps = 0
        self._inputs = {str(v.name): Input(v) for v in self._model.graph.inputs}
        self._start(take_initial(self._model), report)

    def step(self, data: Mapping[str, np.ndarray] | None = None, /, **named: np.ndarray) -> Reported:
        """Run one step on arrays named like the graph's inputs and return what it reports.

        Scalars come back as Python numbers, `loss` first. Contiguous arrays are read where they are. A
        hyperparameter that is fed stays as fed.

        Raises:
            GraphoptError: an array is missing, unknown, or of another type or shape; nothing has run.
            NonFiniteLoss: the loss is infinite or not a number, and `on_nonfinite` is `raise`.
        """
        feeds = {**(data or {}), **named}
        self._check(feeds)
        binding = self._bindings[self._current]
        for name, array in feeds.items():
            if name in self.hyperparameters:
                self._feed_hyperparameter(name, array)
            else:
                self._device.bind(binding, name, array)
        for name in self._arrays:
            binding.bind_output(name, "cpu")
        self._device.run(self._session, binding)
        values = binding.get_outputs()
        reported = {name: _python(values[i].numpy()) for name, i in self._reported.items()}
        if self._accept(reported):
            self._current ^= 1
            self.steps += 1
        return reported

    def evaluate(self, data: Mapping[str, np.ndarray] | None = None, /, **named: np.ndarray) -> Reported:
        """Return the losses and the model's outputs on some data; the state stays as it is."""
        return self._forward((Role.LOSS, Role.METRIC, Role.PREDICTION), {**(data or {}), **named})

    def predict(self, data: Mapping[str, np.ndarray] | None = None, /, **named: np.ndarray) -> Reported:
        """Return the model's outputs; no target is needed."""
        return self._forward((Role.PREDICTION,), {**(data or {}), **named})

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Copies of all state: parameters, optimizer slots and counters, by name."""
        return {name: np.array(value.numpy()) for name, value in self._state[self._current].items()}

    @state.setter
    def state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.update_state(arrays)

    def update_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace some of the state by name; nothing is written if one of the arrays does not fit.

        Raises:
            GraphoptError: a name is unknown, or an array is of another type or shape.
        """
        buffers = self._state[self._current]
        for name, array in arrays.items():
            if name not in buffers:
                raise GraphoptError(f"state {name!r}: unknown; the graph has {', '.join(buffers)}")
            self._inputs[name].check(np.asarray(array))
        for name, array in arrays.items():
            buffers[name].update_inplace(np.ascontiguousarray(array).reshape(np.shape(array)))
            if name == STEP:
                self.steps = int(array)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all state to a checkpoint, from which `load` goes on bit for bit."""
        save_state(self.state, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace all state by that of a checkpoint.

        Raises:
            GraphoptError: the file is no checkpoint, is damaged, or is one of another training graph.
        """
        arrays = load_state(path)
        if set(arrays) != set(self._state[0]):
            unlike = sorted(set(arrays) ^ set(self._state[0]))
            raise GraphoptError(
                f"{path}: expected the state of this training graph, found another's: "
                f"{', '.join(unlike[:5])} are not in both"
            )
        self.update_state(arrays)

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """The inputs to feed each step, by name: data, targets and sample weights."""
        roles = (Role.DATA, Role.TARGET, Role.SAMPLE_WEIGHT)
        return {str(value.name): value for value in with_role(self._model, *roles) if value.is_graph_input()}

    @property
    def outputs(self) -> list[str]:
        """The names of everything a step can report, `loss` first."""
        return [str(v.name) for v in self._model.graph.outputs if role_of(v) not in (Role.NEXT, Role.SOURCE)]

    @property
    def model(self) -> ir.Model:
        """The training graph, without its initial state."""
        return self._model

    def trained(self) -> onnx.ModelProto:
        """Return the inference model with the trained weights, under the names of the model that was compiled."""
        return inference.trained(self._model, self.state)

    def _start(self, initial: dict[str, np.ndarray], report: Sequence[str] | None) -> None:
        kept = {str(v.name) for v in with_role(self._model, *STATE)}
        if not with_role(self._model, Role.NEXT):
            raise GraphoptError(
                "expected a training graph, found one without state to update: add an optimizer"
            )
        unknown = set(report or ()) - set(self.outputs)
        if unknown:
            raise GraphoptError(
                f"report: unknown outputs {sorted(unknown)}; the graph has {', '.join(self.outputs)}"
            )
        self._session = self._device.session(self._model)
        first = {name: self._device.buffer(initial[name]) for name in initial if name in kept}
        updated = {str(v.name).removesuffix(".next") for v in with_role(self._model, Role.NEXT)}
        second = {
            name: self._device.buffer(initial[name]) if name in updated else first[name] for name in first
        }
        self._state = [first, second]
        self._hyperparameters = {
            name: self._device.buffer(array) for name, array in initial.items() if name not in kept
        }
        self.hyperparameters: dict[str, Any] = {
            name: array.item() if array.ndim == 0 else array
            for name, array in initial.items()
            if name not in kept
        }
        names = [name for name in self.outputs if report is None or name in report or name == "loss"]
        self._reported = {name: i for i, name in enumerate(names)}
        ranks = {
            str(v.name): len(v.shape) if v.shape is not None else None for v in self._model.graph.outputs
        }
        self._arrays = [name for name in names if ranks[name] != 0]
        self._needed = list(self.inputs)
        self._shared = shared_dimensions(self.inputs.values())
        self._bindings = [self._bind_state(source, 1 - source, names) for source in range(2)]
        self._forwards: dict[tuple[Role, ...], tuple[ir.Model, onnxruntime.InferenceSession]] = {}

    def _bind_state(self, source: int, destination: int, names: Sequence[str]) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        for name in names:
            binding.bind_output(name, "cpu")
        for name, value in {**self._state[source], **self._hyperparameters}.items():
            binding.bind_ortvalue_input(name, value)
        updated = {str(v.name) for v in with_role(self._model, Role.NEXT)}
        for name, value in self._state[destination].items():
            if f"{name}.next" in updated:
                binding.bind_ortvalue_output(f"{name}.next", value)
        return binding

    def _check(self, feeds: Mapping[str, np.ndarray]) -> None:
        for name, array in feeds.items():
            if name not in self._inputs or name in self._state[0]:
                raise GraphoptError(f"input {name!r}: unknown; the graph takes {', '.join(self.inputs)}")
            self._inputs[name].check(np.asarray(array) if name in self.hyperparameters else array)
        for name in self._needed:
            if name not in feeds:
                raise GraphoptError(f"input {name!r}: missing; found {', '.join(feeds) or 'nothing'}")
        check_shared(self._shared, {name: feeds[name].shape for name in self._needed})

    def _feed_hyperparameter(self, name: str, array: Any) -> None:
        if self.hyperparameters[name] is not array:
            buffer = np.asarray(array, self._inputs[name].dtype)
            self._hyperparameters[name].update_inplace(buffer)
            self.hyperparameters[name] = buffer.item() if buffer.ndim == 0 else buffer

    def _accept(self, reported: Reported) -> bool:
        loss = reported.get("loss", 0.0)
        if math.isfinite(loss):
            return True
        message = f"step {self.steps}: expected a finite loss, found {loss}"
        if self._on_nonfinite == "raise":
            raise NonFiniteLoss(
                f"{message}; lower the learning rate, clip gradients, or look for NaN in the data"
            )
        warnings.warn(message + (", step skipped" if self._on_nonfinite == "skip" else ""), stacklevel=3)
        return self._on_nonfinite == "warn"

    def _forward(self, roles: tuple[Role, ...], feeds: Mapping[str, np.ndarray]) -> Reported:
        if roles not in self._forwards:
            part = inference.extract(self._model, with_role(self._model, *roles))
            self._forwards[roles] = part, self._device.session(part)
        part, session = self._forwards[roles]
        binding = session.io_binding()
        for value in part.graph.inputs:
            name = str(value.name)
            if name in self._state[0]:
                binding.bind_ortvalue_input(name, self._state[self._current][name])
            elif name in self._hyperparameters:
                binding.bind_ortvalue_input(name, self._hyperparameters[name])
            elif name in feeds:
                self._inputs[name].check(feeds[name])
                self._device.bind(binding, name, feeds[name])
            else:
                raise GraphoptError(f"input {name!r}: missing; found {', '.join(feeds) or 'nothing'}")
        for value in part.graph.outputs:
            binding.bind_output(str(value.name), "cpu")
        self._device.run(session, binding)
        values = binding.get_outputs()
        return {str(v.name): _python(o.numpy()) for v, o in zip(part.graph.outputs, values, strict=True)}


def _python(array: np.ndarray) -> Any:
    return array.item() if array.ndim == 0 else array
