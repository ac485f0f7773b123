"""Which rule differentiates which operator.

A rule is a traced function `rule(op, node, *output_gradients, **attributes)` that returns one gradient an input, or
None where there is none; an output gradient is None where the objective does not depend on that output. Rules ignore
broadcasting: the walk sums each gradient to its input's shape. An elementwise operator needs a row of local
derivatives alone: `local(op, *inputs, output, **attributes)` for each input, a value or a Python number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from graphopt.emitter import Emitter

Rule = Callable[..., Sequence[ir.Value | None]]
Local = Callable[..., ir.Value | float]

RULES: dict[tuple[str, str], Rule] = {}
NO_GRADIENT: set[tuple[str, str]] = set()


def rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of these operators."""

    def register(function: Rule) -> Rule:
        for op_type in op_types:
            RULES[domain, op_type] = function
        return function

    return register


def elementwise(table: dict[str, tuple[Local, ...]]) -> None:
    """Register a rule for each row of local derivatives."""
    for op_type, locals_ in table.items():
        RULES["", op_type] = _chain(locals_)


def no_gradient(*op_types: str, domain: str = "") -> None:
    """Declare operators whose outputs depend on no input differentiably: the walk stops there."""
    NO_GRADIENT.update((domain, op_type) for op_type in op_types)


def has_rule(domain: str, op_type: str) -> bool:
    """Tell whether an operator has a rule of its own."""
    return (domain, op_type) in RULES


def _chain(locals_: tuple[Local, ...]) -> Rule:
    def chained(op: Emitter, node: ir.Node, dy: ir.Value, **attributes: Any) -> list[ir.Value | None]:
        values = (*node.inputs, node.outputs[0])
        return [_scale(op, dy, local(op, *values, **attributes)) for local in locals_]

    return chained


def _scale(op: Emitter, dy: ir.Value, local: ir.Value | float) -> ir.Value | None:
    if isinstance(local, ir.Value):
        return dy * local  # type: ignore[no-any-return]
    if local == 0:
        return None
    if local == 1:
        return dy
    return -dy if local == -1 else dy * local  # type: ignore[no-any-return]
