"""Classify nodes by how they map the axes of their inputs to those of their outputs, if kernels compute them.

Nodes are checked against ONNX's schemas first, so that lowering may trust their attributes and the number of their
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import onnx_ir as ir

from graphopt.graph.operators import full_attributes, schema_of
from graphopt.graph.sizes import fixed, has_sizes, sizes_of
from graphopt.graph.values import dims_of, dtype_of
from graphopt.targets.native.operators import (
    CTYPES,
    FLOATING,
    REDUCING,
    ROW_OPERATORS,
    Attributes,
    expression,
)

_MOST_OPERANDS = 64  # of a node

_RESHAPING = {"Reshape", "Squeeze", "Unsqueeze"}


class NodeKind(Enum):
    """What a node does with elements.

    A `MAP` is elementwise, a `VIEW` adds and removes axes of size 1, a `REDUCE` reduces axes, and `ROWS` (softmax and
    normalizations) reduce an axis and keep all elements.
    """

    MAP, VIEW, REDUCE, ROWS = range(4)


@dataclass(frozen=True)
class NodeForm:
    """Describe what a node does, as far as clusters go."""

    kind: NodeKind
    attributes: Attributes
    reduced: tuple[int, ...] = ()  # the axes of the input that `REDUCE` and `ROWS` reduce
    images: Sequence[int | None] = ()  # of `VIEW` and `REDUCE`: each input axis's place in the output


@dataclass
class NodeForms:
    """Keep the forms of a model's nodes, each of which is found once."""

    versions: Mapping[str, int]  # the versions of the model's opsets
    _of: dict[ir.Node, NodeForm | None] = field(default_factory=dict)

    def of(self, node: ir.Node) -> NodeForm | None:
        """Return the form of a node; None if kernels do not compute it."""
        if node not in self._of:
            self._of[node] = self._form_of(node)
        return self._of[node]

    def forget(self, node: ir.Node) -> None:
        """Forget a node whose inputs or shapes change."""
        self._of.pop(node, None)

    def is_map(self, node: ir.Node | None) -> bool:
        form = None if node is None else self.of(node)
        return form is not None and form.kind is NodeKind.MAP

    def attributes_of(self, node: ir.Node) -> Attributes | None:
        """Return the values of a node's attributes, with defaults; None for an operator that the opset lacks."""
        is_known = node.domain == "" and schema_of("", node.op_type, self.versions.get("", 1)) is not None
        return full_attributes(node, self.versions) if is_known else None

    def _form_of(self, node: ir.Node) -> NodeForm | None:
        attributes, x = self.attributes_of(node), node.inputs[0] if node.inputs else None
        if attributes is None or x is None or len(node.inputs) > _MOST_OPERANDS:
            return None
        operands = [x] if node.op_type in _RESHAPING | REDUCING.keys() else node.inputs
        if not all(_is_computed(each) for each in (*operands, *node.outputs) if each is not None):
            return None
        if node.op_type in _RESHAPING:
            return _view(x, node.outputs[0], attributes)
        if node.op_type in REDUCING:
            return _reduction(node, x, attributes)
        if node.op_type in ROW_OPERATORS:
            return _rows(node, attributes, self.versions)
        return NodeForm(NodeKind.MAP, attributes) if _is_elementwise(node, x, attributes) else None


def is_well_formed(model: ir.Model) -> bool:
    """Return whether all nodes have the inputs, outputs and types of attributes that the schema of their operator says.

    ONNX Runtime opens no other model. Operators without a schema are not checked: nothing lowers them.
    """
    version = model.opset_imports.get("", 1)
    return all(_follows_schema(node, version) for node in model.graph.all_nodes() if node.domain == "")


def _follows_schema(node: ir.Node, version: int) -> bool:
    schema = schema_of("", node.op_type, version)
    if schema is None:
        return True
    required = {name for name, each in schema.attributes.items() if each.required}
    return (
        schema.min_input <= len(node.inputs) <= schema.max_input
        and schema.min_output <= len(node.outputs) <= schema.max_output
        and required <= node.attributes.keys() <= schema.attributes.keys()
        and all(
            not x.is_ref() and x.type.value == schema.attributes[name].type.value  # type: ignore[attr-defined]
            for name, x in node.attributes.items()
        )
        and None not in node.inputs[: schema.min_input]
    )


def ctype_of(x: ir.Value) -> str:
    """Return the C type that kernels compute a value in."""
    return CTYPES[dtype_of(x)]


def rank_of(x: ir.Value | None) -> int:
    """Return the number of a value's axes; -1 if it is unknown."""
    return -1 if x is None or x.shape is None else len(x.shape)


def is_scalar(x: ir.Value) -> bool:
    """Return whether a value has one element, whatever its rank."""
    return all(isinstance(dim, int) and dim == 1 for dim in dims_of(x))


def operands_of(node: ir.Node, form: NodeForm) -> dict[int, ir.Value]:
    """Return the inputs that a kernel reads as numbers, not axes or shapes, by their index."""
    inputs = node.inputs[:1] if form.kind in (NodeKind.VIEW, NodeKind.REDUCE) else node.inputs
    return {i: x for i, x in enumerate(inputs) if x is not None}


def number_of(x: ir.Value | None) -> float | None:
    """Return the number of a constant that has one element, or None."""
    if x is None or (x.const_value is not None and x.const_value.size != 1):  # its numbers may be left out
        return None
    constant = fixed(x)
    return constant.item() if constant is not None and constant.size == 1 else None


def _is_computed(x: ir.Value) -> bool:
    """Return whether kernels have a type for a value, and all its dimensions are numbers or have names."""
    return x.dtype in CTYPES and has_sizes(x)


def _is_elementwise(node: ir.Node, x: ir.Value, attributes: Attributes) -> bool:
    ctype, source = ctype_of(node.outputs[0]), ctype_of(x)
    if node.op_type == "Clip":
        return ctype in FLOATING
    if any(operand is None for operand in node.inputs):
        return False
    if node.op_type == "Cast":
        return True
    if node.op_type == "Pow":
        return ctype == source and ctype in FLOATING
    if node.op_type == "Div" and ctype not in FLOATING and number_of(node.inputs[1]) in (None, 0, -1):
        return False  # a whole number that divides all others without a trap is none of these
    return expression(node.op_type, ctype, source, attributes) is not None


def _view(x: ir.Value, y: ir.Value, attributes: Attributes) -> NodeForm | None:
    left, right = ({i: size for i, size in enumerate(sizes_of(z)) if size != 1} for z in (x, y))
    if [*left.values()] != [*right.values()]:
        return None
    images = dict(zip(left, right, strict=True))
    return NodeForm(NodeKind.VIEW, attributes, images=tuple(map(images.get, range(rank_of(x)))))


def _reduction(node: ir.Node, x: ir.Value, attributes: Attributes) -> NodeForm | None:
    rank, axes = rank_of(x), _reduced_axes(node, attributes)
    if axes is None or rank == 0 or ctype_of(x) not in FLOATING:
        return None
    reduced = sorted({axis % rank for axis in axes or range(rank)})
    keeps = attributes.get("keepdims", 1)
    kept = [p for p in range(rank) if keeps or p not in reduced]
    images = tuple(None if p in reduced else kept.index(p) for p in range(rank))
    return (
        NodeForm(NodeKind.REDUCE, attributes, tuple(reduced), images) if rank_of(node.outputs[0]) == len(kept) else None
    )


def _reduced_axes(node: ir.Node, attributes: Attributes) -> Sequence[int] | None:
    """Return the axes that a node says it reduces; none stands for all. Return None if they are not known."""
    axes: Sequence[int] = attributes.get("axes") or ()
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = fixed(node.inputs[1])
        if constant is None:
            return None
        axes = constant.tolist()
    return None if not axes and attributes.get("noop_with_empty_axes") else axes


def _rows(node: ir.Node, attributes: Attributes, versions: Mapping[str, int]) -> NodeForm | None:
    """Return the form of a node that normalizes along the last axis; before opset 13, softmax was over more."""
    y = node.outputs[0]
    rank = rank_of(y)
    last = rank > 0 and attributes.get("axis", -1) % rank == rank - 1
    if not last or ctype_of(y) != "float" or versions.get("", 1) < 13 or None in node.inputs:
        return None
    return NodeForm(NodeKind.ROWS, attributes, (rank - 1,))
