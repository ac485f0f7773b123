"""Cut the loss of a plain training graph out as a function of its parameters, as its gradient sees it.

A gradient takes some values for constants: what passes a `detach`, the result of rounding, comparisons, indices and
random numbers. They are *held*: the function reads the numbers that they have at the point. So a step function or a
mask does not jump, and what passes gradients straight through (Bengio et al. 2013) has the slope that it declares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import GRADIENT_OF, OWNER, STOP_GRADIENT, SURROGATE
from graphopt.graph.operators import DRAWING, SHAPE_READERS, STEP_FUNCTIONS
from graphopt.graph.roles import Role, with_role
from graphopt.graph.traversal import (
    all_nodes,
    ancestors,
    computed_from,
    extracted_model,
    subgraphs,
    values_read,
)
from graphopt.graph.values import constant_of, given, is_floating, name_of, producer_of, redirect

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


@dataclass
class LossFunction:
    """Hold the loss of a training graph as a function of its parameters.

    Attributes:
        whole: the training graph.
        inner: the gradients, and the values that are held, that are no outputs of it.
        part: the function: its inputs are those of the graph, and the held values; its output is the loss.
        loss: the name of the loss.
        gradients: the names of the gradients, by the names of the parameters.
        moved: names of state that is moved with a parameter, since the loss reads a mean of both.
        unchecked: why a parameter's gradient is not to be checked, by its name.
    """

    whole: ir.Model
    inner: list[ir.Value]
    part: ir.Model
    loss: str
    gradients: dict[str, str]
    moved: dict[str, list[str]] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def shown(self) -> Iterator[ir.Model]:
        """Yield the training graph with all that is inner as outputs, in a `with` block."""
        outputs = self.whole.graph.outputs
        outputs.extend(self.inner)
        try:
            yield self.whole
        finally:
            for _ in self.inner:
                outputs.pop()


def forward_of(plain: ir.Model) -> LossFunction:
    """Return the loss of a plain training graph without its initial state as a function of its parameters.

    The whole is the graph itself, or a copy where quantizers are smoothed.
    """
    model = plain.clone() if any(node.op_type == DEQUANTIZE for node in plain.graph) else plain
    (loss,) = with_role(model, Role.LOSS)
    gradients = {name: y for node in model.graph for y in node.outputs if (name := GRADIENT_OF.read(y)) is not None}
    parameters = [x for x in with_role(model, Role.PARAMETER) if x.name in gradients]
    smoothed = _smooth_quantizers(model, loss)
    held, surrogates = _held(model, loss, parameters, smoothed)
    read = [*model.graph.inputs, *held]
    part = extracted_model(model, read, [loss])
    for x in list(part.graph.inputs):
        if not x.uses() and not x.is_graph_output():
            part.graph.inputs.remove(x)
    known = {name_of(x) for x in part.graph.inputs}
    held = [x for x in held if x.name in known]
    inner = [y for y in dict.fromkeys([*gradients.values(), *held]) if not y.is_graph_output()]
    names = {name: name_of(y) for name, y in gradients.items()}
    forward = LossFunction(model, inner, part, name_of(loss), names)
    for x in with_role(model, Role.SLOT):
        owner = OWNER.read(x)
        if x.name in known and owner in names:
            forward.moved.setdefault(owner, []).append(name_of(x))
    for name, y in gradients.items():
        if SURROGATE.is_set(y):
            forward.unchecked[name] = "it is the gradient at other weights"
    for reason, nodes in surrogates.items():
        before = computed_from(y for node in nodes for y in node.outputs)
        forward.unchecked |= {name_of(x): reason for x in parameters if x in before}
    return forward


def _held(
    model: ir.Model, loss: ir.Value, parameters: Iterable[ir.Value], smoothed: Collection[ir.Node]
) -> tuple[list[ir.Value], dict[str, list[ir.Node]]]:
    """Return the values that the gradient takes for constants, and nodes whose slope is another on purpose."""
    needed = ancestors([loss])
    moving, held = set(parameters), list[ir.Value]()
    surrogates: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if node not in needed:
            continue
        draws = node.op_type in DRAWING and not node.domain
        if not draws and not any(x in moving for x in values_read(node)):
            continue
        if node.op_type in SHAPE_READERS and not node.domain:
            continue
        if node not in smoothed and (reason := _surrogate(node)) is not None:
            surrogates.setdefault(reason, []).append(node)
        stops = draws or _stops(node)
        for y in node.outputs:
            if not y.uses() and not y.is_graph_output():
                continue
            if stops or not is_floating(y):
                if y.dtype is not None and y.dtype is not ir.DataType.STRING and y is not loss:
                    held.append(y)
            else:
                moving.add(y)
    return held, surrogates


def _stops(node: ir.Node) -> bool:
    """Return whether no gradient passes a node."""
    return STOP_GRADIENT.is_set(node) or (node.op_type in STEP_FUNCTIONS and not node.domain)


def _surrogate(node: ir.Node) -> str | None:
    """Return why the slope of a node is another one than its gradient's on purpose, or None."""
    if SURROGATE.is_set(node):
        return f"the rule of {node.op_type} declares a surrogate gradient"
    if node.op_type in (QUANTIZE, "DynamicQuantizeLinear") and not node.domain:
        return f"{node.op_type} rounds to integers, and its gradient passes straight through"
    bodies = subgraphs(node)
    for inner in (inner for body in bodies for inner in all_nodes(body)):
        if _stops(inner) or (inner.op_type in DRAWING and not inner.domain):
            return f"a gradient stops in a body of {node.op_type}"
        if (reason := _surrogate(inner)) is not None:
            return reason
    return None


def _smooth_quantizers(model: ir.Model, loss: ir.Value) -> set[ir.Node]:
    """Make the forward pass read the values that a QuantizeLinear and its DequantizeLinear pass straight through.

    The value stays the same at the point: y becomes y + (s - s), where the second s is held. Return the quantizers all
    of whose readers are done, or stop gradients.
    """
    needed = ancestors([loss])
    pairs = [node for node in model.graph if node in needed and _is_smoothable(node)]
    stopped = {
        node
        for node in model.graph
        if node.op_type == QUANTIZE and not node.domain and all(map(_stops, node.outputs[0].consumers()))
    }
    if not pairs:
        return stopped
    from passes.gradients.registry import EXPANSIONS
    from passes.gradients.rules.elementwise import stretched

    quantizers = set[ir.Node]()
    with Emitter(model) as op:
        for node in pairs:
            y, quantizer = node.outputs[0], producer_of(given(node.inputs[0]))
            x, scale = map(given, quantizer.inputs[:2])
            zero = quantizer.inputs[2:]
            axis = quantizer.attributes.get_int("axis", 1)
            block = quantizer.attributes.get_int("block_size", 0)
            uses = [(user, index) for user, index in y.uses() if user in needed]
            named = {"y": quantizer.outputs[0], "axis": axis, "block_size": block}
            (steps,) = EXPANSIONS[QUANTIZE](op, x, scale, *zero, **named)
            passed = op.cast(steps * stretched(op, scale, x, axis, block), y.dtype)
            held = STOP_GRADIENT.mark(op.Identity(passed))
            base = STOP_GRADIENT.mark(op.Identity(y))
            smooth = base + (passed - held)
            smooth.shape, smooth.type = y.shape, y.type
            redirect(uses, smooth)
            quantizers.add(quantizer)
    model.graph.sort()
    return stopped | {
        node for node in quantizers if all(user in pairs or user not in needed for user in node.outputs[0].consumers())
    }


def _is_smoothable(node: ir.Node) -> bool:
    """Return whether a node reads the integers of a QuantizeLinear, and both have the same scale, which is constant."""
    x = node.inputs[0] if node.op_type == DEQUANTIZE and not node.domain else None
    quantizer = None if x is None else x.producer()
    if quantizer is None or quantizer.op_type != QUANTIZE or quantizer.domain or STOP_GRADIENT.is_set(node):
        return False
    scale = given(node.inputs[1])
    if scale is quantizer.inputs[1] and (source := scale.producer()) is not None and STOP_GRADIENT.is_set(source):
        return True
    first, second = constant_of(quantizer.inputs[1]), constant_of(node.inputs[1])
    return first is not None and second is not None and first.shape == second.shape and bool((first == second).all())
