"""Remove the caches of decoders: a training graph computes all positions at once, after an empty past.

A cache is an input, the past, to which nodes append positions, and an output of the model with the result, the present.
Attention operators and Concat append, maybe after a change of layout. Other readers of the past ask for its sizes.
A state, such as that of a linear attention, keeps its size; without it, the operator starts from zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import MICROSOFT, SCATTERING, SHAPE_READERS, VIEWS
from graphopt.graph.postprocessing import Caches, detach_outputs
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.roles import Role
from graphopt.graph.shapes import fold_integers, places_of, read_sizes
from graphopt.graph.traversal import sort
from graphopt.graph.values import constant_of, is_floating, name_of

_MOVING = VIEWS | {"Cast", "Gather", "Slice", "Split", "Transpose"}
# Inputs of attention operators that are the past, the outputs that are the present, and the axis that grows.
_ATTENTION = {
    ("", "Attention"): ({4: 1, 5: 2}, 2),
    (MICROSOFT, "Attention"): ({4: 1}, 3),
    (MICROSOFT, "GroupQueryAttention"): ({3: 1, 4: 2}, 2),
    (MICROSOFT, "MultiHeadAttention"): ({6: 1, 7: 2}, 2),
}
# Inputs that are the state before the first position, 0 by default, and the outputs that are the state after the last.
_STATES = {
    (MICROSOFT, "CausalConvWithState"): {3: 1},
    (MICROSOFT, "GatedDeltaNet"): {6: 1},
    (MICROSOFT, "LinearAttention"): {3: 1},
}


class _Growth(NamedTuple):
    """A node that appends to its input number `at`, along an axis, and the outputs of the model with the result.

    A state of a fixed size has no axis.
    """

    node: ir.Node
    at: int
    axis: int | None
    presents: tuple[ir.Value, ...]


def choose_branches(model: ir.Model) -> None:
    """Drop branches with caches that a Boolean input chooses, such as `use_cache_branch`, for those without."""
    graph = model.graph
    _skip_empty(graph)
    choices = [x for x in graph.inputs if x.dtype is ir.DataType.BOOL and not x.is_initializer()]
    for choice in [x for x in choices if all(node.op_type == "If" for node in x.consumers())]:
        growths = [growth for x in graph.inputs for growth in _growths(x)]
        for node in choice.consumers():
            bodies = [node.attributes.get_graph(name) for name in ("then_branch", "else_branch")]
            within = [[growth for growth in growths if growth.node.graph is body] for body in bodies]
            if bool(within[0]) == bool(within[1]):
                continue
            dropped = 0 if within[0] else 1
            presents = dict.fromkeys(y for growth in within[dropped] for y in growth.presents)
            for x in graph.inputs:  # caches of an encoder's output, which the branch returns as they are
                if is_floating(x) and all(reader.graph is bodies[dropped] for reader in x.consumers()):
                    presents |= dict.fromkeys(_results(x))
            results = [node.outputs[bodies[dropped].outputs.index(y)] for y in presents]
            caches = Caches.read(model) or Caches()
            names = (*caches.outputs, *(name_of(y) for y in results if y.is_graph_output()))
            Caches(caches.inputs, tuple(dict.fromkeys(names))).write(model)
            value = np.full([1] * len(choice.shape or ()), bool(dropped))
            constant = ir.val(f"{name_of(node)}/chosen", const_value=ir.tensor(value))
            graph.register_initializer(constant)
            node.replace_input_with(0, constant)
            fold_integers(model)
            for inner in bodies[dropped].all_nodes():  # which still count as readers
                for k in range(len(inner.inputs)):
                    inner.replace_input_with(k, None)


def remove_caches(model: ir.Model) -> None:
    """Make the past of each cache empty, remove its input, and note the names."""
    graph = model.graph
    _skip_empty(graph)
    _warn_of_fixed(graph)
    found = {x: growths for x in graph.inputs if (growths := _growths(x))}
    shared = {dim for x in graph.inputs if x not in found for dim in x.shape or ()}
    lengths = {_length(growth) for growths in found.values() for growth in growths}
    found = {x: growths for x, growths in found.items() if not shared & {*map(_length, growths)}}
    if not found:
        return
    presents = (y for growths in found.values() for growth in growths for y in growth.presents)
    caches = Caches.read(model) or Caches()
    outputs = dict.fromkeys((*caches.outputs, *map(name_of, presents)))
    Caches((*caches.inputs, *map(name_of, found)), tuple(outputs)).write(model)
    for growth in dict.fromkeys(growth for growths in found.values() for growth in growths):
        _cut(growth)
    for x in found:
        x.shape = ir.Shape([0 if dim in lengths else dim for dim in x.shape or ()])
    remove_unused_nodes(graph)
    others = [x for x in graph.inputs if x not in found]
    with Emitter(model) as op:
        read_sizes(op, [node for x in found for node, _ in x.uses()], places_of(others))
    for x in found:
        if x.uses():
            raise GraphoptError(
                f"input {x.name!r}: expected a cache that only attention reads, found that "
                f"{x.consumers()[0].op_type} node {x.consumers()[0].name!r} reads its sizes {x.shape}: name its "
                "dimensions as those of other inputs"
            )
        graph.inputs.remove(x)
    sort(graph)


def set_aside(model: ir.Model, read: Collection[str]) -> None:
    """Detach the present of each cache from the outputs, and remove those of the inputs `read` that nothing reads now.

    `read` are names, because a conversion to another opset makes new values.

    The trained model has these outputs again.
    """
    caches, graph = Caches.read(model), model.graph
    if caches is None:
        return
    presents = [y for y in graph.outputs if name_of(y) in caches.outputs]
    with Emitter(model) as op:
        for y in presents:
            name, y.name = name_of(y), f"{y.name}/computed"
            graph.outputs[graph.outputs.index(y)] = op.Identity(y, _outputs=[name])
    detach_outputs(model, [y for y in graph.outputs if name_of(y) in caches.outputs], is_floating, Role.SOURCE)
    unread = [x for x in graph.inputs if name_of(x) in read and not x.uses() and not x.is_graph_output()]
    for x in unread:
        graph.inputs.remove(x)
    Caches((*caches.inputs, *map(name_of, unread)), caches.outputs).write(model)


def _length(growth: _Growth) -> int | ir.SymbolicDim | None:
    past = growth.node.inputs[growth.at]
    assert past is not None and past.shape is not None
    return None if growth.axis is None else past.shape[growth.axis]


def _growths(x: ir.Value) -> list[_Growth]:
    """Return the nodes that append to the past `x`; none if it is no cache."""
    if x.is_initializer() or not is_floating(x) or x.shape is None:
        return []
    growths, waiting = [], [x]
    while waiting:
        past = waiting.pop()
        if past.is_graph_output() or past.shape is None:
            return []
        for node, index in past.uses():
            if node.domain == "" and node.op_type in SHAPE_READERS and past is x:
                continue
            growth = _growth(node, index)
            if growth is not None:
                growths.append(growth)
            elif node.domain == "" and node.op_type in _MOVING and index == 0:
                waiting.extend(node.outputs)
            else:
                return []
    fixed = any(isinstance(_length(growth), int) for growth in growths)
    return [] if fixed else growths


def _warn_of_fixed(graph: ir.Graph) -> None:
    """Warn of inputs into which nodes write positions, and which the model returns: caches of a fixed size."""
    found = []
    for x in graph.inputs:
        readers = [node for node in x.consumers() if node.domain == "" and node.op_type in SCATTERING]
        written = [node for node in readers if node.inputs[0] is x and any(_results(node.outputs[0]))]
        if written and not x.is_initializer() and is_floating(x):
            found.append((x, written[0].op_type))
    if found:
        names = ", ".join(repr(name_of(x)) for x, _ in found)
        x, kind = found[0]
        warnings.warn(
            f"inputs {names}: caches of a fixed size stay inputs of the training graph, found {kind} into {x.name!r} "
            f"of shape {x.shape}: feed zeros and positions from 0, or export the model with a dynamic cache or none",
            stacklevel=2,
        )


def _skip_empty(graph: ir.Graph) -> None:
    """Make the readers of a Concat of an input and nothing, by which exporters begin a cache, read the input."""
    for x in graph.inputs:
        for node in [node for node in x.consumers() if node.op_type == "Concat" and node.domain == ""]:
            arrays = [constant_of(y) for y in node.inputs if y is not x]
            empty = all(array is not None and not array.size for array in arrays) and node.inputs.count(x) == 1
            if empty and not node.outputs[0].is_graph_output() and node.graph is not None:
                ir.convenience.replace_all_uses_with(node.outputs[0], x)
                node.graph.remove(node, safe=True)


def _growth(node: ir.Node, index: int) -> _Growth | None:
    past = node.inputs[index]
    assert past is not None and past.shape is not None
    axis: int | None
    if (node.domain, node.op_type) in _ATTENTION or (node.domain, node.op_type) in _STATES:
        pairs, axis = _ATTENTION.get((node.domain, node.op_type)) or (
            _STATES[node.domain, node.op_type],
            None,
        )
        grown = [node.outputs[pairs[index]]] if len(node.outputs) > pairs.get(index, len(node.outputs)) else []
    elif node.op_type == "Concat" and node.domain == "" and index == 0 and _feeds_attention(node):
        axis, grown = node.attributes.get_int("axis") % len(past.shape), [node.outputs[0]]
    else:
        return None
    presents = tuple(y for x in grown for y in _results(x))
    return _Growth(node, index, axis, presents) if presents else None


def _feeds_attention(node: ir.Node) -> bool:
    """Return whether a Concat appends a computed value, and another operator reads the result or a body returns it."""
    appended, front = [x for x in node.inputs[1:] if x is not None], [node.outputs[0]]
    if not appended or any(x.is_graph_input() or x.is_initializer() for x in appended):
        return False
    of_bodies = node.graph is not node.inputs[0].graph  # type: ignore[union-attr]
    while front:
        y = front.pop()
        if of_bodies and y.is_graph_output():
            return True
        for reader in y.consumers():
            if reader.domain or (reader.op_type not in _MOVING and reader.op_type != "Concat"):
                return True
            front += reader.outputs
    return False


def _results(x: ir.Value) -> Iterator[ir.Value]:
    """Yield the outputs of the model that are `x` in some layout."""
    if x.is_graph_output():
        yield x
    for node in x.consumers():
        if node.domain == "" and (node.op_type in _MOVING or node.op_type == "Concat"):
            for y in node.outputs:
                yield from _results(y)


def _cut(growth: _Growth) -> None:
    """Remove the past from the inputs of a node."""
    node, index, *_ = growth
    if node.op_type != "Concat":
        node.replace_input_with(index, None)
        return
    rest = [x for i, x in enumerate(node.inputs) if i != index]
    for i, x in enumerate(rest):
        node.replace_input_with(i, x)
    node.resize_inputs(len(rest))
