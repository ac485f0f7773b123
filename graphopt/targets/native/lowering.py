"""Lower a graph to the machine: products, pools, clusters of nodes and scans become kernels of a compiled library."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.blocks import gather_blocks
from graphopt.graph.checking import KERNELS
from graphopt.graph.metadata import forget_description
from graphopt.graph.rewriting import Pass, remove_unused_nodes
from graphopt.graph.shapes import infer_anew, is_inferred
from graphopt.graph.sizes import unify_sizes
from graphopt.graph.storage import Weights, identity_of, skeleton
from graphopt.graph.strictness import check_remembered, compares_now
from graphopt.graph.values import like, swap
from graphopt.targets.bfloat16 import compute_bfloat16_in_float32, is_of_bfloat16
from graphopt.targets.native.attention import attention_kernels
from graphopt.targets.native.cache import cache_folder, own_version, read_cached, read_model, trim, write_cached
from graphopt.targets.native.clusters import find_clusters
from graphopt.targets.native.convolutions import convolution_kernel, example_gradient_kernel
from graphopt.targets.native.forms import NodeForms, is_well_formed
from graphopt.targets.native.kernels import cluster_kernel, has_large_state, last_cache_bytes
from graphopt.targets.native.library import Kernel, Replacement, objects, parts, parts_for, source
from graphopt.targets.native.new_state import add_state_check, write_in_place
from graphopt.targets.native.normalizations import write_out_normalizations
from graphopt.targets.native.pools import pool_gradient_kernel, pool_kernel
from graphopt.targets.native.precision import chosen_precision, multiplies_bfloat16, pieces_for
from graphopt.targets.native.products import accepts_product, product_kernel, separate_biases
from graphopt.targets.native.rates import kept_rates, measured_rates
from graphopt.targets.native.rounding import write_out_rounding
from graphopt.targets.native.scans import bodies, move_into_bodies, note_rows, scan_kernel
from graphopt.targets.native.sizes import read_shapes_early
from graphopt.targets.native.toolchain import (
    PART,
    PROCESSORS,
    Objects,
    are_compiled,
    build,
    code_digest,
    compiler,
)
from graphopt.targets.portable.portable import scatter_by_element
from graphopt.targets.updates import fold_updates

KERNEL_KINDS = ("kernels", "products", "convolutions", "pools", "scans", "attention")
_BY_NODE = (
    ("pools", pool_gradient_kernel),  # which has pools inside
    ("pools", pool_kernel),
    ("convolutions", example_gradient_kernel),  # which has a convolution inside
    ("convolutions", convolution_kernel),
    ("products", product_kernel),
)


@dataclass
class Plan:
    """Hold a graph with calls of kernels, and the kernels."""

    model: ir.Model
    check: str | None = None  # the name of an output that is finite if the new state is, or None
    calls: dict[ir.Node, Kernel] = field(default_factory=dict)  # the nodes that call kernels
    counts: Counter[str] = field(default_factory=Counter)  # the number of calls, by lowering
    wide: list[ir.Node] = field(default_factory=list)  # of bfloat16, which run in float32

    @property
    def kernels(self) -> list[Kernel]:
        """Return the kernels, in the order in which they were made."""
        return list(self.calls.values())


@dataclass
class Lowered:
    """Hold a lowered graph, and the library that has its kernels."""

    model: ir.Model
    library: Path
    check: str | None  # the name of an output that is finite if the new state is, or None
    shared: list[str]  # the names of the state that may share a buffer with its next value
    digest: str  # a hash of the graph that was lowered, and of all that its kernels depend on


@dataclass(frozen=True)
class KernelOptions:
    """Hold what a lowered graph depends on in addition to the graph."""

    without: tuple[str, ...]  # the lowerings to leave out, by name
    threads: int  # of a session
    in_place: bool  # let kernels write the new state over the old one
    pieces: int  # as `source` takes them
    rates: tuple[float, ...] | None  # as `source` takes them; None: a convolution measures them; none: those of rates.h


def lower_to_kernels(
    model: ir.Model,
    without: Sequence[str] = (),
    threads: int | None = None,
    *,
    in_place: bool = False,
    precision: str | None = None,
    measures: bool = True,
) -> Lowered | None:
    """Return a copy of a graph with kernels in place of nodes; None if nothing changes.

    The cache folder keeps lowered graphs, without weights, so that a graph is lowered once.

    Args:
        without: the lowerings to leave out, by name.
        threads: the number of threads of a session; by default, one for each processor.
        in_place: let kernels write the new state over the old one.
        precision: of matrix products and convolutions: `highest`, `high` or `medium`; by default, the environment's.
            Without instructions for it, it is `highest`.
        measures: choose how to convolve bfloat16 numbers by rates that are measured on this machine, not by fixed ones.

    Raises:
        GraphoptError: there is no compiler, it fails, or the cache folder cannot be written to.
    """
    if set(KERNEL_KINDS) <= set(without):
        return None
    pieces = pieces_for(chosen_precision(precision))
    rates = kept_rates() if pieces and measures else ()
    options = KernelOptions(tuple(sorted(without)), threads_of(threads), in_place, pieces, rates)
    digest, weights = _digest_of(identity_of(model), options)
    kept = _kept(digest, weights)
    if kept is None or compares_now(digest):
        lowered = _lower_as(digest, model, options)
        if kept is not None:
            _check_kept(kept, lowered)
        return lowered
    return kept


def threads_of(chosen: int | None) -> int:
    """Return the number of threads of a session; by default, one for each processor."""
    return chosen or os.cpu_count() or 1


def lacks_parts(model: ir.Model, precision: str) -> bool:
    """Return whether the parts of libraries that a graph probably needs are still to be compiled, which takes long."""
    return compiler() is not None and not are_compiled(likely_parts(model, pieces_for(precision)))


def likely_parts(model: ir.Model, pieces: int) -> list[str]:
    """Return the C sources that all libraries share, as far as this graph needs them, by its operators and types."""
    nodes = [*model.graph.all_nodes()]
    is_low = pieces > 0 or (multiplies_bfloat16() and any(map(is_of_bfloat16, nodes)))
    return parts_for({node.op_type for node in nodes}, is_low=is_low)


def kept_kernels(
    model: ir.Model, threads: int, precision: str, identity: tuple[bytes, Weights] | None = None
) -> Lowered | None:
    """Return what `lower_to_kernels` has left in the cache for a graph; None if it is not there.

    Args:
        identity: what `identity_of` returns for the graph, if that is known.
    """
    pieces = pieces_for(precision)
    options = KernelOptions((), threads, False, pieces, kept_rates() if pieces else ())
    digest, weights = _digest_of(identity or identity_of(model), options)
    kept = _kept(digest, weights)
    if kept is not None and compares_now(digest):
        _check_kept(kept, _lower_as(digest, model, options))
    return kept


def _check_kept(kept: Lowered, lowered: Lowered | None) -> None:
    """Raise an error unless a graph that the cache keeps equals the one that is lowered anew."""
    what = "the graph with kernels in the cache"
    if lowered is not None:
        check_remembered(what, kept.model, lowered.model)
    if lowered is None or replace(kept, model=lowered.model) != lowered:
        raise GraphoptError(
            f"{what}: expected the kernels that are made anew, found others, in {kept.library.name}: please report it"
        )


def _digest_of(identity: tuple[bytes, Weights], options: KernelOptions) -> tuple[str, Weights]:
    """Return the digest by which the cache knows a lowered graph, and the weights that it does not keep."""
    content, weights = identity
    machine = f"{multiplies_bfloat16()} {last_cache_bytes()}"
    return code_digest(content.hex(), repr(options), machine, own_version()), weights


def _lower_as(digest: str, model: ir.Model, options: KernelOptions) -> Lowered | None:
    """Lower a graph as `lower_to_kernels` does, and keep it by a digest, or by another one if rates are measured."""
    try:
        with Objects() as begun:
            if compiler() is not None:
                begun.add(likely_parts(model, options.pieces), PART)  # compiled while this plans
            result = plan(model, options.without)
            if not result.calls:
                return None
            forget_description(result.model)
            shared, variants = write_in_place(result.model, result.calls) if options.in_place else ([], [])
            kernels = [*result.kernels, *variants]
            shared_parts, own_objects = parts(kernels, options.pieces), objects(kernels, PROCESSORS)
            begun.add(own_objects)
            convolves = result.counts["convolutions"] > 0
            if convolves and options.rates is None:
                options = replace(options, rates=measured_rates(begun))
                digest, _ = _digest_of(identity_of(model), options)
            code = source(kernels, options.threads, options.pieces, options.rates if convolves else None)
            library = build(code, own_objects, shared_parts, begun)
        content, _ = skeleton(result.model)
        note = {"library": library.name, "check": result.check, "shared": shared}
        write_cached(f"{digest}.onnx", content)
        write_cached(f"{digest}.json", json.dumps(note).encode())
        trim()
    except OSError as error:
        raise GraphoptError(f"native: expected a cache folder to write to, found none: {error}") from error
    return Lowered(result.model, library, result.check, shared, digest)


def _kept(digest: str, weights: Weights) -> Lowered | None:
    """Return a graph that was lowered before, with its weights; None if the cache lacks it or is damaged."""
    model, text = read_model(f"{digest}.onnx", weights), read_cached(f"{digest}.json")
    note = json.loads(text) if text else {}
    if model is None or not note or read_cached(note["library"]) is None:
        return None
    return Lowered(model, cache_folder() / note["library"], note["check"], note["shared"], digest)


def plan(model: ir.Model, without: Sequence[str] = ()) -> Plan:
    """Return a copy of a graph with kernels in place of nodes; compile nothing.

    Args:
        without: the lowerings to leave out, by name.
    """
    return place_kernels(model.clone(), without)


def place_kernels(model: ir.Model, without: Sequence[str] = ()) -> Plan:
    """Put kernels in place of the nodes of a graph, as `plan` does in a copy."""
    result, lowerings = Plan(model), set(KERNEL_KINDS) - set(without)
    if not is_well_formed(model):  # ONNX Runtime says what is wrong
        return result
    infer_anew(model)
    fold_updates(model, leave_out=["fold_momentum_into_gemm"])  # kernels compute no beta C
    gather_blocks(model)
    scatter_by_element(model)
    if not is_inferred(model):
        infer_anew(model)
    forms = NodeForms(dict(model.opset_imports))
    unify_sizes(model)
    separate_biases(model)
    result.wide = compute_bfloat16_in_float32(model, functools.partial(_computes, forms=forms, lowerings=lowerings))
    if "kernels" in lowerings:
        write_out_rounding(model)
        write_out_normalizations(model, forms)
        read_shapes_early(model, forms)
        result.check = add_state_check(model, forms)
    if {"kernels", "scans"} <= lowerings:
        move_into_bodies(model.graph, forms)
    is_large = has_large_state(model)
    loops = bodies(model.graph) if "scans" in lowerings else []
    for body in loops:
        note_rows(body, forms)
    for graph in [*model.graphs()]:
        if "attention" in lowerings:
            for node in list(graph):
                for lowered in attention_kernels(node, forms) if node.graph is graph else ():
                    _replace(result, "attention", graph, *lowered)
            remove_unused_nodes(graph)
            graph.sort()
        for kind, kernel_of in _BY_NODE:
            if kind in lowerings:
                _lower_nodes(result, kind, graph, functools.partial(kernel_of, forms=forms))
        if "kernels" in lowerings:
            places = {node: i for i, node in enumerate(graph)}
            for cluster in find_clusters(graph, forms, least=1 if graph in loops else 2):
                cluster.nodes = {node: cluster.nodes[node] for node in sorted(cluster.nodes, key=places.__getitem__)}
                _replace(result, "kernels", graph, cluster_kernel(cluster, is_large=is_large), list(cluster.nodes))
            graph.sort()
    for graph in [*reversed(loops), model.graph] if "scans" in lowerings else []:
        _lower_nodes(result, "scans", graph, functools.partial(scan_kernel, forms=forms, calls=result.calls))
    remove_unused_nodes(model.graph)
    if result.calls:
        model.opset_imports[KERNELS] = 1
    return result


def _computes(node: ir.Node, forms: NodeForms, lowerings: Collection[str]) -> bool:
    """Return whether kernels compute a node in its own types."""
    if forms.of(node) is not None:
        return "kernels" in lowerings
    return "products" in lowerings and accepts_product(node, forms)


@dataclass(frozen=True)
class Kernels(Pass):
    """Put calls of kernels in place of nodes. Only an executor can run them, which compiles them, too.

    Args:
        leave_out: the lowerings to leave out: `attention`, `convolutions`, `products`, `pools`, `kernels` (of other
            operators) or `scans`.

    Raises:
        GraphoptError: `leave_out` contains an unknown name.
    """

    leave_out: tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.leave_out:
            if name not in KERNEL_KINDS:
                raise GraphoptError(unknown("lowering", name, KERNEL_KINDS))

    def rewrite(self, model: ir.Model) -> None:
        place_kernels(model, self.leave_out)


def _lower_nodes(
    result: Plan, lowering: str, graph: ir.Graph, kernel_of: Callable[[ir.Node], Replacement | None]
) -> None:
    """Replace nodes, each with those around it that its kernel takes in."""
    for node in list(graph):
        lowered = kernel_of(node) if node.graph is graph else None  # not replaced together with another
        if lowered is not None:
            _replace(result, lowering, graph, *lowered)
    remove_unused_nodes(graph)


def _replace(result: Plan, lowering: str, graph: ir.Graph, kernel: Kernel, nodes: Sequence[ir.Node]) -> None:
    """Put a call of a kernel in place of nodes."""
    node = ir.Node(KERNELS, kernel.name, kernel.inputs, num_outputs=len(kernel.outputs))
    graph.insert_after(nodes[-1], node)
    for old, new in zip(kernel.outputs, node.outputs, strict=True):
        swap(old, like(new, old))
    graph.remove(nodes, safe=True)
    result.calls[node] = kernel
    result.counts[lowering] += 1
