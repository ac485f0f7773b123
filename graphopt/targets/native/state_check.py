"""Check in the step itself that the new state is finite: the kernels that write it look at it while they have it."""

from __future__ import annotations

import functools

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.names import state_of
from graphopt.graph.roles import Role, with_role
from graphopt.graph.state import owners
from graphopt.graph.values import is_floating
from graphopt.targets.native.forms import Forms

_CHECK = "ai.graphopt.check"


def add_state_check(model: ir.Model, forms: Forms) -> str | None:
    """Add an output that is 0 if the new state is finite, and NaN if it is not; return its name.

    Return None, and add nothing, unless elementwise operators compute all of the new state in float32: only then does
    the check cost no pass over memory.
    """
    slots = owners(model.graph)
    written: dict[tuple[str, str], list[ir.Value]] = {}  # by the parameter that they belong to, and by shape
    for y in with_role(model, Role.NEXT):
        if is_floating(y):
            state = state_of(y)
            written.setdefault((slots.get(state, state), str(y.shape)), []).append(y)
    values = [y for group in written.values() for y in group]
    if not written or not all(x.dtype == ir.DataType.FLOAT and forms.is_map(x.producer()) for x in values):
        return None
    with Emitter(model) as op:
        zeros = [
            op.ReduceSum(functools.reduce(op.Add, (op.Mul(x, 0.0) for x in group)), keepdims=0)
            for group in written.values()
        ]
        model.graph.outputs.append(op.Sum(*zeros, _outputs=[_CHECK]))
    return _CHECK
