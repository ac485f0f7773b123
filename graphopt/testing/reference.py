"""Replace operators of ONNX's reference evaluator that onnx 1.23 computes wrongly, partly or only in float32."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_affine_grid, op_grid_sample, op_pad

# --- Elementwise functions, normalizations and operators that move elements ---


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


# --- Loops ---


class _WithBody(OpRun):
    body: Any
    _run_body: Any

    def need_context(self) -> bool:
        return True


class Scan(_WithBody):
    """Support axes and directions, which the reference lacks."""

    def _run(self, *args: Any, context: Any = None, bindings: Any = None, **attributes: Any) -> Any:
        count = attributes["num_scan_inputs"]
        n = len(args) - count

        def numbers(name: str) -> list[int]:
            return attributes.get(name) or [0] * len(self.onnx_node.output) + [0] * count

        sequences = [np.moveaxis(x, axis, 0) for x, axis in zip(args[n:], numbers("scan_input_axes"))]  # noqa: B905
        reversals = zip(sequences, numbers("scan_input_directions"))  # noqa: B905
        sequences = [x[::-1] if reverse else x for x, reverse in reversals]
        states, stacks = list(args[:n]), []
        for slices in zip(*sequences, strict=True):
            inputs = {**(context or {}), **dict(zip(self.body.input_names, [*states, *slices], strict=True))}
            results = self._run_body(inputs, bindings=bindings)
            states = results[:n]
            stacks.append(results[n:])
        outputs = [np.stack(steps) for steps in zip(*stacks, strict=True)]
        reversals = zip(outputs, numbers("scan_output_directions"))  # noqa: B905
        outputs = [y[::-1] if reverse else y for y, reverse in reversals]
        axes = zip(outputs, numbers("scan_output_axes"))  # noqa: B905
        return (*states, *(np.moveaxis(y, 0, axis) for y, axis in axes))


class Loop(_WithBody):
    """Stack the outputs of iterations along a new axis; the reference concatenates them along an existing one."""

    def _run(
        self, trips: Any, going: Any, *states: Any, context: Any = None, bindings: Any = None, **_: Any
    ) -> Any:
        names, n = self.body.input_names, len(states)
        stacks: list[Any] = []
        while (trips is None or len(stacks) < trips) and (going is None or going):
            values = [np.array(len(stacks), np.int64), np.array(True), *states]
            inputs = {**(context or {}), **dict(zip(names, values, strict=True))}
            going, *results = self._run_body(inputs, bindings=bindings)
            states = results[:n]
            stacks.append(results[n:])
        empty = [np.zeros((0,))] * (len(self.body.output_names) - 1 - n)
        return (*states, *([np.stack(steps) for steps in zip(*stacks, strict=True)] if stacks else empty))


NUMPY_ACTIVATIONS: dict[str, Any] = {
    "Affine": lambda x, a, b: a * x + b,
    "Elu": lambda x, a, b: np.where(x < 0, a * np.expm1(x), x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "LeakyRelu": lambda x, a, b: np.where(x < 0, a * x, x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "Sigmoid": lambda x, a, b: 1 / (1 + np.exp(-x)),
    "Softplus": lambda x, a, b: np.log1p(np.exp(x)),
    "Softsign": lambda x, a, b: x / (1 + abs(x)),
    "Tanh": lambda x, a, b: np.tanh(x),
    "ThresholdedRelu": lambda x, a, b: np.where(x > a, x, 0),
}


def activation(name: str, alpha: Any, beta: Any, clip: float) -> Any:
    return lambda x: NUMPY_ACTIVATIONS[name](np.clip(x, -clip, clip), alpha, beta)


class _Recurrent(OpRun):
    """Run a recurrent operator one row and one step at a time, as specified.

    As in ONNX Runtime, `clip` applies to the gates only. `activation_alpha` and `activation_beta` list the parameters
    of the activations that have them.
    """

    default: tuple[str, ...]
    step: Any

    def _run(self, x, w, r, b=None, lengths=None, h=None, c=None, p=None, **attributes):  # type: ignore[no-untyped-def]
        present = {name: value for name, value in attributes.items() if value is not None}
        count, hidden = len(w), r.shape[-1]
        if present.get("layout"):
            x, h, c = (None if v is None else np.swapaxes(v, 0, 1) for v in (x, h, c))
        steps, rows = x.shape[:2]
        names = present.get("activations") or self.default * count
        names = names[: len(self.default) * count]
        alphas, betas = ([*present.get(f"activation_{name}", []), *names] for name in ("alpha", "beta"))
        clip = present.get("clip") or np.inf
        b = np.zeros((count, 2 * w.shape[1]), x.dtype) if b is None else b
        h, c = (np.zeros((count, rows, hidden), x.dtype) if v is None else v.copy() for v in (h, c))
        p = np.zeros((count, 3 * hidden), x.dtype) if p is None else p
        y = np.zeros((steps, count, rows, hidden), x.dtype)
        for d in range(count):
            first = d * len(self.default)
            places = range(first, first + len(self.default))
            clips = [clip, clip, np.inf]
            functions = [activation(names[i], alphas[i], betas[i], clips[i - first]) for i in places]
            backwards = present["direction"] == "reverse" or d == 1
            for row in range(rows):
                order = range(steps if lengths is None else lengths[row])
                for t in reversed(order) if backwards else order:
                    wx, wb, rb = w[d] @ x[t, row], *np.split(b[d], 2)
                    h[d, row], c[d, row] = self.step(
                        h[d, row], c[d, row], wx + wb, r[d], rb, np.split(p[d], 3), functions, present
                    )
                    y[t, d, row] = h[d, row]
        if present.get("layout"):
            y, h, c = y.transpose(2, 0, 1, 3), np.swapaxes(h, 0, 1), np.swapaxes(c, 0, 1)
        return (y, h, c)[: len(self.onnx_node.output)]


class RNN(_Recurrent):
    default = ("Tanh",)

    def step(self, h, c, wx, r, rb, p, functions, given):  # type: ignore[no-untyped-def]
        return functions[0](wx + r @ h + rb), c


class GRU(_Recurrent):
    default = ("Sigmoid", "Tanh")

    def step(self, h, c, wx, r, rb, p, functions, given):  # type: ignore[no-untyped-def]
        (xz, xr, xh), (rz, rr, rh), (bz, br, bh) = np.split(wx, 3), np.split(r, 3), np.split(rb, 3)
        z, reset = functions[0](xz + rz @ h + bz), functions[0](xr + rr @ h + br)
        before = given.get("linear_before_reset")
        n = functions[1](xh + (reset * (rh @ h + bh) if before else rh @ (reset * h) + bh))
        return (1 - z) * n + z * h, c


class LSTM(_Recurrent):
    default = ("Sigmoid", "Tanh", "Tanh")

    def step(self, h, c, wx, r, rb, p, functions, given):  # type: ignore[no-untyped-def]
        f, g, squash = functions
        i, o, forget, cell = np.split(wx + r @ h + rb, 4)
        i = f(i + p[0] * c)
        forget = 1 - i if given.get("input_forget") else f(forget + p[2] * c)
        following = forget * c + i * g(cell)
        return f(o + p[1] * following) * squash(following), following


# --- Transposed convolution and pooling ---


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


# --- Sampling between pixels in float64, where the reference uses float32 ---


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


MENDED = [
    *(AffineGrid, AveragePool, ConvTranspose, DeformConv, Erf, GRU, GatherElements, Gelu, GlobalLpPool),
    *(
        GlobalMaxPool,
        GridSample,
        LRN,
        LSTM,
        Loop,
        LpNormalization,
        LpPool,
        MaxPool,
        MaxRoiPool,
        Pad,
        RNN,
        Scan,
    ),
    *(Softsign, Unique),
]


def evaluator(model: ir.Model) -> ReferenceEvaluator:
    """Return the reference evaluator of a model, with the corrected operators."""
    return ReferenceEvaluator(ir.to_proto(model), new_ops=MENDED)
