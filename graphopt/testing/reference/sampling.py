"""Sample between pixels in float64, where the reference uses float32."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_affine_grid, op_grid_sample

from graphopt.testing.reference.windows import spacing


class AffineGrid(OpRun):
    """Return the type of `theta`; the reference returns float32."""

    def _run(self, theta: np.ndarray, size: np.ndarray, align_corners: int = 0) -> Any:
        build: Any = op_affine_grid.construct_original_grid
        return (np.einsum("nij,...j->n...i", theta, build(size[2:], align_corners)).astype(theta.dtype),)


class GridSample(op_grid_sample.GridSample):
    """Sample at positions in their own precision, and clip pixels, not positions, for cubic interpolation at a border.

    PyTorch and ONNX Runtime do the same. The reference has positions in float32, and clips them.
    """

    def _run(self, *args: Any, mode: Any = None, padding_mode: Any = None, align_corners: Any = None) -> Any:
        self._moves = (mode, padding_mode) != ("cubic", "border")
        whole: Any = op_grid_sample.GridSample._run
        return whole(self, *args, mode, padding_mode, align_corners)

    def _prepare_border(self, dims: Any, align_corners: Any) -> Any:
        borders: Any = op_grid_sample.GridSample._prepare_border
        return borders(self, dims, align_corners) if self._moves else np.repeat([-np.inf, np.inf], len(dims))

    def _gs_denormalize_coordinates(self, n: Any, dims: Any, align_corners: Any) -> Any:
        denormalize: Any = self._gs_denormalize
        return np.array([denormalize(v, length, align_corners) for v, length in zip(n, dims, strict=False)])


class DeformConv(OpRun):
    """Sample in the input's precision; the reference samples in float32."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        offset: np.ndarray,
        bias: Any = None,
        mask: Any = None,
        *,
        group: int = 1,
        offset_group: int = 1,
        kernel_shape: Any = None,
        **geometry: Any,
    ) -> Any:
        n = x.ndim - 2
        kernel, out = w.shape[2:], offset.shape[2:]
        strides, dilations, pads = spacing(n, **geometry)
        offset = offset.reshape(len(x), offset_group, -1, n, *out)
        mask = np.ones((1,)) if mask is None else mask.reshape(len(x), offset_group, -1, *out)
        mask = np.broadcast_to(mask, (len(x), offset_group, math.prod(kernel), *out))
        y = np.zeros((len(x), len(w), *out), x.dtype)
        for image, o, c in np.ndindex(len(x), len(w), w.shape[1]):
            channel = o // (len(w) // group) * w.shape[1] + c
            part = channel // (x.shape[1] // offset_group)
            for k, tap in enumerate(np.ndindex(*kernel)):
                for place in np.ndindex(*out):
                    at = offset[(image, part, k, slice(None), *place)] + [
                        place[i] * strides[i] - pads[i] + tap[i] * dilations[i] for i in range(n)
                    ]
                    value = interpolated(x[image, channel], at) * mask[(image, part, k, *place)]
                    y[(image, o, *place)] += value * w[(o, c, *tap)]
        return (y if bias is None else y + bias.reshape(-1, *[1] * n),)


def interpolated(plane: np.ndarray, at: np.ndarray) -> float:
    """Interpolate linearly between the pixels around a position; pixels outside the plane are 0."""
    first, total = np.floor(at).astype(int), 0.0
    for corner in itertools.product((0, 1), repeat=plane.ndim):
        pixel = first + corner
        if np.all(pixel >= 0) and np.all(pixel < plane.shape):
            total += plane[tuple(pixel)] * np.prod(1 - np.abs(at - pixel))
    return total


class MaxRoiPool(OpRun):
    """Implement an operator that the reference lacks."""

    def _run(self, x: np.ndarray, rois: Any, pooled_shape: Any = None, spatial_scale: float = 1) -> Any:
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for roi, (batch, *corners) in enumerate(rois):
            x1, y1, x2, y2 = (math.floor(v * spatial_scale + 0.5) for v in corners)
            spans = [(y1, max(y2 - y1 + 1, 1)), (x1, max(x2 - x1 + 1, 1))]
            for place in np.ndindex(*pooled_shape):
                bounds = [
                    (begin + math.floor(i * size / bins), begin + math.ceil((i + 1) * size / bins))
                    for (begin, size), i, bins in zip(spans, place, pooled_shape, strict=True)
                ]
                window = x[int(batch)][(slice(None), *(slice(max(a, 0), max(b, 0)) for a, b in bounds))]
                if window.size:
                    y[(roi, slice(None), *place)] = window.max(axis=(1, 2))
        return (y,)
