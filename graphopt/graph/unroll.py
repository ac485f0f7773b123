"""Run several steps in one call: the step becomes the body of a Scan over stacked batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata, state
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import RANDOM, SHAPE_READERS
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import FED, Role, role_of, with_role
from graphopt.graph.shapes import places_of, read_sizes
from graphopt.graph.traversal import subgraphs, values_read
from graphopt.graph.values import like, name_of, producer_of, state_of
from graphopt.intervals import within


@dataclass(frozen=True)
class Unroll(Pass):
    """Run several steps in one call, on batches stacked along a new first axis.

    Reports come back stacked, and the state is bit-identical to that after single steps. Values that are the same in
    every step, such as the size of a batch, are computed once.

    Args:
        steps: the number of steps per call; None for any number of stacked batches.

    Raises:
        GraphoptError: `steps` is less than 1, or nothing trains.

    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> passes.Unroll(steps=4)(step).model.graph.inputs[0].shape
    Shape([4, SymbolicDim('batch'), 2])
    """

    steps: int | None = within("[1, inf)", None, whole=True)

    def rewrite(self, model: ir.Model) -> None:
        graph = model.graph
        following = {state_of(y): y for y in with_role(model, Role.NEXT)}
        if not following:
            raise GraphoptError("Unroll needs a training graph, found one without state to update: add an optimizer")
        fed = with_role(model, *FED)
        first = ir.SymbolicDim("steps") if self.steps is None else self.steps
        outer = {x: _twin(x, first) for x in fed}
        with Emitter(model) as op:
            counted = _counted(op, model, following, next(iter(outer.values()), None))
            sizes = [node for node in graph if node.op_type in SHAPE_READERS]
            read_sizes(op, sizes, places_of(outer.values(), first=1))
        carried = [x for x in graph.inputs if x.name in following]
        reported = [y for y in graph.outputs if role_of(y) is not Role.NEXT]
        results = [following[name_of(x)] for x in carried] + reported
        outer |= {x: _twin(x) for x in carried}
        stacked = [_twin(y, first) for y in reported]

        nodes = _varying(graph, outer)
        graph.outputs.clear()
        graph.inputs[:] = [outer.get(x, x) for x in graph.inputs]
        graph.remove(nodes)
        for value in {*outer, *results}:
            value.name = f"{value.name}.of_step"
            metadata.all_of(value).clear()
        body = ir.Graph([*carried, *fed], [], nodes=nodes, name="step")
        with Emitter(model) as op:
            inner = op.within(body)
            for y in results:
                taken = y.producer() not in nodes or y in body.outputs
                body.outputs.append(like(inner.Identity(y), y) if taken else y)
            outputs = [_twin(x) for x in carried] + stacked
            op.Scan(*(outer[x] for x in body.inputs), body=body, num_scan_inputs=len(fed), _outputs=outputs)
        graph.outputs.extend(stacked)
        for x, y in [*counted, *zip((outer[x] for x in carried), outputs, strict=False)]:
            state.set_next(model, x, y)


def _twin(x: ir.Value, first: int | ir.SymbolicDim | None = None) -> ir.Value:
    """Return a copy of value `x` with its name, type and role, and an additional first axis if given."""
    shape = x.shape if first is None or x.shape is None else ir.Shape([first, *x.shape])
    twin = ir.Value(name=x.name, type=x.type, shape=shape)
    metadata.copy(x, twin)
    twin.meta.update(x.meta)
    return twin


def _counted(
    op: Emitter, model: ir.Model, following: dict[str, ir.Value], sequence: ir.Value | None
) -> list[tuple[ir.Value, ir.Value]]:
    """Remove counters that no step reads from the carried states; return each with its value after all steps."""
    counted = []
    for x in with_role(model, Role.COUNTER) if sequence is not None else ():
        y = following[name_of(x)]
        node = producer_of(y)
        if node.op_type == "Add" and x.consumers() == (node,) and not y.uses():
            model.graph.outputs.remove(y)
            one = next(other for other in node.inputs if other is not x)
            steps = op.Squeeze(op.Shape(sequence, start=0, end=1))
            counted.append((x, like(op.Add(x, op.Mul(one, steps)), x)))
            model.graph.remove(node, safe=True)
            del following[name_of(x)]
    return counted


def _varying(graph: ir.Graph, inputs: Iterable[ir.Value]) -> list[ir.Node]:
    """Return the nodes whose outputs may differ from step to step."""
    varying = set(inputs)
    nodes = []
    for node in graph:
        if varying.intersection(values_read(node)) or node.op_type in RANDOM or subgraphs(node):
            nodes.append(node)
            varying.update(node.outputs)
    return nodes
