"""Split training graphs: a layer into forward and backward, and a step where several workers exchange numbers.

Workers exchange gradients between the halves of a step: the gradients of a batch, and the update from their mean. If
they compute the batch statistics of BatchNormalization together, they exchange these within the first half. Workers
that exchange weights instead have an outer step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedOpsetsPass

from graphopt.errors import GraphoptError
from graphopt.graph import metadata, state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import BATCH_CORRECTION, BATCH_COUNT, BATCH_GRADIENT, BATCH_WEIGHT, GRADIENT_OF
from graphopt.graph.names import FIRST_ROW, ROWS, SHARE, gradient_of, local_of, seed_of, state_of
from graphopt.graph.operators import ARITHMETIC, MICROSOFT, PRODUCTS, VIEWS
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.roles import FED, STATE, Role, role_of, set_role, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import ancestors, extracted_between, values_read
from graphopt.graph.values import dims_of, name_of, wide_type
from passes.losses.loss import new_input

LEAST = 2.0**-30  # the weight of a batch whose rows all have weight 0: sums of gradients are divided by it
WIDE = ir.DataType.DOUBLE  # of sums, in which the variance is a difference of squares
_Formula = Callable[[ir.Value], ir.Value]

# Operators that only rearrange or convert elements: recomputed from their inputs instead of saved.
RECOMPUTED = VIEWS | {"Cast", "Transpose"}


def forward_and_backward(model: ir.Model) -> tuple[ir.Model, ir.Model]:
    """Return the forward and backward parts of a graph that `VectorJacobianProduct` made.

    The forward part returns the model's outputs, `NAME.next` of state, and the values that the backward part reads.
    The backward part returns the gradients. Its inputs have the names of inputs or outputs of the forward part, or are
    `Y.seed`.
    """
    results = with_role(model, Role.PREDICTION, Role.NEXT)
    gradients = with_role(model, Role.GRADIENT)
    ahead = ancestors(results, ())
    after = ancestors(gradients, ahead)
    read = {x for node in after for x in values_read(node)} | set(gradients)
    boundary = [y for node in model.graph if node in ahead for y in node.outputs if y in read]
    there = {None, *model.graph.inputs, *model.graph.initializers.values(), *boundary}
    made = [(y, node) for y in boundary if (node := y.producer())]
    # Values that can be recomputed from others or from inputs are not saved.
    saved = [y for y, node in made if node.op_type not in RECOMPUTED or not there.issuperset(node.inputs)]
    inputs = [x for x in model.graph.inputs if role_of(x) is not Role.SEED]
    forward = extract_part(model, inputs, [*results, *(x for x in saved if x not in results)])
    for output in list(forward.graph.outputs)[len(results) :]:
        set_role(output, Role.SAVED)
    behind = extract_part(model, [*model.graph.inputs, *saved], gradients)
    state.take_initial(behind)
    remove_unused_inputs(behind)
    return forward, behind


def yielding(model: ir.Model) -> ir.Model:
    """Convert a graph of `VectorJacobianProduct` to the form that onnxruntime-training's TrainingAgent requires.

    A YieldOp node of ONNX Runtime's domain separates forward and backward. It reads the results of the forward pass,
    and its outputs are the seeds.
    """
    model = model.clone()
    graph = model.graph
    results = with_role(model, Role.PREDICTION, Role.NEXT)
    seeds = {name_of(seed): seed for seed in with_role(model, Role.SEED)}
    seeded = [seeds.get(seed_of(y)) for y in results]
    gradients = with_role(model, Role.GRADIENT)
    for seed in seeds.values():
        graph.inputs.remove(seed)
    graph.outputs.clear()
    with Emitter(model) as op:
        fetched = [op.Identity(y) if y.producer() is None else y for y in results]
    attributes = [
        ir.AttrInt64s("non_differentiable_outputs", [i for i, seed in enumerate(seeded) if not seed]),
        ir.AttrInt64s("full_shape_outputs", [i for i, seed in enumerate(seeded) if seed]),
    ]
    graph.append(ir.Node(MICROSOFT, "YieldOp", fetched, attributes, outputs=[*filter(None, seeded)]))
    graph.opset_imports[MICROSOFT] = 1
    graph.outputs.extend(gradients)
    graph.sort()
    return model


def extract_part(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    """Return a copy of the part of a model between inputs and outputs."""
    graph = extracted_between(model.graph, inputs, outputs)
    part = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    RemoveUnusedOpsetsPass()(part)
    return part


def remove_unused_inputs(model: ir.Model) -> None:
    """Remove the inputs of a graph that nothing reads."""
    for x in list(model.graph.inputs):
        if not x.uses() and not x.is_graph_output():
            model.graph.inputs.remove(x)


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
    if not gradients or not with_role(model, Role.NEXT):
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
    share = new_input(model, SHARE, ir.DataType.FLOAT, ir.Shape([]), Role.SAVED)
    with Emitter(model) as op:
        for x in summed:
            users = [(user, index) for user, index in x.uses() if user not in local]
            scaled = x * op.cast(share, x.dtype)
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
        weight = op.ReduceSum(noted[0][0], keepdims=0) if "mean" in kinds else _rows(model, op)
        weight = op.Identity(op.Cast(weight, to=ir.DataType.FLOAT), _outputs=[ROWS])
    BATCH_WEIGHT.write(weight, "sum" if summed else "mean")
    return set_role(weight, Role.METRIC)


def _shift_positions(model: ir.Model) -> None:
    """Let positions in masks count from the new input `first_row`."""
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
            for user, index in uses:
                user.replace_input_with(index, shifted)


def _rows(model: ir.Model, op: Emitter) -> ir.Value:
    """Emit the number of rows of the batch."""
    data = next(x for x in with_role(model, *FED) if x.shape is not None and len(x.shape) > 0)
    rows: ir.Value = op.Squeeze(op.Shape(data, start=0, end=1), [0])
    return rows


def stages_of_batch(grad: ir.Model) -> list[ir.Model]:
    """Cut the half `grad`, which is not simplified yet, where workers sum batch statistics; the graph is changed.

    A stage returns sums over a worker's rows, `batch_sum.0`, `batch_sum.1`, ... Later stages read their sums over all
    workers under the same names, and other values of earlier stages as data. Each BatchNormalization needs two
    sums: of its statistics, and of their gradients. Without any, the graph is the only stage.

    Raises:
        GraphoptError: a BatchNormalization normalizes by the rows of a batch without running statistics that train.
    """
    fed = set(with_role(grad, *FED))
    for node in grad.graph.all_nodes():
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode"):
            before = {node} | ancestors(x for x in node.inputs if x is not None)
            if any(x in fed for one in before for x in values_read(one)):
                raise GraphoptError(
                    f"BatchNormalization node {node.name!r}: expected running statistics that train, found statistics "
                    f"of the batch alone: add passes.TrainingMode(), or set statistics=local"
                )
    if not any(metadata.OF_BATCH.is_set(node) for node in grad.graph):
        return [grad]
    ensure_typed(grad)
    summed = _sum_over_workers(grad)
    ensure_typed(grad)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(grad)  # each stage can have them
    grad.graph.sort()
    return _stages(grad, _levels(grad.graph, summed), summed)


def _levels(graph: ir.Graph, summed: Collection[ir.Value]) -> dict[ir.Node | None, int]:
    """Return the stage of each node: results as early as possible, and what they need as late as possible."""
    levels: dict[ir.Node | None, int] = {None: 0}
    for node in graph:
        levels[node] = max((levels[x.producer()] + (x in summed) for x in values_read(node)), default=0)
    for node in reversed(graph):
        if not any(y in summed or y.is_graph_output() for y in node.outputs):
            readers = [levels[user] for y in node.outputs for user in y.consumers()]
            levels[node] = min(readers, default=levels[node])
    return levels


def _stages(
    grad: ir.Model, levels: Mapping[ir.Node | None, int], summed: Collection[ir.Value]
) -> list[ir.Model]:
    """Return a graph for each level of nodes. It reads data, state, and values of earlier graphs by their names."""
    found: list[ir.Model] = []
    known, passed = dict.fromkeys(grad.graph.inputs), set()
    for level in range(max(levels.values()) + 1):
        made = [y for node in grad.graph if levels[node] == level for y in node.outputs]
        ends = [y for y in made if y in summed or y.is_graph_output()]
        read = [y for y in made if y not in ends and any(levels[user] > level for user in y.consumers())]
        available = {*known, *ends, *read}
        outputs = [*ends, *(y for y in read if not _is_repeated(y, available))]
        for y in outputs:
            if role_of(y) is None:
                set_role(y, Role.PASSED)
        stage = extract_part(grad, list(known), outputs)
        remove_unused_inputs(stage)
        for x in stage.graph.inputs:
            if x.name in passed:
                set_role(x, Role.DATA)
        found.append(stage)
        known |= dict.fromkeys(outputs)
        passed |= {y.name for y in outputs if y not in summed}
    return found


def _is_repeated(y: ir.Value, known: Collection[ir.Value]) -> bool:
    """Return whether later stages compute a value again: it is elementwise in known ones, and no product reads it."""
    node, readers = y.producer(), {user.op_type for user in y.consumers()}
    if node is None or node.op_type not in ARITHMETIC or not readers.isdisjoint(PRODUCTS):
        return False
    return all(_is_known(x, known) for x in values_read(node))


def _is_known(x: ir.Value, known: Collection[ir.Value]) -> bool:
    """Return whether a value is known, or a view or cast of one that is."""
    if x in known or x.is_initializer():
        return True
    node = x.producer()
    if node is None or node.op_type not in VIEWS | {"Cast"}:
        return False
    return all(_is_known(y, known) for y in values_read(node))


def _sum_over_workers(model: ir.Model) -> dict[ir.Value, None]:
    """Replace statistics of a worker's rows by those of the rows of all workers, and return the values to sum."""
    summed: dict[ir.Value, None] = {}
    nodes = list(model.graph)
    with Emitter(model) as op:

        def total(x: ir.Value) -> ir.Value:
            y: ir.Value = op.Identity(x, _outputs=[f"batch_sum.{len(summed)}"])
            summed[set_role(y, Role.SUMMED)] = None
            return y

        for node in nodes:
            if metadata.OF_BATCH.is_set(node):
                _moments(op, node, total)
            elif BATCH_COUNT.is_set(node):
                _replace(op, node, total)
        weight = _weight(op, model)
        for node in nodes:
            if BATCH_GRADIENT.is_set(node):
                _replace(op, node, lambda x: total(weight * x) / weight if weight else total(x))
    return summed


def _replace(op: Emitter, node: ir.Node, formula: _Formula) -> None:
    """Replace the second input of a node by a function of it."""
    x = node.inputs[1]
    assert x is not None
    node.replace_input_with(1, op.Cast(formula(op.Cast(x, to=WIDE)), to=x.dtype))


def _moments(op: Emitter, node: ir.Node, total: _Formula) -> None:
    """Compute M = sum(n m) / N and V = sum(n (v + m^2)) / N - M^2 from the means and variances of the workers."""
    x, _, _, mean, variance = node.inputs
    assert x is not None and mean is not None and variance is not None
    axes = [0, *range(2, len(dims_of(x)))]
    n = op.Cast(op.ReduceProd(op.Gather(op.shape_of(x), axes), keepdims=0), to=WIDE)
    own = op.ReduceMean(x, axes)
    centered = x - own
    v = op.Cast(op.ReduceMean(centered * centered, axes, keepdims=0), to=WIDE)
    m = op.Cast(op.Squeeze(own, axes), to=WIDE)
    count = total(n)
    whole = total(n * m) / count
    second = total(n * (v + m * m)) / count
    for old, new in ((mean, whole), (variance, op.Max(second - whole * whole, 0.0))):
        new = op.Cast(new, to=old.dtype)
        for user, index in old.uses():
            user.replace_input_with(index, new)
            if BATCH_CORRECTION.is_set(user):
                _replace(op, user, lambda _: count / op.Max(count - 1.0, 1.0))


def _weight(op: Emitter, model: ir.Model) -> ir.Value | None:
    """Return the weight of the batch in the loss, and let it be positive; None if the loss is a sum."""
    rows = next(y for y in model.graph.outputs if y.name == ROWS)
    if BATCH_WEIGHT.read(rows) == "sum":
        return None
    node = rows.producer()
    assert node is not None and node.inputs[0] is not None
    x = node.inputs[0]
    node.replace_input_with(0, op.Max(x, op.constant(LEAST, like=x)))
    return op.Cast(node.outputs[0], to=WIDE)


def outer_update(model: ir.Model, optimizer: Callable[[ir.Model], Any]) -> ir.Model:
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
