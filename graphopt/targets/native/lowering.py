"""Lower a graph to the machine: products, clusters of nodes and scans become kernels of a compiled library."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.checking import KERNELS
from graphopt.graph.metadata import copy
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.shapes import infer_anew
from graphopt.graph.storage import skeleton
from graphopt.graph.values import like
from graphopt.targets.native.attributes import is_well_formed
from graphopt.targets.native.bodies import bodies, move_into_bodies, note_rows
from graphopt.targets.native.cache import cache_folder, keep, kept
from graphopt.targets.native.clusters import find_clusters
from graphopt.targets.native.convolutions import convolution_kernel
from graphopt.targets.native.in_place import write_in_place
from graphopt.targets.native.kernels import Kernel, Writer
from graphopt.targets.native.library import parts, source
from graphopt.targets.native.products import product_kernel
from graphopt.targets.native.rewrites import undo_fusions
from graphopt.targets.native.scans import scan_kernel
from graphopt.targets.native.sizes import unify_sizes
from graphopt.targets.native.state_check import add_state_check
from graphopt.targets.native.toolchain import build, digest_of

LOWERINGS = ("kernels", "products", "convolutions", "scans")


@dataclass
class Plan:
    """Hold a graph with calls of kernels, and the kernels.

    Args:
        clusters: for each kernel of a cluster, the number of nodes that it replaces.
        products: the number of matrix products.
        convolutions: the number of convolutions.
        scans: the number of scans.
        check: the name of an output that is finite if the new state is, or None.
        calls: the nodes that call kernels.
    """

    model: ir.Model
    kernels: list[Kernel]
    clusters: list[int]
    products: int
    convolutions: int
    scans: int
    check: str | None
    calls: dict[ir.Node, Kernel] = field(default_factory=dict)


@dataclass
class Lowered:
    """Hold a lowered graph, and the library that has its kernels.

    Args:
        check: the name of an output that is finite if the new state is, or None.
        shared: the names of the state that may share a buffer with its next value.
        digest: a hash of the graph that was lowered, and of all that its kernels depend on.
    """

    model: ir.Model
    library: Path
    check: str | None
    shared: list[str]
    digest: str


def lower(
    model: ir.Model, without: Sequence[str] = (), threads: int | None = None, *, in_place: bool = False
) -> Lowered | None:
    """Return a copy of a graph with kernels in place of nodes; None if nothing changes.

    The cache folder keeps lowered graphs, without weights, so that a graph is lowered once.

    Args:
        without: the lowerings to leave out, by name.
        threads: the number of threads of a session; by default, one for each processor.
        in_place: let kernels write the new state over the old one.

    Raises:
        GraphoptError: there is no compiler, it fails, or the cache folder cannot be written to.
    """
    if set(LOWERINGS) <= set(without):
        return None
    threads = threads or os.cpu_count() or 1
    content, weights = skeleton(model)
    digest = digest_of(content.hex(), *sorted(without), str(threads), str(in_place), *_code())
    try:
        return _kept(digest, weights) or _lowered(model, without, threads, in_place, digest)
    except OSError as error:
        raise GraphoptError(f"native: expected a cache folder to write to, found none: {error}") from error


def _lowered(
    model: ir.Model, without: Sequence[str], threads: int, in_place: bool, digest: str
) -> Lowered | None:
    """Lower a graph, and keep the result under its digest."""
    found = plan(model, without)
    if not found.kernels:
        return None
    shared, variants = write_in_place(found.model, found.calls) if in_place else ([], [])
    kernels = [*found.kernels, *variants]
    library = build(source(kernels, threads), parts(kernels))
    content, _ = skeleton(found.model)
    note = json.dumps({"library": library.name, "check": found.check, "shared": shared}).encode()
    keep(f"{digest}.onnx", content)
    keep(f"{digest}.json", note)
    return Lowered(found.model, library, found.check, shared, digest)


def _kept(digest: str, weights: Mapping[str, ir.TensorProtocol]) -> Lowered | None:
    """Return a graph that was lowered before, with its weights; None if the cache lacks it or is damaged."""
    note, content = kept(f"{digest}.json"), kept(f"{digest}.onnx")
    if note is None or content is None:
        return None
    found = json.loads(note)
    if kept(found["library"]) is None:
        return None
    model = ir.from_proto(onnx.load_model_from_string(content))
    for name, tensor in weights.items():
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = tensor
    return Lowered(model, cache_folder() / found["library"], found["check"], found["shared"], digest)


def sources() -> list[Path]:
    """Return the files of the code that lowers graphs, and of all that it imports from graphopt."""
    package = Path(__file__).parents[2]
    rooms = [path for room in ("graph", "targets/native") for path in package.joinpath(room).rglob("*.py")]
    return sorted([*rooms, *(package / f"{name}.py" for name in ("errors", "files", "intervals"))])


@functools.cache
def _code() -> list[str]:
    """Return what decides how a graph is lowered: the code, and the versions of the packages that it uses."""
    versions = [f"{name} {metadata.version(name)}" for name in ("onnx", "onnx_ir", "onnxscript", "numpy")]
    return [*versions, *(path.read_text() for path in sources())]


def plan(model: ir.Model, without: Sequence[str] = ()) -> Plan:
    """Return a copy of a graph with kernels in place of nodes; compile nothing.

    Args:
        without: the lowerings to leave out, by name.
    """
    model = model.clone()
    if not is_well_formed(model):  # ONNX Runtime says what is wrong
        return Plan(model, [], [], 0, 0, 0, None)
    infer_anew(model)
    unify_sizes(model, {str(dim) for x in model.graph.inputs for dim in x.shape or ()})
    if "kernels" not in without:
        undo_fusions(model)
    found = Plan(model, [], [], 0, 0, 0, None if "kernels" in without else add_state_check(model))
    versions = dict(model.opset_imports)
    if not {"kernels", "scans"} & set(without):
        move_into_bodies(model.graph, versions)
    loops = [] if "scans" in without else bodies(model.graph)
    for body in loops:
        note_rows(body, versions)
    for graph in [*model.graphs()]:
        if "convolutions" not in without:
            found.convolutions += _lower_nodes(found, graph, versions, convolution_kernel)
        if "products" not in without:
            found.products += _lower_nodes(found, graph, versions, product_kernel)
        if "kernels" not in without:
            _lower_clusters(found, graph, versions, least=1 if graph in loops else 2)
    for graph in [*reversed(loops), model.graph] if "scans" not in without else []:
        found.scans += _lower_nodes(found, graph, versions, functools.partial(scan_kernel, calls=found.calls))
    remove_unused_nodes(model.graph)
    if found.kernels:
        model.opset_imports[KERNELS] = 1
    return found


def _lower_nodes(
    found: Plan,
    graph: ir.Graph,
    versions: dict[str, int],
    kernel_of: Callable[[ir.Node, dict[str, int]], tuple[Kernel, list[ir.Node]] | None],
) -> int:
    """Replace nodes, each with those around it that its kernel takes in, and return the number of kernels."""
    before = len(found.kernels)
    for node in list(graph):
        if node.graph is not graph:
            continue  # replaced together with another
        lowered = kernel_of(node, versions)
        if lowered is not None:
            kernel, nodes = lowered
            _replace(found, graph, nodes, kernel)
    remove_unused_nodes(graph)
    return len(found.kernels) - before


def _lower_clusters(found: Plan, graph: ir.Graph, versions: dict[str, int], least: int) -> None:
    """Replace clusters of at least so many nodes."""
    for cluster in find_clusters(graph, versions, least):
        cluster.nodes = {node: cluster.nodes[node] for node in graph if node in cluster.nodes}
        kernel = Writer(cluster).kernel()
        _replace(found, graph, cluster.nodes, kernel)
        found.clusters.append(len(cluster.nodes))
    graph.sort()


def _replace(found: Plan, graph: ir.Graph, nodes: Iterable[ir.Node], kernel: Kernel) -> None:
    """Put a call of a kernel in place of nodes."""
    nodes = list(nodes)
    outputs = [like(ir.Value(name=y.name), y) for y in kernel.outputs]
    node = ir.Node(KERNELS, kernel.name, list(kernel.inputs), outputs=outputs)
    graph.insert_after(nodes[-1], node)
    for old, new in zip(kernel.outputs, outputs, strict=True):
        copy(old, new)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(nodes, safe=True)
    found.kernels.append(kernel)
    found.calls[node] = kernel
