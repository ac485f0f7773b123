"""Lower matrix products: one operator computes a product with the transposes around it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphopt.graph.operators import MATRIX_PRODUCTS
from graphopt.graph.schemas import attributes_of
from graphopt.native.kernels import Kernel

MOST_AXES = 4  # as in calls.h


def product_kernel(node: ir.Node, versions: Mapping[str, int]) -> tuple[Kernel, list[ir.Node]] | None:
    """Return the kernel of a matrix product of float32, and the nodes that it replaces; None for any other node."""
    if node.domain != "" or node.op_type not in MATRIX_PRODUCTS:
        return None
    attributes = attributes_of(node, versions)
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
    a, axes_a = _before_transpose(a, axes_a)
    b, axes_b = _before_transpose(b, axes_b)
    if bias is None:
        then = only_reader(y)
        if then is not None and (perm := permutation(then, rank)) and perm[-1] == rank - 1:
            replaced.append(then)
            y, axes_y = then.outputs[0], perm
    elif not 0 <= rank_of(bias) <= 2:
        return None
    form: list[int | Sequence[int]] = [
        len(axes_a),
        len(axes_b),
        rank,
        axes_a,
        axes_b,
        axes_y,
        -1 if bias is None else rank_of(bias),
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


def _before_transpose(x: ir.Value, axes: list[int]) -> tuple[ir.Value, list[int]]:
    """Return what an operand was before it was transposed, if rows or columns lie together there, and its axes."""
    node = x.producer()
    perm = None if node is None else permutation(node, len(axes))
    if node is None or perm is None or node.inputs[0] is None:
        return x, axes
    before = [perm[axis] for axis in axes]
    return (node.inputs[0], before) if len(perm) - 1 in before[-2:] else (x, axes)


def permutation(node: ir.Node, rank: int) -> list[int] | None:
    """Return the permutation of a Transpose, which reverses the axes by default; None for any other node."""
    if node.op_type != "Transpose" or node.domain != "":
        return None
    perm = node.attributes.get("perm")
    return list(range(rank))[::-1] if perm is None else list(perm.as_ints())


def only_reader(y: ir.Value) -> ir.Node | None:
    """Return the node that reads a value, if it is the only one."""
    uses = list(y.uses())
    return uses[0].node if len(uses) == 1 and not y.is_graph_output() else None
