"""Find clusters: connected nodes that one loop over rows and columns computes.

A cluster has an iteration space. Each of its values varies over some of the dimensions, in their order. The last
dimensions are the columns. A value varies over all dimensions, over the rows alone (what a reduction over columns
gives), or it is a total: the result of any other reduction, which nothing in the cluster reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphopt.targets.native.forms import Form, form_of, is_scalar, operands_of, sizes_of
from graphopt.targets.native.reach import Reach
from graphopt.targets.native.space import Axes, Placement, Space, placed

MOST_NODES = 64  # of a cluster: the time to find and to compile it grows faster than their number
TYPICAL = 32  # the size of a symbolic dimension, where memory traffic is estimated


@dataclass
class Cluster:
    """Hold nodes with the iteration space that computes them.

    Args:
        axes: the axes of the values that the nodes produce.
        read: the axes of operands, by node and index.
        columns: the dimensions that reductions reduce whose results are read inside.
        totals: the axes of what totals are sums of.
    """

    nodes: dict[ir.Node, Form] = field(default_factory=dict)
    space: Space = field(default_factory=Space)
    axes: dict[ir.Value, Axes] = field(default_factory=dict)
    read: dict[tuple[ir.Node, int], Axes] = field(default_factory=dict)
    columns: frozenset[int] = frozenset()
    totals: dict[ir.Value, Axes] = field(default_factory=dict)

    def copy(self) -> Cluster:
        return dataclasses.replace(
            self,
            nodes=dict(self.nodes),
            space=self.space.copy(),
            axes=dict(self.axes),
            read=dict(self.read),
            totals=dict(self.totals),
        )

    def known(self) -> dict[ir.Value, Axes]:
        """Return the axes of all values that the cluster reads or produces."""
        found = {x: axes for (node, i), axes in self.read.items() if (x := node.inputs[i]) is not None}
        return found | self.axes

    def has_sizes(self) -> bool:
        """Return whether what the cluster reads from outside says the size of each of its dimensions."""
        read = {
            x for node, form in self.nodes.items() for x in operands_of(node, form).values()
        } - self.axes.keys()
        return {size for x in read for size in sizes_of(x)} >= {
            size for size in self.space.sizes.values() if isinstance(size, str)
        }

    def is_inside(self, y: ir.Value) -> bool:
        """Return whether a node of the cluster reads a value."""
        return any(use.node in self.nodes for use in y.uses())

    def rows(self) -> int | None:
        """Return how many dimensions are rows, the fewest that serve all values; None if no number does."""
        order = self.space.dimensions
        if not order:
            return 0
        choices = [len(order) - len(self.columns)] if self.columns else range(len(order))
        return next((split for split in choices if self._serves(order[:split], order[split:])), None)

    def _serves(self, rows: Sequence[int], columns: Sequence[int]) -> bool:
        """Return whether all values vary as they should, if these dimensions are rows and columns."""
        outer, inner = set(rows), set(columns)
        everything = outer | inner
        values = [_dimensions(axes) for y, axes in self.axes.items() if y not in self.totals]
        totals = [_dimensions(axes) for y, axes in self.axes.items() if y in self.totals]
        summed = [_dimensions(axes) for axes in self.totals.values()]
        read = [_dimensions(axes) for axes in self.read.values()]
        return (
            (not self.columns or self.columns == inner)
            and all(found >= inner or found.isdisjoint(inner) for found in [*values, *totals, *read])
            and all(found in (everything, outer, set()) for found in values)
            # without columns of their own, rows may be taken twice
            and all(found == everything or (self.columns and found == outer) for found in summed)
        )


def find_clusters(graph: ir.Graph, versions: Mapping[str, int], least: int = 2) -> list[Cluster]:
    """Return clusters of a graph's nodes; each can be replaced by one node without a cycle.

    Clusters grow from the first node to the last, or from the last to the first: whichever moves less memory. What only
    the backward pass reads is better computed there; what both passes read, in the forward pass.

    Args:
        least: the number of nodes that a cluster has at least, without views.
    """
    forms = {node: form for node in graph if (form := form_of(node, versions)) is not None}
    found = [_found(graph, forms, seeds, least) for seeds in (list(forms), list(reversed(forms)))]
    return min(found, key=lambda clusters: _traffic(clusters, forms))


def _found(
    graph: ir.Graph, forms: Mapping[ir.Node, Form], seeds: Sequence[ir.Node], least: int
) -> list[Cluster]:
    """Return the clusters that grow from nodes in some order."""
    free = dict(forms)
    reach = Reach(graph)
    found = []
    for seed in seeds:
        first = _with(Cluster(), seed, free[seed]) if seed in free else None
        if first is None:
            continue
        cluster = _grown(first, free, reach)
        if sum(form.kind != "view" for form in cluster.nodes.values()) >= least and cluster.has_sizes():
            found.append(cluster)
            reach.contract(cluster.nodes)
            for node in cluster.nodes:
                del free[node]
    return found


def _traffic(clusters: Sequence[Cluster], forms: Mapping[ir.Node, Form]) -> int:
    """Return how many elements clusters, and nodes in none of them, read and write; a symbol counts as `TYPICAL`."""
    groups: list[Mapping[ir.Node, Form]] = [cluster.nodes for cluster in clusters]
    inside = {node for group in groups for node in group}
    groups += [{node: form} for node, form in forms.items() if node not in inside and form.kind != "view"]
    total = 0
    for nodes in groups:
        made = {y for node in nodes for y in node.outputs}
        read = {x for node, form in nodes.items() for x in operands_of(node, form).values()} - made
        written = [y for y in made if y.is_graph_output() or any(use.node not in nodes for use in y.uses())]
        for x in [*read, *written]:
            total += math.prod(size if isinstance(size, int) else TYPICAL for size in sizes_of(x))
    return total


def _grown(cluster: Cluster, free: Mapping[ir.Node, Form], reach: Reach) -> Cluster:
    """Return a cluster with all neighbors that fit, one by one."""
    refused: dict[ir.Node, int] = {}  # by the size of the cluster that refused it
    while len(cluster.nodes) < MOST_NODES:
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


def _neighbors(cluster: Cluster) -> list[ir.Node]:
    """Return the nodes that read or produce a value of the cluster, or read the same large value."""
    found: dict[ir.Node, None] = {}
    for node in cluster.nodes:
        for y in node.outputs:
            found.update((use.node, None) for use in y.uses())
    for node, form in cluster.nodes.items():
        for x in operands_of(node, form).values():
            if (producer := x.producer()) is not None:
                found[producer] = None
            if not is_scalar(x) and x not in cluster.axes:
                found.update((use.node, None) for use in x.uses())
    return [node for node in found if node not in cluster.nodes]


def _with(cluster: Cluster, node: ir.Node, form: Form) -> Cluster | None:
    """Return the cluster with one more node; None if one loop cannot compute both."""
    operands = operands_of(node, form)
    if _mixes_sizes(cluster, operands, node) or any(x in cluster.totals for x in operands.values()):
        return None
    grown = cluster.copy()
    placement = placed(grown.space, node, form, cluster.known(), cluster.axes)
    if placement is None or _contradicts(cluster, node, operands, placement):
        return None
    grown.nodes[node] = form
    grown.axes.update(zip(node.outputs, placement.produced, strict=True))
    grown.read.update({(node, i): axes for i, axes in placement.read.items()})
    if form.reduced and not _reduce(grown, node, form, placement):
        return None
    return grown if grown.rows() is not None else None


def _mixes_sizes(cluster: Cluster, operands: Mapping[int, ir.Value], node: ir.Node) -> bool:
    """Return whether either of a cluster and a node has no tensor, only numbers of the whole step.

    They are kernels apart, so that tensors do not wait for each other.
    """
    is_tensor = not all(map(is_scalar, [*operands.values(), *node.outputs]))
    return bool(cluster.nodes) and is_tensor != bool(cluster.space.dimensions)


def _contradicts(
    cluster: Cluster, node: ir.Node, operands: Mapping[int, ir.Value], placement: Placement
) -> bool:
    """Return whether a node's values vary otherwise than the cluster says."""
    if any(cluster.axes.get(operands[i], axes) != axes for i, axes in placement.read.items()):
        return True
    produced = dict(zip(node.outputs, placement.produced, strict=True))
    return any(
        axes != produced.get(x, axes)
        for (reader, i), axes in cluster.read.items()
        if (x := reader.inputs[i]) is not None
    )


def _reduce(cluster: Cluster, node: ir.Node, form: Form, placement: Placement) -> bool:
    """Make what a node reduces the cluster's columns, or its output a total; return whether either is possible."""
    source = placement.read[0]
    reduced = frozenset(d for p in form.reduced if (d := source[p]) is not None)
    if not reduced:
        return form.kind == "reduce"  # of one element, it is elementwise
    order = cluster.space.dimensions
    are_last = set(order[len(order) - len(reduced) :]) == reduced
    may_be_columns = cluster.columns in (frozenset(), reduced) and len(reduced) < len(order)
    if are_last and may_be_columns and _dimensions(source) == set(order):
        cluster.columns = reduced
        return True
    if form.kind == "rows" or cluster.is_inside(node.outputs[0]):
        return False
    cluster.totals[node.outputs[0]] = source
    return True


def _dimensions(axes: Axes) -> set[int]:
    """Return the dimensions that a value varies over."""
    return {d for d in axes if d is not None}
