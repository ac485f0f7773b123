"""Register lowerings: how operators of other domains are replaced by standard ones.

A lowering is a traced function `lower(op, *inputs, **attributes)` that returns the node's output, or its outputs in
order, None for one that it does not cover. Its parameters before `*` are the inputs, None where the node has none;
those after it are the attributes, with their defaults, and `node`, if it wants that. What a node has beyond these is
refused, and so is whatever the lowering raises a GraphoptError for: it says what is not covered, the walk which node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import FROZEN

Lowering = Callable[..., ir.Value | Sequence[ir.Value | None]]

LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowers(*op_types: str, domain: str) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of these operators."""

    def register(function: Lowering) -> Lowering:
        for op_type in op_types:
            LOWERINGS[domain, op_type] = function
        return function

    return register


def off(**attributes: Any) -> None:
    """Refuse attributes that are covered only while they are 0.

    Raises:
        GraphoptError: one is not.
    """
    for name, value in attributes.items():
        if value:
            raise GraphoptError(f"attribute {name}={value!r} is not covered")


def weight(op: Emitter, node: ir.Node, label: str, array: np.ndarray) -> ir.Value:
    """Return an initializer made of a node's attribute, which trains."""
    name = f"{node.name}.{label}"
    return op.initializer(ir.tensor(array, name=name))


def frozen(op: Emitter, node: ir.Node, label: str, array: np.ndarray) -> ir.Value:
    """Return an initializer made of a node's attribute, which trains only when it is asked for by name."""
    return freeze(weight(op, node, label, array))


def freeze(x: ir.Value) -> ir.Value:
    """Mark an initializer as one that trains only when it is asked for by name."""
    if x.is_initializer():
        FROZEN.set(x)
    return x
