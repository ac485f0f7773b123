"""Define the base class of losses, and losses of predicted numbers, rates and quantiles."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, final

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, some
from graphopt.graph import state
from graphopt.graph.authored import ask, floating, name_of_method, told
from graphopt.graph.classified import Derived
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.rewriting import Pass, Read
from graphopt.graph.roles import Role, TargetSpec, role_of, set_role, with_role
from graphopt.graph.values import dims_of, dtype_of, is_floating, name_of
from graphopt.intervals import within
from passes.augment import before, mixed, share_of_others

__all__ = ["Elastic", "Huber", "Loss", "MeanAbsoluteError", "MeanSquaredError", "Poisson", "Quantile"]


@dataclass(frozen=True)
class Loss(Pass):
    """Compare the model's floating-point output, or the one named `output`, with a new input `target`.

    This is the base class of losses. A subclass implements `compare`.

    Args:
        output: the name of the output to compare, if the model has several floating-point ones.
        reduction: `mean` over all elements (weighted, if there are weights) or `sum`. `none` reports a loss per row,
            the mean of its elements, which has no gradient.
        sample_weight: add an input `sample_weight` with one weight per row, and let `mean` be the weighted mean.

    Raises:
        GraphoptError: a number is outside its interval; `output` is not a floating-point output of the model, or is
            missing although the model has several.

    >>> class Cubed(passes.Loss):
    ...     def compare(self, op, prediction, target):
    ...         return op.Pow(op.Abs(prediction - target), 3)
    >>> Cubed(reduction="sum").reduction
    'sum'
    """

    output: str | None = field(default=None, kw_only=True)
    reduction: Literal["mean", "sum", "none"] = field(default="mean", kw_only=True)
    sample_weight: bool = field(default=False, kw_only=True)

    task: ClassVar[str] = "regression"
    changes_forward = True

    def adapted(self, model: ir.Model, read: Read, target_name: str = "target") -> Loss:
        return self

    @final
    def rewrite(self, model: ir.Model) -> None:
        with Emitter(model) as op:
            report_loss(model, op, self.term(model, op))

    @final
    def term(self, model: ir.Model, op: Emitter, target_name: str = "target") -> ir.Value:
        """Add the target's input and emit the reduced loss, a scalar or one number per row."""
        prediction = self._prediction(model)
        operands = self.operands(model, prediction, target_name)
        rows = None
        if self.sample_weight:
            rows = _sample_weight(model, self.rows_of(prediction, operands), self.row_axis)
        share = share_of_others(model)
        if share is None:
            elements, weights = self._weighted(op, prediction, operands, rows)
        else:
            elements, weights = self._mixed(op, prediction, operands, rows, share)
        if self.reduction == "none":
            axes = [*range(1, len(dims_of(elements)))]
            return op.ReduceMean(elements, axes, keepdims=0) if axes else elements
        total = op.ReduceSum(elements, keepdims=0)
        if self.reduction == "sum":
            BATCH_WEIGHT.write(total, "sum")
            return total
        if weights is None:
            mean = op.ReduceMean(elements, keepdims=0)
            BATCH_WEIGHT.write(mean, "rows")
            return mean
        if weights.shape != elements.shape:
            weights = op.Expand(weights, op.shape_of(elements))
        BATCH_WEIGHT.write(weights, "mean")
        least = float(np.finfo(dtype_of(weights).numpy()).tiny)
        return total / op.Max(op.ReduceSum(weights, keepdims=0), least)  # 0 if no row has a weight

    def _weighted(
        self, op: Emitter, prediction: ir.Value, operands: Sequence[ir.Value], rows: ir.Value | None
    ) -> tuple[ir.Value, ir.Value | None]:
        """Emit the losses times their weights, and the weights, if there are any; `rows` has those of rows."""
        elements = _elements(self, ask(self, "compare", op, prediction, *operands))
        weights = ask(self, "weight", op, prediction, *operands) if operands else None
        if weights is not None:
            weights = _weights(self, weights, elements)
        if rows is not None:
            rank = len(elements.shape or ())
            rows = op.Unsqueeze(rows, [*range(1, rank)]) if rank > 1 else rows
            elements = elements * rows
            weights = rows if weights is None else weights * rows
        return elements, weights

    def _mixed(
        self,
        op: Emitter,
        prediction: ir.Value,
        operands: Sequence[ir.Value],
        rows: ir.Value | None,
        share: ir.Value,
    ) -> tuple[ir.Value, ir.Value | None]:
        """Emit the losses and weights of rows that have a share of the rows before them; see `MixUp`."""
        if not operands or any(role_of(x) is not Role.TARGET for x in operands):
            raise GraphoptError(
                f"MixUp: expected a loss that compares a prediction with targets, found {type(self).__name__}: leave "
                "MixUp out"
            )

        def both(x: ir.Value) -> ir.Value:
            return mixed(op, x, before(op, x), share)

        if self.task == "regression" and all(map(is_floating, operands)):
            weights = None if rows is None else both(rows)
            return self._weighted(op, prediction, [both(x) for x in operands], weights)
        others = None if rows is None else before(op, rows)
        own = self._weighted(op, prediction, operands, rows)
        other = self._weighted(op, prediction, [before(op, x) for x in operands], others)
        elements = mixed(op, own[0], other[0], share)
        return elements, None if own[1] is None or other[1] is None else mixed(op, own[1], other[1], share)

    @abstractmethod
    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        """Emit the loss of each element or of each row.

        A loss with other `operands` takes these in place of the target.
        """

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        """Return what the prediction is compared with, by default a new input for the target."""
        dtype, shape = _target_type(self, prediction)
        target = new_input(model, target_name, dtype, shape)
        _spec(self, prediction).write(target)
        return [target]

    def weight(self, op: Emitter, prediction: ir.Value, target: ir.Value, *others: ir.Value) -> ir.Value | None:
        """Emit the weight of each element in the mean, in the shape of `compare`'s result; None means equal weights."""
        return None

    def target_type(self, prediction: ir.Value) -> tuple[ir.DataType, ir.Shape]:
        """Return the element type and shape of the target, by default those of the prediction."""
        return dtype_of(prediction), ir.Shape(dims_of(prediction))

    def rows_of(self, prediction: ir.Value, operands: Sequence[ir.Value]) -> ir.Value:
        """Return the value that has a row for each loss, by default the prediction."""
        return prediction

    @property
    def row_axis(self) -> int:
        """Return the axis of the rows in the prediction."""
        return 0

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        """Return what a metric needs to know about the target in addition to its task."""
        return {}

    def _prediction(self, model: ir.Model) -> ir.Value:
        own = (v for v in model.graph.outputs if role_of(v) in (None, Role.PREDICTION))
        floating = [value for value in own if is_floating(value)]
        named = self.output is not None
        outputs = [y for y in floating if (y.name == self.output if named else not Derived.is_on(y))]
        if len(outputs) != 1:
            raise GraphoptError(_choice(type(self).__name__, self.output, floating))
        (prediction,) = outputs
        if prediction.shape is None:
            raise GraphoptError(
                f"{type(self).__name__} needs the rank of {prediction.name!r}, which could not be inferred: declare "
                f"the output's shape"
            )
        if len(prediction.shape) == 0:
            warnings.warn(
                f"{type(self).__name__} compares {prediction.name!r}, which is one number, with a target: if it is "
                f"a loss, train with passes.OwnLoss({prediction.name!r})",
                stacklevel=2,
            )
        return prediction


def new_input(model: ir.Model, name: str, dtype: ir.DataType, shape: ir.Shape, role: Role = Role.TARGET) -> ir.Value:
    """Add an input to the graph."""
    state.check_free(model, name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
    model.graph.inputs.append(set_role(value, role))
    return value


def _elements(loss: Loss, found: object) -> ir.Value:
    """Return the losses that `compare` has returned."""
    where, due = name_of_method(loss, "compare"), "the loss of each element or of each row"
    elements = floating(found, where, due)
    uses_rows = loss.sample_weight or loss.reduction != "mean"
    if uses_rows and elements.shape is not None and len(elements.shape) == 0:
        option = "sample_weight=True" if loss.sample_weight else f"reduction={loss.reduction!r}"
        raise GraphoptError(
            f"{where}: expected {due}, which {option} needs, found one number: return the losses, which the base "
            "class reduces"
        )
    return elements


def _weights(loss: Loss, found: object, elements: ir.Value) -> ir.Value:
    where, due = name_of_method(loss, "weight"), "the weight of each element, or None"
    weights = floating(found, where, due)
    if None not in (weights.shape, elements.shape) and len(weights.shape or ()) > len(elements.shape or ()):
        raise GraphoptError(
            f"{where}: expected {due}, in the shape of the losses, {told(elements)}, found {told(weights)}"
        )
    return weights


def _target_type(loss: Loss, prediction: ir.Value) -> tuple[ir.DataType, ir.Shape]:
    """Return what `target_type` has returned, an element type and a shape."""
    found, where = ask(loss, "target_type", prediction), name_of_method(loss, "target_type")
    due = "an element type and a shape, such as (onnx_ir.DataType.INT64, onnx_ir.Shape(prediction.shape[:1]))"
    if not (isinstance(found, tuple) and len(found) == 2):
        raise GraphoptError(f"{where}: expected {due}, found {told(found)}")
    dtype, shape = found
    if not isinstance(dtype, ir.DataType):
        raise GraphoptError(f"{where}: expected {due}, found {told(dtype)} in place of the type")
    if not isinstance(shape, ir.Shape | list | tuple) or not all(
        isinstance(size, int | str | ir.SymbolicDim | None) for size in shape
    ):
        raise GraphoptError(f"{where}: expected {due}, found {told(shape)} in place of the shape")
    return dtype, ir.Shape(list(shape))


def _spec(loss: Loss, prediction: ir.Value) -> TargetSpec:
    """Return what metrics know of a target, from `task` and what `metric` has returned."""
    found, name = ask(loss, "metric", prediction), type(loss).__name__
    known = [field.name for field in fields(TargetSpec)][2:]
    if not isinstance(found, Mapping) or not all(key in known for key in found):
        keys = f"a dict of {', '.join(map(str, found))}" if isinstance(found, Mapping) else told(found)
        raise GraphoptError(f"{name}.metric: expected a dict of any of {', '.join(known)}, found {keys}")
    spec = TargetSpec(name_of(prediction), loss.task, **found)
    try:
        spec.check()
    except (KeyError, ValueError):
        given = ", ".join(map(str, found)) or "none of these"
        raise GraphoptError(
            f"{name}: expected the task 'regression', 'classification' with an axis, which `metric` returns, or "
            f"'binary' with a threshold and labels, found {loss.task!r} with {given}"
        ) from None
    return spec


def _choice(loss: str, output: str | None, outputs: Sequence[ir.Value]) -> str:
    """Describe which outputs a loss can compare, and how to name one."""
    if not outputs:
        return f"{loss}: expected a floating-point output, the model has none: declare the prediction as an output"
    shapes = [f"{y.name!r} {'' if y.shape is None else list(map(str, y.shape))}".replace("'", "") for y in outputs]
    first = min(outputs, key=lambda y: y.name != "logits").name  # else the first one
    return (
        f"{loss}: output={output!r}: expected the name of one floating-point output, the model has {some(shapes, 6)}: "
        f"write loss.output={first} (in Python, passes.{loss}(output={first!r})), or use passes.Losses for several "
        f"outputs, or passes.OwnLoss if the model has a loss"
    )


def report_loss(model: ir.Model, op: Emitter, loss: ir.Value) -> None:
    """Make `loss` the objective and the first output."""
    if with_role(model, Role.LOSS):
        raise GraphoptError(
            "the model already has a loss: use one loss pass per pipeline; for several outputs use Losses"
        )
    state.check_free(model, "loss")
    loss = op.Identity(loss, _outputs=["loss"])
    model.graph.outputs.insert(0, set_role(loss, Role.LOSS))


def _sample_weight(model: ir.Model, prediction: ir.Value, row_axis: int) -> ir.Value:
    """Return the input `sample_weight`, with one weight per row, which all losses share."""
    weights = with_role(model, Role.SAMPLE_WEIGHT)
    if weights:
        return weights[0]
    shape = ir.Shape([dims_of(prediction)[row_axis]])
    return new_input(model, "sample_weight", dtype_of(prediction), shape, Role.SAMPLE_WEIGHT)


def epsilon(value: ir.Value) -> float:
    """Return the distance from 1 to the next number in the element type of `value`."""
    return float(np.finfo(dtype_of(value).numpy()).eps)


def positive(op: Emitter, value: ir.Value) -> ir.Value:
    """Clip `value` away from 0 so that its logarithm is finite."""
    return op.Max(value, epsilon(value))


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """Compute (p - t)^2, for a prediction p and a target t.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError())
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.float32([[1], [3]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    5.0
    """

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Pow(prediction - target, 2)


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    """Compute |p - t|, for a prediction p and a target t.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanAbsoluteError())
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.float32([[1], [3]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    2.0
    """

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Abs(prediction - target)


@dataclass(frozen=True)
class Elastic(Loss):
    """Compute l1 |p - t| + l2 (p - t)^2, for a prediction p and a target t.

    Args:
        l1: the factor of the absolute error.
        l2: the factor of the squared error.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Elastic(l1=1.0, l2=0.5))
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[2]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    4.0
    """

    l1: float = within("[0, inf)", 0.5)
    l2: float = within("[0, inf)", 0.5)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        difference = prediction - target
        return self.l1 * op.Abs(difference) + self.l2 * op.Pow(difference, 2)


@dataclass(frozen=True)
class Huber(Loss):
    """Compute d^2 / 2 if d = |p - t| is at most `delta`, and delta (d - delta / 2) beyond (Huber 1964).

    Args:
        delta: the error beyond which the loss is linear.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Huber(delta=1.0))
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[3]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    2.5
    """

    delta: float = within("(0, inf)", 1.0)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        distance = op.Abs(prediction - target)
        near = op.Min(distance, self.delta)
        return near * (distance - 0.5 * near)


@dataclass(frozen=True)
class Quantile(Loss):
    """Compute the pinball loss max(q (t - p), (q - 1) (t - p)), minimal at the quantile q (Koenker, Bassett 1978).

    Args:
        quantile: the quantile q to predict, between 0 and 1.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Quantile(0.75))
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.float32([[1], [-1]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the mean of 0.75 and 0.25
    0.5
    """

    quantile: float = within("(0, 1)", 0.5)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        difference = target - prediction
        return op.Max(self.quantile * difference, (self.quantile - 1) * difference)


@dataclass(frozen=True)
class Poisson(Loss):
    """Compute the negative log-likelihood of counts t without its constant: e^p - t p, or p - t log p for rates p.

    Args:
        log_rates: the model predicts the logarithms of rates, not rates.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Poisson())
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[2]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts a rate of 1
    1.0
    """

    log_rates: bool = True

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        if self.log_rates:
            return op.Exp(prediction) - target * prediction
        return prediction - target * op.Log(positive(op, prediction))
