"""Describe the windows of convolutions and pools, which slide along the axes of space.

https://onnx.ai/onnx/operators/onnx__MaxPool.html and onnx__ConvTranspose.html define pads and numbers of windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

_Size = int | ir.SymbolicDim | None


@dataclass(frozen=True)
class Window:
    """Describe a window: along each axis its elements, its strides, its dilations, and the pads at both ends.

    >>> window = Window([3], [2], [2], [0], [0])
    >>> window.extent, window.same([8], "SAME_UPPER")
    ([5], Window(kernel=[3], strides=[2], dilations=[2], begin=[1], end=[2]))
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    begin: list[int]
    end: list[int]

    @property
    def extent(self) -> list[int]:
        """Return the distance that a window covers along each axis."""
        return [(taps - 1) * dilation + 1 for taps, dilation in zip(self.kernel, self.dilations, strict=True)]

    @property
    def taps(self) -> int:
        """Return the number of elements of a window."""
        return math.prod(self.kernel)

    @property
    def tiles(self) -> bool:
        """Return whether windows have no overlaps and no gaps."""
        return self.extent == self.strides == self.kernel

    @property
    def is_padded(self) -> bool:
        """Return whether there is a pad."""
        return any(self.begin + self.end)

    @property
    def geometry(self) -> dict[str, list[int]]:
        """Return the attributes of a Conv or a pool with this window, except for the kernel's size."""
        return {"strides": self.strides, "dilations": self.dilations, "pads": [*self.begin, *self.end]}

    def reach(self, axis: int, count: int) -> int:
        """Return where the last of `count` windows ends along an axis, counted from the first element of the input."""
        return (count - 1) * self.strides[axis] + self.extent[axis] - self.begin[axis]

    def elements(self, axis: int, count: int, size: int, with_pads: bool) -> np.ndarray:
        """Return how many elements of the input each of `count` windows has along an axis, and with pads those."""
        before, after = (self.begin[axis], self.end[axis]) if with_pads else (0, 0)
        first = np.arange(count)[:, None] * self.strides[axis] - self.begin[axis]
        at = first + np.arange(self.kernel[axis]) * self.dilations[axis]
        return ((at >= -before) & (at < size + after)).sum(axis=1)

    def same(self, sizes: Sequence[_Size], mode: str) -> Window | None:
        """Return this window with SAME pads for an input of some sizes; None if they depend on an unknown size."""
        totals = []
        for size, stride, extent in zip(sizes, self.strides, self.extent, strict=True):
            if stride > 1 and not isinstance(size, int):
                return None
            totals.append(max(extent - _rest(size, stride), 0))
        return self.halved(totals, mode)

    def same_of_transposed(self, more: Sequence[int], mode: str) -> Window:
        """Return this window of a ConvTranspose with SAME pads: each size is multiplied by the stride.

        Args:
            more: the `output_padding`.
        """
        totals = np.array(self.extent) + more - self.strides
        return self.halved(np.maximum(totals, 0), mode)

    def cropped(self, sizes: Sequence[int], wanted: Sequence[int], more: Sequence[int]) -> np.ndarray:
        """Return how many elements a ConvTranspose crops from both ends of each axis to have the `wanted` sizes."""
        return (np.array(sizes) - 1) * self.strides + more + self.extent - wanted

    def halved(self, totals: Sequence[int] | np.ndarray, mode: str) -> Window:
        """Return this window with so many pads per axis, half of them at each end. SAME_UPPER puts an odd pad last."""
        less, more = [int(n) // 2 for n in totals], [int(n) - int(n) // 2 for n in totals]
        begin, end = (less, more) if mode == "SAME_UPPER" else (more, less)
        return replace(self, begin=begin, end=end)


def window_of(node: ir.Node, kernel: Sequence[int] | None = None) -> Window:
    """Return the window that the attributes of a node describe. SAME pads, which depend on the input, are 0 in it.

    Args:
        node: a convolution, a pool, or another node with these attributes.
        kernel: the sizes of the weights. Pools have an attribute with them.
    """
    numbers = node.attributes.get_ints
    taps = list(numbers("kernel_shape", []) if kernel is None else kernel)
    n = len(taps)
    strides, dilations = (list(numbers(name, []) or [1] * n) for name in ("strides", "dilations"))
    pads = list(numbers("pads", [])) if pad_mode(node) == "NOTSET" else []
    pads = pads or [0] * 2 * n
    return Window(taps, strides, dilations, pads[:n], pads[n:])


def pad_mode(node: ir.Node) -> str:
    """Return the `auto_pad` of a node: NOTSET, VALID, SAME_UPPER or SAME_LOWER."""
    return node.attributes.get_string("auto_pad", "NOTSET")


def is_same(node: ir.Node) -> bool:
    """Return whether the pads of a node depend on the sizes of its input."""
    return pad_mode(node).startswith("SAME")


def padded_window(node: ir.Node, sizes: Sequence[_Size], kernel: Sequence[int] | None = None) -> Window | None:
    """Return the window of a node with its pads for an input of some sizes; None if an unknown size decides these."""
    window = window_of(node, kernel)
    return window.same(sizes, pad_mode(node)) if is_same(node) else window


def is_misplaced(node: ir.Node, sizes: Sequence[_Size]) -> bool:
    """Return whether ONNX Runtime places the SAME pads of a pool otherwise than the standard, for some size at least.

    Its pads ignore dilations. Where windows have gaps between them, it takes pads below 0, with which MaxPool stops.
    """
    if not is_same(node):
        return False
    window, least = window_of(node), -1 if pad_mode(node) == "SAME_UPPER" else -2  # a half is rounded to 0
    axes = zip(sizes, window.strides, window.extent, strict=True)
    sums = [extent - _rest(size, stride) for size, stride, extent in axes]
    return window.extent != window.kernel or (node.op_type != "MaxPool" and min(sums, default=0) < least)


def _rest(size: _Size, stride: int) -> int:
    """Return how many elements of an axis the last window of SAME padding begins before, and the most if it is open."""
    return (size - 1) % stride + 1 if isinstance(size, int) else stride
