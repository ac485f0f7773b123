"""Lower matrix products: one operator computes a product with the transposes and the bias around it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphopt.graph.operators import MATRIX_PRODUCTS
from graphopt.targets.native.attributes import attributes_of
from graphopt.targets.native.forms import form_of
from graphopt.targets.native.kernels import Kernel

MOST_AXES = 4  # as in calls.h


def product_kernel(node: ir.Node, versions: Mapping[str, int]) -> tuple[Kernel, list[ir.Node]] | None:
    """Return the kernel of a matrix product of float32, and the nodes that it replaces; None for any other node."""
    attributes = attributes_of(node, versions)
    if attributes is None or node.op_type not in MATRIX_PRODUCTS:
        return None
    a, b, bias = [*node.inputs, None][:3]
    y, replaced = node.outputs[0], [node]
    rank = rank_of(y)
    if a is None or b is None or rank != max(rank_of(a), rank_of(b)) or min(rank_of(a), rank_of(b)) < 2:
        return None
    if rank > MOST_AXES or any(x.dtype != ir.DataType.FLOAT for x in (a, b, y)):
        return None
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        return None
    axes_a = [1, 0] if attributes.get("transA") else list(range(rank_of(a)))
    axes_b = [1, 0] if attributes.get("transB") else list(range(rank_of(b)))
    axes_y = list(range(rank))
    if bias is not None and not 0 <= rank_of(bias) <= 2:
        return None
    then = only_reader(y)
    if bias is None and then is not None and (bias := _added_vector(y, then, versions)):
        replaced.append(then)
        y = then.outputs[0]
        then = only_reader(y)
    perm = None if then is None else permutation(then, rank)
    is_turned = perm is not None and perm[-1] == rank - 2 and (bias is None or _is_vector(bias))
    if then is not None and perm is not None and (is_turned or perm[-1] == rank - 1):
        replaced.append(then)
        y, axes_y = then.outputs[0], perm
    if is_turned:  # columns of C lie together if it is C^T = B^T A^T
        a, axes_a, b, axes_b = b, _turned(axes_b), a, _turned(axes_a)
        axes_y = [_turned(list(range(rank)))[axis] for axis in axes_y]
    a, axes_a = _before_transposes(a, axes_a)
    b, axes_b = _before_transposes(b, axes_b)
    form: list[int | Sequence[int]] = [
        len(axes_a),
        len(axes_b),
        rank,
        axes_a,
        axes_b,
        axes_y,
        -1 if bias is None else rank_of(bias),
        int(is_turned),
    ]
    inputs = (a, b) if bias is None else (a, b, bias)
    types = [ir.DataType.FLOAT.value] * (len(inputs) + 1)
    code = f"""static const unsigned char types_@[] = {braced(types)};

static OrtStatus *compute_@(Context *context) {{
    static const ProductForm form = {braced(form)};
    return product(context, &form);
}}
"""
    name = "p" + hashlib.sha256(code.encode()).hexdigest()[:16]
    return Kernel(name, code.replace("@", name), inputs, (y,), "calls.h"), replaced


def rank_of(x: ir.Value) -> int:
    """Return the number of a value's axes; -1 if it is unknown."""
    return -1 if x.shape is None else len(x.shape)


def braced(items: Sequence[int | Sequence[int]]) -> str:
    """Return numbers, and lists of numbers, as C's initializer."""
    return f"{{{', '.join(str(x) if isinstance(x, int) else braced(x) for x in items)}}}"


def _added_vector(y: ir.Value, node: ir.Node, versions: Mapping[str, int]) -> ir.Value | None:
    """Return the vector that an Add adds to each row of a product; None for any other node.

    None, too, for an Add that a cluster computes without reading or writing more.
    """
    if node.op_type != "Add" or node.domain != "" or _is_in_reach(node.outputs[0], versions):
        return None
    bias = node.inputs[1] if node.inputs[0] is y else node.inputs[0]
    if bias is None or bias.shape is None or y.shape is None or not 1 <= len(bias.shape) <= len(y.shape):
        return None
    length = bias.shape[-1] if isinstance(bias.shape[-1], int) else bias.shape[-1].value
    return bias if length is not None and y.shape[-1] == length and _is_vector(bias) else None


def _is_in_reach(y: ir.Value, versions: Mapping[str, int]) -> bool:
    """Return whether a node that reads a value, or a view of it, can be in a cluster with the node that computes it."""
    forms = {use.node: form_of(use.node, versions) for use in y.uses()}
    return any(
        form is not None and (form.kind != "view" or _is_in_reach(node.outputs[0], versions))
        for node, form in forms.items()
    )


def _is_vector(x: ir.Value) -> bool:
    """Return whether only the last axis of a value may have more than one element."""
    return x.shape is not None and all(size == 1 for size in x.shape[:-1])


def _turned(axes: list[int]) -> list[int]:
    """Return axes with rows and columns exchanged."""
    return [*axes[:-2], axes[-1], axes[-2]]


def _before_transposes(x: ir.Value, axes: list[int]) -> tuple[ir.Value, list[int]]:
    """Return what an operand was before as many transposes as leave rows or columns together there, and its axes."""
    found = x, axes
    while (node := x.producer()) is not None and node.domain == "" and node.inputs:
        perm = list(range(len(axes))) if node.op_type == "Identity" else permutation(node, len(axes))
        before = node.inputs[0]
        if perm is None or before is None:
            break
        x, axes = before, [perm[axis] for axis in axes]
        if len(axes) - 1 in axes[-2:]:
            found = x, axes
    return found


def permutation(node: ir.Node, rank: int) -> list[int] | None:
    """Return the permutation of a Transpose, which reverses the axes by default; None for any other node."""
    if node.op_type != "Transpose" or node.domain != "":
        return None
    given = node.attributes.get("perm")
    perm = list(range(rank))[::-1] if given is None else list(given.as_ints())
    return perm if sorted(perm) == list(range(rank)) else None


def only_reader(y: ir.Value) -> ir.Node | None:
    """Return the node that reads a value, if it is the only one and in the graph of the node that computes it."""
    uses, producer = list(y.uses()), y.producer()
    if len(uses) != 1 or y.is_graph_output() or producer is None or uses[0].node.graph is not producer.graph:
        return None
    return uses[0].node
