"""Losses of predicted classes: of logits, or of probabilities."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.emitter import Emitter
from graphopt.errors import GraphoptError
from passes.losses.loss import Loss, epsilon, positive

__all__ = ["BinaryCrossEntropy", "CrossEntropy", "Hinge", "KLDivergence"]


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
        p = op.Clip(prediction, epsilon(prediction), 1 - epsilon(prediction))
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
        divergence = target * (op.Log(positive(op, target)) - log_p)
        return op.ReduceSum(divergence, [self.axis], keepdims=0)

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        assert prediction.shape is not None
        classes = prediction.shape[self.axis]
        known = classes if isinstance(classes, int) else None
        return {"axis": self.axis, "classes": known, "ignore_index": None, "target_probabilities": True}


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
    return op.Log(positive(op, prediction)) if logits is None else op.LogSoftmax(logits, axis=axis)


def _softplus(op: Emitter, x: ir.Value) -> ir.Value:
    """Emit log(1 + e^x); in double, for which onnxruntime has no Softplus, in parts whose gradients agree at 0."""
    if x.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    return 0.5 * (x + op.Abs(x)) + op.Log(1.0 + op.Exp(-op.Abs(x)))
