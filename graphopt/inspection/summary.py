"""Summarize the layers of a model: operators, shapes, parameters, and which of them train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.graph import inference
from graphopt.graph.loading import Source, load
from graphopt.graph.metadata import FROZEN
from graphopt.graph.roles import STATE, Role, role_of, with_role
from graphopt.graph.shown import elements
from graphopt.graph.values import is_floating, is_read, name_of
from graphopt.inspection.table import ShownTable
from graphopt.runtime.executor import Executor

_HEADS = ("layer", "operator", "output shape", "parameters", "trains")
_MOST = 60  # rows; of larger graphs, only operators with parameters
_HIDDEN = ("Constant", "Identity")


@dataclass(frozen=True, repr=False)
class Summary(ShownTable):
    """Hold the summary of a model, which shows itself as a table.

    Args:
        rows: for each layer its name, operator, output shape, number of parameters, and whether they train.
        notes: lines below the table.
    """

    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    words = (0, 1)

    def rows_shown(self) -> Sequence[Sequence[str]]:
        return [_HEADS, *self.rows]


@checked()
def summary(model: Executor | Source) -> Summary:
    """Summarize the layers of a model, or those of the model in a training graph, as a table.

    Args:
        model: an inference model, a training graph, or an executor.

    Raises:
        GraphoptError: the model cannot be read.

    >>> step = graphopt.compile(models.mlp((8,), 3, hidden=(4,)), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    >>> graphopt.summary(step)
    layer        operator  output shape  parameters  trains
    layers.0     Gemm         [batch,4]          36     yes
    Relu_node_1  Relu         [batch,4]
    layers.2     Gemm         [batch,3]          15     yes
    51 parameters, of which 51 train
    """
    whole = load(model.model if isinstance(model, Executor) else model)
    is_step, forward = bool(with_role(whole, Role.NEXT)), whole
    if predictions := with_role(whole, Role.PREDICTION):
        forward = inference.extract(whole, predictions)
    trained = {name_of(x) for x in with_role(whole, Role.PARAMETER)}
    rows, seen = [], dict[str, ir.Value]()
    for node in forward.graph:
        weights = {name_of(x): x for x in node.inputs if x is not None and _is_weight(x)}
        if node.op_type in _HIDDEN or not any(map(is_read, node.outputs)):
            continue
        names = [name for name in weights if name in trained]
        kind = "yes" if len(names) == len(weights) else "in part" if names else "no"
        count = elements(weights.values())
        shape = node.outputs[0].shape
        rows.append(
            (
                _layer(node, list(weights)),
                node.op_type,
                "" if shape is None else str(shape),
                f"{count:,}" if weights else "",
                kind if weights and is_step else "",
            )
        )
        seen |= weights
    notes, total = [], elements(seen.values())
    if len(rows) > _MOST:
        left = [row for row in rows if row[3]]
        notes.append(f"{len(rows) - len(left)} operators without parameters are not shown")
        rows = left
    training = elements(x for name, x in seen.items() if name in trained)
    notes.append(f"{total:,} parameters" + (f", of which {training:,} train" if is_step else ""))
    return Summary(rows, notes)


def _is_weight(value: ir.Value) -> bool:
    """Return whether a value is a weight: state of a training graph, or an initializer of floating-point numbers."""
    if role_of(value) in STATE:
        return True
    return value.is_initializer() and is_floating(value) and bool(value.shape) and not FROZEN.is_set(value)


def _layer(node: ir.Node, weights: Sequence[str]) -> str:
    """Return the name that the weights of a node share, or that of the node."""
    stems = [name.rpartition(".")[0] for name in weights]
    if stems and len(set(stems)) == 1:
        return stems[0] or weights[0]
    return (node.name or name_of(node.outputs[0])).rpartition("/")[2].rpartition(".")[2]
