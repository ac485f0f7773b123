"""Know where the weights of a model are: in its message, in a file next to it, or in memory.

A protobuf message has less than 2 GB. Whatever turns a model into bytes or reads it, for files, sessions, caches or
digests, does so by these functions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, kind_of, line
from graphopt.files import replacing
from graphopt.graph.checking import check_external
from graphopt.graph.limits import Limits
from graphopt.graph.not_a_model import check_path, not_a_model
from graphopt.graph.values import tensor_bytes

LIMIT = 2**31 - 2**24  # bytes of weights; protobuf writes less than 2 GB, including the nodes
_SMALL = 1024  # bytes of a tensor that stays in the model, because shapes may depend on it

Weights = dict[str, ir.TensorProtocol]

# Exceptions of the onnx package for unreadable files, which depend on the format.
_UNREADABLE = (
    DecodeError,
    json_format.Error,
    text_format.Error,
    onnx.parser.ParseError,
    onnx.checker.ValidationError,
    ValueError,
)


def is_large(model: ir.Model | onnx.ModelProto) -> bool:
    """Return whether a model's weights are too large for one protobuf message."""
    if isinstance(model, onnx.ModelProto):
        return sum(len(x.raw_data) for x in model.graph.initializer) > LIMIT
    return sum(tensor_bytes(x.const_value) for x in model.graph.initializers.values()) > LIMIT


def message(model: ir.Model) -> tuple[bytes, Weights]:
    """Return a model as bytes, and its large weights by name if these are too large for the message."""
    return skeleton(model) if is_large(model) else (whole(model), {})


def skeleton(model: ir.Model) -> tuple[bytes, Weights]:
    """Return a model as bytes without its large weights, to which it refers as external data, and these by name."""
    with _external(model) as weights:
        return whole(model), weights


def whole(model: ir.Model) -> bytes:
    """Return a model with all its weights as bytes, the same for equal models."""
    proto = ir.to_proto(model)
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        _clear_names(nodes)
    return proto.SerializeToString(deterministic=True)


def _clear_names(nodes: Iterable[onnx.NodeProto]) -> None:
    """Clear the names of tensors in attributes, which mean nothing, and which some readers set."""
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        if attribute.HasField("t"):
            attribute.t.ClearField("name")
        for graph in (attribute.g, *attribute.graphs):
            _clear_names(graph.node)


def model_digest(model: ir.Model) -> str:
    """Return the SHA-256 sum of a model with its weights."""
    content, weights = message(model)
    sums = hashlib.sha256(content)
    for tensor in weights.values():
        sums.update(tensor.tobytes())
    return sums.hexdigest()


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """Return a copy of a model in which large weights are inputs."""
    with _external(model) as weights:
        proto = ir.to_proto(model)
    declare_inputs(proto.graph, (x for x in proto.graph.initializer if x.name in weights))
    small = [x for x in proto.graph.initializer if x.name not in weights]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(small)
    return proto


def declare_inputs(graph: onnx.GraphProto, weights: Iterable[onnx.TensorProto]) -> None:
    """Make inputs of weights."""
    inputs = {x.name for x in graph.input}
    infos = (onnx.helper.make_tensor_value_info(x.name, x.data_type, x.dims) for x in weights)
    graph.input.extend(info for info in infos if info.name not in inputs)


@checked()
def save(model: ir.Model | onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model to one file atomically. Beyond 2 GB, write its weights to `PATH.data`.

    Args:
        model: an onnx_ir.Model or an onnx.ModelProto.
        path: the file to write.

    >>> from graphopt import models
    >>> graphopt.save(models.linear((2,), 1), "model.onnx")
    >>> graphopt.load("model.onnx").graph.outputs[0].name
    'y'
    """
    if isinstance(model, str | os.PathLike):
        raise GraphoptError(f"save: expected a model first, found {kind_of(model)}: write save(model, path)")
    if not isinstance(model, ir.Model | onnx.ModelProto):
        raise not_a_model(model, "save")
    check_path(path, "save", "save(model, 'model.onnx')")
    path = Path(path)
    if not path.name:
        raise GraphoptError(f"save: expected the path of a file, found {os.fspath(path)!r}")
    with replacing(path) as temporary:
        if not is_large(model):
            onnx.save(ir.to_proto(model) if isinstance(model, ir.Model) else model, temporary)
            return
        large = model if isinstance(model, ir.Model) else ir.from_proto(model)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            written, data = Path(folder, path.name), f"{path.name}.data"
            ir.save(large, written, external_data=data)
            os.replace(written, temporary)
            os.replace(written.with_name(data), path.with_name(data))


def read_proto(path: Path, limits: Limits) -> onnx.ModelProto:
    """Read a model from a file, with its external data."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            found = "a folder" if kind == stat.S_IFDIR else "a device or a pipe"
            raise GraphoptError(f"{path}: expected an ONNX file, found {found}")
        proto = onnx.load(path, load_external_data=False)
        check_external(proto, path.parent, limits)
        onnx.load_external_data_for_model(proto, str(path.parent))
    except GraphoptError:
        raise
    except FileNotFoundError as error:
        raise GraphoptError(f"{path}: no such file") from error
    except OSError as error:
        raise GraphoptError(f"{path}: {error.strerror or line(error)}") from error
    except _UNREADABLE as error:
        raise GraphoptError(f"{path}: expected an ONNX model, found another file ({line(error)})") from error
    return proto


def parsed(content: bytes, name: str) -> onnx.ModelProto:
    """Return a model from the bytes of its file, whose external data cannot be found; errors call it `name`."""
    try:
        return onnx.load_model_from_string(content)
    except _UNREADABLE as error:
        raise GraphoptError(
            f"{name}: expected the bytes of an ONNX model, found others ({line(error)})"
        ) from error


def read_external(model: ir.Model) -> None:
    """Read the external data of a model into memory."""
    try:
        ir.external_data.load_to_model(model)
    except (OSError, ValueError) as error:
        raise GraphoptError(f"the model: cannot read its external data: {line(error)}") from error


@contextlib.contextmanager
def _external(model: ir.Model) -> Iterator[Weights]:
    """Yield the large weights of a model by name; inside the block, the model refers to them as external data."""
    values = {k: x for k, x in model.graph.initializers.items() if tensor_bytes(x.const_value) > _SMALL}
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
