"""Lower convolutions: one operator computes a convolution with the transposes around it, its bias and a Relu."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphopt.graph.values import constant_of
from graphopt.targets.native.forms import NodeForms, rank_of
from graphopt.targets.native.library import FEW_FILTERS, Kernel, Replacement
from graphopt.targets.native.products import only_reader, permutation

_LEAST_TERMS = 16  # of a sum, below which storing results takes longest
_MOST_REACH = 4096  # the product over axes of the largest stride, dilation or pad: copies grow with it
_MOST_UNUSED = 2**30  # elements that Slices drop

# A value, the stored axis of each axis (-1 if it has size 1), and the number of elements at its end that are not used.
_Stored = tuple[ir.Value, list[int], list[int]]


@dataclass(frozen=True)
class _Convolution:
    """A convolution with what is taken in around it."""

    nodes: Sequence[ir.Node]
    order: Sequence[int]  # the axes of images, of channels and of space, as the node numbers them
    x: _Stored
    w: _Stored
    bias: ir.Value | None
    stored_y: Sequence[int]  # for each axis that the result is stored as, its axis
    relu: bool


def convolution_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of a convolution of float32, and the nodes that it replaces; None for any other node."""
    attributes = forms.attributes_of(node)
    if attributes is None or not _accepts(node, attributes):
        return None
    convolution = _surroundings(node, attributes)
    return _kernel_of(convolution, attributes), convolution.nodes


def _accepts(node: ir.Node, attributes: Mapping[str, Any]) -> bool:
    """Return whether a node is a convolution that convolution.h computes, and no slower than the runtime."""
    if node.op_type not in ("Conv", "ConvTranspose"):
        return False
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    is_transposed, geometry = node.op_type == "ConvTranspose", _geometry(attributes, rank_of(w) - 2)
    return (
        x is not None
        and w is not None
        and rank_of(x) == rank_of(w) == rank_of(y)
        and 3 <= rank_of(y) <= 5  # geometry.h has up to three axes of space
        and all(v.dtype == ir.DataType.FLOAT for v in (x, w, y))
        and attributes["auto_pad"] == "NOTSET"
        and "output_shape" not in attributes
        and 1 <= attributes["group"] < 2**31
        and _is_small(geometry, rank_of(w) - 2)
        and not (is_transposed and min(max(geometry["strides"]), max(geometry["dilations"])) > 1)
        and (attributes["group"] > 1 or not _has_few_terms(w, is_transposed))
    )


def _has_few_terms(w: ir.Value, is_transposed: bool) -> bool:
    """Return whether sums have too few terms, or too few filters fill a vector."""
    assert w.shape is not None
    sizes = [size for size in w.shape[1:] if isinstance(size, int)]
    if is_transposed:
        return isinstance(w.shape[1], int) and w.shape[1] < FEW_FILTERS
    return len(sizes) == rank_of(w) - 1 and math.prod(sizes) < _LEAST_TERMS


def _is_small(geometry: Mapping[str, Sequence[int]], axes: int) -> bool:
    """Return whether a geometry has a number for each axis, and none that is too large for C or for memory."""
    if any(len(sizes) != axes * (1 + (name == "pads")) for name, sizes in geometry.items()):
        return False
    least = min([*geometry["strides"], *geometry["dilations"]])
    reach = [max(abs(n) for sizes in geometry.values() for n in (1, *sizes[i::axes])) for i in range(axes)]
    return least >= 1 and math.prod(reach) <= _MOST_REACH


def _geometry(attributes: Mapping[str, Any], axes: int) -> dict[str, list[int]]:
    """Return the strides, dilations and pads of a convolution, including defaults."""
    ones, none = [1] * axes, [0] * axes
    defaults = {"strides": ones, "dilations": ones, "pads": none * 2, "output_padding": none}
    return {name: list(attributes.get(name, numbers)) for name, numbers in defaults.items()}


def _surroundings(node: ir.Node, attributes: Mapping[str, Any]) -> _Convolution:
    """Return a convolution with the transposes and the Relu that its kernel takes in."""
    x, w, bias = [*node.inputs, None][:3]
    assert x is not None and w is not None
    y = node.outputs[0]
    order = list(range(rank_of(y)))
    results = [z for z in _after(y) if _in_order([i for i in z[1] if i in order], len(order))]
    after, stored_y = results[-1]
    nodes = [node, *after]
    then = only_reader(nodes[-1].outputs[0])
    relu = then is not None and then.op_type == "Relu" and then.domain == ""
    if then is not None and relu:
        nodes.append(then)
    stored_x = _deepest(_before(x, order[2:] if node.op_type == "Conv" else []), order, 1)
    stored_w = _deepest(_before(w, []), [0, 1, *order[2:]], len(order) - 2)
    stored_y = [order.index(i) if i in order else -1 for i in stored_y]
    return _Convolution(nodes, order, stored_x, stored_w, bias, stored_y, relu)


def _kernel_of(c: _Convolution, attributes: Mapping[str, Any]) -> Kernel:
    (x, axes_x, unused), (w, axes_w, _), node = c.x, c.w, c.nodes[0]
    axes = rank_of(node.outputs[0]) - 2
    strides, dilations, pads, more = _geometry(attributes, axes).values()
    end = [pad - n for pad, n in zip(pads[axes:], unused[2:], strict=True)]
    form = [
        *(rank_of(x), rank_of(w), len(c.stored_y), len(c.order) - 2),
        *(axes_x, axes_w, c.stored_y),
        *([sizes[i - 2] for i in c.order[2:]] for sizes in (strides, dilations, pads[:axes], end, more)),
        *(attributes["group"], int(node.op_type == "ConvTranspose"), int(c.bias is not None), int(c.relu)),
    ]
    inputs = [x, w] if c.bias is None else [x, w, c.bias]
    return Kernel.calling("convolution", form, inputs, c.nodes[-1].outputs)


def _before(x: ir.Value, cut: Sequence[int]) -> Iterator[_Stored]:
    """Yield an operand, and what it was before each node that only arranged its axes, or that cut the end of some."""
    axes, unused = list(range(rank_of(x))), [0] * rank_of(x)
    while True:
        yield x, axes, unused
        node = x.producer()
        before = None if node is None else node.inputs[0] if node.inputs else None
        if node is None or before is None or rank_of(before) < 0:
            return
        perm, added = permutation(node, rank_of(x)), _axes(node, "Unsqueeze", rank_of(x))
        if perm is not None:
            axes = [perm[i] if i >= 0 else -1 for i in axes]
        elif added is not None:
            kept = [i for i in range(rank_of(x)) if i not in added]
            axes = [kept.index(i) if i in kept else -1 for i in axes]
        elif (lost := _cut_at_end(node, before)) and all(axes.index(i) in cut for i in lost):
            unused = [n + lost.get(i, 0) for n, i in zip(unused, axes, strict=True)]
            if max(map(abs, unused)) > _MOST_UNUSED:
                return
        else:
            return
        x = before


def _cut_at_end(node: ir.Node, x: ir.Value) -> dict[int, int]:
    """Return how many elements a Slice drops at the end of each axis that it cuts; nothing for any other node."""
    y = node.outputs[0]
    if node.op_type != "Slice" or node.domain != "" or x.shape is None or y.shape is None:
        return {}
    starts, *steps = (constant_of(v) for v in (node.inputs[1], *node.inputs[4:]))
    if starts is None or starts.any() or any(step is None or (step != 1).any() for step in steps):
        return {}
    if len(x.shape) != len(y.shape):
        return {}
    sizes = [(i, old, new) for i, (old, new) in enumerate(zip(x.shape, y.shape, strict=True)) if old != new]
    known = {i: old - new for i, old, new in sizes if isinstance(old, int) and isinstance(new, int)}
    return known if len(known) == len(sizes) else {}


def _after(y: ir.Value) -> Iterator[tuple[list[ir.Node], list[int]]]:
    """Yield the nodes that only arrange a result's axes, one more each time, and the axes in stored order."""
    nodes: list[ir.Node] = []
    axes = list(range(rank_of(y)))
    while True:
        yield list(nodes), axes
        node = only_reader(y)
        if node is None:
            return
        perm, removed = permutation(node, len(axes)), _axes(node, "Squeeze", len(axes))
        if perm is not None:
            axes = [axes[i] for i in perm]
        elif removed is not None:
            axes = [axis for i, axis in enumerate(axes) if i not in removed]
        else:
            return
        nodes.append(node)
        y = node.outputs[0]


def _axes(node: ir.Node, op_type: str, many: int) -> list[int] | None:
    """Return the axes that a Squeeze or an Unsqueeze names; None for any other node."""
    if node.op_type != op_type or node.domain != "" or len(node.inputs) < 2:
        return None
    axes = constant_of(node.inputs[1])
    return None if axes is None else [int(axis) % many for axis in axes.ravel()]


def _in_order(axes: Sequence[int], many: int) -> bool:
    """Return whether the axes of space are stored last and in order."""
    return list(axes[-(many - 2) :]) == list(range(2, many))


def _deepest(stored: Iterable[_Stored], order: Sequence[int], last: int) -> _Stored:
    """Return the last form whose `last` axes, by `order`, are stored last and in order; by default, the first form."""
    forms = [(x, [axes[i] for i in order], unused) for x, axes, unused in stored]
    fitting = [
        form for form in forms if form[1][-last:] == list(range(rank_of(form[0]) - last, rank_of(form[0])))
    ]
    return fitting[-1] if fitting else forms[0]
