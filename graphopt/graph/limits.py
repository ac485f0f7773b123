"""Bound the size of a model: a file of a few kilobytes can describe one of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.traversal import captured, subgraphs
from graphopt.intervals import check_intervals, within

_KEY = "graphopt.limits"
PER_BYTE = 32  # bytes of constants for each byte of a weight: 4-bit weights become float32 several times over


@dataclass(frozen=True)
class Limits:
    """Bounds of what a model describes, checked by arithmetic before anything is expanded.

    They bound memory and, with it, time: what compiling does is proportional to the nodes and to the constants' bytes.
    `graphopt.load(path, limits=Limits(nodes=10**7))` gives a model other limits, a recipe `limits.nodes=10000000`.

    Args:
        nodes: how many nodes a model may have once its functions are inlined.
        depth: how deeply bodies of nodes and calls of functions may nest; protobuf itself reads no graphs nested in
            more than 32 others.
        constant_bytes: how much all values that nodes compute from constants may take together, beyond 32 times the
            weights in the file.
    """

    nodes: int = within("[0, inf)", 1_000_000)
    depth: int = within("[0, inf)", 24)
    constant_bytes: int = within("[0, inf)", 2**31)

    def __post_init__(self) -> None:
        check_intervals(self)


def set_limits(model: ir.Model, limits: Limits) -> None:
    """Give a model limits, which its copies keep and its file does not."""
    model.graph.meta[_KEY] = limits


def limits_of(model: ir.Model) -> Limits:
    """Return the limits that a model was loaded with."""
    return cast(Limits, model.graph.meta.get(_KEY, Limits()))


def check_size(model: ir.Model) -> None:
    """Raise an error if a model's functions call themselves, or it has more nodes or is nested deeper than it may be.

    Raises:
        GraphoptError: names the limit, what was found and the option that raises it.
    """
    limits = limits_of(model)
    known: dict[ir.OperatorIdentifier, tuple[int, int]] = {}
    for function in model.functions.values():
        _measure_function(model, function, known, limits)
    nodes, depth = _measure(model, model.graph, known)
    if nodes > limits.nodes:
        raise GraphoptError(
            f"the model: expected at most {limits.nodes:,} nodes with its functions inlined, found {nodes:,}: "
            f"limits.nodes={nodes} allows it"
        )
    if depth > limits.depth:
        raise GraphoptError(
            f"the model: expected bodies and calls nested at most {limits.depth} deep, found {depth}: "
            f"limits.depth={depth} allows it"
        )


def _measure_function(
    model: ir.Model,
    function: ir.Function,
    known: dict[ir.OperatorIdentifier, tuple[int, int]],
    limits: Limits,
) -> None:
    """Measure a function, and first those that it calls; without recursion, as calls may nest to any depth."""
    path = [function]
    while path:
        current = path[-1]
        called = {node.op_identifier() for graph, _ in _bodies(current) for node in graph}
        unknown = [name for name in called if name in model.functions and name not in known]
        if not unknown:
            known[current.identifier()] = _measure(model, current, known)
            path.pop()
        elif any(name == one.identifier() for name in unknown for one in path):
            name = current.identifier()
            raise GraphoptError(
                f"function {name[0]}::{name[1]}: expected one that ends, found one that calls itself"
            )
        else:
            path.append(model.functions[unknown[0]])


def _measure(
    model: ir.Model, whole: ir.Graph | ir.Function, known: dict[ir.OperatorIdentifier, tuple[int, int]]
) -> tuple[int, int]:
    """Return how many nodes a graph has once calls are inlined, and how deeply it is nested."""
    nodes = deepest = 0
    for graph, depth in _bodies(whole):
        deepest = max(deepest, depth)
        for node in graph:
            more, below = known[node.op_identifier()] if node.op_identifier() in model.functions else (0, -1)
            nodes += 1 + more
            deepest = max(deepest, depth + 1 + below)
    return nodes, deepest


def _bodies(whole: ir.Graph | ir.Function) -> Iterator[tuple[ir.Graph | ir.Function, int]]:
    """Yield a graph and the graphs in its nodes, and how deep each lies; without recursion."""
    waiting: list[tuple[ir.Graph | ir.Function, int]] = [(whole, 0)]
    while waiting:
        graph, depth = waiting.pop()
        yield graph, depth
        waiting.extend((body, depth + 1) for node in graph for body in subgraphs(node))


def check_constants(model: ir.Model) -> None:
    """Raise an error if what nodes compute from constants alone takes more memory than it may, as far as shapes tell.

    Raises:
        GraphoptError: names the largest value, and the option that raises the limit.
    """
    given = sum(
        x.const_value.nbytes for graph in model.graphs() for x in graph.initializers.values() if x.const_value
    )
    allowed = limits_of(model).constant_bytes + PER_BYTE * given
    constant: set[ir.Value] = set()
    sizes = {y: _bytes(y) for y in _computed(model.graph, constant)}
    total = sum(sizes.values())
    if total > allowed:
        largest = max(sizes, key=sizes.__getitem__)
        node = largest.producer()
        assert node is not None
        raise GraphoptError(
            f"{node.op_type} node {node.name!r}: expected constants of at most {allowed:,} bytes in the model, found "
            f"{total:,}, of which {largest.name!r} of shape {largest.shape} takes {sizes[largest]:,}: "
            f"limits.constant_bytes={total} allows it"
        )


def _computed(graph: ir.Graph, constant: set[ir.Value]) -> Iterator[ir.Value]:
    """Yield the values that nodes compute from constants alone; `constant` has the values around the graph."""
    constant.update(x for x in graph.initializers.values() if not x.is_graph_input())
    for node in graph:
        for body in subgraphs(node):
            yield from _computed(body, constant)
        if _is_constant(node, constant):
            constant.update(node.outputs)
            yield from node.outputs


def _is_constant(node: ir.Node, constant: set[ir.Value]) -> bool:
    if node.op_type in ("Shape", "Size") and node.inputs and node.inputs[0] is not None:
        shape = node.inputs[0].shape
        return shape is not None and shape.is_static()
    return constant.issuperset(_read(node))


def _read(node: ir.Node) -> Iterable[ir.Value]:
    return [x for x in [*node.inputs, *captured(node)] if x is not None]


def _bytes(value: ir.Value) -> int:
    if value.shape is None or not value.shape.is_static() or value.dtype in (None, ir.DataType.STRING):
        return 0
    count = 1
    for dim in value.shape.numpy():
        count *= dim
    return int(count * value.dtype.itemsize) if value.dtype else 0
