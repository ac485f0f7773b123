"""Handle models beyond protobuf's limit of 2 GB: store their weights separately, in a file or in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from graphopt.graph.values import name_of

LIMIT = 2**31 - 2**24  # bytes of weights; protobuf writes less than 2 GB, including the nodes
SMALL = 1024  # bytes of a tensor that stays in the model, because shapes may depend on it


def weigh(proto: onnx.ModelProto) -> int:
    """Return the total size in bytes of the initializers in a model's main graph."""
    return sum(_sizes(proto).values())


def checkable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that onnx's checker accepts: if the model is large, a copy with large initializers as inputs."""
    sizes = _sizes(proto)
    if sum(sizes.values()) <= LIMIT:
        return proto
    weights = {x.name: x for x in proto.graph.initializer if sizes[x.name] > SMALL}
    copy, graph = onnx.ModelProto(), onnx.GraphProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            _set(copy, field.name, value)
    for field, value in proto.graph.ListFields():
        if field.name != "initializer":
            _set(graph, field.name, value)
    graph.initializer.extend(x for x in proto.graph.initializer if x.name not in weights)
    inputs = {x.name for x in graph.input}
    infos = (onnx.helper.make_tensor_value_info(x.name, x.data_type, x.dims) for x in weights.values())
    graph.input.extend(info for info in infos if info.name not in inputs)
    copy.graph.CopyFrom(graph)
    return copy


def _sizes(proto: onnx.ModelProto) -> dict[str, int]:
    return {x.name: len(x.raw_data) for x in proto.graph.initializer}


def _set(message: onnx.ModelProto | onnx.GraphProto, name: str, value: object) -> None:
    field = getattr(message, name)
    if hasattr(field, "extend"):
        field.extend(value)
    else:
        setattr(message, name, value)


def bytes_of(tensor: ir.TensorProtocol | None) -> int:
    """Return the size of a tensor of numbers in bytes; 0 for text, whose size has no bound that matters here."""
    return 0 if tensor is None or tensor.dtype is ir.DataType.STRING else tensor.nbytes


def is_large(model: ir.Model) -> bool:
    """Return whether a model's weights are too large for one protobuf message."""
    tensors = (x.const_value for x in model.graph.initializers.values())
    return sum(map(bytes_of, tensors)) > LIMIT


@contextlib.contextmanager
def weights_apart(model: ir.Model) -> Iterator[dict[str, ir.TensorProtocol]]:
    """Yield the large weights of a model by name; inside the block, the model refers to them as external data."""
    values = {name_of(x): x for x in model.graph.initializers.values() if bytes_of(x.const_value) > SMALL}
    weights = {name: x.const_value for name, x in values.items() if x.const_value is not None}
    for name, tensor in weights.items():
        values[name].const_value = ir.ExternalTensor(
            "weights", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
        )
    try:
        yield weights
    finally:
        for name, tensor in weights.items():
            values[name].const_value = tensor
