"""Load models from files and from memory, and check them."""

from __future__ import annotations

import contextlib
import graphlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import EncodeError

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, cause, line, root
from graphopt.graph import checking, provenance
from graphopt.graph.limits import Limits, check_size, limits_of, set_limits
from graphopt.graph.mapped import like_tensor
from graphopt.graph.metadata import ADDS_ONE
from graphopt.graph.model_folders import Architecture, configs_in_words, model_in, place_of
from graphopt.graph.not_a_model import not_a_model
from graphopt.graph.noted import check_detached, check_metadata
from graphopt.graph.operators import MICROSOFT, RUNTIMES_OWN, formal_of, schema_of
from graphopt.graph.parts import ModelParts
from graphopt.graph.postprocessing import detach_outputs
from graphopt.graph.shown import shown
from graphopt.graph.storage import (
    WeightPlaces,
    Weights,
    outline,
    parsed,
    read_external,
    read_proto,
    replace_nodes,
    take_weights,
)
from graphopt.graph.traversal import is_sorted, nodes_of, wholes_of

ONNX = ("", "ai.onnx")  # both names of ONNX's domain
# Operators that onnxruntime-training has only in ONNX's domain. The checker gets a copy with another domain.
TRAININGS_OWN = dict.fromkeys(["AveragePoolGrad", "MaxPoolGrad"], math.inf)
# Operators that ONNX declared deprecated in some opsets, in which ONNX Runtime runs them.
DEPRECATED = ("GroupNormalization",)


Source = str | bytes | os.PathLike[str] | onnx.ModelProto | ir.Model


@checked()
def load(source: Source, *, limits: Limits | None = None) -> ir.Model:
    """Return a new model from a path, the bytes of a file, an onnx.ModelProto or an onnx_ir.Model, which is copied.

    External data of 64 MB or more are mapped into memory: they take none until they are read. Do not write to these
    files as long as the model is used: an error reports it. Paths outside the model's folder and links are rejected.
    Outputs that are sequences or maps are replaced by the tensors that they consist of.

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
        provenance.carry(source, model)
        read_external(model)
    else:
        limits = limits or Limits()
        name, proto, places = _read(source, limits)
        try:
            model = _from_proto(proto, name, limits, places)
        except ir.serde.SerdeError as error:
            raise GraphoptError(f"{name}: not a valid ONNX model: {cause(error)}") from error
        if proto is source:
            _name_apart(model)
        else:
            take_weights(model, places)
        if isinstance(source, str | os.PathLike):
            path = Path(source)
            _note_architecture(model, place_of(model_in(path) if path.is_dir() else path))
    _give_domains(model)
    for whole in wholes_of(model):
        if not is_sorted(whole):
            whole.sort()
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:  # whatever the file declares
                value.type = ir.TensorType(value.const_value.dtype)
                value.shape = _shape_of_initial(value, value.const_value.shape.numpy())
    set_limits(model, limits)
    check_size(model)
    checking.check_domains(model)
    check_metadata(model)
    return shown(model)


def _note_architecture(model: ir.Model, place: Path) -> None:
    """Write what the configs beside a model say about it, which no name in its file tells, into the metadata."""
    if Architecture.is_on(model):
        return
    has_names_of_builder = any(".MatMul." in name for name in model.graph.initializers)
    note = Architecture(**configs_in_words(place, by_config=has_names_of_builder))
    if note != Architecture():
        note.write(model)
    for name, x in model.graph.initializers.items():
        if note.adds_one and name.endswith("layernorm.weight"):
            ADDS_ONE.set(x)


def read_original(source: Source) -> ModelParts:
    """Return a copy of a model as it is in a file or in memory; large weights in files are mapped, not copied.

    Raises:
        GraphoptError: the file is missing, or is not a valid ONNX model.
    """
    if isinstance(source, ir.Model):
        model = _cloned(source)
        read_external(model)
        return ModelParts.of(model)
    _, read, places = _read(source, Limits())
    proto = read
    if read is source:
        proto = onnx.ModelProto()
        proto.CopyFrom(read)
    checking.check_proto(proto, {name: length for name, (_, _, length) in places.items()})
    weights: Weights = {}
    for tensor in proto.graph.initializer:
        if tensor.name in places:
            file, start, _ = places[tensor.name]
            weights[tensor.name] = file.tensor(ir.serde.deserialize_tensor(tensor), start)
    return ModelParts(proto, weights)


def _name_apart(model: ir.Model) -> None:
    """Give tensors names of their own, so that one that is renamed keeps its name in the caller's model."""

    def apart(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if not isinstance(tensor, ir.TensorProtoTensor) or tensor.dtype is ir.DataType.STRING:
            return tensor
        return like_tensor(ir.LazyTensor(lambda: tensor, tensor.dtype, tensor.shape), tensor)

    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = apart(value.const_value)
    for node in nodes_of(model):
        for name, x in node.attributes.items():
            if x.type is ir.AttributeType.TENSOR and not x.is_ref():
                node.attributes[name] = ir.AttrTensor(name, apart(x.as_tensor()))


def _shape_of_initial(value: ir.Value, dims: Sequence[int]) -> ir.Shape:
    """Return the shape of an initial value; where an input is empty, as the rank of an adapter is, the declared one."""
    declared = value.shape if value.is_graph_input() and value.shape is not None else ()
    if len(declared) != len(dims):
        return ir.Shape(dims)
    return ir.Shape([x if size == 0 else size for x, size in zip(declared, dims, strict=True)])


def _read(source: Source, limits: Limits) -> tuple[str, onnx.ModelProto, WeightPlaces]:
    """Return a model as it is in a file or in memory, with its name in errors and the places of mapped weights."""
    if isinstance(source, bytes):
        return "the model", parsed(source, "the model"), {}
    if isinstance(source, onnx.ModelProto):
        return "the model", source, {}
    if not isinstance(source, str | os.PathLike):
        raise not_a_model(source)
    if "://" in str(source):
        raise GraphoptError(f"{source}: expected a file, found an address: download it, and name the file")
    path = Path(source)
    path = model_in(path) if path.is_dir() else path
    return str(path), *read_proto(path, limits)


def _from_proto(proto: onnx.ModelProto, name: str, limits: Limits, places: WeightPlaces) -> ir.Model:
    """Convert and check a model; errors call it `name`."""
    if not proto.opset_import or not proto.HasField("graph"):
        raise GraphoptError(f"{name}: expected an ONNX model, found no graph or no opset in it")
    checking.check_proto(proto, {name: length for name, (_, _, length) in places.items()})
    try:  # the checker copies what it reads, and reads less than 2 GB
        small = outline(proto)
        _make_checkable(small)
        onnx.checker.check_model(small)
    except (onnx.checker.ValidationError, EncodeError, ValueError) as error:
        raise GraphoptError(f"{name}: not a valid ONNX model: {line(error)}") from error
    proto = _densified(proto, limits)
    for value in proto.graph.input:
        if _holds_map(value.type):
            raise GraphoptError(f"{name}: input {value.name!r}: expected a tensor, found a map")
    typed = [output for output in proto.graph.output if output.type.WhichOneof("value")]
    made_of_tensors = [output for output in typed if not output.type.HasField("tensor_type")]
    for output in made_of_tensors:
        kind = output.type.WhichOneof("value")
        if kind not in ("sequence_type", "map_type"):
            raise GraphoptError(
                f"{name}: output {output.name!r}: expected a tensor, or a sequence or map made of tensors, found "
                f"{str(kind).removesuffix('_type')}: export without it"
            )
    return _without(proto, {output.name: output.type for output in made_of_tensors})


def _make_checkable(proto: onnx.ModelProto) -> None:
    """Write a message as the checker wants it where ONNX Runtime runs it as it is.

    The order of nodes, both names of ONNX's domain, and missing types and shapes of inputs and outputs are such cases.
    Operators that the runtime has and the checker refuses get the runtime's domain, which the checker ignores.
    """
    nodes = checking.messages_of(onnx.NodeProto, proto)
    for holder in (*nodes, *proto.opset_import, *(x for f in proto.functions for x in f.opset_import)):
        if holder.domain in ONNX:
            holder.domain = ""
    version = next((opset.version for opset in proto.opset_import if not opset.domain), 0)
    own = {op_type for op_type, since in (RUNTIMES_OWN | TRAININGS_OWN).items() if version < since}
    own |= {op_type for op_type in DEPRECATED if (x := schema_of("", op_type, version)) and x.deprecated}
    nodes = [x for x in nodes if x.op_type in own and not x.domain]
    for node in nodes:
        node.domain = MICROSOFT
    if nodes and all(opset.domain != MICROSOFT for opset in proto.opset_import):
        proto.opset_import.add(domain=MICROSOFT, version=1)
    for whole in (*checking.messages_of(onnx.GraphProto, proto), *proto.functions):
        _sort(whole)
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    for value in proto.graph.output:
        if not value.HasField("type"):
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, []))


def _sort(whole: onnx.GraphProto | onnx.FunctionProto) -> None:
    """Put the nodes of a message behind those whose outputs they read, unless they form a cycle."""
    makers = {y: i for i, node in enumerate(whole.node) for y in node.output if y}
    needed = [{makers[x] for x in _names_read(node) if x in makers} - {i} for i, node in enumerate(whole.node)]
    if all(max(its, default=-1) < i for i, its in enumerate(needed)):
        return
    with contextlib.suppress(graphlib.CycleError):
        order = [*graphlib.TopologicalSorter(dict(enumerate(needed))).static_order()]
        replace_nodes(whole, [whole.node[i] for i in order])


def _names_read(node: onnx.NodeProto) -> set[str]:
    if not any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute):
        return set(node.input)
    inner = checking.messages_of(onnx.NodeProto, node)
    results = (y.name for body in checking.messages_of(onnx.GraphProto, node) for y in body.output)
    return {*results, *(x for each in inner for x in each.input)}


def _give_domains(model: ir.Model) -> None:
    """Put operators from ONNX Runtime that ONNX did not have in the model's opset into the runtime's domain."""
    for whole in wholes_of(model):
        if (version := whole.opset_imports.pop(ONNX[1], None)) is not None:
            whole.opset_imports.setdefault("", version)
    version = model.opset_imports.get("", 0)
    for node in nodes_of(model):
        if node.domain == "" and version < RUNTIMES_OWN.get(node.op_type, 0):
            node.domain, node.version = MICROSOFT, None
            model.opset_imports.setdefault(MICROSOFT, 1)


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
    check_detached(model)
    values = [y for y in model.graph.outputs if y.name in outputs]
    detach_outputs(model, values, _is_tensor, types=outputs)
    return model


def _holds_map(kind: onnx.TypeProto) -> bool:
    while kind.HasField("sequence_type"):
        kind = kind.sequence_type.elem_type
    return kind.HasField("map_type")


def _is_tensor(value: ir.Value) -> bool:
    """Return whether a node that accepts only tensors reads a value."""
    for node, index in value.uses():
        versions = node.graph.opset_imports  # type: ignore[union-attr]
        schema = schema_of(node.domain, node.op_type, versions.get(node.domain, 0))
        if schema is None or all(kind.startswith("tensor") for kind in formal_of(schema, index).types):
            return True
    return False


def _cloned(model: ir.Model) -> ir.Model:
    try:
        return model.clone()
    except RuntimeError as error:
        if isinstance(root(error), RecursionError):
            problem = "less deeply nested subgraphs, found more levels than Python can read"
        else:
            problem = "nodes in topological order, found a cycle or another order: try model.graph.sort()"
        raise GraphoptError(f"the model: expected {problem}") from error


def _densified(proto: onnx.ModelProto, limits: Limits) -> onnx.ModelProto:
    """Return a model whose sparse initializers and constants are dense; the model itself if it has none."""
    sparse = checking.messages_of(onnx.SparseTensorProto, proto)
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
    for graph in checking.messages_of(onnx.GraphProto, copy):
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        del graph.sparse_initializer[:]
    for attribute in checking.messages_of(onnx.AttributeProto, copy):
        if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
            attribute.t.CopyFrom(_dense(attribute.sparse_tensor))
            attribute.ClearField("sparse_tensor")
            attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
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
