"""From a training graph back to the inference model in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from graphopt.roles import ORIGINAL_NAME, STATE, Role, role_of, with_role


def extract(model: ir.Model, outputs: Sequence[ir.Value]) -> ir.Model:
    """Return the part of a training graph that computes `outputs`, with the inputs that it needs."""
    graph = ir.convenience.extract(model.graph, list(model.graph.inputs), list(outputs))
    for value in list(graph.inputs):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(value.name or "", None)
            graph.inputs.remove(value)
    extracted = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    RemoveUnusedOpsetsPass()(extracted)
    return extracted


def trained(model: ir.Model, state: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Return the inference model inside a training graph, with the values of `state` as its weights.

    Inputs, outputs and weights have the names of the model that was compiled.
    """
    inference = extract(model, with_role(model, Role.PREDICTION))
    graph = inference.graph
    for value in [value for value in graph.inputs if role_of(value) in STATE]:
        graph.inputs.remove(value)
        graph.initializers.pop(value.name or "", None)
        array = state[value.name or ""]
        value.name = value.metadata_props.get(ORIGINAL_NAME, value.name)
        value.const_value = ir.tensor(array, name=value.name)
        graph.register_initializer(value)
    for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]:
        for key in [key for key in value.metadata_props if key.startswith("graphopt.")]:
            del value.metadata_props[key]
    return ir.to_proto(inference)
