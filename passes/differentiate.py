"""Compute gradients as a graph, for saliency, adversarial examples, physics-informed losses and Hessians; stop them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import STOP_GRADIENT, Flag
from graphopt.graph.rewriting import Pass, Pattern, matches
from graphopt.graph.roles import Role, set_role, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import gradient_of, is_floating, like, name_of, redirect, seed_of
from passes.gradients.walk import backward, lost, zeros

DERIVATIVE = Flag("graphopt.derivative")  # an output that is the derivative of another


@dataclass(frozen=True)
class Differentiate(Pass):
    """Add an output `OF.grad.X` for each X of `wrt`: the gradient of the sum of output `of` with respect to X.

    Args:
        wrt: names of inputs, weights or other values of the graph.
        of: the output to differentiate. By default, the only floating-point output.
        seeded: add an input `OF.seed` in the shape of `of`. Its elements weight the elements of `of` in the sum, which
            gives a vector-Jacobian product.

    The derivative of a derivative is 0 where it is piecewise constant, as in a network of Relu.

    Raises:
        GraphoptError: a name is unknown, `of` does not depend on a value of `wrt`, or an operator has no rule.

    >>> pipeline = graphopt.Pipeline(normalize=passes.Normalize(), grad=passes.Differentiate(("x",)))
    >>> model = pipeline(models.linear((2,), 1))
    >>> [output.name for output in model.graph.outputs]
    ['y', 'y.grad.x']
    """

    wrt: tuple[str, ...] | list[str]
    of: str | None = None
    seeded: bool = False

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        for name in self.wrt:
            if name not in values or not is_floating(values[name]):
                known = [name for name, value in values.items() if is_floating(value)]
                raise GraphoptError(unknown("floating-point value", name, known))
        floating = [output for output in model.graph.outputs if is_floating(output)]
        chosen = [output for output in floating if self.of in (None, output.name)]
        if len(chosen) != 1:
            names = [output.name for output in floating]
            raise GraphoptError(
                f"of={self.of!r}: expected the name of one floating-point output, the model has {names}: set `of`"
            )
        (y,) = chosen
        with Emitter(model) as op:
            if self.seeded:
                seed = ir.Value(name=seed_of(y), type=y.type, shape=y.shape)
                model.graph.inputs.append(seed)
            else:
                seed = like(op.Expand(op.constant(1.0, like=y), op.shape_of(y)), y)
            wrt = [values[name] for name in self.wrt]
            gradients = backward(op, model.graph, {y: seed}, wrt)
            for x in wrt:
                if x not in gradients and not DERIVATIVE.is_set(y):
                    raise GraphoptError(
                        f"{y.name!r} does not depend on {x.name!r} differentiably: leave {x.name!r} out of wrt"
                    )
                gradient = gradients[x] if x in gradients else zeros(op, x)
                derivative = op.Identity(gradient, _outputs=[f"{gradient_of(y)}.{name_of(x)}"])
                DERIVATIVE.set(derivative)
                model.graph.outputs.append(derivative)


@dataclass(frozen=True)
class VectorJacobianProduct(Pass):
    """Differentiate by the inputs and parameters, for a loss outside the model: add an output `X.grad` for each X.

    Each floating-point output Y gets an input `Y.seed` of the same shape: the gradient of the objective by Y. An input
    on which no output depends differentiably has no `X.grad`.

    Args:
        inputs: shell-style patterns of the floating-point inputs to differentiate by. None selects none.

    Raises:
        GraphoptError: no floating-point output depends differentiably on anything, or none on a parameter; or
            operators in between have no rule.

    >>> layer = graphopt.ForwardBackward(models.linear((2,), 1), gradient=passes.VectorJacobianProduct(inputs=None))
    >>> [value.name for value in layer.backward_model.graph.outputs]
    ['layers.0.bias.grad', 'layers.0.weight.grad']
    """

    inputs: Pattern = "*"

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        data = [x for x in with_role(model, Role.DATA) if is_floating(x) and matches(x.name, self.inputs)]
        parameters = with_role(model, Role.PARAMETER)
        outputs = [y for y in with_role(model, Role.PREDICTION) if is_floating(y)]
        seeds = {y: ir.Value(name=seed_of(y), type=y.type, shape=y.shape) for y in outputs}
        for seed in seeds.values():
            state.check_free(model, name_of(seed))
            model.graph.inputs.append(set_role(seed, Role.SEED))
        with Emitter(model) as op:
            gradients = backward(op, model.graph, seeds, [*data, *parameters])
            missing = [lost(parameter) for parameter in parameters if parameter not in gradients]
            if missing:
                raise GraphoptError(f"the outputs do not depend on {', '.join(missing)}: freeze them")
            if not gradients:
                raise GraphoptError(
                    "no gradient to compute: expected parameters, or floating-point inputs that outputs depend on "
                    "differentiably, found none: set inputs, or run Parameters first"
                )
            for x in gradients:
                gradient = op.Identity(gradients[x], _outputs=[gradient_of(x)])
                model.graph.outputs.append(set_role(gradient, Role.GRADIENT))


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
    changes_forward = True

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
                redirect(uses, stopped)
