"""Find clusters: connected nodes that one loop over rows and columns computes.

A cluster has an iteration space. Each of its values varies over some of the dimensions, in their order. The last
dimensions are the columns, or those before and after the rows: a row is then a channel. A value varies over all
dimensions, over only the rows (the result of a reduction over columns), or it is a total: the result of any other
reduction, which nothing in the cluster reads.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from graphopt.graph.sizes import has_sizes, sizes_of
from graphopt.targets.bfloat16 import is_of_bfloat16
from graphopt.targets.native.forms import (
    NodeForm,
    NodeForms,
    NodeKind,
    is_scalar,
    operands_of,
    rank_of,
)
from graphopt.targets.native.reach import Reach
from graphopt.targets.native.space import Axes, Space, placed, varying
from graphopt.targets.portable.form import given

_MOST_NODES = 64  # of a cluster: the time to find and to compile it grows faster than their number
_TYPICAL = 32  # the size of a symbolic dimension, where memory traffic is estimated
_LEAST_IN_A_PLANE = 16  # elements that a channel has at least in one piece: a vector


@dataclass
class Cluster:
    """Hold nodes with the iteration space that computes them."""

    nodes: dict[ir.Node, NodeForm] = field(default_factory=dict)
    space: Space = field(default_factory=Space)
    axes: dict[ir.Value, Axes] = field(default_factory=dict)  # of the values that the nodes produce
    read: dict[tuple[ir.Node, int], Axes] = field(default_factory=dict)  # of operands, by node and index
    operands: dict[ir.Value, Axes] = field(default_factory=dict)  # of operands, by value
    columns: frozenset[int] = frozenset()  # that reductions reduce whose results are read inside
    totals: dict[ir.Value, Axes] = field(default_factory=dict)  # the axes of what totals are sums of

    def known(self) -> Mapping[ir.Value, Axes]:
        """Return the axes of all values that the cluster reads or produces."""
        return ChainMap(self.axes, self.operands)

    def agrees(self, node: ir.Node) -> bool:
        """Return whether what reads a value that a node reads or produces says of its axes what its producer says."""
        read = [(node, i) for i in range(len(node.inputs))]
        read += [(use.node, use.idx) for y in node.outputs for use in y.uses()]
        pairs = ((reader.inputs[i], self.read.get((reader, i))) for reader, i in read)
        return all(x is None or axes is None or self.axes.get(x, axes) == axes for x, axes in pairs)

    def has_sizes(self) -> bool:
        """Return whether what the cluster reads from outside says the size of each of its dimensions."""
        sizes = {size for x in _read(self.nodes) for size in sizes_of(x)}
        return all(isinstance(size, int) or size in sizes for size in self.space.sizes.values())

    @property
    def has_channels(self) -> bool:
        """Return whether columns come before and after the rows."""
        return self.surrounds(self.columns)

    def surrounds(self, columns: Collection[int]) -> bool:
        """Return whether dimensions come before and after all others, and enough of their elements lie together."""
        order = self.space.dimensions
        rows = [i for i, d in enumerate(order) if d not in columns]
        if not rows or rows[0] == 0 or rows[-1] - rows[0] >= len(rows):
            return False
        plane = [self.space.sizes[d] for d in order[rows[-1] + 1 :]]
        known = math.prod(size for size in plane if isinstance(size, int))
        return bool(plane) and (known >= _LEAST_IN_A_PLANE or any(isinstance(size, str) for size in plane))

    def split(self) -> tuple[list[int], list[int]] | None:
        """Return the dimensions that are rows, the fewest that serve all values, and columns; None if none serve."""
        order = self.space.dimensions
        if not order:
            return [], []
        if self.columns:
            choices = [([d for d in order if d not in self.columns], [d for d in order if d in self.columns])]
        else:
            choices = [(order[:i], order[i:]) for i in range(len(order))]
        return next((choice for choice in choices if self._serves(*choice)), None)

    def _serves(self, rows: Sequence[int], columns: Sequence[int]) -> bool:
        """Return whether all values vary as they should, if these dimensions are rows and columns."""
        outer, inner = set(rows), set(columns)
        results = {*map(varying, {axes for y, axes in self.axes.items() if y not in self.totals})}
        others = {*map(varying, {*self.read.values(), *(self.axes[y] for y in self.totals)})}
        summed = {*map(varying, {*self.totals.values()})}
        has_channels = self.space.dimensions != [*rows, *columns]
        return (
            (not has_channels or (self.surrounds(columns) and not any(inner & {*self.axes[y]} for y in self.totals)))
            and all(inner.issubset(axes) or inner.isdisjoint(axes) for axes in results | others)
            and all({*axes} in (outer | inner, outer, set()) for axes in results)
            # without columns of their own, rows may be taken twice
            and all({*axes} == outer | inner or (self.columns and {*axes} == outer) for axes in summed)
        )


def find_clusters(graph: ir.Graph, forms: NodeForms, least: int = 2) -> list[Cluster]:
    """Return clusters of a graph's nodes; each can be replaced by one node without a cycle.

    Clusters grow from the first node to the last, or from the last to the first: whichever moves less memory. What only
    the backward pass reads is better computed there; what both passes read, in the forward pass. Reductions of channels
    come first, before other clusters take their small results.

    Args:
        least: the number of nodes that a cluster has at least, without views. One is enough if ONNX Runtime has
            no kernel for it, or a slow one.
    """
    computed = {node: form for node in graph if (form := forms.of(node)) is not None}
    channels = [node for node, form in computed.items() if _is_of_channels(node, form)]
    orders = ([*channels, *order] for order in (computed, reversed(computed)))
    choices = [_grown_from(seeds, graph, dict(computed), least) for seeds in orders]
    return min(choices, key=lambda clusters: _traffic(clusters, computed))


def _grown_from(seeds: Sequence[ir.Node], graph: ir.Graph, free: dict[ir.Node, NodeForm], least: int) -> list[Cluster]:
    """Return the clusters that grow from nodes in some order."""
    reach, clusters = Reach(graph, free), []
    for seed in seeds:
        first = _with(Cluster(), seed, free[seed]) if seed in free else None
        if first is None:
            continue
        cluster = _without_copies(_grown(first, free, reach), free)
        count = sum(form.kind is not NodeKind.VIEW for form in cluster.nodes.values())
        if count >= (1 if any(map(_needs_kernel, cluster.nodes)) else least) and cluster.has_sizes():
            clusters.append(cluster)
            reach.contract(cluster.nodes)
            for node in cluster.nodes:
                del free[node]
    return clusters


def _needs_kernel(node: ir.Node) -> bool:
    """Return whether ONNX Runtime has no kernel for a node, or one that takes several times as long."""
    return is_of_bfloat16(node) or (node.op_type == "ReduceSumSquare" and node.domain == "")


def _traffic(clusters: Sequence[Cluster], forms: Mapping[ir.Node, NodeForm]) -> int:
    """Return how many elements clusters, and nodes in none of them, read and write; a symbol counts as `_TYPICAL`."""
    groups = [cluster.nodes for cluster in clusters]
    others = {node: form for node, form in forms.items() if form.kind is not NodeKind.VIEW}
    groups += [{node: others[node]} for node in others.keys() - {node for group in groups for node in group}]
    return sum(
        _elements(x)
        for nodes in groups
        for x in [*_read(nodes), *(y for node in nodes for y in node.outputs if leaves(y, nodes))]
    )


def _read(nodes: Mapping[ir.Node, NodeForm]) -> set[ir.Value]:
    """Return the values that nodes read and do not produce."""
    read = {x for node, form in nodes.items() for x in operands_of(node, form).values()}
    return read - {y for node in nodes for y in node.outputs}


def leaves(y: ir.Value, nodes: Collection[ir.Node]) -> bool:
    """Return whether something else than some nodes reads a value."""
    return y.is_graph_output() or any(use.node not in nodes for use in y.uses())


def _grown(cluster: Cluster, free: Mapping[ir.Node, NodeForm], reach: Reach) -> Cluster:
    """Return a cluster with all neighbors that fit, one by one."""
    refused: dict[ir.Node, int] = {}  # by the size of the cluster that refused it
    while len(cluster.nodes) < _MOST_NODES:
        for node in _neighbors(cluster):
            if node not in free or refused.get(node) == len(cluster.nodes):
                continue
            grown = _with(cluster, node, free[node]) if reach.is_convex(cluster.nodes, node) else None
            if grown is not None:
                cluster = grown
                break
            refused[node] = len(cluster.nodes)
        else:
            break
    return cluster


def _without_copies(cluster: Cluster, free: Collection[ir.Node]) -> Cluster:
    """Leave out of channels what only others read, and can compute from a tensor that they could read in its place."""
    nodes = dict(cluster.nodes)

    def is_copy(node: ir.Node) -> bool:
        y, known = node.outputs[0], cluster.known()
        operands = {x for x in operands_of(node, nodes[node]).values() if len(varying(known[x])) > 1}
        return (
            nodes[node].kind is NodeKind.MAP
            and not y.is_graph_output()
            and all(use.node in free and use.node not in nodes for use in y.uses())
            and len(operands) == 1
            and all(x.producer() not in nodes or leaves(x, nodes) for x in operands)
        )

    while cluster.has_channels and (copy := next(filter(is_copy, nodes), None)):
        del nodes[copy]
    axes = {y: axes for y, axes in cluster.axes.items() if y.producer() in nodes}
    return replace(cluster, nodes=nodes, axes=axes)


def _neighbors(cluster: Cluster) -> list[ir.Node]:
    """Return the nodes that read or produce a value of the cluster, or read the same large value."""
    nodes = [use.node for node in cluster.nodes for y in node.outputs for use in y.uses()]
    for node, form in cluster.nodes.items():
        for x in operands_of(node, form).values():
            if (producer := x.producer()) is not None:
                nodes.append(producer)
            if x not in cluster.axes and not is_scalar(x):
                nodes += [use.node for use in x.uses()]
    return [node for node in dict.fromkeys(nodes) if node not in cluster.nodes]


def _with(cluster: Cluster, node: ir.Node, form: NodeForm) -> Cluster | None:
    """Return the cluster with one more node; None if one loop cannot compute both."""
    operands = operands_of(node, form).values()
    is_tensor = not all(map(is_scalar, [*operands, *node.outputs]))
    if cluster.nodes and is_tensor != bool(cluster.space.dimensions):
        return None  # numbers of the whole step have kernels of their own: tensors do not wait for each other
    space = Space(dict(cluster.space.sizes))
    is_free = not any(x in cluster.totals for x in operands)
    placement = placed(space, node, form, cluster.known(), cluster.axes) if is_free else None
    if placement is None:
        return None
    nodes, axes = {**cluster.nodes, node: form}, {**cluster.axes, **placement[1]}
    read = cluster.read | {(node, i): each for i, each in placement[0].items()}
    own = {x: each for i, each in placement[0].items() if (x := node.inputs[i]) is not None}
    grown = Cluster(nodes, space, axes, read, cluster.operands | own, cluster.columns, dict(cluster.totals))
    if not grown.agrees(node) or (form.reduced and not _reduce(grown, node, form)):
        return None
    return grown if grown.split() is not None else None


def _reduce(cluster: Cluster, node: ir.Node, form: NodeForm) -> bool:
    """Make what a node reduces the cluster's columns, or its output a total; return whether either is possible."""
    source = cluster.read[node, 0]
    reduced = frozenset(varying([source[p] for p in form.reduced]))
    if not reduced:
        return form.kind is NodeKind.REDUCE  # of one element, it is elementwise
    order = cluster.space.dimensions
    may_be_columns = cluster.columns in (frozenset(), reduced) and len(reduced) < len(order)
    if may_be_columns and set(varying(source)) == set(order):
        are_last = set(order[len(order) - len(reduced) :]) == reduced
        if are_last or (cluster.surrounds(reduced) and (cluster.columns or _returns(node.outputs[0], node))):
            cluster.columns = reduced
            return True
    y = node.outputs[0]
    if form.kind is NodeKind.ROWS or any(use.node in cluster.nodes for use in y.uses()):
        return False
    cluster.totals[y] = source
    return True


def _is_of_channels(node: ir.Node, form: NodeForm) -> bool:
    """Return whether a node reduces the axes before and after channels, which something as large reads again."""
    x, last = node.inputs[0], max(form.reduced, default=0)
    if form.kind is not NodeKind.REDUCE or x is None or min(form.reduced, default=1) > 0:
        return False
    return last + 1 == rank_of(x) and len(form.reduced) <= last and _returns(node.outputs[0], node)


def _returns(y: ir.Value, reduction: ir.Node, steps: int = 16) -> bool:
    """Return whether something as large as what a node reduces is computed from its result, in a few small steps."""
    x = given(reduction.inputs[0])
    for use in y.uses() if steps else ():
        for z in use.node.outputs:
            if not has_sizes(z):
                continue
            if sizes_of(z) == sizes_of(x):
                return True
            if _elements(z) <= _elements(y) and _returns(z, reduction, steps - 1):
                return True
    return False


def _elements(x: ir.Value) -> int:
    """Return the number of a value's elements; a symbol counts as `_TYPICAL`."""
    return math.prod(size if isinstance(size, int) else _TYPICAL for size in sizes_of(x))
