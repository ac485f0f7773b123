"""Files that ONNX Runtime's own optimizer wrote train as the files before it."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch_models
from steps import exported as export

import graphopt
import passes


def optimized(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


@functools.cache
def exported(name: str, opset: int) -> onnx.ModelProto:
    network, x, _ = torch_models.build(name)
    torch.manual_seed(0)
    with torch.no_grad():  # the exporter merges what is equal, and the runtime leaves no trace of that
        for parameter in network.parameters():
            parameter += 0.01 * torch.randn(parameter.shape)
    rows = {value: {0: "batch"} for value in "xy"}
    return export(network, x, dynamo=False, opset_version=opset, dynamic_axes=rows)


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("name", torch_models.MODELS)
@pytest.mark.slow
def test_a_file_that_the_runtime_optimized_trains_to_the_same_losses(name, opset, tmp_path):
    """Opset 14 has no LayerNormalization: the runtime's file has it in ONNX's domain all the same."""
    proto = exported(name, opset)
    fused = optimized(proto, tmp_path / "optimized.onnx")
    own = {"transformer": "LayerNormalization" if opset == 14 else "BiasGelu", "mlp": "FusedGemm"}
    assert own.get(name, "FusedConv") in {node.op_type for node in fused.graph.node}
    losses = []
    for source in (proto, fused):
        step = graphopt.compile(source, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.05, momentum=0.9))
        assert {node.domain for node in step.graph} == {""}
        executor = graphopt.Executor(step, threads=1)
        batches = [torch_models.build(name, batch=4 + i % 3, seed=i)[1:] for i in range(8)]
        losses.append([executor.step(x=x.numpy(), target=t.numpy())["loss"] for x, t in batches])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
