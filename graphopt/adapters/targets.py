"""Find the weights that adapters change, and multiply by an adapter's values as the graph multiplies by the weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.merging import Adapted
from graphopt.graph.metadata import FAKE
from graphopt.graph.operators import VIEWS
from graphopt.graph.opsets import IR_VERSION
from graphopt.graph.origins import Origin
from graphopt.graph.postprocessing import DEQUANTIZE
from graphopt.graph.rewriting import Pattern, matches, selects
from graphopt.graph.traversal import extracted_between, subgraphs
from graphopt.graph.values import constant_of, dims_of, given, is_floating, is_static, name_of, rank
from graphopt.graph.weight_kinds import (
    EMBEDDING,
    PRODUCT,
    TURNED,
    Moves,
    WeightKind,
    inverse,
    moved,
    shape_after,
    swap_of,
    weight_kinds_of,
)

_SHAPING = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_PASSING = VIEWS | {"Cast", "Transpose", DEQUANTIZE}
_OF_QUANTIZED = ("Mul", "Pad", "Slice", "Sub")  # scales, the padding of the last block, and zero points
_JOINING = ("Add", "MatMul")
_FOLLOWED = {*_JOINING, "Cast", "Identity", "Reshape", "Slice", "Split", "Sub", "Transpose", DEQUANTIZE}


@dataclass(frozen=True, eq=False)
class WeightSource:
    """Hold the initializer that a weight comes from, and the moves of its numbers on the way to a product.

    Args:
        weight: the initializer.
        moves: the moves.
        quantized: whether the file stores it in integers.
        unrounded: the weight before `FakeQuantize` rounds it, in the layout of the product.
    """

    weight: Value
    moves: Moves = ()
    quantized: bool = False
    unrounded: Value | None = None


def source_of(x: Value | None) -> WeightSource | None:
    """Return what a weight comes from: an initializer, in another layout or not; None for computed values."""
    moves: list[tuple[str, tuple[int, ...]]] = []
    unrounded = None
    while x is not None and (node := x.producer()) is not None and node.domain == "":
        if _rounds(node):
            x = unrounded = node.inputs[0]
            continue
        if node.op_type == DEQUANTIZE and node.inputs[0] is not None and node.inputs[0].is_initializer():
            return WeightSource(node.inputs[0], quantized=True)
        if node.op_type == "Gather":  # of numbers in a table, whose places are the weight
            source = source_of(node.inputs[1])
            return source if source is not None and source.quantized else None
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
    unrounded = x if any(map(FAKE.is_set, x.consumers())) else unrounded
    return WeightSource(x, tuple(moves[::-1]), unrounded=unrounded)


def _rounds(node: ir.Node) -> bool:
    """Return whether a node rounds a weight to integers or back, or passes the gradient around such nodes."""
    if FAKE.is_set(node):
        return True
    form = InferenceForm.read(node.outputs[0]) if node.op_type == "Add" else None
    before = None if form is None or form.same_as != 0 else given(node.inputs[0]).producer()
    return before is not None and FAKE.is_set(before)


@dataclass(frozen=True, eq=False)
class AdapterTarget:
    """Describe a weight w where a node reads it, as an adapter sees it: y = x w, for w of [..., inputs, outputs].

    Where an adapter changes the weight itself, x is the identity, and y the weight. Recurrences, bodies of control flow
    and operators without a known product read such weights, and `FakeQuantize` rounds the changed weight. Each
    direction of a recurrence has an adapter.

    Args:
        node: the node that reads the weight.
        index: the number of the node's input.
        reading: how the node reads it.
        source: where the weight comes from.
        y: the output, with the bias.
        bias: what is added to y after the product, and is part of it; None for nothing.
        columns: the first and the last + 1 of the outputs that the adapter changes; None for all.
        readers: the nodes and the numbers of the inputs that read the output, if these are not all.
    """

    node: ir.Node
    index: int
    reading: WeightKind
    source: WeightSource
    y: Value
    bias: Value | None = None
    columns: tuple[int, int] | None = None
    readers: Sequence[tuple[ir.Node, int]] = ()

    @property
    def kind(self) -> str:
        """Return the layout of the weight, such as `product` or `convolution`."""
        return self.reading.name

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
    def is_weight_itself(self) -> bool:
        """Return whether an adapter changes the weight instead of an output."""
        return self.reading.x is None

    @property
    def has_layout(self) -> bool:
        """Return whether an adapter changes a weight that becomes [..., inputs, outputs] for it, and then returns."""
        return self.is_weight_itself and (self.reading.has_layout or self.source.unrounded is not None)

    @property
    def droppable(self) -> bool:
        """Return whether x consists of activations."""
        return not self.is_weight_itself and self.kind != EMBEDDING

    @property
    def w(self) -> Value:
        """Return the weight as the node reads it."""
        return self.y if self.is_weight_itself else _input(self.node, self.index)

    @property
    def x(self) -> Value:
        """Return what is multiplied by the weight, before it is rounded by its own range."""
        return self.y if self.reading.x is None else _unrounded(_input(self.node, self.reading.x))

    @property
    def uses(self) -> Sequence[tuple[ir.Node, int]]:
        """Return the nodes and the numbers of the inputs that read the output."""
        return self.readers or list(self.y.uses())

    @property
    def groups(self) -> int:
        """Return the number of independent matrices of a convolution."""
        return self.node.attributes.get_int("group", 1) if self.reading.is_filters else 1

    @property
    def is_transposed(self) -> bool:
        """Return whether the node reads the transpose of w."""
        return self.reading.is_transposed(self.node)

    @property
    def axis(self) -> int:
        """Return the axis of the outputs in y."""
        if self.is_weight_itself:
            return -2 if self.is_transposed and not self.has_layout else -1
        return 1 - rank(self.w) if self.reading.is_filters else -2 if self.reading.left else -1

    @property
    def own_axis(self) -> int:
        """Return the axis of the outputs in w."""
        return self.reading.axes[0] if self.reading.is_filters else -2 if self.is_transposed else -1

    @property
    def own_moves(self) -> Moves:
        """Return the moves that turn w into [..., inputs, outputs]."""
        return self.reading.moves(self.node, _dims(self.w))

    @property
    def moves(self) -> Moves:
        """Return the moves that turn the file's weight into w of [..., inputs, outputs]."""
        return (*self.source.moves, *self.own_moves)

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the shape of w as [..., inputs, outputs], or of the filters."""
        if self.reading.scale is not None:
            return self.node.attributes.get_int("K"), self.node.attributes.get_int("N")
        return shape_after(self.own_moves, _dims(self.w))

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the number of inputs and of outputs of each matrix."""
        inputs, outputs = shape_after(self.reading.to_matrices(self.dims, self.groups), self.dims)[-2:]
        return inputs, outputs

    @property
    def outputs(self) -> int:
        """Return the number of outputs that the adapter changes."""
        return self.columns[1] - self.columns[0] if self.columns else self.sizes[1] * self.groups

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a [inputs, count] and b [count, outputs] in the layout in which they are stored."""
        return self.reading.shapes(self.dims, self.groups, self.outputs, count)

    def down(self, op: Emitter, x: Value, a: Value) -> Value:
        """Emit x a."""
        if self.is_weight_itself:
            return swapped(op, a) if self.is_transposed else a
        if self.kind == EMBEDDING:
            return op.Gather(a, x)
        if self.reading.is_filters:
            attributes = dict(self.node.attributes)
            return op.call_op(self.node.op_type, [x, a], attributes, domain=self.node.domain)  # type: ignore[return-value]
        is_turned = self.reading.turns_x(self.node)
        if self.reading.left:
            x = op.Transpose(x, perm=[1, 0]) if is_turned else x
            return op.MatMul(swapped(op, a), x)
        return op.Gemm(x, a, transA=1) if is_turned else op.MatMul(x, a)

    def up(self, op: Emitter, h: Value, b: Value) -> Value:
        """Emit h b."""
        if self.reading.is_filters:
            return op.Conv(h, b, group=self.groups)
        first, last = h, b
        if self.reading.left or (self.is_weight_itself and self.is_transposed):
            first, last = swapped(op, b), h
        alpha = self.node.attributes.get_float("alpha", 1.0) if self.reading.gemm else 1.0
        return op.MatMul(first if alpha == 1 else op.Mul(first, op.constant(alpha, like=b)), last)

    def spread(self, op: Emitter, vector: Value) -> Value:
        """Emit numbers of the outputs, [outputs] or [..., 1, outputs], so that they broadcast along y."""
        if self.axis == -1:
            return vector
        return op.Unsqueeze(vector, [*range(1, -self.axis)]) if rank(vector) == 1 else swapped(op, vector)

    def product(self, op: Emitter) -> Value:
        """Emit y without its bias."""
        y = self.y
        if self.bias is not None:
            bias = self.scaled_bias(op, self.bias, like=y)
            y = y - (self.spread(op, bias) if self.reading.is_filters else bias)
        return op.Slice(y, [self.columns[0]], [self.columns[1]], [self.axis]) if self.columns else y

    def scaled_bias(self, op: Emitter, bias: Value, like: Value) -> Value:
        """Emit a bias with the factor that the node has for it, in the type of a value."""
        beta = self.node.attributes.get_float("beta", 1.0) if self.reading.gemm else 1.0
        return bias if beta == 1 else op.Mul(bias, op.constant(beta, like=like))

    @property
    def _to_matrices(self) -> Moves:
        return (*self.own_moves, *self.reading.to_matrices(self.dims, self.groups))

    def laid_out(self, op: Emitter) -> AdapterTarget:
        """Emit a weight that has a layout of its own as [..., inputs, outputs], and return the target of that."""
        if not self.has_layout:
            return self
        y = emit(op, self.y, self._to_matrices)
        return replace(self, reading=WeightKind(), source=WeightSource(self.source.weight), y=y)

    def given_back(self, op: Emitter, changed: Value) -> Value:
        """Emit a value like the output of `laid_out` in the layout of the weight."""
        return emit(op, changed, inverse(self._to_matrices, _dims(self.y))) if self.has_layout else changed

    def matrix(self, op: Emitter, w: Value, *, up: bool = False) -> Value:
        """Emit the weight, or a value in the layout of the weight, as [..., inputs, outputs]."""
        moves = self.own_moves if w is self.w else ()
        return emit(op, w, (*moves, *self.reading.to_matrices(_dims(w), self.groups, up=up)))

    def numbers(self) -> np.ndarray:
        """Return the numbers of the weight, as [..., inputs, outputs] or as filters."""
        graph = self.w.graph
        assert isinstance(graph, ir.Graph)
        model = ir.Model(extracted_between(graph, [], [self.w]), ir_version=IR_VERSION)
        (array,) = map(np.asarray, ReferenceEvaluator(ir.to_proto(model)).run(None, {}))
        return moved(array, self.own_moves)


def readers_of(weight: Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield the nodes and the numbers of inputs that read a weight, also after those that turn, cast or round it."""
    for node, index in weight.uses():
        if index == 0 and (node.op_type in _PASSING or _rounds(node)):
            yield from readers_of(node.outputs[0])
        else:
            yield node, index


def products_of(weight: Value) -> Iterator[ir.Node]:
    """Yield the nodes on the way of a weight to its products, these, and those that add to them, split or cast them."""
    waiting, seen = [(weight, _FOLLOWED)], set[ir.Node]()
    while waiting:
        x, followed = waiting.pop(0)
        for node, index in x.uses():
            if node.op_type in followed and (index == 0 or node.op_type in _JOINING) and node not in seen:
                seen.add(node)
                yield node
                after = followed - {"MatMul"} if node.op_type == "MatMul" else followed
                waiting += [] if node.op_type == "Split" else [(node.outputs[0], after)]


def widths(weight: Value) -> list[int] | None:
    """Return the sizes into which a graph splits the outputs of a weight's product, or None."""
    for node in products_of(weight):
        if node.op_type == "Split":
            sizes = [None if y.shape is None else y.shape[-1] for y in node.outputs]
            return [x for x in sizes if isinstance(x, int)] if all(isinstance(x, int) for x in sizes) else None
    return None


def outputs_of(weight: Value) -> int:
    """Return the number of outputs of the product of a weight [inputs, outputs], which may be packed.

    Raises:
        GraphoptError: no MatMul reads it.
    """
    for node in products_of(weight):
        shape = node.outputs[0].shape if node.op_type == "MatMul" else None
        if shape is not None and isinstance(shape[-1], int):
            return shape[-1]
    raise GraphoptError(f"weight {weight.name!r}: expected a MatMul that reads it, found none")


def swapped(op: Emitter, x: Value) -> Value:
    """Emit a value with its last two axes exchanged."""
    return op.Transpose(x, perm=[*swap_of(rank(x))])


def emit(op: Emitter, x: Value, moves: Moves) -> Value:
    for how, numbers in moves:
        x = op.Transpose(x, perm=[*numbers]) if how == "transpose" else op.Reshape(x, [*numbers])
    return x


def targets_in(model: ir.Model) -> Iterator[AdapterTarget]:
    """Yield the places of the graph where nodes read weights that adapters can change."""
    inside: dict[Value, AdapterTarget] = {}
    for node in model.graph:
        yield from _found(node)
        for inner in (inner for body in subgraphs(node) for inner in body.all_nodes()):
            for target in _found(inner):
                if not target.is_weight_itself:
                    inside.setdefault(target.source.weight, target)
    for weight, target in inside.items():
        moves = target.moves
        if target.kind == PRODUCT and all(perm == swap_of(rank(weight)) for _, perm in moves):
            reading = TURNED if len(moves) % 2 else WeightKind()
            source = WeightSource(weight, quantized=target.source.quantized)
            readers = [(node, index) for node, index in weight.uses() if node.graph is not model.graph]
            yield AdapterTarget(target.node, target.index, reading, source, weight, readers=readers)


def _found(node: ir.Node) -> Iterator[AdapterTarget]:
    """Yield what a node reads as weights, if it reads any."""
    kinds = weight_kinds_of(node)
    weights = [index for index in kinds if source_of(node.inputs[index]) is not None]
    for index, kind in kinds.items():
        source = _source_in(node, index, kind)
        if source is None or kind.x in weights:  # two are a product of weights
            continue
        if kind.x is None or source.unrounded is not None:
            w = source.unrounded or _input(node, index)
            uses = list(w.uses()) if source.unrounded is not None else [(node, index)]
            yield AdapterTarget(node, index, replace(kind, x=None), source, w, readers=uses)
        else:
            yield AdapterTarget(node, index, kind, source, *_with_bias(node, kind))


def _source_in(node: ir.Node, index: int, kind: WeightKind) -> WeightSource | None:
    """Return what an input of a node comes from, if it is a weight that the table describes."""
    x = node.inputs[index]
    if kind.scale is not None:
        return WeightSource(x, quantized=True) if x is not None and "K" in node.attributes else None
    source = source_of(x)
    if x is None or source is None or not is_floating(x) or not is_static(x):
        return None
    if kind.name == EMBEDDING:
        return source if rank(x) == 2 and node.attributes.get_int("axis", 0) == 0 else None
    if kind.name == PRODUCT and rank(x) < -min(*kind.inputs, *kind.outputs):
        return None
    is_matrix = kind.name != PRODUCT or len(shape_after(kind.moves(node, _dims(x)), _dims(x))) <= 3
    return source if is_matrix else None


def _input(node: ir.Node, index: int) -> Value:
    return given(node.inputs[index])


def _unrounded(x: Value) -> Value:
    """Return what a DynamicQuantizeLinear rounds, if its integers or what they stand for are given."""
    node = x.producer()
    if node is not None and node.op_type == DEQUANTIZE and (rounding := _input(node, 0).producer()) is not None:
        scale = _input(rounding, 1).producer() if rounding.op_type == "QuantizeLinear" else None
        node = scale if scale is None or scale.op_type != "Identity" else _input(scale, 0).producer()
    return _input(node, 0) if node is not None and node.op_type == "DynamicQuantizeLinear" else x


def _dims(x: Value) -> tuple[int, ...]:
    return tuple(ir.Shape(dims_of(x)).numpy())


def _with_bias(node: ir.Node, kind: WeightKind) -> tuple[Value, Value | None]:
    """Return the output of a node, and the bias in it: its own, or one that an Add after it adds."""
    y = node.outputs[0]
    if kind.bias is not None:
        return y, node.inputs[kind.bias] if len(node.inputs) > kind.bias else None
    users = list(y.consumers())
    if kind.name == PRODUCT and len(users) == 1 and users[0].op_type == "Add" and not y.is_graph_output():
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
