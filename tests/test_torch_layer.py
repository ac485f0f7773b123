"""An ONNX model as a PyTorch module: the gradients of PyTorch's own autograd, whatever the inputs and outputs."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from twins import descended

import graphopt
import passes

spec = importlib.util.spec_from_file_location("torch_layer", Path(__file__).parents[1] / "examples/torch_layer.py")
assert spec is not None and spec.loader is not None
torch_layer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_layer)


class Several(nn.Module):
    """Two floating inputs and one of class numbers; two floating outputs and one of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.one(x) + self.embedding(ids))
        logits = self.other(hidden) * scale
        return logits, hidden, logits.argmax(dim=1)


def exported(module: nn.Module, tensors: dict[str, torch.Tensor], outputs: list[str]) -> onnx.ModelProto:
    file = io.BytesIO()
    names = {"input_names": list(tensors), "output_names": outputs}
    torch.onnx.export(module, tuple(tensors.values()), file, dynamo=False, opset_version=17, **names)
    return onnx.load_from_string(file.getvalue())


@pytest.fixture
def pair() -> Any:
    """A module of PyTorch, the same as an ONNX layer, and inputs for each."""
    torch.manual_seed(0)
    module = Several()
    ids = torch.tensor([0, 3, 3, 6, 1])
    tensors = {"x": torch.randn(5, 4), "ids": ids, "scale": torch.rand(5, 1) + 0.5}
    layer = torch_layer.OnnxLayer(exported(module, tensors, ["logits", "hidden", "best"]))
    return module, layer, tensors


def with_gradients(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


OBJECTIVES = {
    "both outputs": lambda logits, hidden: logits.square().sum() + (hidden * hidden.detach().cos()).sum(),
    "the first": lambda logits, hidden: logits.square().sum(),
    "the second": lambda logits, hidden: hidden.exp().sum(),
    "through a transpose": lambda logits, hidden: (logits.T @ hidden).square().sum(),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_several_inputs_and_outputs_have_autograds_gradients(pair: Any, objective: str) -> None:
    module, layer, tensors = pair
    found = []
    for network in (module, layer):
        given = with_gradients(tensors)
        logits, hidden, best = network(given["x"], scale=given["scale"], ids=given["ids"])
        assert not best.is_floating_point() and not best.requires_grad
        OBJECTIVES[objective](logits, hidden).backward()
        parameters = {
            name.replace("weights.", ""): p.grad for name, p in network.named_parameters() if p.grad is not None
        }
        found.append(([logits, hidden, best], given["x"].grad, given["scale"].grad, parameters))
    (theirs, x, scale, by_torch), (ours, our_x, our_scale, by_onnx) = found
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_x, x, rtol=1e-4, atol=1e-6)
    if scale is None:  # what the objective does not depend on
        assert our_scale is None or not our_scale.any()
    else:
        torch.testing.assert_close(our_scale, scale, rtol=1e-4, atol=1e-6)
    for index, name in enumerate(layer.names):
        expected = by_torch.get(name)
        gradient = by_onnx.get(str(index))
        if expected is None:
            assert gradient is None or not gradient.any()
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_training_by_a_pytorch_optimizer_and_two_passes_on_their_way(pair: Any) -> None:
    """A siamese objective: the layer runs twice before its backward passes."""
    module, layer, tensors = pair
    losses = []
    for network in (module, layer):
        optimizer = torch.optim.Adam(network.parameters(), 0.01)
        losses.append([])
        for _ in range(10):
            first, _, _ = network(tensors["x"], tensors["ids"], tensors["scale"])
            second, _, _ = network(tensors["x"].flip(0).contiguous(), tensors["ids"], tensors["scale"])
            loss = (first - second).square().mean() + first.square().mean()
            descended(loss, optimizer)
            losses[-1].append(loss.item())
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_train_and_eval_are_the_models_forms() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(8, 3)
    module.eval()
    model = exported(module, {"x": x}, ["y"])
    layer = torch_layer.OnnxLayer(model, training=passes.TrainingMode())
    module.train()
    torch.testing.assert_close(layer(x), module(x), rtol=1e-4, atol=1e-5)
    module.eval(), layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), module(x), rtol=1e-3, atol=1e-4)


def test_what_does_not_fit_is_said(pair: Any) -> None:
    _, layer, tensors = pair
    with pytest.raises(TypeError, match="expected the inputs x, ids, scale, each once, found x, ids"):
        layer(tensors["x"], tensors["ids"])


def test_gradients_in_eval_are_pytorchs_after_training() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    model = exported(module, {"x": torch.randn(8, 3)}, ["y"])
    layer = torch_layer.OnnxLayer(model, training=passes.TrainingMode())
    for _ in range(2):  # other running statistics, then others again
        module.train(), layer.train()
        x = torch.randn(8, 3)
        module(x), layer(x)
        module.eval(), layer.eval()
        found = []
        for network in (module, layer):
            given = torch.arange(24.0).reshape(3, 8).T.div(10).requires_grad_()  # not contiguous
            network.zero_grad()
            y = network(given)
            y.square().sum().backward()
            found.append((y, given.grad, {name: p.grad for name, p in network.named_parameters()}))
        (theirs, x, by_torch), (ours, our_x, by_onnx) = found
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(our_x, x, rtol=1e-3, atol=1e-4)
        for index, name in enumerate(layer.names):
            torch.testing.assert_close(by_onnx[f"weights.{index}"], by_torch[name], rtol=1e-3, atol=1e-4)


def test_a_trained_file_has_the_gradients_of_its_running_statistics() -> None:
    """TrainingMode lets a BatchNormalization read the statistics of the batch; the trained file does not."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    first = graphopt.ForwardBackward(exported(module, {"x": torch.randn(8, 3)}, ["y"]), training=passes.TrainingMode())
    x = torch.randn(8, 3)
    first.forward(x)
    again = graphopt.ForwardBackward(first.trained(), training=None)
    module.train()(x), module.eval()
    given = x.clone().requires_grad_()
    module(given).sum().backward()
    found = again.forward(x).backward(torch.ones(8, 2))
    np.testing.assert_allclose(found["x"], given.grad, rtol=1e-3, atol=1e-4)
