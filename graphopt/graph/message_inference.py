"""Infer the types and shapes of a message by ONNX, which ends the process at some sizes below 0.

A window that is larger than its input makes such a size, and so may a crop or a number in the file. ONNX's inference of
a Slice or a GatherND that reads one ends the process (tests/faults.py: negative-sizes). So these operators are hidden
until inference has shown that no size that they read is below 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

import onnx

from graphopt.graph.operators import ELEMENTWISE_OPERATORS

INFERENCE_ERRORS = (onnx.shape_inference.InferenceError, ValueError)  # exceptions of ONNX's inference

# The input of an operator at whose sizes below 0 inference ends the process
FRAGILE = {"Slice": 0, "GatherND": 1}
_HIDDEN = "hidden"  # the domain of operators that inference is not to see
# Operators that make no size below 0 of others: each size is one of an input, a sum, a product, or is checked.
_SAFE = ELEMENTWISE_OPERATORS | {
    *("ArgMax", "ArgMin", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"),
    *("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "BatchNormalization"),
    *("CastLike", "Concat", "Constant", "Dropout", "Flatten", "Gather", "Gemm", "InstanceNormalization"),
    *("LayerNormalization", "LogSoftmax", "MatMul", "Reshape", "Shape", "Size", "Softmax", "Squeeze"),
    *("DequantizeLinear", "Range", "Transpose", "Unsqueeze"),
}
# The rounds of inference until the sizes of a value are known, and whether the last one has to look at them.
_Rounds = tuple[int, bool]


def infer_message(message: onnx.ModelProto, *, propagate: bool = False, strict: bool = False) -> onnx.ModelProto:
    """Return a message with inferred types and shapes.

    Args:
        message: the model. Declared sizes below 0, which some exporters write for unknown ones, are removed.
        strict: whether it checks types and sizes, and raises an error where it otherwise leaves types out.

    Raises:
        InferenceError: what ONNX raises, or a size below 0 that would end the process, or that a node has for certain.
    """
    is_fragile = any(node.op_type in FRAGILE for node in _nodes(message))
    if is_fragile or strict:
        _clear_negative(message)
    if is_fragile:
        _check(message, propagate)
    typed = onnx.shape_inference.infer_shapes(message, check_type=strict, strict_mode=strict, data_prop=propagate)
    if strict:
        _check_results(typed)
    return typed


def _check_results(typed: onnx.ModelProto) -> None:
    """Raise an error if a node outside of bodies, which may never run, computes a size below 0."""
    makers = {y: node for node in typed.graph.node for y in node.output}
    for y in (*typed.graph.value_info, *typed.graph.output):
        sizes = [dim.dim_value for dim in y.type.tensor_type.shape.dim]
        if min(sizes, default=0) < 0 and (node := makers.get(y.name)) is not None:
            name = f" node {node.name!r}" if node.name else ""
            raise onnx.shape_inference.InferenceError(
                f"{node.op_type}{name}: expected sizes of 0 or more, found {sizes} of {y.name!r}, as where a window, a "
                "crop or a number in the file is too large or below 0: correct the file, or declare larger inputs"
            )


def graphs_in(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """Return the message of a graph, and those of its bodies."""
    return [graph, *(inner for node in graph.node for body in _bodies(node) for inner in graphs_in(body))]


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [x.g for x in node.attribute if x.type == onnx.AttributeProto.GRAPH]


def _nodes(message: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a message at any depth."""
    waiting = [*message.graph.node, *(node for function in message.functions for node in function.node)]
    while waiting:
        yield (node := waiting.pop())
        waiting += (inner for body in _bodies(node) for inner in body.node)


def _clear_negative(message: onnx.ModelProto) -> None:
    for graph in graphs_in(message.graph):
        for x in (*graph.input, *graph.value_info, *graph.output):
            for dim in x.type.tensor_type.shape.dim:
                if dim.dim_value < 0:
                    dim.Clear()


def _check(message: onnx.ModelProto, propagate: bool) -> None:
    """Raise an error if a fragile operator reads a size below 0.

    A round of inference sees no operator whose sizes are in doubt, and the next one those that it has shown to be
    right. Inference tells no sizes inside of functions, where such operators stay hidden.
    """
    calls = {(x.domain, x.name) for x in message.functions}
    rounds, inside = dict[int, list[onnx.NodeProto]](), dict[int, list[onnx.NodeProto]]()
    sizes = {node.input[1] for node in message.graph.node if node.op_type == "Split" and len(node.input) > 1}
    given = (x for x in message.graph.initializer if x.name in sizes)
    parts = {x.name for x in given if onnx.numpy_helper.to_array(x).min(initial=0) >= 0}
    _find(message.graph.node, {}, calls, rounds, parts)
    for function in message.functions:
        _find(function.node, {}, calls, inside)
    domains = {id(node): node.domain for nodes in rounds.values() for node in nodes}
    for node in (*chain(*rounds.values()), *chain(*inside.values())):
        node.domain = _HIDDEN
    if rounds or inside:
        for whole in (message, *message.functions):
            whole.opset_import.add(domain=_HIDDEN, version=1)
    for _, nodes in sorted(rounds.items()):
        _refuse(onnx.shape_inference.infer_shapes(message, data_prop=propagate), nodes)
        for node in nodes:
            node.domain = domains[id(node)]


def _find(
    nodes: Iterable[onnx.NodeProto],
    known: dict[str, _Rounds],
    calls: Collection[tuple[str, str]],
    found: dict[int, list[onnx.NodeProto]],
    parts: Collection[str] = (),
) -> _Rounds:
    """Put operators whose inference may end the process into the round that looks at their sizes.

    Args:
        nodes: the nodes of a graph or a function, in order.
        known: the rounds of values; it gets those that the nodes compute.
        calls: the domains and names of functions, whose calls are such operators, too.
        found: gets the operators.
        parts: the inputs of Split whose sizes are 0 or more.

    Returns: the most rounds that a value needs which the nodes compute.
    """
    most: _Rounds = (0, False)
    for node in nodes:
        now = max(known.get(x, (0, False)) for x in (*node.input, ""))
        bodies = _bodies(node)
        for body in bodies:
            now = max(now, _find(body.node, known | {x.name: (now[0], True) for x in body.input}, calls, found))
        is_call = (node.domain, node.op_type) in calls
        if now[1] and (is_call or node.op_type in FRAGILE):
            found.setdefault(now[0], []).append(node)
            now = now[0] + 1, False
        is_safe = node.op_type in _SAFE or node.op_type in FRAGILE or _splits_safely(node, parts)
        if is_call or bodies or not is_safe:
            now = now[0], True
        known.update((y, now) for y in node.output)
        most = max(most, now)
    return most


def _splits_safely(node: onnx.NodeProto, parts: Collection[str]) -> bool:
    """Return whether a node splits into parts of given sizes, or into halves."""
    if node.op_type != "Split" or any(x.name == "split" for x in node.attribute):
        return False
    given = [x for x in node.input[1:] if x]
    return given[0] in parts if given else len(node.output) == 2


def _refuse(typed: onnx.ModelProto, nodes: Collection[onnx.NodeProto]) -> None:
    """Raise an error if some operators read a size below 0."""
    read = {x: node for node in nodes for x in _inputs(node)}
    for graph in graphs_in(typed.graph):
        for x in (*graph.input, *graph.value_info, *graph.output):
            if x.name not in read:
                continue
            sizes = [dim.dim_value for dim in x.type.tensor_type.shape.dim]
            if min(sizes, default=0) < 0:
                raise onnx.shape_inference.InferenceError(
                    f"{read[x.name].op_type} of {x.name!r}: expected sizes of 0 or more, found {sizes}, as where a "
                    "window or a crop is larger than its input: declare larger inputs"
                )


def _inputs(node: onnx.NodeProto) -> Collection[str]:
    """Return the inputs at whose sizes the inference of an operator may end the process."""
    place = FRAGILE.get(node.op_type)
    return node.input if place is None else node.input[place : place + 1]
