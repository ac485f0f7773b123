"""Place values in an iteration space: which of its dimensions each axis of a value varies over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphopt.graph.sizes import Size, sizes_of
from graphopt.targets.native.forms import NodeForm, NodeKind, operands_of, rank_of

Axes = tuple[int | None, ...]  # for each axis of a value, the dimension of the space that it varies over
# The axes of what a node reads, by the index of the input, and of what it produces.
Placement = tuple[Mapping[int, Axes], Mapping[ir.Value, Axes]]


def varying(axes: Sequence[int | None]) -> tuple[int, ...]:
    """Return the dimensions that a value varies over."""
    return tuple(d for d in axes if d is not None)


@dataclass
class Space:
    """An iteration space: dimensions, which are numbers, and their sizes, in their order."""

    sizes: dict[int, Size] = field(default_factory=dict)

    @property
    def dimensions(self) -> list[int]:
        return list(self.sizes)

    def axes(self, sizes: Sequence[Size], wanted: Sequence[set[int]]) -> Axes | None:
        """Return a dimension for each axis: the wanted one, one of the same size, or a new one; None if none fits.

        The dimensions come in the order of the space. An axis of size 1 varies over none.
        """
        order = self.dimensions
        are_all = list(sizes) == list(self.sizes.values()) and 1 not in sizes
        if are_all and all(wanted[p] <= {d} for p, d in enumerate(order)):
            return tuple(order)
        axes: list[int | None] = []
        last = -1  # the place of the dimension of the axis before
        for p, size in enumerate(sizes):
            if size == 1:
                axes.append(None)
                continue
            if len(wanted[p]) > 1:
                return None
            later = [self.dimensions.index(d) for axis in wanted[p + 1 :] for d in axis if d in self.sizes]
            limit = min(later, default=len(self.sizes))
            dimension = next(iter(wanted[p]), None)
            if dimension is None:
                dimension = self._free(size, last, limit, p == len(sizes) - 1)
            place = self.dimensions.index(dimension) if dimension in self.sizes else -1
            if place <= last or self.sizes[dimension] != size:
                return None
            last = place
            axes.append(dimension)
        return tuple(axes)

    def _free(self, size: Size, last: int, limit: int, is_last: bool) -> int:
        """Return a dimension of a size between two places, a new one if there is none."""
        order = self.dimensions
        same = [d for d in order[last + 1 : limit] if self.sizes[d] == size]
        if same:
            return same[-1]
        new = max(order, default=-1) + 1
        order.insert(limit if is_last or limit < len(order) else last + 1, new)
        self.sizes = {d: self.sizes.get(d, size) for d in order}
        return new


def placed(
    space: Space,
    node: ir.Node,
    form: NodeForm,
    known: Mapping[ir.Value, Axes],
    fixed: Mapping[ir.Value, Axes],
) -> Placement | None:
    """Return where a node's values are in a space; add the dimensions that it lacks. None if they do not fit.

    Args:
        known: the axes of values that the cluster reads or produces.
        fixed: the axes of values that it produces.
    """
    if form.kind in (NodeKind.VIEW, NodeKind.REDUCE):
        return _projected(space, node, form, known)
    y = node.outputs[0]
    sizes, operands = sizes_of(y), operands_of(node, form)
    wanted = _wanted(sizes, [known.get(y), *(fixed.get(x) for x in operands.values())])
    if not any(wanted):
        wanted = _wanted(sizes, [known.get(x) for x in operands.values()])
    axes, rank = space.axes(sizes, wanted), len(sizes)
    padded = [[*[1] * (rank - rank_of(x)), *sizes_of(x)] for x in operands.values()]
    if axes is None or rank != max(map(rank_of, operands.values())):
        return None
    if any({*own} - {1} != {size} - {1} for size, *own in zip(sizes, *padded, strict=True)):
        return None  # two names for one size, or a size of no operand
    read = {
        i: tuple(None if size == 1 else axes[p - rank_of(x)] for p, size in enumerate(sizes_of(x)))
        for i, x in operands.items()
    }
    rows = tuple(None if p in form.reduced else d for p, d in enumerate(axes))
    return read, {**dict.fromkeys(node.outputs, rows), y: axes}


def _projected(space: Space, node: ir.Node, form: NodeForm, known: Mapping[ir.Value, Axes]) -> Placement | None:
    """Place a view or a reduction, whose output's axes are axes of the input."""
    x, y = operands_of(node, form)[0], node.outputs[0]
    back = tuple(None if i is None else known[y][i] for i in form.images) if y in known else None
    axes = space.axes(sizes_of(x), _wanted(sizes_of(x), [known.get(x), back]))
    images = {image: p for p, image in enumerate(form.images) if image is not None}
    if axes is None or any(sizes_of(y)[image] != sizes_of(x)[p] for image, p in images.items()):
        return None
    return {0: axes}, {y: tuple(axes[images[i]] if i in images else None for i in range(rank_of(y)))}


def _wanted(sizes: Sequence[Size], candidates: Sequence[Axes | None]) -> list[set[int]]:
    """Return the dimensions that axes vary over by what is known of values, aligned at the end."""
    wanted: list[set[int]] = [set() for _ in sizes]
    for axes in candidates:
        for p, d in enumerate(axes or (), start=len(sizes) - len(axes or ())):
            if d is not None:
                wanted[p].add(d)
    return wanted
