"""Lower matrix products: one operator computes a product with the transposes and the bias around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.operators import MATRIX_PRODUCTS
from graphopt.targets.native.forms import NodeForms, NodeKind, rank_of
from graphopt.targets.native.library import MOST_AXES, Kernel, Replacement


@dataclass(frozen=True)
class _Product:
    """A matrix product with what is taken in around it."""

    nodes: Sequence[ir.Node]
    a: ir.Value
    axes_a: Sequence[int]  # for each axis of `a`, the axis that it is stored as; `axes_b` is alike
    b: ir.Value
    axes_b: Sequence[int]
    bias: ir.Value | None
    y: ir.Value
    axes_y: Sequence[int]  # for each axis that the result is stored as, its axis
    is_transposed: bool  # whether C^T = B^T A^T is computed, with a bias for each row


def product_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of a matrix product of float32, and the nodes that it replaces; None for any other node."""
    if not accepts_product(node, forms):
        return None
    product = _surroundings(node, forms)
    return _kernel_of(product), product.nodes


def accepts_product(node: ir.Node, forms: NodeForms) -> bool:
    """Return whether a node is a matrix product that product.h computes."""
    attributes = forms.attributes_of(node)
    if attributes is None or node.op_type not in MATRIX_PRODUCTS:
        return False
    a, b, bias = [*node.inputs, None][:3]
    ranks, y = (rank_of(a), rank_of(b)), node.outputs[0]
    return (
        min(ranks) >= 2
        and max(ranks) == rank_of(y) <= MOST_AXES
        and all(x is not None and x.dtype == ir.DataType.FLOAT for x in (a, b, y))
        and attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
        and (bias is None or 0 <= rank_of(bias) <= 2)
    )


def _surroundings(node: ir.Node, forms: NodeForms) -> _Product:
    """Return a product with the bias and the transposes that its kernel takes in."""
    attributes, nodes = forms.attributes_of(node) or {}, [node]
    a, b, bias = [*node.inputs, None][:3]
    assert a is not None and b is not None
    y = node.outputs[0]
    rank = rank_of(y)
    axes_a = [1, 0] if attributes.get("transA") else list(range(rank_of(a)))
    axes_b = [1, 0] if attributes.get("transB") else list(range(rank_of(b)))
    axes_y = list(range(rank))
    then = only_reader(y)
    if bias is None and then is not None and (bias := _added_vector(y, then, forms)):
        nodes.append(then)
        y = then.outputs[0]
        then = only_reader(y)
    perm = None if then is None else permutation(then, rank)
    is_transposed = perm is not None and perm[-1] == rank - 2 and (bias is None or _is_vector(bias))
    if then is not None and perm is not None and (is_transposed or perm[-1] == rank - 1):
        nodes.append(then)
        y, axes_y = then.outputs[0], perm
    if is_transposed:  # columns of C lie together if it is C^T = B^T A^T
        a, axes_a, b, axes_b = b, _transposed(axes_b), a, _transposed(axes_a)
        axes_y = [_transposed(list(range(rank)))[axis] for axis in axes_y]
    a, axes_a = _before_transposes(a, axes_a)
    b, axes_b = _before_transposes(b, axes_b)
    return _Product(nodes, a, axes_a, b, axes_b, bias, y, axes_y, is_transposed)


def _kernel_of(x: _Product) -> Kernel:
    ranks = [len(x.axes_a), len(x.axes_b), len(x.axes_y)]
    rank_bias = -1 if x.bias is None else rank_of(x.bias)
    form = [*ranks, x.axes_a, x.axes_b, x.axes_y, rank_bias, int(x.is_transposed)]
    inputs = [x.a, x.b] if x.bias is None else [x.a, x.b, x.bias]
    return Kernel.calling("product", form, inputs, [x.y])


def _added_vector(y: ir.Value, node: ir.Node, forms: NodeForms) -> ir.Value | None:
    """Return the vector that an Add adds to each row of a product; None for any other node.

    None, too, for an Add that a cluster computes without reading or writing more.
    """
    if node.op_type != "Add" or node.domain != "" or _is_in_reach(node.outputs[0], forms):
        return None
    bias = node.inputs[1] if node.inputs[0] is y else node.inputs[0]
    if bias is None or bias.shape is None or y.shape is None or not 1 <= len(bias.shape) <= len(y.shape):
        return None
    length = bias.shape[-1] if isinstance(bias.shape[-1], int) else bias.shape[-1].value
    return bias if length is not None and y.shape[-1] == length and _is_vector(bias) else None


def _is_in_reach(y: ir.Value, forms: NodeForms) -> bool:
    """Return whether a node that reads a value, or a view of it, can be in a cluster with the node that computes it."""
    return any(
        form.kind is not NodeKind.VIEW or _is_in_reach(use.node.outputs[0], forms)
        for use in y.uses()
        if (form := forms.of(use.node)) is not None
    )


def _is_vector(x: ir.Value) -> bool:
    """Return whether only the last axis of a value may have more than one element."""
    return x.shape is not None and all(size == 1 for size in x.shape[:-1])


def _transposed(axes: list[int]) -> list[int]:
    """Return axes with rows and columns exchanged."""
    return [*axes[:-2], axes[-1], axes[-2]]


def _before_transposes(x: ir.Value, axes: list[int]) -> tuple[ir.Value, list[int]]:
    """Return what an operand was before as many transposes as leave rows or columns together there, and its axes."""
    last = x, axes
    while (node := x.producer()) is not None and node.domain == "" and node.inputs:
        perm = list(range(len(axes))) if node.op_type == "Identity" else permutation(node, len(axes))
        before = node.inputs[0]
        if perm is None or before is None:
            break
        x, axes = before, [perm[axis] for axis in axes]
        if len(axes) - 1 in axes[-2:]:
            last = x, axes
    return last


def permutation(node: ir.Node, rank: int) -> list[int] | None:
    """Return the permutation of a Transpose, which reverses the axes by default; None for any other node."""
    if node.op_type != "Transpose" or node.domain != "":
        return None
    attribute = node.attributes.get("perm")
    perm = list(range(rank))[::-1] if attribute is None else list(attribute.as_ints())
    return perm if sorted(perm) == list(range(rank)) else None


def only_reader(y: ir.Value) -> ir.Node | None:
    """Return the node that reads a value, if it is the only one and in the graph of the node that computes it."""
    uses, producer = list(y.uses()), y.producer()
    if len(uses) != 1 or y.is_graph_output() or producer is None or uses[0].node.graph is not producer.graph:
        return None
    return uses[0].node
