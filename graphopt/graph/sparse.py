"""Make sparse weights dense: graphopt trains and writes dense ones."""

from __future__ import annotations

import math

import numpy as np
import onnx

from graphopt.errors import GraphoptError
from graphopt.graph.checking import messages
from graphopt.graph.limits import Limits


def dense(proto: onnx.ModelProto, limits: Limits) -> onnx.ModelProto:
    """Return a model whose sparse initializers and constants are dense; the model itself if it has none."""
    sparse = [message for message in messages(proto) if isinstance(message, onnx.SparseTensorProto)]
    if not sparse:
        return proto
    total = sum(8 * math.prod(map(int, tensor.dims)) for tensor in sparse)
    if total > limits.constant_bytes:
        raise GraphoptError(
            f"sparse tensors: expected at most {limits.constant_bytes:,} bytes once they are dense, found up to "
            f"{total:,}: limits.constant_bytes={total} allows it"
        )
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for message in list(messages(copy)):
        if isinstance(message, onnx.GraphProto):
            message.initializer.extend(map(_dense, message.sparse_initializer))
            del message.sparse_initializer[:]
        elif isinstance(message, onnx.AttributeProto) and message.type == onnx.AttributeProto.SPARSE_TENSOR:
            message.t.CopyFrom(_dense(message.sparse_tensor))
            message.ClearField("sparse_tensor")
            message.name, message.type = "value", onnx.AttributeProto.TENSOR
    return copy


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """Return a dense tensor with the values at their indices, which are flat or one row for each value."""
    name, dims = sparse.values.name, list(sparse.dims)
    values, indices = map(onnx.numpy_helper.to_array, (sparse.values, sparse.indices))
    flat = indices if indices.ndim < 2 else indices @ np.cumprod([1, *dims[:0:-1]])[::-1].astype(np.int64)
    count = math.prod(dims)
    if flat.shape != values.shape or (flat < 0).any() or (flat >= count).any() or values.dtype.kind == "O":
        raise GraphoptError(
            f"sparse tensor {name!r}: expected numbers and an index into {dims} for each, found {values.size} of "
            f"type {values.dtype} and indices of shape {list(indices.shape)}"
        )
    array = np.zeros(count, values.dtype)
    array[flat] = values
    return onnx.numpy_helper.from_array(array.reshape(dims), name)
