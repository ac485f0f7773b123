"""Find clusters: connected nodes that one loop over rows and columns computes.

A cluster has an iteration space, a list of dimensions. Each value of the cluster varies over some of them, in their
order. The last dimensions are the columns; a value varies over all dimensions, over the rows alone (what a reduction
over columns gives), or it is a total: the result of any other reduction, which nothing in the cluster reads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from graphopt.graph.schemas import attributes_of
from graphopt.graph.traversal import values_read
from graphopt.graph.values import constant_of
from graphopt.native.operators import CTYPES, REDUCING, ROWS, expression

Size = int | str
Axes = tuple[int | None, ...]  # for each axis of a value, the dimension of the space that it varies over

RESHAPING = {"Reshape", "Squeeze", "Unsqueeze"}


@dataclass
class Form:
    """Describe what a node does, as far as clusters go.

    Args:
        kind: `map` (elementwise), `view`, `reduce` or `rows` (normalizations and softmax).
        reduced: the axes of the input that `reduce` and `rows` reduce.
        views: for each axis of a view's input, its axis in the output, or None.
    """

    kind: str
    attributes: Mapping[str, Any]
    reduced: tuple[int, ...] = ()
    keeps: bool = True
    views: tuple[int | None, ...] = ()


@dataclass
class Cluster:
    """Hold nodes with the iteration space that computes them."""

    nodes: dict[ir.Node, Form] = field(default_factory=dict)
    sizes: dict[int, Size] = field(default_factory=dict)  # of dimensions, in their order
    axes: dict[ir.Value, Axes] = field(default_factory=dict)  # of produced values
    read: dict[tuple[ir.Node, int], Axes] = field(default_factory=dict)  # of operands, by node and index
    columns: frozenset[int] = frozenset()  # the dimensions that reductions within the cluster reduce
    totals: dict[ir.Value, Axes] = field(default_factory=dict)  # the axes of what they are sums of

    def produces(self, value: ir.Value) -> bool:
        return value in self.axes

    def outer(self) -> int | None:
        """Return how many dimensions are rows; None if no number serves all values."""
        order = list(self.sizes)
        varying = [{d for d in axes if d is not None} for axes in [*self.axes.values(), *self.read.values()]]
        produced = [
            {d for d in axes if d is not None}
            for value, axes in self.axes.items()
            if value not in self.totals
        ]
        summed = [{d for d in axes if d is not None} for axes in self.totals.values()]
        choices = [len(order) - len(self.columns)] if self.columns else range(len(order))
        for split in choices:
            rows, columns = set(order[:split]), set(order[split:])
            if self.columns and columns != self.columns:
                return None
            if not all(found >= columns or found.isdisjoint(columns) for found in varying):
                continue
            whole = [rows | columns, rows] if self.columns else [rows | columns]
            if not all(found in whole for found in summed):
                continue
            if all(found in (rows | columns, rows) or not found for found in produced):
                return split
        return None if order else 0


def find_clusters(graph: ir.Graph, versions: Mapping[str, int]) -> list[Cluster]:
    """Return clusters of a graph's nodes; each can be replaced by one node without a cycle."""
    forms = {node: form for node in graph if (form := form_of(node, versions)) is not None}
    reach = _Reach(graph)
    taken: set[ir.Node] = set()
    found = []
    for seed in graph:
        if seed not in forms or seed in taken:
            continue
        cluster = _add(Cluster(), seed, forms[seed])
        if cluster is None:
            continue
        cluster = _grown(cluster, forms, taken, reach)
        if sum(form.kind != "view" for form in cluster.nodes.values()) > 1:
            found.append(cluster)
            taken.update(cluster.nodes)
            reach.contract(cluster.nodes)
    return found


def form_of(node: ir.Node, versions: Mapping[str, int]) -> Form | None:
    """Return what a node does; None if kernels do not compute it."""
    if (
        node.domain != ""
        or not node.inputs
        or (any(x is None for x in node.inputs) and node.op_type != "Clip")
    ):
        return None
    values = [x for x in (*node.inputs, *node.outputs) if x is not None]
    attributes = attributes_of(node, versions)
    y = node.outputs[0]
    ctype = ctype_of(y)
    if ctype is None:
        return None
    if node.op_type in RESHAPING:
        return _view(node, attributes)
    if node.op_type in REDUCING:
        return _reduction(node, attributes, versions)
    if node.inputs[0] is None or any(ctype_of(x) is None or not _known(x) for x in values):
        return None
    source = ctype_of(node.inputs[0]) or ""
    if node.op_type in ROWS:
        axis = attributes.get("axis", -1)
        rank = len(sizes_of(y))
        if ctype != "float" or rank == 0 or axis % rank != rank - 1 or versions.get("", 1) < 13:
            return None
        return Form("rows", attributes, (rank - 1,))
    if node.op_type == "Clip":
        return Form("map", attributes) if ctype in ("float", "double") else None
    if node.op_type == "Pow":
        exponent = constant_of(node.inputs[1])
        simple = exponent is not None and exponent.size == 1 and exponent.item() in (1.0, 2.0)
        return (
            Form("map", attributes)
            if ctype == source and ctype == "float" and (simple or _is_scalar(y))
            else None
        )
    if expression(node.op_type, ctype, source, attributes, len(node.inputs)) is None:
        return None
    return Form("map", attributes)


def ctype_of(x: ir.Value) -> str | None:
    """Return the C type of a value's elements; None if kernels do not have it."""
    return None if x.dtype is None else CTYPES.get(x.dtype)


def _known(x: ir.Value) -> bool:
    """Return whether every dimension is a number or has a name."""
    return x.shape is not None and all(isinstance(dim, int) or dim.value is not None for dim in x.shape)


def _is_scalar(x: ir.Value) -> bool:
    return all(size == 1 for size in sizes_of(x))


def sizes_of(x: ir.Value) -> list[Size]:
    """Return the dimensions of a value: numbers, and names of symbols."""
    assert x.shape is not None
    return [dim if isinstance(dim, int) else str(dim.value) for dim in x.shape]


def _view(node: ir.Node, attributes: Mapping[str, Any]) -> Form | None:
    """Return the form of a node that adds and removes axes of size 1."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or ctype_of(x) is None or not _known(x) or not _known(y):
        return None
    left, right = sizes_of(x), sizes_of(y)
    kept = [i for i, size in enumerate(left) if size != 1]
    others = [i for i, size in enumerate(right) if size != 1]
    if [left[i] for i in kept] != [right[i] for i in others]:
        return None
    matched = dict(zip(kept, others, strict=True))
    return Form("view", attributes, views=tuple(matched.get(i) for i in range(len(left))))


def _reduction(node: ir.Node, attributes: Mapping[str, Any], versions: Mapping[str, int]) -> Form | None:
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or not _known(x) or not _known(y):
        return None
    axes = attributes.get("axes")
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = constant_of(node.inputs[1])
        if constant is None:
            return None
        axes = constant.tolist()
    rank = len(sizes_of(x))
    if not axes:
        if attributes.get("noop_with_empty_axes"):
            return None
        axes = range(rank)
    reduced = tuple(sorted(axis % rank for axis in axes)) if rank else ()
    return Form("reduce", attributes, reduced, bool(attributes.get("keepdims", 1))) if rank else None


def operands_of(node: ir.Node, form: Form) -> dict[int, ir.Value]:
    """Return the inputs that a kernel reads as numbers, not axes or shapes, by their index."""
    inputs = node.inputs[:1] if form.kind in ("view", "reduce") else node.inputs
    return {i: x for i, x in enumerate(inputs) if x is not None}


def _grown(cluster: Cluster, forms: Mapping[ir.Node, Form], taken: set[ir.Node], reach: _Reach) -> Cluster:
    """Return a cluster with all neighbors that fit, one by one."""
    refused: dict[ir.Node, int] = {}
    while True:
        for node in _neighbors(cluster):
            if node not in forms or node in taken or node in cluster.nodes:
                continue
            if refused.get(node) == len(cluster.nodes) or not reach.convex(cluster.nodes, node):
                continue
            grown = _add(cluster, node, forms[node])
            if grown is not None:
                cluster = grown
                break
            refused[node] = len(cluster.nodes)
        else:
            return cluster


def _neighbors(cluster: Cluster) -> list[ir.Node]:
    """Return the nodes that read or produce a value of the cluster, or read the same large value."""
    found: dict[ir.Node, None] = {}
    for node in cluster.nodes:
        for y in node.outputs:
            found.update((use.node, None) for use in y.uses())
    for node, form in cluster.nodes.items():
        for x in operands_of(node, form).values():
            producer = x.producer()
            if producer is not None:
                found[producer] = None
            if not _is_scalar(x) and x not in cluster.axes:
                found.update((use.node, None) for use in x.uses())
    return [node for node in found if node not in cluster.nodes]


def _add(cluster: Cluster, node: ir.Node, form: Form) -> Cluster | None:
    """Return the cluster with one more node; None if one loop cannot compute both."""
    grown = dataclasses.replace(
        cluster,
        nodes={**cluster.nodes, node: form},
        sizes=dict(cluster.sizes),
        axes=dict(cluster.axes),
        read=dict(cluster.read),
        totals=dict(cluster.totals),
    )
    scalar = all(_is_scalar(y) for y in node.outputs) and form.kind != "reduce"
    if cluster.nodes and scalar != all(_is_scalar(y) for n in cluster.nodes for y in n.outputs):
        return None  # numbers of the whole step are a kernel of their own
    known = _known_axes(cluster)
    operands = operands_of(node, form)
    if any(x in cluster.totals for x in operands.values()):
        return None
    placed = _placed(grown, node, form, operands, known)
    if placed is None:
        return None
    for i, axes in placed[0].items():
        if cluster.axes.get(operands[i], axes) != axes:
            return None
        grown.read[node, i] = axes
    for y, axes in zip(node.outputs, placed[1], strict=True):
        for (other, i), found in cluster.read.items():
            if other.inputs[i] is y and found != axes:
                return None
        grown.axes[y] = axes
    if form.kind in ("reduce", "rows"):
        reduced = frozenset(d for p in form.reduced if (d := placed[0][0][p]) is not None)
        order = list(grown.sizes)
        suffix = bool(reduced) and set(order[len(order) - len(reduced) :]) == reduced
        whole = {d for d in placed[0][0] if d is not None} == set(order)
        read_inside = any(use.node in cluster.nodes for y in node.outputs for use in y.uses())
        if not reduced and form.kind == "reduce":
            pass  # of one element: it computes what an elementwise operator does
        elif (
            suffix and whole and (not grown.columns or grown.columns == reduced) and len(reduced) < len(order)
        ):
            grown.columns = reduced
        elif form.kind == "rows" or read_inside:
            return None
        else:
            grown.totals[node.outputs[0]] = placed[0][0]
    if grown.columns and set(list(grown.sizes)[-len(grown.columns) :]) != grown.columns:
        return None
    return grown if grown.outer() is not None else None


def _known_axes(cluster: Cluster) -> dict[ir.Value, Axes]:
    """Return the axes of all values that the cluster produces or reads."""
    found = {x: axes for (node, i), axes in cluster.read.items() if (x := node.inputs[i]) is not None}
    return found | cluster.axes


def _placed(
    cluster: Cluster,
    node: ir.Node,
    form: Form,
    operands: Mapping[int, ir.Value],
    known: Mapping[ir.Value, Axes],
) -> tuple[dict[int, Axes], list[Axes]] | None:
    """Return the axes of a node's operands and outputs; add the dimensions that the space lacks."""
    y = node.outputs[0]
    if form.kind == "map":
        sizes = sizes_of(y)
        wanted: list[set[int]] = [set() for _ in sizes]
        for x in operands.values():
            _want(wanted, sizes_of(x), known.get(x) if x in cluster.axes else None)
        _want(wanted, sizes, known.get(y))
        if not any(wanted):
            for x in operands.values():
                _want(wanted, sizes_of(x), known.get(x))
        axes = _assigned(cluster, sizes, wanted)
        if axes is None:
            return None
        read = {}
        for i, x in operands.items():
            own = sizes_of(x)
            tail = axes[len(axes) - len(own) :]
            if any(size not in (1, sizes[len(sizes) - len(own) + p]) for p, size in enumerate(own)):
                return None  # two names for one size
            read[i] = tuple(None if size == 1 else d for size, d in zip(own, tail, strict=True))
        return read, [axes]
    x = operands[0]
    sizes = sizes_of(x)
    wanted = [set() for _ in sizes]
    _want(wanted, sizes, known.get(x))
    if form.kind == "rows":
        _want(wanted, sizes, known.get(y))
        axes = _assigned(cluster, sizes, wanted)
        if axes is None:
            return None
        reduced = tuple(None if p in form.reduced else d for p, d in enumerate(axes))
        read = {0: axes}
        for i, other in list(operands.items())[1:]:
            own = sizes_of(other)
            if own != sizes[len(sizes) - len(own) :]:
                return None
            read[i] = axes[len(axes) - len(own) :]
        return read, [axes, *(reduced for _ in node.outputs[1:])]
    # a view or a reduction: the output's axes are axes of the input
    if form.kind == "view":
        to = form.views
    else:
        kept = itertools.count()
        to = tuple(
            (p if form.keeps else next(kept)) if p not in form.reduced else None for p in range(len(sizes))
        )
    if y in known:
        for p, target in enumerate(to):
            if target is not None and (d := known[y][target]) is not None:
                wanted[p].add(d)
    axes = _assigned(cluster, sizes, wanted)
    if axes is None:
        return None
    out: list[int | None] = [None] * len(sizes_of(y))
    for p, target in enumerate(to):
        if target is not None:
            out[target] = axes[p]
    return {0: axes}, [tuple(out)]


def _want(wanted: list[set[int]], sizes: Sequence[Size], axes: Axes | None) -> None:
    """Note the dimensions that a value's axes vary over, aligned at the end."""
    for p, d in enumerate(axes or ()):
        if d is not None:
            wanted[len(wanted) - len(sizes) + p].add(d)


def _assigned(cluster: Cluster, sizes: Sequence[Size], wanted: Sequence[set[int]]) -> Axes | None:
    """Return a dimension for each axis: the wanted one, one of the same size, or a new one; in order."""
    axes: list[int | None] = []
    last = -1
    for p, size in enumerate(sizes):
        if size == 1:
            axes.append(None)
            continue
        order = list(cluster.sizes)
        if len(wanted[p]) > 1:
            return None
        ahead = [order.index(d) for later in wanted[p + 1 :] for d in later if d in cluster.sizes]
        limit = min(ahead, default=len(order))
        if wanted[p]:
            (dim,) = wanted[p]
            if cluster.sizes.get(dim) != size:
                return None
        else:
            same = [i for i in range(last + 1, limit) if cluster.sizes[order[i]] == size]
            if same:
                dim = order[same[-1]]
            else:
                dim = max(order, default=-1) + 1
                at = limit if p == len(sizes) - 1 or limit < len(order) else last + 1
                order.insert(at, dim)
                cluster.sizes = {d: cluster.sizes.get(d, size) for d in order}
        position = list(cluster.sizes).index(dim)
        if position <= last:
            return None
        last = position
        axes.append(dim)
    return tuple(axes)


class _Reach:
    """Answer which nodes lead to which, with clusters contracted."""

    def __init__(self, graph: ir.Graph) -> None:
        self._nodes = list(graph)
        self._index = {node: i for i, node in enumerate(self._nodes)}
        count = len(self._nodes)
        self._before = [0] * count  # bit masks of the nodes that lead to a node
        self._after = [0] * count
        for i, node in enumerate(self._nodes):
            for x in values_read(node):
                producer = x.producer()
                if producer in self._index:
                    j = self._index[producer]
                    self._before[i] |= self._before[j] | 1 << j
        for i in range(count):
            for j in _bits(self._before[i]):
                self._after[j] |= 1 << i

    def convex(self, nodes: Iterable[ir.Node], node: ir.Node) -> bool:
        """Return whether no path between a node and the others leads through a third."""
        inside = before = after = 0
        for other in nodes:
            i = self._index[other]
            inside |= 1 << i
            before |= self._before[i]
            after |= self._after[i]
        i = self._index[node]
        between = (self._before[i] & after) | (self._after[i] & before)
        return not between & ~inside & ~(1 << i)

    def contract(self, nodes: Iterable[ir.Node]) -> None:
        """Make nodes one: whatever leads to one of them leads to all."""
        inside = before = after = 0
        for node in nodes:
            i = self._index[node]
            inside |= 1 << i
            before |= self._before[i]
            after |= self._after[i]
        before, after = before & ~inside, after & ~inside
        for i in _bits(before | inside):
            self._after[i] |= after | inside & ~(1 << i)
        for i in _bits(after | inside):
            self._before[i] |= before | inside & ~(1 << i)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
