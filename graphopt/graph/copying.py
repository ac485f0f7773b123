"""Emit a part of a graph again, on other values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import InferenceForm
from graphopt.graph.traversal import all_nodes, subgraphs, values_read
from graphopt.graph.values import like, node_label, producer_of


def again(
    op: Emitter, nodes: Iterable[ir.Node], replaced: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Emit copies of those `nodes` that depend on a replaced value, and return all values with their replacements.

    The copies keep notes, without those of inference forms. Values keep their types and shapes if replacements do.

    Args:
        nodes: in the order of the graph.
        replaced: values, and what the copies read in their place.

    Raises:
        GraphoptError: a node with bodies reads a replacement of another shape, so that shapes in its bodies change.
    """
    copies = dict(replaced)
    is_alike = all(x.shape == y.shape for x, y in replaced.items())
    for node in nodes:
        if copies.keys().isdisjoint(values_read(node)):
            continue
        if subgraphs(node) and not is_alike:
            raise GraphoptError(f"{node_label(node)}: expected no {node.op_type} where the batch is repeated")
        inputs = [None if x is None else copies.get(x, x) for x in node.inputs]
        attributes = {
            name: _body_on(x.as_graph(), copies) if x.type is ir.AttributeType.GRAPH else x
            for name, x in node.attributes.items()
        }
        outputs = [ir.Value() for _ in node.outputs]
        op.call_op(node.op_type, inputs, attributes, domain=node.domain, outputs=outputs)
        copy = producer_of(outputs[0])
        _copy_notes(node, copy)
        for x, y in zip(node.outputs, outputs, strict=True):
            copies[x] = like(y, x) if is_alike else y
            _copy_notes(x, y)
    return copies


def _body_on(body: ir.Graph, copies: Mapping[ir.Value, ir.Value]) -> ir.Graph:
    """Return a copy of a body that captures copies."""
    clone = body.clone(allow_outer_scope_values=True)
    for node in all_nodes(clone):
        for i, x in enumerate(node.inputs):
            if x is not None and x in copies:
                node.replace_input_with(i, copies[x])
    clone.outputs[:] = [copies.get(y, y) for y in clone.outputs]
    return clone


def _copy_notes(source: ir.Node | ir.Value, target: ir.Node | ir.Value) -> None:
    metadata.copy(source, target)
    InferenceForm.remove(target)
