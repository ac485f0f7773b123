"""Name the type of forms, and check what they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import given as given
from graphopt.graph.values import is_read as is_read

# A traced function of a node. It returns the outputs of the form, or None where the node stays.
Form = Callable[[Emitter, ir.Node], Sequence[ir.Value] | None]


def known_sizes(x: ir.Value | None) -> list[int | None] | None:
    """Return the size of each axis of a value, None where only a run tells it; None without a known rank."""
    if x is None or x.shape is None:
        return None
    return [size if isinstance(size, int) else None for size in x.shape]
