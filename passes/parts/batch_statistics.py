"""Cut the first half of a step where workers sum the batch statistics of BatchNormalization."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from graphopt.errors import GraphoptError
from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import BATCH_CORRECTION, BATCH_COUNT, BATCH_GRADIENT, BATCH_WEIGHT
from graphopt.graph.operators import ARITHMETIC, PRODUCTS, VIEWS
from graphopt.graph.roles import FED, Role, role_of, set_role, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import ROWS, dims_of, given, producer_of
from passes.parts import extract_part, remove_unused_inputs
from passes.parts.halves import LEAST

WIDE = ir.DataType.DOUBLE  # of sums, in which the variance is a difference of squares
_Formula = Callable[[ir.Value], ir.Value]


def stages_of_batch(grad: ir.Model) -> list[ir.Model]:
    """Cut the half `grad`, which is not simplified yet, where workers sum batch statistics; the graph is changed.

    A stage returns sums over a worker's rows, `batch_sum.0`, `batch_sum.1`, ... Later stages read their sums over all
    workers under the same names, and other values of earlier stages as data. Each BatchNormalization needs two
    sums: of its statistics, and of their gradients. Without any, the graph is the only stage.

    Raises:
        GraphoptError: a BatchNormalization normalizes by the rows of a batch without running statistics that train.
    """
    fed = set(with_role(grad, *FED))
    for node in grad.graph.all_nodes():
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode"):
            before = {node} | ancestors(x for x in node.inputs if x is not None)
            if any(x in fed for one in before for x in values_read(one)):
                raise GraphoptError(
                    f"BatchNormalization node {node.name!r}: expected running statistics that train, found statistics "
                    f"of the batch alone: add passes.TrainingMode(), or set statistics=local"
                )
    if not any(metadata.OF_BATCH.is_set(node) for node in grad.graph):
        return [grad]
    ensure_typed(grad)
    summed = _sum_over_workers(grad)
    ensure_typed(grad)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(grad)  # each stage can have them
    grad.graph.sort()
    return _stages(grad, _levels(grad.graph, summed), summed)


def _levels(graph: ir.Graph, summed: Collection[ir.Value]) -> dict[ir.Node | None, int]:
    """Return the stage of each node: results as early as possible, and what they need as late as possible."""
    levels: dict[ir.Node | None, int] = {None: 0}
    for node in graph:
        levels[node] = max((levels[x.producer()] + (x in summed) for x in values_read(node)), default=0)
    for node in reversed(graph):
        if not any(y in summed or y.is_graph_output() for y in node.outputs):
            readers = [levels[user] for y in node.outputs for user in y.consumers()]
            levels[node] = min(readers, default=levels[node])
    return levels


def _stages(grad: ir.Model, levels: Mapping[ir.Node | None, int], summed: Collection[ir.Value]) -> list[ir.Model]:
    """Return a graph for each level of nodes. It reads data, state, and values of earlier graphs by their names."""
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
        remove_unused_inputs(stage)
        for x in stage.graph.inputs:
            if x.name in passed:
                set_role(x, Role.DATA)
        found.append(stage)
        known |= dict.fromkeys(outputs)
        passed |= {y.name for y in outputs if y not in summed}
    return found


def _is_repeated(y: ir.Value, known: Collection[ir.Value]) -> bool:
    """Return whether later stages compute a value again: it is elementwise in known ones, and no product reads it."""
    node, readers = y.producer(), {user.op_type for user in y.consumers()}
    if node is None or node.op_type not in ARITHMETIC or not readers.isdisjoint(PRODUCTS):
        return False
    return all(_is_known(x, known) for x in values_read(node))


def _is_known(x: ir.Value, known: Collection[ir.Value]) -> bool:
    """Return whether a value is known, or a view or cast of one that is."""
    if x in known or x.is_initializer():
        return True
    node = x.producer()
    if node is None or node.op_type not in VIEWS | {"Cast"}:
        return False
    return all(_is_known(y, known) for y in values_read(node))


def _sum_over_workers(model: ir.Model) -> dict[ir.Value, None]:
    """Replace statistics of a worker's rows by those of the rows of all workers, and return the values to sum."""
    summed: dict[ir.Value, None] = {}
    nodes = list(model.graph)
    with Emitter(model) as op:

        def total(x: ir.Value) -> ir.Value:
            y: ir.Value = op.Identity(x, _outputs=[f"batch_sum.{len(summed)}"])
            summed[set_role(y, Role.SUMMED)] = None
            return y

        for node in nodes:
            if metadata.OF_BATCH.is_set(node):
                _moments(op, node, total)
            elif BATCH_COUNT.is_set(node):
                _correct(op, node, total)
        weight = _weight(op, model)
        for node in nodes:
            if BATCH_GRADIENT.is_set(node):
                _correct(op, node, lambda x: total(weight * x) / weight if weight else total(x))
    return summed


def _correct(op: Emitter, node: ir.Node, formula: _Formula) -> None:
    """Replace the second input of a node by a function of it."""
    x = given(node.inputs[1])
    node.replace_input_with(1, op.Cast(formula(op.Cast(x, to=WIDE)), to=x.dtype))


def _moments(op: Emitter, node: ir.Node, total: _Formula) -> None:
    """Compute M = sum(n m) / N and V = sum(n (v + m^2)) / N - M^2 from the means and variances of the workers."""
    x, _, _, mean, variance = map(given, node.inputs)
    axes = [0, *range(2, len(dims_of(x)))]
    n = op.Cast(op.ReduceProd(op.Gather(op.shape_of(x), axes), keepdims=0), to=WIDE)
    own = op.ReduceMean(x, axes)
    centered = x - own
    v = op.Cast(op.ReduceMean(centered * centered, axes, keepdims=0), to=WIDE)
    m = op.Cast(op.Squeeze(own, axes), to=WIDE)
    count = total(n)
    whole = total(n * m) / count
    second = total(n * (v + m * m)) / count
    for old, new in ((mean, whole), (variance, op.Max(second - whole * whole, 0.0))):
        new = op.Cast(new, to=old.dtype)
        for user, index in old.uses():
            user.replace_input_with(index, new)
            if BATCH_CORRECTION.is_set(user):
                _correct(op, user, lambda _: count / op.Max(count - 1.0, 1.0))


def _weight(op: Emitter, model: ir.Model) -> ir.Value | None:
    """Return the weight of the batch in the loss, and let it be positive; None if the loss is a sum."""
    rows = next(y for y in model.graph.outputs if y.name == ROWS)
    if BATCH_WEIGHT.read(rows) == "sum":
        return None
    node = producer_of(rows)
    x = given(node.inputs[0])
    node.replace_input_with(0, op.Max(x, op.constant(LEAST, like=x)))
    return op.Cast(node.outputs[0], to=WIDE)
