"""Find frozen weights of few bits that a product dequantizes itself, one panel at a time."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.memory import base_of
from graphopt.graph.postprocessing import DEQUANTIZE
from graphopt.graph.values import constant_of
from graphopt.targets.native.forms import NodeForms, rank_of
from graphopt.targets.native.library import MOST_AXES, Item
from graphopt.targets.native.operators import Attributes

_TYPES = {  # the bits of an integer, and whether it has a sign
    ir.DataType.INT4: (4, 1),
    ir.DataType.UINT4: (4, 0),
    ir.DataType.INT8: (8, 1),
    ir.DataType.UINT8: (8, 0),
}


@dataclass(frozen=True)
class Weight:
    """Hold the integers, the scales and the zero points of a matrix, and its `WeightForm` in calls.h."""

    values: list[ir.Value]
    form: list[Item]


def weight_of(w: ir.Value, forms: NodeForms) -> Weight | None:
    """Return what a matrix is dequantized from; None for any other value.

    A Reshape and a Slice in between are those of `passes.lowering.quantized.dequantized_rows`.
    """
    rows, columns = _matrix(w) or (0, 0)
    node, pitch = w.producer(), columns
    if node is not None and node.op_type == "Slice" and (before := _cut(node)) is not None:
        node, pitch = before.producer(), (_matrix(before) or (0, 0))[1]
    if node is not None and node.op_type == "Reshape" and node.domain == "" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    attributes = forms.attributes_of(node) if node is not None and node.op_type == DEQUANTIZE else None
    if node is None or attributes is None or not rows or not columns:
        return None
    q, scale, zero = (x and base_of(x) for x in [*node.inputs, None][:3])
    if q is None or scale is None or scale.dtype != ir.DataType.FLOAT or q.dtype not in _TYPES:
        return None
    stored, sizes = _matrix(q), (rows, pitch)
    steps = None if stored is None else _steps(stored, sizes, rank_of(node.inputs[1]), attributes)
    values = [q, scale] if zero is None else [q, scale, zero]
    is_frozen = q.is_initializer() and not q.is_graph_input()
    if steps is None or not is_frozen or not all(0 <= rank_of(x) <= MOST_AXES for x in values):
        return None
    ranks = [rank_of(q), rank_of(scale), -1 if zero is None else rank_of(zero)]
    return Weight(values, [*_TYPES[q.dtype], *ranks, rows, columns, pitch, *steps])


def _matrix(x: ir.Value | None) -> tuple[int, int] | None:
    """Return the sizes of a matrix; None for a value of another rank or of unknown sizes."""
    sizes = [size for size in x.shape if isinstance(size, int)] if x is not None and x.shape is not None else []
    return (sizes[0], sizes[1]) if len(sizes) == 2 == rank_of(x) else None


def _cut(node: ir.Node) -> ir.Value | None:
    """Return what a Slice reads that keeps the first columns of a matrix; None for any other node."""
    x, y = node.inputs[0], node.outputs[0]
    before, after = _matrix(x), _matrix(y)
    starts, *steps = (constant_of(v) for v in (node.inputs[1], *node.inputs[4:]))
    is_first = starts is not None and not starts.any()
    if not is_first or any(step is None or (step != 1).any() for step in steps):
        return None
    if before is None or after is None or node.domain != "":
        return None
    return x if before[0] == after[0] and before[1] >= after[1] else None


def _steps(
    stored: tuple[int, int], sizes: tuple[int, int], rank_scale: int, attributes: Attributes
) -> list[int] | None:
    """Return how a row and a column lead to a scale: `row_block`, `row_step` and `column_block`; None if not so."""
    (rows, pitch), block = sizes, attributes.get("block_size", 0)
    axis = attributes.get("axis", 1) % 2
    if stored[0] * stored[1] != rows * pitch:
        return None
    if rank_scale == 1 and axis == 0:
        return [1, pitch // stored[1], stored[1]] if pitch % stored[1] == 0 else None
    if stored != sizes:
        return None
    if rank_scale == 0:
        return [rows, 0, pitch]
    if rank_scale == 1:
        return [rows, 0, 1]
    if not block:
        return None
    return [1, -(-pitch // block), block] if axis == 1 else [block, pitch, 1]
