"""Take some rows of a batch whose mean loss has a gradient that shows as much as that of all rows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.operators import SHAPE_READERS
from graphopt.graph.roles import FED, Role, with_role
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import name_of
from graphopt.runtime.checks.slopes import Arrays

ROWS, TOKENS = 4, 64
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
    if not all(
        _is_index(x, forward) and _repeats_alike(few[name_of(x)], batch[name_of(x)]) for x in looked_up
    ):
        return None
    return few


def some_tokens(model: ir.Model, batch: Arrays, most: int = TOKENS) -> Arrays | None:
    """Return the first tokens of the first rows of a batch, or None if the others may show more.

    They do not if rows and tokens are the first two axes of all inputs, and the graph is open to any number of both; if
    all data are integers; and if marks such as -100, and all values of a mask, occur here if they do in the batch. If
    a number repeats in the batch, but not here, the first token is the last one, too.
    """
    inputs = {name_of(x): x for x in with_role(model, *FED)}
    axes = {tuple(x.shape or ())[:2] for x in inputs.values()}
    if (
        inputs.keys() != batch.keys()
        or len(axes) != 1
        or any(x.dtype.kind not in "iub" for x in batch.values())
    ):
        return None
    (axis,) = axes
    is_open = len({x.value for x in axis if isinstance(x, ir.SymbolicDim)} - {None}) == 2
    if not is_open or all(x.shape[0] <= ROWS and x.shape[1] <= most for x in batch.values()):
        return None
    few = {name: x[:ROWS, :most].copy() for name, x in batch.items()}
    for name, x in few.items():
        if not _repeats_alike(x, batch[name]):
            x[:, -1] = x[:, 0]
    return few if all(np.isin(_marks(batch[name]), x).all() for name, x in few.items()) else None


def _marks(x: np.ndarray) -> np.ndarray:
    """Return the values of a mask, or those of other integers that are no indices."""
    values = np.unique(x)
    return values if values.size <= MASK_VALUES else values[values < 0]


def _is_index(x: ir.Value, forward: set[ir.Node]) -> bool:
    """Return whether the forward pass only looks numbers of an input up in tables, or reads its shape."""
    readers = [(node, i) for node, i in x.uses() if node in forward and node.op_type not in SHAPE_READERS]
    return all(node.op_type == "Gather" and i == 1 for node, i in readers)


def _repeats_alike(few: np.ndarray, all_rows: np.ndarray) -> bool:
    """Return whether a number repeats in some rows if one does in all."""
    return np.unique(few).size < few.size or np.unique(all_rows).size == all_rows.size
