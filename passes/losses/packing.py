"""Keep the sequences that are packed in a row apart: attention within each, and positions that restart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import TOKEN_POSITIONS
from graphopt.graph.operators import CONVOLUTIONS, ELEMENTWISE_OPERATORS, POOLS, RECURRENT, SHAPE_READERS
from graphopt.graph.roles import Role, role_of
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import dims_of, dtype_of, like, redirect
from passes.lowering.attention import ATTENTION_SCORES

_POSITION_IDS = "position_ids"
# Operators that mix the tokens of a row otherwise than attention.
_MIXING = CONVOLUTIONS | POOLS | RECURRENT | {"CumSum", "Loop", "Scan"}
_BETWEEN = {"Cast", "Dropout", "Identity", "Mul", "Reshape", "Squeeze", "Unsqueeze", "Where"}


def keep_apart(op: Emitter, graph: ir.Graph, tokens: ir.Value, segments: ir.Value) -> None:
    """Keep tokens of a row from reading those that have another number in `segments`, int64 [rows, tokens].

    Prediction and the trained model keep the graph without segments.

    Args:
        tokens: the input of token ids.

    Raises:
        GraphoptError: the graph has no attention that the pass knows, or mixes tokens in another way.
    """
    read = _dependent(graph, tokens)
    mixing = next((node for node in graph if node.op_type in _MIXING and node.outputs[0] in read), None)
    scores = dict.fromkeys(_scores(graph, read))
    if mixing is not None or not scores:
        found = "no attention" if mixing is None else f"{mixing.op_type} node {mixing.name!r}"
        raise GraphoptError(
            f"CausalLanguageModel(packed=True): expected attention alone to mix the tokens of a row, found {found}: "
            f"train with one sequence in a row"
        )
    same = op.Equal(op.Unsqueeze(segments, [2]), op.Unsqueeze(segments, [1]))
    places = op.Range(0, op.Squeeze(op.Shape(segments, start=1)), 1)
    earlier = op.Less(op.Unsqueeze(places, [0]), op.Unsqueeze(places, [1]))
    restarted = op.ReduceSum(op.Cast(op.And(same, earlier), to=ir.DataType.INT64), [2], keepdims=0)
    restarted.shape = segments.shape
    for x in scores:
        _read_instead(x, _masked(op, x, same, segments))
    for x in [x for x in _positions(graph) if x.uses()]:
        own = op.Min(x, op.cast(restarted, x.dtype))
        own.shape = segments.shape
        _read_instead(x, InferenceForm(same_as=0, predicting=True).write(own))
    for x in dict.fromkeys(_added(graph, tokens, read - _from_products(scores))):
        _read_instead(x, _gathered(op, x, restarted))


def _read_instead(x: ir.Value, other: ir.Value) -> None:
    """Make all readers of a value, except those that compute the other, read the other."""
    own = ancestors([other])
    redirect([use for use in x.uses() if use[0] not in own], other)


def _dependent(graph: ir.Graph, *sources: ir.Value) -> set[ir.Value]:
    """Return the values that depend on the numbers of others, not only on their shapes."""
    found = set(sources)
    for node in graph:
        if node.op_type not in SHAPE_READERS and not found.isdisjoint(values_read(node)):
            found.update(node.outputs)
    return found


def _scores(graph: ir.Graph, read: set[ir.Value]) -> Iterator[ir.Value]:
    """Yield the scores of each self-attention, [rows, ..., queries, keys], before the softmax."""
    marked = {y for node in graph if ATTENTION_SCORES.is_set(node) for y in node.outputs}
    yield from marked
    for node in graph:
        x = node.inputs[0] if node.op_type == "Softmax" and node.domain == "" else None
        if x is None or x.shape is None or x not in read or len(x.shape) < 3:
            continue
        is_last = node.attributes.get_int("axis", -1) in (-1, len(x.shape) - 1)
        made = x.producer()
        is_known = x in marked or (made is not None and not marked.isdisjoint(made.inputs))
        queries, keys = x.shape[-2:]
        is_square = queries == keys or not isinstance(queries, int) or not isinstance(keys, int)
        if is_last and is_square and not is_known and _weighs(node.outputs[0], read):
            yield x


def _from_products(scores: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the scores, and what elementwise operators compute them from, back to the products."""
    found, todo = set[ir.Value](), list(scores)
    while todo:
        y = todo.pop()
        maker = y.producer()
        found.add(y)
        if maker is not None and maker.op_type in ELEMENTWISE_OPERATORS:
            todo.extend(x for x in maker.inputs if x is not None and x not in found)
    return found


def _weighs(weights: ir.Value, read: set[ir.Value]) -> bool:
    """Return whether a product multiplies weights of attention, and other values that depend on tokens."""
    for user, index in weights.uses():
        if user.op_type in ("MatMul", "Einsum"):
            return user.inputs[1 - index] in read
        if user.op_type in _BETWEEN and _weighs(user.outputs[0], read):
            return True
    return False


def _masked(op: Emitter, scores: ir.Value, same: ir.Value, segments: ir.Value) -> ir.Value:
    """Emit scores that are lowest between tokens of different segments."""
    count = len(dims_of(scores))
    if count > 3:
        mask = op.Unsqueeze(same, [*range(1, count - 2)])
    else:  # rows and heads in one axis
        heads = op.Div(op.Shape(scores, end=1), op.Shape(segments, end=1))
        sizes = op.Shape(segments, start=1)
        wide = op.Expand(op.Unsqueeze(same, [1]), op.Concat([1], heads, [1, 1], axis=0))
        mask = op.Reshape(wide, op.Concat([-1], sizes, sizes, axis=0))
    lowest = op.constant(float(np.finfo(dtype_of(scores).numpy()).min), like=scores)
    masked = like(op.Where(mask, scores, lowest), scores)
    return InferenceForm(same_as=1, predicting=True).write(masked)


def _positions(graph: ir.Graph) -> Sequence[ir.Value]:
    """Return the whole numbers of positions that the graph reads or counts."""
    fed = [x for x in graph.inputs if x.name == _POSITION_IDS and role_of(x) is Role.DATA]
    return [*fed, *(y for node in graph if TOKEN_POSITIONS.is_set(node) for y in node.outputs)]


def _added(graph: ir.Graph, tokens: ir.Value, read: set[ir.Value]) -> Iterator[ir.Value]:
    """Yield what is added to the numbers of each token by its position alone, [..., tokens, width]."""
    fed = _dependent(graph, *_positions(graph))
    for node in graph:
        y = node.outputs[0]
        if node.op_type not in ("Add", "Sum", "Sub") or y.shape is None or len(y.shape) != 3 or y not in read:
            continue
        if y.shape[1] != dims_of(tokens)[1] or not any(x in read and _is_hidden(x, y) for x in node.inputs):
            continue
        others = (x for x in node.inputs if x is not None and x not in read and x not in fed)
        yield from (x for x in others if x.shape is not None and len(x.shape) > 1 and x.shape[-2] != 1)


def _is_hidden(x: ir.Value | None, y: ir.Value) -> bool:
    return x is not None and x.shape is not None and len(x.shape) == 3 and x.shape[2] == dims_of(y)[2]


def _gathered(op: Emitter, x: ir.Value, positions: ir.Value) -> ir.Value:
    """Emit the rows of a table of positions by the position of each token in its segment."""
    rows = [*dims_of(positions), dims_of(x)[-1]]
    if len(dims_of(x)) == 3 and dims_of(x)[0] != 1:
        y = op.GatherND(x, op.Unsqueeze(positions, [2]), batch_dims=1)
    else:
        y = op.Gather(op.Squeeze(x, [0]) if len(dims_of(x)) == 3 else x, positions, axis=0)
    y.shape = ir.Shape(rows)
    return InferenceForm(same_as=0, predicting=True).write(y)
