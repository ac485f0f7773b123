"""Cut a step between the gradients of a batch and the update from their mean, or make an outer step of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata, state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import BATCH_WEIGHT, GRADIENT_OF
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.roles import FED, STATE, Role, role_of, set_role, with_role
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import (
    FIRST_ROW,
    ROWS,
    SHARE,
    gradient_of,
    local_of,
    name_of,
    redirect,
    state_of,
    wide_type,
)
from passes.losses.loss import new_input
from passes.parts import extract_part, remove_unused_inputs

LEAST = 2.0**-30  # the weight of a batch whose rows all have weight 0: sums of gradients are divided by it


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
        GraphoptError: the graph has no optimizer, accumulates gradients, has those of `PrivateGradient`, or has several
            weighted losses.
    """
    gradients = {y: name for node in model.graph for y in node.outputs if (name := GRADIENT_OF.read(y)) is not None}
    if not gradients or not with_role(model, Role.NEXT):
        raise GraphoptError(
            "several workers need gradients and an optimizer's update, found none: set an optimizer, and leave fuse out"
        )
    if any(x.name == state.EXPECTED_ROWS for x in with_role(model, Role.HYPERPARAMETER)):
        raise GraphoptError(
            "several workers: expected gradients that are means over the rows of a batch, found those of "
            "PrivateGradient, which are divided by expected_rows: train on one worker"
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
    """Make the nodes that are not local read each value times the new input `share`."""
    share = new_input(model, SHARE, ir.DataType.FLOAT, ir.Shape([]), Role.SAVED)
    with Emitter(model) as op:
        for x in summed:
            users = [(user, index) for user, index in x.uses() if user not in local]
            scaled = x * op.cast(share, x.dtype)
            redirect(users, scaled)


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
        weight = op.ReduceSum(noted[0][0], keepdims=0) if "mean" in kinds else _rows(model, op)
        weight = op.Identity(op.Cast(weight, to=ir.DataType.FLOAT), _outputs=[ROWS])
    BATCH_WEIGHT.write(weight, "sum" if summed else "mean")
    return set_role(weight, Role.METRIC)


def _shift_positions(model: ir.Model) -> None:
    """Count positions in masks from the new input `first_row`."""
    ranges = [node for node in model.graph if metadata.POSITIONS.is_set(node)]
    if not ranges:
        return
    first = new_input(model, FIRST_ROW, ir.DataType.INT32, ir.Shape([]), Role.SAVED)
    with Emitter(model) as op:
        rows = op.Cast(_rows(model, op), to=ir.DataType.INT32)
        for node in ranges:
            positions = node.outputs[0]
            uses = list(positions.uses())
            shifted = positions + first * (node.inputs[1] / rows)
            redirect(uses, shifted)


def _rows(model: ir.Model, op: Emitter) -> ir.Value:
    """Emit the number of rows of the batch."""
    data = next(x for x in with_role(model, *FED) if x.shape is not None and len(x.shape) > 0)
    rows: ir.Value = op.Squeeze(op.Shape(data, start=0, end=1), [0])
    return rows


def outer_update(model: ir.Model, optimizer: Callable[[ir.Model], object]) -> ir.Model:
    """Return the graph that updates the weights of the last synchronisation; see `graphopt.compiler.outer_step`."""
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
