"""PyTorch models, and their exports to ONNX."""

from __future__ import annotations

import functools
import io
import warnings

import onnx
import torch
from torch import nn


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8, 4),
        )


class Block(nn.Module):
    def __init__(self, depth: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(depth, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(depth, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 12, 2))
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(self.stem(x))
        return self.head(nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.positions = nn.Parameter(torch.randn(6, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x) + self.positions).mean(1))


MODELS = {
    "mlp": (Mlp, (8,), "float"),
    "cnn": (Cnn, (1, 8, 8), "float"),
    "resnet": (ResNet, (3, 8, 8), "float"),
    "transformer": (Transformer, (6,), "tokens"),
}


def build(name: str, batch: int = 5, seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model in evaluation mode, a batch for it, and labels of four classes."""
    torch.manual_seed(seed)
    kind, shape, dtype = MODELS[name]
    network = kind().eval()
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # exporters merge weights that are equal
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    x = torch.randint(0, 11, (batch, *shape)) if dtype == "tokens" else torch.randn(batch, *shape)
    return network, x, torch.randint(0, 4, (batch,))


def export(network: nn.Module, x: torch.Tensor, exporter: str) -> onnx.ModelProto:
    """Return the ONNX model of a PyTorch exporter, with a dynamic batch and its weights as they are."""
    buffer = io.BytesIO()
    if exporter == "dynamo":
        program = torch.onnx.export(
            network,
            (x,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["x"],
            output_names=["y"],
            optimize=not any(
                isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in network.modules()
            ),  # it folds those
            verbose=False,
        )
        return program.model_proto
    torch.onnx.export(
        network,
        (x,),
        buffer,
        dynamo=False,
        input_names=["x"],
        output_names=["y"],
        opset_version=17,
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.PRESERVE,
    )
    return onnx.load_from_string(buffer.getvalue())


@functools.cache
def exported(name: str, exporter: str) -> onnx.ModelProto:
    network, x, _ = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export(network, x, exporter)
