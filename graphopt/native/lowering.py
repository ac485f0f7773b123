"""Lower a graph to the machine: clusters of nodes become kernels of a compiled library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from graphopt.native.clusters import find_clusters
from graphopt.native.kernels import Kernel, Writer, library
from graphopt.native.toolchain import build

DOMAIN = "graphopt.native"


@dataclass
class Lowered:
    """A graph with kernels, and the library that has them."""

    model: ir.Model
    library: Path
    kernels: list[Kernel]


def lower(model: ir.Model) -> Lowered | None:
    """Return a copy of a graph with clusters replaced by kernels; None if it has no cluster.

    Raises:
        GraphoptError: there is no compiler, or it fails.
    """
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


def _replace(graph: ir.Graph, nodes: dict, kernel: Kernel) -> None:
    outputs = [ir.Value(name=y.name, type=y.type, shape=y.shape) for y in kernel.outputs]
    node = ir.Node(DOMAIN, kernel.name, list(kernel.inputs), outputs=outputs)
    last = list(nodes)[-1]
    graph.insert_after(last, node)
    for old, new in zip(kernel.outputs, outputs, strict=True):
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(list(nodes), safe=True)
