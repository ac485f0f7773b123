"""If, Scan and Loop: the gradient is such a node too, whose bodies compute a step again and then go it back.

https://onnx.ai/onnx/operators: what the states of a loop were at the start of each step becomes an output of
the node; the rest of a step is computed again. Gradients of values that a body captures add up in states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir import Graph, Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.opsets import IR_VERSION
from graphopt.graph.values import dims_of, is_floating, like
from passes.gradients.loop_bodies import (
    Sequences,
    added,
    copy,
    emit,
    emit_scan,
    finish,
    floating,
    padded,
    saved,
)
from passes.gradients.registry import Gradients, rule
from passes.gradients.walk import backward, zeros

# Of a Scan: what some states are, by their index, at the start of each slice's step.
KNOWN = "known_states"
# Of a Scan: what its gradient reads of a step is saved, not computed again.
SAVING = "saving"


@rule("If")
def if_(
    op: Emitter,
    dy: Value | None,
    condition: Value,
    *outer: Value,
    further: list[Value | None],
    active: frozenset[Value],
    then_branch: Graph,
    else_branch: Graph,
) -> Gradients:
    """Differentiate each branch by all that either of them captures."""
    wrt, dys = floating(x for x in outer if x in active), [dy, *further]
    branches = {"then_branch": copy(then_branch), "else_branch": copy(else_branch)}
    for branch in branches.values():
        with op.within(branch) as inner:
            ends = [(y, like(inner.Identity(dy), y)) for y, dy in zip(branch.outputs, dys, strict=True) if dy]
            gradients = backward(inner, branch, added(inner, ends), wrt)
            finish(inner, branch, [gradients.get(x) or zeros(inner, x) for x in wrt])
    found = dict(zip(wrt, emit(op, "If", [condition], wrt, **branches), strict=True))
    return [None, *(found.get(x) for x in outer)]


@rule("OptionalGetElement")
def optional_get_element(op: Emitter, dy: Value, x: Value) -> Gradients:
    """Of a tensor it is the tensor."""
    if not isinstance(x.type, ir.TensorType):
        raise GraphoptError(f"OptionalGetElement of {x.name!r}: no gradient of {x.type}, which is no tensor")
    return [dy]


class Back:
    """A copy of a loop's body that goes a step back, from the gradients of its results to those of its inputs.

    Its inputs are the gradients of the states, sums of the gradients of captured values, and what the loop adds;
    its outputs are both for the next step, and the gradients of the slices.
    """

    def __init__(
        self,
        op: Emitter,
        node: Node,
        outer: Iterable[Value],
        dys: Sequence[Value | None],
        skip: int,
        states: int,
    ) -> None:
        """Differentiate the body of `node`, of which `skip` inputs and then `states` come first."""
        self.body = node.attributes["body"].as_graph()
        for value in (*self.body.inputs, *self.body.outputs):
            if not isinstance(value.type, ir.TensorType):
                raise GraphoptError(
                    f"{node.op_type} node {node.name!r}: no gradient through {value.name!r}, which is no tensor "
                    f"but {value.type}: freeze what is before it"
                )
        self.graph = copy(self.body)
        self.forward = dict(zip(self.graph, self.body, strict=True))
        self.leading = list(self.graph.inputs[:skip])
        self.states = list(self.graph.inputs[skip : skip + states])
        self.slices = list(self.graph.inputs[skip + states :])
        self.outer = floating(outer)
        results = self.graph.outputs[max(skip - 1, 0) :]
        with op.within(self.graph) as inner:
            self.inner = inner
            self.ends = [
                inner.value_like(y) if is_floating(y) and (i < states or dys[i]) else None
                for i, y in enumerate(results)
            ]
            ends = [(y, dy) for y, dy in zip(results, self.ends, strict=True) if dy is not None]
            inputs = floating([*self.states, *self.slices])
            found = backward(inner, self.graph, added(inner, ends), [*inputs, *self.outer])
            totals = [inner.value_like(x) for x in self.outer]
            self.graph.inputs.clear()
            self.graph.inputs.extend([*(dy for dy in self.ends[:states] if dy is not None), *totals])
            gradients = [found.get(x) or zeros(inner, x) for x in inputs]
            carried = len(floating(self.states))
            sums = [
                like(total + found[x], x) if x in found else total
                for total, x in zip(totals, self.outer, strict=True)
            ]
            finish(inner, self.graph, [*gradients[:carried], *sums, *gradients[carried:]])

    def kept(self) -> list[tuple[Value, Value]]:
        """Make what the step back reads of the step itself inputs of its body; return them and the step's values."""
        found = []
        for node, original in self.forward.items():
            for x, y in zip(node.outputs, original.outputs, strict=True) if node.inputs else ():
                users = [(user, i) for user, i in x.uses() if user not in self.forward]
                if users:
                    found.append((self.inner.value_like(x), y))
                for user, i in users:
                    user.replace_input_with(i, found[-1][0])
        common.RemoveUnusedNodesPass()(ir.Model(self.graph, ir_version=IR_VERSION))
        return found


@rule("Scan")
def scan(
    op: Emitter,
    dy: Value | None,
    *inputs: Value,
    node: Node,
    further: list[Value | None],
    active: frozenset[Value],
    num_scan_inputs: int,
    scan_input_axes: Sequence[int] = (),
    scan_input_directions: Sequence[int] = (),
    scan_output_axes: Sequence[int] = (),
    scan_output_directions: Sequence[int] = (),
) -> Gradients:
    """Scan the other way, over the states that each step began with, its slices and its outputs' gradients."""
    n, end = len(node.inputs) - num_scan_inputs, len(node.inputs)
    axes = [
        axis % len(dims_of(x))
        for axis, x in zip(padded(scan_input_axes, end - n), inputs[n:end], strict=False)
    ]
    dys = [dy, *further]
    back = Back(op, node, (x for x in inputs[end:] if x in active), dys, 0, n)
    ways = padded(scan_input_directions, len(back.slices))[: len(back.slices)]
    turned = [1 - way for way in ways]
    length = dims_of(inputs[n])[axes[0]]
    slices = list(zip(back.body.inputs[n:], inputs[n:end], axes, ways, strict=True))
    stacks = recomputed(op, node, back.body, slices)
    kept = back.kept() if SAVING in node.meta else []
    kept += [(x, back.body.inputs[i]) for i, x in enumerate(back.states) if x.uses() and i not in stacks]
    sequences: Sequences = [(x, saved(node, back.body, y, length, ways[0]), 0, turned[0]) for x, y in kept]
    sequences += [(x, stacks[i], 0, turned[0]) for i, x in enumerate(back.states) if x.uses() and i in stacks]
    sequences += [
        (x, sequence, axis, way)
        for x, sequence, axis, way in zip(back.slices, inputs[n:end], axes, turned, strict=True)
        if x.uses()
    ]
    stacked, ends = padded(scan_output_axes, len(dys)), padded(scan_output_directions, len(dys))
    sequences += [
        (end_, dy_, axis, 1 - way)
        for end_, dy_, axis, way in zip(back.ends[n:], dys[n:], stacked, ends, strict=False)
        if end_ is not None and dy_ is not None and end_.uses()
    ]
    if not sequences:  # one tells how many steps there are
        sequences = [(back.slices[0], inputs[n], axes[0], turned[0])]
    sliced = [i for i, x in enumerate(back.slices) if is_floating(x)]
    states = [i for i, x in enumerate(back.states) if is_floating(x)]
    found = emit_scan(
        op,
        back.graph,
        [*(dys[i] or zeros(op, inputs[i]) for i in states), *(zeros(op, x) for x in back.outer)],
        sequences,
        [*(inputs[i] for i in states), *back.outer, *(inputs[n + i] for i in sliced)],
        scan_output_axes=[axes[i] for i in sliced],
        scan_output_directions=[turned[i] for i in sliced],
    )
    places = dict(zip([*states, *back.outer, *(n + i for i in sliced)], found, strict=True))
    return [places.get(i) for i in range(end)] + [places.get(x) for x in inputs[end:]]


@rule("Loop")
def loop(
    op: Emitter,
    dy: Value | None,
    trips: Value | None,
    condition: Value | None,
    *inputs: Value,
    node: Node,
    further: list[Value | None],
    active: frozenset[Value],
) -> Gradients:
    """Loop as often as the node did, and take what a step needs from where it was kept, the last first."""
    n = len(node.inputs) - 2
    dys = [dy, *further]
    back = Back(op, node, (x for x in inputs[n:] if x in active), dys, 2, n)
    number, going = back.leading
    numbers = saved(node, back.body, back.body.inputs[0], None)
    count = op.Squeeze(op.Shape(numbers), [0])
    last = op.Sub(count, 1)
    kept = [
        (x, saved(node, back.body, back.body.inputs[2 + i], None))
        for i, x in enumerate(back.states)
        if x.uses()
    ]
    kept += [
        (x, dy) for x, dy in zip(back.ends[n:], dys[n:], strict=False) if x is not None and dy and x.uses()
    ]
    states = [i for i, x in enumerate(back.states) if is_floating(x)]
    with op.within(back.graph) as inner:
        turn, on = inner.value_like(number), inner.value_like(going)
        at = inner.Sub(last, turn)
        for x, stacked in [(number, numbers), *kept]:
            ir.convenience.replace_all_uses_with(x, like(inner.Gather(stacked, at, axis=0), x))
        ir.convenience.replace_all_uses_with(going, on)
        back.graph.inputs[:0] = [turn, on]
        back.graph.outputs.insert(0, inner.Identity(on))
        back.graph.sort()
    found = emit(
        op,
        "Loop",
        [count, None, *(dys[i] or zeros(op, inputs[i]) for i in states), *(zeros(op, x) for x in back.outer)],
        [*(inputs[i] for i in states), *back.outer],
        body=back.graph,
    )
    places = dict(zip([*states, *back.outer], found, strict=True))
    return [None, None, *(places.get(i) for i in range(n)), *(places.get(x) for x in inputs[n:])]


def recomputed(op: Emitter, node: Node, body: Graph, slices: Sequences) -> dict[int, Value]:
    """Return what the states of a Scan are at the start of each step where some are known: by a Scan of the others."""
    known: dict[int, Value] = node.meta.get(KNOWN, {})
    states = len(body.inputs) - len(slices)
    others = [i for i in range(states) if i not in known]
    if not known or not others:
        return known
    body = copy(body)
    rows = list(body.inputs)
    with op.within(body) as inner:
        body.inputs[:] = [rows[i] for i in others]
        finish(inner, body, [*(body.outputs[i] for i in others), *body.inputs])
    _, sequence, axis, way = slices[0]
    stacked = [
        Value(type=rows[i].type, shape=ir.Shape([dims_of(sequence)[axis], *dims_of(rows[i])])) for i in others
    ]
    starts = [x for i in others if (x := node.inputs[i]) is not None]
    found = emit_scan(
        op,
        body,
        starts,
        [(rows[i], x, 0, way) for i, x in known.items()]
        + [(row, *it[1:]) for row, it in zip(rows[states:], slices, strict=True)],
        [*starts, *stacked],
        scan_output_axes=[0] * len(others),
        scan_output_directions=[way] * len(others),
    )
    return known | dict(zip(others, found[len(others) :], strict=True))
