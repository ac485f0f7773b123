"""Clip gradients before the optimizer reads them.

The base class replaces the gradients among the outputs. A subclass implements `clip`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import onnx_ir as ir

from graphopt.graph import roles
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass, retire
from graphopt.graph.roles import Role
from graphopt.intervals import within
from passes import ort_kernels as fused
from passes.diagnostics import report_norm

__all__ = ["Clip", "ClipGlobalNorm", "ClipValue"]


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

    @final
    def rewrite(self, model: ir.Model) -> None:
        gradients = self.required(model, Role.GRADIENT, "run Gradient first")
        with Emitter(model) as op:
            for gradient, clipped in zip(gradients, self.clip(op, model, gradients), strict=True):
                place = list(model.graph.outputs).index(gradient)
                name = gradient.name
                retire(model, gradient)
                clipped.name = name
                model.graph.outputs[place] = roles.set_role(clipped, Role.GRADIENT)


@dataclass(frozen=True)
class ClipGlobalNorm(Clip):
    """Scale all gradients together so that their norm is at most `max_norm`, and report `gradient_norm`.

    Pascanu, Mikolov, Bengio 2013. 16-bit gradients are summed in float32.

    Args:
        max_norm: the largest Euclidean norm of all gradients together.
        fused: use one kernel of onnxruntime-training. It reports no norm and supports float32 only.

    >>> steps = {"loss": passes.MeanSquaredError(), "clip": passes.ClipGlobalNorm(1.0), "optimizer": passes.SGD(0.1)}
    >>> graphopt.Executor(graphopt.compile(models.linear((2,), 1), **steps)).reported
    ['loss', 'y', 'gradient_norm']
    """

    max_norm: float = within("(0, inf)", 1.0)
    fused: bool = field(default=False, kw_only=True)

    def clip(self, op: Emitter, model: ir.Model, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        if self.fused:
            tensors: Any = ([], [gradients], [gradients])
            options: Any = {"flag": False, "max_norm": self.max_norm}
            return fused.call(op, model, "InplaceClipGradNorm", *tensors, **options)[0]
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
