"""Differentiate Fourier transforms: they are linear, and the adjoint is the inverse up to a factor."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import constant_of, dims_of, like, rank
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.indexing import gather
from passes.gradients.rules.shape import pads_of_all_axes


@rule("DFT")
def dft(
    op: Emitter, dy: Value, x: Value, length: Input = None, axis: Input = None, *, inverse: int, onesided: int
) -> Gradients:
    """Pad with zeros where the transform cropped its input, and crop where it padded.

    An inverse onesided transform counts each frequency twice, except the first and the middle one.
    """
    known = constant_of(axis)
    at = int(known.item()) % rank(x) if known is not None else None
    if axis is not None and at is None:
        raise GraphoptError(
            f"DFT of {x.name!r}: its gradient needs a known axis, found a computed one: make it an initializer"
        )
    at = rank(x) - 2 if at is None else at
    size, halved = op.shape_of(x, at, at + 1), inverse and onesided
    n = size if length is None else op.Reshape(op.cast(length, ir.DataType.INT64), [1])
    if halved:
        n = op.shape_of(dy, at, at + 1)
    back = op.DFT(dy, op.Squeeze(n), op.constant(at), inverse=1 - inverse, onesided=halved)
    count = op.Cast(op.Squeeze(n), to=x.dtype)
    back = back / count if inverse else back * count
    if halved:
        bins = op.Range(0, op.Squeeze(n) / 2 + 1, 1)
        once = op.Cast(op.Or(op.Equal(bins, 0), op.Equal(2 * bins, n)), to=x.dtype)
        back = back * op.Unsqueeze(2 - once, [*range(1, rank(x) - at)])
        n = n / 2 + 1
    if length is not None:
        back = op.Pad(back, pads_of_all_axes(op, x, op.Concat([0], size - n, axis=0), op.constant([at])))
    is_complex = dims_of(x)[-1] == 2
    return [like(back if is_complex else op.Slice(back, [0], op.shape_of(x, rank(x) - 1), [-1]), x)]


@rule("STFT")
def stft(
    op: Emitter,
    dy: Value,
    x: Value,
    step: Value,
    window: Input = None,
    length: Input = None,
    *,
    onesided: int,
) -> Gradients:
    """Transform, weight and gather the frames in reverse: add the gradient of each frame at its position."""
    size = op.Reshape(op.Shape(window) if length is None else op.cast(length, ir.DataType.INT64), [1])
    starts = op.Range(0, op.Squeeze(op.Shape(dy, start=1, end=2)), 1) * op.Squeeze(
        op.cast(step, ir.DataType.INT64)
    )
    at = op.Unsqueeze(starts, [1]) + op.Range(0, op.Squeeze(size), 1)
    frames = op.Gather(x, at, axis=1)
    weights = window and op.Unsqueeze(window, [1])
    weighed = frames if weights is None else frames * weights
    (dweighed,) = dft(op, dy, weighed, None, op.constant(2), inverse=0, onesided=onesided)
    assert dweighed is not None
    dframes = dweighed if weights is None else dweighed * weights
    dx = gather(op, dframes, x, at, axis=1)[0]
    if window is None:
        return [dx]
    return [dx, None, like(op.ReduceSum(dweighed * frames, [0, 1, 3], keepdims=0), window)]
