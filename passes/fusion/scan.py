"""Move work of a Scan that does not depend on the previous step out of the loop, and do it for all steps at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import like
from passes.gradients.registry import ELEMENTWISE

# Each element or row of their outputs depends on that of their inputs: beside those with a row of local derivatives.
ELEMENTWISE_TOO = {"And", "Cast", "Equal", "Greater", "Less", "Not", "Or", "Where"}


@dataclass(eq=False)
class State:
    """Hold what a step of a Scan hands to the next."""

    start: ir.Value
    before: ir.Value
    after: ir.Value
    last: ir.Value


@dataclass(eq=False)
class Rows:
    """A sequence, of which a step takes or gives a row."""

    row: ir.Value
    sequence: ir.Value
    axis: int = 0
    way: int = 0


class Steps:
    """A Scan taken apart: the states that its steps hand on, and the rows that they take and give."""

    def __init__(self, op: Emitter, node: ir.Node) -> None:
        self.node, self.body = node, node.attributes["body"].as_graph()
        self.inner = op.within(self.body)
        starts = [x for x in node.inputs if x is not None]
        n = len(starts) - node.attributes.get_int("num_scan_inputs", 0)
        ends = zip(starts[:n], self.body.inputs[:n], self.body.outputs[:n], node.outputs[:n], strict=True)
        self.states = [State(*end) for end in ends]
        self.taken = self._rows("input", self.body.inputs[n:], starts[n:])
        self.given = self._rows("output", self.body.outputs[n:], node.outputs[n:])

    def _rows(self, side: str, rows: Sequence[ir.Value], sequences: Sequence[ir.Value]) -> list[Rows]:
        zeros = [0] * len(rows)
        axes, ways = (
            self.node.attributes.get_ints(f"scan_{side}_{name}", zeros) for name in ("axes", "directions")
        )
        return [Rows(*row) for row in zip(rows, sequences, axes, ways, strict=True)]

    def stacked(self, x: ir.Value) -> ir.Value:
        """Return a new value: all steps' `x`."""
        assert x.shape is not None
        first = self.taken[0]
        steps = None if first.sequence.shape is None else first.sequence.shape[first.axis]
        name = f"{self.node.outputs[0].name}/{x.name}"
        return ir.Value(name=name, type=x.type, shape=ir.Shape([steps, *x.shape]))

    def whole(self, x: ir.Value) -> Rows | None:
        """Return the sequence that a value of the body is a row of, if there is one."""
        for rows in (*self.taken, *self.given):
            if _behind(rows.row) is x and rows.axis == 0:
                return rows
        return None

    def give(self, x: ir.Value, way: int) -> Rows:
        """Make all steps' `x` an output."""
        self.given.append(Rows(like(self.inner.Identity(x), x), self.stacked(x), 0, way))
        return self.given[-1]

    def put_together(self, graph: ir.Graph) -> None:
        """Replace the Scan by what has become of it."""
        outputs = []
        for y in [*(state.last for state in self.states), *(rows.sequence for rows in self.given)]:
            outputs.append(y if y.producer() is None else ir.Value(name=y.name, type=y.type, shape=y.shape))
            ir.convenience.replace_all_uses_with(y, outputs[-1], replace_graph_outputs=True)
        self.body.outputs[:] = [state.after for state in self.states] + [rows.row for rows in self.given]
        common.RemoveUnusedNodesPass()(ir.Model(self.body, ir_version=10))
        self.taken = [rows for rows in self.taken if rows.row.uses()] or self.taken[:1]
        self.body.inputs[:] = [state.before for state in self.states] + [rows.row for rows in self.taken]
        if outputs:
            graph.append(
                ir.node(
                    "Scan",
                    [*(state.start for state in self.states), *(rows.sequence for rows in self.taken)],
                    {
                        "body": self.body,
                        "num_scan_inputs": len(self.taken),
                        "scan_input_axes": [rows.axis for rows in self.taken],
                        "scan_input_directions": [rows.way for rows in self.taken],
                        "scan_output_axes": [rows.axis for rows in self.given],
                        "scan_output_directions": [rows.way for rows in self.given],
                    },
                    outputs=outputs,
                )
            )
        graph.remove(self.node, safe=True)


def _scans(rewrite: Callable[[Emitter, Steps], bool]) -> Callable[[ir.Model], bool]:
    """Return what rewrites all Scans of a model's graph."""

    def rewritten(model: ir.Model) -> bool:
        found = False
        with Emitter(model) as op:
            for node in [node for node in model.graph if node.op_type == "Scan" and node.domain == ""]:
                steps = Steps(op, node)
                if rewrite(op, steps):
                    steps.put_together(model.graph)
                    found = True
        return found

    return rewritten


def _take_out(op: Emitter, steps: Steps) -> bool:
    """Take sums of products a' b over the steps of a Scan, the gradients of recurrent weights, out of it.

    The sum over steps is the product of all steps' a and b, stacked: one large Gemm instead of as many small ones, and
    of as many sums the size of the weights. A step of an LSTM of 512 with 8 rows takes 42 ms instead of 70.
    """
    products = {state: gemm for state in steps.states if (gemm := _summed(steps.body, state)) is not None}
    for state, gemm in products.items():
        a, b = (x for x in gemm.inputs if x is not None)
        first, second = steps.whole(a), steps.whole(b)
        second = second or steps.give(b, first.way if first else 0)
        first = first if first and first.way == second.way else steps.give(a, second.way)
        sides = (op.Flatten(rows.sequence, axis=2) for rows in (first, second))
        total = like(op.Gemm(*sides, state.start, transA=1), state.last)
        ir.convenience.replace_all_uses_with(state.last, total, replace_graph_outputs=True)
        steps.states.remove(state)
    return bool(products)


def _summed(body: ir.Graph, state: State) -> ir.Node | None:
    """Return the product a' b that the step adds to a state, and does nothing else with, or None."""
    add = _behind(state.after).producer()
    if add is None or add.op_type != "Add" or [user for user, _ in state.before.uses()] != [add]:
        return None
    product = next((x for x in add.inputs if x is not None and x is not state.before), None)
    gemm = None if product is None else product.producer()
    if (
        product is None
        or gemm is None
        or gemm.op_type != "Gemm"
        or len(gemm.inputs) != 2
        or len(product.uses()) != 1
    ):
        return None
    whole = gemm.attributes.get_int("transA", 0) == 1 and gemm.attributes.get_int("transB", 0) == 0
    plain = gemm.attributes.get_float("alpha", 1.0) == 1.0
    inside = {*body.inputs, *(y for node in body for y in node.outputs)}
    return gemm if whole and plain and all(x in inside for x in gemm.inputs) else None


def _behind(value: ir.Value) -> ir.Value:
    """Return what a value is an Identity of."""
    while (
        (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0] is not None
    ):
        value = node.inputs[0]
    return value


def _part(op: Emitter, steps: Steps) -> bool:
    """Compute what a step computes from its slices alone for all steps at once: loop fission, and vectorization.

    A recurrent operator's step back computes its gates again: from all steps' states that is one large Gemm instead of
    as many small ones, and as many fewer calls of each activation. 40 steps of an LSTM of 16 with 8 rows take 0.46 ms
    instead of 0.89; of 128 with 32 rows, whose gates are saved, 9.0 instead of 9.4.
    """
    rows = {taken.row: taken for taken in steps.taken if taken.axis == 0}
    taken, moved = len(rows), set()
    for node in steps.body:
        if node.op_type == "Mul":
            _gather_factors(op, steps, node, rows)
        way = _way(steps, node, rows)
        results = None if way is None else _for_all_steps(op, steps, node, rows)
        if way is not None and results is not None:
            moved.add(node)
            for y, result in zip(node.outputs, results, strict=True):
                rows[y] = Rows(y, like(result, steps.stacked(y)), 0, way)
    for y, whole in [*rows.items()][taken:]:
        users = [(user, i) for user, i in y.uses() if user not in moved]
        if users:
            steps.taken.append(Rows(steps.inner.value_like(y), whole.sequence, 0, whole.way))
        for user, i in users:
            user.replace_input_with(i, steps.taken[-1].row)
    for given in [given for given in steps.given if given.row in rows]:
        ir.convenience.replace_all_uses_with(
            given.sequence, rows[given.row].sequence, replace_graph_outputs=True
        )
        steps.given.remove(given)
    return len(rows) > taken


def _way(steps: Steps, node: ir.Node, rows: dict[ir.Value, Rows]) -> int | None:
    """Return in which order the steps take the rows that a node reads, None if it needs more, or has to stay."""
    ways = {rows[x].way for x in node.inputs if x in rows}
    waits = any(
        x is not None and x not in rows and x.graph is steps.body and not x.is_initializer()
        for x in node.inputs
    )
    outputs = set(node.outputs)
    bound = not outputs.isdisjoint(state.after for state in steps.states) or any(
        given.row in outputs and (given.axis or given.way not in ways) for given in steps.given
    )
    return None if waits or bound or len(ways) != 1 else ways.pop()


def _gather_factors(op: Emitter, steps: Steps, node: ir.Node, rows: dict[ir.Value, Rows]) -> None:
    """Make v a b, of which a and b are rows, the product of v and of the row a b."""
    for b, x in itertools.permutations(node.inputs):
        product = None if x is None or x.is_graph_output() or len(x.uses()) != 1 else x.producer()
        if b not in rows or x in rows or product is None or product.op_type != "Mul":
            continue
        for a, v in itertools.permutations(product.inputs):
            if a in rows and v not in rows and rows[a].way == rows[b].way and _same_shape(a, b, v):
                factor = steps.inner.value_like(a)
                both = op.Mul(rows[a].sequence, rows[b].sequence)
                rows[factor] = Rows(factor, like(both, rows[a].sequence), 0, rows[a].way)
                node.replace_input_with(0, v)
                node.replace_input_with(1, factor)
                return


def _same_shape(*values: ir.Value | None) -> bool:
    shapes = [None if x is None else x.shape for x in values]
    return None not in shapes and all(shape == shapes[0] for shape in shapes)


def _for_all_steps(
    op: Emitter, steps: Steps, node: ir.Node, rows: dict[ir.Value, Rows]
) -> Sequence[ir.Value] | None:
    """Emit what a node computes for all steps, along a first axis, or return None where it is not known how."""
    shapes = [x.shape for x in (*node.inputs, *node.outputs) if x is not None]
    if node.domain or None in shapes:
        return None
    stacked = [x in rows for x in node.inputs]
    ranks = [0 if x is None or x.shape is None else len(x.shape) for x in node.inputs]
    inputs = [rows[x].sequence if x in rows else _outside(op, steps, x) for x in node.inputs]
    attributes: dict[str, Any] = dict(node.attributes)
    if ("", node.op_type) in ELEMENTWISE or node.op_type in ELEMENTWISE_TOO:
        n = len(shapes[-1] or ())
        if any(rank > n or (rank < n and one) for rank, one in zip(ranks, stacked, strict=True)):
            return None
    elif node.op_type == "Split" or (node.op_type == "Concat" and all(stacked)):
        axis = node.attributes.get_int("axis", 0)
        attributes["axis"] = axis if axis < 0 else axis + 1
    elif node.op_type in ("MatMul", "Gemm") and stacked[:2] == [True, False] and ranks[:2] == [2, 2]:
        alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
        if node.attributes.get_int("transA", 0) or (alpha, beta) != (1.0, 1.0):
            return None
        a, b, *c = inputs
        product = op.MatMul(a, op.Transpose(b) if node.attributes.get_int("transB", 0) else b)
        return [product + c[0] if c and c[0] is not None else product]
    else:
        return None
    results = op.call_op(node.op_type, inputs, attributes, outputs=len(node.outputs))
    return [results] if isinstance(results, ir.Value) else results


def _outside(op: Emitter, steps: Steps, x: ir.Value | None) -> ir.Value | None:
    """Return what a value that is the same in all steps is outside the body."""
    if x is None or x.graph is not steps.body or x.const_value is None:
        return x
    return op.constant(x.const_value.numpy())


scan_products, scan_fission = _scans(_take_out), _scans(_part)
