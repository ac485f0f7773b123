"""Reductions and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphopt.emitter import Emitter, like
from passes.gradient.registry import rule


def expand_back(op: Emitter, node: ir.Node, dy: ir.Value, keepdims: int) -> ir.Value:
    """Return `dy`, a gradient of a reduction's output, repeated along the reduced axes."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    assert x is not None
    if not keepdims and axes is not None:
        dy = op.Unsqueeze(dy, axes)
    return like(op.Expand(dy, op.shape_of(x)), x)


@rule("ReduceSum")
def reduce_sum(
    op: Emitter, node: ir.Node, dy: ir.Value, keepdims: int, noop_with_empty_axes: int
) -> Sequence[ir.Value | None]:
    return [expand_back(op, node, dy, keepdims)]


@rule("ReduceMean")
def reduce_mean(
    op: Emitter, node: ir.Node, dy: ir.Value, keepdims: int, noop_with_empty_axes: int
) -> Sequence[ir.Value | None]:
    x = node.inputs[0]
    assert x is not None
    return [expand_back(op, node, dy * (1.0 / op.count(x)), keepdims)]
