"""Cut the half `grad` of a training step into stages, between which workers exchange numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from graphopt.graph.operators import ARITHMETIC, PRODUCTS, VIEWS
from graphopt.graph.roles import Role, role_of, set_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import values_read
from passes.parts.vector_jacobian import extract_part


def stages(
    grad: ir.Model, levels: Mapping[ir.Node | None, int], summed: Collection[ir.Value] = ()
) -> list[ir.Model]:
    """Return a graph for each level of nodes. It reads data, state, and values of earlier graphs by their names.

    Args:
        levels: the level of each node; its inputs are of the same level or of lower ones.
        summed: the outputs of which later graphs read the sum over all workers.
    """
    found: list[ir.Model] = []
    known, passed = dict.fromkeys(grad.graph.inputs), set()
    for level in range(max(levels.values()) + 1):
        made = [y for node in grad.graph if levels[node] == level for y in node.outputs]
        ends = [y for y in made if y in summed or y.is_graph_output()]
        read = [y for y in made if y not in ends and any(levels[user] > level for user in y.consumers())]
        available = {*known, *ends, *read}
        outputs = [*ends, *(y for y in read if not _is_repeated(y, available))]
        for y in outputs:
            if role_of(y) is None:
                set_role(y, Role.PASSED)
        stage = extract_part(grad, list(known), outputs)
        stage.graph.inputs[:] = [x for x in stage.graph.inputs if x.uses()]
        for x in stage.graph.inputs:
            if x.name in passed:
                set_role(x, Role.DATA)
        found.append(stage)
        known |= dict.fromkeys(outputs)
        passed |= {y.name for y in outputs if y not in summed}
    return found


def prepare(grad: ir.Model) -> None:
    """Infer missing types, make constants initializers, which each stage can have, and sort the nodes."""
    ensure_typed(grad)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(grad)
    grad.graph.sort()


def _is_repeated(y: ir.Value, known: Collection[ir.Value]) -> bool:
    """Return whether later stages compute a value again: it is elementwise in known ones, and no product reads it."""
    node = y.producer()
    if (
        node is None
        or node.op_type not in ARITHMETIC
        or any(user.op_type in PRODUCTS for user in y.consumers())
    ):
        return False
    return all(_is_known(x, known) for x in values_read(node))


def _is_known(x: ir.Value, known: Collection[ir.Value]) -> bool:
    """Return whether a value is known, or a view or cast of one that is."""
    if x in known or x.is_initializer():
        return True
    node = x.producer()
    return (
        node is not None
        and node.op_type in VIEWS | {"Cast"}
        and all(_is_known(y, known) for y in values_read(node))
    )
