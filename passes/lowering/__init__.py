"""Lower operators of com.microsoft (ONNX Runtime) and ai.onnx.ml (classical machine learning) to standard operators."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence

import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.emitter import Emitter
from graphopt.graph.traversal import sort, subgraphs
from graphopt.graph.values import swap
from passes.gradients.registry import has_rule, parameters_of
from passes.lowering import attention as attention
from passes.lowering import bnb as bnb
from passes.lowering import classical as classical
from passes.lowering import contrib as contrib
from passes.lowering import decoders as decoders
from passes.lowering import experts as experts
from passes.lowering import integers as integers
from passes.lowering import linear_attention as linear_attention
from passes.lowering import qoperators as qoperators
from passes.lowering import quantized as quantized
from passes.lowering.registry import LOWERINGS, Lowering


def is_lowered(node: ir.Node) -> bool:
    """Return whether a node has a lowering and no gradient rule, which takes precedence."""
    return (node.domain, node.op_type) in LOWERINGS and not has_rule(node.domain, node.op_type)


def moves_integers(node: ir.Node) -> bool:
    """Return whether a node moves integers of a known scale."""
    return qoperators.scale_moved(node) is not None


def lower_operators(op: Emitter, graph: ir.Graph, is_last: bool = True) -> None:
    """Replace every operator that has a lowering by standard operators, including in bodies.

    Args:
        op: the emitter of the graph's model.
        is_last: whether an input without a type or a rank is an error. If not, such a node waits: the shapes of a whole
            model tell more than those of one node after the other.
    """
    sort(graph)
    for node in list(graph):
        for body in subgraphs(node):
            with op.within(body) as inner:
                lower_operators(inner, body, is_last)
        if is_lowered(node):
            if not is_last and any(map(_is_unknown, node.inputs)):
                continue
            _lower(op, graph, node)
        elif moved := qoperators.scale_moved(node):
            qoperators.move_floats(op, node, *moved)
        elif any(output.type is None or output.shape is None for output in node.outputs):
            op.infer(node)
        if classical.is_tree(node):
            classical.type_tree(node)
    sort(graph)


def _is_unknown(x: ir.Value | None) -> bool:
    return x is not None and (x.dtype is None or x.shape is None)


def _lower(op: Emitter, graph: ir.Graph, node: ir.Node) -> None:
    last = graph[-1]
    operator = f"{'::'.join(filter(None, (node.domain, node.op_type)))} node {node.name!r}"
    try:
        results = _call(op, LOWERINGS[node.domain, node.op_type], node)
    except ValueError as error:  # a GraphoptError, or inconsistent attributes
        raise GraphoptError(f"cannot lower {operator}: {line(error)}") from error
    used = [output for output in node.outputs if output.uses() or output.is_graph_output()]
    prefix = (used or node.outputs)[0].name
    emitted = list(itertools.takewhile(lambda node: node is not last, reversed(graph)))
    for value in (output for node in emitted for output in node.outputs):
        value.name = f"{prefix}/{value.name}"
    for output in used:
        index = node.outputs.index(output)
        result = results[index] if index < len(results) else None
        if result is None:
            raise GraphoptError(
                f"cannot lower {operator}: its output {index}, {output.name!r}, is not covered: remove what reads it"
            )
        if result.producer() not in emitted or results.count(result) > 1:
            result = op.Identity(result)
        result.shape = result.shape or output.shape
        swap(output, result)
    graph.remove(node, safe=True)


def _call(op: Emitter, function: Lowering, node: ir.Node) -> Sequence[ir.Value | None]:
    """Call a lowering with the inputs and attributes of a node, and refuse those that it has no parameter for."""
    parameters = list(parameters_of(function).values())[1:]
    inputs = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for i, x in enumerate(node.inputs):
        if x is not None and i >= len(inputs) and not variadic:
            raise GraphoptError(f"its input {i}, {x.name!r}, is not covered")
        if x is not None and _is_unknown(x):
            raise GraphoptError(
                f"the type or the rank of its input {x.name!r} cannot be inferred: declare them in the model"
            )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    values: dict[str, object] = dict(zip(inputs, node.inputs, strict=False))
    for name, attribute in node.attributes.items():
        if (takes_all or name in named) and name not in inputs:
            values[name] = attribute.value
        elif attribute.value:
            raise GraphoptError(f"its attribute {name}={attribute.value!r} is not covered")
    if "node" in named:
        values["node"] = node
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    required = [p.name for p in parameters if p.kind not in kinds and p.default is p.empty]
    missing = [name for name in required if name not in values]
    if missing:
        raise GraphoptError(f"expected attributes or inputs {', '.join(missing)}, found none")
    result = function(op, *(node.inputs if variadic else ()), **values)
    return [result] if isinstance(result, ir.Value) else list(result)
