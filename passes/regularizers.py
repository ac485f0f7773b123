"""Add penalties on parameters to the loss."""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import final

import onnx_ir as ir

from graphopt.graph import roles
from graphopt.graph.authored import ask, name_of_method, scalar
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass, Pattern, no_match, retire, selects
from graphopt.graph.roles import Role
from graphopt.graph.values import name_of
from graphopt.intervals import within

__all__ = ["ElasticPenalty", "L1", "L2", "Regularizer"]


@dataclass(frozen=True)
class Regularizer(Pass):
    """Add to the loss a penalty of the parameters whose names match `parameters`.

    This is the base class of regularizers. A subclass implements `penalty`. A step reports `loss` and its two parts
    `data_loss` and `penalty`. Several regularizers add up.

    Args:
        parameters: shell-style patterns of names, one or several.

    Raises:
        GraphoptError: the model has no loss, no parameter matches, or a strength is negative or not finite.

    >>> class Largest(passes.Regularizer):
    ...     def penalty(self, op, w):
    ...         return op.ReduceMax(op.Abs(w), keepdims=0)
    >>> Largest(parameters="*.weight").parameters
    '*.weight'
    """

    parameters: Pattern = field(default="*", kw_only=True)

    @abstractmethod
    def penalty(self, op: Emitter, w: ir.Value) -> ir.Value:
        """Emit the penalty of a parameter, a scalar."""

    def requires(self, model: ir.Model) -> None:
        roles.only(model, Role.LOSS, type(self).__name__)
        self.precedes_gradient(model)

    @final
    def rewrite(self, model: ir.Model) -> None:
        trained = roles.with_role(model, Role.PARAMETER)
        chosen = [w for w in trained if selects(self.parameters, w)]
        if not chosen:
            where = f"regularizer.parameters={self.parameters!r}"
            raise no_match(where, "parameter", map(name_of, trained))
        loss = roles.only(model, Role.LOSS, type(self).__name__)
        metrics = {value.name: value for value in roles.with_role(model, Role.METRIC)}
        with Emitter(model) as op:
            where, due = name_of_method(self, "penalty"), "the penalty of a parameter"
            terms = [op.cast(scalar(ask(self, "penalty", op, w), where, due), loss.dtype) for w in chosen]
            earlier = metrics.get("penalty")
            total = functools.reduce(operator.add, terms if earlier is None else [earlier, *terms])
            for value in (loss, metrics.get("penalty")):
                if value is not None:
                    model.graph.outputs.remove(value)
                    retire(model, value)
            data_loss = metrics.get("data_loss")
            if data_loss is None:
                data_loss = op.Identity(loss, _outputs=["data_loss"])
                model.graph.outputs.insert(0, roles.set_role(data_loss, Role.METRIC))
            penalty = op.Identity(total, _outputs=["penalty"])
            objective = op.Add(data_loss, penalty, _outputs=["loss"])
            place = list(model.graph.outputs).index(data_loss)
            model.graph.outputs.insert(place, roles.set_role(objective, Role.LOSS))
            model.graph.outputs.insert(place + 2, roles.set_role(penalty, Role.METRIC))


@dataclass(frozen=True)
class L1(Regularizer):
    """Add the penalty strength * sum |w|.

    Args:
        strength: the factor of the sum.

    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), regularizer=passes.L1(1e-3))
    >>> [output.name for output in step.graph.outputs][:3]
    ['loss', 'data_loss', 'penalty']
    """

    strength: float = within("[0, inf)", 1e-4)

    def penalty(self, op: Emitter, w: ir.Value) -> ir.Value:
        return self.strength * op.ReduceSum(op.Abs(w), keepdims=0)


@dataclass(frozen=True)
class L2(Regularizer):
    """Add the penalty strength * sum w^2.

    Args:
        strength: the factor of the sum.

    >>> passes.L2(1e-4, parameters="*.weight")
    L2(parameters='*.weight', strength=0.0001)
    """

    strength: float = within("[0, inf)", 1e-4)

    def penalty(self, op: Emitter, w: ir.Value) -> ir.Value:
        return self.strength * op.ReduceSum(op.Pow(w, 2), keepdims=0)


@dataclass(frozen=True)
class ElasticPenalty(Regularizer):
    """Add the penalty l1 * sum |w| + l2 * sum w^2 (Zou, Hastie 2005).

    Args:
        l1: the factor of the absolute values.
        l2: the factor of the squares.

    >>> passes.ElasticPenalty(l1=1e-4, l2=1e-3)
    ElasticPenalty(parameters='*', l1=0.0001, l2=0.001)
    """

    l1: float = within("[0, inf)", 1e-4)
    l2: float = within("[0, inf)", 1e-4)

    def penalty(self, op: Emitter, w: ir.Value) -> ir.Value:
        absolute, squared = op.ReduceSum(op.Abs(w), keepdims=0), op.ReduceSum(op.Pow(w, 2), keepdims=0)
        return self.l1 * absolute + self.l2 * squared
