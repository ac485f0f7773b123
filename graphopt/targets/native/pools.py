"""Lower pools whose windows tile the input, the gradient of their maximum, and copies of each element to a window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.graph.sizes import fixed
from graphopt.graph.windows import pad_mode, window_of
from graphopt.targets.native.forms import NodeForms, rank_of
from graphopt.targets.native.library import Item, Kernel, Replacement
from graphopt.targets.native.operators import Attributes

_KINDS = {"MaxPool": 0, "AveragePool": 1, "Resize": 2}  # as pool.h numbers them
_MOST_TAPS = 4096  # of a window: C counts them


def pool_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of a pool or a Resize of float32, and the node that it replaces; None for any other node."""
    window = _window(node, forms)
    if window is None:
        return None
    form: list[Item] = [len(window), _padded(window), _KINDS[node.op_type]]
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
    window = _repeats(node, attributes) if node.op_type == "Resize" else _taps(node)
    if window is None or len(window) != axes or min(window) < 1 or math.prod(window) > _MOST_TAPS:
        return None
    return window


def _taps(node: ir.Node) -> list[int] | None:
    """Return the taps of a pool's window along each axis, if windows tile the input."""
    window, x = window_of(node), node.inputs[0]
    sizes = [] if x is None or x.shape is None else x.shape[2:]
    if any(isinstance(size, int) and size < k for size, k in zip(sizes, window.kernel, strict=False)):
        return None  # the runtime cuts such a window
    tiles = window.tiles and not window.is_padded and pad_mode(node) == "NOTSET"
    return window.kernel if tiles and not node.attributes.get_int("ceil_mode", 0) else None


def _repeats(node: ir.Node, attributes: Attributes) -> list[int] | None:
    """Return how often a Resize repeats each element along each axis of space, if that is all that it does."""
    wanted = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if any(attributes.get(name) != value for name, value in wanted.items()):
        return None
    if "axes" in attributes or attributes.get("antialias") or len(node.inputs) < 3 or any(node.inputs[3:]):
        return None
    scales = fixed(node.inputs[2])
    if scales is None or scales.ndim != 1 or not (scales[:2] == 1).all() or not (abs(scales) <= _MOST_TAPS).all():
        return None
    window = [int(scale) for scale in scales]
    return window[2:] if (scales == window).all() else None


# --- The gradient of a maximum ---


@dataclass(frozen=True)
class FirstMaximum:
    """The gradient of a MaxPool, first * repeated(share): `first` is whether x is the first maximum of its window.

    The elements that equal y, the maximum, get scores from the first to the last, and the first one has the highest
    score of its window.

    Args:
        equal: whether elements equal the maximum, as numbers.
        nodes: those that compute the gradient, in order.
    """

    x: ir.Value
    y: ir.Value
    equal: ir.Value
    share: ir.Value
    window: list[int]
    nodes: list[ir.Node]


def first_maximum(node: ir.Node, forms: NodeForms) -> FirstMaximum | None:
    """Return the gradient of a MaxPool that a node computes, if nothing else reads what it is computed from."""
    for chosen, spread in _orders(node) if _is(node, "Mul") else ():
        first, repeat = _made(chosen, "Cast"), _made(spread, "Resize")
        if first is None or repeat is None or first.graph is not node.graph:
            continue
        equal = _made(first.inputs[0], "Equal")
        if equal is None:
            continue
        for score, highest in _orders(equal):
            rank = _made(score, "Mul")
            up = _made(highest, "Resize")
            most = None if up is None else _made(up.inputs[0], "MaxPool")
            if rank is None or up is None or most is None or most.inputs[0] is not score:
                continue
            found = _scored(rank, forms)
            share = repeat.inputs[0]
            if found is None or share is None:
                continue
            x, y, window, inner = found
            nodes = [*inner, rank, most, up, equal, first, repeat, node]
            if (
                all(_window(each, forms) == window for each in (most, up, repeat))
                and _are_alike(x, node.outputs[0])
                and _are_alike(y, share)
                and not any(each in nodes for each in (x.producer(), y.producer(), share.producer()))
                and _stays_inside(nodes)
            ):
                return FirstMaximum(x, y, inner[-1].outputs[0], share, window, nodes)
    return None


def pool_gradient_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of the gradient of a MaxPool, and of a Relu before it: the gate is a HardSigmoid of y."""
    found = first_maximum(node, forms)
    if found is None:
        return None
    dy, gate, gating = _gated(found.share, found.y, forms)
    nodes = [*found.nodes[:-2], *gating, *found.nodes[-2:]]
    if dy is None or dy.producer() in nodes or not _are_alike(found.y, dy) or not _stays_inside(nodes):
        return None
    form: list[Item] = [len(found.window), _padded(found.window), *gate]
    return Kernel.calling("unpool", form, [found.x, found.y, dy], node.outputs, "pool.h"), nodes


def _scored(rank: ir.Node, forms: NodeForms) -> tuple[ir.Value, ir.Value, list[int], list[ir.Node]] | None:
    """Return x and y of [x = repeated y] * scores, the window, and the nodes that compute the first factor."""
    for mask, scores in _orders(rank):
        cast = _made(mask, "Cast")
        equal = None if cast is None else _made(cast.inputs[0], "Equal")
        for x, repeated in _orders(equal) if equal is not None else ():
            up = _made(repeated, "Resize")
            window = _window(up, forms)
            if cast is None or equal is None or up is None or window is None or x is None:
                continue
            y = up.inputs[0]
            if y is not None and _count_down(scores, window):
                return x, y, window, [up, equal, cast]
    return None


def _count_down(scores: ir.Value | None, window: list[int]) -> bool:
    """Return whether each window of the scores of an image has its number of taps first, then one less, down to 1."""
    taps = np.arange(math.prod(window), 0, -1).reshape(1, 1, *window)
    tile = _made(scores, "Tile")
    if tile is not None:
        pattern, repeats = fixed(tile.inputs[0]), fixed(tile.inputs[1])
        return pattern is not None and np.array_equal(pattern, taps) and repeats is not None
    found = fixed(scores)
    if found is None or found.ndim != taps.ndim or any(n % k for n, k in zip(found.shape, taps.shape, strict=True)):
        return False
    repeats = np.array(found.shape) // taps.shape
    return np.array_equal(found, np.tile(taps, repeats))


def _gated(share: ir.Value | None, y: ir.Value, forms: NodeForms) -> tuple[ir.Value | None, list[Item], list[ir.Node]]:
    """Return dy and the gate of dy * HardSigmoid(y), as pool.h has it, and its nodes; without a gate, `share` is dy."""
    product = _made(share, "Mul")
    for dy, factor in _orders(product) if product is not None else ():
        mask = _made(factor, "HardSigmoid")
        if product is not None and mask is not None and mask.inputs[0] is y:
            attributes = forms.attributes_of(mask) or {}
            slope = [f"{attributes[name].hex()}f" for name in ("alpha", "beta")]
            if not any("n" in number for number in slope):
                return dy, [1, *slope], [mask, product]
    return share, [0, 0, 0], []


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


def _are_alike(x: ir.Value | None, y: ir.Value | None) -> bool:
    return (
        x is not None
        and y is not None
        and x.dtype == y.dtype == ir.DataType.FLOAT
        and x.shape is not None
        and x.shape == y.shape
    )


def _stays_inside(nodes: list[ir.Node]) -> bool:
    """Return whether nodes are of one graph, and only they read what they compute, the last one excepted."""
    *inner, last = nodes
    return all(each.graph is last.graph for each in inner) and not any(
        y.is_graph_output() or any(use.node not in nodes for use in y.uses()) for each in inner for y in each.outputs
    )
