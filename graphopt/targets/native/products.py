"""Lower matrix products: one operator computes a product with the transposes and the bias around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import MATRIX_PRODUCTS
from graphopt.graph.sizes import has_sizes, sizes_of
from graphopt.graph.values import constant_of, like, swap
from graphopt.targets.native.forms import NodeForms, NodeKind, rank_of
from graphopt.targets.native.library import MOST_AXES, Item, Kernel, Replacement
from graphopt.targets.native.precision import multiplies_bfloat16
from graphopt.targets.native.weights import weight_of
from graphopt.targets.portable.form import given

_MOST_UNUSED = 2**30  # elements that Slices drop


def product_kernel(node: ir.Node, forms: NodeForms) -> Replacement | None:
    """Return the kernel of a matrix product, and the nodes that it replaces; None for any other node.

    The kernel takes in a bias, transposes of the operands and the result, and casts of parameters to bfloat16.
    """
    if not accepts_product(node, forms):
        return None
    attributes, nodes = forms.attributes_of(node) or {}, [node]
    bias = [*node.inputs, None][2]
    a, b, y = *map(given, node.inputs[:2]), node.outputs[0]
    rank = rank_of(y)
    axes_a = [1, 0] if attributes.get("transA") else list(range(rank_of(a)))
    axes_b = [1, 0] if attributes.get("transB") else list(range(rank_of(b)))
    axes_y = list(range(rank))
    then = only_reader(y)
    if bias is None and then is not None and (bias := _added_vector(y, then, forms)):
        nodes.append(then)
        then = only_reader(then.outputs[0])
    perm = None if then is None else permutation(then, rank)
    is_transposed = perm is not None and perm[-1] == rank - 2 and (bias is None or _is_vector(bias))
    if then is not None and perm is not None and (is_transposed or perm[-1] == rank - 1):
        nodes.append(then)
        axes_y = perm
    if is_transposed:  # columns of C lie together if it is C^T = B^T A^T
        a, axes_a, b, axes_b = b, transposed(axes_b), a, transposed(axes_a)
        axes_y = [transposed(list(range(rank)))[axis] for axis in axes_y]
    a, axes_a = before_transposes(a, axes_a)
    b, axes_b = before_transposes(b, axes_b)
    a, b = _before_cast(a), _before_cast(b)
    rank_bias = -1 if bias is None else rank_of(bias)
    narrow = [int(x.dtype == ir.DataType.BFLOAT16) for x in (a, b, y)]
    form: list[Item] = [
        len(axes_a),
        len(axes_b),
        rank,
        axes_a,
        axes_b,
        axes_y,
        rank_bias,
        int(is_transposed),
        narrow,
    ]
    weight = weight_of(b, forms) if not narrow[2] else None
    if weight is None:
        return Kernel.calling("product", form, [a, b, bias], nodes[-1].outputs), nodes
    q, *others = weight.values
    return Kernel.calling("product", [*form, weight.form], [a, q, bias, *others], nodes[-1].outputs), nodes


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
        and _are_multiplied({x.dtype for x in (a, b, y) if x is not None})
        and attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
        and (bias is None or 0 <= rank_of(bias) <= 2)
    )


def _are_multiplied(types: set[ir.DataType | None]) -> bool:
    """Return whether product.h computes products of these types of operands and results."""
    return types == {ir.DataType.FLOAT} or (types == {ir.DataType.BFLOAT16} and multiplies_bfloat16())


def separate_biases(model: ir.Model) -> None:
    """Write a Gemm of bfloat16 with a bias as one without it, and an Add: clusters compute that with what follows."""
    with Emitter(model) as op:
        for node in list(model.graph):
            y, bias = node.outputs[0], [*node.inputs, None][2:3]
            if node.op_type != "Gemm" or node.domain or y.dtype != ir.DataType.BFLOAT16 or bias == [None]:
                continue
            product = op.Gemm(*node.inputs[:2], **node.attributes)
            swap(y, like(op.Add(like(product, y), bias[0]), y))
            model.graph.remove(node, safe=True)
    model.graph.sort()


def _before_cast(x: ir.Value) -> ir.Value:
    """Return the parameter that a value is, rounded to bfloat16, or the value itself."""
    node = x.producer()
    before = node.inputs[0] if node is not None and node.op_type == "Cast" and node.domain == "" else None
    if x.dtype != ir.DataType.BFLOAT16 or before is None or before.dtype != ir.DataType.FLOAT:
        return x
    return before if before.producer() is None else x


def _added_vector(y: ir.Value, node: ir.Node, forms: NodeForms) -> ir.Value | None:
    """Return the vector that an Add adds to each row of a product, if no cluster computes it without more traffic."""
    if (
        node.op_type != "Add"
        or node.domain != ""
        or y.dtype != ir.DataType.FLOAT
        or _is_in_reach(node.outputs[0], forms)
    ):
        return None
    bias = node.inputs[1] if node.inputs[0] is y else node.inputs[0]
    if bias is None or not has_sizes(bias) or not 1 <= rank_of(bias) <= rank_of(y):
        return None
    return bias if sizes_of(bias)[-1] == sizes_of(y)[-1] and _is_vector(bias) else None


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


def transposed(axes: list[int]) -> list[int]:
    """Return axes with rows and columns exchanged."""
    return [*axes[:-2], axes[-1], axes[-2]]


def before_transposes(x: ir.Value, axes: list[int]) -> tuple[ir.Value, list[int]]:
    """Return what an operand was before as many transposes as leave rows or columns together there, and its axes."""
    stored = [(z, [own[i] for i in axes]) for z, own, _ in stored_before(x) if rank_of(z) == len(axes)]
    return [(z, own) for z, own in stored if len(axes) - 1 in own[-2:]][-1]


# --- Layout of operands and results ---

# A value, the stored axis of each axis (-1 if it has size 1), and the number of elements at its end that are not used.
Stored = tuple[ir.Value, list[int], list[int]]


def stored_before(x: ir.Value, cut: Sequence[int] = ()) -> Iterator[Stored]:
    """Yield an operand, and what it was before each node that only arranged its axes, or that cut the end of some."""
    axes, unused = list(range(rank_of(x))), [0] * rank_of(x)
    while True:
        yield x, axes, unused
        node, rank = x.producer(), rank_of(x)
        before = node.inputs[0] if node is not None and node.inputs else None
        if node is None or before is None or rank_of(before) < 0:
            return
        if (perm := permutation(node, rank)) is not None:
            axes = [perm[i] if i >= 0 else -1 for i in axes]
        elif (added := axes_of(node, "Unsqueeze", rank)) is not None:
            kept = [i for i in range(rank) if i not in added]
            axes = [kept.index(i) if i in kept else -1 for i in axes]
        elif (lost := _cut_at_end(node, before)) and all(axes.index(i) in cut for i in lost):
            unused = [n + lost.get(i, 0) for n, i in zip(unused, axes, strict=True)]
            if max(map(abs, unused)) > _MOST_UNUSED:
                return
        elif node.op_type != "Identity" or node.domain != "":
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


def axes_of(node: ir.Node, op_type: str, many: int) -> list[int] | None:
    """Return the axes that a Squeeze or an Unsqueeze names; None for any other node."""
    if node.op_type != op_type or node.domain != "" or len(node.inputs) < 2:
        return None
    axes = constant_of(node.inputs[1])
    return None if axes is None else [int(axis) % many for axis in axes.ravel()]


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
