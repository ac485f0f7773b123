"""Bodies of If, Scan and Loop: copied, finished, and the nodes that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir import Graph, Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.opsets import IR_VERSION
from graphopt.graph.values import dims_of, is_floating, like

Step = Callable[[Emitter, list[Value], list[Value]], tuple[list[Value], list[Value]]]
Sequences = list[
    tuple[Value, Value, int, int]
]  # of a Scan: a body's input, what it is a slice of, axis, direction


def scan_over(
    op: Emitter, step: Step, states: Sequence[Value], sequences: Sequence[Value], reverse: bool = False
) -> list[Value]:
    """Emit a Scan of a traced `step(op, states, slices)`, which returns the next states, and outputs.

    Returns the last states and then the outputs of all steps along a first axis, each like its slice or state.
    """
    body = Graph([], [], nodes=[], opset_imports=op.versions, name="step")
    with op.within(body) as inner:
        carried = [inner.value_like(x) for x in states]
        slices = [inner.value_like(x, ir.Shape(dims_of(x)[1:])) for x in sequences]
        body.inputs.extend(carried)
        following, outputs = step(inner, carried, slices)
        finish(inner, body, [like(y, x) for y, x in zip(following, carried, strict=True)] + outputs)
    length, way = dims_of(sequences[0])[0], int(reverse)
    stacks = [Value(type=y.type, shape=ir.Shape([length, *dims_of(y)])) for y in outputs]
    return emit_scan(
        op,
        body,
        states,
        [(x, sequence, 0, way) for x, sequence in zip(slices, sequences, strict=True)],
        [*states, *stacks],
        scan_output_axes=[0] * len(outputs),
        scan_output_directions=[way] * len(outputs),
    )


def emit_scan(
    op: Emitter,
    body: Graph,
    states: Sequence[Value],
    sequences: Sequences,
    models: Sequence[Value],
    **attributes: list[int],
) -> list[Value]:
    """Emit a Scan whose outputs are like `models`; its body gets the slices as inputs."""
    body.inputs.extend(x for x, *_ in sequences)
    return emit(
        op,
        "Scan",
        [*states, *(sequence for _, sequence, *_ in sequences)],
        models,
        body=body,
        num_scan_inputs=len(sequences),
        scan_input_axes=[axis for *_, axis, _ in sequences],
        scan_input_directions=[way for *_, way in sequences],
        **{name: value for name, value in attributes.items() if value},
    )


def emit(
    op: Emitter, op_type: str, inputs: Sequence[Value | None], models: Iterable[Value], **attributes: object
) -> list[Value]:
    """Emit a node with bodies, whose outputs are like `models`."""
    outputs = [Value(type=x.type, shape=x.shape) for x in models]
    if outputs:
        op.call_op(op_type, inputs, attributes, outputs=outputs)
    return outputs


def saved(
    node: Node, body: Graph, x: Value, length: int | ir.SymbolicDim | None, way: int | None = None
) -> Value:
    """Return a further output of a loop, added where it is missing: what a value of its body is in each step.

    That of a Scan is in the order of steps if `way` is 0, and 1 the other way.
    """
    name = f"{next(y.name for y in node.outputs if y.name)}/{x.name}"
    for y in node.outputs:
        if y.name == name:
            return y
    if x.producer() is None or x in body.outputs:
        kept = ir.node("Identity", [x], outputs=[Value(name=f"{name}/kept", type=x.type, shape=x.shape)])
        body.append(kept)
        x = kept.outputs[0]
    body.outputs.append(x)
    node.resize_outputs(len(node.outputs) + 1)
    stack = node.outputs[-1]
    stack.name, stack.type, stack.shape = name, x.type, ir.Shape([length, *dims_of(x)])
    if way is not None:
        stacks = len(node.outputs) - (len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)) - 1
        for attribute, last in (("scan_output_axes", 0), ("scan_output_directions", way)):
            others = node.attributes.get_ints(attribute, None) or [0] * stacks
            node.attributes.add(ir.AttrInt64s(attribute, [*others, last]))
    return stack


def copy(graph: Graph) -> Graph:
    """Return a copy of a body, which captures what it captures."""
    for y in graph.outputs:
        producer = y.producer()
        if producer is not None and producer.graph is not graph:
            raise GraphoptError(
                f"no gradient through a body that returns {y.name!r}, computed outside it: freeze what is before it"
            )
    return graph.clone(allow_outer_scope_values=True)


def floating(values: Iterable[Value]) -> list[Value]:
    """Return the values that have gradients."""
    return [x for x in values if is_floating(x)]


def padded(numbers: Sequence[int], count: int) -> Sequence[int]:
    """Return as many axes or directions, which are 0 where they are left out."""
    return numbers or [0] * count


def added(op: Emitter, ends: Iterable[tuple[Value, Value]]) -> dict[Value, Value]:
    """Return the gradient of each value that may be several results of a body."""
    total: dict[Value, Value] = {}
    for y, dy in ends:
        total[y] = like(total[y] + dy, y) if y in total else dy
    return total


def finish(op: Emitter, body: Graph, results: Iterable[Value]) -> None:
    """Make `results` the outputs of a body, each a value of its own, and drop what none of them needs."""
    outputs: list[Value] = []
    for y in results:
        own = y.producer() is not None and y.graph is body and y not in outputs
        outputs.append(y if own else like(op.Identity(y), y))
    body.outputs[:] = outputs
    common.RemoveUnusedNodesPass()(ir.Model(body, ir_version=IR_VERSION))
