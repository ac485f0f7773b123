"""Accumulate the gradients of several small batches for one update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import GRADIENT_OF
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role, with_role
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import dims_of, dtype_of, like, name_of, next_of, redirect
from graphopt.intervals import within

_Values = dict[ir.Value, ir.Value]
APPLY = "apply"
FORWARD = "forward_step"


@dataclass(frozen=True)
class Accumulate(Pass):
    """Accumulate the gradients of several steps and update once for all of them. Run it after the optimizer.

    The update moves into a branch of an If, so that the other steps skip its work. Schedules and the optimizer count
    updates. Dropout draws a mask in each step.

    Args:
        steps: the number of steps per update. None adds the hyperparameter `apply`, true by default: feed false to
            accumulate, and true to update and restart.
        mean: update by the mean of the accumulated gradients instead of their sum.

    Raises:
        GraphoptError: `steps` is less than 1, the model has no optimizer, or a sum has the noise of one batch.

    >>> steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1), "accumulate": passes.Accumulate(4)}
    >>> step = graphopt.compile(models.linear((2,), 1), **steps)
    >>> "If" in [node.op_type for node in step.graph]
    True
    """

    steps: int | None = within("[1, inf)", None, whole=True)
    mean: bool = True

    def requires(self, model: ir.Model) -> None:
        self.follows_optimizer(model)
        if state.accumulators(model):
            raise GraphoptError("Accumulate: expected a model without it, found its sums: use one Accumulate")
        if not any(GRADIENT_OF.read(y) for node in model.graph for y in node.outputs):
            raise GraphoptError("Accumulate: expected it before Fuse, found it after: run it first")
        if not self.mean and any(x.name == state.MULTIPLIER for x in with_role(model, Role.HYPERPARAMETER)):
            raise GraphoptError(
                "Accumulate(mean=False): expected mean=True with GaussianNoise, whose noise is that of one batch, "
                "found a sum of several: leave mean out"
            )

    def rewrite(self, model: ir.Model) -> None:
        computed = [y for node in model.graph for y in node.outputs]
        gradients = {y: name for y in computed if (name := GRADIENT_OF.read(y)) is not None}
        _count_forward_steps(model, [*gradients, *with_role(model, Role.LOSS)])
        with Emitter(model) as op:
            count = state.declare(model, state.ACCUMULATED, np.array(0.0, np.float32), Role.SLOT)
            done = count + 1
            if self.steps is None:
                apply = state.declare(model, APPLY, np.array(True), Role.HYPERPARAMETER)
            else:
                apply = op.GreaterOrEqual(done, float(self.steps))
            continued, restarted = {count: done}, {count: op.constant(0.0, like=count)}
            for gradient, name in gradients.items():
                zeros = np.zeros(ir.Shape(dims_of(gradient)).numpy(), dtype_of(gradient).numpy())
                slot = state.declare_slot(model, name, state.ACCUMULATED, zeros)
                uses = list(gradient.uses())
                total = slot + gradient
                mean = total / op.Cast(done, to=total.dtype) if self.mean else total
                redirect(uses, mean)
                continued[slot], restarted[slot] = total, op.constant(0.0, like=slot)
            _update_if(model, op, apply, continued, restarted)


def _count_forward_steps(model: ir.Model, results: Iterable[ir.Value]) -> None:
    """Count all steps for nodes that compute `results`, such as Dropout masks: `step` will count updates only."""
    forward = ancestors(results)
    users = [(user, index) for user, index in state.counter(model).uses() if user in forward]
    if users:
        every = state.declare(model, FORWARD, np.array(0, np.int64), Role.COUNTER)
        with Emitter(model) as op:
            state.set_next(model, every, op.Add(every, 1))
        redirect(users, every)


def _update_if(model: ir.Model, op: Emitter, apply: ir.Value, continued: _Values, restarted: _Values) -> None:
    """Move the nodes that update parameters, slots, `step` and the accumulators into a branch."""
    graph = model.graph
    nexts = {next_of(x): x for x in with_role(model, Role.PARAMETER, Role.SLOT, Role.COUNTER)}
    updates = {nexts[name_of(y)]: y for y in graph.outputs if y.name in nexts and y.name != next_of(FORWARD)}
    for x, y in updates.items():
        graph.outputs.remove(y)
        y.name = f"{x.name}.updated"
    outside = ancestors([*graph.outputs, apply, *continued.values(), *restarted.values()])
    inside = ancestors(updates.values()) - outside
    moved = [node for node in graph if node in inside]
    # A node that stays although nothing reads it would read what moves.
    graph.remove([node for node in graph if node not in outside])
    then_branch = _body(op, "then_branch", moved, {**updates, **restarted})
    else_branch = _body(op, "else_branch", [], {**{x: x for x in updates}, **continued})
    branches = {"then_branch": then_branch, "else_branch": else_branch}
    following = op.If(apply, **branches, _outputs=len(updates) + len(continued))
    for x, y in zip([*updates, *continued], following, strict=True):
        state.set_next(model, x, like(y, x))


def _body(op: Emitter, name: str, nodes: list[ir.Node], values: _Values) -> ir.Graph:
    """Return a graph of `nodes` that outputs each value of `values` in the shape of its key."""
    body = ir.Graph([], [], nodes=nodes, name=name)
    inner = op.within(body)
    for x, value in values.items():
        whole = value.shape == x.shape
        result = inner.Identity(value) if whole else inner.Expand(value, inner.shape_of(x))
        body.outputs.append(like(result, x))
    return body
