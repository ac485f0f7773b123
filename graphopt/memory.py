"""How many bytes a step of a training graph needs, told from the graph alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from graphopt.dataflow import forward_nodes, reads
from graphopt.emitter import subgraphs
from graphopt.errors import GraphoptError
from graphopt.roles import STATE, Role, role_of, with_role
from graphopt.state import take_initial

Sizes = int | Mapping[str, int]

# Operators whose output ONNX Runtime lays over their first input.
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class Memory:
    """Bytes of a training graph.

    Args:
        parameters: of the parameters, once.
        state: of all state as an executor holds it: what a step updates has two buffers.
        saved: of what the forward pass computes and the backward pass reads.
        step: the most that the values of a step take up at any time, beside state and what is fed.
    """

    parameters: int
    state: int
    saved: int
    step: int

    @property
    def peak(self) -> int:
        """Of state and step together."""
        return self.state + self.step


def estimate(model: ir.Model, sizes: Sizes) -> Memory:
    """Return how many bytes a step of a training graph takes, by the lifetimes of its values.

    A value lives from the node that makes it to its last reader, in ONNX Runtime's order; an output to the end. The
    scratch memory of kernels is not counted, nor what an allocator holds without need.

    Args:
        sizes: the size of each symbolic dimension of the inputs by name, or one for all of them.

    Raises:
        GraphoptError: the size of a dimension is missing.
    """
    sized = with_sizes(model, sizes)
    parameters = with_role(sized, Role.PARAMETER)
    updated = {str(y.name).removesuffix(".next") for y in with_role(sized, Role.NEXT)}
    states = [x for x in sized.graph.inputs if role_of(x) in STATE]
    return Memory(
        parameters=sum(map(bytes_of, parameters)),
        state=sum(bytes_of(x) * (1 + (x.name in updated)) for x in states),
        saved=sum(map(bytes_of, saved(sized))),
        step=_peak(sized.graph),
    )


def with_sizes(model: ir.Model, sizes: Sizes) -> ir.Model:
    """Return a copy in which the symbolic dimensions have sizes, and so has all that follows from them."""
    model = model.clone()
    take_initial(model)
    known: dict[str | None, int] = {}
    for x in model.graph.inputs:
        for dim in x.shape or ():
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                if not isinstance(sizes, int) and dim.value not in sizes:
                    raise GraphoptError(
                        f"dimension {dim.value!r} of input {x.name!r}: expected its size, found sizes of "
                        f"{', '.join(sizes) or 'nothing'}"
                    )
                known[dim.value] = sizes if isinstance(sizes, int) else sizes[dim.value]
    for graph in model.graphs():
        for x in [*graph.inputs, *(y for node in graph for y in node.outputs)]:
            if x.shape is not None:
                x.shape = ir.Shape([d if isinstance(d, int) else known.get(d.value) for d in x.shape])
    ShapeInferencePass()(model)
    return model


def bytes_of(x: ir.Value) -> int:
    """Return the bytes of a value; a dimension that only the run shows counts as 1."""
    if x.shape is None or x.dtype is None:
        return 0
    count = 1
    for dim in x.shape:
        count *= dim if isinstance(dim, int) else 1
    return (count * x.dtype.bitwidth + 7) // 8


def base_of(x: ir.Value) -> ir.Value:
    """Return the value whose memory `x` is a view of, or `x`."""
    node = x.producer()
    while node is not None and node.op_type in VIEWS and node.domain == "" and node.inputs[0] is not None:
        x = node.inputs[0]
        node = x.producer()
    return x


def saved(model: ir.Model) -> list[ir.Value]:
    """Return what the forward pass computes and the rest of the graph reads, views as what they are views of."""
    forward = forward_nodes(model)
    read = (base_of(x) for node in model.graph if node not in forward for x in reads(node))
    return list(dict.fromkeys(x for x in read if x.producer() in forward))


def execution_order(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes in the order that ONNX Runtime runs them in, but for what it fuses.

    Back from each node without a reader, the last in the file first, and from a node to what it reads, again the last
    in the file first: GraphViewer's default order (core/graph/graph_viewer.cc).
    """
    position = {node: i for i, node in enumerate(graph)}
    waiting = [(node, False) for node in graph if not any(y.uses() for y in node.outputs)]
    seen: set[ir.Node] = set()
    order = []
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            before = {x.producer() for x in reads(node)}
            inner = [one for one in before if one in position and one not in seen]
            waiting.extend((one, False) for one in sorted(inner, key=lambda one: position[one]))
    return order


def dependencies(nodes: Iterable[ir.Node]) -> dict[ir.Node | None, int]:
    """Return for each of some nodes, which are in order, a mask of itself and of those that it depends on."""
    found: dict[ir.Node | None, int] = {}
    for i, node in enumerate(nodes):
        mask = 1 << i
        for x in reads(node):
            mask |= found.get(x.producer(), 0)
        found[node] = mask
    return found


def results_when_ready(graph: ir.Graph) -> None:
    """Order the nodes without a reader so that ONNX Runtime runs each as soon as what it reads is there.

    It starts from the last in the file: what depends on the fewest nodes, such as the update of the last layer, which
    by another order would wait, and what it reads with it, for the whole backward pass.
    """
    depends = dependencies(graph)
    last = [node for node in graph if not any(y.uses() for y in node.outputs)]
    graph.remove(last)
    graph.extend(sorted(last, key=lambda node: -depends[node].bit_count()))


def _peak(graph: ir.Graph) -> int:
    """Return the most bytes that the values of a graph take up at a time."""
    order = execution_order(graph)
    last: dict[ir.Value, int] = {}
    for i, node in enumerate(order):
        last.update((base_of(x), i) for x in [*node.outputs, *reads(node)])
    for y in graph.outputs:
        last[base_of(y)] = len(order)
    bound = {y for y in graph.outputs if role_of(y) is Role.NEXT}  # in the buffers of the state
    ends: dict[int, list[ir.Value]] = {}
    made = {y for node in order for y in node.outputs if base_of(y) is y and y not in bound}
    for x in made:
        ends.setdefault(last[x], []).append(x)
    live = peak = 0
    for i, node in enumerate(order):
        live += sum(bytes_of(y) for y in node.outputs if y in made)
        peak = max(peak, live + max(map(_peak, subgraphs(node)), default=0))
        live -= sum(map(bytes_of, ends.get(i, ())))
    return peak
