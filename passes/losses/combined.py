"""Define custom losses and sums of losses."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from onnxscript import OnnxFunction

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass, Read
from graphopt.graph.roles import Role, set_role
from graphopt.intervals import within
from passes.losses.loss import Loss, report_loss


@dataclass(frozen=True)
class CustomLoss(Loss):
    """Compute a function that you write, of a prediction and a target.

    Args:
        function: a traced function `f(op, prediction, target)`, an onnxscript function of two inputs, or the name
            `package.module:function` of either.
        integer_target: targets are int64, in the shape of the prediction without its last axis.

    >>> import numpy
    >>> from graphopt import models
    >>> loss = passes.CustomLoss(lambda op, prediction, target: op.Pow(op.Abs(prediction - target), 3))
    >>> step = graphopt.compile(models.linear((1,), 1), loss=loss)
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[2]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])
    8.0
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
    """Sum one loss per output. Each has a separate target `target_OUTPUT` and is reported as `loss_OUTPUT`.

    Args:
        losses: a loss for each output, by the name of the output.
        weights: the factors of the losses in the sum, by the name of the output. The default is 1.

    >>> from graphopt import models
    >>> loss = passes.Losses({"y": passes.MeanSquaredError()}, weights={"y": 0.5})
    >>> graphopt.Executor(graphopt.compile(models.linear((2,), 1), loss=loss, optimizer=passes.SGD(0.1))).reported
    ['loss', 'y', 'loss_y']
    """

    losses: Mapping[str, Loss]
    weights: Mapping[str, float] = within("(-inf, inf)", dict)

    @property
    def learns(self) -> bool:
        return any(loss.learns for loss in self.losses.values())

    def adapted(self, model: ir.Model, read: Read) -> Losses:
        losses = {
            output: replace(loss, output=output).adapted(model, read, f"target_{output}")
            for output, loss in self.losses.items()
        }
        return replace(self, losses=losses)

    def rewrite(self, model: ir.Model) -> None:
        unknown = set(self.weights) - set(self.losses)
        if unknown:
            raise GraphoptError(
                f"Losses: weights: expected names of outputs with a loss ({', '.join(self.losses)}), found "
                f"{sorted(unknown)}"
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
                raise GraphoptError(
                    "losses: expected at least one loss, found none: name a loss for an output"
                )
            report_loss(model, op, total)
            model.graph.outputs.extend(set_role(value, Role.METRIC) for value in reported)
