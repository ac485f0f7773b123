"""Show a model in a line, where onnx_ir would print the whole graph."""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx_ir as ir

from graphopt.graph.roles import FED, Role, role_of, with_role
from graphopt.graph.values import name_of


class Model(ir.Model):
    """Show a model in a line: its inputs, outputs and weights. `str` is still the whole graph."""

    __slots__ = ()

    def __repr__(self) -> str:
        graph, parameters = self.graph, with_role(self, Role.PARAMETER)
        kind = "training graph" if with_role(self, Role.NEXT) else "model"
        inputs = [x for x in graph.inputs if role_of(x) in FED or (role_of(x) is None and not x.is_initializer())]
        outputs = [y for y in graph.outputs if role_of(y) is not Role.NEXT]
        weights = parameters or list(graph.initializers.values())
        called = f"{len(weights)} {'parameters' if parameters else 'weights'} of {elements(weights):,} numbers"
        return (
            f"<{kind} {graph.name!r}: {_typed(inputs)} -> {', '.join(map(name_of, outputs))}; {called}, "
            f"{len(graph):,} nodes; graphopt.summary shows its layers>"
        )


def shown(model: ir.Model) -> ir.Model:
    """Give a model a representation of one line, and return the model."""
    model.__class__ = Model
    return model


def elements(values: Iterable[ir.Value]) -> int:
    """Return the number of elements of values with known shapes."""
    shapes = [x.shape for x in values if x.shape is not None and x.shape.is_static()]
    return sum(math.prod(shape.numpy()) for shape in shapes)


def _typed(values: Iterable[ir.Value]) -> str:
    return ", ".join(f"{x.name} {'' if x.dtype is None else x.dtype.numpy()}{x.shape or ''}".strip() for x in values)
