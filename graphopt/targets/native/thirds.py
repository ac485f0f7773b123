"""Find queries, keys and values, or their gradients, that are thirds of one projection: attention leaves them there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.sizes import has_sizes, sizes_of
from graphopt.graph.values import dims_of, fixed, given, like, swap
from graphopt.targets.native.products import only_reader


def whole_of(thirds: Sequence[ir.Value], name: str) -> ir.Value | None:
    """Return a tensor [..., 3 H, D] whose thirds are three values [..., H, D]; None if they are no such thirds.

    A new Reshape makes it, with a new name, of the projection [..., 3 H D] that they were cut from.
    """
    projection = _projection_of(thirds[0], 0)
    if projection is None or any(_projection_of(x, number) is not projection for number, x in enumerate(thirds)):
        return None
    node, view = projection.producer(), thirds[0].producer()
    if node is None or view is None or node.graph is not view.graph or not all(_alike(x, thirds) for x in thirds):
        return None
    whole = _whole(thirds[0], name)
    return _reshape(projection, whole, [*[0] * (len(dims_of(whole)) - 2), *dims_of(whole)[-2:]], node)


def joined(thirds: Sequence[ir.Value]) -> tuple[ir.Value, list[ir.Node]] | None:
    """Return a new tensor [..., 3 H, D] in place of values [..., H, D] that a Concat joins, and the nodes to drop.

    A new Reshape makes the output of the Concat, [..., 3 H D], of it.
    """
    views = [only_reader(x) for x in thirds]
    nodes = [node for node in views if node is not None and node.op_type == "Reshape" and not node.domain]
    if len(nodes) < 3 or any(not _alike(x, thirds) for x in thirds):
        return None
    parts = [node.outputs[0] for node in nodes]
    concat = only_reader(parts[0])
    if concat is None or concat.op_type != "Concat" or concat.domain or [*concat.inputs] != parts:
        return None
    if any(only_reader(part) is not concat for part in parts):
        return None
    y = concat.outputs[0]
    axis = concat.attributes["axis"].as_int()
    if not all(_is_view(x, part) for x, part in zip(thirds, parts, strict=True)) or not has_sizes(y):
        return None
    if axis not in (-1, len(dims_of(y)) - 1):
        return None
    whole = _whole(thirds[0], f"{y.name}/heads")
    result = like(ir.Value(name=f"{y.name}/joined"), y)
    swap(y, _reshape(whole, result, [*[0] * (len(dims_of(y)) - 1), dims_of(y)[-1]], concat))
    return whole, [*nodes, concat]


def _projection_of(x: ir.Value, number: int) -> ir.Value | None:
    """Return the tensor of which a value with heads is a third, the first, second or last along its last axis."""
    view = x.producer()
    part = view.inputs[0] if view is not None and view.op_type == "Reshape" and not view.domain else None
    node = None if part is None else part.producer()
    if part is None or node is None or node.domain or not _is_view(x, part):
        return None
    whole, width = given(node.inputs[0]), sizes_of(part)[-1]
    if not has_sizes(whole) or not isinstance(width, int) or sizes_of(whole) != [*sizes_of(part)[:-1], 3 * width]:
        return None
    last = len(dims_of(whole)) - 1
    if node.op_type == "Split":
        attribute = node.attributes.get("axis")
        axis, sizes = attribute.as_int() if attribute else 0, [sizes_of(y)[-1] for y in node.outputs if has_sizes(y)]
        return whole if axis in (-1, last) and sizes == 3 * [width] and node.outputs[number] is part else None
    numbers = [fixed(v) for v in node.inputs[1:]]
    if node.op_type != "Slice" or len(numbers) < 3 or any(v is None or v.size != 1 for v in numbers):
        return None
    start, _, axis, *step = (int(v.item()) for v in numbers if v is not None)
    return whole if start == number * width and axis in (-1, last) and step in ([], [1]) else None


def _is_view(x: ir.Value, part: ir.Value) -> bool:
    """Return whether values are [..., H, D] and [..., H D]."""
    if not has_sizes(x) or not has_sizes(part) or len(dims_of(x)) < 2:
        return False
    *rest, heads, depth = sizes_of(x)
    return isinstance(heads, int) and isinstance(depth, int) and sizes_of(part) == [*rest, heads * depth]


def _alike(x: ir.Value, others: Sequence[ir.Value]) -> bool:
    return has_sizes(x) and sizes_of(x) == sizes_of(others[0])


def _whole(third: ir.Value, name: str) -> ir.Value:
    *rest, heads, depth = dims_of(third)
    return ir.Value(name=name, type=third.type, shape=ir.Shape([*rest, 3 * int(str(heads)), depth]))


def _reshape(x: ir.Value, y: ir.Value, shape: Sequence[object], after: ir.Node) -> ir.Value:
    """Compute a value from another by a Reshape, which follows a node; return it."""
    graph = after.graph
    assert graph is not None
    tensor = ir.tensor(np.array([int(str(size)) for size in shape], np.int64), name=f"{y.name}/shape")
    shaped = ir.Shape([len(shape)])
    sizes = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(ir.DataType.INT64), shape=shaped)
    graph.register_initializer(sizes)
    graph.insert_after(after, ir.Node("", "Reshape", [x, sizes], outputs=[y]))
    return y
