"""Write convolutions as those that the kernels have and compute correctly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import dims_of, rank
from graphopt.graph.windows import pad_mode, window_of
from graphopt.targets.portable.form import Form, given, known_sizes

_FIRST = -(2**31)  # the end of a Slice that reaches the first element backwards


def _convolution(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    x, w = given(node.inputs[0]), given(node.inputs[1])
    group = node.attributes.get_int("group", 1)
    if x.shape is None or w.shape is None:
        return None
    if rank(x) == 5:
        return _by_groups(op, node, group) if group > 1 else None
    filters, channels, *kernel = dims_of(w)
    if not isinstance(filters, int):
        return None
    wrong = _splits_vectors(filters, group)
    if group == 1:  # 1.27 adds a wrong bias to 6 outputs of few channels at a point
        few = not isinstance(channels, int) or channels < 8
        wrong = filters == 6 and few and len(node.inputs) > 2 and set(kernel) == {1}
        if filters % 4 == 0:
            return _of_other_channels(op, node, filters, channels)
    return _of_whole_vectors(op, node, group, filters // group) if wrong else None


def _of_other_channels(
    op: Emitter, node: ir.Node, filters: int, channels: int | ir.SymbolicDim
) -> Sequence[ir.Value] | None:
    """Add channels of zeros up to a multiple of 4, or a filter if the number of channels is unknown.

    The kernel sums wrongly over 6, 9, 15 and other multiples of 3 that are none of 4, for a multiple of 4 filters. In
    the weights' gradient, the rows of a batch are channels.
    """
    x, w, *bias = map(given, node.inputs)
    n = rank(w)
    if isinstance(channels, int):
        if channels < 4 or channels % 3 or channels % 4 == 0:
            return None
        pads = [0] * (n + 1) + [-channels % 4] + [0] * (n - 2)
        return [op.Conv(op.Pad(x, pads), op.Pad(w, pads), *bias, **node.attributes)]
    bias = [op.Pad(b, [0, 1]) for b in bias]
    y = op.Conv(x, op.Pad(w, [0] * n + [1] + [0] * (n - 1)), *bias, **node.attributes)
    return [op.Gather(y, op.constant(np.arange(filters)), axis=1)]


def _splits_vectors(filters: int, group: int) -> bool:
    """Return whether a group may begin within a vector of outputs, which the kernel computes at once."""
    of_group = filters // group
    sizes = [4] if filters % 4 == 0 else [3, 2]
    return of_group >= 4 and any(of_group % size for size in sizes if filters % size == 0)


def _of_whole_vectors(op: Emitter, node: ir.Node, group: int, of_group: int) -> Sequence[ir.Value]:
    """Give each group of a convolution a multiple of 4 filters, of which the further ones are zero.

    The kernel computes 2 to 4 neighbouring outputs at once, as the number of all filters allows, although a group may
    begin between them.
    """
    x, w, *bias = node.inputs
    added = -of_group % 4

    def padded(y: ir.Value) -> ir.Value:
        rows = op.Pad(op.Reshape(y, [group, of_group, -1]), [0, 0, 0, 0, added, 0])
        shape = [op.constant([group * (of_group + added)]), *([op.shape_of(y, 1)] if rank(y) > 1 else [])]
        result: ir.Value = op.Reshape(rows, op.Concat(*shape, axis=0))
        result.shape = ir.Shape([group * (of_group + added), *dims_of(y)[1:]])
        return result

    y: ir.Value = op.Conv(x, padded(given(w)), *(padded(y) for y in bias if y is not None), **node.attributes)
    y.shape = ir.Shape([None, None, *dims_of(node.outputs[0])[2:]])
    return [_first_of_groups(op, y, group, of_group + added, of_group)]


def _first_of_groups(op: Emitter, y: ir.Value, group: int, size: int, kept: int) -> ir.Value:
    places = np.arange(group * size).reshape(group, size)[:, :kept]
    result: ir.Value = op.Gather(y, op.constant(places.ravel()), axis=1)
    return result


def _by_groups(op: Emitter, node: ir.Node, group: int) -> Sequence[ir.Value]:
    """Convolve each group by itself: the kernels of volumes know no groups."""
    x, w, *bias = node.inputs

    def parts(value: ir.Value | None, axis: int) -> list[ir.Value]:
        return op.Split(value, axis=axis, num_outputs=group, _outputs=group)

    operands = [parts(x, 1), parts(w, 0), *(parts(b, 0) for b in bias if b is not None)]
    attributes = {name: value for name, value in node.attributes.items() if name != "group"}
    outputs = [op.call_op(node.op_type, list(inputs), dict(attributes)) for inputs in zip(*operands, strict=True)]
    return [op.Concat(*outputs, axis=1)]


def _transposed(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    x, w = given(node.inputs[0]), given(node.inputs[1])
    group = node.attributes.get_int("group", 1)
    if x.shape is None or w.shape is None:
        return None
    if rank(x) == 5:
        return _by_groups(op, node, group) if group > 1 else _by_correlation(op, node)
    channels, of_group = dims_of(w)[:2]
    wrong = group > 1 and of_group == 1 and not (isinstance(channels, int) and channels // group % 2)
    return _of_two_outputs(op, node, group) if wrong else None


def _of_two_outputs(op: Emitter, node: ir.Node, group: int) -> Sequence[ir.Value]:
    """Give each group of a ConvTranspose a second output, which is zero.

    The kernel sums over half or a quarter of the inputs of a group that has one output and an even number of inputs.
    """
    x, w, *bias = node.inputs
    ends = [0, 1, *[0] * (rank(given(w)) - 2)]
    wide = [op.Reshape(op.Pad(op.Reshape(b, [-1, 1]), [0, 0, 0, 1]), [-1]) for b in bias if b is not None]
    y: ir.Value = op.ConvTranspose(x, op.Pad(w, [0] * len(ends) + ends), *wide, **node.attributes)
    y.shape = ir.Shape([None, None, *dims_of(node.outputs[0])[2:]])
    return [_first_of_groups(op, y, group, 2, 1)]


def _by_correlation(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write the ConvTranspose of a volume as a Conv of its elements with zeros between. There is no such kernel."""
    x, w, *bias = node.inputs
    x, w = given(x), given(w)
    n, kernel = rank(x) - 2, [k for k in (known_sizes(w) or [])[2:] if k is not None]
    if pad_mode(node) != "NOTSET" or "output_shape" in node.attributes or len(kernel) < n:
        return None
    window, more = window_of(node, kernel), node.attributes.get_ints("output_padding", [0] * n)
    begin = [size - 1 - pad for size, pad in zip(window.extent, window.begin, strict=True)]
    end = [
        size - pad + extra - stride  # zeros come after the last element, too
        for size, pad, extra, stride in zip(window.extent, window.end, more, window.strides, strict=True)
    ]
    for axis, stride in enumerate(window.strides, 2):
        x = _spread(op, x, axis, stride) if stride > 1 else x
    x = op.Pad(x, [0, 0, *begin, 0, 0, *end])
    axes = list(range(2, n + 2))
    turned = op.Slice(w, [-1] * n, [_FIRST] * n, axes, [-1] * n)
    return [op.Conv(x, op.Transpose(turned, perm=[1, 0, *axes]), *bias, dilations=window.dilations)]


def _spread(op: Emitter, x: ir.Value, axis: int, stride: int) -> ir.Value:
    """Put zeros after each element along an axis, so that elements come at every stride."""
    count = rank(x) + 1
    ends = [stride - 1 if i == axis + 1 else 0 for i in range(count)]
    rows = op.Pad(op.Unsqueeze(x, [axis + 1]), [0] * count + ends)
    shape = [op.constant([0] * axis + [-1]), *([op.shape_of(x, axis + 1)] if axis < rank(x) - 1 else [])]
    result: ir.Value = op.Reshape(rows, op.Concat(*shape, axis=0))
    result.shape = ir.Shape([*dims_of(x)[:axis], None, *dims_of(x)[axis + 1 :]])
    return result


FORMS: dict[str, Form] = {"Conv": _convolution, "ConvTranspose": _transposed}
