"""Stop gradients: treat a value as a constant in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import STOP_GRADIENT
from graphopt.graph.rewriting import Pass, Pattern, matches
from graphopt.graph.values import like


def stop_gradient(op: Emitter, x: ir.Value) -> ir.Value:
    """Return the value of `x` as a constant for gradients. Call it in traced functions.

    >>> def distillation(op, prediction, target):
    ...     return op.Pow(prediction - passes.stop_gradient(op, target), 2)
    >>> passes.CustomLoss(distillation).reduction
    'mean'
    """
    return STOP_GRADIENT.mark(like(op.Identity(x), x))


@dataclass(frozen=True)
class StopGradient(Pass):
    """Treat the values named `values` as constants for gradients, so that nothing trains through them.

    Args:
        values: shell-style patterns of the names of values, one or several.

    Raises:
        GraphoptError: no value of the graph has a matching name.

    >>> steps = {"loss": passes.MeanSquaredError(), "gradient": [passes.StopGradient("x"), passes.Gradient()]}
    >>> step = graphopt.compile(models.linear((2,), 1), **steps)
    """

    values: Pattern

    def rewrite(self, model: ir.Model) -> None:
        matching = [x for node in model.graph for x in node.outputs if matches(x.name, self.values)]
        matching += [x for x in model.graph.inputs if matches(x.name, self.values)]
        if not matching:
            raise GraphoptError(
                f"stop_gradient.values={self.values!r}: expected names of values in the graph, found no match: "
                f"graphopt.listing shows the names"
            )
        with Emitter(model) as op:
            for x in matching:
                uses = list(x.uses())
                stopped = stop_gradient(op, x)
                for user, index in uses:
                    user.replace_input_with(index, stopped)
