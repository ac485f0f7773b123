"""Find the weights that adapters change, and multiply by an adapter's values as the graph multiplies by the weight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir import Value

from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import Adapted, Origin
from graphopt.graph.operators import MICROSOFT, RECURRENT
from graphopt.graph.opsets import IR_VERSION
from graphopt.graph.postprocessing import DEQUANTIZE
from graphopt.graph.rewriting import Pattern, matches, selects
from graphopt.graph.traversal import extracted_between, subgraphs
from graphopt.graph.values import constant_of, is_floating, is_static, name_of, rank

Moves = tuple[tuple[str, tuple[int, ...]], ...]
_SHAPING = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_OF_QUANTIZED = ("Slice", "Sub")  # the padding of the last block, and floating zero points
_SWAPPED = {2: (1, 0), 3: (0, 2, 1)}


@dataclass(frozen=True, eq=False)
class WeightSource:
    """Hold the initializer that a weight comes from, and the moves of its numbers on the way to a product."""

    weight: Value
    moves: Moves = ()
    quantized: bool = False


def source_of(x: Value | None) -> WeightSource | None:
    """Return what a weight comes from: an initializer, in another layout or not; None for computed values."""
    moves: list[tuple[str, tuple[int, ...]]] = []
    while x is not None and (node := x.producer()) is not None and node.domain == "":
        if node.op_type == DEQUANTIZE and node.inputs[0] is not None and node.inputs[0].is_initializer():
            return WeightSource(node.inputs[0], quantized=True)
        if node.op_type == "Transpose":
            perm = node.attributes.get_ints("perm", range(rank(node.outputs[0]))[::-1])
            moves.append(("transpose", tuple(perm)))
        elif node.op_type in _SHAPING and is_static(x):
            moves.append(("reshape", x.shape.numpy()))  # type: ignore[union-attr]
        elif node.op_type not in ("Cast", "Identity", *_OF_QUANTIZED):
            return None
        x = node.inputs[0]
        if node.op_type in _OF_QUANTIZED:
            source = source_of(x)
            return source if source is not None and source.quantized else None
    if x is None or not x.is_initializer() or x.is_graph_input() or not is_floating(x) or not is_static(x):
        return None
    return WeightSource(x, tuple(moves[::-1]))


@dataclass(frozen=True, eq=False)
class AdapterTarget(ABC):
    """Describe a weight w where a node reads it, as an adapter sees it: y = x w, for w of [..., inputs, outputs].

    Args:
        node: the node that reads the weight.
        index: the number of the node's input.
        source: where the weight comes from.
        bias: what is added to y after the product, and is part of it; None for nothing.
        y: the output, with the bias.
        columns: the first and the last + 1 of the outputs that the adapter changes; None for all.
    """

    node: ir.Node
    index: int
    source: WeightSource
    y: Value
    bias: Value | None = None
    columns: tuple[int, int] | None = None

    kind: ClassVar[str]
    axis: ClassVar[int] = -1  # of the outputs in y
    own_axis: ClassVar[int] = -1  # of the outputs in w
    droppable: ClassVar[bool] = True  # whether x consists of activations

    @property
    def name(self) -> str:
        """Return the name of the parameter from which the exporter made the weight, or that of the weight."""
        weight = self.source.weight
        sources = () if (origin := Origin.read(weight)) is None else origin.sources
        return sources[0] if len(sources) == 1 else name_of(weight)

    def matches(self, pattern: Pattern) -> bool:
        """Return whether a pattern matches one of the names of the weight."""
        return selects(pattern, self.source.weight) or matches(self.name, pattern)

    @property
    def w(self) -> Value:
        """Return the weight as the node reads it."""
        return _input(self.node, self.index)

    @property
    def x(self) -> Value:
        """Return what is multiplied by the weight."""
        return _input(self.node, 1 - self.index)

    @property
    def uses(self) -> Sequence[tuple[ir.Node, int]]:
        """Return the nodes and the numbers of the inputs that read the output."""
        return list(self.y.uses())

    @property
    def groups(self) -> int:
        """Return the number of independent matrices of a convolution."""
        return 1

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Return the number of inputs and of outputs of each matrix."""

    @property
    def moves(self) -> Moves:
        """Return the moves that turn the file's weight into w of [..., inputs, outputs]."""
        return self.source.moves

    @property
    def outputs(self) -> int:
        """Return the number of outputs that the adapter changes."""
        return self.columns[1] - self.columns[0] if self.columns else self.sizes[1] * self.groups

    @abstractmethod
    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a [inputs, count] and b [count, outputs] in the layout in which they are stored."""

    @abstractmethod
    def down(self, op: Emitter, x: Value, a: Value) -> Value:
        """Emit x a."""

    @abstractmethod
    def up(self, op: Emitter, h: Value, b: Value) -> Value:
        """Emit h b."""

    def spread(self, op: Emitter, vector: Value) -> Value:
        """Emit numbers of the outputs, [outputs] or [..., 1, outputs], so that they broadcast along y."""
        if self.axis == -1:
            return vector
        return op.Unsqueeze(vector, [*range(1, -self.axis)]) if rank(vector) == 1 else _swapped(op, vector)

    def product(self, op: Emitter) -> Value:
        """Emit y without its bias."""
        y = self.y
        if self.bias is not None:
            beta = self.node.attributes.get_float("beta", 1.0)
            y = y - (self.bias if beta == 1 else self.bias * beta)
        return op.Slice(y, [self.columns[0]], [self.columns[1]], [self.axis]) if self.columns else y

    def matrix(self, op: Emitter, w: Value, *, up: bool = False) -> Value:
        """Emit the weight, or a value in the layout of the weight, as [..., inputs, outputs]."""
        return w

    def numbers(self) -> np.ndarray:
        """Return the numbers of the weight, as [..., inputs, outputs] or as filters."""
        graph = self.w.graph
        assert isinstance(graph, ir.Graph)
        model = ir.Model(extracted_between(graph, [], [self.w]), ir_version=IR_VERSION)
        (array,) = map(np.asarray, ReferenceEvaluator(ir.to_proto(model)).run(None, {}))
        for _, perm in self.moves[len(self.source.moves) :]:
            array = array.transpose(perm)
        return array


class Product(AdapterTarget):
    """Multiply by a weight on the right: MatMul, Gemm with or without transposes, MatMulNBits."""

    kind = "product"

    @property
    def own_axis(self) -> int:  # type: ignore[override]
        return -2 if self.is_transposed else -1

    @property
    def is_transposed(self) -> bool:
        """Return whether the node reads the transpose of w."""
        return bool(self.node.attributes.get_int("transB" if self.index else "transA", 0))

    @property
    def sizes(self) -> tuple[int, int]:
        if self.node.domain == MICROSOFT:
            return self.node.attributes.get_int("K"), self.node.attributes.get_int("N")
        rows, columns = self.w.shape.numpy()[-2:]  # type: ignore[union-attr]
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def moves(self) -> Moves:
        return (*self.source.moves, ("transpose", (1, 0))) if self.is_transposed else self.source.moves

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        lead = () if self.node.domain else self.w.shape.numpy()[:-2]  # type: ignore[union-attr]
        return (*lead, self.sizes[0], count), (*lead, count, self.outputs)

    def down(self, op: Emitter, x: Value, a: Value) -> Value:
        if self.node.attributes.get_int("transA", 0):
            return op.Gemm(x, a, transA=1)
        return op.MatMul(x, a)

    def up(self, op: Emitter, h: Value, b: Value) -> Value:
        alpha = self.node.attributes.get_float("alpha", 1.0)
        return op.MatMul(h if alpha == 1 else h * alpha, b)

    def matrix(self, op: Emitter, w: Value, *, up: bool = False) -> Value:
        return op.Transpose(w, perm=[1, 0]) if w is self.w and self.is_transposed else w


class LeftProduct(Product):
    """Multiply by a weight on the left: the node computes the transpose of x w."""

    axis = -2

    @property
    def is_transposed(self) -> bool:
        return not super().is_transposed

    @property
    def moves(self) -> Moves:
        perm = _SWAPPED[rank(self.w)]
        return (*self.source.moves, ("transpose", perm)) if self.is_transposed else self.source.moves

    def down(self, op: Emitter, x: Value, a: Value) -> Value:
        if self.node.attributes.get_int("transB", 0):
            x = op.Transpose(x, perm=[1, 0])
        return op.MatMul(_swapped(op, a), x)

    def up(self, op: Emitter, h: Value, b: Value) -> Value:
        return super().up(op, _swapped(op, b), h)

    def matrix(self, op: Emitter, w: Value, *, up: bool = False) -> Value:
        return _swapped(op, w) if w is self.w and self.is_transposed else w


def _swapped(op: Emitter, x: Value) -> Value:
    return op.Transpose(x, perm=[*range(rank(x) - 2), rank(x) - 1, rank(x) - 2])


class Convolution(AdapterTarget):
    """Convolve with the filters of a Conv: a has `count` filters of the same window, and b mixes their channels."""

    kind = "convolution"
    own_axis = 0

    @property
    def axis(self) -> int:  # type: ignore[override]
        return 1 - rank(self.w)

    @property
    def groups(self) -> int:
        return self.node.attributes.get_int("group", 1)

    @property
    def sizes(self) -> tuple[int, int]:
        first, second, *window = self.w.shape.numpy()  # type: ignore[union-attr]
        return second * math.prod(window), first // self.groups

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        _, second, *window = self.w.shape.numpy()  # type: ignore[union-attr]
        return (count, second, *window), (self.outputs, count // self.groups, *[1] * len(window))

    def down(self, op: Emitter, x: Value, a: Value) -> Value:
        return op.call_op(self.node.op_type, [x, a], dict(self.node.attributes))  # type: ignore[return-value]

    def up(self, op: Emitter, h: Value, b: Value) -> Value:
        return op.Conv(h, b, group=self.groups)

    def product(self, op: Emitter) -> Value:
        return self.y if self.bias is None else self.y - self.spread(op, self.bias)

    def matrix(self, op: Emitter, w: Value, *, up: bool = False) -> Value:
        first, *rest = w.shape.numpy()  # type: ignore[union-attr]
        parts = op.Reshape(w, [self.groups, first // self.groups, math.prod(rest)])
        return op.Transpose(parts, perm=[0, 2, 1])


class TransposedConvolution(Convolution):
    """Convolve with the filters of a ConvTranspose, whose outputs are on the second axis."""

    kind = "transposed convolution"
    own_axis = 1

    @property
    def sizes(self) -> tuple[int, int]:
        first, second, *window = self.w.shape.numpy()  # type: ignore[union-attr]
        return first // self.groups * math.prod(window), second

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first, _, *window = self.w.shape.numpy()  # type: ignore[union-attr]
        width = count // self.groups
        return (first, width, *window), (self.outputs, width, *[1] * len(window))

    def matrix(self, op: Emitter, w: Value, *, up: bool = False) -> Value:
        if up:
            return super().matrix(op, w)
        first, second, *window = w.shape.numpy()  # type: ignore[union-attr]
        parts = op.Reshape(w, [self.groups, first // self.groups, second, math.prod(window)])
        return op.Reshape(op.Transpose(parts, perm=[0, 1, 3, 2]), [self.groups, -1, second])


class Embedding(AdapterTarget):
    """Gather rows of a weight: x are indices, which choose rows of a."""

    kind = "embedding"
    droppable = False

    @property
    def x(self) -> Value:
        return _input(self.node, 1)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.w.shape.numpy()  # type: ignore[union-attr,return-value]

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.sizes[0], count), (count, self.outputs)

    def down(self, op: Emitter, x: Value, a: Value) -> Value:
        return op.Gather(a, x)

    def up(self, op: Emitter, h: Value, b: Value) -> Value:
        return op.MatMul(h, b)


@dataclass(frozen=True, eq=False)
class WeightItself(AdapterTarget):
    """Change a weight instead of an output: x is the identity, and y the weight.

    Recurrences and bodies of control flow read such weights. Each direction of a recurrence has an adapter.

    Args:
        transposed: whether the nodes read the transpose of w.
        readers: the nodes and the numbers of the inputs that read the weight.
    """

    transposed: bool = True
    readers: Sequence[tuple[ir.Node, int]] = ()

    droppable = False

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "recurrence" if self.node.op_type in RECURRENT else "product"

    @property
    def axis(self) -> int:  # type: ignore[override]
        return -2 if self.transposed else -1

    own_axis = axis

    @property
    def w(self) -> Value:
        return self.y

    @property
    def x(self) -> Value:
        return self.y

    @property
    def uses(self) -> Sequence[tuple[ir.Node, int]]:
        return self.readers

    @property
    def sizes(self) -> tuple[int, int]:
        rows, columns = self.w.shape.numpy()[-2:]  # type: ignore[union-attr]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def moves(self) -> Moves:
        return (*self.source.moves, *([("transpose", _SWAPPED[rank(self.w)])] if self.transposed else []))

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        lead = self.w.shape.numpy()[:-2]  # type: ignore[union-attr]
        return (*lead, self.sizes[0], count), (*lead, count, self.outputs)

    def down(self, op: Emitter, x: Value, a: Value) -> Value:
        return _swapped(op, a) if self.transposed else a

    def up(self, op: Emitter, h: Value, b: Value) -> Value:
        return op.MatMul(_swapped(op, b), h) if self.transposed else op.MatMul(h, b)

    def matrix(self, op: Emitter, w: Value, *, up: bool = False) -> Value:
        return _swapped(op, w) if w is self.w and self.transposed else w


def targets_in(model: ir.Model) -> Iterator[AdapterTarget]:
    """Yield the places of the graph where nodes read weights that adapters can change."""
    inside: dict[Value, AdapterTarget] = {}
    for node in model.graph:
        yield from _recurrences(node)
        yield from _found(node)
        for target in (
            target for body in subgraphs(node) for inner in body.all_nodes() for target in _found(inner)
        ):
            inside.setdefault(target.source.weight, target)
    for weight, target in inside.items():
        moves = target.moves
        if isinstance(target, Product) and all(perm == _SWAPPED.get(rank(weight)) for _, perm in moves):
            readers = [(node, index) for node, index in weight.uses() if node.graph is not model.graph]
            source = WeightSource(weight, quantized=target.source.quantized)
            yield WeightItself(
                target.node, target.index, source, weight, transposed=bool(len(moves) % 2), readers=readers
            )


def _recurrences(node: ir.Node) -> Iterator[AdapterTarget]:
    """Yield the weights of a recurrence."""
    for index in (1, 2) if node.domain == "" and node.op_type in RECURRENT else ():
        w = _input(node, index)
        if (source := source_of(w)) is not None and is_floating(w):
            yield WeightItself(node, index, source, w, readers=((node, index),))


_READERS: Mapping[tuple[str, str], Sequence[tuple[int, type[AdapterTarget]]]] = {
    **dict.fromkeys((("", "MatMul"), ("", "Gemm")), ((1, Product), (0, LeftProduct))),
    (MICROSOFT, "MatMulNBits"): ((1, Product),),
    ("", "Conv"): ((1, Convolution),),
    ("", "ConvTranspose"): ((1, TransposedConvolution),),
    ("", "Gather"): ((0, Embedding),),
}


def _found(node: ir.Node) -> Iterator[AdapterTarget]:
    """Yield what a node reads as a weight, if it reads one."""
    readers = _READERS.get((node.domain, node.op_type), ())
    sources = [(index, kind, _source_in(node, index)) for index, kind in readers]
    found = [(index, kind, source) for index, kind, source in sources if source is not None]
    for index, kind, source in found if len(found) == 1 else ():  # two are a product of weights
        is_matrix = node.domain or len(readers) < 2 or 2 <= rank(_input(node, index)) <= 3
        is_table = node.attributes.get_int("axis", 0) == 0 and rank(_input(node, index)) == 2
        if is_matrix and (is_table or kind is not Embedding):
            yield kind(node, index, source, *_with_bias(node))


def _source_in(node: ir.Node, index: int) -> WeightSource | None:
    """Return what an input of a node comes from, if it is a weight."""
    x = node.inputs[index]
    if node.domain != "":
        return None if x is None else WeightSource(x, quantized=True)
    return source_of(x)


def _input(node: ir.Node, index: int) -> Value:
    x = node.inputs[index]
    assert x is not None
    return x


def _with_bias(node: ir.Node) -> tuple[Value, Value | None]:
    """Return the output of a node, and the bias in it: its own, or one that an Add after it adds."""
    y = node.outputs[0]
    last = {"Gemm": 2, "Conv": 2, "ConvTranspose": 2, "MatMulNBits": 5}.get(node.op_type)
    if last is not None:
        return y, node.inputs[last] if len(node.inputs) > last else None
    users = list(y.consumers())
    if node.op_type == "MatMul" and len(users) == 1 and users[0].op_type == "Add" and not y.is_graph_output():
        (other,) = [x for x in users[0].inputs if x is not y] or [None]
        if other is not None and constant_of(other) is not None and rank(other) == 1:
            return users[0].outputs[0], other
    return y, None


def note_of(target: AdapterTarget, adapter: str, values: tuple[str, ...], **fields: Any) -> Adapted:
    """Return the note of an adapter of a target."""
    source = target.source
    return Adapted(
        adapter,
        metadata.original_name(source.weight),
        target.name,
        values,
        target.kind,
        groups=target.groups,
        moves=target.moves,
        columns=target.columns,
        quantized=source.quantized,
        **fields,
    )
