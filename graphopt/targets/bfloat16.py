"""Compute operators on bfloat16 in float32: ONNX Runtime's CPU provider moves such numbers, and computes with none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import like, swap

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT

# Operators that the CPU provider has for bfloat16 in all its releases.
MOVING = frozenset(
    {
        *(
            "Cast",
            "Concat",
            "Constant",
            "Flatten",
            "Gather",
            "Identity",
            "Reshape",
            "ScatterElements",
            "ScatterND",
        ),
        *("Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
    }
)


def is_of_bfloat16(node: ir.Node) -> bool:
    """Return whether a node reads or writes bfloat16 numbers."""
    return any(x is not None and x.dtype == _NARROW for x in (*node.inputs, *node.outputs))


def computes_bfloat16(node: ir.Node) -> bool:
    """Return whether a standard operator computes with bfloat16 numbers, and does not only move them."""
    return is_of_bfloat16(node) and not node.domain and node.op_type not in MOVING and not any(subgraphs(node))


def in_float32(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Emit an operator in float32, and casts of its operands and results; return the results."""
    wide = [op.Cast(x, to=_WIDE) if x is not None and x.dtype == _NARROW else x for x in node.inputs]
    return [
        op.Cast(y, to=_NARROW) if own.dtype == _NARROW else y
        for own, y in zip(node.outputs, op.emit_again(node, wide), strict=True)
    ]


def compute_bfloat16_in_float32(
    model: ir.Model, stays: Callable[[ir.Node], bool] = lambda node: False
) -> list[ir.Node]:
    """Compute in float32 what a model computes in bfloat16, and round the results; return the nodes that are replaced.

    Args:
        stays: whether a node is left as it is.
    """
    with Emitter(model) as op:
        replaced = _replaced(op, model.graph, stays)
    if replaced:
        model.graph.sort()
    return replaced


def _replaced(op: Emitter, graph: ir.Graph, stays: Callable[[ir.Node], bool]) -> list[ir.Node]:
    replaced = []
    for node in list(graph):
        for body in subgraphs(node):
            with op.within(body) as inner:
                replaced += _replaced(inner, body, stays)
        if computes_bfloat16(node) and not stays(node):
            for own, y in zip(node.outputs, in_float32(op, node), strict=True):
                if own.name:
                    swap(own, like(y, own))
            graph.remove(node, safe=True)
            replaced.append(node)
    return replaced
