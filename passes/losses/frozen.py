"""Put a second model without gradients into a training graph: a teacher, or the model as it was before training."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import inference, state
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import ROLE, UNTRAINED
from graphopt.graph.roles import STATE, role_of, with_role
from graphopt.graph.values import name_of


def put_in(model: ir.Model, part: ir.Model, inputs: Mapping[str, ir.Value], prefix: str) -> list[ir.Value]:
    """Move the nodes of another model into a graph and return its outputs; its weights do not train.

    Args:
        part: the other model, which is used up.
        inputs: the values of the graph that the other model's inputs read, by their names.
        prefix: what its names begin with in the graph.

    Raises:
        GraphoptError: it has another opset.
    """
    for domain, version in part.opset_imports.items():
        if model.opset_imports.setdefault(domain, version) != version:
            raise GraphoptError(
                f"{prefix}: expected operators of opset {model.opset_imports[domain]}, that of the model, found "
                f"{version}: export both with the same opset"
            )
    graph = part.graph
    for x in list(graph.inputs):
        ir.convenience.replace_all_uses_with(x, inputs[name_of(x)], replace_graph_outputs=True)
    outputs, weights = list(graph.outputs), list(graph.initializers.values())
    graph.outputs.clear()
    graph.initializers.clear()
    for w in weights:
        w.name = f"{prefix}/{w.name}"
        UNTRAINED.set(w)
        model.graph.register_initializer(w)
    nodes = list(graph)
    graph.remove(nodes)
    for node in nodes:
        for y in node.outputs:
            y.name = f"{prefix}/{y.name}" if y.name else y.name
            ROLE.remove(y)
            InferenceForm.remove(y)
    model.graph.extend(nodes)
    return outputs


def before_training(model: ir.Model, prediction: ir.Value) -> ir.Model:
    """Return the part of a graph that computes a prediction, without adapters, with the initial weights as constants.

    Frozen weights are the graph's own, so that the part adds the initial values of weights that train, no more.
    """
    part = inference.extract(model, [prediction], merged=True)
    owners = {name_of(x): x for x in with_role(model, *STATE)}
    for x in [x for x in part.graph.inputs if role_of(x) in STATE]:
        part.graph.inputs.remove(x)
        initial = state.initial(owners[name_of(x)])
        assert initial is not None  # its name must stay, which is that of the value in the caller's file
        x.const_value = ir.tensor(initial.numpy(), dtype=initial.dtype, name=x.name)
        ROLE.remove(x)
        part.graph.register_initializer(x)
    return part


def share_weights(model: ir.Model, part: ir.Model) -> None:
    """Make a part of a graph read the graph's own frozen weights, which have the same names."""
    for name, w in list(part.graph.initializers.items()):
        own = model.graph.initializers.get(name)
        if own is not None and own.const_value is w.const_value:
            ir.convenience.replace_all_uses_with(w, own)
            del part.graph.initializers[name]
