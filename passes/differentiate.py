"""Compute gradients as a graph: for saliency, adversarial examples, physics-informed losses and Hessians."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import DERIVATIVE
from graphopt.graph.rewriting import Pass
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import gradient_of, is_floating, name_of, seed_of
from passes.gradients.walk import backward, zeros


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
                seed = op.Expand(op.constant(1.0, like=y), op.shape_of(y))
                seed.shape = y.shape
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
