"""Define custom losses, sums of losses, and a loss that the model computes itself."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import onnx_ir as ir
from onnxscript import OnnxFunction

from graphopt.arguments import check_function
from graphopt.errors import GraphoptError, kind_of, unknown
from graphopt.graph.authored import call, floating
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass, Read, retire
from graphopt.graph.roles import Role, role_of, set_role, with_role
from graphopt.graph.traversal import computed_from
from graphopt.graph.values import is_floating, name_of, tensor_type
from graphopt.intervals import within
from passes.augment import share_of_others
from passes.losses.loss import Loss, new_input, report_loss

__all__ = ["CustomLoss", "Losses", "OwnLoss"]


@dataclass(frozen=True)
class CustomLoss(Loss):
    """Compute a function that you write, of a prediction and a target, or of any outputs and inputs that you name.

    The function returns the loss of each element, or of each row.

    Args:
        function: a traced function `f(op, prediction, *other_outputs, *targets)`, an onnxscript function of as many
            inputs, or the name `package.module:function` of either.
        other_outputs: names of outputs that the function takes after the prediction, such as the second one of a pair.
        targets: the type and shape of each new input, by its name, such as `{"label": "int64[N]"}`. A size is a
            number, or a name: that of a dimension of the model, or a new one. By default, one input `target` has the
            type and shape of the prediction. Named targets have no metrics but the loss.

    Raises:
        GraphoptError: a type, a shape or the name of an output is wrong.

    >>> loss = passes.CustomLoss(lambda op, prediction, target: op.Pow(op.Abs(prediction - target), 3))
    >>> step = graphopt.compile(models.linear((1,), 1), loss=loss)
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[2]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])
    8.0
    """

    function: Callable[..., ir.Value] | OnnxFunction[..., Any] | str
    other_outputs: Sequence[str] = ()
    targets: Mapping[str, str] | None = None

    def compare(
        self, op: Emitter, prediction: ir.Value, target: ir.Value | None = None, *operands: ir.Value
    ) -> ir.Value:
        function = pkgutil.resolve_name(self.function) if isinstance(self.function, str) else self.function
        given = [prediction, *([] if target is None else [target]), *operands]
        if isinstance(function, OnnxFunction):
            return op.trace(function, *given)
        check_function(function, "CustomLoss", ("op", *(name_of(x) for x in given)))
        where, due = (
            f"CustomLoss({getattr(function, '__name__', kind_of(function))})",
            f"(op, {', '.join(name_of(x) for x in given)})",
        )
        found = call(function, where, due, (op, *given))
        return floating(found, where, "the loss of each element or of each row")

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        outputs = {name_of(y): y for y in model.graph.outputs}
        for name in self.other_outputs:
            if name not in outputs:
                raise GraphoptError(unknown("CustomLoss: output", name, outputs))
        others = [outputs[name] for name in self.other_outputs]
        if self.targets is None:
            return others + super().operands(model, prediction, target_name)
        what = "CustomLoss(targets)"
        kinds = {name: tensor_type(f"{what}: {name!r}", text) for name, text in self.targets.items()}
        return others + [new_input(model, name, *kind) for name, kind in kinds.items()]


@dataclass(frozen=True)
class Losses(Pass):
    """Sum one loss per output. Each has a separate target `target_OUTPUT` and is reported as `loss_OUTPUT`.

    Args:
        losses: a loss for each output, by the name of the output.
        weights: the factors of the losses in the sum, by the name of the output. The default is 1.

    >>> loss = passes.Losses({"y": passes.MeanSquaredError()}, weights={"y": 0.5})
    >>> graphopt.Executor(graphopt.compile(models.linear((2,), 1), loss=loss, optimizer=passes.SGD(0.1))).reported
    ('loss', 'y', 'loss_y')
    """

    losses: Mapping[str, Loss]
    weights: Mapping[str, float] = within("(-inf, inf)", dict)
    changes_forward = True

    @property
    def learns(self) -> bool:
        return any(isinstance(loss, Loss) and loss.learns for loss in self.losses.values())

    def adapted(self, model: ir.Model, read: Read) -> Losses:
        learning = {y: replace(loss, output=y) for y, loss in self.losses.items() if loss.learns}
        adapted = {y: loss.adapted(model, read, f"target_{y}") for y, loss in learning.items()}
        return replace(self, losses={**self.losses, **adapted})

    def rewrite(self, model: ir.Model) -> None:
        for name, loss in self.losses.items():
            if not isinstance(loss, Loss):
                raise GraphoptError(
                    f"Losses: {name}: expected a loss such as passes.CrossEntropy(), found {kind_of(loss)}"
                )
        unknown = set(self.weights) - set(self.losses)
        if unknown:
            raise GraphoptError(
                f"Losses: weights: expected names of outputs with a loss ({', '.join(self.losses)}), found "
                f"{sorted(unknown)}"
            )
        with Emitter(model) as op:
            total, reported = None, []
            for output, loss in self.losses.items():
                term = replace(loss, output=output).term(model, op, f"target_{output}")
                reported.append(op.Identity(term, _outputs=[f"loss_{output}"]))
                term = term * self.weights.get(output, 1.0)
                total = term if total is None else total + term
            if total is None:
                raise GraphoptError("losses: expected at least one loss, found none: name a loss for an output")
            report_loss(model, op, total)
            model.graph.outputs.extend(set_role(value, Role.METRIC) for value in reported)


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

    output: str | None = None
    sample_weight: str | None = field(default=None, kw_only=True)

    task: ClassVar[str] = "regression"
    changes_forward = True

    def rewrite(self, model: ir.Model) -> None:
        if share_of_others(model) is not None:
            raise GraphoptError(
                "MixUp: expected a loss that compares a prediction with targets, found OwnLoss: leave MixUp out"
            )
        loss = self._loss(model)
        retire(model, loss)
        model.graph.outputs.remove(loss)
        with Emitter(model) as op:
            report_loss(model, op, op.Squeeze(loss) if loss.shape else loss)
        inputs = {name_of(x): x for x in with_role(model, Role.DATA)}
        if self.sample_weight not in (None, *inputs):
            raise GraphoptError(
                f"OwnLoss(sample_weight={self.sample_weight!r}): expected the name of an input, the model has "
                f"{', '.join(inputs)}"
            )
        results = with_role(model, Role.PREDICTION, Role.SOURCE)
        needed = computed_from(results)
        for name, x in inputs.items():
            if name == self.sample_weight:
                set_role(x, Role.SAMPLE_WEIGHT)
            elif results and x not in needed:
                set_role(x, Role.TARGET)

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


def _is_number(y: ir.Value) -> bool:
    return is_floating(y) and y.shape is not None and all(dim == 1 for dim in y.shape)
