"""Lower a graph to the machine: clusters of nodes become kernels of a compiled library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from graphopt.graph.metadata import copy
from graphopt.graph.values import like
from graphopt.native.clusters import find_clusters
from graphopt.native.kernels import Kernel, Writer, library
from graphopt.native.toolchain import build

DOMAIN = "ai.graphopt"
LOWERINGS = ("kernels",)


@dataclass
class Lowered:
    """Hold a graph with kernels, and the library that has them."""

    model: ir.Model
    library: Path
    kernels: list[Kernel]

    @property
    def digest(self) -> str:
        """Return a hash of the graph and its kernels."""
        return hashlib.sha256(ir.to_proto(self.model).SerializeToString()).hexdigest()


def lower(model: ir.Model, without: Sequence[str] = ()) -> Lowered | None:
    """Return a copy of a graph with clusters replaced by kernels; None if nothing changes.

    Args:
        without: the lowerings to leave out, by name.

    Raises:
        GraphoptError: there is no compiler, or it fails.
    """
    if "kernels" in without:
        return None
    model = model.clone()
    kernels: list[Kernel] = []
    for graph in [*model.graphs()]:
        versions = dict(model.opset_imports)
        for cluster in find_clusters(graph, versions):
            in_order = [node for node in graph if node in cluster.nodes]
            cluster.nodes = {node: cluster.nodes[node] for node in in_order}
            kernel = Writer(cluster, versions).kernel()
            _replace(graph, cluster.nodes, kernel)
            kernels.append(kernel)
        graph.sort()
    if not kernels:
        return None
    model.opset_imports[DOMAIN] = 1
    return Lowered(model, build(library(kernels)), kernels)


def _replace(graph: ir.Graph, nodes: Mapping[ir.Node, object], kernel: Kernel) -> None:
    outputs = [like(ir.Value(name=y.name), y) for y in kernel.outputs]
    node = ir.Node(DOMAIN, kernel.name, list(kernel.inputs), outputs=outputs)
    last = list(nodes)[-1]
    graph.insert_after(last, node)
    for old, new in zip(kernel.outputs, outputs, strict=True):
        copy(old, new)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(list(nodes), safe=True)
