"""Divide the update of a state that workers share: each computes a part of it, from the gradients of all."""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.graph.emitter import Emitter
from graphopt.graph.roles import Role, set_role, with_role
from graphopt.graph.state import owners
from graphopt.graph.values import dtype_of, name_of, of_worker, state_of
from graphopt.runtime.tensors import SUMMED


def part_of_update(apply: ir.Model, summed: Collection[str], rank: int, workers: int) -> ir.Model:
    """Return the part of the half `apply` that one worker computes.

    It reads `NAME.0`, `NAME.1`, ... of all workers in place of their sum NAME.

    Args:
        summed: the names of the inputs that are sums over all workers.
    """
    part = apply.clone()
    ranks = _ranks(part, workers)
    with Emitter(part) as op:
        for x in [x for x in part.graph.inputs if x.name in summed]:
            each = [
                ir.Value(name=of_worker(x, other), type=x.type, shape=x.shape) for other in range(workers)
            ]
            part.graph.inputs.remove(x)
            part.graph.inputs.extend(set_role(own, Role.SAVED) for own in each)
            uses, total = list(x.uses()), op.Sum(*each)
            for user, index in uses:
                user.replace_input_with(index, total)
    part.graph.outputs[:] = [y for y in part.graph.outputs if ranks.get(name_of(y), rank) == rank]
    RemoveUnusedNodesPass()(part)
    part.graph.inputs[:] = [x for x in part.graph.inputs if x.uses()]
    part.graph.sort()
    return part


def _ranks(apply: ir.Model, workers: int) -> dict[str, int]:
    """Return which worker computes each floating-point output: that of a parameter computes its slots, too.

    The largest parameter goes first, each to the worker with the fewest numbers so far.
    """
    parameters = {x.name for x in with_role(apply, Role.PARAMETER)}
    slots = owners(apply.graph)
    groups: dict[str, list[ir.Value]] = {}
    for y in with_role(apply, Role.NEXT):
        if dtype_of(y).numpy() in SUMMED:
            owner = slots.get(state_of(y), "")
            groups.setdefault(owner if owner in parameters else state_of(y), []).append(y)
    loads = [0] * workers
    ranks: dict[str, int] = {}
    sizes = {name: sum(_size(y) for y in group) for name, group in groups.items()}
    for name in sorted(groups, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        ranks |= {name_of(y): rank for y in groups[name]}
    return ranks


def _size(y: ir.Value) -> int:
    assert y.shape is not None
    return math.prod(y.shape.numpy())
