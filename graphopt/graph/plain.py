"""Keep, with a graph that was rewritten for speed, the plain graph that it was made from."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.state import INITIAL

_PLAIN = "graphopt.plain"  # in the model's `meta`, which files do not contain


def remember(model: ir.Model, plain: ir.Model) -> None:
    """Note that a model was made from `plain`, a clone that nothing else changes, for as long as it stays as it is."""
    for value in plain.graph.inputs:
        value.meta.pop(INITIAL, None)  # would keep the initial weights in memory
    model.meta[_PLAIN] = (plain, _signature(model))


def forget(model: ir.Model) -> None:
    """Drop the note before a rewriting."""
    model.meta.pop(_PLAIN, None)


def plain_of(model: ir.Model) -> ir.Model | None:
    """Return the plain graph that a model was made from; None if there is none, or the model has changed since."""
    plain, signature = model.meta.get(_PLAIN, (None, None))
    return plain if plain is not None and signature == _signature(model) else None


def clone(model: ir.Model) -> ir.Model:
    """Return a clone that was made from the same plain graph."""
    copied = model.clone()
    plain = plain_of(model)
    if plain is not None:
        copied.meta[_PLAIN] = (plain, _signature(copied))
    return copied


def _signature(model: ir.Model) -> int:
    """Return a hash of a graph's nodes and of the tensors that it holds."""
    nodes = frozenset((node.op_type, tuple(x and x.name for x in node.inputs)) for node in model.graph)
    constants = [x for x in model.graph.initializers.values() if not x.is_graph_input()]
    return hash((nodes, tuple((x.name, id(x.const_value)) for x in constants)))
