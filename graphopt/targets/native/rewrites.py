"""Undo what helps ONNX Runtime's operators and hinders kernels, before clusters are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import copy
from graphopt.targets.native.attributes import attributes_of
from graphopt.targets.native.forms import form_of, is_scalar, sizes_of


def undo_fusions(model: ir.Model) -> None:
    """Sum rows by ReduceSum, compute vectors apart that were joined end to end, and read shapes early."""
    _read_shapes_early(model)
    _sum_rows(model)
    _part_vectors(model)
    model.graph.sort()


def _read_shapes_early(model: ir.Model) -> None:
    """Take the shape of what elementwise operators read in place of their result's, which may then stay in a kernel."""
    versions = dict(model.opset_imports)
    for node in model.graph:
        if node.op_type == "Shape" and node.domain == "":
            while (x := _of_same_shape(node.inputs[0], versions)) is not None:
                node.replace_input_with(0, x)


def _of_same_shape(y: ir.Value | None, versions: Mapping[str, int]) -> ir.Value | None:
    """Return a value of the same shape from which an elementwise operator computes a value, or None."""
    node = None if y is None else y.producer()
    form = None if node is None else form_of(node, versions)
    if y is None or node is None or form is None or form.kind != "map":
        return None
    return next((x for x in node.inputs if x is not None and sizes_of(x) == sizes_of(y)), None)


def _sum_rows(model: ir.Model) -> None:
    """Sum rows by ReduceSum where a product with a vector of ones does: a kernel sums what it computes."""
    for node in list(model.graph):
        if node.op_type == "MatMul" and node.domain == "" and _is_ones(node.inputs[0]):
            x = node.inputs[1]
            if x is not None and x.shape is not None and len(x.shape) == 2:
                with Emitter(model) as op:
                    _put(model, node, [op.ReduceSum(x, [0], keepdims=0)])


def _is_ones(x: ir.Value | None) -> bool:
    """Return whether a value is a vector of ones."""
    node = None if x is None else x.producer()
    if x is None or node is None or node.op_type != "ConstantOfShape" or x.shape is None or len(x.shape) != 1:
        return False
    value = node.attributes.get("value")
    return value is not None and value.as_tensor().numpy().item() == 1.0


def _part_vectors(model: ir.Model) -> None:
    """Compute vectors apart that a Concat joins, elementwise operators update and a Split parts again."""
    versions = dict(model.opset_imports)
    parts: dict[ir.Value, Sequence[ir.Value]] = {}  # of a joined vector, or of what is computed from it
    sizes: dict[ir.Value, list[int]] = {}
    between: list[ir.Node] = []
    ends: set[ir.Node] = set()
    for node in model.graph:
        y = node.outputs[0]
        joined = [x for x in node.inputs if x in sizes]
        if node.op_type == "Concat" and node.domain == "" and _lengths(node.inputs):
            parts[y], sizes[y] = [x for x in node.inputs if x is not None], _lengths(node.inputs)
        elif joined and node.op_type == "Split" and _lengths(node.outputs) == sizes[joined[0]]:
            ends.add(node)
        elif joined and (form := form_of(node, versions)) is not None and form.kind == "map":
            others = [x for x in node.inputs if x is not None and x not in sizes]
            if all(is_scalar(x) for x in others) and all(sizes[x] == sizes[joined[0]] for x in joined):
                between.append(node)
                sizes[y] = sizes[joined[0]]
    inside = _closed(between, ends, set(parts))
    with Emitter(model) as op:
        for node in between:
            if node not in inside:
                continue
            given = attributes_of(node, versions) or {}
            operands = [parts.get(x, [x] * len(sizes[node.outputs[0]])) for x in node.inputs if x is not None]
            parts[node.outputs[0]] = [
                getattr(op, node.op_type)(*xs, **given) for xs in zip(*operands, strict=True)
            ]
    for node in ends:
        x = node.inputs[0]
        if x is not None and x.producer() in inside:
            _put(model, node, parts[x])
    for node in reversed(between):
        if node in inside:
            model.graph.remove(node, safe=True)


def _lengths(values: Sequence[ir.Value | None]) -> list[int]:
    """Return the lengths of vectors; nothing if one is unknown, or no vector."""
    shapes = [None if x is None else x.shape for x in values]
    if len(values) < 2 or any(shape is None or len(shape) != 1 for shape in shapes):
        return []
    lengths = [shape[0] for shape in shapes if shape is not None]
    return [n for n in lengths if isinstance(n, int)] if all(isinstance(n, int) for n in lengths) else []


def _closed(between: Sequence[ir.Node], ends: set[ir.Node], starts: set[ir.Value]) -> set[ir.Node]:
    """Return the nodes that lead from joined vectors to Splits only, and all of whose vectors are known in parts."""
    inside = set(between)
    while True:
        wrong = {
            node
            for node in inside
            if node.outputs[0].is_graph_output()
            or any(use.node not in inside and use.node not in ends for use in node.outputs[0].uses())
            or any(
                x is not None and not is_scalar(x) and x not in starts and x.producer() not in inside
                for x in node.inputs
            )
        }
        if not wrong:
            return inside
        inside -= wrong


def _put(model: ir.Model, node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Put values in place of the outputs of a node."""
    for old, new in zip(node.outputs, values, strict=True):
        copy(old, new)
        name, old.name = old.name, None
        new.name = name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
