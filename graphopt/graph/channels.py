"""Follow channels through an inference model, and remove those that are 0.

A channel is an output of a product or a convolution. It keeps its place over activations, pooling, normalization and
views. Channels that an Add joins are one. `Channels` gives all numbers of weights that belong to a channel, so that
`passes.Prune` makes them 0 together and `remove_channels` removes them together.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, some
from graphopt.graph.loading import Source, load
from graphopt.graph.operators import POOLS, ZERO_TO_ZERO
from graphopt.graph.postprocessing import STORED
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import captured
from graphopt.graph.values import constant_of, fixed, given, is_static, name_of, node_label, spread
from graphopt.graph.weight_kinds import CONVOLUTION, WeightKind, weight_kinds_of

OF_OUTPUT = "they are outputs of the model"
_MOST = 2**24  # channels of a model, of which declared sizes may be any number
_Labels = np.ndarray  # of int: the channel at each place along an axis


@dataclass(frozen=True)
class Slice:
    """Hold the places of channels in a weight.

    Args:
        weight: the weight.
        axis: the axis of the channels.
        labels: the channel at each place.
        adds: whether its numbers must be 0 for the channels to be 0; otherwise they multiply what is 0 already.
        by: numbers that multiply those of the weight; where they are 0, those need not be.
    """

    weight: ir.Value
    axis: int
    labels: _Labels
    adds: bool
    by: ir.Value | None = None


class Channels:
    """Find the channels of a model whose types are known.

    Args:
        model: the inference model. Its weights are initializers or inputs in `weights`.
        weights: inputs that are weights.
    """

    def __init__(self, model: ir.Model, weights: Sequence[ir.Value] = ()) -> None:
        self._weights = {*(x for x in model.graph.initializers.values() if not x.is_graph_input()), *weights}
        self._parents: list[int] = []
        self._reasons: dict[int, str] = {}  # why a channel has to stay
        self._at: dict[ir.Value, tuple[int, _Labels]] = {}  # the axis and the channels of a value
        self._read: set[tuple[ir.Node, int]] = set()  # of weights, by nodes that are understood
        self._slices: dict[tuple[ir.Value, int], Slice] = {}  # by their weights and axes
        self.counts: list[tuple[ir.Node, _Labels]] = []  # nodes that state a number of channels
        self.zeros: list[tuple[ir.Node, int, _Labels]] = []  # inputs of constant zeros
        for node in model.graph:
            self._visit(node)
        for y in model.graph.outputs:
            self._pin(y, OF_OUTPUT)
        for part in self.slices:
            for node, index in part.weight.uses():
                if (node, index) not in self._read:
                    self._keep(part.labels, f"{node_label(node)} reads {part.weight.name!r}, too")

    @property
    def slices(self) -> list[Slice]:
        """Return all places of channels in weights."""
        return [*self._slices.values()]

    def roots(self, labels: _Labels) -> _Labels:
        """Return the number of each channel, which joined channels share."""
        return np.array([self._root(int(label)) for label in labels], np.int64)

    def reason(self, labels: _Labels) -> str | None:
        """Return why one of the channels has to stay, or None."""
        reasons = self._by_root()
        return next((reasons[root] for root in self.roots(labels).tolist() if root in reasons), None)

    def sets(self) -> Iterator[tuple[list[Slice], str | None]]:
        """Yield the slices of the same channels that must be 0 for these to be 0, and why these have to stay."""
        found: dict[tuple[int, ...], list[Slice]] = {}
        for part in self.slices:
            if part.adds:
                found.setdefault(tuple(self.roots(part.labels).tolist()), []).append(part)
        readers = Counter(root for key in found for root in {*key})
        for key, parts in found.items():
            is_whole = all(readers[root] == 1 for root in key) and len({*key}) == len(key)
            yield parts, self.reason(parts[0].labels) or (None if is_whole else "they are a part of others")

    def removed(self) -> tuple[set[int], dict[str, str]]:
        """Return the roots of the channels that are 0 and can be removed, and why others stay, by their weights."""
        sources = [part for part in self.slices if part.adds]
        alive: set[int] = set()
        for part in sources:
            alive.update(self.roots(part.labels[_has_numbers(part)]).tolist())
        zero = {root for part in sources for root in self.roots(part.labels).tolist()} - alive
        reasons, stay = self._by_root(), {}
        for part in sources:
            found = [reasons[root] for root in self.roots(part.labels).tolist() if root in zero and root in reasons]
            if found:
                stay[f"{len(found)} of {name_of(part.weight)!r}"] = found[0]
        zero -= reasons.keys()
        for part in self.slices:  # one of them has to stay
            own = self.roots(part.labels).tolist()
            if zero.issuperset(own):
                zero.discard(own[0])
        return zero, stay

    def _by_root(self) -> dict[int, str]:
        return {self._root(label): reason for label, reason in self._reasons.items()}

    # --- channels ---

    def _new(self, count: int) -> _Labels:
        first = len(self._parents)
        if first + count > _MOST:
            raise GraphoptError(
                f"channels: expected at most {_MOST:,}, found {first + count:,}: leave them in the model"
            )
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count)

    def _root(self, label: int) -> int:
        while (parent := self._parents[label]) != label:
            self._parents[label] = label = self._parents[parent]
        return label

    def _join(self, a: _Labels, b: _Labels) -> None:
        for one, other in zip(a.tolist(), b.tolist(), strict=True):
            first, second = sorted((self._root(one), self._root(other)))
            self._parents[second] = first

    def _keep(self, labels: _Labels, reason: str) -> None:
        for label in labels.tolist():
            self._reasons.setdefault(label, reason)

    def _pin(self, x: ir.Value | None, reason: str) -> None:
        if x in self._at:
            self._keep(self._at[x][1], reason)

    # --- nodes ---

    def _visit(self, node: ir.Node) -> None:
        handler = None if node.domain or STORED.is_set(node) else _HANDLERS.get(node.op_type)
        if handler is None or not handler(self, node):
            for x in [*node.inputs, *captured(node)]:
                self._pin(x, f"{node_label(node)} reads it")

    def _set(self, node: ir.Node, axis: int, labels: _Labels) -> bool:
        self._at[node.outputs[0]] = axis, labels
        return True

    def _slice(
        self, node: ir.Node, index: int, axis: int, labels: _Labels, *, adds: bool, by: ir.Value | None = None
    ) -> bool:
        """Note that input `index` of a node is a weight whose `axis`, as the node reads it, has these channels."""
        use: tuple[ir.Node, int] = node, index
        x = given(node.inputs[index])
        while (before := x.producer()) is not None and before.op_type in ("Identity", "Transpose"):
            self._read.add(use)
            if before.op_type == "Transpose":
                rank = len(x.shape or ())
                axis = before.attributes.get_ints("perm", [*range(rank)[::-1]])[axis % rank]
            if len(x.uses()) > 1:
                return False
            use, x = (before, 0), given(before.inputs[0])
        if x not in self._weights or not is_static(x) or not x.shape or x.is_graph_output():
            return False
        axis %= len(x.shape)
        if x.shape[axis] != len(labels):
            return False
        self._read.add(use)
        part = self._slices.setdefault((x, axis), Slice(x, axis, labels, adds, by))
        self._join(part.labels, labels)
        if adds and (by is not part.by or not part.adds):  # two factors: neither tells
            self._slices[x, axis] = replace(part, adds=True, by=None if part.adds else by)
        return True

    def _product(self, node: ir.Node, index: int, kind: WeightKind, axis: int) -> bool:
        """Handle a product with a weight: it reads the channels of `axis` of x, and has its own there."""
        w = node.inputs[index]
        if w is None or w.shape is None or not is_static(w):
            return False
        rank, filters = len(w.shape), kind.name == CONVOLUTION
        is_turned = kind.is_transposed(node)
        summed, own = (1, 0) if filters else (rank - 1, rank - 2) if is_turned else (rank - 2, rank - 1)
        labels = self._new(w.shape.numpy()[own])
        if not self._slice(node, index, own, labels, adds=True):
            return False
        x = node.inputs[kind.x or 0]
        if x in self._at:
            at, read = self._at[x]
        else:  # another product may read the weight, too, by channels that could go
            at, read = axis, self._new(w.shape.numpy()[summed])
            self._keep(read, f"{node_label(node)} reads others by {w.name!r}")
        if at != axis or not self._slice(node, index, summed, read, adds=False):
            self._keep(labels, f"{node_label(node)} reads others")
            return False
        if not self._bias(node, kind.bias, labels):
            self._keep(labels, f"{node_label(node)} adds a bias that is not one number for each")
        return self._set(node, axis, labels)

    def _bias(self, node: ir.Node, index: int | None, labels: _Labels) -> bool:
        bias = None if index is None or index >= len(node.inputs) else node.inputs[index]
        if index is None or bias is None:
            return True
        if _is_zero(bias) and not (bias in self._weights and len(bias.uses()) == 1):
            self.zeros.append((node, index, labels))  # as exporters write for several layers without a bias
            return True
        return self._slice(node, index, -1, labels, adds=True)

    def _conv(self, node: ir.Node) -> bool:
        x, w, groups = node.inputs[0], node.inputs[1], node.attributes.get_int("group", 1)
        if groups == 1:
            return self._product(node, 1, weight_kinds_of(node)[1], 1)
        if x not in self._at or w is None or w.shape is None or (w.shape[0], w.shape[1]) != (groups, 1):
            return False
        labels = self._at[x][1]
        if not self._slice(node, 1, 0, labels, adds=False) or not self._bias(node, 2, labels):
            return False
        self.counts.append((node, labels))
        return self._set(node, 1, labels)

    def _gemm(self, node: ir.Node) -> bool:
        plain = node.attributes.get_int("transA", 0) == 0
        return plain and self._product(node, 1, weight_kinds_of(node)[1], 1)

    def _matmul(self, node: ir.Node) -> bool:
        x, w = node.inputs
        is_weight = x is not None and w is not None and len(w.shape or ()) == 2 and x.shape is not None
        return is_weight and self._product(node, 1, weight_kinds_of(node)[1], len(given(x).shape or ()) - 1)

    def _through(self, node: ir.Node) -> bool:
        x = node.inputs[0]
        if x not in self._at or any(y.uses() or y.is_graph_output() for y in node.outputs[1:]):
            return x not in self._at
        if node.op_type == "Clip":
            bounds = [fixed(bound) for bound in [*node.inputs[1:], None, None][:2]]
            if any(y is not None and x is None for x, y in zip(bounds, node.inputs[1:], strict=False)):
                return False  # a bound is computed
            low, high = (
                node.attributes.get_float(name, 0.0) if x is None else x
                for name, x in zip(("min", "max"), bounds, strict=True)
            )
            if low > 0 or high < 0:
                return False
        return self._set(node, *self._at[x])

    def _reduced(self, node: ir.Node) -> bool:
        x = given(node.inputs[0])
        if x not in self._at or x.shape is None:
            return x not in self._at
        axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 else node.attributes.get_ints("axes", [])
        axis, labels = self._at[x]
        reduced = {
            int(each) % len(x.shape) for each in (range(len(x.shape)) if axes is None or not len(axes) else axes)
        }
        if axis in reduced:
            return False
        keeps = node.attributes.get_int("keepdims", 1)
        return self._set(node, axis if keeps else axis - sum(each < axis for each in reduced), labels)

    def _transpose(self, node: ir.Node) -> bool:
        x = given(node.inputs[0])
        if x not in self._at:
            return True
        perm = node.attributes.get_ints("perm", [*range(len(x.shape or ()))[::-1]])
        return self._set(node, list(perm).index(self._at[x][0]), self._at[x][1])

    def _reshape(self, node: ir.Node) -> bool:
        """Follow channels along axis 1 that stay one or become each a run of places along axis 1."""
        x, y = given(node.inputs[0]), node.outputs[0]
        if x not in self._at:
            return True
        axis, labels = self._at[x]
        if node.op_type == "Squeeze" and len(node.inputs) < 2:
            return False  # it would drop the axis of one channel that is left
        if x.shape is None or y.shape is None or axis != 1 or len(y.shape) < 2:
            return False
        inner, outer = [*x.shape][2:], [*y.shape][2:]
        if not all(isinstance(size, int) for size in (*inner, *outer, y.shape[1])):
            return False
        repeated, rest = divmod(math.prod(map(int, inner)), math.prod(map(int, outer)) or 1)
        if rest or y.shape[1] != len(labels) * repeated or len(labels) * repeated > _MOST:
            return False
        if node.op_type == "Reshape":
            target = constant_of(node.inputs[1])
            if target is None:
                return False
            self.counts.append((node, np.repeat(labels, repeated)))
        return self._set(node, 1, np.repeat(labels, repeated))

    def _add(self, node: ir.Node) -> bool:
        return self._elementwise(node, adds=True)

    def _mul(self, node: ir.Node) -> bool:
        return self._elementwise(node, adds=False)

    def _div(self, node: ir.Node) -> bool:
        return self._elementwise(node, adds=False) if node.inputs[1] not in self._at else False

    def _elementwise(self, node: ir.Node, *, adds: bool) -> bool:
        """Handle x + y or x y, of two values with channels, or of one with a weight or a constant."""
        a, b = map(given, node.inputs)
        rank = len(node.outputs[0].shape or ())
        ends = [(self._at[x][0] - len(x.shape or ()), self._at[x][1]) for x in (a, b) if x in self._at]
        if len(ends) == 2:
            (axis, labels), (other, others) = ends
            if axis != other or len(labels) != len(others):
                return False
            self._join(labels, others)
            return self._set(node, rank + axis, labels)
        if not ends:
            return True
        ((axis, labels),) = ends
        index = 0 if b in self._at else 1
        w = given(node.inputs[index])
        if w.shape is None or not is_static(w):
            return False
        dims = [*w.shape]
        if len(dims) >= -axis and dims[axis] != 1:
            if math.prod(map(int, dims)) != dims[axis] or not self._slice(node, index, axis, labels, adds=adds):
                return False
        elif adds or (constant_of(w) is None and w not in self._weights):
            return False
        return self._set(node, rank + axis, labels)

    def _batchnormalization(self, node: ir.Node) -> bool:
        x = node.inputs[0]
        if x not in self._at:
            return True
        axis, labels = self._at[x]
        if axis != 1 or any(y.uses() or y.is_graph_output() for y in node.outputs[1:]):
            return False
        parts = [(1, True, node.inputs[3]), (2, True, None), (3, False, None), (4, False, None)]
        return all([self._slice(node, i, 0, labels, adds=adds, by=by) for i, adds, by in parts]) and self._set(
            node, 1, labels
        )

    def _concat(self, node: ir.Node) -> bool:
        axis, known = node.attributes.get_int("axis", 1), [x for x in node.inputs if x in self._at]
        if not known:
            return True
        rank = len(given(node.inputs[0]).shape or ())
        axes = {self._at[x][0] for x in known}
        if axes != {axis % rank}:
            return False
        parts = []
        for x in map(given, node.inputs):
            size = None if x.shape is None else x.shape[axis]
            if not isinstance(size, int):
                return False
            parts.append(self._at[x][1] if x in self._at else self._new(size))
            if x not in self._at:
                self._keep(parts[-1], f"{x.name!r} is no output of a product")
        return self._set(node, axis % rank, np.concatenate(parts))


_HANDLERS: dict[str, Callable[[Channels, ir.Node], bool]] = {
    "Add": Channels._add,
    "BatchNormalization": Channels._batchnormalization,
    "Concat": Channels._concat,
    "Conv": Channels._conv,
    "Div": Channels._div,
    "Gemm": Channels._gemm,
    "MatMul": Channels._matmul,
    "Mul": Channels._mul,
    "Sub": Channels._add,
    "Transpose": Channels._transpose,
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), Channels._reshape),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceSum"), Channels._reduced),
    **dict.fromkeys(ZERO_TO_ZERO | POOLS | {"Dropout", "GlobalAveragePool", "GlobalMaxPool"}, Channels._through),
}


def _is_zero(x: ir.Value) -> bool:
    numbers = spread(x)
    return numbers is not None and not numbers.any()


def _has_numbers(part: Slice) -> np.ndarray:
    numbers = constant_of(part.weight)
    assert numbers is not None
    by = constant_of(part.by)
    numbers = numbers if by is None else numbers * (by != 0)
    return np.asarray(np.moveaxis(numbers, part.axis, 0).reshape(len(part.labels), -1).any(1))


@checked()
def remove_channels(model: Source) -> onnx.ModelProto:
    """Remove the channels of an inference model whose filters and biases are 0, as `passes.Prune` makes them.

    All outputs stay the same, but for rounding. A channel goes from its filter up to the next product, over
    activations that take 0 to 0, pooling, views, BatchNormalization, Concat, and Add of values in which it is 0 in
    both. One channel of each layer stays.

    Args:
        model: the trained model, such as `Executor.trained` returns it; it is not changed.

    Raises:
        GraphoptError: the model cannot be read.

    Warns:
        UserWarning: channels are 0 and have to stay, with the node that reads them.

    >>> steps = {"optimizer": passes.AdamW(), "prune": passes.Prune(0.5, structure="channel")}
    >>> step = graphopt.compile(models.mlp((4,), 3, hidden=(8,)), loss=passes.CrossEntropy(), **steps)
    >>> small = graphopt.remove_channels(graphopt.Executor(step).trained())
    >>> graphopt.load(small).graph.initializers["layers.0.weight"].shape
    Shape([4, 4])
    """
    loaded = load(model)
    ensure_typed(loaded)
    channels = Channels(loaded)
    zero, stay = channels.removed()
    if stay:
        warnings.warn(
            "remove_channels: channels that are 0 stay: "
            f"{some([f'{weight}, since {reason}' for weight, reason in stay.items()])}",
            stacklevel=2,
        )
    for part in channels.slices:
        kept = _kept(channels, part.labels, zero)
        if not kept.all():
            numbers = constant_of(part.weight)
            assert numbers is not None
            left = np.ascontiguousarray(np.compress(kept, numbers, part.axis))
            part.weight.const_value = ir.tensor(left, name=part.weight.name)
            part.weight.shape = ir.Shape(left.shape)
    taken = ir.convenience.create_value_mapping(loaded.graph)
    for node, labels in channels.counts:
        count = int(_kept(channels, labels, zero).sum())
        if count == len(labels):
            continue
        if node.op_type == "Conv":
            node.attributes["group"] = ir.AttrInt64("group", count)
        else:
            target = given(node.inputs[1])
            numbers = np.array(constant_of(target))
            numbers[1] = count if numbers[1] > 0 else numbers[1]
            names = (f"{node.outputs[0].name}.shape{i or ''}" for i in itertools.count())
            name = next(x for x in names if x not in taken)
            shape = ir.val(name, const_value=ir.tensor(numbers, name=name))
            loaded.graph.register_initializer(shape)
            node.replace_input_with(1, shape)
    for node, index, labels in channels.zeros:
        if not _kept(channels, labels, zero).all():
            node.replace_input_with(index, None)
    RemoveUnusedNodesPass()(loaded)
    for node in loaded.graph:
        for y in node.outputs:
            if not y.is_graph_output():
                y.shape = None
    return ir.to_proto(loaded)


def _kept(channels: Channels, labels: _Labels, zero: set[int]) -> np.ndarray:
    return ~np.isin(channels.roots(labels), [*zero])
