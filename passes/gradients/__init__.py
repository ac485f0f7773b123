"""Differentiate the loss with gradient rules."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, some
from graphopt.graph import roles, state
from graphopt.graph.dequantization import dequantize_late
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import GRADIENT_OF, SURROGATE, UNTRAINED
from graphopt.graph.origins import Kind, Origin
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role
from graphopt.graph.shapes import ensure_typed, sizes_of_inputs
from graphopt.graph.state import LOSS_SCALE
from graphopt.graph.values import gradient_of, name_of
from graphopt.intervals import within
from passes.gradients import rules as rules
from passes.gradients.walk import backward, dead_ends, lost


@dataclass(frozen=True)
class GradientSource(Pass):
    """Differentiate the loss with respect to every parameter: add an output `NAME.grad` for each.

    Parameters of outputs on which the loss does not depend stay unchanged, with a warning. This is the base class
    of `Gradient` and `OrtGradient`.

    Args:
        loss_scale: the initial value of a hyperparameter `loss_scale`. The loss is multiplied by it before
            differentiation and the gradients are divided by it, so that 16-bit intermediate values do not underflow.

    Raises:
        GraphoptError: the model has no loss or no parameter; operators without a gradient block a parameter; or the
            loss depends on no parameter.

    >>> issubclass(passes.Gradient, passes.GradientSource)
    True
    """

    loss_scale: float | None = within("(0, inf)", None, kw_only=True)
    is_slope: ClassVar[bool] = True  # whether gradients are those of the reported loss

    @abstractmethod
    def backward(
        self, op: Emitter, model: ir.Model, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Emit the vector-Jacobian product, and return the gradient of each of `wrt` that affects the seeded values."""

    def requires(self, model: ir.Model) -> None:
        loss = roles.only(model, Role.LOSS, "Gradient")
        if loss.shape is None or len(loss.shape) > 0:
            raise GraphoptError(
                f"Gradient needs a loss that is one number, found shape {loss.shape}: set "
                "loss.reduction to 'mean' or 'sum'"
            )
        self.required(model, Role.PARAMETER, "run Parameters first, or loosen its pattern")
        self.precedes_gradient(model)

    def ensures(self, model: ir.Model) -> None:
        self.required(model, Role.GRADIENT, "the pass adds them")

    @final
    def rewrite(self, model: ir.Model) -> None:
        loss, parameters = roles.only(model, Role.LOSS, "Gradient"), roles.with_role(model, Role.PARAMETER)
        ensure_typed(model)
        with Emitter(model) as op:
            seed, inverse = op.constant(1.0, like=loss), None
            if self.loss_scale is not None:
                start = np.array(self.loss_scale, np.float32)
                scale = state.declare(model, LOSS_SCALE, start, Role.HYPERPARAMETER)
                seed, inverse = op.Cast(scale, to=loss.dtype), 1 / scale
            gradients = self.backward(op, model, {loss: seed}, parameters)
            parameters = _reached(model, parameters, gradients)
            for parameter in parameters:
                gradient = gradients[parameter]
                if inverse is not None:
                    gradient = gradient * op.Cast(inverse, to=gradient.dtype)
                gradient = op.Identity(gradient, _outputs=[gradient_of(parameter)])
                GRADIENT_OF.write(gradient, name_of(parameter))
                if not self.is_slope:
                    SURROGATE.set(gradient)
                model.graph.outputs.append(roles.set_role(gradient, Role.GRADIENT))
        sizes_of_inputs(model)
        dequantize_late(model)


def _reached(model: ir.Model, parameters: Sequence[ir.Value], gradients: Container[ir.Value]) -> list[ir.Value]:
    """Freeze the parameters of outputs on which the loss does not depend, with a warning, and return the others."""
    missing = [parameter for parameter in parameters if parameter not in gradients]
    stopped = [parameter for parameter in missing if dead_ends(parameter)]
    if stopped or len(missing) == len(parameters):
        wrong = some(list(map(lost, stopped or missing)))
        raise GraphoptError(f"the loss does not depend on {wrong}: freeze them, or compare another output by a loss")
    for parameter in missing:
        state.demote(model, parameter)
        UNTRAINED.set(parameter)
        origin = Origin.read(parameter) or Origin(Kind.PARAMETER, "")
        replace(origin, why="the loss does not depend on it", certain=True).write(parameter)
    if missing:
        warnings.warn(
            f"the loss does not depend on {len(missing)} of {len(parameters)} parameters, which do not train: "
            f"{some(list(map(lost, missing)))}",
            stacklevel=2,
        )
    return [parameter for parameter in parameters if parameter in gradients]


@dataclass(frozen=True)
class Gradient(GradientSource):
    """Differentiate the loss with respect to every parameter in standard operators: add an output `NAME.grad` for each.

    Raises:
        GraphoptError: the model has no loss or no parameter; operators without a rule block a parameter; or the loss
            depends on no parameter.

    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), gradient=passes.Gradient())
    >>> [output.name for output in step.graph.outputs]
    ['loss', 'y', 'layers.0.bias.grad', 'layers.0.weight.grad']
    """

    def backward(
        self, op: Emitter, model: ir.Model, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        return backward(op, model.graph, seeds, wrt)
