"""Detach outputs that cannot be trained on (labels, maps, sequences) and restore them in the exported model."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.graph.metadata import Detached
from graphopt.graph.roles import Role, set_role
from graphopt.graph.traversal import captured, extracted_between
from graphopt.graph.values import name_of


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
    before = Detached.read(model) or Detached([name_of(output) for output in model.graph.outputs], [])
    sources = _sources(outputs, is_source)
    graph = extracted_between(model.graph, sources, outputs)
    part = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
    for output in part.graph.output:
        if types is not None:
            output.type.CopyFrom(types[output.name])
    encoded = base64.b64encode(part.SerializeToString()).decode()
    Detached(before.outputs, [*before.parts, encoded]).write(model)
    for output in outputs:
        model.graph.outputs.remove(output)
    for source in sources:
        if source.producer() is not None and not source.is_graph_output():
            model.graph.outputs.append(source if role is None else set_role(source, role))
    RemoveUnusedNodesPass()(model)


def detached_parts(model: ir.Model) -> list[onnx.ModelProto]:
    """Return the detached parts of a model, the last one first."""
    return (Detached.read(model) or Detached([], [])).models()[::-1]


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
