"""Restore in the trained model what passes drop: outputs that cannot be trained on (labels, maps), documentation."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.graph.metadata import PREFIX, Detached, Notes
from graphopt.graph.roles import Role, set_role
from graphopt.graph.traversal import captured, extracted_between
from graphopt.graph.values import name_of, tensor_bytes

MOST_UNREAD = 2**20  # bytes


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
    encoded = base64.b64encode(part.SerializeToString()).decode()
    Detached(before.outputs, (*before.parts, encoded)).write(model)
    for output in outputs:
        model.graph.outputs.remove(output)
    for source in sources:
        if source.producer() is not None and not source.is_graph_output():
            model.graph.outputs.append(source if role is None else set_role(source, role))
    RemoveUnusedNodesPass()(model)


def detached_parts(model: ir.Model) -> list[onnx.ModelProto]:
    """Return the detached parts of a model, the last one first."""
    return (Detached.read(model) or Detached((), ())).models()[::-1]


def restore(proto: onnx.ModelProto, model: ir.Model, parts: Sequence[onnx.ModelProto]) -> None:
    """Restore the detached outputs, in their original order, in the inference model of training graph `model`.

    Args:
        parts: the result of `detached_parts`, in the opset of `proto`.
    """
    detached = Detached.read(model)
    if detached is None:
        return
    graph = proto.graph
    outputs = {output.name: output for output in graph.output}
    for part in parts:
        known = {value.name for value in [*graph.input, *graph.initializer]}
        known.update(name for node in graph.node for name in node.output)
        graph.input.extend(value for value in part.graph.input if value.name not in known)
        graph.node.extend(part.graph.node)
        graph.initializer.extend(x for x in part.graph.initializer if x.name not in known)
        outputs |= {output.name: output for output in part.graph.output}
        domains = {opset.domain for opset in proto.opset_import}
        proto.opset_import.extend(opset for opset in part.opset_import if opset.domain not in domains)
    del graph.output[:]
    graph.output.extend(outputs[name] for name in detached.outputs)


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
    """Note the documentation and metadata of a model's graph and values in the model, unless it has such a note.

    The note is a graph without computation. `value_info` lists the weights, `initializer` those that no node reads.
    """
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
    weights = [*graph.initializer, *unread.values()]
    del graph.initializer[:]
    graph.initializer.extend(sorted(weights, key=lambda x: order.get(x.name, len(order))))
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
