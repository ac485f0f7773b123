"""Chooses what trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from graphopt import state
from graphopt.emitter import subgraphs
from graphopt.errors import GraphoptError
from graphopt.rewriting import Pass, Pattern, matches
from graphopt.roles import FROZEN, UNTRAINED, Role
from passes.gradients.walk import carries_gradient, is_differentiable, lost, passes_gradient
from passes.lowering.classical import is_tree
from passes.shapes import ensure_typed

__all__ = ["Parameters"]

# Inputs that the schemas call differentiable and that hold statistics of data, not weights.
STATISTICS = {"BatchNormalization": (3, 4)}
ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean", "Where"}


@dataclass(frozen=True)
class Parameters(Pass):
    """Make initializers parameters: by default every weight, otherwise those whose names match `pattern`.

    A weight is a floating initializer of rank 1 or more and finite numbers, that reaches an output of the model
    through differentiable operators, is no running statistic, is not marked as frozen (the scale of a Scaler, an
    embedding of positions), and no single number that arithmetic spreads over a whole last axis: exporters write
    scalar literals so. `freeze` takes names out again. Patterns are
    shell-style, one or several.

    Raises:
        GraphoptError: nothing is left to train, or `pattern` or `freeze` matches no initializer.
    """

    pattern: Pattern = None
    freeze: Pattern = None

    def rewrite(self, model: ir.Model) -> None:
        common.LiftSubgraphInitializersToMainGraphPass()(model)
        ensure_typed(model)
        floating = [value for value in model.graph.initializers.values() if is_differentiable(value)]
        for name, pattern in (("pattern", self.pattern), ("freeze", self.freeze)):
            if pattern and not any(matches(value.name, pattern) for value in floating):
                raise GraphoptError(
                    f"parameters.{name}={pattern!r} matches no floating initializer; the model has: "
                    f"{', '.join(str(value.name) for value in floating) or 'none'}"
                )
        if self.pattern:
            chosen = [value for value in floating if matches(value.name, self.pattern)]
        else:
            reached = set(weights(model))
            chosen = [value for value in floating if value in reached]
        chosen = [value for value in chosen if not matches(value.name, self.freeze)]
        if not chosen:
            tree = next(filter(is_tree, model.graph), None)
            if tree is not None:
                raise GraphoptError(
                    f"nothing to train: {tree.op_type} node {tree.name!r} is piecewise constant, so that no gradient "
                    f"passes it, and nothing after it trains: train a linear model or a network instead"
                )
            found = ", ".join(map(lost, floating)) or "no floating initializer at all"
            raise GraphoptError(
                f"nothing to train: expected a floating initializer of rank 1 or more that reaches an output through "
                f"differentiable operators, found {found}; name parameters with parameters.pattern"
            )
        for value in set(weights(model)) - set(chosen):
            value.metadata_props[UNTRAINED] = "true"
        for value in chosen:
            state.promote(model, value, Role.PARAMETER)


def weights(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the initializers that the default rule trains."""
    reached: set[ir.Value] = set()
    _reach(model.graph, reached)
    for value in model.graph.initializers.values():
        if value in reached and _is_weight(value):
            yield value


def _reach(graph: ir.Graph, reached: set[ir.Value]) -> None:
    """Add all values from which a gradient could flow to an output of `graph`, through bodies too."""
    reached.update(output for output in graph.outputs if is_differentiable(output))
    for node in reversed(graph):
        if passes_gradient(node) and any(output in reached for output in node.outputs):
            reached.update(x for i, x in enumerate(node.inputs) if x is not None and _carries(node, i))
            for body in subgraphs(node):
                _reach(body, reached)


def _carries(node: ir.Node, index: int) -> bool:
    """Tell whether an input is one that a gradient could flow to, by type and by the operator's schema."""
    if not carries_gradient(node.inputs[index]) or index in STATISTICS.get(node.op_type, ()):
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    except onnx.defs.SchemaError:
        return True
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    return formal.differentiation_category != onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or len(tensor.shape) == 0 or FROZEN in value.metadata_props or _is_literal(value):
        return False
    return bool(np.isfinite(tensor.numpy()).all())


def _is_literal(value: ir.Value) -> bool:
    """Tell whether a number is spread over a last axis, or is computed with as a number."""
    if value.const_value is None or tuple(value.const_value.shape) != (1,):
        return False
    results = [user.outputs[0].shape for user in value.consumers() if user.op_type in ARITHMETIC]
    return any(shape is not None and (all(dim == 1 for dim in shape) or shape[-1] != 1) for shape in results)
