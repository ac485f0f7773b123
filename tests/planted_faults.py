"""Host folders whose runtime computes one node wrongly, to see that each host notices at its first step.

A fault is a number by which the output of a node is multiplied. The runtime alone has it: a shim opens `faulty.onnx` in
place of `train.onnx`, and the rest of the folder is as `export_hosts` wrote it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from host_graphs import GRAPHS

import graphopt

FACTOR = 1.01  # of a wrong kernel
NETWORKS = ("mlp", "cnn", "lstm", "transformer", "adapter")
PER_NETWORK = 5
# Operators whose results are numbers that train: not sizes, masks, or what a graph compares.
_COMPUTES = {
    "Add", "AveragePool", "BatchNormalization", "Conv", "Div", "Exp", "Gemm", "LayerNormalization", "LogSoftmax",
    "MatMul", "Mul", "Pow", "Reciprocal", "ReduceMean", "ReduceSum", "Relu", "Softmax", "Sqrt", "Sub", "Tanh", "Erf",
    "Sigmoid", "Gelu", "LSTM", "Scan",
}  # fmt: skip


def written(name: str, folder: Path) -> list[str]:
    """Write a host folder and its wrong graphs, `faulty-0.onnx` on; return what is wrong in each."""
    graphopt.export_hosts(GRAPHS[name][0](), folder)
    told = []
    for i, (what, content) in enumerate(_faulty((folder / "train.onnx").read_bytes(), name)):
        (folder / f"faulty-{i}.onnx").write_bytes(content)
        told.append(what)
    return told


def _faulty(content: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    model = onnx.load_from_string(content)
    types = {y.name: y.dtype for node in _inferred(content) for y in node.outputs}
    given = {y.name for y in model.graph.output}  # of which the proof tells the name itself
    given |= {x for node in model.graph.node if "graphopt.check" in node.output for x in node.input}
    numbers = [
        i
        for i, node in enumerate(model.graph.node)
        if node.op_type in _COMPUTES and node.output[0] not in given and types.get(node.output[0]) == ir.DataType.FLOAT
    ]
    kinds = sorted({model.graph.node[i].op_type for i in numbers})
    draw = random.Random(name)
    for kind in draw.sample(kinds, PER_NETWORK):
        changed = onnx.ModelProto.FromString(content)
        at = draw.choice([i for i in numbers if model.graph.node[i].op_type == kind])
        node = changed.graph.node[at]
        y, node.output[0] = node.output[0], f"{node.output[0]}.right"
        changed.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(FACTOR), "fault"))
        changed.graph.node.insert(at + 1, onnx.helper.make_node("Mul", [node.output[0], "fault"], [y]))
        yield f"{kind} {y}", changed.SerializeToString()


def _inferred(content: bytes) -> ir.Graph:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.load_from_string(content))).graph
