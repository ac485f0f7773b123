"""Define a loss that the model computes itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass, retire
from graphopt.graph.roles import Role, role_of, set_role, with_role
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import is_floating, name_of
from passes.losses.loss import report_loss

__all__ = ["OwnLoss"]


@dataclass(frozen=True)
class OwnLoss(Pass):
    """Minimize an output of the model that is already a loss.

    Inputs that no other output needs become targets: training and evaluation read them, prediction and the trained
    model do not. A model without other outputs keeps its loss as its output `loss`.

    Args:
        output: the name of the output, which has a single element. By default, the only such output.
        sample_weight: the name of an input with a weight for each row.

    Raises:
        GraphoptError: the model has no such output or input, several outputs are possible and none is named, or the
            output is not a single number.

    >>> import onnx
    >>> model = onnx.parser.parse_model(
    ...     '''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N,2] x, float[N,2] t) => (float loss) <float[2] w = {1, 1}> {
    ...         p = Mul(x, w)  d = Sub(p, t)  loss = ReduceL2<keepdims = 0>(d) }'''
    ... )
    >>> step = graphopt.compile(model, loss=passes.OwnLoss(), optimizer=passes.SGD(0.1))
    """

    output: str | None = field(default=None)
    sample_weight: str | None = field(default=None, kw_only=True)

    task: ClassVar[str] = "regression"

    def rewrite(self, model: ir.Model) -> None:
        loss = self._loss(model)
        retire(model, loss)
        model.graph.outputs.remove(loss)
        with Emitter(model) as op:
            report_loss(model, op, op.Squeeze(loss) if loss.shape else loss)
        self._set_roles(model)

    def _loss(self, model: ir.Model) -> ir.Value:
        own = [y for y in model.graph.outputs if role_of(y) in (None, Role.PREDICTION)]
        losses = [y for y in own if (_is_number(y) if self.output is None else y.name == self.output)]
        if len(losses) != 1:
            names = ", ".join(f"{y.name!r} of shape {y.shape}" for y in own)
            raise GraphoptError(
                f"OwnLoss(output={self.output!r}): expected the name of one output that is a number, the model has "
                f"{names}"
            )
        (loss,) = losses
        if not _is_number(loss):
            raise GraphoptError(
                f"OwnLoss(output={self.output!r}): expected a floating number, found {loss.type} of shape "
                f"{loss.shape}: reduce it in the model, or compare it with a target by another loss"
            )
        return loss

    def _set_roles(self, model: ir.Model) -> None:
        inputs = {name_of(x): x for x in with_role(model, Role.DATA)}
        if self.sample_weight not in (None, *inputs):
            raise GraphoptError(
                f"OwnLoss(sample_weight={self.sample_weight!r}): expected the name of an input, the model has "
                f"{', '.join(inputs)}"
            )
        results = with_role(model, Role.PREDICTION, Role.SOURCE)
        needed = {*results, *(x for node in ancestors(results) for x in values_read(node))}
        for name, x in inputs.items():
            if name == self.sample_weight:
                set_role(x, Role.SAMPLE_WEIGHT)
            elif results and x not in needed:
                set_role(x, Role.TARGET)


def _is_number(y: ir.Value) -> bool:
    return is_floating(y) and y.shape is not None and all(dim == 1 for dim in y.shape)
