"""Resampling: each axis by a matrix of its own, which is what Resize makes of the identity."""

from __future__ import annotations

from fractions import Fraction

import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.emitter import Emitter, like
from graphopt.errors import GraphoptError
from passes.gradient.registry import Gradients, rule
from passes.gradient.rules.linear import transpose
from passes.gradient.rules.shape import rank, sizes_of
from passes.gradient.walk import constant_of, dims_of


@rule("Resize")
def resize(
    op: Emitter,
    dy: Value,
    x: Value,
    roi: Value | None = None,
    scales: Value | None = None,
    sizes: Value | None = None,
    *,
    node: Node,
    axes: list[int] | None = None,
    keep_aspect_ratio_policy: str,
) -> Gradients:
    """y = A x B' along every two axes: dx = A' dy B."""
    left_out = ("axes", "extrapolation_value", "keep_aspect_ratio_policy")
    attributes = {name: value for name, value in node.attributes.items() if name not in left_out}
    scales, axes = _given(scales), list(axes or range(rank(x)))
    if keep_aspect_ratio_policy != "stretch":
        _check_proportions(x, dy, axes)
    cropped = "coordinate_transformation_mode" in attributes and roi is not None
    for i, axis in enumerate(axes):
        if not cropped and _is_kept(x, scales, sizes, i, axis):
            continue
        matrix = op.Resize(
            identity(op, x, axis),
            roi and op.Gather(roi, [i, i + len(axes)]),
            scales and _one(op, scales, i),
            sizes and sizes_of(op, dy, axis, axis + 1) if scales is None else None,
            axes=[1],
            **attributes,
        )
        matrix.shape = ir.Shape([dims_of(x)[axis], None])
        dy = contracted(op, dy, matrix, axis)
    return [like(dy, x)]


def _given(x: Value | None) -> Value | None:
    """Return an optional input, or None where it is an empty tensor."""
    return None if x is None or (x.shape is not None and x.shape == (0,)) else x


def _is_kept(x: Value, scales: Value | None, sizes: Value | None, i: int, axis: int) -> bool:
    """Tell whether an axis is known to stay what it is."""
    known = constant_of(sizes if scales is None else scales)
    return known is not None and bool(known[i] == (dims_of(x)[axis % rank(x)] if scales is None else 1))


def _one(op: Emitter, scales: Value, i: int) -> Value:
    known = constant_of(scales)
    return op.Gather(scales, [i]) if known is None else op.constant(known[i : i + 1])


def _check_proportions(x: Value, y: Value, axes: list[int]) -> None:
    """Raise an error unless the sizes themselves show the one scale that a policy has chosen for all axes."""
    pairs = [(dims_of(y)[axis], dims_of(x)[axis]) for axis in axes]
    shown = {Fraction(m, n) for m, n in pairs if isinstance(m, int) and isinstance(n, int)}
    if len(shown) != 1 or not all(isinstance(m, int) and isinstance(n, int) for m, n in pairs):
        raise GraphoptError(
            f"Resize of {x.name!r}: keep_aspect_ratio_policy needs known sizes in one proportion for a gradient"
        )


def identity(op: Emitter, x: Value, axis: int) -> Value:
    """Return the identity matrix of the size of an axis."""
    assert x.dtype is not None
    size = sizes_of(op, x, axis, axis + 1) if axis + 1 else op.Shape(x, start=axis)
    square = op.ConstantOfShape(op.Concat(size, size, axis=0), value=ir.tensor([0], dtype=x.dtype))
    return op.EyeLike(square)


def contracted(op: Emitter, dy: Value, matrix: Value, axis: int) -> Value:
    """Multiply an axis of `dy` by a matrix from the right."""
    last = rank(dy) - 1
    axis %= last + 1
    if axis == last:
        return op.MatMul(dy, transpose(op, matrix))
    swap = [*range(last + 1)]
    swap[axis], swap[last] = last, axis
    return op.Transpose(op.MatMul(op.Transpose(dy, perm=swap), transpose(op, matrix)), perm=swap)
