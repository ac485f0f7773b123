"""Keep what a file says about its graph and values: passes drop most of it, and the trained model has it again."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from graphopt.graph.metadata import PREFIX, Notes
from graphopt.graph.values import name_of

MOST_UNREAD = 2**20  # bytes
Denoted = tuple[str, list[str]]  # a denotation of a type, and one of each dimension


def remember(model: ir.Model) -> None:
    """Note the documentation and metadata of a model's graph and values in the model, unless it has such a note."""
    if Notes.is_on(model):
        return
    graph = model.graph
    weights = graph.initializers.values()
    docs = [(x, x.doc_string or getattr(x.const_value, "doc_string", None)) for x in weights]
    denoted = [(x, _denoted(x)) for x in [*graph.inputs, *graph.outputs]]
    notes = [
        (node, (node.op_type, node.doc_string or "", _own(node.metadata_props)))
        for node in graph
        if node.outputs
    ]
    found = {
        "graph": _own(graph.metadata_props),
        "weights": list(graph.initializers),
        "unread": _unread(graph),
        "docs": {name_of(x): doc for x, doc in docs if doc},
        "denotations": {name_of(x): each for x, each in denoted if any(each)},
        "nodes": {node.outputs[0].name: said for node, said in notes if any(said[1:])},
    }
    if any(found.values()):
        Notes.pack(found).write(model)


def restore_notes(proto: onnx.ModelProto, model: ir.Model) -> None:
    """Write to a trained model what `remember` noted in its training graph."""
    notes = Notes.read(model)
    if notes is None:
        return
    unpacked = notes.unpacked()
    graph = proto.graph
    _write(graph.metadata_props, _texts(unpacked.get("graph")))
    taken = {x.name for x in [*graph.initializer, *graph.input]}.union(*(node.output for node in graph.node))
    graph.initializer.extend(x for name, x in unpacked.get("unread", {}).items() if name not in taken)
    order = {name: i for i, name in enumerate(unpacked.get("weights", ()))}
    weights = sorted(graph.initializer, key=lambda x: order.get(x.name, len(order)))
    del graph.initializer[:]
    graph.initializer.extend(weights)
    docs = _texts(unpacked.get("docs"))
    for weight in graph.initializer:
        if weight.name in docs:
            weight.doc_string = docs[weight.name]
    denotations = unpacked.get("denotations", {})
    for value in [*graph.input, *graph.output]:
        _denote(value, *denotations.get(value.name, ("", ())))
    nodes = unpacked.get("nodes", {})
    for node in graph.node:
        op_type, doc, props = nodes.get(node.output[0] if node.output else "", ("", "", {}))
        if op_type == node.op_type:
            node.doc_string = str(doc)
            _write(node.metadata_props, _texts(props))


def _unread(graph: ir.Graph) -> dict[str, str]:
    """Return the weights that no node reads, which passes remove, unless they are large."""
    outputs = set(graph.outputs)
    unread = [x for x in graph.initializers.values() if x not in outputs and not x.uses()]
    if sum(x.const_value.nbytes for x in unread if x.const_value is not None) > MOST_UNREAD:
        return {}
    tensors = {name_of(x): ir.to_proto(x.const_value) for x in unread if x.const_value is not None}
    return {name: base64.b64encode(tensor.SerializeToString()).decode() for name, tensor in tensors.items()}


def _denoted(x: ir.Value) -> Denoted | tuple[()]:
    kind = getattr(x.type, "denotation", None) or ""
    dims = [x.shape.get_denotation(i) or "" for i in range(len(x.shape))] if x.shape is not None else []
    return (kind, dims) if kind or any(dims) else ()


def _denote(value: onnx.ValueInfoProto, kind: str, dims: Iterable[str]) -> None:
    if kind:
        value.type.denotation = str(kind)
    for dim, denotation in zip(value.type.tensor_type.shape.dim, dims, strict=False):
        if denotation:
            dim.denotation = str(denotation)


def _own(texts: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in texts.items() if not key.startswith(PREFIX)}


def _texts(value: Any) -> dict[str, str]:
    return {str(key): str(text) for key, text in (value or {}).items()}


def _write(entries: Any, texts: Mapping[str, str]) -> None:
    del entries[:]
    for key, text in texts.items():
        entries.add(key=key, value=text)
