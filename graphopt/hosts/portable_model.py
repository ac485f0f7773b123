"""Write graphs as plain as any runtime reads them: the lowest opset, no notes, state as plain inputs."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from graphopt.graph.opsets import ir_version_of, rewrite_in
from graphopt.graph.state import take_initial

LOWEST_OPSET = 13  # before, operators that graphs of opset 21 have mean something else

# The first ONNX Runtime that reads an opset: https://onnxruntime.ai/docs/reference/compatibility.html
ONNXRUNTIME = {
    13: "1.6",
    14: "1.8",
    15: "1.9",
    16: "1.11",
    17: "1.12",
    18: "1.14",
    19: "1.15",
    20: "1.17",
    21: "1.18",
    22: "1.21",
    23: "1.22",
}


def lower(models: Sequence[ir.Model]) -> None:
    """Make the state of models plain inputs, and rewrite each in the lowest opset that its operators have."""
    for model in models:
        take_initial(model)
        RemoveUnusedOpsetsPass()(model)
        opset = rewrite_in([model], LOWEST_OPSET)
        model.ir_version = ir_version_of(opset)


def plain_proto(model: ir.Model) -> onnx.ModelProto:
    """Return a model without types of inner values, documentation and metadata."""
    proto = ir.to_proto(model)
    proto.ClearField("doc_string")
    del proto.metadata_props[:]
    _strip(proto.graph)
    return proto


def _strip(graph: onnx.GraphProto) -> None:
    graph.ClearField("doc_string")
    del graph.value_info[:], graph.metadata_props[:]
    for value in [*graph.input, *graph.output, *graph.initializer]:
        value.ClearField("doc_string")
        del value.metadata_props[:]
    for node in graph.node:
        node.ClearField("doc_string")
        del node.metadata_props[:]
        for attribute in node.attribute:
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _strip(body)
