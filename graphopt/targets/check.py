"""Add a number to a training graph that reports whether its loss and its new state are finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Set

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import VIEWS
from graphopt.graph.roles import STATE, Role, set_role, with_role
from graphopt.graph.state import ACCUMULATED, LOSS_SCALE, accumulators
from graphopt.graph.values import constant_of, is_floating, is_number, is_static, next_of

CHECK = "graphopt.check"

# Operators whose result has an infinity or a NaN wherever one of these inputs has one. None: any input.
_SPREADING: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Add", "Cast", "Mul", "Neg", "Sqrt", "Sub", "Sum", *VIEWS)),
    "Div": (0,),
}
_LARGE = 4096  # numbers


def add_check(model: ir.Model, infinite: Collection[str], *, chained: bool = False) -> None:
    """Add an output that is finite only if the loss and the new state are: the sum of both.

    State from which arithmetic carries each infinity and NaN into other state, as from a momentum into its parameter,
    needs no sum of its own. Not checked is what may be infinite or NaN: state that is so at first, and sums of
    gradients of which a loss scale drops those that overflow.

    Args:
        model: a training graph, to which the output is added.
        infinite: the names of state that is not finite at first.
        chained: add one by one, for runtimes without a Sum of several inputs.
    """
    is_scaled = any(x.name == LOSS_SCALE for x in with_role(model, *STATE))
    dropped = {x.name for x in accumulators(model) if x.name != ACCUMULATED} if is_scaled else set()
    unchecked = {next_of(name) for name in {*infinite, *dropped} if name}
    following = {y for y in with_role(model, Role.NEXT) if is_floating(y) and y.name not in unchecked}
    added = [y for y in with_role(model, Role.NEXT) if y in following and not _spreads(y, following - {y})]
    with Emitter(model) as op:
        sums = [_sum(op, y) for y in [*with_role(model, Role.LOSS), *_joined(added)]]
        total = functools.reduce(op.Add, sums[1:], op.Identity(sums[0])) if chained else op.Sum(*sums)
    total.name = CHECK
    model.graph.outputs.append(set_role(total, Role.DIAGNOSTIC))


def _joined(values: Collection[ir.Value]) -> list[ir.Value]:
    """Return values, and in place of those that a vector is cut into without rest, that vector."""
    bare = {y: _unviewed(y) for y in values}
    roots = {y: _root(x) for y, x in bare.items()}
    whole = {root for root in roots.values() if set(_parts(root)) <= set(bare.values())}
    return list(dict.fromkeys(root if root in whole else y for y, root in roots.items()))


def _unviewed(x: ir.Value) -> ir.Value:
    """Return the value whose numbers a value has in another shape, which may be itself."""
    while (y := _first_input(x, VIEWS)) is not None:
        x = y
    return x


def _root(x: ir.Value) -> ir.Value:
    """Return the value that Splits and Slices cut a value from, which may be itself."""
    while (y := _first_input(x, {"Slice", "Split"})) is not None:
        x = y
    return x


def _first_input(x: ir.Value, operators: Set[str]) -> ir.Value | None:
    node = x.producer()
    return node.inputs[0] if node is not None and node.op_type in operators and not node.domain else None


def _parts(x: ir.Value) -> list[ir.Value]:
    """Return the parts into which a Split, or Slices one after the other, cut a whole vector; or the value itself."""
    cuts = [node for node in x.consumers() if node.op_type in ("Slice", "Split") and not node.domain]
    if len(cuts) == 1 and cuts[0].op_type == "Split":
        return [part for y in cuts[0].outputs for part in _parts(y)]
    spans = sorted(map(_span, cuts))
    ends = [0, *(end for _, end in spans)]
    if not cuts or ends[:-1] != [start for start, _ in spans] or ends[-1:] != [*(x.shape or ())]:
        return [x]
    return [part for node in cuts for part in _parts(node.outputs[0])]


def _span(node: ir.Node) -> tuple[int, int]:
    """Return the first and the last position that a Slice of a vector reads, -1 for what is not known."""
    bounds = [constant_of(bound) for bound in node.inputs[1:3]]
    is_known = len(node.inputs) == 4 and all(bound is not None and bound.size == 1 for bound in bounds)
    return (bounds[0].item(), bounds[1].item()) if is_known else (-1, -1)  # type: ignore[union-attr]


def not_finite(arrays: Mapping[str, np.ndarray]) -> set[str]:
    """Return the names of floating-point arrays that have an infinity or a NaN."""
    return {name for name, x in arrays.items() if x.dtype.kind == "f" and not np.isfinite(x).all()}


def _sum(op: Emitter, x: ir.Value) -> ir.Value:
    """Return the sum of all numbers, of large matrices by a product with ones: 2 to 3 times as fast in WebAssembly."""
    y: ir.Value = x if x.dtype == ir.DataType.FLOAT else op.Cast(x, to=ir.DataType.FLOAT)
    if is_number(y):
        return y
    dims = [size for size in x.shape or () if isinstance(size, int)]
    if is_static(x) and len(dims) > 1 and math.prod(dims) >= _LARGE:
        rows = max((math.prod(dims[:k]) for k in range(1, len(dims))), key=lambda n: min(n, math.prod(dims) // n))
        matrix = y if len(dims) == 2 else op.Reshape(y, [rows, -1])
        y = op.MatMul(op.constant(np.ones((1, rows), np.float32)), matrix)
    return op.ReduceSum(y, keepdims=0)


def _spreads(x: ir.Value, targets: Set[ir.Value]) -> bool:
    """Return whether an infinity or a NaN anywhere in `x` is in one of `targets`, too."""
    reached = [x]
    for value in reached:
        for node, index in value.uses():
            inputs = _SPREADING.get(node.op_type, ()) if node.domain == "" else ()
            y = node.outputs[0]
            if y not in reached and (inputs is None or index in inputs):
                reached.append(y)
    return not targets.isdisjoint(reached)
