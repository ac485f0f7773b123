"""MNN, converted by the library's own converter: the package MNN.tools installs others when it is imported."""

import tempfile
from pathlib import Path

import _tools
import MNN.expr
import MNN.nn
import numpy as np
import onnx


def open_graph(path, feeds):
    graph = onnx.load(path).graph
    inputs, outputs = [x.name for x in graph.input], [y.name for y in graph.output]
    with tempfile.TemporaryDirectory() as folder:
        converted = str(Path(folder, "graph.mnn"))
        command = "mnnconvert", "-f", "ONNX", "--modelFile", str(path), "--MNNModel", converted
        _tools.mnnconvert([*command, "--keepInputFormat"])
        module = MNN.nn.load_module_from_file(converted, inputs, outputs)

    def run(fed):
        variables = [_variable(fed[name]) for name in inputs]
        return {y: np.array(value.read()) for y, value in zip(outputs, module.forward(variables), strict=True)}

    return run


def _variable(array):
    array = array.astype(np.int32) if array.dtype == np.int64 else array  # MNN has no int64
    kind = MNN.expr.int if array.dtype == np.int32 else MNN.expr.float
    return MNN.expr.const(np.ascontiguousarray(array), list(array.shape), MNN.expr.NCHW, kind)
