"""Take some rows of a batch whose mean loss has a gradient that shows as much as that of all rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.operators import SHAPE_READERS
from graphopt.graph.roles import FED, Role, with_role
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import name_of
from graphopt.runtime.checks.slopes import Arrays

ROWS = 4
ROWS_OF_TOKENS, TOKENS, TOKENS_OF_A_KIND = 2, 16, 4
MASK_VALUES = 2  # that integers have at most if they are a mask


def some_rows(model: ir.Model, batch: Arrays) -> Arrays | None:
    """Return the first rows of a batch, or None if the others may show more.

    They do not if the loss is a mean over rows without weights, all inputs have the graph's open size as their number
    of rows, and no row is masked: integers of the data are only looked up in tables, and repeat here, too, if they do
    in the batch.
    """
    (loss,) = with_role(model, Role.LOSS)
    forward = ancestors([loss])
    notes = [note for node in forward for y in node.outputs if (note := BATCH_WEIGHT.read(y))]
    inputs = {name_of(x): x for x in with_role(model, *FED)}
    if notes != ["rows"] or inputs.keys() != batch.keys():
        return None
    sizes = {None if x.shape is None or not len(x.shape) else x.shape[0] for x in inputs.values()}
    counts = {x.shape[:1] for x in batch.values()}
    if len(sizes) != 1 or not all(isinstance(size, ir.SymbolicDim) and size.value for size in sizes):
        return None
    if len(counts) != 1 or min(counts) < (2 * ROWS,):
        return None
    few = {name: x[:ROWS] for name, x in batch.items()}
    looked_up = (x for x in with_role(model, Role.DATA) if few[name_of(x)].dtype.kind != "f")
    if not all(_is_index(x, forward) and _repeats_alike(few[name_of(x)], batch[name_of(x)]) for x in looked_up):
        return None
    return few


def some_tokens(model: ir.Model, batch: Arrays, most: int = TOKENS) -> Arrays | None:
    """Return some tokens of some rows of a batch, or None if the others may show more.

    They do not if rows and tokens are the first two axes of all inputs, the graph is open to any number of both, and
    all data are integers. The first `most` tokens of the first rows are taken, and those at which a value of a mask, a
    mark such as -100, or what has none occurs first. If a number repeats in the batch, but not here, the first token
    is the last one without marks, too.
    """
    inputs = {name_of(x): x for x in with_role(model, *FED)}
    axes = {tuple(x.shape or ())[:2] for x in inputs.values()}
    if inputs.keys() != batch.keys() or len(axes) != 1 or len({x.shape[:2] for x in batch.values()}) != 1:
        return None
    (axis,) = axes
    is_open = len({x.value for x in axis if isinstance(x, ir.SymbolicDim)} - {None}) == 2
    if not is_open or any(x.dtype.kind not in "iub" for x in batch.values()):
        return None
    count, length = next(iter(batch.values())).shape[:2]
    rows, tokens = {*range(min(count, ROWS_OF_TOKENS))}, {*range(min(length, most))}
    for where in (where for x in batch.values() for where in _kinds(x) if where.any()):
        row, *_ = np.argwhere(where)[0]
        rows.add(int(row))
        tokens |= {int(place[0]) for place in np.argwhere(where[row])[:TOKENS_OF_A_KIND]}
    few = {name: x[sorted(rows)][:, sorted(tokens)] for name, x in batch.items()}
    for name, x in few.items():
        if not _repeats_alike(x, batch[name]):
            place = next((i for i in reversed(range(1, x.shape[1])) if (x[:, i] >= 0).all()), None)
            if place is None:
                return None
            x[:, place] = x[:, 0]
    return few if all(x.size < batch[name].size for name, x in few.items()) else None


def _kinds(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield where a mask has each value, or other integers each mark, and none."""
    values = np.unique(x)
    if values.size <= MASK_VALUES:
        yield from (x == value for value in values)
    elif values[0] < 0:
        yield from (x == value for value in values[values < 0])
        yield x >= 0


def _is_index(x: ir.Value, forward: set[ir.Node]) -> bool:
    """Return whether the forward pass only looks numbers of an input up in tables, or reads its shape."""
    readers = [(node, i) for node, i in x.uses() if node in forward and node.op_type not in SHAPE_READERS]
    return all(node.op_type == "Gather" and i == 1 for node, i in readers)


def _repeats_alike(few: np.ndarray, all_rows: np.ndarray) -> bool:
    """Return whether a number repeats in some rows if one does in all."""
    return np.unique(few).size < few.size or np.unique(all_rows).size == all_rows.size
