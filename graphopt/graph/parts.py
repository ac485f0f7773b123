"""Hold a model apart from its large weights, which are copied only into what is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph.checking import EXTERNAL
from graphopt.graph.mapped import MappedTensor, like_tensor
from graphopt.graph.storage import LIMIT, Weights, apart, write_large, write_message

_CHUNK = 2**24  # bytes that are compared at a time


@dataclass
class ModelParts:
    """Hold a model as a message that refers to its large weights by their names.

    Attributes:
        proto: the message.
        weights: the large weights by name. They lie in mapped files, in memory, or are computed when they are read.
    """

    proto: onnx.ModelProto
    weights: Weights

    @classmethod
    def of(cls, model: ir.Model) -> ModelParts:
        return cls(*apart(model, lambda x: not isinstance(x, ir.serde.TensorProtoTensor)))

    def referring(self) -> list[onnx.TensorProto]:
        """Return the initializers whose numbers are not in the message."""
        return [x for x in self.proto.graph.initializer if self.refers(x)]

    def refers(self, tensor: onnx.TensorProto) -> bool:
        """Return whether the numbers of a tensor of the message are not in it."""
        return tensor.data_location == EXTERNAL and tensor.name in self.weights

    def numbers(self, tensor: onnx.TensorProto) -> np.ndarray:
        """Return the numbers of a tensor of the message, without a copy if they are mapped."""
        if self.refers(tensor):
            return self.weights[tensor.name].numpy()
        return onnx.numpy_helper.to_array(tensor)

    def check(self) -> None:
        """Raise an error if a file of the weights has changed since it was mapped."""
        for file in {x.file for x in self.weights.values() if isinstance(x, MappedTensor)}:
            file.check()

    def message(self) -> onnx.ModelProto:
        """Return the message after all weights have been copied into it."""
        self.check()
        for tensor in self.referring():
            tensor.raw_data = self.weights[tensor.name].tobytes()
            tensor.ClearField("data_location")
            del tensor.external_data[:]
        return self.proto

    def save(self, path: Path) -> None:
        """Write the same file as `graphopt.save`, one weight at a time if the message would be too large."""
        weights = sum(self.weights[x.name].nbytes for x in self.referring())
        if weights + sum(len(x.raw_data) for x in self.proto.graph.initializer) <= LIMIT:
            write_message(self.message(), path)
            return
        self.check()
        model = ir.from_proto(self.proto)
        for tensor in self.referring():
            value, weight = model.graph.initializers[tensor.name], self.weights[tensor.name]
            lazy = ir.LazyTensor(partial(_itself, weight), weight.dtype, ir.Shape(tensor.dims))
            value.const_value = _described(lazy, value.const_value, tensor.name)
        write_large(model, path)


def _itself(weight: ir.TensorProtocol) -> ir.TensorProtocol:
    return weight


def _described(tensor: ir.TensorProtocol, declared: ir.TensorProtocol | None, name: str) -> ir.TensorProtocol:
    """Give a tensor a name, and the documentation and the metadata of another, and return it."""
    if declared is not None:
        like_tensor(tensor, declared)
    tensor.name = name
    return tensor


def are_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays of a type have the same bytes, NaNs included; temporary memory is small."""
    if a.dtype.hasobject or b.dtype.hasobject:
        return np.array_equal(a, b)
    one, other = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    parts = range(0, one.size, _CHUNK)
    return one.size == other.size and all(np.array_equal(one[i : i + _CHUNK], other[i : i + _CHUNK]) for i in parts)
