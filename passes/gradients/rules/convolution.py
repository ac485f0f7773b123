"""Differentiate convolutions: by a transposed convolution for the input and a correlation for the weights.

Dumoulin and Visin, https://arxiv.org/abs/1603.07285.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import constant_of, dims_of, like, rank
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.shape import constant_size, reshape_like


@dataclass(frozen=True)
class Window:
    """Describe a kernel that slides along spatial axes: size, stride, dilation and pads of each axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    begin: list[int]
    end: list[int]

    @property
    def extent(self) -> list[int]:
        """Return the distance that the kernel covers along each axis."""
        return [(taps - 1) * dilation + 1 for taps, dilation in zip(self.kernel, self.dilations, strict=True)]

    @property
    def geometry(self) -> dict[str, list[int]]:
        """Return the attributes of a Conv or a pool with this window, except for the kernel's size."""
        return {"strides": self.strides, "dilations": self.dilations, "pads": [*self.begin, *self.end]}

    @property
    def is_pointwise(self) -> bool:
        """Return whether the kernel is one element that visits every element of the input."""
        ones = [1] * len(self.kernel)
        return self.kernel == self.strides == ones and not any(self.begin + self.end)

    @property
    def tiles(self) -> bool:
        """Return whether the windows are adjacent, without overlap or gaps: every element is in at most one."""
        return self.extent == self.strides == self.kernel


def window_of(x: Value, node: Node, w: Input = None, auto_pad: str = "") -> Window:
    """Return the window that a node's attributes describe, with resolved pads.

    Args:
        w: the weights, which have the kernel's sizes if no attribute has them.
        auto_pad: the mode, in place of the attribute.
    """
    numbers = node.attributes.get_ints
    kernel = numbers("kernel_shape", None) or ([] if w is None else dims_of(w)[2:])
    taps, n = [size for size in kernel if isinstance(size, int)], len(kernel)
    if len(taps) < n:
        raise GraphoptError(
            f"the gradient with respect to {x.name!r} needs a kernel of known size, found {list(kernel)}: declare "
            f"its shape"
        )
    strides, dilations = (list(numbers(name, [1] * n)) for name in ("strides", "dilations"))
    pads = list(numbers("pads", [0] * (2 * n)))
    window = Window(taps, strides, dilations, pads[:n], pads[n:])
    auto_pad = auto_pad or node.attributes.get_string("auto_pad", "NOTSET")
    if not auto_pad.startswith("SAME"):
        return window if auto_pad == "NOTSET" else replace(window, begin=[0] * n, end=[0] * n)
    totals = [_same(x, *axis) for axis in zip(dims_of(x)[2:], window.extent, window.strides, strict=True)]
    return _halved(window, totals, auto_pad)


def _same(x: Value, size: int | ir.SymbolicDim, extent: int, stride: int) -> int:
    if stride == 1:
        return extent - 1
    if not isinstance(size, int):
        raise GraphoptError(
            f"SAME padding with strides needs known spatial sizes, found {x.name!r} of shape {x.shape}: declare its "
            f"shape"
        )
    return max((-(-size // stride) - 1) * stride + extent - size, 0)


def _halved(window: Window, totals: list[int], auto_pad: str) -> Window:
    less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
    ends = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
    return replace(window, begin=ends[0], end=ends[1])


def transposed(op: Emitter, window: Window, dy: Value, w: Value, x: Value, group: int = 1) -> Value:
    """Return the gradient of a convolution's input, in the spatial sizes of `x`.

    If strides and an unknown size hide which part of the input the windows reach, emit a larger gradient and crop it.
    """
    missing, exact = [], True
    for i, (size, windows) in enumerate(zip(dims_of(x)[2:], dims_of(dy)[2:], strict=True)):
        if isinstance(size, int) and isinstance(windows, int):
            reached = (windows - 1) * window.strides[i] + window.extent[i] - window.begin[i]
            missing.append(size - reached)
        else:
            exact = exact and window.strides[i] == 1
            missing.append(-window.end[i] if window.strides[i] == 1 else window.strides[i] - 1)
    dx: Value = op.ConvTranspose(
        dy,
        w,
        strides=window.strides,
        dilations=window.dilations,
        pads=[*window.begin, *(max(-size, 0) for size in missing)],
        output_padding=[max(size, 0) for size in missing],
        group=group,
    )
    axes = list(range(2, rank(x)))
    return dx if exact else op.Slice(dx, [0] * len(axes), op.shape_of(x, 2), axes)


def correlation(op: Emitter, window: Window, x: Value, dy: Value, w: Value, group: int = 1) -> Value:
    """Return the gradient of the weights: the correlation of x and dy, with batch as channels and strides as dilations.

    Groups remain groups: channels become the batch and the batch becomes channels. A kernel of one element is a matrix
    product, which is five times as fast.
    """
    if group == 1 and window.is_pointwise:
        rows, columns = op.Reshape(dy, [0, 0, -1]), op.Reshape(x, [0, 0, -1])
        products = op.MatMul(rows, op.Transpose(columns, perm=[0, 2, 1]))
        return reshape_like(op, op.ReduceSum(products, [0], keepdims=0), w)
    swap = [1, 0, *range(2, rank(x))]
    if group == 1:
        data = op.Transpose(x, perm=swap)
    else:
        channels = op.shape_of(w, 1, 2)
        split = op.Reshape(x, op.Concat([0, group], channels, op.shape_of(x, 2), axis=0))
        moved = op.Transpose(split, perm=[2, 1, 0, *range(3, rank(x) + 1)])
        data = op.Reshape(moved, op.Concat(channels, [-1], op.shape_of(x, 2), axis=0))
    end, exact = list(window.end), True
    reached = {}  # the part of an axis that windows reach, if it is not the whole axis
    for i, (size, windows) in enumerate(zip(dims_of(x)[2:], dims_of(dy)[2:], strict=True)):
        stride, dilation = window.strides[i], window.dilations[i]
        if isinstance(size, int) and isinstance(windows, int):
            unreached = size + window.begin[i] + end[i] - (windows - 1) * stride - window.extent[i]
            end[i], unreached = max(end[i] - unreached, 0), max(unreached - end[i], 0)
            if unreached >= dilation:
                reached[i + 2] = size - unreached
        else:
            exact = exact and stride - 1 < dilation
    if reached:
        data = op.Slice(data, [0] * len(reached), list(reached.values()), list(reached))
    dw: Value = op.Conv(
        data,
        op.Transpose(dy, perm=swap),
        strides=window.dilations,
        dilations=window.strides,
        pads=[*window.begin, *end],
        group=group,
    )
    dw.shape = dw.shape or ir.Shape([None] * rank(x))  # ONNX infers no shape if channels are unknown
    if not exact:
        dw = op.Slice(dw, [0] * len(window.kernel), window.kernel, list(range(2, rank(x))))
    return like(op.Transpose(dw, perm=swap), w)


@rule("Conv")
def conv(
    op: Emitter, dy: Value, x: Value, w: Value, bias: Input = None, *, node: Node, group: int
) -> Gradients:
    window = window_of(x, node, w)
    dx = like(transposed(op, window, dy, w, x, group), x)
    return [dx, correlation(op, window, x, dy, w, group), _by_channel(op, dy, bias)]


@rule("ConvTranspose")
def conv_transpose(
    op: Emitter,
    dy: Value,
    x: Value,
    w: Value,
    bias: Input = None,
    *,
    node: Node,
    group: int,
    auto_pad: str,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
) -> Gradients:
    """Convolve: the gradient of a transposed convolution is the convolution itself."""
    window = window_of(x, node, w, "NOTSET")
    more = output_padding or [0] * len(window.kernel)
    if output_shape or auto_pad.startswith("SAME"):
        window = _halved(window, _cut(window, x, dy, more), auto_pad)
    dx = op.Conv(dy, w, **window.geometry, group=group)
    if any(size >= stride for size, stride in zip(more, window.strides, strict=True)):
        dx = op.Slice(dx, [0] * len(more), op.shape_of(x, 2), list(range(2, rank(x))))
    return [like(dx, x), correlation(op, window, dy, x, w, group), _by_channel(op, dy, bias)]


def _cut(window: Window, x: Value, y: Value, more: list[int]) -> list[int]:
    """Return how many elements a ConvTranspose with a given output size crops from both ends of each axis."""
    cuts = []
    for i, (size, existing) in enumerate(zip(dims_of(x)[2:], dims_of(y)[2:], strict=True)):
        if not isinstance(size, int) or not isinstance(existing, int):
            raise GraphoptError(
                f"the pads of a ConvTranspose need known spatial sizes, found {x.name!r} of shape {x.shape}: "
                f"declare its shape"
            )
        cuts.append(max((size - 1) * window.strides[i] + more[i] + window.extent[i] - existing, 0))
    return cuts


def _by_channel(op: Emitter, dy: Value, bias: Input) -> Value | None:
    """Return the gradient of a bias per channel."""
    return bias and like(op.ReduceSum(dy, [0, *range(2, rank(dy))], keepdims=0), bias)


@rule("Col2Im")
def col2im(op: Emitter, dy: Value, x: Value, image: Value, block: Value, *, node: Node) -> Gradients:
    """Extract the blocks of the image by a convolution with one kernel for each position in a block."""
    taps = constant_of(block)
    if taps is None:
        raise GraphoptError(
            f"Col2Im: the gradient with respect to {x.name!r} needs a known block shape, found a computed one: make it "
            f"an initializer"
        )
    places = constant_size(*taps)
    constant_size(places, places)
    kernel = op.constant(np.eye(places).reshape(places, 1, *taps), like=dy)
    planes = op.Reshape(dy, op.Concat([-1, 1], op.shape_of(dy, 2), axis=0))
    blocks = op.Conv(planes, kernel, **node.attributes)
    return [like(op.Reshape(blocks, op.shape_of(x)), x)]
