"""Split forward and backward for a model that is a layer of a larger program, which computes the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import MICROSOFT, VIEWS
from graphopt.graph.rewriting import Pass, Pattern, matches
from graphopt.graph.roles import Role, role_of, set_role, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import ancestors, extracted_between, values_read
from graphopt.graph.values import gradient_of, is_floating, name_of, seed_of
from passes.gradients.walk import backward, lost

# Operators that only rearrange or convert elements: recomputed from their inputs instead of saved.
RECOMPUTED = VIEWS | {"Cast", "Transpose"}


@dataclass(frozen=True)
class VectorJacobianProduct(Pass):
    """Differentiate by the inputs and parameters, for a loss outside the model: add an output `X.grad` for each X.

    Each floating-point output Y gets an input `Y.seed` of the same shape: the gradient of the objective by Y. An input
    on which no output depends differentiably has no `X.grad`.

    Args:
        inputs: shell-style patterns of the floating-point inputs to differentiate by. None selects none.

    Raises:
        GraphoptError: no floating-point output depends differentiably on anything, or none on a parameter; or
            operators in between have no rule.

    >>> layer = graphopt.ForwardBackward(models.linear((2,), 1), gradient=passes.VectorJacobianProduct(inputs=None))
    >>> [value.name for value in layer.backward_model.graph.outputs]
    ['layers.0.bias.grad', 'layers.0.weight.grad']
    """

    inputs: Pattern = "*"

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        data = [x for x in with_role(model, Role.DATA) if is_floating(x) and matches(x.name, self.inputs)]
        parameters = with_role(model, Role.PARAMETER)
        outputs = [y for y in with_role(model, Role.PREDICTION) if is_floating(y)]
        seeds = {y: ir.Value(name=seed_of(y), type=y.type, shape=y.shape) for y in outputs}
        for seed in seeds.values():
            state.check_free(model, name_of(seed))
            model.graph.inputs.append(set_role(seed, Role.SEED))
        with Emitter(model) as op:
            gradients = backward(op, model.graph, seeds, [*data, *parameters])
            missing = [lost(parameter) for parameter in parameters if parameter not in gradients]
            if missing:
                raise GraphoptError(f"the outputs do not depend on {', '.join(missing)}: freeze them")
            if not gradients:
                raise GraphoptError(
                    "no gradient to compute: expected parameters, or floating-point inputs that outputs depend on "
                    "differentiably, found none: set inputs, or run Parameters first"
                )
            for x in gradients:
                gradient = op.Identity(gradients[x], _outputs=[gradient_of(x)])
                model.graph.outputs.append(set_role(gradient, Role.GRADIENT))


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
