"""Run parts of a training graph in inference form, for evaluation and prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphopt.graph import inference
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature, description
from graphopt.runtime.state_buffers import State
from graphopt.runtime.tensors import Tensor, bind, bind_output, number_or_array


class ForwardRunner:
    """Compute outputs of a training graph without changing the state.

    Args:
        signature: the signature of all inputs of a step, to check tensors.
        as_numpy: return NumPy arrays; otherwise values on the device.
    """

    def __init__(
        self, device: Device, model: ir.Model, state: State, signature: Signature, *, as_numpy: bool
    ) -> None:
        self._device, self._model, self._state = device, model, state
        self._signature, self._as_numpy = signature, as_numpy
        self._parts: dict[tuple[str, ...], _Part] = {}

    def check(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Check tensors as a step does, except that inputs which the outputs `names` do not need may be missing.

        Raises:
            GraphoptError: a tensor is missing, is unknown, or has the wrong type, shape or labels.
        """
        part = self._part(names)
        found = description(tensors)
        if part.checked != found:
            self._signature.check(tensors, part.fed)
            part.checked = found
        self._signature.check_labels(tensors)

    def compute(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Reported:
        """Return outputs by name.

        Args:
            tensors: tensors that `check` has accepted.
        """
        part = self._part(names)
        binding, kept = part.session.ort.io_binding(), []
        state = self._state.read()
        for name in part.state:
            binding.bind_ortvalue_input(name, state[name])
        for name in part.fed:
            kept.append(
                bind(self._device, binding, name, tensors[name], self._signature.accepted[name].dtype)
            )
        on_host = [self._as_numpy or value.shape == () for value in part.model.graph.outputs]
        for name, here in zip(names, on_host, strict=True):
            bind_output(self._device, binding, name, on_host=here)
        part.session.execute(binding)
        values = zip(names, on_host, binding.get_outputs(), strict=True)
        return {name: number_or_array(value.numpy()) if here else value for name, here, value in values}

    def _part(self, names: Sequence[str]) -> _Part:
        """Return the part of the graph that computes outputs; compile it on first use."""
        key = tuple(names)
        if key not in self._parts:
            self._parts[key] = _Part(self._device, self._model, key, self._state.read())
        return self._parts[key]


class _Part:
    """Hold a part of a graph with its session, and the names of the state and tensors that it reads."""

    def __init__(
        self, device: Device, model: ir.Model, names: Sequence[str], state: Mapping[str, Any]
    ) -> None:
        outputs = {str(y.name): y for y in model.graph.outputs}
        self.model = inference.extract(model, [outputs[name] for name in names])
        self.session = Session(device, self.model)
        inputs = [str(x.name) for x in self.model.graph.inputs]
        self.state = [name for name in inputs if name in state]
        self.fed = [name for name in inputs if name not in state]
        self.checked: list[Any] | None = None  # the description of the tensors that were checked last
