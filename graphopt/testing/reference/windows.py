"""Correct transposed convolution and pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class ConvTranspose(OpRun):
    """Separate the channels of groups, which the reference mixes, and accept output padding as large as the stride."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        bias: Any = None,
        *,
        auto_pad: str = "NOTSET",
        group: int = 1,
        kernel_shape: Any = None,
        output_padding: Any = None,
        output_shape: Any = None,
        **geometry: Any,
    ) -> Any:
        n, sizes, kernel = x.ndim - 2, x.shape[2:], w.shape[2:]
        strides, dilations, pads = spacing(n, **geometry)
        more = output_padding or [0] * n
        whole = [(sizes[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 + more[i] for i in range(n)]
        begin, out = pads[:n], [whole[i] - pads[i] - pads[n + i] for i in range(n)]
        if output_shape or auto_pad.startswith("SAME"):
            out = output_shape or [size * stride for size, stride in zip(sizes, strides, strict=True)]
            cut = [max(whole[i] - out[i], 0) for i in range(n)]
            begin = [size // 2 if auto_pad == "SAME_UPPER" else size - size // 2 for size in cut]
        grouped = x.reshape(len(x), group, -1, *sizes)
        weights = w.reshape(group, -1, *w.shape[1:])
        y = np.zeros((len(x), group * w.shape[1], *np.maximum(whole, np.add(begin, out))), x.dtype)
        for tap in np.ndindex(*kernel):
            part = np.einsum("bgc...,gcm->bgm...", grouped, weights[(..., *tap)])
            at: Any = tuple(
                slice(first, first + (size - 1) * stride + 1, stride)
                for first, size, stride in zip(np.multiply(tap, dilations), sizes, strides, strict=True)
            )
            y[(..., *at)] += part.reshape(*y.shape[:2], *sizes)
        crop: Any = tuple(slice(first, first + size) for first, size in zip(begin, out, strict=True))
        y = y[(..., *crop)]
        return (y if bias is None else y + bias.reshape(-1, *[1] * n),)


def spacing(n: int, strides: Any = None, dilations: Any = None, pads: Any = None) -> tuple[list[int], ...]:
    """Return the strides, dilations and pads of `n` axes."""
    return strides or [1] * n, dilations or [1] * n, pads or [0] * 2 * n


def windows(
    x: np.ndarray, kernel: list[int], auto_pad: str = "NOTSET", ceil_mode: int = 0, **geometry: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the elements of each window along a last axis, their positions in a plane, and two masks.

    The first mask selects elements of the input, the second one elements and padding. The last window may extend beyond
    both.
    """
    n, sizes = len(kernel), x.shape[2:]
    strides, dilations, pads = spacing(n, **geometry)
    position: np.ndarray = np.zeros((), np.int64)
    inside, padded = np.ones((), bool), np.ones((), bool)
    for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        extent, begin, end = (kernel[i] - 1) * dilations[i] + 1, pads[i], pads[n + i]
        if auto_pad != "NOTSET":
            same = auto_pad.startswith("SAME")
            total = max((-(-size // stride) - 1) * stride + extent - size, 0) if same else 0
            begin = total - total // 2 if auto_pad == "SAME_LOWER" else total // 2
            end = total - begin
        room = size + begin + end - extent
        count = (-(-room // stride) if ceil_mode else room // stride) + 1
        if ceil_mode and (count - 1) * stride >= size + begin:
            count -= 1
        at = np.arange(count)[:, None] * stride + np.arange(kernel[i]) * dilations[i] - begin
        position = np.add.outer(position * size, np.clip(at, 0, size - 1))
        inside = np.logical_and.outer(inside, (at >= 0) & (at < size))
        padded = np.logical_and.outer(padded, at < size + end)
    windows_first = [*range(0, 2 * n, 2), *range(1, 2 * n, 2)]
    several = (position, inside, padded)
    position, inside, padded = (v.transpose(windows_first).reshape(*v.shape[::2], -1) for v in several)
    return x.reshape(*x.shape[:2], -1)[:, :, position], position, inside, padded


class AveragePool(OpRun):
    """Accept SAME padding with strides that skip elements, which the reference rejects."""

    def _run(self, x: Any, *, kernel_shape: list[int], count_include_pad: int = 0, **geometry: Any) -> Any:
        elements, _, inside, padded = windows(x, kernel_shape, **geometry)
        count = (padded if count_include_pad else inside).sum(-1)
        return ((elements.sum(-1, where=inside) / count).astype(x.dtype),)


class MaxPool(OpRun):
    """Return maxima with their positions, which the reference omits for strides of 1; it also misplaces SAME_LOWER."""

    def _run(self, x: np.ndarray, *, kernel_shape: list[int], storage_order: int = 0, **geometry: Any) -> Any:
        elements, position, inside, _ = windows(x, kernel_shape, **geometry)
        best = np.where(inside, elements, -np.inf).argmax(-1)[..., None]
        y = np.take_along_axis(elements, best, -1)[..., 0]
        if len(self.onnx_node.output) == 1:
            return (y,)
        chosen = np.take_along_axis(np.broadcast_to(position, elements.shape), best, -1)[..., 0]
        sizes = x.shape[2:]
        if storage_order:
            chosen = np.ravel_multi_index(np.unravel_index(chosen, sizes), sizes, order="F")
        planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(sizes))
        return y, planes * np.prod(sizes, dtype=np.int64) + chosen


class LpPool(OpRun):
    """Accept SAME padding with strides that skip elements, which the reference rejects."""

    def _run(self, x: np.ndarray, *, kernel_shape: list[int], p: int = 2, **geometry: Any) -> Any:
        elements, _, inside, _ = windows(x, kernel_shape, **geometry)
        return ((np.abs(elements) ** p).sum(-1, where=inside) ** (1 / p),)


class GlobalMaxPool(OpRun):
    """Reduce any number of axes; the reference assumes images."""

    def _run(self, x: np.ndarray) -> Any:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(OpRun):
    """Implement an operator that the reference lacks."""

    def _run(self, x: np.ndarray, p: int = 2) -> Any:
        return ((np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)
