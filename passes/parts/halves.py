"""Split a training graph where workers exchange gradients: the gradients of a batch, and the update from their mean.

Workers that exchange weights instead have an outer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import BATCH_WEIGHT, GRADIENT_OF, POSITIONS
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.roles import FED, STATE, Role, role_of, set_role, with_role
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import FIRST_ROW, ROWS, SHARE, gradient_of, local_of, name_of, state_of, wide_type
from passes.parts.vector_jacobian import extract_part, remove_unused_inputs


def cut(model: ir.Model) -> tuple[ir.Model, ir.Model]:
    """Return the halves `grad` and `apply` of a training graph that is not simplified yet; the graph is changed.

    `grad` reads data and state. It returns the loss and other numbers of the forward pass, the gradients `NAME.grad`
    before clipping, new running statistics, and `rows`: the weight of the batch in a mean over several batches, which
    is its number of rows, or the sum of the weights if the loss is a weighted mean. `apply` reads the sums of the
    gradients and statistics over all workers, multiplies them by its input `share`, and returns the new state. State
    is a plain input of both halves.

    Dropout's masks depend on the position of a row. The input `first_row` of `grad`, if there is one, is the position
    of the batch's first row among the rows of all workers.

    Raises:
        GraphoptError: the graph has no optimizer, accumulates gradients, or has several weighted losses.
    """
    gradients = {
        y: name for node in model.graph for y in node.outputs if (name := GRADIENT_OF.read(y)) is not None
    }
    following = with_role(model, Role.NEXT)
    if not gradients or not following:
        raise GraphoptError(
            "several workers need gradients and an optimizer's update, found none: set an optimizer, and leave fuse out"
        )
    if state.accumulators(model):
        raise GraphoptError(
            "several workers: expected a pipeline without accumulate, found one: give each worker larger batches"
        )
    with state.detached(model):
        _shift_positions(model)
        weight = _batch_weight(model)
        model.graph.sort()
        local = _local(model, gradients)
        with Emitter(model) as op:
            for i, y in enumerate(model.graph.outputs):
                if role_of(y) is Role.NEXT and y.producer() in local:  # a statistic
                    name, y.name = y.name, local_of(y)
                    model.graph.outputs[i] = set_role(op.Identity(y, _outputs=[name]), Role.NEXT)
        made = {y for node in local for y in node.outputs}
        read = {
            y: made.intersection(x for node in ancestors([y], local) for x in values_read(node))
            for y in model.graph.outputs
            if y not in made
        }
        results = [y for y in read if read[y] or role_of(y) in (Role.NEXT, Role.DIAGNOSTIC)]
        needed = {x for y in results for x in read[y]}
        summed = [x for node in model.graph for x in node.outputs if x in needed]
        _scale(model, summed, local)
        for x in summed:
            if x in gradients:
                x.name = gradient_of(gradients[x])
            set_role(x, Role.GRADIENT if x in gradients else Role.SAVED)
        model.graph.sort()
        reported = [y for y in model.graph.outputs if y not in results and y not in summed]
    state.take_initial(model)
    inputs = list(model.graph.inputs)
    grad = extract_part(model, inputs, [*reported, weight, *summed])
    apply = extract_part(model, [*inputs, *summed], results)
    for half in (grad, apply):
        remove_unused_inputs(half)
    return grad, apply


def _local(model: ir.Model, gradients: dict[ir.Value, str]) -> set[ir.Node]:
    """Return the nodes that depend on the data of one worker: the forward and backward pass."""
    ends = {gradient.producer() for gradient in gradients}
    backward = ancestors(gradients)
    after = set(gradients)
    known = set(with_role(model, *FED))
    found: set[ir.Node] = set()
    for node in model.graph:
        read = values_read(node)
        if node not in backward and any(x in after for x in read):
            after.update(node.outputs)
        elif node in ends or any(x in known for x in read):
            found.add(node)
            known.update(node.outputs)
    return found


def _scale(model: ir.Model, summed: Sequence[ir.Value], local: set[ir.Node]) -> None:
    """Let the nodes that are not local read each value times the new input `share`."""
    state.check_free(model, SHARE)
    share = ir.Value(name=SHARE, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    model.graph.inputs.append(set_role(share, Role.SAVED))
    with Emitter(model) as op:
        for x in summed:
            users = [(user, index) for user, index in x.uses() if user not in local]
            scaled = x * (share if x.dtype == share.dtype else op.Cast(share, to=x.dtype))
            for user, index in users:
                user.replace_input_with(index, scaled)


def _batch_weight(model: ir.Model) -> ir.Value:
    """Emit the weight of a batch in a mean over batches."""
    values = [*model.graph.inputs, *(y for node in model.graph for y in node.outputs)]
    noted = [(x, kind) for x in values if (kind := BATCH_WEIGHT.read(x))]
    kinds = {kind for _, kind in noted}
    if kinds - {"rows"} and (len(kinds) > 1 or len(noted) > 1):
        raise GraphoptError(
            "several workers: expected one loss that is a sum or a weighted mean, found several: use one"
        )
    summed = "sum" in kinds
    if summed and any(y.name == "penalty" for y in with_role(model, Role.METRIC)):
        raise GraphoptError(
            "several workers: expected a loss that is a mean beside a penalty, found a sum: set loss.reduction=mean"
        )
    state.check_free(model, ROWS)
    with Emitter(model) as op:
        if "mean" in kinds:
            weight = op.ReduceSum(noted[0][0], keepdims=0)
        else:
            data = next(x for x in with_role(model, *FED) if x.shape is not None and len(x.shape) > 0)
            weight = op.Squeeze(op.Shape(data, start=0, end=1), [0])
        weight = op.Identity(op.Cast(weight, to=ir.DataType.FLOAT), _outputs=[ROWS])
    BATCH_WEIGHT.write(weight, "sum" if summed else "mean")
    return set_role(weight, Role.METRIC)


def _shift_positions(model: ir.Model) -> None:
    """Let positions in masks count from the new input `first_row`."""
    ranges = [node for node in model.graph if POSITIONS.is_set(node)]
    if not ranges:
        return
    state.check_free(model, FIRST_ROW)
    first = ir.Value(name=FIRST_ROW, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([]))
    model.graph.inputs.append(set_role(first, Role.SAVED))
    data = next(x for x in with_role(model, *FED) if x.shape is not None and len(x.shape) > 0)
    with Emitter(model) as op:
        rows = op.Cast(op.Squeeze(op.Shape(data, start=0, end=1), [0]), to=ir.DataType.INT32)
        for node in ranges:
            positions = node.outputs[0]
            uses = list(positions.uses())
            start = first * (node.inputs[1] / rows)
            shifted = positions + start
            for user, index in uses:
                user.replace_input_with(index, shifted)


def outer_update(model: ir.Model, optimizer: Callable[[ir.Model], Any]) -> ir.Model:
    """Return the graph that updates the weights of several workers after each has trained on its own.

    An input `NAME.grad` for each parameter NAME is what the workers' own steps have subtracted from it, in the mean
    over the workers. The optimizer takes it for the gradient. Running statistics are averaged. Names of the optimizer's
    own state begin with `outer.`.
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
            w = state.declare(outer, name_of(x), initial.numpy(), role)
            g = ir.Value(name=gradient_of(x), type=ir.TensorType(wide_type(x)), shape=x.shape)
            gradients.append(set_role(g, Role.GRADIENT))
            if role is Role.PARAMETER:
                outer.graph.outputs.append(g)  # which the optimizer takes
            else:
                mean = op.Cast(op.Cast(w, to=wide_type(x)) - g, to=x.dtype)
                state.set_next(outer, w, op.Identity(mean))
    optimizer(outer)
    outer.graph.inputs.extend(gradients)
    known = {name_of(x) for x in weights}
    for x in with_role(outer, *STATE, Role.HYPERPARAMETER, Role.NEXT):
        if state_of(x) not in known:
            x.name = f"outer.{x.name}"
    return outer
