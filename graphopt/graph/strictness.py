"""Check what passes promise and what caches remember, inside `graphopt.testing.strict`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.node_inference import infer_outputs
from graphopt.graph.operators import STANDARD
from graphopt.graph.storage import Content
from graphopt.graph.traversal import all_nodes, is_sorted, subgraphs
from graphopt.graph.values import is_read, may_be_alike, node_label


@dataclass(eq=False)
class _Block:
    """A `with` block.

    Args:
        checks: whether it checks.
        compared: digests of what is remembered and has been made anew.
    """

    checks: bool
    compared: set[str] = field(default_factory=set)


_blocks: list[_Block] = []  # the innermost block last

# Operators of whose outputs ONNX's inference guesses the shape, if it depends on numbers.
_GUESSED = {"Split", "Squeeze", "Unique"}


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Check every pass, and everything that is remembered, in a `with` block.

    - After each pass, nodes are sorted, no two values and no two nodes of a graph have one name, and each node has
      outputs of the types that ONNX infers. `Pass.requires` and `Pass.ensures` are checked without this block, too.
    - A step that returns an onnx_ir result tells whether it has changed the model. Fusions find sorted graphs.
    - Training graphs that estimators share, lowered graphs and compiled kernels are made anew and compared with those
      that are remembered; lowered graphs once in a block, as their digest is of all that makes them.
    - Kernels are compiled before the first step, unless that takes seconds, not beside the first steps.

    The block counts for all threads, but not for other processes. Compiling takes about half as long again.

    Args:
        on: False pauses the checks inside a block.

    Raises:
        GraphoptError: a promise is broken. The message names the pass or the memory, and what was found.

    >>> import graphopt, onnx_ir
    >>> from graphopt.testing import strict
    >>> from graphopt import models
    >>> def in_double(model):
    ...     model.graph.outputs[0].dtype = onnx_ir.DataType.DOUBLE
    >>> try:
    ...     with strict():
    ...         graphopt.Pipeline(precision=in_double)(models.linear((2,), 1))
    ... except graphopt.GraphoptError as error:
    ...     print(str(error)[:48])
    in_double: Gemm node 'node_Gemm_1': expected the
    """
    block = _Block(on)
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)


def is_strict() -> bool:
    """Return whether promises are checked."""
    return bool(_blocks) and _blocks[-1].checks


def compares_now(digest: str) -> bool:
    """Return whether to compare what is remembered by a digest: once in a block that checks, which notes it."""
    is_new = is_strict() and digest not in _blocks[-1].compared
    if is_new:
        _blocks[-1].compared.add(digest)
    return is_new


def run_strictly(step: Callable[[ir.Model], object], model: ir.Model) -> object:
    """Run a step of a pipeline that is no pass of graphopt, check it, and return its result."""
    name, before = getattr(step, "__name__", type(step).__name__), Content.of(model)
    result = step(model)
    if isinstance(result, ir.passes.PassResult):
        changed = Content.of(model) != before
        if result.modified != changed:
            raise GraphoptError(
                f"{name}: expected a result with modified={changed}, found {result.modified}: tell in PassResult "
                "whether the model has changed"
            )
    check_model(model, name)
    return result


def check_model(model: ir.Model, name: str) -> None:
    """Raise an error unless a model is what passes promise to leave; `name` is who has left it."""
    check_sorted(model, name)
    _check_names(model, name)
    _check_types(model, name)


def check_sorted(model: ir.Model, name: str) -> None:
    """Raise an error unless each node comes after the nodes that it reads, also in bodies."""
    if is_sorted(model.graph):
        return
    for graph in model.graphs():
        seen: set[ir.Node] = set()
        for node in graph:
            sources = (x.producer() for x in node.inputs if x is not None)
            for source in sources:
                if source is not None and source.graph is graph and source not in seen:
                    raise GraphoptError(
                        f"{name}: expected sorted nodes, found {node_label(node)} before {node_label(source)}, which "
                        "it reads: end with model.graph.sort()"
                    )
            seen.add(node)
    raise GraphoptError(
        f"{name}: expected sorted nodes, found a body that reads a later node: end with model.graph.sort()"
    )


def _check_names(model: ir.Model, name: str) -> None:
    """Raise an error if a value has no name, or that of a value around it, or nodes of a graph have one name."""

    def check(known: dict[str, object], thing: ir.Value | ir.Node, kind: str) -> None:
        if not thing.name:
            raise GraphoptError(f"{name}: expected names, found a {kind} without one: name it")
        if known.setdefault(thing.name, thing) is not thing:
            raise GraphoptError(
                f"{name}: expected different names, found two {kind}s named {thing.name!r}: name one anew"
            )

    def visit(graph: ir.Graph, around: dict[str, object]) -> None:
        values = {**around}
        nodes: dict[str, object] = {}
        outputs = (y for node in graph for y in node.outputs if y.name or is_read(y))
        for x in (*graph.inputs, *graph.initializers.values(), *outputs):
            check(values, x, "value")
        for node in graph:
            check(nodes, node, "node")
            for body in subgraphs(node):
                visit(body, values)

    visit(model.graph, {})


def _check_types(model: ir.Model, name: str) -> None:
    """Raise an error if a node declares an output of another type than ONNX infers."""
    for node in all_nodes(model.graph):
        version = model.opset_imports.get(node.domain)
        is_known = version is not None and node.domain in STANDARD and not subgraphs(node)
        if not is_known or any(x is not None and x.type is None for x in node.inputs):
            continue
        try:
            inferred = infer_outputs(node, version)  # type: ignore[arg-type]
        except Exception as error:
            raise GraphoptError(
                f"{name}: expected a node that ONNX accepts, found {node_label(node)}: {line(error)}"
            ) from error
        for y, (type_, shape) in zip(node.outputs, inferred, strict=True):
            is_guess = node.op_type in _GUESSED
            if (y.type is not None and type_ is not None and y.type != type_) or (
                not is_guess and not may_be_alike(y.shape, shape)
            ):
                found, expected = (f"{t}{s or ''}" for t, s in ((y.type, y.shape), (type_, shape)))
                raise GraphoptError(
                    f"{name}: {node_label(node)}: expected the output {y.name!r} of {expected}, as ONNX infers, found "
                    f"{found}: declare what the node computes"
                )


def check_remembered(what: str, remembered: ir.Model, anew: ir.Model) -> None:
    """Raise an error unless a model that is remembered equals the one that is made anew."""
    if Content.of(remembered) != Content.of(anew):
        raise GraphoptError(
            f"{what}: expected the graph that is made anew, found another one, of {len(remembered.graph)} nodes in "
            f"place of {len(anew.graph)}: what it is remembered by lacks a part of what makes it; please report it"
        )
