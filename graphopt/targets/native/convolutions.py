"""Lower convolutions: one operator computes a convolution with the transposes around it, its bias and a Relu."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphopt.graph.values import constant_of
from graphopt.targets.native.attributes import attributes_of
from graphopt.targets.native.kernels import Kernel
from graphopt.targets.native.products import braced, only_reader, permutation, rank_of

MOST_AXES = 3  # of space, as in convolution.h
LEAST_TERMS = 16  # of a sum, below which storing results takes longest
LEAST_FILTERS = 5  # of a transposed convolution, below which vectors stay empty: FEW_FILTERS of convolution.h

MOST_REACH = 4096  # the product over axes of the largest stride, dilation or pad: copies grow with it

# A value, the stored axis of each axis (-1 if it has size 1), and the number of elements at its end that are not used.
Stored = tuple[ir.Value, list[int], list[int]]


def convolution_kernel(node: ir.Node, versions: Mapping[str, int]) -> tuple[Kernel, list[ir.Node]] | None:
    """Return the kernel of a convolution of float32, and the nodes that it replaces; None for any other node."""
    attributes = attributes_of(node, versions)
    if attributes is None or node.op_type not in ("Conv", "ConvTranspose"):
        return None
    x, w, bias = [*node.inputs, None][:3]
    y = node.outputs[0]
    if (
        x is None
        or w is None
        or not rank_of(x) == rank_of(w) == rank_of(y)
        or not 1 <= rank_of(y) - 2 <= MOST_AXES
    ):
        return None
    if any(v.dtype != ir.DataType.FLOAT for v in (x, w, y)) or not _is_supported(node, attributes, w):
        return None
    space = list(range(2, rank_of(y)))
    batch = _batch_axis(node, attributes, x, w)
    for order in (
        [[0, 1, *space]] if batch is None else [[batch, 1, *(i for i in space if i != batch)], [0, 1, *space]]
    ):
        results = [
            z for z in _after(y) if _in_order([order.index(i) for i in z[1] if i in order], len(order))
        ]
        if results:
            break
    nodes, stored_y = results[-1]
    cut = order[2:] if node.op_type == "Conv" else []
    x, axes_x, unused = _deepest(_before(x, cut), order, 1)
    w, axes_w, _ = _deepest(_before(w, []), [0, 1, *order[2:]], len(order) - 2)
    replaced = [node, *nodes]
    then = only_reader(replaced[-1].outputs[0])
    relu = then is not None and then.op_type == "Relu" and then.domain == ""
    if then is not None and relu:
        replaced.append(then)
    y = replaced[-1].outputs[0]
    one, none = [1] * len(space), [0] * len(space)
    pads = list(attributes.get("pads", none * 2))
    geometry = [
        list(attributes.get("strides", one)),
        list(attributes.get("dilations", one)),
        pads[: len(space)],
        [pad - n for pad, n in zip(pads[len(space) :], unused[2:], strict=True)],
        list(attributes.get("output_padding", none)),
    ]
    if any(abs(size) >= 2**31 for sizes in geometry for size in sizes):
        return None
    form: list[int | Sequence[int]] = [
        *(rank_of(x), rank_of(w), len(stored_y), len(order) - 2),
        *(axes_x, axes_w, [order.index(i) if i in order else -1 for i in stored_y]),
        *([sizes[i - 2] for i in order[2:]] for sizes in geometry),
        *(attributes["group"], int(node.op_type == "ConvTranspose"), int(bias is not None), int(relu)),
    ]
    inputs = (x, w) if bias is None else (x, w, bias)
    code = f"""static const unsigned char types_@[] = {braced([ir.DataType.FLOAT.value] * (len(inputs) + 1))};

static OrtStatus *compute_@(Context *context) {{
    static const ConvolutionForm form = {braced(form)};
    return convolution(context, &form);
}}
"""
    name = "c" + hashlib.sha256(code.encode()).hexdigest()[:16]
    return Kernel(name, code.replace("@", name), inputs, (y,), "calls.h"), replaced


def _is_supported(node: ir.Node, attributes: Mapping[str, Any], w: ir.Value) -> bool:
    """Return whether convolution.h computes what the attributes say, and is no slower than the runtime."""
    if (
        attributes["auto_pad"] != "NOTSET"
        or "output_shape" in attributes
        or not _is_small(attributes, rank_of(w) - 2)
    ):
        return False
    transposed = node.op_type == "ConvTranspose"
    if transposed and max(attributes.get("strides", [1])) > 1 and max(attributes.get("dilations", [1])) > 1:
        return False
    assert w.shape is not None
    terms = [size for size in w.shape[1:] if isinstance(size, int)]
    if transposed:
        few = isinstance(w.shape[1], int) and w.shape[1] < LEAST_FILTERS
    else:
        few = len(terms) == rank_of(w) - 1 and math.prod(terms) < LEAST_TERMS
    return attributes["group"] > 1 or not few


def _is_small(attributes: Mapping[str, Any], axes: int) -> bool:
    """Return whether the geometry has a number for each axis, and none that is too large for C or for memory."""
    given = {name: attributes.get(name, [1] * axes) for name in ("strides", "dilations")}
    given |= {
        "pads": attributes.get("pads", [0] * 2 * axes),
        "more": attributes.get("output_padding", [0] * axes),
    }
    if any(len(sizes) != axes * (1 + (name == "pads")) for name, sizes in given.items()):
        return False
    least = min([*given["strides"], *given["dilations"]])
    reach = [max(abs(size) for sizes in given.values() for size in (1, *sizes[i::axes])) for i in range(axes)]
    return least >= 1 and math.prod(reach) <= MOST_REACH and 1 <= attributes["group"] < 2**31


def _batch_axis(node: ir.Node, attributes: Mapping[str, Any], x: ir.Value, w: ir.Value) -> int | None:
    """Return the last axis of space that is a batch: one image, and a kernel of size 1 that visits each element."""
    if (
        node.op_type != "Conv"
        or attributes["group"] != 1
        or rank_of(x) < 4
        or x.shape is None
        or x.shape[0] != 1
    ):
        return None
    n = rank_of(x) - 2
    strides, pads = attributes.get("strides", [1] * n), attributes.get("pads", [0] * 2 * n)
    free = [i for i in range(n) if strides[i] == 1 and pads[i] == pads[n + i] == 0]
    assert w.shape is not None
    return next((i + 2 for i in reversed(free) if w.shape[i + 2] == 1), None)


def _before(x: ir.Value, cut: Sequence[int]) -> Iterator[Stored]:
    """Yield an operand, and what it was before each of the nodes that only arranged its axes.

    Args:
        cut: the axes at whose end a node may also drop elements.
    """
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
        else:
            return
        x = before


def _cut_at_end(node: ir.Node, x: ir.Value) -> dict[int, int]:
    """Return how many elements a Slice drops at the end of each axis that it names; nothing for any other node."""
    y = node.outputs[0]
    if node.op_type != "Slice" or node.domain != "" or x.shape is None or y.shape is None:
        return {}
    starts, _, axes, steps = (constant_of(v) for v in [*node.inputs[1:], None, None][:4])
    if (
        starts is None
        or starts.any()
        or axes is None
        or (len(node.inputs) > 4 and (steps is None or (steps != 1).any()))
    ):
        return {}
    rank = len(x.shape)
    if len(y.shape) != rank or any(not -rank <= i < rank for i in axes):
        return {}
    sizes = {int(i) % rank: (x.shape[int(i)], y.shape[int(i)]) for i in axes}
    known = {
        i: (old, new) for i, (old, new) in sizes.items() if isinstance(old, int) and isinstance(new, int)
    }
    return {i: old - new for i, (old, new) in known.items()} if known == sizes else {}


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


def _deepest(stored: Iterable[Stored], order: Sequence[int], last: int) -> Stored:
    """Return the last of several forms whose `last` axes are stored last and in order; by default, the first form.

    Args:
        order: the axes of a form to return, by their number in `stored`.
    """
    forms = [(x, [axes[i] for i in order], unused) for x, axes, unused in stored]
    fitting = [
        form for form in forms if form[1][-last:] == list(range(rank_of(form[0]) - last, rank_of(form[0])))
    ]
    return fitting[-1] if fitting else forms[0]
