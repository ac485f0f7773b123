"""Recompute parts of the forward pass in the backward pass instead of keeping their results (checkpointing)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import memory
from graphopt.graph.copying import again
from graphopt.graph.emitter import Emitter
from graphopt.graph.memory import base_of
from graphopt.graph.metadata import OF_BATCH
from graphopt.graph.operators import CONVOLUTIONS, RANDOM, VIEWS
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role
from graphopt.graph.simplify import simplify
from graphopt.graph.traversal import ancestors, dependencies, forward_nodes, subgraphs, values_read
from graphopt.graph.values import bytes_of, constant_of, is_floating, like, rank
from graphopt.intervals import within

_ELEMENT = 20  # the cost of an element of an elementwise operator, in additions of a matrix product
CAPS = 24  # the number of segment sizes to try, each a fifth smaller than the previous one
NEGLIGIBLE = 1e-3  # the share of all saved bytes below which a value stays saved


@dataclass(frozen=True)
class Recompute(Pass):
    """Recompute parts of the forward pass in the backward pass, so that fewer values are stored. Run it after Gradient.

    The backward pass reads stored values or recomputes segments from them (Chen, Xu, Zhang, Guestrin 2016,
    https://arxiv.org/abs/1604.06174). The pass prefers values that cost least per byte to recompute, and limits the
    size of segments. Among the sizes within the budget it chooses the one with the least work. The results stay the
    same. A segment starts with a Reshape whose shape depends on earlier gradients, so that no runtime can run it
    earlier or merge it with the forward pass.

    Args:
        budget: the largest share of the bytes stored without this pass that stored and recomputed values may take at
            any time. None minimizes them.
        batch: the size to assume for symbolic dimensions when bytes are counted, or sizes by their names, as for long
            sequences: `{"batch": 1, "sequence": 512}`.

    Raises:
        GraphoptError: `budget` is not in (0, 1], the model has no gradients, or the budget is too small for the model.

    >>> steps = {"loss": passes.CrossEntropy(), "recompute": passes.Recompute(budget=0.8)}
    >>> step = graphopt.compile(models.transformer((8,), 16, vocabulary=16), **steps)
    """

    budget: float | None = within("(0, 1]", None)
    batch: int | Mapping[str, int] = 32

    def requires(self, model: ir.Model) -> None:
        self.required(model, Role.GRADIENT, "run Gradient first")

    def rewrite(self, model: ir.Model) -> None:
        simplify(model)  # a later Simplify would merge equal nodes of both passes
        forward = _Forward(model, self.batch)
        _rerun(model, forward, forward.choose(self.budget))


@dataclass
class _Saved:
    """Store a node whose outputs the backward pass reads, and the cost of recomputing it."""

    size: int  # the bytes of those outputs
    inner: set[ir.Node]  # the nodes between it and other saved nodes, which nothing keeps
    sources: set[ir.Node]  # the nodes that these nodes and the saved one read
    cost: float  # of the node and of `inner`
    start: int  # the position of the first reader in the backward pass


@dataclass
class _Choice:
    """Store the segments to recompute, and the bytes that are alive at any time."""

    peak: float
    cost: float = 0.0
    segments: list[set[ir.Node]] = field(default_factory=list)


class _Forward:
    """Analyse the forward pass of a model with gradients, and the values that the backward pass reads from it."""

    def __init__(self, model: ir.Model, batch: memory.Sizes) -> None:
        self.nodes = {node for node in forward_nodes(model) if node.op_type != "Constant"}
        self.backward = [node for node in model.graph if node not in self.nodes]
        sized = dict(zip(model.graph, memory.with_sizes(model, batch).graph, strict=True))
        statistics = [x for node in self.nodes if OF_BATCH.is_set(node) for x in node.inputs[3:] if x]
        results = [base_of(y).producer() for y in (*model.graph.outputs, *statistics)]
        outputs = {node for node in results if node is not None}
        saved: dict[ir.Node, set[ir.Value]] = {}
        start: dict[ir.Node, int] = {}
        fixed = {node for node in self.nodes if node.domain or node.op_type in RANDOM or subgraphs(node)}
        for i, node in enumerate(self.backward):
            for x in values_read(node):
                producer = base_of(x).producer()
                if x.producer() in self.nodes and producer in self.nodes and producer not in outputs:
                    saved.setdefault(producer, set()).add(base_of(x))
                    start.setdefault(producer, i)
                    if x not in node.inputs:  # a body reads it
                        fixed.add(producer)
        self.total = 0
        self.saved: dict[ir.Node, _Saved] = {}
        for node, values in saved.items():
            size = sum(bytes_of(sized[node].outputs[y.index() or 0]) for y in values)
            inner = self.nodes & ancestors(values_read(node), saved.keys() | outputs)
            read = (x.producer() for member in (node, *inner) for x in values_read(member))
            self.total += size
            if not fixed & {node, *inner}:
                cost = sum(_cost(sized[member]) for member in (node, *inner))
                self.saved[node] = _Saved(size, inner, {*filter(None, read)}, cost, start[node])
        self._near: dict[ir.Node, set[ir.Node]] = {node: set() for node in self.saved}
        for node, entry in self.saved.items():
            for source in entry.sources & self._near.keys():
                self._near[node].add(source)
                self._near[source].add(node)

    def choose(self, budget: float | None) -> _Choice:
        """Return the cheapest segments within a budget, or without a budget those that store the fewest bytes."""
        limit = 0.0 if budget is None else budget * self.total
        if self.total <= limit:
            return _Choice(self.total)
        choices = [*(self._grow(limit, self.total * 0.8**i) for i in range(1, CAPS)), _Choice(self.total)]
        least = min(choices, key=lambda choice: (choice.peak, choice.cost))
        if budget is None:
            return least
        if least.peak > limit:
            raise GraphoptError(
                f"Recompute: budget={budget}: expected to keep {limit / 1e6:.3g} of the {self.total / 1e6:.3g} MB "
                f"that the backward pass reads, found at least {least.peak / 1e6:.3g} MB: set it to "
                f"{math.ceil(1000 * least.peak / self.total) / 1000} or more"
            )
        return min((choice for choice in choices if choice.peak <= limit), key=lambda choice: choice.cost)

    def _grow(self, limit: float, cap: float) -> _Choice:
        """Grow segments by the values that cost least per byte until at most `limit` is stored. None exceeds `cap`."""
        large = [node for node, saved in self.saved.items() if saved.size > NEGLIGIBLE * self.total]
        large.sort(key=lambda node: self.saved[node].cost / self.saved[node].size)
        segment: dict[ir.Node, set[ir.Node]] = {}
        stored, largest = self.total, 0
        for node in large:
            if stored + largest <= limit:
                break
            merged = {node}.union(*(segment[other] for other in self._near[node] if other in segment))
            size = sum(self.saved[member].size for member in merged)
            if size <= cap:
                stored -= self.saved[node].size
                largest = max(largest, size)
                segment.update(dict.fromkeys(merged, merged))
        segments = sorted({id(nodes): nodes for nodes in segment.values()}.values(), key=self.start)
        cost = sum(self.saved[node].cost for nodes in segments[1:] for node in nodes)
        # The first segment would stay alive until it is read anyway.
        return _Choice(stored + largest, cost, segments[1:])

    def start(self, segment: Iterable[ir.Node]) -> int:
        """Return the position of the first node of the backward pass that reads a segment."""
        return min(self.saved[node].start for node in segment)


def _cost(node: ir.Node) -> float:
    """Return the cost of a node of known shapes, in additions of a matrix product."""
    if node.op_type in VIEWS:
        return 0
    shapes = [_dims(x) for x in node.inputs]
    contracted = 0
    if node.op_type == "MatMul":
        contracted = shapes[0][-1]
    elif node.op_type == "Gemm":
        contracted = shapes[0][0 if node.attributes.get_int("transA", 0) else 1]
    elif node.op_type in CONVOLUTIONS:
        contracted = math.prod(shapes[1]) // shapes[1][0 if node.op_type == "Conv" else 1]
    return math.prod(_dims(node.outputs[0])) * (_ELEMENT + contracted)


def _dims(x: ir.Value | None) -> list[int]:
    """Return the shape of a value, with 1 for unknown sizes."""
    shape = (1, 1) if x is None or x.shape is None else x.shape
    return [dim if isinstance(dim, int) else 1 for dim in shape]


def _rerun(model: ir.Model, forward: _Forward, choice: _Choice) -> None:
    """Make the backward pass read recomputed segments, each of which waits for the gradients before it."""
    position = {node: i for i, node in enumerate(model.graph)}
    order = forward.backward
    ahead = dependencies(order)
    needed = ancestors(model.graph.outputs)
    before, awaited, zero = 0, 0, None
    for segment in choice.segments:
        start = forward.start(segment)
        tokens = []
        for node in reversed(order[before:start]):
            if node in needed and is_floating(node.outputs[0]) and ahead[node] & ~awaited:
                tokens.append(node.outputs[0])
                awaited |= ahead[node]
        before = start
        count = len(model.graph)
        with Emitter(model) as op:
            if tokens:
                zero = _zero(op, tokens)
            if zero is None:
                continue  # the first gradient reads it, so it is alive anyway
            inner = segment.union(*(forward.saved[node].inner for node in segment))
            copies = _copies(op, sorted(inner, key=lambda node: position[node]), zero)
            for node in order:
                for i, x in enumerate(node.inputs):
                    if x and x.producer() in forward.nodes and base_of(x).producer() in segment:
                        node.replace_input_with(i, _copy(op, x, copies))
        emitted = list(model.graph)[count:]
        model.graph.remove(emitted)
        model.graph.insert_before(order[start], emitted)


def _zero(op: Emitter, tokens: Iterable[ir.Value]) -> ir.Value:
    """Return the int64 vector [0], computed from `tokens` as |x| < 0 so that no runtime can fold it."""
    firsts = [op.first(x) for x in tokens]
    whole = op.Concat(*firsts, axis=0) if len(firsts) > 1 else firsts[0]
    never = op.Cast(op.Less(op.Abs(whole), 0.0), to=ir.DataType.INT64)
    return op.ReduceMax(never, keepdims=1)


def _copies(op: Emitter, nodes: Sequence[ir.Node], zero: ir.Value) -> dict[ir.Value, ir.Value]:
    """Emit copies of nodes that start after `zero`, and return the copies of their outputs."""
    copies: dict[ir.Value, ir.Value] = {}
    tied: dict[ir.Value, ir.Value] = {}
    for node in nodes:
        read: Mapping[ir.Value, ir.Value] = copies
        if not any(x in copies for x in node.inputs):
            present = [x for x in node.inputs if x is not None]
            x = next((x for x in present if constant_of(x) is None), present[0])
            if x not in tied:
                tied[x] = _after(op, x, zero)
            read = {x: tied[x]}
        copies |= again(op, [node], read)
    return copies


def _after(op: Emitter, x: ir.Value, zero: ir.Value) -> ir.Value:
    """Return `x` reshaped by a shape that contains `zero`. A size of 0 means the size of `x`."""
    if rank(x) == 0:
        return like(op.Squeeze(op.Reshape(x, zero + 1), [0]), x)
    shape = zero if rank(x) == 1 else op.Expand(zero, [rank(x)])
    return like(op.Reshape(x, shape), x)


def _copy(op: Emitter, x: ir.Value, copies: dict[ir.Value, ir.Value]) -> ir.Value:
    """Return the copy of a value, or a view of a copy if the value is a view."""
    node = x.producer()
    if x not in copies and node is not None and node.inputs[0] is not None:
        _copy(op, node.inputs[0], copies)
        copies |= again(op, [node], copies)
    return copies[x]
