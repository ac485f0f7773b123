"""Return the gradients of single examples, whole, projected or squared, and keep weights near those of earlier data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph import roles, state
from graphopt.graph.emitter import Emitter
from graphopt.graph.randomness import uniform
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import like, name_of
from graphopt.intervals import within
from passes.gradients.examples import Examples
from passes.gradients.rules.control_flow import scan_over
from passes.regularizers import Regularizer

__all__ = ["ElasticWeights", "ExampleGradients"]

_COLUMNS = 16  # of a projection, which are computed at once
_OF_PROJECTIONS = 2**31 + 8  # random numbers apart from those of training, explanations and noise


@dataclass(frozen=True)
class ExampleGradients(Pass):
    """Add outputs of the gradients of the loss of each example by the parameters. Run it after the loss.

    Args:
        form: `rows` adds `example_gradients` [n, all parameters]; `squares` adds `NAME.fisher` for each parameter NAME,
            the sum over rows of squared gradients.
        project: the number of columns onto which rows are projected by random signs, which keeps inner products in the
            mean (Johnson, Lindenstrauss 1984). None does not project.
        seed: the seed of the signs.

    Raises:
        GraphoptError: the model has no loss, or gradients of examples are refused, as by `PrivateGradient`.

    >>> steps = {"loss": passes.CrossEntropy(), "gradient": passes.ExampleGradients(project=8)}
    >>> [output.name for output in graphopt.compile(models.mlp((4,), 3), **steps).graph.outputs]
    ['loss', 'y', 'example_gradients']
    """

    form: Literal["rows", "squares"] = "rows"
    project: int | None = within("[1, 1000000]", None)
    seed: int = within("[0, inf)", 0)

    def rewrite(self, model: ir.Model) -> None:
        loss = roles.only(model, Role.LOSS, "ExampleGradients")
        parameters = roles.with_role(model, Role.PARAMETER)
        ensure_typed(model)
        with Emitter(model) as op:
            gradients = Examples(op, model, loss, parameters).gradients()
            if self.form == "squares":
                for w, g in gradients.items():
                    name = f"{w.name}.fisher"
                    state.check_free(model, name)
                    total = op.Identity(op.ReduceSumSquare(g, [0], keepdims=0), _outputs=[name])
                    model.graph.outputs.append(roles.set_role(like(total, w), Role.DIAGNOSTIC))
                return
            rows = [op.Reshape(g, [0, -1]) for g in gradients.values()]
            result = op.Concat(*rows, axis=1) if self.project is None else self._projected(op, rows, gradients)
            result = op.Identity(result, _outputs=["example_gradients"])
            model.graph.outputs.append(roles.set_role(result, Role.DIAGNOSTIC))

    def _projected(self, op: Emitter, rows: list[ir.Value], parameters: Iterable[ir.Value]) -> ir.Value:
        """Multiply by random signs, some columns a turn of a Scan, so that never all of them are held."""
        assert self.project is not None
        wide = min(self.project, _COLUMNS)
        sizes = [op.Concat(op.ReduceProd(op.shape_of(w), keepdims=1), [wide], axis=0) for w in parameters]

        def turn(op: Emitter, _: list[ir.Value], numbers: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            sums = []
            for i, (flat, size) in enumerate(zip(rows, sizes, strict=True)):
                drawn = uniform(op, size, numbers[0], self.seed, _OF_PROJECTIONS + i)
                one = op.constant(1.0, like=flat)
                sums.append(op.MatMul(flat, op.Where(op.Less(drawn, 0), op.Neg(one), one)))
            return [], [op.Sum(*sums)]

        numbers = op.constant(np.arange(-(-self.project // wide)))
        (columns,) = scan_over(op, turn, [], [numbers])
        columns = op.Reshape(op.Transpose(columns, perm=[1, 0, 2]), [0, -1])
        return op.Slice(columns, [0], [self.project], [1]) / self.project**0.5


@dataclass(frozen=True)
class ElasticWeights(Regularizer):
    """Hold weights that mattered for earlier data (elastic weight consolidation; Kirkpatrick et al. 2017).

    Add the penalty strength / 2 * sum F (w - w0)^2, for the Fisher information F of the earlier data and the weights w0
    that the file has (https://doi.org/10.1073/pnas.1611835114).

    Args:
        fisher: arrays by the names of parameters, as `graphopt.fisher` returns them. Others move freely.
        strength: the factor of the penalty.

    Raises:
        GraphoptError: as for `Regularizer`; or an array has another shape than its parameter, or its name is none's.

    >>> network = models.mlp((4,), 3)
    >>> rows = {"x": numpy.ones((8, 4), numpy.float32), "target": numpy.arange(8) % 3}
    >>> held = passes.ElasticWeights(graphopt.fisher(network, rows, passes.CrossEntropy()), strength=100.0)
    >>> step = graphopt.compile(network, loss=passes.CrossEntropy(), regularizer=held, optimizer=passes.SGD(0.1))
    """

    fisher: Mapping[str, Any]
    strength: float = within("[0, inf)", 1.0)

    def requires(self, model: ir.Model) -> None:
        super().requires(model)
        known = [*model.graph.initializers, *(x.name or "" for x in model.graph.inputs)]
        for name in self.fisher:
            if name not in known:
                raise GraphoptError(f"ElasticWeights: {unknown('parameter', name, known)}")

    def penalty(self, op: Emitter, w: ir.Value) -> ir.Value:
        start = state.initial(w)
        if w.name not in self.fisher or start is None:
            return op.constant(0.0, like=w)
        information = np.asarray(self.fisher[name_of(w)])
        if information.shape != start.numpy().shape:
            raise GraphoptError(
                f"ElasticWeights: expected the information of {w.name!r} in the shape {list(start.numpy().shape)}, "
                f"found {list(information.shape)}: compute it for this model by graphopt.fisher"
            )
        change = w - op.constant(start.numpy(), like=w)
        return self.strength / 2 * op.ReduceSum(op.constant(information, like=w) * change * change, keepdims=0)
