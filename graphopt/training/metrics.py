"""Compute metrics of predictions batch by batch. The target's metadata determines the metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from graphopt.graph.metadata import TargetSpec
from graphopt.graph.roles import Role, role_of


class Metric(Protocol):
    """Accumulate batches and return metrics by name."""

    def add(self, prediction: np.ndarray, target: np.ndarray) -> None: ...

    def result(self) -> dict[str, float]: ...

    def predicted(self, prediction: np.ndarray) -> np.ndarray: ...


class Accuracy:
    """Compute the share of predictions that equal the target.

    Args:
        spec: the specification of the target of a classification.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._right = self._count = 0

    def add(self, prediction: np.ndarray, target: np.ndarray) -> None:
        if self._spec.labels is not None:
            low, high = self._spec.labels
            target = np.where(target > (low + high) / 2, high, low)
        elif self._spec.target_probabilities:
            target = np.asarray(target.argmax(self._spec.axis))
        right = self.predicted(prediction) == target
        if self._spec.ignore_index is not None:
            right = right[target != self._spec.ignore_index]
        self._right += int(right.sum())
        self._count += right.size

    def result(self) -> dict[str, float]:
        return {"accuracy": self._right / self._count} if self._count else {}

    def predicted(self, prediction: np.ndarray) -> np.ndarray:
        """Return the predicted labels or class numbers."""
        if self._spec.labels is not None:
            low, high = self._spec.labels
            return np.where(prediction > self._spec.threshold, high, low)
        return np.asarray(prediction.argmax(self._spec.axis))


def r2(squared_error: np.ndarray, spread: np.ndarray) -> float:
    """Return the mean coefficient of determination over columns, as scikit-learn's `r2_score` does.

    Args:
        squared_error: the sum of squared errors of each column.
        spread: the sum of squared differences from the mean of each column. A column without spread counts as 1
            without errors, and as 0 with errors.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = np.where(spread > 0, 1 - squared_error / spread, np.where(squared_error > 0, 0.0, 1.0))
    return float(np.mean(columns))


def weighted_r2(predicted: np.ndarray, target: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the coefficient of determination of weighted rows."""
    mean = np.average(target, axis=0, weights=weights)
    return r2(
        *(
            np.average(difference**2, axis=0, weights=weights)
            for difference in (target - predicted, target - mean)
        )
    )


def weighted_accuracy(predicted: np.ndarray, target: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the share of correct labels, averaged over weighted rows."""
    right = (predicted == target).reshape(len(target), -1).mean(axis=1)
    return float(np.average(right, weights=weights))


class Regression:
    """Compute R2 as the mean over columns, and the mean absolute error."""

    def __init__(self) -> None:
        self._rows = 0
        self._shift: np.ndarray | None = None
        self._absolute: Any = 0.0
        self._squared: Any = 0.0
        self._sum: Any = 0.0
        self._square: Any = 0.0

    def add(self, prediction: np.ndarray, target: np.ndarray) -> None:
        prediction, target = (np.reshape(a, (len(a), -1)).astype(np.float64) for a in (prediction, target))
        if self._shift is None:  # close to the mean, so that the difference of sums in `result` is accurate
            self._shift = target.mean(axis=0)
        self._rows += len(target)
        self._absolute += np.abs(prediction - target).sum(axis=0)
        self._squared += ((prediction - target) ** 2).sum(axis=0)
        self._sum += (target - self._shift).sum(axis=0)
        self._square += ((target - self._shift) ** 2).sum(axis=0)

    def result(self) -> dict[str, float]:
        if not self._rows:
            return {}
        spread = np.maximum(self._square - self._sum**2 / self._rows, 0)
        return {"r2": r2(self._squared, spread), "mae": float(np.mean(self._absolute / self._rows))}

    def predicted(self, prediction: np.ndarray) -> np.ndarray:
        """Return the prediction itself."""
        return prediction


def metrics(inputs: Mapping[str, ir.Value]) -> dict[str, tuple[str, Metric]]:
    """Return the output to compare and a new metric for each target among a training graph's inputs."""
    chosen: dict[str, tuple[str, Metric]] = {}
    for name, value in inputs.items():
        spec = TargetSpec.read(value) if role_of(value) is Role.TARGET else None
        if spec is not None:
            chosen[name] = spec.output, Regression() if spec.task == "regression" else Accuracy(spec)
    return chosen
