"""Differentiate If, Scan and Loop by a node of the same kind, whose bodies recompute a step and then reverse it.

https://onnx.ai/onnx/operators describes the operators. The states at the start of each step become an output of the
node. The rest of a step is recomputed. Gradients of captured values accumulate in states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir
from onnx_ir import Graph, Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.values import dims_of, is_floating, like, rank
from passes.gradients.loop_bodies import (
    Sequences,
    added,
    copied_body,
    emit,
    emit_scan,
    finish,
    numbers_of,
    stacked_output,
    with_gradients,
)
from passes.gradients.registry import Gradients, rule
from passes.gradients.walk import backward, zeros

# For a Scan: the known values of some states, by index, at the start of each step.
KNOWN = "known_states"
# For a Scan: whether the values of a step that its gradient reads are saved instead of recomputed.
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
    """Differentiate both branches with respect to the values that either of them captures."""
    wrt, dys = with_gradients(x for x in outer if x in active), [dy, *further]
    branches = {"then_branch": copied_body(then_branch), "else_branch": copied_body(else_branch)}
    for branch in branches.values():
        with op.within(branch) as inner:
            ends = [(y, like(inner.Identity(dy), y)) for y, dy in zip(branch.outputs, dys, strict=True) if dy]
            gradients = backward(inner, branch, added(inner, ends), wrt)
            finish(inner, branch, [gradients.get(x) or zeros(inner, x) for x in wrt])
    results = dict(zip(wrt, emit(op, "If", [condition], wrt, **branches), strict=True))
    return [None, *(results.get(x) for x in outer)]


@rule("OptionalGetElement")
def optional_get_element(op: Emitter, dy: Value, x: Value) -> Gradients:
    """Pass the gradient of a tensor through, and refuse other types."""
    if not isinstance(x.type, ir.TensorType):
        raise GraphoptError(
            f"OptionalGetElement of {x.name!r}: expected a tensor, found {x.type}, which has no gradient: pass the "
            f"tensor itself"
        )
    return [dy]


class Back:
    """Build the backward step of a loop: it maps gradients of the body's results to gradients of its inputs.

    Its inputs are the gradients of the states, the accumulated gradients of captured values, and inputs that the loop
    adds. Its outputs are the updated gradients for the next step, then the gradients of the slices.
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
        """Differentiate the body of `node`, whose inputs start with `skip` others and then `states`."""
        self.body = node.attributes["body"].as_graph()
        for value in (*self.body.inputs, *self.body.outputs):
            if not isinstance(value.type, ir.TensorType):
                raise GraphoptError(
                    f"{node.op_type} node {node.name!r}: expected tensors on the path of a gradient, found "
                    f"{value.name!r} of {value.type}: freeze the parameters before it"
                )
        self.graph = copied_body(self.body)
        self.forward = dict(zip(self.graph, self.body, strict=True))
        self.leading = list(self.graph.inputs[:skip])
        self.states = list(self.graph.inputs[skip : skip + states])
        self.slices = list(self.graph.inputs[skip + states :])
        self.outer = with_gradients(outer)
        results = self.graph.outputs[max(skip - 1, 0) :]
        with op.within(self.graph) as inner:
            self.inner = inner
            self.ends = [
                inner.value_like(y) if is_floating(y) and (i < states or dys[i]) else None
                for i, y in enumerate(results)
            ]
            ends = [(y, dy) for y, dy in zip(results, self.ends, strict=True) if dy is not None]
            inputs = with_gradients([*self.states, *self.slices])
            derivatives = backward(inner, self.graph, added(inner, ends), [*inputs, *self.outer])
            totals = [inner.value_like(x) for x in self.outer]
            self.graph.inputs.clear()
            self.graph.inputs.extend([*(dy for dy in self.ends[:states] if dy is not None), *totals])
            gradients = [derivatives.get(x) or zeros(inner, x) for x in inputs]
            carried = len(with_gradients(self.states))
            sums = [
                like(total + derivatives[x], x) if x in derivatives else total
                for total, x in zip(totals, self.outer, strict=True)
            ]
            finish(inner, self.graph, [*gradients[:carried], *sums, *gradients[carried:]])

    def saved_inputs(self) -> list[tuple[Value, Value]]:
        """Turn the values of the forward step that the backward step reads into body inputs; return both lists."""
        read = []
        for node, original in self.forward.items():
            for x, y in zip(node.outputs, original.outputs, strict=True) if node.inputs else ():
                users = [(user, i) for user, i in x.uses() if user not in self.forward]
                if users:
                    read.append((self.inner.value_like(x), y))
                for user, i in users:
                    user.replace_input_with(i, read[-1][0])
        remove_unused_nodes(self.graph)
        return read


@rule("Scan")
def scan(
    op: Emitter,
    dy: Value | None,
    *inputs: Value,
    node: Node,
    further: list[Value | None],
    active: frozenset[Value],
    num_scan_inputs: int,
) -> Gradients:
    """Run a Scan in the reverse direction over the saved states, the slices and the gradients of the outputs."""
    n, end = len(node.inputs) - num_scan_inputs, len(node.inputs)
    axes = numbers_of(node, "scan_input_axes", end - n)
    axes = [axis % rank(x) for axis, x in zip(axes, inputs[n:end], strict=True)]
    dys = [dy, *further]
    back = Back(op, node, (x for x in inputs[end:] if x in active), dys, 0, n)
    directions = numbers_of(node, "scan_input_directions", end - n)
    reverse = [1 - direction for direction in directions]
    length = dims_of(inputs[n])[axes[0]]
    slices = list(zip(back.body.inputs[n:], inputs[n:end], axes, directions, strict=True))
    stacks = recomputed(op, node, back.body, slices)
    saved = back.saved_inputs() if SAVING in node.meta else []
    saved += [(x, back.body.inputs[i]) for i, x in enumerate(back.states) if x.uses() and i not in stacks]
    stacks_of = [(x, stacked_output(node, back.body, y, length, directions[0])) for x, y in saved]
    sequences: Sequences = [(x, stack, 0, reverse[0]) for x, stack in stacks_of]
    sequences += [
        (x, stacks[i], 0, reverse[0]) for i, x in enumerate(back.states) if x.uses() and i in stacks
    ]
    sequences += [
        (x, sequence, axis, direction)
        for x, sequence, axis, direction in zip(back.slices, inputs[n:end], axes, reverse, strict=True)
        if x.uses()
    ]
    stacked, ends = (numbers_of(node, f"scan_output_{name}", len(dys)) for name in ("axes", "directions"))
    sequences += [
        (end_, dy_, axis, 1 - direction)
        for end_, dy_, axis, direction in zip(back.ends[n:], dys[n:], stacked, ends, strict=False)
        if end_ is not None and dy_ is not None and end_.uses()
    ]
    if not sequences:  # one is needed to determine the number of steps
        sequences = [(back.slices[0], inputs[n], axes[0], reverse[0])]
    sliced = [i for i, x in enumerate(back.slices) if is_floating(x)]
    states = [i for i, x in enumerate(back.states) if is_floating(x)]
    gradients = emit_scan(
        op,
        back.graph,
        [*(dys[i] or zeros(op, inputs[i]) for i in states), *(zeros(op, x) for x in back.outer)],
        sequences,
        [*(inputs[i] for i in states), *back.outer, *(inputs[n + i] for i in sliced)],
        scan_output_axes=[axes[i] for i in sliced],
        scan_output_directions=[reverse[i] for i in sliced],
    )
    places = dict(zip([*states, *back.outer, *(n + i for i in sliced)], gradients, strict=True))
    return [places.get(i) for i in range(end)] + [places.get(x) for x in inputs[end:]]


@rule("Loop")
def loop(
    op: Emitter,
    dy: Value | None,
    trips: Input,
    condition: Input,
    *inputs: Value,
    node: Node,
    further: list[Value | None],
    active: frozenset[Value],
) -> Gradients:
    """Run a Loop of as many turns as the node, which reads the saved values of each turn in reverse order."""
    n = len(node.inputs) - 2
    dys = [dy, *further]
    back = Back(op, node, (x for x in inputs[n:] if x in active), dys, 2, n)
    number, going = back.leading
    numbers = stacked_output(node, back.body, back.body.inputs[0], None)
    count = op.Squeeze(op.Shape(numbers), [0])
    last = op.Sub(count, 1)
    saved = [
        (x, stacked_output(node, back.body, back.body.inputs[2 + i], None))
        for i, x in enumerate(back.states)
        if x.uses()
    ]
    ends = zip(back.ends[n:], dys[n:], strict=False)
    saved += [(x, dy) for x, dy in ends if x is not None and dy and x.uses()]
    states = [i for i, x in enumerate(back.states) if is_floating(x)]
    with op.within(back.graph) as inner:
        turn, on = inner.value_like(number), inner.value_like(going)
        at = inner.Sub(last, turn)
        for x, stacked in [(number, numbers), *saved]:
            ir.convenience.replace_all_uses_with(x, like(inner.Gather(stacked, at, axis=0), x))
        ir.convenience.replace_all_uses_with(going, on)
        back.graph.inputs[:0] = [turn, on]
        back.graph.outputs.insert(0, inner.Identity(on))
        back.graph.sort()
    gradients = emit(
        op,
        "Loop",
        [count, None, *(dys[i] or zeros(op, inputs[i]) for i in states), *(zeros(op, x) for x in back.outer)],
        [*(inputs[i] for i in states), *back.outer],
        body=back.graph,
    )
    places = dict(zip([*states, *back.outer], gradients, strict=True))
    return [None, None, *(places.get(i) for i in range(n)), *(places.get(x) for x in inputs[n:])]


def recomputed(op: Emitter, node: Node, body: Graph, slices: Sequences) -> dict[int, Value]:
    """Return the states of a Scan at the start of each step; if some are known, a Scan recomputes the others."""
    known: dict[int, Value] = node.meta.get(KNOWN, {})
    states = len(body.inputs) - len(slices)
    others = [i for i in range(states) if i not in known]
    if not known or not others:
        return known
    body = copied_body(body)
    rows = list(body.inputs)
    with op.within(body) as inner:
        body.inputs[:] = [rows[i] for i in others]
        finish(inner, body, [*(body.outputs[i] for i in others), *body.inputs])
    _, sequence, axis, direction = slices[0]
    length = dims_of(sequence)[axis]
    stacked = [Value(type=rows[i].type, shape=ir.Shape([length, *dims_of(rows[i])])) for i in others]
    starts = [x for i in others if (x := node.inputs[i]) is not None]
    stacks = emit_scan(
        op,
        body,
        starts,
        [(rows[i], x, 0, direction) for i, x in known.items()]
        + [(row, *it[1:]) for row, it in zip(rows[states:], slices, strict=True)],
        [*starts, *stacked],
        scan_output_axes=[0] * len(others),
        scan_output_directions=[direction] * len(others),
    )
    return known | dict(zip(others, stacks[len(others) :], strict=True))
