"""Tell which names of sizes mean one size: ONNX's inference gives the same size new names after a Reshape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.graph.operators import ELEMENTWISE_OPERATORS, MATRIX_PRODUCTS, full_attributes, schema_of
from graphopt.graph.values import constant_of, dims_of

Size = int | str


def fixed(x: ir.Value | None) -> np.ndarray | None:
    """Return the array of a value that nobody can feed, or None if the value may change."""
    return None if x is None or x.is_graph_input() else constant_of(x)


def sizes_of(x: ir.Value) -> list[Size]:
    """Return the dimensions of a value: numbers, and names of symbols."""
    return [dim if isinstance(dim, int) else str(dim.value) for dim in dims_of(x)]


def has_sizes(x: ir.Value) -> bool:
    """Return whether all dimensions of a value are numbers or have names."""
    return x.shape is not None and not x.shape.has_unknown_dim()


@dataclass(frozen=True)
class _Product:
    """A size: a number times powers of named sizes."""

    number: Fraction
    powers: tuple[tuple[str, int], ...] = ()


def unify_sizes(model: ir.Model) -> None:
    """Give sizes that follow from others the names, or the numbers, of those."""
    versions = model.opset_imports
    sizes = _Sizes({str(dim) for x in model.graph.inputs for dim in x.shape or ()})
    graphs = list(model.graphs())
    for graph in graphs:
        for node in graph:
            if node.domain == "" and schema_of("", node.op_type, versions.get("", 1)) is not None:
                sizes.learn(node, full_attributes(node, versions))
    for graph in graphs:
        for x in [*graph.inputs, *(y for node in graph for y in node.outputs)]:
            if has_sizes(x):
                x.shape = ir.Shape([sizes.simplest(size) for size in sizes_of(x)])


class _Sizes:
    """Hold what is known of names."""

    def __init__(self, named: set[str]) -> None:
        self._named = named  # by inputs; inference invented all other names, each for one axis of one value
        self._known: dict[str, _Product] = {}
        self._names: dict[_Product, str] = {}

    def of(self, size: Size) -> _Product:
        if isinstance(size, int):
            return _Product(Fraction(size))
        return self._known.get(size, _Product(Fraction(1), ((size, 1),)))

    def simplest(self, size: Size) -> Size:
        """Return a number or one name for a size."""
        found = self.of(size)
        if not found.powers and found.number.denominator == 1:
            return int(found.number)
        if found.number == 1 and len(found.powers) == 1 and found.powers[0][1] == 1:
            return found.powers[0][0]
        return self._names.setdefault(found, str(size))

    def learn(self, node: ir.Node, attributes: Mapping[str, Any]) -> None:
        """Derive the sizes of a node's first output from those of its inputs."""
        inputs, y = [x for x in node.inputs if x is not None], node.outputs[0] if node.outputs else None
        if y is None or not inputs or not all(map(has_sizes, [inputs[0], y])):
            return
        x, to = sizes_of(inputs[0]), sizes_of(y)
        if node.op_type == "Reshape":
            self._reshaped(x, to)
        elif node.op_type == "Flatten":
            axis = attributes["axis"] + len(x) * (attributes["axis"] < 0)
            for part, size in zip((x[:axis], x[axis:]), to, strict=False):
                self._reshaped(part, [size])
        elif node.op_type == "Resize":
            scales = fixed(node.inputs[2]) if len(node.inputs) > 2 else None
            if scales is not None and scales.size == len(x) == len(to) and not attributes.get("axes"):
                for size, scale, result in zip(x, scales.ravel(), to, strict=True):
                    if scale == 1:
                        self._note(result, self.of(size))
        elif node.op_type == "Slice" and len(node.inputs) > 3 and (axes := fixed(node.inputs[3])) is not None:
            cut = {int(axis) % max(len(x), 1) for axis in axes.ravel()}
            for place, (size, result) in enumerate(zip(x, to, strict=False)):
                if place not in cut:
                    self._note(result, self.of(size))
        elif node.op_type == "Expand" and (wanted := _sizes_in(node.inputs[1])) is not None:
            padded = [1] * (len(to) - len(x)) + x
            for size, own, result in zip(wanted[::-1], padded[::-1], to[::-1], strict=False):
                if own == 1 or self.of(own) == self.of(size):
                    self._note(result, self.of(size))
        elif node.op_type == "Gemm" and len(x) == len(to) == 2:
            self._note(to[0], self.of(x[1 if attributes["transA"] else 0]))
        elif node.op_type == "Concat" and all(map(has_sizes, inputs)):
            self._joined([sizes_of(each) for each in (*inputs, y)], attributes["axis"] % max(len(to), 1))
        elif node.op_type in ELEMENTWISE_OPERATORS and all(map(has_sizes, inputs)):
            self._broadcast([sizes_of(each) for each in inputs], to)
        elif node.op_type in MATRIX_PRODUCTS and all(map(has_sizes, inputs)) and len(to) > 2:
            self._broadcast([sizes_of(each)[:-2] for each in inputs], to[:-2])

    def _is_open(self, size: Size) -> bool:
        """Return whether a size is a name that was invented for one axis and is not known yet."""
        return isinstance(size, str) and size not in self._named and size not in self._known

    def _note(self, size: Size, found: _Product) -> None:
        """Note what an open name means."""
        if self._is_open(size) and all(name != size for name, _ in found.powers):
            self._known[str(size)] = found

    def _reshaped(self, x: Sequence[Size], to: Sequence[Size]) -> None:
        """Solve for the only size that is not known, as both have the same number of elements."""
        open_ = [size for size in to if self._is_open(size) and size not in x]
        if len(open_) != 1:
            return
        powers: Counter[str] = Counter()
        number = Fraction(1)
        for sizes, sign in ((x, 1), ([size for size in to if size != open_[0]], -1)):
            for each in map(self.of, sizes):
                if each.number == 0:
                    return
                number *= each.number**sign
                for name, power in each.powers:
                    powers[name] += sign * power
        left = tuple(sorted((name, power) for name, power in powers.items() if power))
        self._note(open_[0], _Product(number, left))

    def _joined(self, tensors: Sequence[Sequence[Size]], axis: int) -> None:
        """Note that tensors which are joined, and the result, have the same sizes along the other axes."""
        for place, sizes in enumerate(zip(*tensors, strict=False)):
            if place != axis:
                found = self.of(min(sizes, key=self._is_open))
                for size in sizes:
                    self._note(size, found)

    def _broadcast(self, operands: Sequence[Sequence[Size]], to: Sequence[Size]) -> None:
        """Note sizes that all operands have, if they do not have size 1."""
        for place, size in enumerate(reversed(to)):
            found = {self.of(x[-1 - place]) for x in operands if place < len(x)} - {_Product(Fraction(1))}
            if len(found) == 1:
                self._note(size, *found)


def _sizes_in(vector: ir.Value | None) -> list[Size] | None:
    """Return the sizes that a vector of sizes has, if it is joined from constants and parts of shapes."""
    node, constant = None if vector is None else vector.producer(), fixed(vector)
    if constant is not None:
        return [int(size) for size in constant.ravel()]
    if node is None or node.domain:
        return None
    if node.op_type == "Concat":
        parts = [_sizes_in(x) for x in node.inputs]
        return None if None in parts else [size for part in parts for size in part or ()]
    x = node.inputs[0] if node.inputs else None
    if node.op_type != "Shape" or x is None or not has_sizes(x):
        return None
    rank = len(sizes_of(x))
    return sizes_of(x)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", rank)]
