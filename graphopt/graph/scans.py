"""Remove from a Scan what nothing reads of it."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph import metadata
from graphopt.graph.operators import Attributes
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import is_read


def remove_unused_results(graph: ir.Graph) -> None:
    """Remove unread outputs and states of each Scan in a graph, and what only they read."""
    for node in reversed(list(graph)):
        if (node.domain, node.op_type) == ("", "Scan") and not all(map(is_read, node.outputs)):
            _shrink(graph, node)


def _shrink(graph: ir.Graph, node: ir.Node) -> None:
    """Remove unread outputs and states of a Scan."""
    body = node.attributes["body"].as_graph()
    sliced = node.attributes["num_scan_inputs"].as_int()
    states = len(node.inputs) - sliced
    kept = [i for i, y in enumerate(node.outputs) if is_read(y)]
    if not kept:
        return
    while True:  # a state stays if what stays depends on it
        read = {x for i in kept for x in _read(body, body.outputs[i])}
        more = [i for i in range(states) if i not in kept and body.inputs[i] in read]
        if not more:
            break
        kept = sorted([*kept, *more])
    rows = [i for i in range(states, len(body.inputs)) if body.inputs[i] in read] or [states]
    inputs = [*(i for i in kept if i < states), *rows]
    outputs = [node.outputs[i] for i in kept]
    attributes: Attributes = {
        "body": body,
        "num_scan_inputs": len(rows),
        **_chosen(node, "input", [i - states for i in rows]),
        **_chosen(node, "output", [i - states for i in kept if i >= states]),
    }
    body.outputs[:] = [body.outputs[i] for i in kept]
    body.inputs[:] = [body.inputs[i] for i in inputs]
    remove_unused_nodes(body)
    made = [ir.Value(type=y.type, shape=y.shape) for y in outputs]
    other = ir.node("Scan", [node.inputs[i] for i in inputs], attributes, outputs=made)
    metadata.copy(node, other)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [other], outputs, made)


def _read(body: ir.Graph, y: ir.Value) -> set[ir.Value]:
    """Return the values of a body that one of them depends on."""
    return {y, *(x for node in ancestors([y]) for x in values_read(node))}


def _chosen(node: ir.Node, side: str, numbers: Sequence[int]) -> dict[str, list[int]]:
    """Return the attributes of some of the sequences of a Scan."""
    names = (f"scan_{side}_axes", f"scan_{side}_directions")
    given = {name: node.attributes.get_ints(name, ()) for name in names}
    return {name: [values[i] for i in numbers] for name, values in given.items() if values}
