"""Differentiate operators through equivalent functions of simpler operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import is_floating, like
from passes.gradients.registry import Gradients, Rule, accepted, rule
from passes.gradients.walk import backward

Expansion = Callable[..., Sequence[Value]]


def expansion(*op_types: str) -> Callable[[Expansion], Rule]:
    """Register a traced function `f(op, *inputs, **named)` that computes the outputs of these operators.

    It may request the same values as a rule. Only the gradient of the function is emitted: the operator itself stays,
    because its kernel is faster and the exported model keeps it.
    """

    def register(function: Expansion) -> Rule:
        def differentiated(
            op: Emitter,
            dy: Value | None,
            *inputs: Value,
            node: Node,
            further: list[Value | None],
            active: frozenset[Value],
            **named: Any,
        ) -> Gradients:
            graph = node.graph
            assert isinstance(graph, ir.Graph)
            start = len(graph)
            outputs = function(op, *inputs, **accepted(function, named | {"node": node}))
            part = ir.GraphView(inputs, outputs, nodes=list(graph)[start:], opset_imports=graph.opset_imports)
            pairs = zip(outputs, [dy, *further], strict=False)
            seeds = {y: like(op.Identity(dy), y) for y, dy in pairs if dy is not None}
            wrt = [x for x in dict.fromkeys(inputs) if x in active and is_floating(x)]
            gradients = backward(op, part, seeds, wrt)
            return [gradients.pop(x, None) for x in inputs]

        return rule(*op_types)(differentiated)

    return register
