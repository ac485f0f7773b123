"""Register lowerings, which replace operators of other domains by standard operators.

A lowering is a traced function `lower(op, *inputs, **attributes)`. It returns the node's output, or its outputs in
order with None for an output that it does not cover. Parameters before `*` are the inputs, None if the node has none;
`*inputs` takes any number. Parameters after it are the attributes with their defaults, and optionally `node`. Other
inputs are refused, and other attributes unless they are 0. A lowering raises a GraphoptError that says what it does not
cover, and the walk adds the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import FROZEN
from graphopt.graph.values import constant_of
from passes.gradients.registry import F, registering

Lowering = Callable[..., ir.Value | Sequence[ir.Value | None]]

LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowers(*op_types: str, domain: str) -> Callable[[F], F]:
    """Register the decorated function as the lowering of these operators."""
    return registering(LOWERINGS, domain, op_types)


def weight(op: Emitter, node: ir.Node, label: str, array: np.ndarray) -> ir.Value:
    """Return a trainable initializer made from an attribute of a node."""
    name = f"{node.name or node.outputs[0].name}.{label}"
    return op.initializer(ir.tensor(array, name=name))


def freeze(x: ir.Value) -> ir.Value:
    """Mark an initializer as frozen unless it is requested by name."""
    if x.is_initializer():
        FROZEN.set(x)
    return x


def plus(x: ir.Value, bias: Input) -> ir.Value:
    """Return x + bias, or x if `bias` is None."""
    return x if bias is None else x + bias


def stored(x: ir.Value, name: str) -> np.ndarray:
    """Return the numbers of an initializer."""
    array = constant_of(x)
    if array is None:
        raise GraphoptError(f"expected its {name} {x.name!r} to be an initializer, found a computed value")
    return array
