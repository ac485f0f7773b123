"""Say what a node does with the axes of its operands, if kernels compute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.graph.values import constant_of
from graphopt.targets.native.attributes import attributes_of
from graphopt.targets.native.operators import CTYPES, FLOATING, REDUCING, ROWS, expression

Size = int | str

MOST_OPERANDS = 64  # of a node

RESHAPING = {"Reshape", "Squeeze", "Unsqueeze"}


@dataclass(frozen=True)
class Form:
    """Describe what a node does, as far as clusters go.

    Args:
        kind: `map` (elementwise), `view` (adds and removes axes of size 1), `reduce`, or `rows` (softmax and
            normalizations, which reduce and keep all elements).
        reduced: the axes of the input that `reduce` and `rows` reduce.
        images: for each axis of the input, its axis in the output of `view` and `reduce`, or None.
    """

    kind: str
    attributes: Mapping[str, Any]
    reduced: tuple[int, ...] = ()
    images: tuple[int | None, ...] = ()


def fixed(x: ir.Value | None) -> np.ndarray | None:
    """Return the array of a value that nobody can feed, or None if the value may change."""
    return None if x is None or x.is_graph_input() else constant_of(x)


def form_of(node: ir.Node, versions: Mapping[str, int]) -> Form | None:
    """Return what a node does; None if kernels do not compute it."""
    attributes = attributes_of(node, versions)
    if attributes is None or not 1 <= len(node.inputs) <= MOST_OPERANDS or node.inputs[0] is None:
        return None
    if node.op_type in RESHAPING:
        return _view(node, attributes)
    if node.op_type in REDUCING:
        return _reduction(node, attributes)
    if not all(map(_is_computed, (x for x in (*node.inputs, *node.outputs) if x is not None))):
        return None
    if node.op_type in ROWS:
        return _rows(node, attributes, versions)
    return Form("map", attributes) if _is_elementwise(node, attributes) else None


def ctype_of(x: ir.Value) -> str:
    """Return the C type that kernels compute a value in."""
    assert x.dtype is not None
    return CTYPES[x.dtype]


def sizes_of(x: ir.Value) -> list[Size]:
    """Return the dimensions of a value: numbers, and names of symbols."""
    assert x.shape is not None
    return [dim if isinstance(dim, int) else str(dim.value) for dim in x.shape]


def has_sizes(x: ir.Value) -> bool:
    """Return whether all dimensions of a value are numbers or have names."""
    return x.shape is not None and not x.shape.has_unknown_dim()


def is_scalar(x: ir.Value) -> bool:
    """Return whether a value has one element, whatever its rank."""
    return all(size == 1 for size in sizes_of(x))


def operands_of(node: ir.Node, form: Form) -> dict[int, ir.Value]:
    """Return the inputs that a kernel reads as numbers, not axes or shapes, by their index."""
    inputs = node.inputs[:1] if form.kind in ("view", "reduce") else node.inputs
    return {i: x for i, x in enumerate(inputs) if x is not None}


def exponent_of(node: ir.Node) -> float | None:
    """Return the constant exponent of a power, or None."""
    exponent = fixed(node.inputs[1])
    return float(exponent.item()) if exponent is not None and exponent.size == 1 else None


def _is_computed(x: ir.Value) -> bool:
    """Return whether kernels have a type for a value, and all its dimensions are numbers or have names."""
    return x.dtype in CTYPES and has_sizes(x)


def _is_elementwise(node: ir.Node, attributes: Mapping[str, Any]) -> bool:
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    ctype, source = ctype_of(y), ctype_of(x)
    if node.op_type == "Clip":
        return ctype in FLOATING
    if any(operand is None for operand in node.inputs):
        return False
    if node.op_type == "Cast":
        return True
    if node.op_type == "Pow":
        return ctype == source and ctype in FLOATING
    if node.op_type == "Div" and ctype not in FLOATING and not _divides(fixed(node.inputs[1])):
        return False
    return expression(node.op_type, ctype, source, attributes, len(node.inputs)) is not None


def _divides(divisor: np.ndarray | None) -> bool:
    """Return whether a whole number divides all others without a trap."""
    return divisor is not None and divisor.size == 1 and divisor.item() not in (0, -1)


def _view(node: ir.Node, attributes: Mapping[str, Any]) -> Form | None:
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not _is_computed(x) or not _is_computed(y):
        return None
    left, right = ([(i, size) for i, size in enumerate(sizes_of(z)) if size != 1] for z in (x, y))
    if [size for _, size in left] != [size for _, size in right]:
        return None
    images = {i: j for (i, _), (j, _) in zip(left, right, strict=True)}
    return Form("view", attributes, images=tuple(map(images.get, range(len(sizes_of(x))))))


def _reduction(node: ir.Node, attributes: Mapping[str, Any]) -> Form | None:
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not _is_computed(x) or not _is_computed(y) or ctype_of(x) not in FLOATING:
        return None
    rank, axes = len(sizes_of(x)), _reduced_axes(node, attributes)
    if axes is None or rank == 0:
        return None
    reduced = sorted({axis % rank for axis in axes or range(rank)})
    kept = list(range(rank))
    if not attributes.get("keepdims", 1):
        kept = [p for p in range(rank) if p not in reduced]
    images = [None if p in reduced else kept.index(p) for p in range(rank)]
    return (
        Form("reduce", attributes, tuple(reduced), tuple(images)) if len(sizes_of(y)) == len(kept) else None
    )


def _reduced_axes(node: ir.Node, attributes: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the axes that a node says it reduces; none stands for all. Return None if they are not known."""
    axes: Sequence[int] = attributes.get("axes") or ()
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = fixed(node.inputs[1])
        if constant is None:
            return None
        axes = constant.tolist()
    return None if not axes and attributes.get("noop_with_empty_axes") else axes


def _rows(node: ir.Node, attributes: Mapping[str, Any], versions: Mapping[str, int]) -> Form | None:
    """Return the form of a node that normalizes along the last axis; before opset 13, softmax was over more."""
    y = node.outputs[0]
    rank = len(sizes_of(y))
    last = rank > 0 and attributes.get("axis", -1) % rank == rank - 1
    if not last or ctype_of(y) != "float" or versions.get("", 1) < 13 or None in node.inputs:
        return None
    return Form("rows", attributes, (rank - 1,))
