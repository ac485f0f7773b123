"""Fit a step into the memory that a process may take."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import memory
from graphopt.runtime.system_memory import bytes_of_size

BUDGETS = (0.7, 0.5, 0.35, 0.25, None)  # of Recompute, from the cheapest to the least memory
# What a step takes beyond its values, as a share: the session, scratch memory, and what the arena cannot use. It may be
# more: an encoder of 4 layers of 256 units, with Recompute, peaked at 513 MB where 450 were allowed.
RESERVED = 0.3


def fitted(model: ir.Model, size: str, held: int) -> ir.Model:
    """Return the graph of a step that fits into memory: as it is, or with `Recompute`.

    Args:
        model: a training graph whose inputs have static shapes.
        size: the memory of the process, such as '2 GB'.
        held: the bytes that the process holds beside the step.

    Raises:
        GraphoptError: no budget of Recompute is enough. The message has the least memory that is.
    """
    from passes.recompute import Recompute

    limit, least = bytes_of_size(size), held
    for budget in (1.0, *BUDGETS):
        chosen = model
        if budget != 1.0:
            chosen = model.clone()
            try:
                Recompute(budget, {}).rewrite(chosen)
            except GraphoptError:  # the budget is too small for the graph
                continue
        needed = held + int((1 + RESERVED) * memory.estimate(chosen, {}).step)
        if needed <= limit:
            return chosen
        least = needed if least == held else min(least, needed)
    least = -(-least // 10**6)
    raise GraphoptError(
        f"memory={size!r}: expected room for a step on data of these shapes, found that it takes "
        f"{least} MB with Recompute: give memory='{least} MB', or fewer rows or tokens at a time"
    )
