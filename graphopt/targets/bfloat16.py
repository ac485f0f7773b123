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
        *("Cast", "Concat", "Constant", "Flatten", "Gather", "Identity", "Reshape", "ScatterElements", "ScatterND"),
        *("Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
    }
)


def is_of_bfloat16(node: ir.Node) -> bool:
    """Return whether a node reads or writes bfloat16 numbers."""
    return any(x is not None and x.dtype == _NARROW for x in (*node.inputs, *node.outputs))


def in_float32(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Emit an operator in float32, and casts of its operands and results; return the results."""
    wide = [op.Cast(x, to=_WIDE) if x is not None and x.dtype == _NARROW else x for x in node.inputs]
    many = len(node.outputs)
    results = op.call_op(node.op_type, wide, dict(node.attributes), outputs=many)
    return [
        op.Cast(y, to=_NARROW) if own.dtype == _NARROW else y
        for own, y in zip(node.outputs, [results] if many == 1 else results, strict=True)
    ]


def compute_bfloat16_in_float32(model: ir.Model, stays: Callable[[ir.Node], bool] = lambda node: False) -> bool:
    """Compute all operators on bfloat16 in float32 that do not move numbers; return whether any was replaced.

    Args:
        stays: whether a node is left as it is.
    """
    with Emitter(model) as op:
        changed = _rewrite(op, model.graph, stays)
    if changed:
        model.graph.sort()
    return changed


def _rewrite(op: Emitter, graph: ir.Graph, stays: Callable[[ir.Node], bool]) -> bool:
    changed = False
    for node in list(graph):
        for body in subgraphs(node):
            with op.within(body) as inner:
                changed |= _rewrite(inner, body, stays)
        if not is_of_bfloat16(node) or node.domain or node.op_type in MOVING or subgraphs(node) or stays(node):
            continue
        for own, y in zip(node.outputs, in_float32(op, node), strict=True):
            if own.name:
                swap(own, like(y, own))
        graph.remove(node, safe=True)
        changed = True
    return changed

