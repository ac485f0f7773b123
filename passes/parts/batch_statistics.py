"""Let several workers compute the batch statistics of BatchNormalization together, from the rows of all."""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import (
    BATCH_CORRECTION,
    BATCH_COUNT,
    BATCH_GRADIENT,
    BATCH_WEIGHT,
    OF_BATCH,
)
from graphopt.graph.names import ROWS
from graphopt.graph.roles import FED, Role, set_role, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import dims_of
from passes.parts.stages import prepare, stages

LEAST = 2.0**-30  # the weight of a batch whose rows all have weight 0: sums of gradients are divided by it
WIDE = ir.DataType.DOUBLE  # of sums, in which the variance is a difference of squares


def stages_of_batch(grad: ir.Model) -> list[ir.Model]:
    """Cut the half `grad`, which is not simplified yet, where workers sum batch statistics; the graph is changed.

    A stage returns sums over a worker's rows, `batch_sum.0`, `batch_sum.1`, ... Later stages read their sums over all
    workers under the same names, and other values of earlier stages as data. Each BatchNormalization needs two
    sums: of its statistics, and of their gradients. Without any, the graph is the only stage.

    Raises:
        GraphoptError: a BatchNormalization normalizes by the rows of a batch without running statistics that train.
    """
    _check(grad)
    if not any(OF_BATCH.is_set(node) for node in grad.graph):
        return [grad]
    ensure_typed(grad)
    summed = _Sums(grad).found
    prepare(grad)
    return stages(grad, _levels(grad.graph, summed), summed)


def _check(grad: ir.Model) -> None:
    """Check that no BatchNormalization computes statistics of data that workers cannot sum."""
    fed = set(with_role(grad, *FED))
    for node in grad.graph.all_nodes():
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode"):
            before = {node} | ancestors(x for x in node.inputs if x is not None)
            if any(x in fed for one in before for x in values_read(one)):
                raise GraphoptError(
                    f"BatchNormalization node {node.name!r}: expected running statistics that train, found statistics "
                    f"of the batch alone: add passes.TrainingMode(), or set statistics=local"
                )


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


class _Sums:
    """Replace statistics of a worker's rows by those of the rows of all workers.

    Attributes:
        found: the values that workers are to sum.
    """

    def __init__(self, model: ir.Model) -> None:
        self.found: dict[ir.Value, None] = {}
        nodes = list(model.graph)
        with Emitter(model) as self._op:
            for node in nodes:
                if OF_BATCH.is_set(node):
                    self._moments(node)
                elif BATCH_COUNT.is_set(node):
                    self._replace(node, self._sum)
            weight = self._weight(model)
            for node in nodes:
                if BATCH_GRADIENT.is_set(node):
                    self._replace(node, lambda x: self._sum(weight * x) / weight if weight else self._sum(x))

    def _sum(self, x: ir.Value) -> ir.Value:
        """Return the sum over all workers."""
        y: ir.Value = self._op.Identity(x, _outputs=[f"batch_sum.{len(self.found)}"])
        self.found[set_role(y, Role.SUMMED)] = None
        return y

    def _replace(self, node: ir.Node, formula: Callable[[ir.Value], ir.Value]) -> None:
        """Replace the second input of a node by a function of it."""
        x = node.inputs[1]
        assert x is not None
        node.replace_input_with(1, self._op.Cast(formula(self._op.Cast(x, to=WIDE)), to=x.dtype))

    def _moments(self, node: ir.Node) -> None:
        """Compute M = sum(n m) / N and V = sum(n (v + m^2)) / N - M^2 from the means and variances of the workers."""
        op = self._op
        x, _, _, mean, variance = node.inputs
        assert x is not None and mean is not None and variance is not None
        axes = [0, *range(2, len(dims_of(x)))]
        n = op.Cast(op.ReduceProd(op.Gather(op.shape_of(x), axes), keepdims=0), to=WIDE)
        own = op.ReduceMean(x, axes)
        centered = x - own
        v = op.Cast(op.ReduceMean(centered * centered, axes, keepdims=0), to=WIDE)
        m = op.Cast(op.Squeeze(own, axes), to=WIDE)
        count = self._sum(n)
        whole = self._sum(n * m) / count
        second = self._sum(n * (v + m * m)) / count
        for old, new in ((mean, whole), (variance, op.Max(second - whole * whole, 0.0))):
            uses = list(old.uses())
            new = op.Cast(new, to=old.dtype)
            for user, index in uses:
                user.replace_input_with(index, new)
                if BATCH_CORRECTION.is_set(user):
                    self._replace(user, lambda _: count / op.Max(count - 1.0, 1.0))

    def _weight(self, model: ir.Model) -> ir.Value | None:
        """Return the weight of the batch in the loss, and let it be positive; None if the loss is a sum."""
        rows = next(y for y in model.graph.outputs if y.name == ROWS)
        if BATCH_WEIGHT.read(rows) == "sum":
            return None
        node = rows.producer()
        assert node is not None and node.inputs[0] is not None
        x = node.inputs[0]
        node.replace_input_with(0, self._op.Max(x, self._op.constant(LEAST, like=x)))
        return self._op.Cast(node.outputs[0], to=WIDE)
