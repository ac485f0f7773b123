"""Who computes what: the ways back through a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from graphopt.emitter import captured
from graphopt.roles import Role, with_role


def reads(node: ir.Node) -> list[ir.Value]:
    """Return what a node reads, the outer values that its bodies use among it."""
    return [x for x in [*node.inputs, *captured(node)] if x is not None]


def ancestors(values: Iterable[ir.Value], known: Collection[ir.Node] = ()) -> set[ir.Node]:
    """Return the nodes that compute `values`, back to those `known`."""
    found: set[ir.Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in found and node not in known:
            found.add(node)
            waiting.extend(reads(node))
    return found


def forward_nodes(model: ir.Model) -> set[ir.Node]:
    """Return the nodes of the forward pass: those that compute the loss, metrics, predictions and statistics."""
    statistics = {f"{x.name}.next" for x in with_role(model, Role.STATISTIC)}
    results = with_role(model, Role.LOSS, Role.METRIC, Role.PREDICTION, Role.SOURCE)
    return ancestors([*results, *(y for y in with_role(model, Role.NEXT) if y.name in statistics)])
