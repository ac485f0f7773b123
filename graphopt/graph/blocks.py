"""Read arrays where they lie that a graph cuts into parts and joins again, and gather those that have another order.

Exporters lay the weights of recurrent layers out anew that way: each gate is a Slice. A gradient does the reverse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.operators import VIEWS
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import constant_of, is_static, like, redirect

_MOST_PARTS = 64  # of a value, so that long chains of Concats cost no more than their lengths
_SHORT = 4096  # numbers of a vector, which a Gather copies one by one


class Part(NamedTuple):
    """Hold numbers of a value that lie one after the other in memory."""

    source: ir.Value
    start: int
    stop: int


_Parts = tuple[Part, ...]


def gather_blocks(model: ir.Model) -> bool:
    """Replace a Concat of parts of values by a Gather of rows of these values; return whether anything changed.

    A Concat of all numbers of one value in their order becomes a view of this value. A Concat of the same parts as
    another value is replaced by that value. Results are the same bits.

    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, float[6] w)
    ...     => (float[6] y) { a, b, c = Split<num_outputs=3>(w)  z = Concat<axis=0>(b, c, a)  y = Add(x, z) }''')
    >>> loaded = graphopt.load(onnx.shape_inference.infer_shapes(model))
    >>> gather_blocks(loaded), [node.op_type for node in loaded.graph if node.op_type != "Constant"]
    (True, ['Gather', 'Add'])
    """
    known: dict[ir.Value, _Parts] = {}
    found: dict[tuple[_Parts, tuple[int, ...]], ir.Value] = {}
    changed = False
    with Emitter(model) as op:
        for node in list(model.graph):
            for y, parts in _parts(node, known):
                known[y] = parts
                # Others, such as YieldOp, may not read an input of the graph.
                uses = [use for use in y.uses() if not use.node.domain]
                if y.is_graph_output() or InferenceForm.is_on(y) or not uses:
                    continue
                key = parts, _shape(y)
                new = found.get(key)
                if new is None and (new := _again(op, node, y, parts)) is not None:
                    known[new] = parts
                if new is not None or node.op_type == "Concat":
                    found[key] = new or y
                if new is not None:
                    redirect(uses, new)
                    changed = True
    if changed:
        model.graph.sort()
        remove_unused_nodes(model.graph)
    return changed


def parts_of(x: ir.Value) -> tuple[Part, ...]:
    """Return where the numbers of a value, one part after the other, lie in other values; nothing if it is unknown."""
    known: dict[ir.Value, _Parts] = {}
    before, last = ancestors([x]), x.producer()
    for node in [] if last is None or last.graph is None else last.graph:
        if node in before:
            known.update(_parts(node, known))
    return known.get(x, ())


def starts_of_blocks(x: ir.Value, count: int) -> list[int] | None:
    """Return where equal blocks of a value begin in the only array that it is made of; None if it is not so.

    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]> g (float[6] w) => (float[6] z)
    ...     { a, b, c = Split<num_outputs=3>(w)  z = Concat<axis=0>(b, c, a) }''')
    >>> loaded = graphopt.load(onnx.shape_inference.infer_shapes(model))
    >>> starts_of_blocks(loaded.graph.outputs[0], 3)
    [2, 4, 0]
    """
    parts = parts_of(x)
    size = math.prod(_shape(x)) // count if parts else 1
    starts = [start for part in parts for start in range(part.start, part.stop, size)]
    is_whole = len({part.source for part in parts}) == 1 and all(n % size == 0 for _, *ends in parts for n in ends)
    return starts if is_whole and len({*starts}) == count else None


def _shape(x: ir.Value) -> tuple[int, ...]:
    """Return the sizes of a value that has static ones."""
    assert x.shape is not None
    return x.shape.numpy()


def _parts(node: ir.Node, known: dict[ir.Value, _Parts]) -> list[tuple[ir.Value, _Parts]]:
    """Return of which parts each output of a node consists that moves whole blocks of memory; of others, nothing."""
    is_view, joins = node.op_type in VIEWS, node.op_type == "Concat"
    if node.domain or not (is_view or joins or node.op_type in ("Slice", "Split")):
        return []
    read = [x for x in (node.inputs if joins else node.inputs[:1]) if x is not None]
    if not all(map(is_static, (*read, *node.outputs))):
        return []
    start, axis = 0, node.attributes.get_int("axis", 0)
    if node.op_type == "Slice":
        cut = _cut(node, read[0])
        if cut is None:
            return []
        axis, start = cut
    if not is_view and math.prod(_shape(node.outputs[0])[: axis % len(_shape(node.outputs[0]))]) != 1:
        return []
    parts = [part for x in read for part in known.get(x, (Part(x, 0, math.prod(_shape(x))),))]
    found = []
    for y in node.outputs:
        stop = start + math.prod(_shape(y))
        own = _between(parts, start, stop)
        is_whole = sum(part.stop - part.start for part in own) == stop - start  # but where shapes are declared wrongly
        if is_whole and 0 < len(own) <= _MOST_PARTS:
            found.append((y, own))
        start = stop
    return found


def _cut(node: ir.Node, x: ir.Value) -> tuple[int, int] | None:
    """Return the only axis that a Slice cuts, in steps of 1, and the number at which it begins; None for others."""
    if len(node.inputs) < 4:
        return None
    starts, _, axes, *steps = map(constant_of, node.inputs[1:])
    if starts is None or axes is None or starts.size != 1 or any(x is None or x.item() != 1 for x in steps):
        return None
    shape, axis, start = _shape(x), axes.item(), starts.item()
    begin = min(max(start + shape[axis] if start < 0 else start, 0), shape[axis])
    return axis, begin * math.prod(shape[axis % len(shape) + 1 :])


def _between(parts: Sequence[Part], start: int, stop: int) -> _Parts:
    """Return what lies in a range of parts that follow each other, without seams inside of a source."""
    found, begin = list[Part](), 0
    for source, first, last in parts:
        low, high = max(start - begin, 0), min(stop - begin, last - first)
        begin += last - first
        if low >= high:
            continue
        part = Part(source, first + low, first + high)
        if found and found[-1].source is source and found[-1].stop == part.start:
            part = Part(source, found.pop().start, part.stop)
        found.append(part)
    return tuple(found)


def _again(op: Emitter, node: ir.Node, y: ir.Value, parts: _Parts) -> ir.Value | None:
    """Return an output of a node, made of its parts by fewer nodes; None if the node does as well."""
    sources, shape = [*dict.fromkeys(part.source for part in parts)], _shape(y)
    x = sources[0]
    if _shape(x) == shape and len(parts) == 1:
        return x
    if math.prod(_shape(x)) == math.prod(shape) and len(parts) == 1:
        return None if node.inputs[0] is x else like(op.Reshape(x, op.constant([*shape])), y)
    rows = shape[: len(shape) - len(_shape(x)) + 1]
    alike = rows and all(map(_shape, sources)) and all(_shape(z)[1:] == shape[len(rows) :] for z in sources)
    behind = node.inputs[0].producer() if node.op_type in VIEWS and node.inputs[0] is not None else node
    if behind is None or behind.op_type not in ("Concat", "Gather") or not alike:
        return None
    if behind is not node and len(behind.outputs[0].uses()) > 1:  # which need it in its own shape
        return None
    sizes = [_shape(source)[0] for source in sources]
    width, is_whole = math.prod(shape[len(rows) :]), sum(sizes) == math.prod(rows)
    if len(sources) > 1:
        in_order = len(parts) == len(sources)
        if not is_whole or (in_order and (behind is not node or len(rows) > 1)):
            return None
        if in_order:
            return like(op.Concat(*sources, axis=0), y) if len(sources) < len(node.inputs) else None
    if (width == 1 and sum(sizes) > _SHORT) or any(n % width for _, *ends in parts for n in ends):
        return None
    if len(sources) > 1:
        x = op.Concat(*sources, axis=0)
        x.type, x.shape = y.type, ir.Shape([sum(sizes), *shape[len(rows) :]])
    begins = dict(zip(sources, itertools.accumulate(sizes, initial=0), strict=False))
    ranges = [begins[source] + np.arange(start // width, stop // width) for source, start, stop in parts]
    return like(op.Gather(x, op.constant(np.concatenate(ranges).reshape(rows)), axis=0), y)
