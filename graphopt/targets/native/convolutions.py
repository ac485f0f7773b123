"""Lower convolutions: one operator computes a convolution with the transposes around it, its bias and a Relu."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.sizes import has_sizes, sizes_of
from graphopt.graph.values import dims_of, fixed
from graphopt.graph.windows import Window, pad_mode, window_of
from graphopt.targets.native.forms import NodeForms, rank_of
from graphopt.targets.native.library import FEW_FILTERS, Item, Kernel, Replacement
from graphopt.targets.native.operators import Attributes
from graphopt.targets.native.products import (
    Stored,
    accepts_product,
    axes_of,
    only_reader,
    permutation,
    stored_before,
)
from graphopt.targets.portable.form import given

_LEAST_TERMS = 16  # of a sum, below which storing results takes longest
_MOST_REACH = 4096  # the product over axes of the largest stride, dilation or pad: copies grow with it


def convolution_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of a convolution of float32, and the nodes that it replaces; None for any other node.

    The kernel takes in what arranges the axes of the operands and the result, and a Relu.
    """
    attributes = forms.attributes_of(node)
    if attributes is None:
        return None
    if node.op_type == "ReduceSum":
        return _sum_of_products(node, attributes, forms)
    if not _accepts(node, attributes):
        return None
    bias = [*node.inputs, None][2]
    x, w = map(given, node.inputs[:2])
    space = list(range(2, rank_of(x)))
    is_transposed, axes = node.op_type == "ConvTranspose", len(space)
    after, axes_y = [z for z in _after(node.outputs[0]) if z[1][-axes:] == space][-1]
    nodes = [node, *after]
    then = only_reader(nodes[-1].outputs[0])
    relu = then is not None and then.op_type == "Relu" and then.domain == ""
    if then is not None and relu:
        nodes.append(then)
    x, axes_x, unused = _deepest(stored_before(x, [] if is_transposed else space), 1)
    w, axes_w, _ = _deepest(stored_before(w), axes)
    window, more = _window(node)
    end = [pad - n for pad, n in zip(window.end, unused[2:], strict=True)]
    form = [
        *(rank_of(x), rank_of(w), len(axes_y), axes, axes_x, axes_w, axes_y),
        *(window.strides, window.dilations, window.begin, end, more),
        *(attributes["group"], int(is_transposed), int(bias is not None), int(relu), 0),
    ]
    return Kernel.calling("convolution", form, [x, w, bias], nodes[-1].outputs), nodes


def example_gradient_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of the gradients of a convolution's kernel by each example, and the node that it replaces.

    The node multiplies the gradients [n, 1, filters, places] of the output with windows, which a depthwise convolution
    has unfolded. The kernel reads them where they lie in the input.
    """
    if (node.domain, node.op_type) != ("", "MatMul") or not accepts_product(node, forms):
        return None
    dy, conv = _flattened(given(node.inputs[0]), [0, 1, 2, 3]), _flattened(given(node.inputs[1]), [0, 1, 3, 2])
    unfold = None if conv is None else conv.producer()
    if dy is None or unfold is None or unfold.op_type != "Conv" or unfold.domain or len(unfold.inputs) != 2:
        return None
    x, w = map(given, unfold.inputs)
    kernels, attributes = fixed(w), forms.attributes_of(unfold)
    if kernels is None or attributes is None or pad_mode(unfold) != "NOTSET" or x.dtype != ir.DataType.FLOAT:
        return None
    taps, groups, axes = kernels.shape[2:], attributes["group"], kernels.ndim - 2
    each, (window, _) = math.prod(taps), _window(unfold)
    if groups < 1 or kernels.shape != (groups * each, 1, *taps):
        return None
    if not (kernels.reshape(groups, each, each) == np.eye(each, dtype=np.float32)).all():
        return None
    if rank_of(dy) != axes + 2 or not _is_small(window, taps) or axes > 3:
        return None
    space = [*range(2, axes + 2)]
    form: list[Item] = [axes + 2, axes + 2, axes + 2, axes, [1, 0, *space], [1, 0, *space], [1, 0, *space]]
    form += [window.dilations, window.strides, window.begin, window.end, list(taps), 1, 0, 0, 0, 1]
    return Kernel.calling("convolution", form, [x, dy], node.outputs), [node]


def _flattened(x: ir.Value, axes: list[int]) -> ir.Value | None:
    """Return the value [n, channels, ...] that a value views as [n, 1, channels, places], with its axes in an order."""
    view, found, _ = [*stored_before(x)][-1]
    node = view.producer()
    if found != axes or node is None or node.op_type != "Reshape" or node.domain:
        return None
    y = given(node.inputs[0])
    if not has_sizes(view) or not has_sizes(y) or rank_of(view) != 4 or rank_of(y) < 3:
        return None
    (n, group, channels, _), sizes = sizes_of(view), sizes_of(y)
    return y if (n, group, channels) == (sizes[0], 1, sizes[1]) and isinstance(channels, int) else None


def _sum_of_products(node: ir.Node, attributes: Attributes, forms: NodeForms) -> Replacement | None:
    """Return the kernel of matrix products that are summed over a batch, as in gradients of pointwise kernels.

    It is a convolution: columns of B are images, rows of A are filters, and the batch is channels.
    """
    y = node.inputs[0]
    product = None if y is None else y.producer()
    form = forms.of(node)
    if y is None or product is None or product.op_type != "MatMul" or form is None or form.reduced != (0,):
        return None
    a, b = map(given, product.inputs)
    if (
        only_reader(y) is not node
        or not accepts_product(product, forms)
        or y.dtype != ir.DataType.FLOAT
        or rank_of(a) != 3
        or rank_of(b) != 3
    ):
        return None
    if not has_sizes(a) or not has_sizes(b) or sizes_of(a)[0] != sizes_of(b)[0]:
        return None
    (w, axes_w), (x, axes_x) = (_with_terms_last(v, axis) for v, axis in ((a, 2), (b, 1)))
    if axes_w is None or axes_x is None:
        return None
    once, none = [1], [0]
    axes_y = [-1, 1, 0] if attributes["keepdims"] else [1, 0]
    form_: list[Item] = [3, 3, len(axes_y), 1, axes_x, axes_w, axes_y, once, once, none, none, none]
    form_ += [1, 0, 0, 0, 0]  # a group; neither transposed, nor with a bias or a Relu, nor by each example
    return Kernel.calling("convolution", form_, [x, w], node.outputs), [product, node]


def _with_terms_last(x: ir.Value, axis: int) -> tuple[ir.Value, list[int] | None]:
    """Return where a batch of matrices is stored with an axis last, and its stored axes: the others, then that one."""
    order = [3 - axis, 0, axis]
    for stored, axes, _ in stored_before(x):
        if rank_of(stored) == 3 and axes[axis] == 2 and -1 not in axes:
            return stored, [axes[i] for i in order]
    return x, None


def _accepts(node: ir.Node, attributes: Attributes) -> bool:
    """Return whether a node is a convolution that convolution.h computes, and no slower than the runtime."""
    if node.op_type not in ("Conv", "ConvTranspose"):
        return False
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if x is None or w is None or not rank_of(x) == rank_of(w) == rank_of(y):
        return False
    if not 3 <= rank_of(y) <= 5:  # geometry.h has up to three axes of space
        return False
    is_transposed, (window, more) = node.op_type == "ConvTranspose", _window(node)
    return (
        all(v.dtype == ir.DataType.FLOAT for v in (x, w, y))
        and pad_mode(node) == "NOTSET"
        and "output_shape" not in attributes
        and 1 <= attributes["group"] < 2**31
        and _is_small(window, more)
        and not (is_transposed and min(max(window.strides), max(window.dilations)) > 1)
        and (attributes["group"] > 1 or not _has_few_terms(w, is_transposed))
    )


def _has_few_terms(w: ir.Value, is_transposed: bool) -> bool:
    """Return whether sums have too few terms, or too few filters fill a vector."""
    channels, *taps = dims_of(w)[1:]
    sizes = [size for size in (channels, *taps) if isinstance(size, int)]
    if is_transposed:
        return isinstance(channels, int) and channels < FEW_FILTERS
    return len(sizes) == rank_of(w) - 1 and math.prod(sizes) < _LEAST_TERMS


def _is_small(window: Window, more: Sequence[int]) -> bool:
    """Return whether a window has a number for each axis, and none that is too large for C or for memory."""
    axes = [window.kernel, window.strides, window.dilations, window.begin, window.end, more]
    if len({len(numbers) for numbers in axes}) > 1:
        return False
    reach = [max(abs(n) for n in (1, *numbers)) for numbers in zip(*axes[1:], strict=True)]
    return min([*window.strides, *window.dilations]) >= 1 and math.prod(reach) <= _MOST_REACH


def _window(node: ir.Node) -> tuple[Window, Sequence[int]]:
    """Return the window of a convolution, with 0 for unknown sizes of its kernel, and the output padding."""
    taps = [size if isinstance(size, int) else 0 for size in dims_of(given(node.inputs[1]))[2:]]
    return window_of(node, taps), node.attributes.get_ints("output_padding", [0] * len(taps))


def _after(y: ir.Value) -> Iterator[tuple[list[ir.Node], list[int]]]:
    """Yield the nodes that only arrange a result's axes, one more each time, and the axes in stored order."""
    nodes: list[ir.Node] = []
    axes = list(range(rank_of(y)))
    while True:
        yield list(nodes), axes
        node = only_reader(y)
        if node is None:
            return
        if (perm := permutation(node, len(axes))) is not None:
            axes = [axes[i] for i in perm]
        elif (removed := axes_of(node, "Squeeze", len(axes))) is not None:
            axes = [axis for i, axis in enumerate(axes) if i not in removed]
        else:
            return
        nodes.append(node)
        y = node.outputs[0]


def _deepest(stored: Iterable[Stored], last: int) -> Stored:
    """Return the last form whose `last` axes are stored last and in order, as those of the first form are."""
    return [form for form in stored if form[1][-last:] == list(range(rank_of(form[0])))[-last:]][-1]
