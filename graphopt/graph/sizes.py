"""Find equal sizes by formulas of the inputs' sizes: ONNX's inference gives the same size several names.

A name that inference made up becomes a number or the name of an input's size only if its formula is that, for all
positive sizes of the inputs (`graphopt.graph.formulas`). Sizes that are equal at some sizes are not equal.

onnx-shape-inference 0.4.0, which keeps formulas too, is not used: it takes x[:, :128] for 128 columns, and the first
of two sizes that broadcast against each other for the result.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import onnx_ir as ir

from graphopt.graph.formulas import Formula, is_nonnegative, number, symbol
from graphopt.graph.operators import full_attributes, schema_of
from graphopt.graph.size_rules import RULES, VALUES, Maybe, NodeSizes, Unknown
from graphopt.graph.traversal import subgraphs, values_in
from graphopt.graph.values import dims_of, size_name, size_names
from graphopt.graph.values import fixed as fixed

Size = int | str

_MOST_VALUES = 64  # elements of a vector whose formulas are kept
_SCANS_SINCE = 9  # opset; before, a Scan had a batch axis and lengths of sequences


def sizes_of(x: ir.Value) -> list[Size]:
    """Return the dimensions of a value: numbers, and names of symbols."""
    return [dim if isinstance(dim, int) else str(dim.value) for dim in dims_of(x)]


def has_sizes(x: ir.Value) -> bool:
    """Return whether all dimensions of a value are numbers or have names."""
    return x.shape is not None and not x.shape.has_unknown_dim()


def unify_sizes(model: ir.Model) -> None:
    """Give sizes that follow from others the names, or the numbers, of those."""
    named = size_names(model.graph.inputs)
    graphs = list(model.graphs())
    names = Counter(name for graph in graphs for name in size_names(values_in(graph)))
    if named.issuperset(names):
        return
    sizes, shared = _Sizes(model, named), {name for name, count in names.items() if count > 1}
    ran = sizes.learn_all(model.graph)
    for graph in graphs:
        for node in () if graph in ran else graph:  # what holds in a body that may not run holds only there
            sizes.learn(node, shared)
    for graph in graphs:
        for x in values_in(graph):
            if x.shape is not None and not x.shape.is_static():
                x.shape = ir.Shape([sizes.simplest(dim) for dim in x.shape])


class _Sizes:
    """Hold what is known of names, and of the elements of vectors of sizes."""

    def __init__(self, model: ir.Model, named: set[str]) -> None:
        self._versions = model.opset_imports
        self._named = named  # by inputs; inference invented all other names, each for one axis of one value
        self._may_be_fed = model.ir_version >= 4  # before, each initializer is an input
        self._known: dict[str, Formula] = {}
        self._names: dict[Formula, str] = {}
        self._values: dict[ir.Value, list[Maybe] | None] = {}
        self._outside: set[str] = set()

    def of(self, size: Size) -> Formula:
        """Return the formula of a size."""
        if isinstance(size, int):
            return number(size)
        return self._known.get(size) or symbol(size, int(size in self._named))

    def of_shape(self, x: ir.Value) -> list[Formula] | None:
        """Return the formulas of a value's dimensions, or None if one has no name."""
        return list(map(self.of, sizes_of(x))) if has_sizes(x) else None

    def is_open(self, size: Size) -> bool:
        """Return whether a size is a name that was invented for one axis and is not known yet."""
        is_known = size in self._named or size in self._known or size in self._outside
        return isinstance(size, str) and not is_known

    def simplest(self, dim: int | ir.SymbolicDim) -> int | str | None:
        """Return a number or one name for a size."""
        if isinstance(dim, int) or dim.value is None:
            return dim if isinstance(dim, int) else None
        name = str(dim.value)
        found = self.of(name)
        if found.number is not None and found.number.denominator == 1 and found.number >= 0:
            return int(found.number)
        if found.name is not None:
            return found.name
        return self._names.setdefault(found, name)

    def values(self, x: ir.Value | None) -> list[Maybe] | None:
        """Return the formulas of the elements of a vector or scalar of integers, or None if it is no such vector."""
        if x is None:
            return None
        if x not in self._values:
            may_change = x.is_graph_input() and self._may_be_fed
            tensor = None if may_change else _tensor_of(x)
            is_short = tensor is not None and tensor.size <= _MOST_VALUES and len(tensor.shape) < 2
            if tensor is None or not is_short or tensor.dtype not in _INTEGERS:
                return None
            self._values[x] = [number(int(each)) for each in tensor.numpy().ravel()]
        return self._values[x]

    def learn_all(self, graph: ir.Graph) -> list[ir.Graph]:
        """Learn from a graph that runs, and from the bodies that run whenever it does; return these graphs."""
        ran = [graph]
        for node in graph:
            if self._iterates(node):
                ran += [each for body in subgraphs(node) for each in self.learn_all(body)]
            self.learn(node, set())
        return ran

    def _iterates(self, node: ir.Node) -> bool:
        """Return whether a node is a Scan whose sequences have an element for sure: only then does its body run."""
        version = self._versions.get("", 1)
        if node.domain or node.op_type != "Scan" or version < _SCANS_SINCE:
            return False
        count = node.attributes.get_int("num_scan_inputs", 0)
        sequences = node.inputs[len(node.inputs) - count :]
        axes = node.attributes.get_ints("scan_input_axes", [0] * count)
        return any(
            x is not None and x.shape is not None and self._has_element(x.shape, axis)
            for x, axis in zip(sequences, axes, strict=False)
        )

    def _has_element(self, shape: ir.Shape, axis: int) -> bool:
        """Return whether an axis has a positive size, whatever the sizes of the inputs are."""
        if not -len(shape) <= axis < len(shape):
            return False
        dim = shape[axis]
        size = dim if isinstance(dim, int) else dim.value
        return size is not None and is_nonnegative(self.of(size) - 1)

    def learn(self, node: ir.Node, outside: set[str]) -> None:
        """Derive the sizes of a node's outputs from those of its inputs, and the elements of a short vector.

        Args:
            outside: names about which the node says nothing, because it may not run.
        """
        if node.domain or not node.outputs or (node.op_type not in RULES and node.op_type not in VALUES):
            return
        version = self._versions.get("", 1)
        if schema_of("", node.op_type, version) is None:
            return
        self._outside = outside
        is_vector = node.op_type in VALUES and self._is_vector(node.outputs[0])
        is_new = node.op_type in RULES and any(map(self.is_open, size_names(node.outputs)))
        if not is_vector and not is_new and node.op_type != "Concat":
            return
        read = NodeSizes(node, full_attributes(node, self._versions), version, self)
        try:
            with contextlib.suppress(Unknown):
                if is_vector and len(found := VALUES[node.op_type](read)) <= _MOST_VALUES:
                    self._values[node.outputs[0]] = found
            with contextlib.suppress(Unknown):
                derived = RULES[node.op_type](read) if node.op_type in RULES else []
                for y, sizes in zip(node.outputs, derived, strict=False):
                    if y.shape is not None and len(sizes) == len(y.shape):
                        for dim, formula in zip(y.shape, sizes, strict=True):
                            if name := size_name(dim):
                                self._note(name, formula)
            if node.op_type == "Concat":
                self._joined(node)
        except (ArithmeticError, LookupError, ValueError):  # too long; or malformed, which inference says
            return

    def _is_vector(self, y: ir.Value) -> bool:
        return y.dtype in _INTEGERS and y.shape is not None and len(y.shape) < 2

    def _note(self, size: Size, found: Maybe) -> None:
        """Note what an open name means."""
        if found is None or not self.is_open(size) or size in found.names:
            return
        if found.number is None or (found.number >= 0 and found.number.denominator == 1):
            self._known[str(size)] = found

    def _joined(self, node: ir.Node) -> None:
        """Note that tensors which are joined, and the result, have the same sizes along the other axes."""
        tensors = [x for x in (*node.inputs, node.outputs[0]) if x is not None]
        if not all(map(has_sizes, tensors)) or not dims_of(node.outputs[0]):
            return
        axis = node.attributes.get_int("axis", 1) % len(dims_of(node.outputs[0]))
        for place, sizes in enumerate(zip(*map(sizes_of, tensors), strict=False)):
            if place != axis:
                found = self.of(min(sizes, key=self.is_open))
                for size in sizes:
                    self._note(size, found)


def _tensor_of(x: ir.Value) -> ir.TensorProtocol | None:
    """Return the tensor of a constant value. Of a Constant node, onnx_ir reads all methods of the tensor."""
    node = x.producer()
    if node is None or node.op_type != "Constant" or node.domain or "value" not in node.attributes:
        return ir.convenience.get_const_tensor(x)
    tensor: ir.TensorProtocol | None = node.attributes["value"].value
    return tensor


_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
