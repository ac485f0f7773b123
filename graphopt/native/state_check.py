"""Check in the step itself that the new state is finite: the kernels that write it look at it while they have it."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import VIEWS
from graphopt.graph.roles import Role, with_role
from graphopt.graph.values import is_floating
from graphopt.native.forms import form_of

CHECK = "ai.graphopt.check"


def add_state_check(model: ir.Model) -> str | None:
    """Add an output that is 0 if the new state is finite, and NaN if it is not; return its name.

    Return None, and add nothing, unless elementwise operators compute all of the new state in float32: only then does
    the check cost no pass over memory.
    """
    versions = dict(model.opset_imports)
    written = [_whole(y) for y in with_role(model, Role.NEXT) if is_floating(y)]
    if not written or any(x.dtype != ir.DataType.FLOAT for x in written):
        return None
    nodes = [x.producer() for x in written]
    if any(node is None or (form := form_of(node, versions)) is None or form.kind != "map" for node in nodes):
        return None
    with Emitter(model) as op:
        zeros = [op.ReduceSum(op.Mul(x, 0.0), keepdims=0) for x in dict.fromkeys(written)]
        model.graph.outputs.append(op.Sum(*zeros, _outputs=[CHECK]))
    return CHECK


def _whole(y: ir.Value) -> ir.Value:
    """Return the tensor that a value is a view or a part of."""
    node = y.producer()
    while node is not None and node.domain == "" and node.op_type in VIEWS | {"Split"}:
        assert node.inputs[0] is not None
        y = node.inputs[0]
        node = y.producer()
    return y
