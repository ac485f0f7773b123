"""Functions of elements, and what moves elements about."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_pad


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


class Erf(OpRun):
    """The reference has float32's digits alone."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> Any:
        return (erf(x),)


class Gelu(OpRun):
    """The reference expands it to its own Erf."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> Any:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + erf(x * math.sqrt(0.5))),)


class Softsign(OpRun):
    """The reference refuses a number without axes."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> Any:
        return (np.asarray(x / (1 + np.abs(x))),)


class LRN(OpRun):
    """The reference takes the batch for the channels."""

    op_domain = ""

    def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> Any:
        channels = np.arange(x.shape[1])
        offset = channels - channels[:, None]
        near = (offset >= -((size - 1) // 2)) & (offset <= size // 2)
        squares = np.einsum("ij,nj...->ni...", near.astype(x.dtype), x * x)
        return (x / (bias + alpha / size * squares) ** beta,)


class LpNormalization(OpRun):
    """The reference sums numbers for p = 1, not their magnitudes."""

    op_domain = ""

    def _run(self, x: np.ndarray, axis: int = -1, p: int = 2) -> Any:
        norm = np.linalg.norm(x, p, axis, keepdims=True)
        return (x / np.where(norm == 0, 1, norm).astype(x.dtype),)


class GatherElements(OpRun):
    """The reference takes no more than 64 elements, and no fewer than there are along the other axes."""

    op_domain = ""

    def _run(self, x: np.ndarray, indices: np.ndarray, axis: int = 0) -> Any:
        places: list[np.ndarray] = list(np.indices(indices.shape))
        places[axis] = indices
        return (x[tuple(places)],)


class Pad(OpRun):
    """The reference refuses negative pads."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        pads: np.ndarray,
        value: np.ndarray | None = None,
        axes: np.ndarray | None = None,
        mode: str = "constant",
    ) -> Any:
        begin, end = np.reshape(pads, (2, -1))
        cut = [slice(None)] * x.ndim
        for axis, first, last in zip(range(x.ndim) if axes is None else axes, begin, end, strict=True):
            cut[axis] = slice(max(-first, 0), x.shape[axis] - max(-last, 0))
        pad: Any = op_pad.Pad_18._run
        return pad(self, x[tuple(cut)], np.maximum(pads, 0), value, axes, mode)


class Unique(OpRun):
    """The reference takes unsorted elements from the first axis, and sorts where nothing else is asked for."""

    op_domain = ""

    def _run(self, x: np.ndarray, axis: int | None = None, sorted: int = 1) -> Any:
        _, first, places, counts = np.unique(x, True, True, True, axis)
        if not sorted:
            order = np.argsort(first)
            first, places, counts = first[order], np.argsort(order)[places], counts[order]
        y = x.reshape(-1)[first] if axis is None else np.take(x, first, axis)
        return (y, first, places.reshape(-1), counts)[: len(self.onnx_node.output)]
