"""Differentiate If, Scan and Loop by a node of the same kind, whose bodies recompute a step and then reverse it.

https://onnx.ai/onnx/operators describes the operators. The states at the start of each step become an output of the
node. The rest of a step is recomputed. Gradients of captured values accumulate in states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir
from onnx_ir import Graph, Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.values import dims_of, is_floating, like, rank, redirect
from passes.gradients.registry import Active, Gradients, rule
from passes.gradients.walk import backward, zeros

_Values = Sequence[Value]
LoopStep = Callable[[Emitter, list[Value], list[Value]], tuple[list[Value], list[Value]]]
Sequences = list[tuple[Value, Value, int, int]]  # a sliced scan input: body input, sequence, axis, direction
_Way = tuple[int, int]  # of a stacked scan output: axis, direction

# For a Scan: the known values of some states, by index, at the start of each step.
KNOWN = "known_states"
# For a Scan: whether the values of a step that its gradient reads are saved instead of recomputed.
SAVING = "saving"


@rule("If")
def if_(
    op: Emitter, dy: Input, condition: Value, *outer: Value, node: Node, further: list[Input], active: Active
) -> Gradients:
    """Differentiate both branches with respect to the values that either of them captures."""
    wrt, dys = [x for x in outer if x in active and is_floating(x)], [dy, *further]
    branches = {name: copied_body(branch.as_graph()) for name, branch in node.attributes.items()}
    for branch in branches.values():
        with op.within(branch) as inner:
            ends = [(y, like(inner.Identity(dy), y)) for y, dy in zip(branch.outputs, dys, strict=True) if dy]
            gradients = backward(inner, branch, added(inner, ends), wrt)
            finish(inner, branch, [gradients.get(x) or zeros(inner, x) for x in wrt])
    results = dict(zip(wrt, _emit(op, "If", [condition], wrt, **branches), strict=True))
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
        self, op: Emitter, node: Node, outer: Iterable[Value], dys: Sequence[Input], skip: int, states: int
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
        self.outer = list(filter(is_floating, outer))
        results = self.graph.outputs[max(skip - 1, 0) :]
        with op.within(self.graph) as inner:
            self.inner = inner
            self.ends = [
                inner.value_like(y) if is_floating(y) and (i < states or dys[i]) else None
                for i, y in enumerate(results)
            ]
            ends = [(y, dy) for y, dy in zip(results, self.ends, strict=True) if dy is not None]
            inputs = list(filter(is_floating, [*self.states, *self.slices]))
            derivatives = backward(inner, self.graph, added(inner, ends), [*inputs, *self.outer])
            totals = [inner.value_like(x) for x in self.outer]
            self.graph.inputs.clear()
            self.graph.inputs.extend([*(dy for dy in self.ends[:states] if dy is not None), *totals])
            gradients = [derivatives.get(x) or zeros(inner, x) for x in inputs]
            carried = len(list(filter(is_floating, self.states)))
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
                    saved = self.inner.value_like(x)
                    redirect(users, saved)
                    read.append((saved, y))
        remove_unused_nodes(self.graph)
        return read


def scan(op: Emitter, dy: Input, *inputs: Value, node: Node, further: list[Input], active: Active) -> Gradients:
    """Run a Scan in the reverse direction over the saved states, the slices and the gradients of the outputs."""
    end = len(node.inputs)
    n = end - node.attributes["num_scan_inputs"].as_int()
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
    read = [(i, x) for i, x in enumerate(back.states) if x.uses()]
    saved += [(x, back.body.inputs[i]) for i, x in read if i not in stacks]
    sequences: Sequences = [
        (x, stacked_output(node, back.body, y, length, directions[0]), 0, reverse[0]) for x, y in saved
    ]
    sequences += [(x, stacks[i], 0, reverse[0]) for i, x in read if i in stacks]
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
        [(axes[i], reverse[i]) for i in sliced],
    )
    places = dict(zip([*states, *back.outer, *(n + i for i in sliced)], gradients, strict=True))
    return [places.get(i) for i in range(end)] + [places.get(x) for x in inputs[end:]]


@rule("Loop")
def loop(op: Emitter, dy: Input, *inputs: Value, node: Node, further: list[Input], active: Active) -> Gradients:
    """Run a Loop of as many turns as the node, which reads the saved values of each turn in reverse order."""
    inputs, n = inputs[2:], len(node.inputs) - 2  # without the number of turns and the condition
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
    gradients = _emit(
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
    sequences = [(rows[i], x, 0, direction) for i, x in known.items()]
    sequences += [(row, *it[1:]) for row, it in zip(rows[states:], slices, strict=True)]
    ways = [(0, direction)] * len(others)
    stacks = emit_scan(op, body, starts, sequences, [*starts, *stacked], ways)
    return known | dict(zip(others, stacks[len(others) :], strict=True))


def scan_over(
    op: Emitter, step: LoopStep, states: Sequence[Value], sequences: Sequence[Value], reverse: bool = False
) -> list[Value]:
    """Emit a Scan that runs a traced `step(op, states, slices)`, which returns the next states and the outputs.

    Returns the final states, then the outputs of all steps along a first axis. Each has the type of its state or slice.
    """
    body = Graph([], [], nodes=[], opset_imports=op.versions, name="step")
    with op.within(body) as inner:
        carried = [inner.value_like(x) for x in states]
        slices = [inner.value_like(x, ir.Shape(dims_of(x)[1:])) for x in sequences]
        body.inputs.extend(carried)
        following, outputs = step(inner, carried, slices)
        finish(inner, body, [like(y, x) for y, x in zip(following, carried, strict=True)] + outputs)
    length, direction = dims_of(sequences[0])[0], int(reverse)
    stacks = [Value(type=y.type, shape=ir.Shape([length, *dims_of(y)])) for y in outputs]
    sliced = [(x, sequence, 0, direction) for x, sequence in zip(slices, sequences, strict=True)]
    return emit_scan(op, body, states, sliced, [*states, *stacks], [(0, direction)] * len(outputs))


def emit_scan(
    op: Emitter, body: Graph, states: _Values, sequences: Sequences, models: _Values, ways: Sequence[_Way]
) -> list[Value]:
    """Emit a Scan whose outputs have the types of `models`; those of all steps are stacked in the `ways`."""
    stacked = dict(zip(("scan_output_axes", "scan_output_directions"), zip(*ways, strict=True), strict=False))
    body.inputs.extend(x for x, *_ in sequences)
    return _emit(
        op,
        "Scan",
        [*states, *(sequence for _, sequence, *_ in sequences)],
        models,
        body=body,
        num_scan_inputs=len(sequences),
        scan_input_axes=[axis for *_, axis, _ in sequences],
        scan_input_directions=[direction for *_, direction in sequences],
        **stacked,
    )


def _emit(
    op: Emitter, op_type: str, inputs: Sequence[Value | None], models: Iterable[Value], **attributes: object
) -> list[Value]:
    """Emit a node with bodies whose outputs have the types of `models`."""
    outputs = [Value(type=x.type, shape=x.shape) for x in models]
    if outputs:
        op.call_op(op_type, inputs, attributes, outputs=outputs)
    return outputs


def stacked_output(
    node: Node, body: Graph, x: Value, length: int | ir.SymbolicDim | None, direction: int | None = None
) -> Value:
    """Return an output of a loop that stacks a value of its body over all steps, and add it if it is missing.

    For a Scan, `direction` is 0 for forward and 1 for reverse.
    """
    name = f"{next(y.name for y in node.outputs if y.name)}/{x.name}"
    for y in node.outputs:
        if y.name == name:
            return y
    if x.producer() is None or x in body.outputs:
        identity = ir.node("Identity", [x], outputs=[Value(name=f"{name}/kept", type=x.type, shape=x.shape)])
        body.append(identity)
        x = identity.outputs[0]
    body.outputs.append(x)
    node.resize_outputs(len(node.outputs) + 1)
    stack = node.outputs[-1]
    stack.name, stack.type, stack.shape = name, x.type, ir.Shape([length, *dims_of(x)])
    if direction is not None:
        stacks = len(node.outputs) - (len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)) - 1
        for attribute, last in (("scan_output_axes", 0), ("scan_output_directions", direction)):
            node.attributes.add(ir.AttrInt64s(attribute, [*numbers_of(node, attribute, stacks), last]))
    return stack


def copied_body(graph: Graph) -> Graph:
    """Return a copy of a body that captures the same outer values."""
    for y in graph.outputs:
        producer = y.producer()
        if producer is not None and producer.graph is not graph:
            raise GraphoptError(
                f"no gradient through a body that returns {y.name!r}, computed outside it: freeze the parameters "
                f"before it"
            )
    return graph.clone(allow_outer_scope_values=True)


def numbers_of(node: Node, name: str, count: int) -> Sequence[int]:
    """Return an attribute with a number for each of `count` values, by default 0: axes or directions of a Scan."""
    return node.attributes.get_ints(name, ()) or [0] * count


def added(op: Emitter, ends: Iterable[tuple[Value, Value]]) -> dict[Value, Value]:
    """Return the gradient of each value; a value that is several results of a body gets the sum."""
    total: dict[Value, Value] = {}
    for y, dy in ends:
        total[y] = like(total[y] + dy, y) if y in total else dy
    return total


def finish(op: Emitter, body: Graph, results: Iterable[Value]) -> None:
    """Make `results` the outputs of a body, with a separate value for each, and remove unused nodes."""
    outputs: list[Value] = []
    for y in results:
        own = y.producer() is not None and y.graph is body and y not in outputs
        outputs.append(y if own else like(op.Identity(y), y))
    body.outputs[:] = outputs
    remove_unused_nodes(body)
