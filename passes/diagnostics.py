"""Report gradients without changing them, as the pipeline's step `clip` or as part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass, Pattern, selects
from graphopt.graph.roles import Role, set_role, with_role
from graphopt.graph.values import name_of, report_of, value_of, wide_type


@dataclass(frozen=True)
class GradientNorm(Pass):
    """Report `gradient_norm`, the Euclidean norm of all gradients together, as `ClipGlobalNorm` does.

    Raises:
        GraphoptError: the model has no gradients.

    >>> steps = {"loss": passes.MeanSquaredError(), "clip": passes.GradientNorm(), "optimizer": passes.SGD(0.1)}
    >>> graphopt.Executor(graphopt.compile(models.linear((2,), 1), **steps)).reported
    ['loss', 'y', 'gradient_norm']
    """

    def rewrite(self, model: ir.Model) -> None:
        with Emitter(model) as op:
            report_norm(op, model, self.required(model, Role.GRADIENT, "run Gradient first"))


@dataclass(frozen=True)
class ReportGradients(Pass):
    """Report the gradient of each parameter NAME at this point of the pipeline as `NAME.gradient`.

    Args:
        parameters: shell-style patterns of names, one or several.

    Raises:
        GraphoptError: the model has no gradients, or no parameter matches.

    >>> report = passes.ReportGradients("*.bias")
    >>> steps = {"loss": passes.MeanSquaredError(), "clip": report, "optimizer": passes.SGD(0.1)}
    >>> graphopt.Executor(graphopt.compile(models.linear((2,), 1), **steps)).reported
    ['loss', 'y', 'layers.0.bias.gradient']
    """

    parameters: Pattern = "*"

    def rewrite(self, model: ir.Model) -> None:
        gradients = {value_of(g): g for g in self.required(model, Role.GRADIENT, "run Gradient first")}
        trained = {name_of(p): p for p in with_role(model, Role.PARAMETER)}
        chosen = {name: g for name, g in gradients.items() if selects(self.parameters, trained[name])}
        if not chosen:
            raise GraphoptError(f"{self}: matches no parameter; the model trains: {', '.join(gradients)}")
        with Emitter(model) as op:
            for name, gradient in chosen.items():
                reported = op.Identity(gradient, _outputs=[report_of(name)])
                model.graph.outputs.append(set_role(reported, Role.DIAGNOSTIC))


def report_norm(op: Emitter, model: ir.Model, gradients: Sequence[ir.Value]) -> ir.Value:
    """Report the norm of gradients as `gradient_norm` and return it. 16-bit gradients are summed in float32."""
    squares = [
        op.ReduceSumSquare(op.cast(gradient, wide_type(gradient)), keepdims=0) for gradient in gradients
    ]
    common = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize)
    norm = op.Sqrt(op.Sum(*[op.Cast(square, to=common) for square in squares]), _outputs=["gradient_norm"])
    model.graph.outputs.append(set_role(norm, Role.DIAGNOSTIC))
    return norm
