"""Train in PyTorch what a role trains: the file's weights, the same batches, PyTorch's own loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import onnx
import torch

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def network(path: Path) -> torch.nn.Sequential:
    """Return a chain of Flatten, Gemm and Relu with the weights of a file."""
    graph = onnx.load(path).graph
    weights = {x.name: torch.tensor(onnx.numpy_helper.to_array(x)) for x in graph.initializer}
    layers: list[torch.nn.Module] = []
    for node in graph.node:
        if node.op_type != "Gemm":
            layers.append({"Flatten": torch.nn.Flatten, "Relu": torch.nn.ReLU}[node.op_type]())
            continue
        weight, bias = (weights[name] for name in node.input[1:])
        is_turned = any(a.name == "transB" and a.i for a in node.attribute)
        layer = torch.nn.Linear(*weight.shape[:: -1 if is_turned else 1])
        layer.load_state_dict({"weight": weight if is_turned else weight.T, "bias": bias})
        layers.append(layer)
    return torch.nn.Sequential(*layers)


def losses(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss: Loss = torch.nn.functional.cross_entropy,
    clip: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[float]:
    """Train a network on batches, and return the loss of each, before its step."""
    found = []
    for x, target in batches:
        optimizer.zero_grad()
        value = loss(net(x), target)
        value.backward()
        for parameter in net.parameters() if clip else ():
            parameter.grad = clip(parameter.grad)
        optimizer.step()
        found.append(float(value.detach()))
    return found
