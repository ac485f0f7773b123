"""Correct elementwise functions, normalizations and operators that move elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_pad


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


class Erf(OpRun):
    """Compute erf in the input's precision; the reference has only float32's."""

    def _run(self, x: np.ndarray) -> Any:
        return (erf(x),)


class Gelu(OpRun):
    """Compute Gelu with this erf; the reference uses its own."""

    def _run(self, x: np.ndarray, approximate: str = "none") -> Any:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + erf(x * math.sqrt(0.5))),)


class Softsign(OpRun):
    """Accept scalars, which the reference rejects."""

    def _run(self, x: np.ndarray) -> Any:
        return (np.asarray(x / (1 + np.abs(x))),)


class LRN(OpRun):
    """Normalize across channels; the reference mistakes the batch for the channels."""

    def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> Any:
        channels = np.arange(x.shape[1])
        offset = channels - channels[:, None]
        near = (offset >= -((size - 1) // 2)) & (offset <= size // 2)
        squares = np.einsum("ij,nj...->ni...", near.astype(x.dtype), x * x)
        return (x / (bias + alpha / size * squares) ** beta,)


class LpNormalization(OpRun):
    """Sum magnitudes for p = 1; the reference sums signed numbers."""

    def _run(self, x: np.ndarray, axis: int = -1, p: int = 2) -> Any:
        norm = np.linalg.norm(x, p, axis, keepdims=True)
        return (x / np.where(norm == 0, 1, norm).astype(x.dtype),)


class GatherElements(OpRun):
    """Gather any number of elements; the reference accepts at most 64, and as many along other axes as in the data."""

    def _run(self, x: np.ndarray, indices: np.ndarray, axis: int = 0) -> Any:
        places: list[np.ndarray] = list(np.indices(indices.shape))
        places[axis] = indices
        return (x[tuple(places)],)


class Pad(OpRun):
    """Accept negative pads, which the reference rejects."""

    def _run(self, x: Any, pads: Any, value: Any = None, axes: Any = None, mode: str = "constant") -> Any:
        begin, end = np.reshape(pads, (2, -1))
        cut = [slice(None)] * x.ndim
        for axis, first, last in zip(range(x.ndim) if axes is None else axes, begin, end, strict=True):
            cut[axis] = slice(max(-first, 0), x.shape[axis] - max(-last, 0))
        pad: Any = op_pad.Pad_18._run
        return pad(self, x[tuple(cut)], np.maximum(pads, 0), value, axes, mode)


class Unique(OpRun):
    """Find unique elements; the reference gathers unsorted ones along the first axis, and sorts others unasked."""

    def _run(self, x: np.ndarray, axis: int | None = None, sorted: int = 1) -> Any:
        _, first, places, counts = np.unique(x, True, True, True, axis)
        if not sorted:
            order = np.argsort(first)
            first, places, counts = first[order], np.argsort(order)[places], counts[order]
        y = x.reshape(-1)[first] if axis is None else np.take(x, first, axis)
        return (y, first, places.reshape(-1), counts)[: len(self.onnx_node.output)]
