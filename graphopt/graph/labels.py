"""Find which labels a loss accepts, from the metadata of its target."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.graph.metadata import TargetSpec


@dataclass(frozen=True)
class Labels:
    """Describe the labels that a loss accepts."""

    low: float
    high: float
    ignored: int | None = None  # a further label, which the loss ignores
    between: bool = True  # accept all numbers between `low` and `high`, too
    several: bool = True  # labels are class numbers; otherwise the two labels of a binary loss

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"labels from {self.low} on"
        return (
            f"labels from {self.low} to {self.high}" if self.several else f"labels {self.low} and {self.high}"
        )

    def all(self) -> np.ndarray:
        """Return all possible labels in order."""
        return np.arange(self.low, self.high + 1) if self.several else np.array([self.low, self.high])

    def fit(self, array: np.ndarray) -> bool:
        """Return whether all labels are valid; for class numbers, by one pass over the array."""
        if self.several and array.dtype.kind == "i" and array.size:
            # As unsigned numbers, negative ones are larger than all others.
            unsigned = array.view(np.dtype(f"u{array.itemsize}"))
            if np.maximum.reduce(unsigned, axis=None) <= self.high:
                return True
        return not self.wrong(array).any()

    def wrong(self, array: np.ndarray) -> np.ndarray:
        """Return a mask of the invalid labels."""
        wrong: np.ndarray = (array < self.low) | (array > self.high)
        if not self.between:
            wrong |= (array != self.low) & (array != self.high)
        if self.ignored is not None:
            wrong &= array != self.ignored
        return wrong


def labels_of(target: ir.Value) -> Labels | None:
    """Return the labels that a target accepts, or None if it does not contain labels."""
    spec = TargetSpec.read(target)
    if spec is None:
        return None
    if spec.task == "classification" and not spec.target_probabilities:
        return Labels(0, math.inf if spec.classes is None else spec.classes - 1, spec.ignore_index)
    if spec.labels is not None:
        low, high = spec.labels
        # Numbers between 0 and 1 are probabilities. Between -1 and 1, they are invalid.
        return Labels(low, high, between=low >= 0, several=False)
    return None
