"""Take what calls of an executor are given: tensors by name, hyperparameters among them, and strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.encoders import Encoders
from graphopt.graph.roles import FED, Role, set_role, with_role
from graphopt.graph.values import name_of
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec, Seen, Signature
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor


class Inputs:
    """Take the tensors and the hyperparameters of calls.

    Attributes:
        signature: what the training graph accepts.
        encoding: what encodes strings, if the file takes any.
        values: the inputs to feed in each step by name: data, targets and sample weights.
    """

    def __init__(self, device: Device, model: ir.Model, buffers: StateBuffers) -> None:
        self._buffers, fed = buffers, with_role(model, *FED)
        self.signature = Signature(device, fed)
        self.encoding = encoding_of(device, model)
        self.values = {name_of(x): x for x in fed} if self.encoding is None else self.encoding.inputs

    def of_call(
        self, data: Mapping[str, Tensor] | None, more: Sequence[object], named: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a call by name, with numbers in place of strings.

        Raises:
            GraphoptError: they have no names.
        """
        if type(data) is not dict or more or named:
            if data is None and not more:
                data = named
            elif more or not isinstance(data, Mapping):
                names = ", ".join(f"{name!r}: ..." for name in self.values)
                raise GraphoptError(
                    f"data: expected arrays by the names of the graph's inputs, {{{names}}}, found "
                    f"{' and '.join(map(kind_of, (data, *more)))}"
                )
            elif named:
                data = {**data, **named}
        return data if self.encoding is None else self.encoding.encoded(data)

    def separated(self, feeds: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        fed = {name: value for name, value in feeds.items() if name in self._buffers.hyperparameters}
        tensors = {name: tensor for name, tensor in feeds.items() if name not in fed}
        return fed, dict(self.signature.completed(tensors))

    def accepted(
        self, seen: Seen, feeds: Mapping[str, Tensor], check: Callable[[Mapping[str, Tensor]], object]
    ) -> Mapping[str, Tensor]:
        """Set hyperparameters, check tensors unless they are like the last ones, and return the tensors."""
        fed: dict[str, Tensor] = {}
        if feeds not in seen:
            fed, feeds = self.separated(feeds)
            if feeds not in seen:
                check(feeds)
                seen.add(feeds)
        self.signature.check_labels(feeds)
        if fed:
            self._buffers.feed(fed)
        return feeds


class Encoding:
    """Run the nodes of a file that encode strings, on the CPU.

    Args:
        model: the training graph.
        note: the nodes, and the names of the inputs of the file.

    Attributes:
        inputs: the inputs to feed by name: those of the file, and then those that the training graph adds.
    """

    def __init__(self, device: Device, model: ir.Model, note: Encoders) -> None:
        part = ir.from_proto(note.model())
        own = {name_of(x): x for x in part.graph.inputs}
        self._texts = [name for name, x in own.items() if x.dtype is ir.DataType.STRING]
        part.graph.inputs[:] = [x for x in part.graph.inputs if x.uses()]
        self._read = {name_of(x): InputSpec(x) for x in part.graph.inputs}
        on_cpu = Device("cpu", threads=device.threads, custom_ops=device.custom_ops)
        self._session = Session(on_cpu, part) if part.graph.outputs else None
        computed = {y.name for y in part.graph.outputs}
        fed = {name_of(x): x for x in with_role(model, *FED) if x.name not in computed}
        named = {name: fed.get(name) or set_role(own[name], Role.DATA) for name in note.inputs if name in own}
        self.inputs: dict[str, ir.Value] = {**named, **fed}

    def encoded(self, feeds: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors that a training graph takes; those that have no strings as they are.

        Raises:
            GraphoptError: an input is missing, an array of strings has another type, or the runtime stops.
        """
        if not any(name in feeds for name in self._texts):
            return feeds
        for name in self._read:
            if name not in feeds:
                raise GraphoptError(f"input {name!r}: missing; found {', '.join(feeds)}")
        arrays = {name: _array(spec, feeds[name]) for name, spec in self._read.items()}
        rest = {name: x for name, x in feeds.items() if name not in self._texts}
        return rest if self._session is None else {**rest, **self._session.compute_arrays(arrays)}


def encoding_of(device: Device, model: ir.Model) -> Encoding | None:
    """Return what encodes the strings that the file of a training graph takes, or None."""
    note = Encoders.read(model)
    return None if note is None else Encoding(device, model, note)


def _array(spec: InputSpec, cells: object) -> np.ndarray:
    """Return what an input is fed, with strings as ONNX Runtime takes them."""
    array = np.asarray(cells)
    if spec.dtype != object:
        array = np.asarray(array, spec.dtype)
    elif array.dtype.kind in "UT":
        array = array.astype(object)
    elif wrong := [repr(x) for x in array.flat if not isinstance(x, str)]:
        raise GraphoptError(f"{spec}: expected strings, found {wrong[0]}: write missing ones as ''")
    spec.check_type(array.dtype, array.shape)
    return array
