"""Copy, build and finish the bodies of If, Scan and Loop nodes, and emit these nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir
from onnx_ir import Graph, Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.values import dims_of, is_floating, like

LoopStep = Callable[[Emitter, list[Value], list[Value]], tuple[list[Value], list[Value]]]
Sequences = list[tuple[Value, Value, int, int]]  # a sliced scan input: body input, sequence, axis, direction


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
    return emit_scan(
        op,
        body,
        states,
        [(x, sequence, 0, direction) for x, sequence in zip(slices, sequences, strict=True)],
        [*states, *stacks],
        scan_output_axes=[0] * len(outputs),
        scan_output_directions=[direction] * len(outputs),
    )


def emit_scan(
    op: Emitter,
    body: Graph,
    states: Sequence[Value],
    sequences: Sequences,
    models: Sequence[Value],
    **attributes: list[int],
) -> list[Value]:
    """Emit a Scan whose outputs have the types of `models`. Its body receives the slices as inputs."""
    body.inputs.extend(x for x, *_ in sequences)
    return emit(
        op,
        "Scan",
        [*states, *(sequence for _, sequence, *_ in sequences)],
        models,
        body=body,
        num_scan_inputs=len(sequences),
        scan_input_axes=[axis for *_, axis, _ in sequences],
        scan_input_directions=[direction for *_, direction in sequences],
        **{name: value for name, value in attributes.items() if value},
    )


def emit(
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


def with_gradients(values: Iterable[Value]) -> list[Value]:
    """Return the values that have gradients."""
    return [x for x in values if is_floating(x)]


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
