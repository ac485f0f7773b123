"""Make the graph that updates the weights of the last synchronisation by what workers have changed since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.names import gradient_of, state_of
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.roles import STATE, Role, role_of, set_role, with_role
from graphopt.graph.values import wide_type

OUTER = "outer."  # the prefix of the outer optimizer's own state


def outer_step(model: ir.Model, optimizer: Callable[[ir.Model], Any]) -> ir.Model:
    """Return the outer step of a training graph, which is not changed.

    An input `NAME.grad` for each parameter NAME is its outer gradient: the weights of the last synchronisation minus
    those of the workers after their own steps, in the mean over the workers, in float32 or float64 (Douillard et al.,
    DiLoCo, 2023, algorithm 1). The optimizer updates the parameters by it. Running statistics are averaged.

    Raises:
        GraphoptError: the graph updates no weights, or the optimizer rejects them.
    """
    outer = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}), ir_version=IR_VERSION)
    updated = {state_of(y) for y in with_role(model, Role.NEXT)}
    weights = [x for x in with_role(model, Role.PARAMETER, Role.STATISTIC) if x.name in updated]
    if not any(role_of(x) is Role.PARAMETER for x in weights):
        raise GraphoptError("an outer step needs an optimizer's update, found none: set an optimizer")
    gradients = []
    with state.detached(outer), Emitter(outer) as op:
        for x in weights:
            initial, role = state.initial(x), role_of(x)
            assert initial is not None and role is not None and x.dtype is not None
            w = state.declare(outer, str(x.name), initial.numpy(), role)
            g = ir.Value(name=gradient_of(x), type=ir.TensorType(wide_type(x)), shape=x.shape)
            gradients.append(set_role(g, Role.GRADIENT))
            if role is Role.PARAMETER:
                outer.graph.outputs.append(g)  # which the optimizer takes
            else:
                mean = op.Cast(op.Cast(w, to=wide_type(x)) - g, to=x.dtype)
                state.set_next(outer, w, op.Identity(mean))
    optimizer(outer)
    outer.graph.inputs.extend(gradients)
    known = {str(x.name) for x in weights}
    for x in with_role(outer, *STATE, Role.HYPERPARAMETER, Role.NEXT):
        if state_of(x) not in known:
            x.name = f"{OUTER}{x.name}"
    return outer
