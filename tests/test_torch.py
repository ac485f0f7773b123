"""Models exported by PyTorch compile unchanged and train as PyTorch trains them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch_models
from twins import descended

import graphopt
import passes
from graphopt.testing.reference import evaluator

OPTIMIZERS = {
    "momentum": (
        passes.SGD(0.05, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    ),
    "adamw": (passes.AdamW(1e-3), lambda parameters: torch.optim.AdamW(parameters, 1e-3)),
}


def torch_losses(name, optimizer, batches):
    network, _, _ = torch_models.build(name)
    reference = OPTIMIZERS[optimizer][1](network.parameters())
    for x, labels in batches:
        loss = torch.nn.functional.cross_entropy(network(x), labels)
        descended(loss, reference)
        yield loss.item()


def batches(name, steps):
    """Return batches of different sizes, which a dynamic batch must take."""
    return [torch_models.build(name, batch=4 + i % 3, seed=i)[1:] for i in range(steps)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", torch_models.MODELS)
@pytest.mark.slow
@pytest.mark.sample(6)
def test_losses_are_pytorchs(name, exporter, optimizer):
    step = graphopt.compile(
        torch_models.exported(name, exporter), loss=passes.CrossEntropy(), optimizer=OPTIMIZERS[optimizer][0]
    )
    executor = graphopt.Executor(step, threads=1)
    data = batches(name, 20)
    found = [executor.step(x=x.numpy(), target=labels.numpy())["loss"] for x, labels in data]
    np.testing.assert_allclose(found, list(torch_losses(name, optimizer, data)), rtol=1e-4)


@pytest.mark.parametrize("name", torch_models.MODELS)
@pytest.mark.slow
def test_the_training_graph_is_standard_and_equal_on_the_reference_evaluator(name):
    step = graphopt.compile(
        torch_models.exported(name, "dynamo"), loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3)
    )
    proto = ir.to_proto(step)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {""}
    executor = graphopt.Executor(step, threads=1)
    reference = evaluator(step)
    state = executor.state
    for x, labels in batches(name, 4):
        feeds = {"x": x.numpy(), "target": labels.numpy()}
        names = [output.name for output in proto.graph.output]
        outputs = dict(zip(names, reference.run(None, {**feeds, **state}), strict=True))
        np.testing.assert_allclose(executor.step(feeds)["loss"], outputs["loss"], rtol=1e-5)
        state = {name: outputs[f"{name}.next"] for name in state}
