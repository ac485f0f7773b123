"""Write BatchNormalization as arithmetic that clusters compute together with its statistics and what reads it."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.sizes import has_sizes, sizes_of
from graphopt.graph.values import like, swap
from graphopt.targets.native.forms import NodeForms, rank_of
from graphopt.targets.portable.normalizations import batch_normalization

_LEAST_OPSET = 13  # whose Unsqueeze has its axes as an input


def write_out_normalizations(model: ir.Model, forms: NodeForms) -> None:
    """Replace each BatchNormalization of float32 that reads its statistics by arithmetic."""
    if model.opset_imports.get("", 1) < _LEAST_OPSET:
        return
    with Emitter(model) as op:
        for node in list(model.graph):
            if node.op_type != "BatchNormalization" or forms.attributes_of(node) is None:
                continue
            if any(x is None or x.dtype != ir.DataType.FLOAT for x in node.inputs):
                continue
            results = batch_normalization(op, node)
            if results is not None:
                y = node.outputs[0]
                swap(y, like(results[0], y))
                model.graph.remove(node, safe=True)
    model.graph.sort()
    _center_again(model.graph)


def _center_again(graph: ir.Graph) -> None:
    """Give each reader of x - mean, with a mean of each channel, a node of its own: it may then read x itself."""
    for node in list(graph):
        if node.op_type != "Sub" or node.domain or not _is_by_channel(node):
            continue
        y = node.outputs[0]
        for use in list(y.uses())[1:]:
            if use.node.graph is not graph:
                continue
            copy = ir.Node("", "Sub", node.inputs)
            graph.insert_before(use.node, copy)
            use.node.replace_input_with(use.idx, like(copy.outputs[0], y))


def _is_by_channel(node: ir.Node) -> bool:
    """Return whether a node takes a number of each channel from all of its elements."""
    x, vector = node.inputs
    if x is None or vector is None or not has_sizes(x) or not has_sizes(vector):
        return False
    rank = rank_of(x)
    sizes = [1] * (rank - rank_of(vector)) + sizes_of(vector)
    return 2 < rank == len(sizes) and sizes == [1, sizes_of(x)[1], *[1] * (rank - 2)]
