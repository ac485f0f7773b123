"""Cut training graphs: a layer into forward and backward, and a step where several workers exchange numbers."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from graphopt.graph.traversal import extracted_model


def extract_part(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    """Return a copy of the part of a model between inputs and outputs."""
    part = extracted_model(model, inputs, outputs)
    RemoveUnusedOpsetsPass()(part)
    return part


def remove_unused_inputs(model: ir.Model) -> None:
    """Remove the inputs of a graph that nothing reads."""
    for x in list(model.graph.inputs):
        if not x.uses() and not x.is_graph_output():
            model.graph.inputs.remove(x)
