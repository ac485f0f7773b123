"""Load models from files and save them."""

from __future__ import annotations

import math
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError, EncodeError

from graphopt.errors import GraphoptError, cause, line, root
from graphopt.files import replacing
from graphopt.graph import large_models as large
from graphopt.graph import metadata_checks
from graphopt.graph.checking import check_domains, check_external, check_proto, nodes_of
from graphopt.graph.large_models import checkable, weigh
from graphopt.graph.limits import Limits, check_size, limits_of, set_limits
from graphopt.graph.postprocessing import set_aside
from graphopt.graph.sparse import dense

# Operators that ONNX Runtime writes in ONNX's domain, and the opset in which ONNX added each of them.
ONNX = ("", "ai.onnx")  # both names of ONNX's domain
RUNTIMES_OWN = {"LayerNormalization": 17, "SimplifiedLayerNormalization": math.inf}
# Operators that onnxruntime-training has only in ONNX's domain. The checker gets a copy with another domain.
TRAININGS_OWN = dict.fromkeys(["AveragePoolGrad", "MaxPoolGrad"], math.inf)

# Exceptions of the onnx package for unreadable files, which depend on the format.
_UNREADABLE = (
    DecodeError,
    json_format.Error,
    text_format.Error,
    onnx.parser.ParseError,
    onnx.checker.ValidationError,
    ValueError,
)

Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model


def load(source: Source, *, limits: Limits | None = None) -> ir.Model:
    """Return a new model from a path, an onnx.ModelProto or an onnx_ir.Model, which is copied.

    The onnx package reads external data into memory, and rejects paths outside the model's folder. Outputs that are
    sequences or maps are replaced by the tensors that they consist of.

    Files may be untrusted: loading runs no code, reads no files except external data, and bounds the size of the
    model before expanding it. graphopt's metadata in the file is checked.

    Args:
        source: the model.
        limits: the maximum size of the model; by default, the limits of the source, or else of `Limits()`.

    Raises:
        GraphoptError: the file is missing, is not a valid ONNX model, exceeds `limits`, or has an input or output of
            an unsupported type.

    >>> from graphopt import models
    >>> model = graphopt.load(models.linear((2,), 1))
    >>> list(model.graph.initializers)
    ['layers.0.weight', 'layers.0.bias']
    """
    if isinstance(source, ir.Model):
        limits = limits or limits_of(source)
        model = _cloned(source)
        _give_domains(model)
        _read_external(model)
    else:
        limits = limits or Limits()
        name = "the model" if isinstance(source, onnx.ModelProto) else str(source)
        proto = source if isinstance(source, onnx.ModelProto) else _read(Path(source), limits)
        try:
            model = _from_proto(proto, name, limits)
        except ir.serde.SerdeError as error:
            raise GraphoptError(f"{name}: not a valid ONNX model: {cause(error)}") from error
    _take_shapes_of_weights(model)
    set_limits(model, limits)
    check_size(model)
    check_domains(model)
    metadata_checks.check(model)
    return model


def _from_proto(proto: onnx.ModelProto, name: str, limits: Limits) -> ir.Model:
    """Convert and check a model; errors call it `name`."""
    if not proto.opset_import or not proto.HasField("graph"):
        raise GraphoptError(f"{name}: expected an ONNX model, found no graph or no opset in it")
    check_proto(proto)
    proto = _with_domains(proto, RUNTIMES_OWN)
    try:
        onnx.checker.check_model(_with_domains(checkable(proto), TRAININGS_OWN))
    except (onnx.checker.ValidationError, EncodeError, ValueError) as error:
        raise GraphoptError(f"{name}: not a valid ONNX model: {line(error)}") from error
    proto = dense(proto, limits)
    for value in proto.graph.input:
        if _holds_map(value.type):
            raise GraphoptError(f"{name}: input {value.name!r}: expected a tensor, found a map")
    made_of_tensors = [output for output in proto.graph.output if not output.type.HasField("tensor_type")]
    for output in made_of_tensors:
        kind = output.type.WhichOneof("value")
        if kind not in ("sequence_type", "map_type"):
            raise GraphoptError(
                f"{name}: output {output.name!r}: expected a tensor, or a sequence or map made of tensors, found "
                f"{str(kind).removesuffix('_type')}: export without it"
            )
    return _without(proto, {output.name: output.type for output in made_of_tensors})


def _with_domains(proto: onnx.ModelProto, added: Mapping[str, float]) -> onnx.ModelProto:
    """Return a model whose operators from ONNX Runtime are in the runtime's domain, not in ONNX's."""
    version = next((opset.version for opset in proto.opset_import if opset.domain in ONNX), 0)
    own = [op_type for op_type, since in added.items() if version < since]
    if not any(node.op_type in own and node.domain in ONNX for node in nodes_of(proto)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in nodes_of(copy):
        if node.op_type in own and node.domain in ONNX:
            node.domain = "com.microsoft"
    if all(opset.domain != "com.microsoft" for opset in copy.opset_import):
        copy.opset_import.add(domain="com.microsoft", version=1)
    return copy


def _give_domains(model: ir.Model) -> None:
    """Put operators from ONNX Runtime into the runtime's domain, as in a file."""
    version = model.opset_imports.get("", 0)
    for node in model.graph.all_nodes():
        if node.domain == "" and version < RUNTIMES_OWN.get(node.op_type, 0):
            node.domain, node.version = "com.microsoft", None
            model.opset_imports.setdefault("com.microsoft", 1)


def _read_external(model: ir.Model) -> None:
    """Read external data into memory, as of a file."""
    try:
        ir.external_data.load_to_model(model)
    except (OSError, ValueError) as error:
        raise GraphoptError(f"the model: cannot read its external data: {line(error)}") from error


def _take_shapes_of_weights(model: ir.Model) -> None:
    """Give initializers the shapes of their tensors, whatever the file declares."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.shape = ir.Shape(value.const_value.shape.numpy())


def _without(proto: onnx.ModelProto, outputs: dict[str, onnx.TypeProto]) -> ir.Model:
    """Return a model with some outputs detached, because onnx_ir may not support their types."""
    if not outputs:
        return ir.from_proto(proto)
    untyped = onnx.ModelProto()
    untyped.CopyFrom(proto)
    for output in untyped.graph.output:
        if output.name in outputs:
            output.ClearField("type")
    typed = [value for value in proto.graph.value_info if not _holds_map(value.type)]
    del untyped.graph.value_info[:]
    untyped.graph.value_info.extend(typed)
    model = ir.from_proto(untyped)
    metadata_checks.check_detached(model)
    set_aside(
        model, [value for value in model.graph.outputs if value.name in outputs], _is_tensor, types=outputs
    )
    return model


def _holds_map(kind: onnx.TypeProto) -> bool:
    while kind.HasField("sequence_type"):
        kind = kind.sequence_type.elem_type
    return kind.HasField("map_type")


def _is_tensor(value: ir.Value) -> bool:
    """Return whether a node that accepts only tensors reads a value."""
    for node, index in value.uses():
        try:
            versions = node.graph.opset_imports  # type: ignore[union-attr]
            schema = onnx.defs.get_schema(node.op_type, versions[node.domain], node.domain)
        except (onnx.defs.SchemaError, KeyError):
            return True
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if all(kind.startswith("tensor") for kind in formal.types):
            return True
    return False


def _cloned(model: ir.Model) -> ir.Model:
    try:
        return model.clone()
    except RuntimeError as error:
        if isinstance(root(error), RecursionError):
            raise GraphoptError(
                "the model: expected less deeply nested subgraphs, found more levels than Python can read"
            ) from error
        raise GraphoptError(
            "the model: expected nodes in topological order, found a cycle or another order: try model.graph.sort()"
        ) from error


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
    if large.is_large(model) if isinstance(model, ir.Model) else weigh(model) > large.LIMIT:
        _save_large(model if isinstance(model, ir.Model) else ir.from_proto(model), Path(path))
        return
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    with replacing(path) as temporary:
        onnx.save(proto, temporary)


def _save_large(model: ir.Model, path: Path) -> None:
    data = f"{path.name}.data"
    with (
        replacing(path) as temporary,
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder,
    ):
        ir.save(model, Path(folder, path.name), external_data=data)
        os.replace(Path(folder, path.name), temporary)
        os.replace(Path(folder, data), path.parent / data)


def _read(path: Path, limits: Limits) -> onnx.ModelProto:
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
