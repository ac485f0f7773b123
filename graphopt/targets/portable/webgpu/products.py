"""Write products of matrices with vectors, and with axes of size 1, as others."""

from __future__ import annotations

import string
from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.targets.portable.form import Form, given, known_sizes


def _product_of_matrices(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a MatMul with a vector as one of matrices. 1.27 refuses it, or returns wrong numbers."""
    a, b = map(given, node.inputs)
    ranks = [None if x.shape is None else len(x.shape) for x in (a, b)]
    if 1 not in ranks:
        return None
    y = op.MatMul(op.Unsqueeze(a, [0]) if ranks[0] == 1 else a, op.Unsqueeze(b, [1]) if ranks[1] == 1 else b)
    return [op.Squeeze(y, [axis for axis, size in zip((-2, -1), ranks, strict=True) if size == 1])]


def _without_broadcasting(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Leave out the axes of size 1 that an Einsum repeats. The kernel refuses them, or returns wrong numbers."""
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    sizes = [own for x in node.inputs if (own := known_sizes(x)) is not None]
    if len(sizes) < len(node.inputs):
        return None
    span = max(len(own) - len(term) + 3 for own, term in zip(sizes, left.split(","), strict=True))
    dots = "".join([letter for letter in string.ascii_letters if letter not in equation][:span])
    terms = left.replace("...", dots).split(",")
    wide = {c for own, term in zip(sizes, terms, strict=True) for c, n in zip(term, own, strict=True) if n != 1}
    inputs, written = [], []
    for x, own, term in zip(node.inputs, sizes, terms, strict=True):
        single = [i for i, (c, n) in enumerate(zip(term, own, strict=True)) if n == 1 and c in wide]
        inputs.append(op.Squeeze(x, single) if single else x)
        written.append("".join(c for i, c in enumerate(term) if i not in single))
    if written == terms:
        return None
    once = "".join(c for c in sorted(set(left) & set(string.ascii_letters)) if left.count(c) == 1)
    result = (right if arrow else "..." + once).replace("...", dots)
    return [op.Einsum(*inputs, equation=",".join(written) + "->" + result)]


FORMS: dict[str, Form] = {"Einsum": _without_broadcasting, "MatMul": _product_of_matrices}
