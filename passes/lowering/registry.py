"""Register lowerings, which replace operators of other domains by standard operators.

A lowering is a traced function `lower(op, *inputs, **attributes)`. It returns the node's output, or its outputs in
order with None for an output that it does not cover. Parameters before `*` are the inputs, None if the node has none.
Parameters after it are the attributes with their defaults, and optionally `node`. Other inputs and attributes are
refused. A lowering raises a GraphoptError that says what it does not cover, and the walk adds the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import FROZEN
from passes.gradients.registry import enter

Lowering = Callable[..., ir.Value | Sequence[ir.Value | None]]

LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowers(*op_types: str, domain: str) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of these operators."""

    def register(function: Lowering) -> Lowering:
        for op_type in op_types:
            enter(LOWERINGS, (domain, op_type), function)
        return function

    return register


def off(**attributes: Any) -> None:
    """Refuse attributes that are covered only if they are 0."""
    for name, value in attributes.items():
        if value:
            raise GraphoptError(f"attribute {name}={value!r} is not covered: expected 0")


def weight(op: Emitter, node: ir.Node, label: str, array: np.ndarray) -> ir.Value:
    """Return a trainable initializer made from an attribute of a node."""
    name = f"{node.name or node.outputs[0].name}.{label}"
    return op.initializer(ir.tensor(array, name=name))


def frozen(op: Emitter, node: ir.Node, label: str, array: np.ndarray) -> ir.Value:
    """Return a frozen initializer made from an attribute of a node. It trains only if requested by name."""
    return freeze(weight(op, node, label, array))


def freeze(x: ir.Value) -> ir.Value:
    """Mark an initializer as frozen unless it is requested by name."""
    if x.is_initializer():
        FROZEN.set(x)
    return x
