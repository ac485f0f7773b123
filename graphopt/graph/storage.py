"""Find the weights of a model: in its message, in a file next to it, or in memory.

A protobuf message has less than 2 GB. Whatever turns a model into bytes or reads it, for files, sessions, caches or
digests, does so by these functions.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import stat
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError, Message

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, kind_of, line
from graphopt.files import foreign_content, replacing
from graphopt.graph import metadata
from graphopt.graph.checking import EXTERNAL, check_external, messages_of
from graphopt.graph.limits import Limits
from graphopt.graph.mapped import MappedFile, RoomyTensor, like_tensor
from graphopt.graph.not_a_model import check_path, not_a_model
from graphopt.graph.operators import MICROSOFT, RUNTIMES_OWN
from graphopt.graph.traversal import nodes_of
from graphopt.graph.values import name_of, tensor_bytes

LIMIT = 2**31 - 2**24  # bytes of weights; protobuf writes less than 2 GB, including the nodes
MAPPED_FROM = 2**26  # bytes of weights in files beside a model; fewer are read into memory
_SNAPSHOTS = "snapshots"  # a folder of models in the cache of Hugging Face
_PAGE = 4096  # bytes: where a weight in a file begins, for memory maps
_SMALL = 1024  # bytes of a tensor that stays in the model, because shapes may depend on it
# Endings of files that are neither models, in any form of ONNX, nor checkpoints without an ending of their own
_OTHER_FORMATS = (
    *(".arrow", ".csv", ".feather", ".jsonl", ".npy", ".npz", ".parquet", ".tsv", ".txt", ".xlsx", ".yaml", ".yml"),
    *(".gguf", ".h5", ".keras", ".onnx", ".onnx_adapter", ".ort", ".pkl", ".pt", ".pth", ".safetensors", ".tflite"),
    *(".flac", ".gz", ".html", ".jpeg", ".jpg", ".md", ".mp3", ".pdf", ".png", ".py", ".svg", ".wav", ".zip"),
)

Weights = dict[str, ir.TensorProtocol]
# For a weight, its file, and its offset and length there
WeightPlaces = dict[str, tuple[MappedFile, int, int]]

# Exceptions of the onnx package for unreadable files, which depend on the format.
_UNREADABLE = (
    DecodeError,
    json_format.Error,
    text_format.Error,
    onnx.parser.ParseError,
    onnx.checker.ValidationError,
    ValueError,
)


def replace_nodes(graph: onnx.GraphProto | onnx.FunctionProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Give a message other nodes, among which its own may be: a message frees the nodes that it loses."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def is_large(model: ir.Model | onnx.ModelProto) -> bool:
    """Return whether a model's weights are too large for one protobuf message."""
    if isinstance(model, onnx.ModelProto):
        return sum(len(x.raw_data) for x in model.graph.initializer) > LIMIT
    return weight_bytes(model) > LIMIT


def weight_bytes(model: ir.Model) -> int:
    return sum(tensor_bytes(x.const_value) for x in model.graph.initializers.values())


def message(model: ir.Model) -> tuple[bytes, Weights]:
    """Return a model as bytes, and its large weights by name if these are too large for the message."""
    return skeleton(model) if is_large(model) else (whole(model), {})


def skeleton(model: ir.Model) -> tuple[bytes, Weights]:
    """Return a model as bytes without its large weights, to which it refers as external data, and these by name."""
    proto, weights = apart(model)
    return _bytes(proto), weights


def identity_of(model: ir.Model) -> tuple[bytes, Weights]:
    """Return a model's skeleton without the notes that only describe it, by which caches know what it computes."""
    proto, weights = apart(model)
    metadata.forget_description_of(proto)
    return _bytes(proto), weights


@dataclass(frozen=True)
class Content:
    """Hold what a model consists of, for comparison. Models with equal contents are equal.

    Args:
        graph: the model as bytes without its large weights.
        weights: these by name.
    """

    graph: bytes
    weights: Mapping[str, ir.TensorProtocol]

    @classmethod
    def of(cls, model: ir.Model) -> Content:
        return cls(*skeleton(model))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Content)
            and self.graph == other.graph
            and self.weights.keys() == other.weights.keys()
            and all(x is (y := other.weights[k]) or x.tobytes() == y.tobytes() for k, x in self.weights.items())
        )

    __hash__ = None  # type: ignore[assignment]


def whole(model: ir.Model) -> bytes:
    """Return a model with all its weights as bytes, the same for equal models."""
    return _bytes(ir.to_proto(model))


def _bytes(proto: onnx.ModelProto) -> bytes:
    _move_runtimes_own(messages_of(onnx.NodeProto, proto))
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        _clear_names(nodes)
    return proto.SerializeToString(deterministic=True)


def _move_runtimes_own(nodes: Iterable[ir.Node | onnx.NodeProto]) -> None:
    """Move operators that the runtime knows only in ONNX's domain there; see `load`."""
    for node in nodes:
        if node.domain == MICROSOFT and node.op_type in RUNTIMES_OWN:
            node.domain = ""


def _clear_names(nodes: Iterable[onnx.NodeProto]) -> None:
    """Clear the names of tensors in attributes, which mean nothing, and which some readers set."""
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        if attribute.HasField("t"):
            attribute.t.ClearField("name")
        for graph in (attribute.g, *attribute.graphs):
            _clear_names(graph.node)


def model_digest(model: ir.Model) -> str:
    """Return the SHA-256 sum of a model with its weights, whatever the columns are called that it has trained on."""
    proto, weights = apart(model) if is_large(model) else (ir.to_proto(model), Weights())
    metadata.forget_column_names_of(proto)
    sums = hashlib.sha256(_bytes(proto))
    for tensor in weights.values():
        sums.update(tensor.tobytes())
    return sums.hexdigest()


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """Return a copy of a model in which large weights are inputs."""
    proto, weights = apart(model)
    _make_inputs(proto.graph, weights)
    return proto


def message_without_weights(model: ir.Model, is_taken: Callable[[ir.TensorProtocol], bool]) -> tuple[bytes, Weights]:
    """Return a model as bytes in which large weights are inputs, and these by name.

    Args:
        is_taken: whether to take a weight out.
    """
    outputs = {x.const_value for x in model.graph.outputs}  # an input cannot be an output
    proto, weights = apart(model, lambda x: x not in outputs and is_taken(x))
    _make_inputs(proto.graph, weights)
    return _bytes(proto), weights


def _make_inputs(graph: onnx.GraphProto, weights: Container[str]) -> None:
    declare_inputs(graph, (x for x in graph.initializer if x.name in weights))
    small = [x for x in graph.initializer if x.name not in weights]
    del graph.initializer[:]
    graph.initializer.extend(small)


def outline(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a message in which large weights are inputs; their bytes are never copied."""
    copy, own = onnx.ModelProto(), proto.graph
    _copy_fields(proto, copy, "graph")
    _copy_fields(own, copy.graph, "initializer")
    large = [x for x in own.initializer if x.data_location == EXTERNAL or _is_raw_and_large(x)]
    names = {x.name for x in large}
    copy.graph.initializer.extend(x for x in own.initializer if x.name not in names)
    declare_inputs(copy.graph, large)
    return copy


def _is_raw_and_large(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor has many bytes, without a copy of them."""
    if tensor.data_type == ir.DataType.STRING or not tensor.HasField("raw_data"):
        return False
    return math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth > 8 * _SMALL


def _copy_fields(proto: Message, copy: Any, left_out: str) -> None:
    for field, value in proto.ListFields():
        if field.name == left_out:
            continue
        if field.is_repeated:
            getattr(copy, field.name).extend(value)
        elif field.message_type is not None:
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)


def declare_inputs(graph: onnx.GraphProto, weights: Iterable[onnx.TensorProto]) -> None:
    inputs = {x.name for x in graph.input}
    infos = (onnx.helper.make_tensor_value_info(x.name, x.data_type, x.dims) for x in weights)
    graph.input.extend(info for info in infos if info.name not in inputs)


@checked()
def save(model: ir.Model | onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model to one file atomically. Beyond 2 GB, write its weights to `PATH.data`.

    Args:
        model: an onnx_ir.Model or an onnx.ModelProto.
        path: the file to write.

    Raises:
        GraphoptError: the first argument is no model, or the path has the ending of another format, such as `.npz`.
            Nothing is written.

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
    path = path_of_file(path, "save")
    if isinstance(model, onnx.ModelProto):
        if is_large(model):
            write_large(ir.from_proto(model), path)
        else:
            write_message(model, path)
        return
    if is_large(model):
        model = model.clone()
        _move_runtimes_own(nodes_of(model))
        write_large(model, path)
    else:
        proto = ir.to_proto(model)
        _move_runtimes_own(messages_of(onnx.NodeProto, proto))
        write_message(proto, path)


def path_of_file(path: str | os.PathLike[str], call: str, example: str = "model.onnx") -> Path:
    """Return a path to write a file like `example` to, or raise an error: a file of another format may lie there."""
    given, path = path, Path(path)
    if not path.name:
        raise GraphoptError(f"{call}: expected the path of a file, found {os.fspath(given)!r}")
    ending, own = path.suffix.lower(), Path(example).suffix
    if ending in _OTHER_FORMATS and ending != own:
        raise GraphoptError(
            f"{call}: expected a path such as {example}, found {path}, an ending of another format: use {own}"
        )
    return path


def write_message(proto: onnx.ModelProto, path: Path) -> None:
    """Write a model to one file atomically."""
    with replacing(path) as temporary:
        onnx.save(proto, temporary)


def write_large(model: ir.Model, path: Path) -> None:
    """Write a model to a file, and its weights, one at a time, to another beside it."""
    with (
        replacing(path) as temporary,
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder,
    ):
        written, data = Path(folder, path.name), f"{path.name}.data"
        ir.save(model, written, external_data=data, alignment=_PAGE, align_threshold=0)
        os.replace(written, temporary)
        os.replace(written.with_name(data), path.with_name(data))


def read_proto(path: Path, limits: Limits) -> tuple[onnx.ModelProto, WeightPlaces]:
    """Read a model from a file, and its external data; return where those of its large weights lie, by name."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            found = "a folder" if kind == stat.S_IFDIR else "a device or a pipe"
            raise GraphoptError(f"{path}: expected an ONNX file, found {found}")
        proto = onnx.load(path, load_external_data=False)
        check_external(proto, path.parent, limits)
        return proto, _read_external(proto, path.parent)
    except GraphoptError:
        raise
    except FileNotFoundError as error:
        raise GraphoptError(f"{path}: no such file") from error
    except OSError as error:
        raise GraphoptError(f"{path}: {error.strerror or line(error)}") from error
    except _UNREADABLE as error:
        known = None if "\0" in str(path) else foreign_content(path)
        found = f"another file ({line(error)})" if known is None else ": ".join(known)
        raise GraphoptError(f"{path}: expected an ONNX model, found {found}") from error


def _read_external(proto: onnx.ModelProto, folder: Path) -> WeightPlaces:
    """Map the files of a model's weights if these are large, and read the rest of its external data."""
    external = [x for x in proto.graph.initializer if x.data_location == EXTERNAL]
    folders = {x.name: _folder_of(x, folder) for x in external}
    infos: dict[str, Any] = {x.name: onnx.external_data_helper.ExternalDataInfo(x) for x in external}
    places: WeightPlaces = {}
    if sum(info.length for info in infos.values()) >= MAPPED_FROM:
        files: dict[Path, MappedFile] = {}
        for name, info in infos.items():
            if info.length > _SMALL:
                file = folders[name] / info.location
                if file not in files:
                    _check_location(info.location, folders[name], name)
                    files[file] = MappedFile(file)
                places[name] = files[file], info.offset, info.length
    holders = (*proto.graph.node, *proto.functions)
    inner = [x for holder in holders for x in messages_of(onnx.TensorProto, holder)]
    left = [(x, folders[x.name]) for x in external if x.name not in places]
    left += [(x, _folder_of(x, folder)) for x in inner if x.data_location == EXTERNAL]
    for tensor, own in left:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(own))
        tensor.data_location = onnx.TensorProto.DEFAULT  # onnx 1.21 leaves it external
        del tensor.external_data[:]
    return places


def _folder_of(tensor: onnx.TensorProto, folder: Path) -> Path:
    """Return the folder in which a tensor's external data lies, and have the tensor name the file there.

    A link may lead to a file in the folder of the model, or in the cache of Hugging Face that the folder belongs to,
    `models--NAME/snapshots/REVISION`, whose files are links to `models--NAME/blobs`. ONNX Runtime follows it, too.
    """
    entry = next(entry for entry in tensor.external_data if entry.key == "location")
    if not (folder / entry.value).is_symlink():
        return folder
    file, here = Path(os.path.realpath(folder / entry.value)), Path(os.path.abspath(folder))
    caches = [place.parent for place in (here, *here.parents) if place.name == _SNAPSHOTS]
    if not any(file.is_relative_to(os.path.realpath(place)) for place in (here, *caches)):
        raise GraphoptError(
            f"tensor {tensor.name!r}: external data {entry.value!r}: expected a file in the folder of the model, found "
            "a symbolic link to another: copy the model with cp -rL"
        )
    entry.value = file.name
    return file.parent


def _check_location(location: str, folder: Path, name: str) -> None:
    """Raise an error unless onnx reads external data at a location: not from links, nor outside the folder."""
    nothing = onnx.TensorProto(name=name, data_location=EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": "0"}.items():
        nothing.external_data.add(key=key, value=value)
    onnx.external_data_helper.load_external_data_for_tensor(nothing, str(folder))


def take_weights(model: ir.Model, places: WeightPlaces) -> None:
    """Give a model's large weights the numbers of the files in which they lie, and keep no others in messages."""
    for name, value in model.graph.initializers.items():
        declared = value.const_value
        if declared is None:
            continue
        if name in places:
            file, start, _ = places[name]
            value.const_value = file.tensor(declared, start)
        elif isinstance(declared, ir.serde.TensorProtoTensor) and declared.dtype is not ir.DataType.STRING:
            own: ir.TensorProtocol  # a small tensor would keep all of the message alive
            if declared.dtype.bitwidth == 4 and _is_raw_and_large(declared.raw):
                packed = np.frombuffer(declared.raw.raw_data, np.uint8)
                own = RoomyTensor(packed, declared.dtype, declared.shape.numpy())
            else:
                own = ir.Tensor(declared.numpy(), declared.dtype)
            value.const_value = like_tensor(own, declared)


def parsed(content: bytes, name: str) -> onnx.ModelProto:
    """Return a model from the bytes of its file, whose external data cannot be found; errors call it `name`."""
    try:
        return onnx.load_model_from_string(content)
    except _UNREADABLE as error:
        raise GraphoptError(f"{name}: expected the bytes of an ONNX model, found others ({line(error)})") from error


def read_external(model: ir.Model) -> None:
    """Read the external data of a model, or map it if it is large."""
    values = (x for graph in model.graphs() for x in graph.initializers.values())
    external = [x for x in values if isinstance(x.const_value, ir.ExternalTensor)]
    try:
        if sum(tensor_bytes(x.const_value) for x in external) >= MAPPED_FROM:
            _map_external(external)
        ir.external_data.load_to_model(model)
    except (OSError, ValueError) as error:
        raise GraphoptError(f"the model: cannot read its external data: {line(error)}") from error


def _map_external(values: Iterable[ir.Value]) -> None:
    files: dict[str, MappedFile] = {}
    for value in values:
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes <= _SMALL:
            continue
        if tensor.path not in files:  # onnx_ir checks the path of what it reads
            nothing = ir.ExternalTensor(
                tensor.location, 0, 0, tensor.dtype, shape=ir.Shape([0]), name="", base_dir=tensor.base_dir
            )
            nothing.numpy()
            files[tensor.path] = MappedFile(Path(os.path.realpath(tensor.path)))
        value.const_value = files[tensor.path].tensor(tensor, tensor.offset or 0)


def apart(
    model: ir.Model, is_taken: Callable[[ir.TensorProtocol], bool] = lambda tensor: True
) -> tuple[onnx.ModelProto, Weights]:
    """Return a model as a message that refers to its large weights as external data, and these by name.

    The model stays as it is: other threads may read it.

    Args:
        is_taken: whether to take a large weight out.
    """
    graph, weights = model.graph, Weights()
    for name, x in graph.initializers.items():
        if x.const_value is not None and tensor_bytes(x.const_value) > _SMALL and is_taken(x.const_value):
            weights[name] = x.const_value
    view = ir.GraphView(
        graph.inputs,
        graph.outputs,
        nodes=graph,
        initializers=[_reference(x) if name in weights else x for name, x in graph.initializers.items()],
        doc_string=graph.doc_string,
        opset_imports=graph.opset_imports,
        name=graph.name,
    )
    metadata.copy(graph, view)
    seen = copy.copy(model)
    seen.graph = view  # type: ignore[assignment]  # onnx_ir writes such a model, too
    return ir.to_proto(seen), weights


def _reference(weight: ir.Value) -> ir.Value:
    """Return a value like an initializer whose numbers are external data."""
    tensor = weight.const_value
    if tensor is None:
        raise AssertionError(f"{weight.name} has no numbers")
    shape = ir.Shape(tensor.shape.numpy())
    reference = ir.ExternalTensor("weights", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name_of(weight))
    value = ir.Value(name=weight.name, shape=weight.shape, type=weight.type, doc_string=weight.doc_string)
    value.const_value = like_tensor(reference, tensor)
    metadata.copy(weight, value)
    value.meta.update(weight.meta)
    return value
