"""Write the C function of a cluster whose rows are channels: of each, it passes over the planes of all batch rows.

A channel of a small batch stays in the caches between its passes, so that memory is read once for statistics and what
is computed from them.
"""

from __future__ import annotations

import functools

from graphopt.targets.native.loops import Loops, VectorLoop
from graphopt.targets.native.numbers import ELEMENT
from graphopt.targets.native.space import Axes


class ChannelLoops(Loops):
    """Write loops over the elements of a plane within loops over planes.

    In C, `plane` is the number of a plane's elements, `at` the place of a plane in a tensor, from the
    first plane of its channel, and `own` its place among the planes of its channel.
    """

    element, left = "at + j", "own + j"
    has_blocks = False  # each loop passes over a whole plane

    def _before_rows(self) -> list[str]:
        rows = self.numbers.rows
        last = self.numbers.dimensions.index(rows[-1]) + 1
        plane = self.numbers.product(self.numbers.dimensions[last:])
        return [f"const int64_t plane = {plane}, stride = plane * a->rows;", *super()._before_rows()]

    def offset(self, axes: Axes) -> str:
        """Return the index of a channel's first element in a tensor with some of the dimensions."""
        has_columns = any(d in self.numbers.columns for d in axes)
        return "r * plane" if has_columns else super().offset(axes)

    def _loop(self, stage: int) -> VectorLoop:
        return VectorLoop(
            "for (int64_t j = 0; j < plane; j++)",
            {ELEMENT},
            functools.partial(self._place, stage),
            around="for (int64_t at = 0, own = 0; own < columns; at += stride, own += plane)",
        )
