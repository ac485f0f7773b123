"""Write graphs as plain as any runtime reads them: the lowest opset, no notes, state as plain inputs."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from graphopt.graph import metadata
from graphopt.graph.opsets import ir_version_of, rewrite_in
from graphopt.graph.state import take_initial
from graphopt.graph.traversal import subgraphs

LOWEST_OPSET = 14  # importers and ONNX's evaluator have fewer operators, or wrong ones, of earlier opsets

# The first ONNX Runtime that reads an opset: https://onnxruntime.ai/docs/reference/compatibility.html
_VERSIONS = ("1.8", "1.9", "1.11", "1.12", "1.14", "1.15", "1.17", "1.18", "1.21", "1.22")
ONNXRUNTIME = dict(enumerate(_VERSIONS, start=14))


def lower(models: Sequence[ir.Model]) -> None:
    """Make the state of each model plain inputs, and convert it to the oldest opset that its operators allow."""
    for model in models:
        take_initial(model)
        RemoveUnusedOpsetsPass()(model)
        opset = rewrite_in([model], LOWEST_OPSET)
        model.ir_version = ir_version_of(opset)


def strip(model: ir.Model) -> None:
    """Remove the documentation and the metadata of a model, its nodes and its values."""
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    nodes = [*model.graph.all_nodes()]
    bodies = [body for node in nodes for body in subgraphs(node)]
    outputs = [y for node in nodes for y in node.outputs]
    holders: list[metadata.Holder] = [model, model.graph, *bodies, *nodes, *values, *outputs]
    for holder in holders:
        metadata.replace({}, holder)
        holder.doc_string = None


def untyped_proto(model: ir.Model) -> onnx.ModelProto:
    """Return a model without the types of inner values, which every runtime infers."""
    proto = ir.to_proto(model)
    graphs = [proto.graph]
    for graph in graphs:
        del graph.value_info[:]
        attributes = [attribute for node in graph.node for attribute in node.attribute]
        graphs += [body for x in attributes for body in ([x.g] if x.HasField("g") else x.graphs)]
    return proto
