"""Restore in the trained model what passes drop.

These are outputs that cannot be trained on (labels, maps), documentation, and the form of weights in the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import GraphoptError
from graphopt.graph.metadata import FAKE, PREFIX, Flag, Note, Text, expect, malformed, remove_own
from graphopt.graph.opsets import Versions
from graphopt.graph.roles import Role, set_role
from graphopt.graph.traversal import captured, extracted_between
from graphopt.graph.values import constant_of, is_floating, name_of, tensor_bytes

MOST_UNREAD = 2**20  # bytes
MOST_TEXT = 2**26  # bytes of a file's documentation, decompressed
DEQUANTIZE = "DequantizeLinear"

STORED = Flag("graphopt.stored")  # a node that rounds a weight to its form in the file
# Of such a node: the name of the result in the file, if not the weight's
STORED_AS = Text("graphopt.stored_as")
STORED_TYPE = Text("graphopt.stored_type")  # of a state: the narrower type of its numbers in the file


@dataclass(frozen=True)
class Detached(Note, key="graphopt.aside", expected="outputs and the parts that compute them"):
    """Record the names of a model's original outputs, and the detached parts that compute some of them."""

    outputs: tuple[str, ...]
    parts: tuple[bytes, ...]  # serialized models

    def models(self) -> list[onnx.ModelProto]:
        """Return the parts in the order in which they were detached."""
        return [onnx.ModelProto.FromString(part) for part in self.parts]


@dataclass(frozen=True)
class Caches(Note, key="graphopt.caches", expected="names of inputs and outputs"):
    """Record the inputs of a decoder's file that its training graph lacks, and the outputs that are its caches.

    Args:
        inputs: the past of each cache, and what only caches read.
        outputs: the present of each cache.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Notes(Note, key="graphopt.file", expected="a compressed graph"):
    """Record what a file says about its graph and values, and passes and onnx_ir drop, such as documentation.

    Args:
        packed: a compressed GraphProto; see `graphopt.graph.postprocessing.remember`.
    """

    packed: bytes = b""

    def check(self) -> None:
        self.graph()

    @classmethod
    def pack(cls, graph: onnx.GraphProto) -> Notes:
        return cls(zlib.compress(graph.SerializeToString()))

    def graph(self) -> onnx.GraphProto:
        """Return the graph.

        Raises:
            ValueError: it is malformed, or larger than `MOST_TEXT`.
        """
        inflate = zlib.decompressobj()
        try:
            graph = onnx.GraphProto.FromString(inflate.decompress(self.packed, MOST_TEXT))
        except (DecodeError, zlib.error) as error:
            raise ValueError from error
        expect(inflate.eof, all(not x.external_data for x in graph.initializer))
        return graph


def detach_outputs(
    model: ir.Model,
    outputs: Sequence[ir.Value],
    is_source: Callable[[ir.Value], bool],
    role: Role | None = None,
    types: Mapping[str, onnx.TypeProto] | None = None,
) -> None:
    """Move `outputs`, and the nodes that only they need, into the model's metadata, for `restore`.

    Args:
        is_source: returns whether the detached part starts at a value, which becomes an output of the model.
        role: the role of these new outputs.
        types: the types of `outputs` by name, if onnx_ir does not support them.
    """
    before = Detached.read(model) or Detached(tuple(map(name_of, model.graph.outputs)), ())
    sources = _sources(outputs, is_source)
    graph = extracted_between(model.graph, sources, outputs)
    part = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
    for output in part.graph.output:
        if types is not None:
            output.type.CopyFrom(types[output.name])
    Detached(before.outputs, (*before.parts, part.SerializeToString())).write(model)
    for output in outputs:
        model.graph.outputs.remove(output)
    for source in sources:
        if source.producer() is not None and not source.is_graph_output():
            model.graph.outputs.append(source if role is None else set_role(source, role))
    RemoveUnusedNodesPass()(model)


def restore(proto: onnx.ModelProto, parts: Sequence[onnx.ModelProto], order: Sequence[str]) -> None:
    """Restore detached outputs in an inference model, from the parts that compute them; sort all outputs by name.

    Args:
        parts: the detached parts in the opset of the model, the last one first.
        order: the names of the outputs.
    """
    graph = proto.graph
    outputs = {output.name: output for output in graph.output}
    for part in parts:
        known = {value.name for value in [*graph.input, *graph.initializer]}
        known.update(name for node in graph.node for name in node.output)
        graph.input.extend(value for value in part.graph.input if value.name not in known)
        # A part has its own copy of integers, constants among them, that other nodes of the model read, too.
        graph.node.extend(node for node in part.graph.node if not known.issuperset(filter(None, node.output)))
        graph.initializer.extend(x for x in part.graph.initializer if x.name not in known)
        outputs |= {output.name: output for output in part.graph.output}
        add_opsets(proto, part)
    del graph.output[:]
    graph.output.extend(outputs[name] for name in order)


def add_opsets(proto: onnx.ModelProto, part: onnx.ModelProto) -> None:
    """Give a message the opsets of a part of it whose domains it lacks."""
    domains = {opset.domain for opset in proto.opset_import}
    proto.opset_import.extend(opset for opset in part.opset_import if opset.domain not in domains)


def _sources(outputs: Sequence[ir.Value], is_source: Callable[[ir.Value], bool]) -> list[ir.Value]:
    """Return the values at which the detached part of `outputs` starts; constants belong to the part."""
    sources = dict.fromkeys(output for output in outputs if output.producer() is None)
    front, seen = list(outputs), set(outputs)
    while front:
        node = front.pop().producer()
        for x in [] if node is None else [*node.inputs, *captured(node)]:
            if x is None or x in seen:
                continue
            seen.add(x)
            if x.is_graph_input() or (is_source(x) and ir.convenience.get_const_tensor(x) is None):
                sources[x] = None
            else:
                front.append(x)
    return list(sources)


def remember(model: ir.Model) -> None:
    """Note in a model its versions as loaded, and the documentation and metadata of its graph and values, once.

    The latter is a graph without computation. `value_info` lists the weights, `initializer` those that no node reads.
    """
    if not Versions.is_on(model):
        Versions(model.ir_version, model.opset_imports.get("")).write(model)
    if Notes.is_on(model):
        return
    graph, said = model.graph, onnx.GraphProto()
    _write(said.metadata_props, graph.metadata_props)
    said.input.extend(map(ir.to_proto, graph.inputs))
    said.output.extend(map(ir.to_proto, graph.outputs))
    for x in graph.initializers.values():
        doc = x.doc_string or getattr(x.const_value, "doc_string", None)
        said.value_info.add(name=name_of(x), doc_string=doc or "")
    unread = [x for x in graph.initializers.values() if not x.is_graph_output() and not x.uses()]
    tensors = [x.const_value for x in unread if x.const_value is not None]
    if sum(map(tensor_bytes, tensors)) <= MOST_UNREAD:  # passes remove these weights
        said.initializer.extend(map(ir.to_proto, tensors))
    for node in graph:
        if node.outputs and (node.doc_string or node.metadata_props):
            noted = said.node.add(op_type=node.op_type, output=[name_of(node.outputs[0])])
            noted.doc_string = node.doc_string or ""
            _write(noted.metadata_props, node.metadata_props)
    Notes.pack(said).write(model)


def restore_notes(proto: onnx.ModelProto, model: ir.Model) -> None:
    """Write to a trained model what `remember` noted in its training graph."""
    notes = Notes.read(model)
    if notes is None:
        return
    graph, said = proto.graph, notes.graph()
    _write(graph.metadata_props, {entry.key: entry.value for entry in said.metadata_props})
    taken = {x.name for x in [*graph.initializer, *graph.input]}.union(*(node.output for node in graph.node))
    docs = {x.name: x.doc_string for x in said.value_info}
    order = {name: i for i, name in enumerate(docs)}
    unread = {x.name: x for x in said.initializer if x.name not in taken}
    graph.initializer.extend(unread.values())
    # In place: a message keeps what it loses
    graph.initializer.sort(key=lambda x: order.get(x.name, len(order)))
    for weight in graph.initializer:
        if docs.get(weight.name):
            weight.doc_string = docs[weight.name]
    values = {x.name: x.type for x in [*said.input, *said.output]}
    for value in [*graph.input, *graph.output]:
        if (kind := values.get(value.name)) and kind.denotation:
            value.type.denotation = kind.denotation
        dims = () if kind is None else kind.tensor_type.shape.dim
        for dim, own in zip(value.type.tensor_type.shape.dim, dims, strict=False):
            if own.denotation:
                dim.denotation = own.denotation
    nodes = {noted.output[0]: noted for noted in said.node if noted.output}
    for node in graph.node:
        noted = nodes.get(node.output[0]) if node.output else None
        if noted is not None and noted.op_type == node.op_type:
            node.doc_string = noted.doc_string
            _write(node.metadata_props, {entry.key: entry.value for entry in noted.metadata_props})


def _write(entries: Any, texts: Mapping[str, str]) -> None:
    """Replace metadata by texts that are not graphopt's own."""
    del entries[:]
    for key, text in texts.items():
        if not key.startswith(PREFIX):
            entries.add(key=key, value=text)


def store(model: ir.Model) -> None:
    """Replace each node that rounds a weight to its form in the file by the result, under the weight's name.

    Its scale may be computed from the weight, too, and has a name of its own.
    """
    graph = model.graph
    for node in [node for node in graph if STORED.is_set(node)]:
        weight, y = node.inputs[0], node.outputs[0]
        while weight is not None and (before := weight.producer()) is not None:
            weight = before.inputs[0] if before.inputs else None
        if weight is not None and weight.is_initializer():
            stored, name = _computed(model, weight, y), STORED_AS.read(node)
            y.name = f"{y.name}/computed"
            if name is None:
                name = name_of(weight)
                del graph.initializers[name]
                weight.name = f"{name}/float"
                graph.register_initializer(weight)
            elif name in graph.initializers:
                raise malformed(node, STORED_AS.key, "a name that no other value has")
            value = ir.Value(name=name, type=ir.TensorType(stored.dtype), shape=y.shape, const_value=stored)
            graph.register_initializer(value)
            ir.convenience.replace_all_uses_with(y, value, replace_graph_outputs=True)
    RemoveUnusedNodesPass()(model)
    for node in filter(FAKE.is_set, graph):
        remove_own(node)
    for value in graph.initializers.values():
        stored_type = STORED_TYPE.read(value)
        if stored_type is not None and (tensor := value.const_value) is not None:
            dtype = ir.DataType[stored_type]
            rounded = partial(_rounded, tensor, dtype)
            value.const_value = ir.LazyTensor(rounded, dtype, ir.Shape(tensor.shape.numpy()), name=value.name)
            value.type = ir.TensorType(dtype)


def _rounded(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(dtype.numpy()))


def _computed(model: ir.Model, weight: ir.Value, y: ir.Value) -> ir.TensorProtocol:
    if weight.const_value is None:
        raise GraphoptError(f"weight {weight.name!r}: expected its numbers, found none")
    part = extracted_between(model.graph, [weight], [y])
    proto = ir.to_proto(ir.Model(part, ir_version=model.ir_version))
    (array,) = ReferenceEvaluator(proto).run(None, {name_of(weight): weight.const_value.numpy()})
    return ir.tensor(array, dtype=y.dtype, name=name_of(weight))


def standing_for(x: ir.Value) -> np.ndarray | None:
    """Return the numbers that an initializer stands for: its own, or those that its DequantizeLinear makes of it."""
    if x.const_value is None or x.dtype is None:
        return None
    if is_floating(x) and not any(node.op_type == DEQUANTIZE for node in x.consumers()):
        return x.const_value.numpy()
    return next((result for node in x.consumers() if (result := dequantized(node)) is not None), None)


def is_dequantized(node: ir.Node) -> bool:
    """Return whether a node is a DequantizeLinear of constants."""
    if node.op_type != DEQUANTIZE or node.domain != "":
        return False
    read = [x for i, x in enumerate(node.inputs) if x is not None or i < 2]
    return all(x is not None and ir.convenience.get_const_tensor(x) is not None for x in read)


def dequantized(node: ir.Node) -> np.ndarray | None:
    """Return (q - zero) scale in float32 for a DequantizeLinear of constants, or None for another node."""
    if not is_dequantized(node):
        return None
    q, scale, zero = (constant_of(x) for x in [*node.inputs, None][:3])
    if q is None or scale is None:
        return None
    floating = is_floating(node.inputs[0])
    wide = q.astype(np.float32 if floating else np.int64)
    if zero is not None and not floating:
        wide = wide - broadcastable(node, zero.astype(np.int64), wide.shape)
    return wide.astype(np.float32) * broadcastable(node, scale.astype(np.float32), wide.shape)


def broadcastable(node: ir.Node, numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the scale or the zero point of a DequantizeLinear in a form that broadcasts to its input's shape."""
    if numbers.size == 1 and numbers.ndim < 2:
        return numbers.reshape(())
    axis = node.attributes.get_int("axis", 1) % len(shape)
    block = node.attributes.get_int("block_size", 0)
    if block:
        return np.repeat(numbers, block, axis=axis).take(range(shape[axis]), axis=axis)
    return numbers.reshape([-1 if i == axis else 1 for i in range(len(shape))])
