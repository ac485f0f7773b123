"""Losses: what a prediction costs, given its target.

The base class adds the inputs `target` and `sample_weight`, reduces, and makes the output `loss`; a leaf is its
mathematics, `compare(op, prediction, target)`.
"""

from __future__ import annotations

import json
import pkgutil
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import onnx_ir as ir
from onnxscript import OnnxFunction

from graphopt import state
from graphopt.emitter import Emitter
from graphopt.errors import GraphoptError
from graphopt.rewriting import Pass
from graphopt.roles import METRIC, Role, role_of, set_role, with_role
from passes.gradient.walk import is_differentiable

__all__ = [
    "Loss",
    "MeanSquaredError",
    "MeanAbsoluteError",
    "Elastic",
    "Huber",
    "Quantile",
    "Poisson",
    "Hinge",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "KLDivergence",
    "CustomLoss",
    "Losses",
]


@dataclass(frozen=True)
class Loss(Pass):
    """Compare the model's floating output, or the one named `output`, with a new input `target`.

    Args:
        output: the name of the output to compare, where the model has several floating ones.
        reduction: `mean` over all elements (weighted, where there are weights) or `sum`.
        sample_weight: add an input `sample_weight`, a weight a row: `mean` is then the weighted mean.

    Raises:
        GraphoptError: `output` is no floating output of the model, or is not said and there are several.
    """

    output: str | None = field(default=None, kw_only=True)
    reduction: Literal["mean", "sum"] = field(default="mean", kw_only=True)
    sample_weight: bool = field(default=False, kw_only=True)

    task: ClassVar[str] = "regression"

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise GraphoptError(f"reduction: expected 'mean' or 'sum', found {self.reduction!r}")

    @final
    def rewrite(self, model: ir.Model) -> None:
        with Emitter(model) as op:
            report_loss(model, op, self.term(model, op))

    @final
    def term(self, model: ir.Model, op: Emitter, target_name: str = "target") -> ir.Value:
        """Add the target's input and emit the reduced loss, a scalar."""
        prediction = self._prediction(model)
        target = self._target(model, op, prediction, target_name)
        elements = self.compare(op, prediction, target)
        weights = self.weight(op, prediction, target)
        if self.sample_weight:
            rows = _along_rows(op, _sample_weight(model, prediction), elements)
            elements = elements * rows
            weights = rows if weights is None else weights * rows
        total = op.ReduceSum(elements, keepdims=0)
        if self.reduction == "sum":
            return total
        if weights is None:
            return op.ReduceMean(elements, keepdims=0)
        if weights.shape != elements.shape:
            weights = op.Expand(weights, op.shape_of(elements))
        return total / op.ReduceSum(weights, keepdims=0)

    @abstractmethod
    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        """Emit the loss of each element, or of each row."""

    def weight(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value | None:
        """Emit what each element counts in the mean, of the shape of `compare`'s result; None: 1 each."""
        return None

    def target_type(self, prediction: ir.Value) -> tuple[ir.DataType, ir.Shape]:
        """Return the target's element type and shape; those of the prediction by default."""
        assert prediction.dtype is not None and prediction.shape is not None
        return prediction.dtype, prediction.shape

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        """Return what a metric must know of the target, beside its task."""
        return {}

    def _prediction(self, model: ir.Model) -> ir.Value:
        own = (v for v in model.graph.outputs if role_of(v) in (None, Role.PREDICTION))
        floating = [value for value in own if is_differentiable(value)]
        outputs = floating
        if self.output is not None:
            outputs = [value for value in outputs if value.name == self.output]
        if len(outputs) != 1:
            names = [value.name for value in floating]
            raise GraphoptError(
                f"loss.output={self.output!r}: expected the name of one floating output, the model has {names}; "
                f"for a loss on several use passes.Losses"
            )
        return outputs[0]

    def _target(self, model: ir.Model, op: Emitter, prediction: ir.Value, name: str) -> ir.Value:
        state.check_free(model, name)
        dtype, shape = self.target_type(prediction)
        target = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
        target.metadata_props[METRIC] = json.dumps(
            {"task": self.task, "output": prediction.name, **self.metric(prediction)}
        )
        model.graph.inputs.append(set_role(target, Role.TARGET))
        return target


def report_loss(model: ir.Model, op: Emitter, loss: ir.Value) -> None:
    """Make `loss` the objective and the first output."""
    if with_role(model, Role.LOSS):
        raise GraphoptError(
            "the model already has a loss: one loss pass a pipeline; for several outputs use Losses"
        )
    state.check_free(model, "loss")
    loss = op.Identity(loss, _outputs=["loss"])
    model.graph.outputs.insert(0, set_role(loss, Role.LOSS))


def _sample_weight(model: ir.Model, prediction: ir.Value) -> ir.Value:
    """Return the input `sample_weight`, one weight a row, shared by all losses."""
    found = with_role(model, Role.SAMPLE_WEIGHT)
    if found:
        return found[0]
    assert prediction.shape is not None
    state.check_free(model, "sample_weight")
    value = ir.Value(name="sample_weight", type=prediction.type, shape=ir.Shape([prediction.shape[0]]))
    model.graph.inputs.append(set_role(value, Role.SAMPLE_WEIGHT))
    return value


def _along_rows(op: Emitter, weights: ir.Value, elements: ir.Value) -> ir.Value:
    assert elements.shape is not None
    rank = len(elements.shape)
    return weights if rank < 2 else op.Unsqueeze(weights, [*range(1, rank)])


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """(p - t)^2."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Pow(prediction - target, 2)


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    """|p - t|."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Abs(prediction - target)


@dataclass(frozen=True)
class Elastic(Loss):
    """l1 |p - t| + l2 (p - t)^2."""

    l1: float = 0.5
    l2: float = 0.5

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        difference = prediction - target
        return self.l1 * op.Abs(difference) + self.l2 * op.Pow(difference, 2)


@dataclass(frozen=True)
class Huber(Loss):
    """d^2 / 2 where d = |p - t| is at most `delta`, delta (d - delta / 2) beyond (Huber 1964)."""

    delta: float = 1.0

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        distance = op.Abs(prediction - target)
        near = op.Min(distance, self.delta)
        return near * (distance - 0.5 * near)


@dataclass(frozen=True)
class Quantile(Loss):
    """The pinball loss max(q (t - p), (q - 1) (t - p)), whose minimum is the `quantile` q (Koenker, Bassett 1978)."""

    quantile: float = 0.5

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        difference = target - prediction
        return op.Max(self.quantile * difference, (self.quantile - 1) * difference)


@dataclass(frozen=True)
class Poisson(Loss):
    """The negative log-likelihood of counts t, without its constant: e^p - t p, or p - t log p of rates p.

    Args:
        log_rates: the model predicts the logarithms of rates, not rates.
    """

    log_rates: bool = True

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        if self.log_rates:
            return op.Exp(prediction) - target * prediction
        return prediction - target * op.Log(_positive(op, prediction))


@dataclass(frozen=True)
class Hinge(Loss):
    """max(0, 1 - t p), of targets -1 and 1."""

    task = "binary"

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Relu(1 - target * prediction)

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        return {"threshold": 0.0, "labels": [-1, 1]}


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """-t log p - (1 - t) log(1 - p), of targets from 0 to 1.

    Args:
        from_logits: the model predicts logits, p = sigmoid(x): softplus(x) - t x, which no x makes overflow;
            otherwise probabilities, which are clipped away from 0 and 1 unless a Sigmoid makes them.
    """

    from_logits: bool = True

    task = "binary"

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        logits = _logits(prediction, "Sigmoid", self.from_logits)
        if logits is not None:
            return _softplus(op, logits) - target * logits
        p = op.Clip(prediction, _epsilon(prediction), 1 - _epsilon(prediction))
        return -(target * op.Log(p) + (1 - target) * op.Log(1 - p))

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        return {"threshold": 0.0 if self.from_logits else 0.5, "labels": [0, 1]}


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-sum_c q_c w_c log p_c over the classes c along `axis`.

    Args:
        axis: the axis of the classes.
        from_logits: the model predicts logits, p = softmax(x); otherwise probabilities, which are clipped away from
            0 unless a Softmax makes them.
        target_probabilities: targets are probabilities of the prediction's shape; otherwise int64 class numbers of
            its shape without `axis`.
        label_smoothing: the share of q spread over all classes (Szegedy et al. 2016).
        class_weights: a weight w a class; the mean over integer targets is weighted by their classes' weights.
        ignore_index: integer targets of this number cost nothing and count for nothing.
    """

    axis: int = 1
    from_logits: bool = True
    target_probabilities: bool = False
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None

    task = "classification"

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        log_p = _log_probabilities(op, prediction, self.from_logits, self.axis)
        q = target if self.target_probabilities else self._one_hot(op, prediction, target)
        if self.label_smoothing:
            whole = op.ReduceSum(q, [self.axis]) if self.ignore_index is not None else 1.0
            q = (1 - self.label_smoothing) * q + whole * (self.label_smoothing / self._classes(prediction))
        if self.class_weights is not None:
            q = q * self._weights(op, prediction)
        return -op.ReduceSum(q * log_p, [self.axis], keepdims=0)

    def weight(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value | None:
        if self.target_probabilities or (self.class_weights is None and self.ignore_index is None):
            return None
        q = self._one_hot(op, prediction, target)
        if self.class_weights is not None:
            q = q * self._weights(op, prediction)
        return op.ReduceSum(q, [self.axis], keepdims=0)

    def target_type(self, prediction: ir.Value) -> tuple[ir.DataType, ir.Shape]:
        if self.target_probabilities:
            return super().target_type(prediction)
        assert prediction.shape is not None
        dims = list(prediction.shape)
        if not -len(dims) <= self.axis < len(dims):
            raise GraphoptError(
                f"loss.axis={self.axis}: the prediction {prediction.name!r} has {len(dims)} axes"
            )
        del dims[self.axis]
        return ir.DataType.INT64, ir.Shape(dims)

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "classes": self._classes(prediction),
            "ignore_index": self.ignore_index,
            "target_probabilities": self.target_probabilities,
        }

    def _classes(self, prediction: ir.Value) -> int:
        assert prediction.shape is not None
        classes = prediction.shape[self.axis]
        if not isinstance(classes, int):
            raise GraphoptError(
                f"CrossEntropy: expected a known number of classes along axis {self.axis} of {prediction.name!r}, "
                f"found shape {prediction.shape}: set loss.axis"
            )
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise GraphoptError(
                f"loss.class_weights: expected {classes} numbers, one a class, found {len(self.class_weights)}"
            )
        return classes

    def _along_axis(self, array: np.ndarray, prediction: ir.Value) -> np.ndarray:
        assert prediction.shape is not None
        rank = len(prediction.shape)
        return array.reshape([-1 if axis == self.axis % rank else 1 for axis in range(rank)])

    def _one_hot(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        classes = op.constant(self._along_axis(np.arange(self._classes(prediction)), prediction))
        hot: ir.Value = op.Cast(op.Equal(op.Unsqueeze(target, [self.axis]), classes), to=prediction.dtype)
        if self.ignore_index is not None and 0 <= self.ignore_index < self._classes(prediction):
            hot = hot * op.Cast(
                op.Not(op.Equal(op.Unsqueeze(target, [self.axis]), self.ignore_index)), to=hot.dtype
            )
        return hot

    def _weights(self, op: Emitter, prediction: ir.Value) -> ir.Value:
        self._classes(prediction)
        return op.constant(
            self._along_axis(np.array(self.class_weights), prediction).tolist(), like=prediction
        )


@dataclass(frozen=True)
class KLDivergence(Loss):
    """sum_c t_c (log t_c - log p_c), of target probabilities t, over the classes c along `axis`.

    Args:
        from_logits: the model predicts logits, p = softmax(x); otherwise probabilities.
    """

    axis: int = 1
    from_logits: bool = True

    task = "classification"

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        log_p = _log_probabilities(op, prediction, self.from_logits, self.axis)
        divergence = target * (op.Log(_positive(op, target)) - log_p)
        return op.ReduceSum(divergence, [self.axis], keepdims=0)

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        assert prediction.shape is not None
        classes = prediction.shape[self.axis]
        known = classes if isinstance(classes, int) else None
        return {"axis": self.axis, "classes": known, "ignore_index": None, "target_probabilities": True}


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
    weights: Mapping[str, float] = field(default_factory=dict)

    def rewrite(self, model: ir.Model) -> None:
        unknown = set(self.weights) - set(self.losses)
        if unknown:
            raise GraphoptError(
                f"losses.weights: {sorted(unknown)} have no loss; known: {', '.join(self.losses)}"
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


def _logits(
    prediction: ir.Value, activation: str, from_logits: bool, axis: int | None = None
) -> ir.Value | None:
    """Return the logits behind a prediction, or None where they cannot be seen."""
    node = prediction.producer()
    activated = node is not None and node.op_type == activation and node.domain == ""
    if activated and axis is not None:
        assert node is not None and prediction.shape is not None
        rank = len(prediction.shape)
        activated = node.attributes.get_int("axis", -1) % rank == axis % rank
    if from_logits:
        if activated:
            warnings.warn(
                f"{prediction.name!r} comes out of {activation}, and the loss takes it for logits: "
                f"set loss.from_logits=false",
                stacklevel=2,
            )
        return prediction
    return node.inputs[0] if node is not None and activated else None


def _log_probabilities(op: Emitter, prediction: ir.Value, from_logits: bool, axis: int) -> ir.Value:
    logits = _logits(prediction, "Softmax", from_logits, axis)
    return op.Log(_positive(op, prediction)) if logits is None else op.LogSoftmax(logits, axis=axis)


def _softplus(op: Emitter, x: ir.Value) -> ir.Value:
    """Emit log(1 + e^x); in double, for which onnxruntime has no Softplus, in parts whose gradients agree at 0."""
    if x.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    return 0.5 * (x + op.Abs(x)) + op.Log(1.0 + op.Exp(-op.Abs(x)))


def _epsilon(value: ir.Value) -> float:
    assert value.dtype is not None
    return float(np.finfo(value.dtype.numpy()).eps)


def _positive(op: Emitter, value: ir.Value) -> ir.Value:
    return op.Max(value, _epsilon(value))
