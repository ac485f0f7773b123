"""Lower pools whose windows tile the input, the gradient of their maximum, and copies of each element to a window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphopt.graph.sizes import fixed
from graphopt.targets.native.forms import NodeForms, rank_of
from graphopt.targets.native.library import Kernel, Replacement

_KINDS = {"MaxPool": 0, "AveragePool": 1, "Resize": 2}  # as pool.h numbers them
_MOST_TAPS = 4096  # of a window: C counts them


def pool_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of a pool or a Resize of float32, and the node that it replaces; None for any other node."""
    window = _window(node, forms)
    if window is None:
        return None
    form = [len(window), _padded(window), _KINDS[node.op_type]]
    return Kernel.calling("pool", form, node.inputs[:1], node.outputs, "pool.h"), [node]


def _padded(window: list[int]) -> list[int]:
    return [*window, *[1] * (3 - len(window))]


def _window(node: ir.Node | None, forms: NodeForms) -> list[int] | None:
    """Return the window of each element of a pool's output, or of a Resize's input, if such windows tile the other."""
    if node is None or node.op_type not in _KINDS or len(node.outputs) != 1:
        return None
    attributes, x, y = forms.attributes_of(node), node.inputs[0], node.outputs[0]
    if attributes is None or x is None or x.dtype != ir.DataType.FLOAT or y.dtype != ir.DataType.FLOAT:
        return None
    axes = rank_of(x) - 2
    if not 1 <= axes <= 3 or rank_of(y) != axes + 2:
        return None
    window = _repeats(node, attributes) if node.op_type == "Resize" else _taps(attributes, axes)
    if window is None or len(window) != axes or min(window) < 1 or math.prod(window) > _MOST_TAPS:
        return None
    return window


def _taps(attributes: Mapping[str, Any], axes: int) -> list[int] | None:
    """Return the taps of a pool's window along each axis, if windows tile the input."""
    window = list(attributes["kernel_shape"])
    ones, none = [1] * axes, [0] * (2 * axes)
    tiles = (
        attributes["auto_pad"] == "NOTSET"
        and list(attributes.get("strides", ones)) == window
        and list(attributes.get("dilations", ones)) == ones
        and list(attributes.get("pads", none)) == none
        and not attributes.get("ceil_mode", 0)
    )
    return window if tiles else None


def _repeats(node: ir.Node, attributes: Mapping[str, Any]) -> list[int] | None:
    """Return how often a Resize repeats each element along each axis of space, if that is all that it does."""
    wanted = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if any(attributes.get(name) != value for name, value in wanted.items()):
        return None
    if "axes" in attributes or attributes.get("antialias") or len(node.inputs) < 3 or any(node.inputs[3:]):
        return None
    scales = fixed(node.inputs[2])
    if (
        scales is None
        or scales.ndim != 1
        or not (scales[:2] == 1).all()
        or not (abs(scales) <= _MOST_TAPS).all()
    ):
        return None
    window = [int(scale) for scale in scales]
    return window[2:] if (scales == window).all() else None


# --- The gradient of a maximum ---


def pool_gradient_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of chosen * repeated(dy / (average of chosen * size) * gate), where chosen is whether x is y.

    This is the gradient of a MaxPool, which y is, and of a Relu before it: the gate is a HardSigmoid of y.
    """
    for chosen, spread in _orders(node) if _is(node, "Mul") else ():
        cast, repeat = _made(chosen, "Cast"), _made(spread, "Resize")
        equal = None if cast is None else _made(cast.inputs[0], "Equal")
        if cast is None or repeat is None or equal is None or cast.graph is not node.graph:
            continue
        for x, up in _orders(equal):
            again = _made(up, "Resize")
            share = None if again is None else _share(repeat.inputs[0], again.inputs[0], forms)
            if again is None or share is None:
                continue
            nodes = [again, equal, cast, *share.nodes, repeat, node]
            windows = [_window(each, forms) for each in (again, share.average, repeat)]
            if (
                windows[0] is not None
                and windows[0] == windows[1] == windows[2]
                and math.prod(windows[0]) == share.size
                and share.average.inputs[0] is chosen
                and _are_alike(x, node.outputs[0])
                and _are_alike(again.inputs[0], share.dy)
                and _stays_inside(nodes)
            ):
                form = [len(windows[0]), _padded(windows[0]), *share.gate]
                inputs = [x, again.inputs[0], share.dy]
                return Kernel.calling("unpool", form, inputs, node.outputs, "pool.h"), nodes
    return None


@dataclass(frozen=True)
class _Share:
    """Describe dy / (average * size) * gate."""

    dy: ir.Value
    average: ir.Node
    size: float
    gate: list[Any]  # as pool.h has it
    nodes: list[ir.Node]


def _share(share: ir.Value | None, y: ir.Value | None, forms: NodeForms) -> _Share | None:
    """Return what computes the share of an element in the gradient of the maximum y; None if another formula does."""
    gate: list[Any] = [0, 0, 0]
    gating: list[ir.Node] = []
    divide = _made(share, "Div")
    product = _made(share, "Mul")
    for quotient, factor in _orders(product) if product is not None else ():
        mask = _made(factor, "HardSigmoid")
        if product is not None and mask is not None and mask.inputs[0] is y and _made(quotient, "Div"):
            attributes = forms.attributes_of(mask) or {}
            gate = [1, *(f"{attributes[name].hex()}f" for name in ("alpha", "beta"))]
            divide, gating = _made(quotient, "Div"), [mask, product]
    scaled = None if divide is None else _made(divide.inputs[1], "Mul")
    if divide is None or scaled is None or divide.inputs[0] is None or any("n" in str(x) for x in gate):
        return None
    for pooled, size in _orders(scaled):
        average, number = _made(pooled, "AveragePool"), fixed(size)
        if average is not None and number is not None and number.ndim == 0:
            return _Share(divide.inputs[0], average, float(number), gate, [average, scaled, divide, *gating])
    return None


def _orders(node: ir.Node) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """Return the operands of a node in both orders."""
    a, b = node.inputs
    return [(a, b), (b, a)]


def _made(x: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes a value, if it has this operator."""
    node = None if x is None else x.producer()
    return node if node is not None and _is(node, op_type) else None


def _is(node: ir.Node, op_type: str) -> bool:
    return node.domain == "" and node.op_type == op_type


def _are_alike(x: ir.Value | None, y: ir.Value) -> bool:
    return (
        x is not None
        and x.dtype == y.dtype == ir.DataType.FLOAT
        and x.shape is not None
        and x.shape == y.shape
    )


def _stays_inside(nodes: list[ir.Node]) -> bool:
    """Return whether nodes are of one graph, and only they read what they compute, the last one excepted."""
    *inner, last = nodes
    return all(each.graph is last.graph for each in inner) and not any(
        y.is_graph_output() or any(use.node not in nodes for use in y.uses())
        for each in inner
        for y in each.outputs
    )
