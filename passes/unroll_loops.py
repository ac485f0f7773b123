"""Full loop unrolling: write the turns of Scan and Loop one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.limits import limits_of
from graphopt.graph.rewriting import Pass
from graphopt.graph.shapes import fold_shapes, infer
from graphopt.graph.simplify import Simplify
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import constant_number, constant_of, like, swap
from passes.gradients.rules.control_flow import numbers_of

LOOPS = ("Loop", "Scan")


@dataclass(frozen=True)
class UnrollLoops(Pass):
    """Unroll Scan and Loop fully, for runtimes without loops: each turn's operators follow those of the turn before.

    Results stay the same, bit for bit. Loops in bodies are unrolled too, and those of gradients. `Unroll` is another
    pass: it runs several training steps in one call, by a Scan.

    Raises:
        GraphoptError: a loop's number of turns is not known, a computed condition may end it, or the graph would have
            more nodes than `limits.nodes` allows.

    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> loop = passes.Unroll(steps=3)(step).model
    >>> "Scan" in {node.op_type for node in passes.UnrollLoops()(loop).model.graph}
    False
    """

    def rewrite(self, model: ir.Model) -> None:
        if _first_loop(model.graph, ()) is None:
            return
        infer(model)
        fold_shapes(model)
        while (first := _first_loop(model.graph, ())) is not None:
            node, bodies = first
            try:
                with Emitter(model) as op:
                    for body in bodies:
                        op = op.within(body)
                    _unroll(op, model, node)
            except GraphoptError as error:
                raise GraphoptError(f"UnrollLoops: {node.op_type} node {node.name!r}: {error}") from error
            model.graph.sort()
            if any(node.op_type == "Loop" for node in model.graph.all_nodes()):
                fold_shapes(model)  # how many turns it has may follow from what was unrolled
        Simplify().rewrite(model)


def _first_loop(graph: ir.Graph, bodies: tuple[ir.Graph, ...]) -> tuple[ir.Node, tuple[ir.Graph, ...]] | None:
    """Return the first loop that no other contains, and the branches of Ifs that it lies in, from the outside."""
    for node in graph:
        if node.op_type in LOOPS and node.domain == "":
            return node, bodies
        for body in subgraphs(node):
            if (first := _first_loop(body, (*bodies, body))) is not None:
                return first
    return None


def _unroll(op: Emitter, model: ir.Model, node: ir.Node) -> None:
    """Replace a loop by its turns."""
    body = node.attributes["body"].as_graph()
    turns = _turns(node, body)
    limit = limits_of(model).nodes
    nodes = sum(1 for _ in model.graph.all_nodes()) + turns * sum(1 for _ in body.all_nodes())
    if nodes > limit:
        raise GraphoptError(
            f"expected at most {limit:,} nodes after it is unrolled, found {nodes:,} for {turns:,} turns"
        )
    for own, y in zip(node.outputs, _results(op, node, body, turns), strict=True):
        if own.uses() or own.is_graph_output():
            if y is None:
                raise GraphoptError(f"expected turns for its output {own.name!r}, found none")
            swap(own, like(op.Identity(y), own))
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def _turns(node: ir.Node, body: ir.Graph) -> int:
    """Return how often a loop's body runs."""
    if node.op_type == "Scan":
        n = len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)
        axes = numbers_of(node, "scan_input_axes", len(node.inputs) - n)
        for x, axis in zip(node.inputs[n:], axes, strict=True):
            length = None if x is None or x.shape is None else x.shape[axis]
            if isinstance(length, int):
                return length
        x = node.inputs[n]
        raise GraphoptError(
            f"expected sequences of a known length, found {x and x.name!r} of shape {x and x.shape}: give the model's "
            f"input a static length, or fix the batch by batch="
        )
    trips, condition = node.inputs[:2]
    count = constant_of(trips)
    if count is None:
        raise GraphoptError(
            f"expected a constant trip count, found {'none' if trips is None else repr(trips.name)}: give the model "
            f"static shapes, or fix the batch by batch="
        )
    begins = condition is None or constant_of(condition)
    if begins is None:
        raise GraphoptError(f"expected a constant condition, found {condition and condition.name!r}")
    going: ir.Value | None = body.outputs[0]
    while going is not None and (before := going.producer()) is not None and before.op_type == "Identity":
        going = before.inputs[0]
    if going is not body.inputs[1] and not constant_number(going):
        raise GraphoptError(
            f"expected a condition that is always true, found {body.outputs[0].name!r}, which its body computes: only "
            f"the runtime knows when it ends"
        )
    return max(int(count.item()), 0) if begins else 0


def _results(op: Emitter, node: ir.Node, body: ir.Graph, turns: int) -> list[ir.Value | None]:
    """Emit the turns of a loop and return its results: the last states, and the stacked rows."""
    scanned = node.attributes.get_int("num_scan_inputs", 0)
    own = 0 if node.op_type == "Scan" else 2  # a Loop's trip count and condition come before its states
    inputs, rows = node.inputs[own : len(node.inputs) - scanned], node.inputs[len(node.inputs) - scanned :]
    states: list[ir.Value | None] = list(inputs)
    stacks: list[list[ir.Value]] = [[] for _ in body.outputs[len(states) + bool(own) :]]
    axes, ways = (numbers_of(node, f"scan_input_{name}", scanned) for name in ("axes", "directions"))
    for turn in range(turns):
        given = [
            op.Gather(x, turns - 1 - turn if way else turn, axis=axis)
            for x, axis, way in zip(rows, axes, ways, strict=True)
        ]
        counted = []
        if own:
            number = np.full([1] * len(body.inputs[0].shape or ()), turn, np.int64)
            counted = [op.constant(number), op.constant(np.array(True))]
        results = _inlined(op, node, body, turn, [*counted, *states, *given])[bool(own) :]
        for stack, y in zip(stacks, results[len(states) :], strict=True):
            stack.append(y)
        states[:] = results[: len(states)]
    axes, ways = (numbers_of(node, f"scan_output_{name}", len(stacks)) for name in ("axes", "directions"))
    for stack, axis, way in zip(stacks, axes, ways, strict=True):
        stacked = [op.Unsqueeze(y, [axis]) for y in (reversed(stack) if way else stack)]
        states.append(op.Concat(*stacked, axis=axis) if stacked else None)
    return states


def _inlined(
    op: Emitter, node: ir.Node, body: ir.Graph, turn: int, inputs: Sequence[ir.Value | None]
) -> list[ir.Value]:
    """Put a copy of the body's nodes before a loop, for one turn, and return what the body returns."""
    copy = body.clone(allow_outer_scope_values=True)
    values = dict(zip(copy.inputs, inputs, strict=True))
    values |= {x: op.constant(x.const_value.numpy()) for x in copy.initializers.values() if x.const_value}
    results = [values.get(y, y) for y in copy.outputs]
    for x, value in values.items():
        assert value is not None
        ir.convenience.replace_all_uses_with(x, value)
    copy.outputs.clear()
    nodes = list(copy)
    copy.remove(nodes)
    prefix = next(y.name for y in node.outputs if y.name)
    for inlined in nodes:
        inlined.name = None
        for y in inlined.outputs:
            y.name = f"{prefix}.{turn}.{y.name}" if y.name else y.name
    assert node.graph is not None
    node.graph.insert_before(node, nodes)
    return results  # type: ignore[return-value]
