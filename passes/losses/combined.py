"""Losses of one's own, and several together."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from onnxscript import OnnxFunction

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role, set_role
from graphopt.intervals import within
from passes.losses.loss import Loss, report_loss


@dataclass(frozen=True)
class CustomLoss(Loss):
    """A loss of one's own: a traced function `f(op, prediction, target)` or an onnxscript function of two inputs.

    Args:
        function: the function, or its name, `package.module:function`.
        integer_target: targets are int64 of the prediction's shape without its last axis.
    """

    function: Callable[..., ir.Value] | OnnxFunction[..., Any] | str
    integer_target: bool = False

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        function = pkgutil.resolve_name(self.function) if isinstance(self.function, str) else self.function
        return op.trace(function, prediction, target)

    def target_type(self, prediction: ir.Value) -> tuple[ir.DataType, ir.Shape]:
        if not self.integer_target:
            return super().target_type(prediction)
        assert prediction.shape is not None
        return ir.DataType.INT64, ir.Shape(list(prediction.shape)[:-1])


@dataclass(frozen=True)
class Losses(Pass):
    """A loss for each of several outputs, with a target `target_OUTPUT` and a reported `loss_OUTPUT` each.

    The objective is their sum, weighted by `weights` (1 where an output has none).
    """

    losses: Mapping[str, Loss]
    weights: Mapping[str, float] = within("(-inf, inf)", dict)

    def rewrite(self, model: ir.Model) -> None:
        unknown = set(self.weights) - set(self.losses)
        if unknown:
            raise GraphoptError(
                f"Losses: weights: {sorted(unknown)} have no loss; known: {', '.join(self.losses)}"
            )
        with Emitter(model) as op:
            total = None
            reported = []
            for output, loss in self.losses.items():
                term = replace(loss, output=output).term(model, op, f"target_{output}")
                reported.append(op.Identity(term, _outputs=[f"loss_{output}"]))
                term = term * self.weights.get(output, 1.0)
                total = term if total is None else total + term
            if total is None:
                raise GraphoptError("losses: expected a loss for an output or more, found none")
            report_loss(model, op, total)
            model.graph.outputs.extend(set_role(value, Role.METRIC) for value in reported)
