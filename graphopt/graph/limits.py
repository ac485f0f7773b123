"""Bound the size of a model: a file of a few kilobytes can describe a model of any size."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.fields import check_intervals
from graphopt.graph.operators import GROWING, SHAPE_READERS
from graphopt.graph.traversal import subgraphs, values_read
from graphopt.graph.values import bytes_of, is_static, node_label, producer_of, tensor_bytes
from graphopt.intervals import within

_KEY = "graphopt.limits"
_LONG = 2**20  # elements of a vector, which ONNX's inference propagates in about a second
PER_BYTE = 32  # bytes of constants per byte of weights: 4-bit weights may become several float32 constants


@dataclass(frozen=True)
class Limits:
    """Bound the size of a model; the bounds are checked by arithmetic before anything is expanded.

    They bound memory and time, because the cost of compilation is proportional to the number of nodes and to the
    bytes of constants. To change them, call `graphopt.load(path, limits=Limits(nodes=10**7))`, or set
    `limits.nodes=10000000` in a recipe.

    Args:
        nodes: the maximum number of nodes once functions are inlined.
        depth: the maximum nesting depth of subgraphs and function calls; protobuf itself reads at most 32 nested
            graphs.
        constant_bytes: the maximum total size of values that nodes compute from constants, in addition to 32 times
            the weights in the file.
    """

    nodes: int = within("[0, inf)", 1_000_000)
    depth: int = within("[0, inf)", 24)
    constant_bytes: int = within("[0, inf)", 2**31)

    def __post_init__(self) -> None:
        check_intervals(self)


def set_limits(model: ir.Model, limits: Limits) -> None:
    """Set the limits of a model. Copies of the model keep them; saved files do not."""
    model.graph.meta[_KEY] = limits


def limits_of(model: ir.Model) -> Limits:
    return model.graph.meta.get(_KEY, Limits())


def check_size(model: ir.Model) -> None:
    """Raise an error if a model's functions are recursive, or it exceeds the limit of nodes or depth."""
    limits = limits_of(model)
    known: dict[ir.OperatorIdentifier, tuple[int, int]] = {}  # functions: their nodes and nesting depth
    calls = {
        name: {node.op_identifier() for graph, _ in graphs_with_depth(function) for node in graph}
        & model.functions.keys()
        for name, function in model.functions.items()
    }
    try:
        for identifier in graphlib.TopologicalSorter(calls).static_order():
            known[identifier] = _measure(model.functions[identifier], known)
    except graphlib.CycleError as error:
        domain, name, _ = error.args[1][0]
        raise GraphoptError(
            f"function {domain}::{name}: expected no recursion, found a function that calls itself"
        ) from error
    nodes, depth = _measure(model.graph, known)
    if nodes > limits.nodes:
        raise GraphoptError(
            f"the model: expected at most {limits.nodes:,} nodes with its functions inlined, found {nodes:,}: "
            f"limits.nodes={nodes} allows it"
        )
    if depth > limits.depth:
        raise GraphoptError(
            f"the model: expected subgraphs and calls nested at most {limits.depth} deep, found {depth}: "
            f"limits.depth={depth} allows it"
        )


def _measure(whole: ir.Graph | ir.Function, known: Mapping[ir.OperatorIdentifier, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of nodes of a graph once calls are inlined, and its nesting depth."""
    nodes = deepest = 0
    for graph, depth in graphs_with_depth(whole):
        deepest = max(deepest, depth)
        for node in graph:
            more, below = known.get(node.op_identifier(), (0, -1))
            nodes += 1 + more
            deepest = max(deepest, depth + 1 + below)
    return nodes, deepest


def graphs_with_depth(whole: ir.Graph | ir.Function) -> Iterator[tuple[ir.Graph | ir.Function, int]]:
    """Yield a graph and all its subgraphs, each with its depth; without recursion."""
    waiting: list[tuple[ir.Graph | ir.Function, int]] = [(whole, 0)]
    while waiting:
        graph, depth = waiting.pop()
        yield graph, depth
        waiting.extend((body, depth + 1) for node in graph for body in subgraphs(node))


def check_constants(model: ir.Model) -> None:
    """Raise an error if values of known shape that nodes compute from constants are too large."""
    sizes = _sizes(model, set())
    total = sum(sizes.values())
    if total > _allowed(model):
        largest = max(sizes, key=sizes.__getitem__)
        node = producer_of(largest)
        raise GraphoptError(
            f"{node_label(node)}: expected constants of at most {_allowed(model):,} bytes in the model, "
            f"found {total:,}, of which {largest.name!r} of shape {largest.shape} takes {sizes[largest]:,}: "
            f"limits.constant_bytes={total} allows it"
        )


def are_surely_small(model: ir.Model) -> bool:
    """Return whether constants surely take no more than is allowed: the sizes of those that may be large are known."""
    constant: set[ir.Value] = set()
    total = sum(_sizes(model, constant).values())
    known = all(is_static(y) for y in constant if (node := y.producer()) and node.op_type in GROWING)
    return known and total <= _allowed(model)


def _allowed(model: ir.Model) -> int:
    stored = sum(tensor_bytes(x.const_value) for graph in model.graphs() for x in graph.initializers.values())
    return limits_of(model).constant_bytes + PER_BYTE * stored


def _sizes(model: ir.Model, constant: set[ir.Value]) -> dict[ir.Value, int]:
    """Return the bytes of values of known shape that nodes compute from constants; `constant` gets all constants."""
    return {y: bytes_of(y) for y in _computed(model.graph, constant) if is_static(y)}


def _computed(graph: ir.Graph, constant: set[ir.Value]) -> Iterator[ir.Value]:
    """Yield the values computed from constants only; `constant` contains those of the surrounding graphs."""
    constant.update(x for x in graph.initializers.values() if not x.is_graph_input())
    for node in graph:
        for body in subgraphs(node):
            yield from _computed(body, constant)
        shaped = node.inputs[0] if node.op_type in SHAPE_READERS and node.inputs else None
        if constant.issuperset(values_read(node)) if shaped is None else is_static(shaped):
            constant.update(node.outputs)
            yield from node.outputs


def are_vectors_short(graph: ir.Graph, known: Callable[[ir.Value], ir.Shape | None]) -> bool:
    """Return whether ONNX's data propagation surely computes no long vector.

    It computes vectors from sizes and from constant vectors, node by node. Of all that it does, only a Concat and a new
    axis of a value make more numbers, at most as many as there are in the operands together.

    Args:
        known: returns the shape of a value that inference finds without data propagation, if it does.
    """
    counts = {x: _count(x.shape, 1) for x in (*graph.inputs, *graph.initializers.values())}
    _count_numbers(graph, known, counts)
    return max(counts.values(), default=0) <= _LONG


def _count_numbers(graph: ir.Graph, known: Callable[[ir.Value], ir.Shape | None], counts: dict[ir.Value, int]) -> None:
    """Bound the numbers of each vector of a graph, and the rank of each other value."""
    for node in graph:
        most = min(sum(counts.get(x, 1) for x in values_read(node)), _LONG + 1)
        for body in subgraphs(node):
            counts.update((x, _count(known(x), most)) for x in body.inputs)
            counts.update((x, _count(x.shape, 1)) for x in body.initializers.values())
            _count_numbers(body, known, counts)
            most = min(most + sum(counts.get(y, 1) for y in body.outputs), _LONG + 1)
        counts.update((y, _count(known(y), most)) for y in node.outputs)


def _count(shape: ir.Shape | None, otherwise: int) -> int:
    if shape is None:
        return otherwise
    if shape.rank() != 1:
        return shape.rank()
    return dim if isinstance(dim := shape[0], int) else otherwise
