"""Cut the joint graph of outputs and gradients into a forward and a backward part."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import MICROSOFT, VIEWS
from graphopt.graph.roles import Role, role_of, set_role, with_role
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import name_of, seed_of
from passes.parts import extract_part, remove_unused_inputs

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
