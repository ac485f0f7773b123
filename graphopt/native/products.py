"""Lower matrix products: one operator computes a product with the transposes around it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphopt.graph.schemas import attributes_of
from graphopt.native.kernels import Kernel

MOST_AXES = 4  # as in product.h


def product_kernel(node: ir.Node, versions: Mapping[str, int]) -> tuple[Kernel, list[ir.Node]] | None:
    """Return the kernel of a matrix product, and the nodes that it replaces; None if it stays."""
    if node.domain != "" or node.op_type not in ("Gemm", "MatMul"):
        return None
    a, b = node.inputs[:2]
    y = node.outputs[0]
    if any(x is None or x.dtype != ir.DataType.FLOAT or x.shape is None for x in (a, b, y)):
        return None
    if not all(2 <= len(x.shape) <= MOST_AXES for x in (a, b)):
        return None
    attributes = attributes_of(node, versions)
    if node.op_type == "Gemm" and (attributes["alpha"], attributes["beta"]) != (1.0, 1.0):
        return None
    turns = (attributes.get("transA", 0), attributes.get("transB", 0))
    axes_a, axes_b = (
        [1, 0] if turned else list(range(len(x.shape))) for x, turned in zip((a, b), turns, strict=True)
    )
    a, axes_a = _untransposed(a, axes_a)
    b, axes_b = _untransposed(b, axes_b)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    replaced = [node]
    rank = len(y.shape)
    if rank != max(len(axes_a), len(axes_b)):
        return None
    axes_c = list(range(rank))
    turned = _only_transpose(y)
    if turned is not None:
        perm = _permutation(turned, rank)
        if perm[-1] == rank - 1:
            replaced.append(turned)
            y, axes_c = turned.outputs[0], perm
    if bias is not None and (len(replaced) > 1 or bias.shape is None or len(bias.shape) > 2):
        return None
    form = (
        f"{{{len(axes_a)}, {len(axes_b)}, {rank}, {_row(axes_a)}, {_row(axes_b)}, {_row(axes_c)}, "
        f"{-1 if bias is None else len(bias.shape)}}}"
    )
    inputs = (a, b) if bias is None else (a, b, bias)
    types = ", ".join(["1"] * (len(inputs) + 1))
    code = f"""static const unsigned char types_@[] = {{{types}}};

static OrtStatus *compute_@(OrtKernelContext *context) {{
    static const ProductForm form = {form};
    return product(context, &form);
}}
"""
    name = "p" + hashlib.sha256(code.encode()).hexdigest()[:16]
    return Kernel(name, code.replace("@", name), inputs, (y,), "product.h"), replaced


def _row(axes: Sequence[int]) -> str:
    return f"{{{', '.join(map(str, axes))}}}"


def _untransposed(x: ir.Value, axes: list[int]) -> tuple[ir.Value, list[int]]:
    """Return what a transposed operand was before, if its rows or columns lie together there."""
    node = x.producer()
    if node is None or node.op_type != "Transpose" or node.domain != "" or node.inputs[0] is None:
        return x, axes
    perm = _permutation(node, len(axes))
    before = [perm[axis] for axis in axes]
    return (node.inputs[0], before) if len(perm) - 1 in before[-2:] else (x, axes)


def _permutation(node: ir.Node, rank: int) -> list[int]:
    """Return the permutation of a Transpose, which reverses the axes by default."""
    perm = node.attributes.get("perm")
    return list(range(rank))[::-1] if perm is None else list(perm.as_ints())


def _only_transpose(y: ir.Value) -> ir.Node | None:
    """Return the node that transposes a value, if nothing else reads it."""
    uses = list(y.uses())
    if len(uses) != 1 or y.is_graph_output():
        return None
    node = uses[0].node
    return node if node.op_type == "Transpose" and node.domain == "" else None
