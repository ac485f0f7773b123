"""Emit a part of a graph again, on other values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import POSITIONS
from graphopt.graph.traversal import all_nodes, subgraphs, values_read
from graphopt.graph.values import like, node_label, producer_of


def again(
    op: Emitter, nodes: Iterable[ir.Node], replaced: Mapping[ir.Value, ir.Value], *, notes: bool = False
) -> dict[ir.Value, ir.Value]:
    """Emit copies of those `nodes` that depend on a replaced value, and return the copies of their outputs.

    Copies keep their types and shapes if replacements do.

    Args:
        nodes: in the order of the graph. They stay as they are.
        replaced: values, and what the copies read in their place.
        notes: whether copies have the notes of nodes and outputs; otherwise, only that a node counts positions.

    Raises:
        GraphoptError: a node with bodies reads a replacement of another shape, so that shapes in its bodies change.
    """
    copies: dict[ir.Value, ir.Value] = {}
    read = dict(replaced)
    is_alike = all(x.shape == y.shape for x, y in replaced.items())
    for node in nodes:
        if read.keys().isdisjoint(values_read(node)):
            continue
        if subgraphs(node) and not is_alike:
            raise GraphoptError(f"{node_label(node)}: expected no {node.op_type} where the batch is repeated")
        inputs = [None if x is None else read.get(x, x) for x in node.inputs]
        attributes = {
            name: _body_on(x.as_graph(), read) if x.type is ir.AttributeType.GRAPH else x
            for name, x in node.attributes.items()
        }
        outputs = [ir.Value() for _ in node.outputs]
        op.call_op(node.op_type, inputs, attributes, domain=node.domain, outputs=outputs)
        for x, y in zip(node.outputs, outputs, strict=True):
            copies[x] = read[x] = like(y, x) if is_alike else y
            if notes:
                metadata.copy(x, y)
        if notes:
            metadata.copy(node, producer_of(outputs[0]))
        elif POSITIONS.is_set(node):
            POSITIONS.mark(outputs[0])
    return copies


def _body_on(body: ir.Graph, read: Mapping[ir.Value, ir.Value]) -> ir.Graph:
    """Return a copy of a body that captures what the copies read."""
    clone = body.clone(allow_outer_scope_values=True)
    for node in all_nodes(clone):
        for i, x in enumerate(node.inputs):
            if x is not None and x in read:
                node.replace_input_with(i, read[x])
    clone.outputs[:] = [read.get(y, y) for y in clone.outputs]
    return clone
