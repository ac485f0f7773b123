"""Estimate the memory of a training step from the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError, cause
from graphopt.graph.message_inference import INFERENCE_ERRORS
from graphopt.graph.operators import VIEWS
from graphopt.graph.roles import FED, STATE, Role, role_of, with_role
from graphopt.graph.state import take_initial
from graphopt.graph.traversal import execution_order, forward_nodes, subgraphs, values_in, values_read
from graphopt.graph.typed_messages import infer_types
from graphopt.graph.values import bytes_of, name_of, size_name, state_of

Sizes = int | Mapping[str, int]


@dataclass(frozen=True)
class MemoryEstimate:
    """Hold the memory of a training graph in bytes.

    Args:
        parameters: the parameters, counted once.
        state: all state in an executor, which has two buffers for everything that a step updates.
        saved: the values that the forward pass computes and the backward pass reads.
        step: the peak of all other values during a step, without the inputs.
    """

    parameters: int
    state: int
    saved: int
    step: int

    @property
    def peak(self) -> int:
        """Return the memory of state and step together."""
        return self.state + self.step


def estimate(model: ir.Model, sizes: Sizes) -> MemoryEstimate:
    """Estimate the memory of a training step from the lifetimes of its values.

    A value lives from the node that computes it to its last reader, in ONNX Runtime's execution order. Outputs live
    to the end. The estimate omits scratch memory of kernels and unused memory of the allocator.

    Args:
        sizes: the size of each symbolic dimension of the inputs by name, or one size for all of them.

    Raises:
        GraphoptError: the size of a dimension is missing, or the model takes no such sizes.
    """
    sized = with_sizes(model, sizes)
    parameters = with_role(sized, Role.PARAMETER)
    updated = {state_of(y) for y in with_role(sized, Role.NEXT)}
    states = [x for x in sized.graph.inputs if role_of(x) in STATE]
    return MemoryEstimate(
        parameters=sum(map(bytes_of, parameters)),
        state=sum(bytes_of(x) * (1 + (x.name in updated)) for x in states),
        saved=sum(map(bytes_of, saved(sized))),
        step=_peak(sized.graph),
    )


def step_bytes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> int:
    """Estimate the peak memory of a training step on data of some shapes by name, without state and inputs.

    Raises:
        GraphoptError: the model takes no such shapes.
    """
    sizes = {
        dim.value: size
        for x in with_role(model, *FED)
        for dim, size in zip(x.shape or (), shapes[name_of(x)], strict=False)
        if isinstance(dim, ir.SymbolicDim) and dim.value
    }
    return estimate(model, sizes).step


def with_sizes(model: ir.Model, sizes: Sizes) -> ir.Model:
    """Return a copy with sizes in place of symbolic dimensions, and with the shapes that follow from them."""
    model = model.clone()
    take_initial(model)
    known: dict[str | None, int] = {}
    for x in model.graph.inputs:
        for name in filter(None, map(size_name, x.shape or ())):
            if not isinstance(sizes, int) and name not in sizes:
                raise GraphoptError(
                    f"dimension {name!r} of input {x.name!r}: expected its size in `sizes`, found sizes of "
                    f"{', '.join(sizes) or 'nothing'}"
                )
            known[name] = sizes if isinstance(sizes, int) else sizes[name]
    for graph in model.graphs():
        for x in values_in(graph):
            if x.shape is not None:
                x.shape = ir.Shape([d if isinstance(d, int) else known.get(d.value) for d in x.shape])
    try:
        infer_types(model, propagate=True)
    except INFERENCE_ERRORS as error:
        raise GraphoptError(
            f"sizes: expected some at which all shapes follow, found {sizes}: {cause(error)}"
        ) from error
    return model


def base_of(x: ir.Value, through: Collection[str] = VIEWS) -> ir.Value:
    """Return the value that `x` is a view of, by some operators, or `x` itself."""
    node = x.producer()
    while node is not None and node.op_type in through and node.domain == "" and node.inputs[0] is not None:
        x = node.inputs[0]
        node = x.producer()
    return x


def saved(model: ir.Model) -> list[ir.Value]:
    """Return the values that pass from the forward pass to the rest of the graph, without views."""
    forward = forward_nodes(model)
    read = (base_of(x) for node in model.graph if node not in forward for x in values_read(node))
    return list(dict.fromkeys(x for x in read if x.producer() in forward))


def _peak(graph: ir.Graph) -> int:
    """Return the peak memory of a graph's values in bytes."""
    order = execution_order(graph)
    last: dict[ir.Value, int] = {}
    for i, node in enumerate(order):
        last.update((base_of(x), i) for x in [*node.outputs, *values_read(node)])
    for y in graph.outputs:
        last[base_of(y)] = len(order)
    bound = {y for y in graph.outputs if role_of(y) is Role.NEXT}  # these live in the buffers of the state
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
