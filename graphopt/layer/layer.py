"""Run the forward and backward passes of a model separately, as a layer of a larger program that has the loss."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.arguments import Checked
from graphopt.compiler import DEFAULT, STANDARD, Default, Steps, standard
from graphopt.errors import GraphoptError, unknown
from graphopt.graph import inference
from graphopt.graph.loading import Source
from graphopt.graph.roles import STATE, Role, with_role
from graphopt.graph.state import take_initial
from graphopt.graph.values import name_of, next_of, seed_of, value_of
from graphopt.layer.engines import Agent, Backward, Graphs, refuses_agent, value_names
from graphopt.runtime.device import Device
from graphopt.runtime.device_options import DeviceOptions
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec, check_shared, shared_dimensions
from graphopt.runtime.tensors import OrtValues, Tensor, buffer, to_ort

if TYPE_CHECKING:
    import onnxruntime


class Values(Mapping[str, np.ndarray]):
    """Hold arrays by name. Each is fetched from the device on access; on the CPU, without a copy."""

    def __init__(self, values: OrtValues, copied: Collection[str] = ()) -> None:
        self._values, self._copied = values, copied

    def __getitem__(self, name: str) -> np.ndarray:
        array: np.ndarray = self._values[name].numpy()
        return array.copy() if name in self._copied else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def on_device(self) -> dict[str, Any]:
        """Return ONNX Runtime's own values on the device, for `from_dlpack` of PyTorch, NumPy and JAX."""
        return {name: value._get_c_value() for name, value in self._values.items()}


class Forward(Values):
    """Hold a model's outputs by name; after a forward pass in training, run its backward pass."""

    def __init__(
        self,
        values: OrtValues,
        copied: Collection[str] = (),
        backward: Callable[[dict[str, Tensor]], Values] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        super().__init__(values, copied)
        self._backward, self._lock = backward, lock or threading.RLock()

    def backward(self, *gradients: Tensor, **named: Tensor) -> Values:
        """Return the gradients with respect to inputs and parameters by name, and release the saved values.

        Args:
            gradients: the objective's gradients with respect to the outputs: one mapping by name, or tensors in
                order. Omitted gradients and None count as zero.
            named: these gradients by name.

        Raises:
            GraphoptError: a gradient is unknown or has the wrong type or shape, and you can call `backward` again; or
                nothing was saved, because the forward pass was not in training or already had its backward pass.
        """
        with self._lock:
            if self._backward is None:
                raise GraphoptError(
                    "backward: expected a forward pass in training without a backward pass so far, found nothing "
                    "saved: run forward again"
                )
            values = self._backward(by_name(gradients, named, list(self), "gradient of output"))
            self._backward = None
        return values


class ForwardBackward(Checked):
    """Compute a model's outputs, and the gradients with respect to its inputs and parameters, in two calls.

    Parameters stay on the device. A forward pass in training saves the values that its backward pass reads. Any
    number of forward passes may be open at the same time, and their backward passes may run in any order. New
    parameters affect later forward passes only. NumPy arrays that the backward pass reads are copied. Other tensors
    are read in place and must not change before the backward pass.

    Threads may share a layer; its calls do not overlap. `ForwardBackward.backward` belongs to the latest forward pass
    of any thread. To select a specific forward pass, call `backward` on its result.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        device: `cpu`, `cuda` or `cuda:N`, or a `Device`, which carries its own options.
        threads: the number of threads per operator; by default, the runtime's choice.
        engine: `graphs` runs `forward_model` and `backward_model` on any ONNX Runtime; `agent` runs one graph in two
            parts on onnxruntime-training's TrainingAgent; `auto` chooses the agent if it is available.
        normalize, adapter, parameters, sort, training, gradient, simplify, fuse: the passes of these steps, or None to
            omit a step; see `compile`. `gradient` emits the gradients of weighted outputs;
            `passes.VectorJacobianProduct()` by default.

    Raises:
        GraphoptError: a pass rejects the model, the device is not available, or the engine is unknown or not
            available.

    >>> import numpy
    >>> from graphopt import models
    >>> layer = graphopt.ForwardBackward(models.linear((2,), 1))
    >>> forward = layer.forward(numpy.zeros((3, 2), numpy.float32))
    >>> gradients = forward.backward(numpy.ones((3, 1), numpy.float32))
    >>> gradients["layers.0.bias"].tolist()
    [3.0]
    """

    def __init__(
        self,
        model: Source,
        *,
        device: str | Device = "cpu",
        threads: int | None = None,
        engine: Literal["auto", "graphs", "agent"] = "auto",
        normalize: Steps | Default = DEFAULT,
        adapter: Steps = None,
        parameters: Steps | Default = DEFAULT,
        sort: Steps | Default = DEFAULT,
        training: Steps | Default = DEFAULT,
        gradient: Steps | Default = DEFAULT,
        simplify: Steps | Default = DEFAULT,
        fuse: Steps = None,
    ) -> None:
        arguments = dict(locals())
        import passes
        from passes.parts.forward_backward import forward_and_backward, yielding

        if engine not in ("auto", "graphs", "agent"):
            raise GraphoptError(f"engine: expected 'auto', 'graphs' or 'agent', found {engine!r}")
        options = DeviceOptions(threads=threads, flush_denormals=not isinstance(device, str))
        self._device = Device.of(device, options)
        steps = {name: arguments[name] for name in STANDARD if name in arguments}
        if gradient is DEFAULT:
            steps["gradient"] = passes.VectorJacobianProduct()
        self._model = standard(**steps)(model)
        self.forward_model, self.backward_model = forward_and_backward(self._model)
        self._parameters = sorted(value_names(with_role(self._model, Role.PARAMETER)))
        self._inputs = {name_of(v): InputSpec(v) for v in with_role(self._model, Role.DATA)}
        self._outputs = {name_of(v): v for v in with_role(self._model, Role.PREDICTION)}
        self._seeds = value_names(with_role(self._model, Role.SEED))
        self._shared = shared_dimensions(with_role(self._model, Role.DATA))
        self._read = set(value_names(self.backward_model.graph.inputs))
        self._accepted = {name_of(x): InputSpec(x, "state") for x in with_role(self._model, *STATE)}
        # Values are replaced, never overwritten, so that open forward passes keep theirs.
        self._state = {name: buffer(self._device, array) for name, array in take_initial(self._model).items()}
        self.engine = engine
        if engine == "auto":
            self.engine = "graphs" if refuses_agent(self._device, self._model) else "agent"
        if self.engine == "agent":
            results = value_names(with_role(self._model, Role.PREDICTION, Role.NEXT))
            self._engine: Agent | Graphs = Agent(self._device, yielding(self._model), results, self._seeds)
        else:
            forward = self.forward_model.clone()
            take_initial(forward)
            self._engine = Graphs(self._device, forward, self.backward_model)
        self._inference: Session | None = None
        self._last: Forward | None = None
        self._lock = threading.RLock()

    def forward(self, *inputs: Tensor, training: bool = True, **named: Tensor) -> Forward:
        """Return the model's outputs. In training, save values for `backward` and update the state.

        Args:
            inputs: one mapping by name, or tensors in the order of the model's inputs.
            training: prepare for `backward`; otherwise, run the model in its inference form and save nothing.
            named: inputs by name.

        Raises:
            GraphoptError: an input is missing, is unknown, or has the wrong type or shape. Nothing has run.
        """
        tensors = by_name(inputs, named, list(self._inputs), "input")
        for name in self._inputs:
            if tensors.get(name) is None:
                raise GraphoptError(f"input {name!r}: missing; found {', '.join(tensors) or 'nothing'}")
        feeds = {
            name: _fitting(self._device, accepted, tensors[name], copied=training and name in self._read)
            for name, accepted in self._inputs.items()
        }
        check_shared(self._shared, {name: value.shape() for name, value in feeds.items()})
        with self._lock:
            feeds |= self._state
            if not training:
                if self._inference is None:
                    part = inference.extract(self._model, with_role(self._model, Role.PREDICTION))
                    self._inference = Session(self._device, part)
                return Forward(self._inference.compute(feeds))
            results, backward = self._engine.forward(feeds)
            self._state |= {name: results[next_of(name)] for name in self._state if next_of(name) in results}
            outputs = {name: results[name] for name in self._outputs}
            back = functools.partial(self._backward, outputs, backward)
            self._last = Forward(outputs, self._read, back, self._lock)
            return self._last

    def backward(self, *gradients: Tensor, **named: Tensor) -> Values:
        """Return the gradients of the latest forward pass in training; see `Forward.backward`."""
        if self._last is None:
            raise GraphoptError("backward: expected a forward pass in training, found none: call forward first")
        return self._last.backward(*gradients, **named)

    def _backward(self, outputs: OrtValues, backward: Backward, gradients: Mapping[str, Tensor]) -> Values:
        seeds = {}
        for name, output in outputs.items():
            gradient = gradients.get(name)
            value = self._outputs[name]
            if seed_of(name) in self._seeds:
                like = ir.Value(name=name, type=value.type, shape=ir.Shape(output.shape()))
                accepted = InputSpec(like, "gradient of output")
                if gradient is None:
                    gradient = np.zeros(output.shape(), accepted.dtype)
                seeds[seed_of(name)] = _fitting(self._device, accepted, gradient, copied=False)
            elif gradient is not None:
                raise GraphoptError(
                    f"gradient of output {name!r}: expected none for type {value.dtype}, found one: leave it out"
                )
        values = backward(seeds)
        return Values({value_of(name): value for name, value in values.items()})

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the parameters by name, in alphabetical order."""
        with self._lock:
            return {name: np.array(self._state[name].numpy()) for name in self._parameters}

    @parameters.setter
    def parameters(self, arrays: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        self.set_parameters(arrays)

    def set_parameters(self, arrays: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        """Replace some parameters by name, or all in alphabetical order. If one is invalid, nothing is replaced.

        NumPy arrays are copied. Other tensors become the parameters in place.

        Raises:
            GraphoptError: a name is unknown, the number of tensors is wrong, or one has the wrong type or shape.
        """
        if not isinstance(arrays, Mapping):
            if len(arrays) != len(self._parameters):
                raise GraphoptError(
                    f"parameters: expected {len(self._parameters)} in alphabetical order "
                    f"({', '.join(self._parameters)}), found {len(arrays)}"
                )
            arrays = dict(zip(self._parameters, arrays, strict=True))
        self._replace(arrays, self._parameters)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all state by name: parameters, running statistics and the counter of training passes."""
        with self._lock:
            return {name: np.array(value.numpy()) for name, value in self._state.items()}

    def update_state(self, arrays: Mapping[str, Tensor]) -> None:
        """Replace part of the state by name, as `set_parameters` does."""
        self._replace(arrays, self._state)

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """Return the model's inputs by name."""
        return {name_of(value): value for value in with_role(self._model, Role.DATA)}

    @property
    def outputs(self) -> dict[str, ir.Value]:
        """Return the model's outputs by name."""
        return dict(self._outputs)

    def trained(self) -> onnx.ModelProto:
        """Return the inference model with the current parameters, under the original names."""
        return inference.trained(self._model, self.state)

    def _replace(self, arrays: Mapping[str, Tensor], names: Collection[str]) -> None:
        for name in arrays:
            if name not in names:
                raise GraphoptError(unknown("parameter", name, names))
        new = {name: _fitting(self._device, self._accepted[name], x, copied=True) for name, x in arrays.items()}
        with self._lock:
            self._state |= new


def _fitting(device: Device, accepted: InputSpec, tensor: Tensor, *, copied: bool) -> onnxruntime.OrtValue:
    """Return a tensor on a device; copy an array if it must outlive the call.

    Raises:
        GraphoptError: the tensor has the wrong type or shape.
    """
    if accepted.shape == () and isinstance(tensor, (int, float, np.number, np.ndarray)):
        tensor = np.asarray(tensor, accepted.dtype)
    if isinstance(tensor, np.ndarray):
        accepted.check_type(tensor.dtype, tensor.shape)
        return buffer(device, tensor) if copied else to_ort(device, tensor, accepted.dtype)
    return accepted.converted(device, tensor)


def by_name(args: Sequence[Tensor], named: Mapping[str, Tensor], names: Sequence[str], kind: str) -> dict[str, Tensor]:
    """Return tensors by name; the caller may give them by name or in order."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        tensors = dict(args[0])
    elif len(args) <= len(names):
        tensors = dict(zip(names, args, strict=False))
    else:
        raise GraphoptError(f"{kind}: expected at most {len(names)} ({', '.join(names)}), found {len(args)}")
    tensors |= named
    for name in tensors:
        if name not in names:
            raise GraphoptError(unknown(kind, name, names))
    return tensors
