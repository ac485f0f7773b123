"""Differentiate in reverse mode: one walk from the objective back to the values to differentiate by."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

from graphopt.errors import BlockingOperator, GraphoptError, NoGradient, kind_of
from graphopt.graph.authored import call, floating, told
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import STOP_GRADIENT, SURROGATE
from graphopt.graph.operators import full_attributes
from graphopt.graph.traversal import all_nodes, ancestors, captured, subgraphs
from graphopt.graph.values import dims_of, dtype_of, is_floating, like, name_of
from passes.gradients.registry import (
    EXPANSIONS,
    NO_GRADIENT,
    QUANTIZING,
    REFUSED,
    UNIFORM,
    WITH_LOCAL_DERIVATIVES,
    Active,
    Gradients,
    Rule,
    accepted,
    has_rule,
    is_in,
    is_own,
    is_surrogate,
    parameters_of,
    rule,
    rule_of,
)
from passes.gradients.side_by_side import side_by_side


def backward(
    op: Emitter,
    graph: ir.Graph | ir.GraphView,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Iterable[ir.Value],
    known: Callable[[ir.Node, list[Input], Active], Gradients | None] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Emit the vector-Jacobian product of `graph`, and return the gradient of each of `wrt` that affects the seeds.

    A seed has its value's shape. A gradient may be a scalar that stands for equal elements, such as that of a mean,
    until an operator needs all elements. `known` may return what a caller has in place of a rule's gradients, by the
    node, the gradients of its outputs and the values that are differentiated by.
    """
    wrt = list(wrt)
    path = between(graph, seeds, wrt)
    check_rules(path, wrt)
    active = frozenset(wrt).union(*(node.outputs for node in path))
    gradients = dict(seeds)
    for node in reversed(path):
        dys = [gradients.get(y) for y in node.outputs]
        if all(dy is None for dy in dys):
            continue
        if not _takes_uniform(node):
            dys = [dy and full(op, dy, y) for dy, y in zip(dys, node.outputs, strict=True)]
        try:
            found = (known and known(node, dys, active)) or _apply(op, node, dys, active)
            for x, gradient in zip(inputs_of(node), found, strict=False):
                if x is not None and gradient is not None and x in active:
                    _add(op, gradients, x, sum_to(op, gradient, x))
        except NoGradient:
            raise  # the error comes from a body and names its nodes
        except GraphoptError as error:
            raise GraphoptError(f"no gradient of {node.op_type} node {node.name!r}: {error}") from error
    return {x: full(op, gradients[x], x) for x in wrt if x in gradients}


def _add(op: Emitter, gradients: dict[ir.Value, ir.Value], x: ir.Value, gradient: ir.Value) -> None:
    if x in gradients:
        known = gradients[x]
        uniform = is_uniform(known) and is_uniform(gradient)
        gradient = side_by_side(op, known, gradient) or known + gradient
        if not uniform:
            gradient.shape = x.shape
    gradients[x] = gradient


def _takes_uniform(node: ir.Node) -> bool:
    """Return whether a rule accepts one scalar as the gradient of all elements."""
    shape = node.outputs[0].shape
    alike = all(x is None or x.shape == shape for x in node.inputs)
    return is_in(node, UNIFORM) or (is_in(node, WITH_LOCAL_DERIVATIVES) and alike)


def is_uniform(gradient: ir.Value) -> bool:
    """Return whether a gradient is a scalar that stands for all elements of its value."""
    return gradient.shape is not None and len(gradient.shape) == 0


def full(op: Emitter, gradient: ir.Value, x: ir.Value) -> ir.Value:
    return broadcast_to(op, gradient, x) if is_uniform(gradient) else gradient


def broadcast_to(op: Emitter, value: ir.Value, x: ir.Value) -> ir.Value:
    return value if value.shape == x.shape else like(op.Expand(value, op.shape_of(x)), x)


def _apply(op: Emitter, node: ir.Node, dys: list[Input], active: Active) -> Gradients:
    """Emit the gradients of a node's inputs by its rule, with the arguments that the rule requests."""
    function = rule_of(node)
    assert function is not None
    for each in (node, *(inner for body in subgraphs(node) for inner in all_nodes(body))):
        if is_surrogate(each):  # in bodies, too, copies of which are differentiated
            SURROGATE.set(each)
    attributes = {**op.defaults_of(node), **full_attributes(node, op.versions)}
    named = {**attributes, "y": node.outputs[0], "node": node, "active": active}
    if "dys" in parameters_of(function):
        pairs = zip(dys, node.outputs, strict=True)
        named["dys"] = dys = [zeros(op, y) if dy is None and y.name and is_floating(y) else dy for dy, y in pairs]
    elif "further" in parameters_of(function):
        named["further"] = dys[1:]
    elif any(dy is not None for dy in dys[1:]):
        unused = next(y.name for y, dy in zip(node.outputs[1:], dys[1:], strict=True) if dy is not None)
        raise GraphoptError(
            f"its rule differentiates only the first output, and the objective depends on "
            f"{unused!r}: freeze the parameters before it"
        )
    given = accepted(function, named)
    if not is_own(node):
        return function(op, dys[0], *inputs_of(node), **given)
    return _answered(op, node, function, dys[0], given, {*named, "dys", "further"})


def _answered(
    op: Emitter, node: ir.Node, function: Rule, dy: Input, named: Mapping[str, object], known: Iterable[str]
) -> Gradients:
    """Call a rule that a user has written, and return its gradients, each of which is that of all elements."""
    inputs, where = inputs_of(node), f"rule {getattr(function, '__name__', kind_of(function))}"
    names = ", ".join("None" if x is None else name_of(x) for x in inputs)
    lacking = [p for p in parameters_of(function).values() if _is_keyword(p) and p.name not in named]
    if lacking:
        raise GraphoptError(
            f"{where}: {lacking[0].name}: expected one of {', '.join(sorted(known))}, since a keyword names an "
            "attribute or another value of the node, found none of this name"
        )
    due = f"(op, dy, {names})"
    found = call(functools.partial(function, **named), where, due, (op, dy, *inputs))
    due = f"gradients of {names}, with None for no gradient"
    if not isinstance(found, list | tuple):
        remedy = f": return [{'dy' if found is dy else 'gradient'}]" if isinstance(found, ir.Value) else ""
        raise GraphoptError(f"{where}: expected a list of the {due}, found {told(found)}{remedy}")
    if len(found) > len(inputs):
        raise GraphoptError(f"{where}: expected the {due}, at most {len(inputs)}, found {told(found)}")
    return [_checked(where, x, gradient) for x, gradient in zip(inputs, found, strict=False)]


def _checked(where: str, x: Input, gradient: object) -> Input:
    """Return the gradient of an input that a user's rule has returned."""
    if gradient is None:
        return None
    if x is None:
        raise GraphoptError(f"{where}: expected None for an input that is left out, found {told(gradient)}")
    due = f"the gradient of {x.name!r}, or None"
    found = floating(gradient, where, due)
    if x.shape is not None and found.shape is not None and len(found.shape) < len(x.shape):
        raise GraphoptError(
            f"{where}: expected {due}, in the shape of {told(x)}, found {told(found)}: op.Expand spreads it"
        )
    pairs = list(zip(reversed(list(x.shape or ())), reversed(list(found.shape or ())), strict=False))
    if any(have == 1 and want != 1 for want, have in pairs):
        raise GraphoptError(
            f"{where}: expected {due}, in the shape of {told(x)}, found {told(found)}: op.Expand spreads it"
        )
    return found


def _is_keyword(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty


def inputs_of(node: ir.Node) -> list[ir.Value | None]:
    """Return a node's inputs, then the outer values that its bodies use."""
    return [*node.inputs, *captured(node)]


def zeros(op: Emitter, x: ir.Value) -> ir.Value:
    """Return zeros of the shape and element type of `x`."""
    return like(op.ConstantOfShape(op.shape_of(x), value=ir.tensor([0], dtype=dtype_of(x))), x)


def further_output(node: ir.Node, index: int, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    """Return an optional output of a node of the forward pass, and add it if it is missing."""
    node.resize_outputs(max(index + 1, len(node.outputs)))
    for output in node.outputs:
        output.name = output.name or ""
    output = node.outputs[index]
    output.name = output.name or f"{next(y.name for y in node.outputs if y.name)}/{index}"
    output.type, output.shape = output.type or ir.TensorType(dtype), output.shape or shape
    return output


def carries_gradient(value: ir.Value | None) -> bool:
    """Return whether a value has a floating type, or integers that represent floating-point numbers."""
    node = None if value is None else value.producer()
    integral = node is not None and (node.domain, node.op_type) in QUANTIZING | REFUSED.keys()
    return integral or is_floating(value)


def passes_gradient(node: ir.Node) -> bool:
    """Return whether any output of `node` may depend differentiably on an input, with or without a rule."""
    stopped = is_in(node, NO_GRADIENT) or STOP_GRADIENT.is_set(node)
    return not stopped and any(map(carries_gradient, node.outputs))


def check_rules(path: Iterable[ir.Node], wrt: Iterable[ir.Value]) -> None:
    """Raise one error for all nodes of `path` without a rule that names the values each operator blocks."""
    missing: dict[tuple[str, str], list[ir.Node]] = {}
    for node in path:
        if not has_rule(node.domain, node.op_type):
            missing.setdefault((node.domain, node.op_type), []).append(node)
    if missing:
        found = sorted(missing.items())
        raise NoGradient([blocking(nodes, wrt, REFUSED.get(operator)) for operator, nodes in found])


def blocking(nodes: Sequence[ir.Node], wrt: Iterable[ir.Value], reason: str | None) -> BlockingOperator:
    """Describe the nodes of one operator that block gradients, and which values they block."""
    blocks = tuple(name_of(x) for x in wrt if reaches(x, nodes))
    return BlockingOperator(nodes[0].domain, nodes[0].op_type, tuple(map(name_of, nodes)), blocks, reason)


def dead_ends(x: ir.Value) -> list[ir.Node]:
    """Return the nodes that stop the gradient on every path from `x` to an output, or none if a path is open."""
    front = [x]
    seen: set[ir.Node] = set()
    ends: dict[ir.Node, None] = {}
    while front:
        value = front.pop()
        if value.is_graph_output():
            return []
        for user in value.consumers():
            if not passes_gradient(user):
                ends[user] = None
            elif user not in seen:
                seen.add(user)
                front.extend(user.outputs)
    return list(ends)


def lost(x: ir.Value) -> str:
    """Return the name of a value and the nodes that stop its gradient."""
    ends = [f"{node.op_type} node {node.name!r}" for node in dead_ends(x)]
    return f"{x.name!r} (no gradient passes {', '.join(ends)})" if ends else repr(x.name)


def sum_to(op: Emitter, gradient: ir.Value, x: ir.Value) -> ir.Value:
    """Sum `gradient` over the axes along which `x` was broadcast, and convert it to the shape and type of `x`."""
    gradient = op.cast(gradient, x.dtype) if is_floating(x) else gradient
    if is_uniform(gradient):
        return gradient
    want, have = dims_of(x), dims_of(gradient)
    lead = len(have) - len(want)
    tails = list(zip(have[lead:], want, strict=True)) if lead >= 0 else []
    if lead < 0 or any(isinstance(h, int) and isinstance(w, int) and w not in (1, h) for h, w in tails):
        raise GraphoptError(
            f"the gradient with respect to {x.name!r}: expected the shape {x.shape}, or one that it broadcasts to, "
            f"found {gradient.shape}: correct the rule of the operator that uses {x.name!r}"
        )
    if any(not isinstance(w, int) and h != 1 and (w.value is None or h != w) for h, w in tails):
        return like(_sum_to_dynamic(op, gradient, x), x)
    added, stretched = [*range(lead)], [lead + i for i, (h, w) in enumerate(tails) if w == 1 and h != 1]
    if not added and not stretched:
        return gradient
    gradient = op.ReduceSum(gradient, added + stretched, keepdims=int(bool(stretched)))
    return like(op.Squeeze(gradient, added) if added and stretched else gradient, x)


def _sum_to_dynamic(op: Emitter, gradient: ir.Value, x: ir.Value) -> ir.Value:
    """Sum over the axes along which `x` was broadcast, which only run-time shapes tell."""
    have, want = op.Shape(gradient), op.shape_of(x)
    lead = len(dims_of(gradient)) - len(dims_of(x))
    aligned = op.Concat([1] * lead, want, axis=0) if lead > 0 else want
    axes = op.Squeeze(op.Transpose(op.NonZero(op.Not(op.Equal(have, aligned)))), [1])
    summed = op.ReduceSum(gradient, axes, keepdims=1, noop_with_empty_axes=1)
    summed.shape = ir.Shape([None] * len(dims_of(gradient)))
    return op.Reshape(summed, want)


def between(graph: ir.Graph | ir.GraphView, seeds: Iterable[ir.Value], wrt: Iterable[ir.Value]) -> list[ir.Node]:
    """Return the nodes on differentiable paths from `wrt` to `seeds`, in graph order."""
    forward = set(wrt)
    ahead = []
    for node in graph:
        if passes_gradient(node) and any(x in forward and carries_gradient(x) for x in inputs_of(node)):
            ahead.append(node)
            forward.update(output for output in node.outputs if carries_gradient(output))
    behind = set(seeds)
    path = []
    for node in reversed(ahead):
        if any(output in behind for output in node.outputs):
            path.append(node)
            behind.update(x for x in inputs_of(node) if x is not None)
    return path[::-1]


def reaches(x: ir.Value, nodes: Iterable[ir.Node]) -> bool:
    """Return whether any of `nodes` depends on `x`, including through bodies."""
    nodes = list(nodes)
    before = ancestors(y for node in nodes for y in inputs_of(node) if y is not None)
    return any(x in inputs_of(node) for node in before.union(nodes))


def expansion(*op_types: str) -> Callable[[Callable[..., Sequence[ir.Value]]], Rule]:
    """Register a traced function `f(op, *inputs, **named)` that computes the outputs of these operators.

    It may request the same values as a rule. Only the gradient of the function is emitted: the operator itself stays,
    because its kernel is faster and the exported model keeps it.
    """

    def register(function: Callable[..., Sequence[ir.Value]]) -> Rule:
        def differentiated(
            op: Emitter,
            dy: Input,
            *inputs: ir.Value,
            node: ir.Node,
            further: list[Input],
            active: Active,
            **named: object,
        ) -> Gradients:
            graph = op.graph
            start = len(graph)
            outputs = function(op, *inputs, **accepted(function, named | {"node": node}))
            part = ir.GraphView(inputs, outputs, nodes=list(graph)[start:], opset_imports=graph.opset_imports)
            pairs = zip(outputs, [dy, *further], strict=False)
            # The gradient of integers has the type of what reads them, which may differ from that of the numbers.
            seeds = {y: like(op.Identity(op.cast(dy, y.dtype or dy.dtype)), y) for y, dy in pairs if dy is not None}
            wrt = [x for x in dict.fromkeys(inputs) if x in active and is_floating(x)]
            gradients = backward(op, part, seeds, wrt)
            return [gradients.pop(x, None) for x in inputs]

        registered = rule(*op_types)(differentiated)
        EXPANSIONS.update(dict.fromkeys(op_types, function))
        return registered

    return register
