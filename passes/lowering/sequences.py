"""Replace sequences of tensors by the tensors that they contain, if the graph determines these."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.graph.emitter import Emitter
from graphopt.graph.folding import MOST_SPLIT_OUTPUTS
from graphopt.graph.operators import SEQUENCE_READERS
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.traversal import all_nodes, sort, subgraphs
from graphopt.graph.values import constant_number, constant_of, dims_of, like, swap

_Size = int | ir.SymbolicDim
Content = list[ir.Value] | ir.Value  # the tensors of a sequence, listed or stacked along a first axis
_Contents = dict[ir.Value | None, Content]


def lower_sequences(model: ir.Model) -> bool:
    """Replace nodes that read sequences by nodes that read tensors, including in bodies. Types must be known.

    The content of a sequence is known if nodes insert its elements one by one at known positions, or if each turn of a
    Loop appends tensors of one shape, which become a scan output of the Loop. Other sequences stay.

    Returns: Whether the model has such nodes.
    """
    if not any(node.op_type in SEQUENCE_READERS for node in all_nodes(model.graph)):
        return False
    sizes = {dim for x in model.graph.inputs for dim in x.shape or ()}
    with Emitter(model) as op:
        _lower(op, model.graph, {}, sizes)
    RemoveUnusedNodesPass()(model)
    return True


def _lower(op: Emitter, graph: ir.Graph, contents: _Contents, sizes: Container[_Size]) -> None:
    """Lower the nodes of a graph in order; `sizes` are the dimensions that are equal in all turns of a loop."""
    sort(graph)
    for node in list(graph):
        if node.domain != "":
            continue
        if node.op_type == "Loop":
            _pass_through(node, contents)
        for body in subgraphs(node):
            with op.within(body) as inner:
                _lower(inner, body, contents, sizes)
        if node.op_type == "Loop":
            _scan(op, node, contents, sizes)
            continue
        _type(op, node)
        before = contents.get(node.inputs[0] if node.inputs else None)
        if (content := _content(op, node, before)) is not None:
            contents[node.outputs[0]] = content
        if before is not None and (result := _read(op, node, before)) is not None:
            _swap_copy(op, node.outputs[0], result)
            graph.remove(node, safe=True)
    sort(graph)


def _type(op: Emitter, node: ir.Node) -> None:
    """Infer shapes that depend on constants outside a body, which ONNX's inference does not see."""
    if all(y.shape is not None or isinstance(y.type, ir.SequenceType) for y in node.outputs):
        return
    branches = subgraphs(node)
    if node.op_type == "If":
        for y, *results in zip(node.outputs, *(branch.outputs for branch in branches), strict=True):
            shapes = [result.shape for result in results if result.shape is not None]
            if len(shapes) == len(results) and len(set(map(len, shapes))) == 1:
                y.shape = ir.Shape([a if a == b else None for a, b in zip(*shapes, strict=True)])
    elif not branches:
        op.infer(node)


def _content(op: Emitter, node: ir.Node, before: Content | None) -> Content | None:
    """Return the content of the sequence that a node makes, from that of its input, or None if it is unknown."""
    match node.op_type:
        case "SequenceEmpty":
            return []
        case "SequenceConstruct":
            return [element for element in node.inputs if element is not None]
        case "Identity":
            return before
        case "SplitToSequence":
            return _split(op, node)
        case "SequenceInsert" if isinstance(before, list):
            place, element = _place(node, 2, len(before) + 1), node.inputs[1]
            if place is not None and element is not None:
                return [*before[:place], element, *before[place:]]
        case "SequenceErase" if isinstance(before, list):
            if (place := _place(node, 1, len(before))) is not None:
                return [*before[:place], *before[place + 1 :]]
    return None


def _place(node: ir.Node, index: int, places: int) -> int | None:
    """Return a known position in a sequence, by default the last, or None."""
    position = node.inputs[index] if index < len(node.inputs) else None
    if position is None:
        return places - 1
    place = constant_number(position)
    return int(place) % places if place is not None and -places <= place < places else None


def _split(op: Emitter, node: ir.Node) -> Content | None:
    """Emit the parts of a tensor, stacked if they are rows whose number is only known at run time."""
    x, split = (*node.inputs, None)[:2]
    lengths = np.array(1) if split is None else constant_of(split)
    if x is None or x.shape is None or lengths is None:
        return None
    axis = node.attributes.get_int("axis", 0) % len(x.shape)
    size, alone = x.shape[axis], split is None and not node.attributes.get_int("keepdims", 1)
    lengths = lengths.astype(np.int64)
    if not lengths.ndim and isinstance(size, int) and lengths > 0 and size <= MOST_SPLIT_OUTPUTS * lengths:
        lengths = np.minimum(lengths, size - np.arange(0, size, lengths.item()))
    if not lengths.ndim and split is None:
        rows = op.Transpose(x, perm=[axis, *(i for i in range(len(x.shape)) if i != axis)])
        return rows if alone else op.Unsqueeze(rows, [axis + 1])
    if not lengths.ndim or lengths.size > MOST_SPLIT_OUTPUTS:
        return None
    parts = [x] * lengths.size if lengths.size < 2 else op.Split(x, lengths, axis=axis, _outputs=lengths.size)
    return [op.Squeeze(part, [axis]) for part in parts] if alone else list(parts)


def _read(op: Emitter, node: ir.Node, content: Content) -> ir.Value | None:
    """Emit the tensor that a node reads from a sequence, or return None if it is unknown."""
    match node.op_type:
        case "SequenceLength":
            if isinstance(content, list):
                return op.constant(np.array(len(content), np.int64))
            return op.Squeeze(op.Shape(content, start=0, end=1), [0])
        case "SequenceAt":
            place = _place(node, 1, len(content)) if isinstance(content, list) else None
            if isinstance(content, list) and place is not None:
                return content[place]
            stack = _stacked(op, content)
            return stack and op.Gather(stack, node.inputs[1], axis=0)
        case "ConcatFromSequence":
            return _concatenated(op, node, content)
    return None


def _stacked(op: Emitter, content: Content) -> ir.Value | None:
    """Emit the elements stacked along a first axis, or return None if their shapes may differ."""
    if isinstance(content, ir.Value):
        return content
    shapes = [x.shape for x in content]
    if not content or None in shapes or any(shape != shapes[0] for shape in shapes):
        return None
    rows = [op.Unsqueeze(x, [0]) for x in content]
    return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)


def _concatenated(op: Emitter, node: ir.Node, content: Content) -> ir.Value | None:
    axis, new = node.attributes.get_int("axis", 0), node.attributes.get_int("new_axis", 0)
    if isinstance(content, list):
        if not content or (new and any(x.shape is None for x in content)):
            return None
        if new:
            axis %= len(content[0].shape or ()) + 1
            content = [op.Unsqueeze(x, [axis]) for x in content]
        return content[0] if len(content) == 1 else op.Concat(*content, axis=axis)
    dims = dims_of(content)
    axis %= len(dims) - 1 + new
    perm = [*range(1, axis + 1), 0, *range(axis + 1, len(dims))]
    moved = op.Transpose(content, perm=perm) if axis else content
    if new:
        return moved
    if dims[axis + 1] == 1:
        return op.Squeeze(moved, [axis + 1])
    shape = op.Concat(op.Shape(moved, end=axis), [-1], op.Shape(moved, start=axis + 2), axis=0)
    return op.Reshape(moved, shape)


def _states(node: ir.Node) -> Iterator[tuple[int, ir.Value, ir.Value, ir.Value]]:
    """Yield index, initial value, body input and body output of each sequence among a Loop's states."""
    body = node.attributes["body"].as_graph()
    for i, start in enumerate(node.inputs[2:]):
        if start is not None and isinstance(body.inputs[i + 2].type, ir.SequenceType):
            yield i, start, body.inputs[i + 2], body.outputs[i + 1]


def _pass_through(node: ir.Node, contents: _Contents) -> None:
    """Record the content of sequences that a Loop leaves unchanged."""
    body = node.attributes["body"].as_graph()
    for i, start, before, after in _states(node):
        if start in contents and _appended(before, after) == []:
            contents[before] = contents[start]
            body.outputs[i + 1] = before


def _scan(op: Emitter, node: ir.Node, contents: _Contents, sizes: Container[_Size]) -> None:
    """Return sequences that a Loop's turns append to as scan outputs, and drop sequences that it leaves unchanged."""
    body = node.attributes["body"].as_graph()
    remove_unused_nodes(body)
    replaced: dict[int, tuple[list[ir.Value], Content]] = {}
    for i, start, before, after in _states(node):
        rows, first = _appended(before, after), contents.get(start)
        if rows is None or first is None or len(before.uses()) > bool(rows):
            continue
        readers = list(node.outputs[i].consumers())
        if not rows or (isinstance(first, list) and _are_alike([*rows, *first], readers, sizes)):
            replaced[i] = rows, first
    if not replaced:
        return
    states = len(node.inputs) - 2
    left = [i for i in range(states) if i not in replaced]
    remaining = [node.outputs[i] for i in [*left, *range(states, len(node.outputs))]]
    outputs = [ir.Value(type=y.type, shape=y.shape) for y in remaining]
    with op.within(body) as inner:
        for rows, _ in replaced.values():
            if rows:
                row = inner.Concat(*(inner.Unsqueeze(x, [0]) for x in rows), axis=0)
                body.outputs.append(row)
                outputs.append(ir.Value(type=row.type, shape=ir.Shape([None, *row.shape])))
    for i in sorted(replaced, reverse=True):
        del body.outputs[i + 1]
        del body.inputs[i + 2]
    remove_unused_nodes(body)
    inputs = [*node.inputs[:2], *(node.inputs[i + 2] for i in left)]
    body = body.clone(allow_outer_scope_values=True)
    op.call_op("Loop", inputs, {"body": body}, outputs=outputs, name=node.name)
    for y, new in zip(remaining, outputs, strict=False):
        _swap_copy(op, y, new)
    stacks = iter(outputs[len(remaining) :])
    for i, (rows, first) in replaced.items():
        y, whole = node.outputs[i], first
        if rows:
            stack = next(stacks)
            whole = op.Reshape(stack, op.Concat([-1], op.Shape(stack, start=2), axis=0))
            if first:
                whole = op.Concat(_stacked(op, first), whole, axis=0)
        if isinstance(whole, ir.Value):
            again = op.SplitToSequence(whole, axis=0, keepdims=0)
        else:
            again = op.Identity(node.inputs[i + 2])
        contents[_swap_copy(op, y, again)] = whole
    node.graph.remove(node, safe=True)  # type: ignore[union-attr]


def _appended(before: ir.Value, after: ir.Value | None) -> list[ir.Value] | None:
    """Return the tensors that a turn of a Loop appends to a sequence, or None if it does anything else."""
    rows: list[ir.Value] = []
    while after is not before:
        node = None if after is None else after.producer()
        if after is None or node is None or len(after.uses()) + after.is_graph_output() != 1:
            return None
        if node.op_type == "SequenceInsert" and len(node.inputs) == 2 and node.inputs[1] is not None:
            rows.append(node.inputs[1])
        elif node.op_type != "Identity":
            return None
        after = node.inputs[0]
    return rows[::-1]


def _are_alike(rows: Sequence[ir.Value], readers: Iterable[ir.Node], sizes: Container[_Size]) -> bool:
    """Return whether tensors have one shape in all turns, except along an axis that ConcatFromSequence joins."""
    shapes = [tuple(row.shape) for row in rows if row.shape is not None]
    if len(shapes) < len(rows) or len({len(shape) for shape in shapes}) > 1:
        return False
    rank = len(shapes[0])
    axes: set[int] = set()
    for node in readers:
        if node.op_type == "ConcatFromSequence":
            if not node.attributes.get_int("new_axis", 0):
                axes.add(node.attributes.get_int("axis", 0) % rank)
        elif node.op_type != "SequenceLength":
            axes.update(range(rank))
    return all(
        (isinstance(dim, int) or dim in sizes) and all(shape[axis] == dim for shape in shapes)
        for axis in axes
        for dim in [shapes[0][axis]]
    )


def _swap_copy(op: Emitter, y: ir.Value, result: ir.Value) -> ir.Value:
    """Replace `y` by a copy of `result` with the name of `y`, and return it."""
    return swap(y, like(op.Identity(result), y))
