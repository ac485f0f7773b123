"""Clip gradients before the optimizer reads them, or report them: the pipeline's step `clip`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import onnx_ir as ir

from graphopt.graph.authored import ask, floating, name_of_method, several
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass, Pattern, no_match, retire, selects
from graphopt.graph.roles import Role, set_role, with_role
from graphopt.graph.values import name_of, report_of, value_of, wide_type
from graphopt.intervals import within
from passes.optimizers.optimizer import call_kernel

__all__ = ["Clip", "ClipGlobalNorm", "ClipValue", "GradientNorm", "ReportGradients"]


@dataclass(frozen=True)
class Clip(Pass):
    """Replace every gradient by a clipped one.

    This is the base class of clipping passes. A subclass implements `clip`.

    Raises:
        GraphoptError: the model has no gradients, or the bound is not positive and finite.

    >>> class SignOnly(passes.Clip):
    ...     def clip(self, op, model, gradients):
    ...         return [op.Sign(gradient) for gradient in gradients]
    >>> SignOnly()
    SignOnly()
    """

    @abstractmethod
    def clip(self, op: Emitter, model: ir.Model, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        """Emit the clipped gradients."""

    def requires(self, model: ir.Model) -> None:
        self.required(model, Role.GRADIENT, "run Gradient first")

    @final
    def rewrite(self, model: ir.Model) -> None:
        gradients = with_role(model, Role.GRADIENT)
        with Emitter(model) as op:
            for gradient, clipped in zip(gradients, _clipped(self, op, model, gradients), strict=True):
                place, clipped.name = model.graph.outputs.index(gradient), gradient.name
                retire(model, gradient)
                model.graph.outputs[place] = set_role(clipped, Role.GRADIENT)


@dataclass(frozen=True)
class ClipGlobalNorm(Clip):
    """Scale all gradients together so that their norm is at most `max_norm`, and report `gradient_norm`.

    Pascanu, Mikolov, Bengio 2013. 16-bit gradients are summed in float32.

    Args:
        max_norm: the largest Euclidean norm of all gradients together.
        fused: use one kernel of onnxruntime-training. It reports no norm and supports float32 only.

    >>> steps = {"loss": passes.MeanSquaredError(), "clip": passes.ClipGlobalNorm(1.0), "optimizer": passes.SGD(0.1)}
    >>> graphopt.Executor(graphopt.compile(models.linear((2,), 1), **steps)).reported
    ('loss', 'y', 'gradient_norm')
    """

    max_norm: float = within("(0, inf)", 1.0)
    fused: bool = field(default=False, kw_only=True)

    def clip(self, op: Emitter, model: ir.Model, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        if self.fused:
            kernel, columns = "InplaceClipGradNorm", [gradients]
            return call_kernel(op, model, kernel, [], columns, columns, max_norm=self.max_norm)[0]
        norm = report_norm(op, model, gradients)
        scale = op.Min(self.max_norm / (norm + 1e-6), 1.0)
        return [gradient * op.Cast(scale, to=gradient.dtype) for gradient in gradients]


@dataclass(frozen=True)
class ClipValue(Clip):
    """Clip every element of the gradients to the interval [-limit, limit].

    Args:
        limit: the largest absolute value of an element.

    >>> steps = {"loss": passes.MeanSquaredError(), "clip": passes.ClipValue(0.5), "optimizer": passes.SGD(0.1)}
    >>> "Clip" in [node.op_type for node in graphopt.compile(models.linear((2,), 1), **steps).graph]
    True
    """

    limit: float = within("(0, inf)", 1.0)

    def clip(self, op: Emitter, model: ir.Model, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        return [op.Clip(gradient, -self.limit, self.limit) for gradient in gradients]


@dataclass(frozen=True)
class GradientNorm(Pass):
    """Report `gradient_norm`, the Euclidean norm of all gradients together, as `ClipGlobalNorm` does.

    Raises:
        GraphoptError: the model has no gradients.

    >>> steps = {"loss": passes.MeanSquaredError(), "clip": passes.GradientNorm(), "optimizer": passes.SGD(0.1)}
    >>> graphopt.Executor(graphopt.compile(models.linear((2,), 1), **steps)).reported
    ('loss', 'y', 'gradient_norm')
    """

    def requires(self, model: ir.Model) -> None:
        self.required(model, Role.GRADIENT, "run Gradient first")

    def rewrite(self, model: ir.Model) -> None:
        with Emitter(model) as op:
            report_norm(op, model, with_role(model, Role.GRADIENT))


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
    ('loss', 'y', 'layers.0.bias.gradient')
    """

    parameters: Pattern = "*"

    def requires(self, model: ir.Model) -> None:
        self.required(model, Role.GRADIENT, "run Gradient first")

    def rewrite(self, model: ir.Model) -> None:
        gradients = {value_of(g): g for g in with_role(model, Role.GRADIENT)}
        trained = {name_of(p): p for p in with_role(model, Role.PARAMETER)}
        chosen = {name: g for name, g in gradients.items() if selects(self.parameters, trained[name])}
        if not chosen:
            raise no_match(f"{self}:", "parameter", gradients)
        with Emitter(model) as op:
            for name, gradient in chosen.items():
                reported = op.Identity(gradient, _outputs=[report_of(name)])
                model.graph.outputs.append(set_role(reported, Role.DIAGNOSTIC))


def report_norm(op: Emitter, model: ir.Model, gradients: Sequence[ir.Value]) -> ir.Value:
    """Report the norm of gradients as `gradient_norm` and return it. 16-bit gradients are summed in float32."""
    squares = [op.ReduceSumSquare(op.cast(g, wide_type(g)), keepdims=0) for g in gradients]
    common = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize)
    norm = op.Sqrt(op.Sum(*[op.Cast(square, to=common) for square in squares]), _outputs=["gradient_norm"])
    model.graph.outputs.append(set_role(norm, Role.DIAGNOSTIC))
    return norm


def _clipped(clip: Clip, op: Emitter, model: ir.Model, gradients: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the gradients that `clip` has returned, as values of their own, some of which may be as they were."""
    where, due = name_of_method(clip, "clip"), "a value for each gradient"
    found = several(ask(clip, "clip", op, model, gradients), where, due, len(gradients))
    taken = {*gradients, *model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()}
    clipped = []
    for gradient, value in zip(gradients, found, strict=True):
        new = floating(value, where, f"the gradient {gradient.name!r}", gradient)
        clipped.append(op.Identity(new) if new in taken else new)
        taken.add(new)
    return clipped
