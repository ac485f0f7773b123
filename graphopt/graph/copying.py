"""Emit nodes of a graph again, on other values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import POSITIONS
from graphopt.graph.values import like, producer_of


def again(
    op: Emitter, nodes: Iterable[ir.Node], replaced: Mapping[ir.Value, ir.Value], *, notes: bool = False
) -> dict[ir.Value, ir.Value]:
    """Emit sorted nodes again with some values replaced, and return the copies of their outputs.

    Args:
        nodes: the nodes, which stay as they are.
        replaced: what the copies read in place of other values.
        notes: whether copies have the notes of nodes and outputs; otherwise, only that a node counts positions.
    """
    copies: dict[ir.Value, ir.Value] = {}
    for node in nodes:
        inputs = [None if x is None else copies.get(x, replaced.get(x, x)) for x in node.inputs]
        made = op.emit_again(node, inputs)
        copies.update((y, like(copy, y)) for y, copy in zip(node.outputs, made, strict=True))
        if notes:
            metadata.copy(node, producer_of(made[0]))
            for y, copy in zip(node.outputs, made, strict=True):
                metadata.copy(y, copy)
        elif POSITIONS.is_set(node):
            POSITIONS.mark(made[0])
    return copies
