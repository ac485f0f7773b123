"""Define networks of daily life in PyTorch, with the sizes of small trainings, for `architectures.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Arrays = dict[str, np.ndarray]


def convolution(
    size: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type | None = nn.ReLU
) -> nn.Sequential:
    """Return a convolution, its batch normalization and an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(size, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


class Residual(nn.Module):
    """Add the input, or its projection, to what layers compute of it."""

    def __init__(self, size: int, outputs: int, stride: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.shortcut = nn.Sequential(*layers), nn.Identity()
        if size != outputs or stride > 1:
            self.shortcut = convolution(size, outputs, 1, stride, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


class Pooled(nn.Module):
    """Classify by the means of channels."""

    def __init__(self, layers: Sequence[nn.Module], *head: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), nn.Sequential(*head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def resnet18() -> nn.Module:
    """Return the residual network of He et al. (2016)."""
    layers, size = [convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for outputs in (64, 64, 128, 128, 256, 256, 512, 512):
        stride = 1 + (outputs != size)
        first = convolution(size, outputs, 3, stride)
        layers.append(Residual(size, outputs, stride, first, convolution(outputs, outputs, act=None)))
        size = outputs
    return Pooled(layers, nn.Linear(512, 10))


def regnet() -> nn.Module:
    """Return RegNetX of 400 MF (Radosavovic et al. 2020)."""
    layers, size = [convolution(3, 32, 3, 2)], 32
    for outputs, depth in ((32, 1), (64, 2), (160, 7), (400, 12)):
        for stride in (2, *[1] * (depth - 1)):
            first, last = convolution(size, outputs, 1), convolution(outputs, outputs, 1, act=None)
            middle = convolution(outputs, outputs, 3, stride, outputs // 16)
            layers.append(Residual(size, outputs, stride, first, middle, last))
            size = outputs
    return Pooled(layers, nn.Linear(400, 10))


class Gate(nn.Module):
    """Scale channels by what a small network computes of their means (squeeze and excitation, Hu et al. 2018)."""

    def __init__(self, size: int, hidden: int, act: type, gate: type) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(size, hidden, 1), act(), nn.Conv2d(hidden, size, 1), gate())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layers(functional.adaptive_avg_pool2d(x, 1))


class Inverted(nn.Module):
    """Widen, convolve each channel, and narrow (Sandler et al. 2018)."""

    def __init__(
        self, size: int, wide: int, outputs: int, kernel: int, stride: int, act: type, gate: Gate | None
    ) -> None:
        super().__init__()
        layers = [convolution(size, wide, 1, act=act)] if wide != size else []
        layers += [convolution(wide, wide, kernel, stride, wide, act), *([gate] if gate else [])]
        self.layers = nn.Sequential(*layers, convolution(wide, outputs, 1, act=None))
        self.adds = stride == 1 and size == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def efficientnet() -> nn.Module:
    """Return EfficientNet-B0 (Tan and Le 2019)."""
    layers, size = [convolution(3, 32, 3, 2, act=nn.SiLU)], 32
    for widened, outputs, depth, first, kernel in (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ):
        for stride in (first, *[1] * (depth - 1)):
            gate = Gate(size * widened, max(1, size // 4), nn.SiLU, nn.Sigmoid)
            layers.append(Inverted(size, size * widened, outputs, kernel, stride, nn.SiLU, gate))
            size = outputs
    return Pooled([*layers, convolution(320, 1280, 1, act=nn.SiLU)], nn.Linear(1280, 10))


def mobilenet() -> nn.Module:
    """Return the small MobileNetV3 (Howard et al. 2019)."""
    layers, size = [convolution(3, 16, 3, 2, act=nn.Hardswish)], 16
    for kernel, wide, outputs, gated, act, stride in (
        (3, 16, 16, True, nn.ReLU, 2),
        (3, 72, 24, False, nn.ReLU, 2),
        (3, 88, 24, False, nn.ReLU, 1),
        (5, 96, 40, True, nn.Hardswish, 2),
        (5, 240, 40, True, nn.Hardswish, 1),
        (5, 240, 40, True, nn.Hardswish, 1),
        (5, 120, 48, True, nn.Hardswish, 1),
        (5, 144, 48, True, nn.Hardswish, 1),
        (5, 288, 96, True, nn.Hardswish, 2),
        (5, 576, 96, True, nn.Hardswish, 1),
        (5, 576, 96, True, nn.Hardswish, 1),
    ):
        hidden = max(8, (wide // 4 + 4) // 8 * 8)
        gate = Gate(wide, hidden, nn.ReLU, nn.Hardsigmoid) if gated else None
        layers.append(Inverted(size, wide, outputs, kernel, stride, act, gate))
        size = outputs
    layers.append(convolution(96, 576, 1, act=nn.Hardswish))
    return Pooled(layers, nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, 10))


class Scaled(nn.Module):
    """Add to the input what layers compute of it, times a vector that starts small."""

    def __init__(self, width: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.scale = nn.Sequential(*layers), nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x.permute(0, 2, 3, 1)).mul(self.scale).permute(0, 3, 1, 2)


class ChannelsLast(nn.Module):
    """Apply a layer for channels that come second to channels that come last, or the other way round."""

    def __init__(self, layer: nn.Module, *, last: bool = True) -> None:
        super().__init__()
        self.layer, self.to, self.back = layer, (0, 3, 1, 2), (0, 2, 3, 1)
        if not last:
            self.to, self.back = self.back, self.to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.permute(*self.to)).permute(*self.back)


def convnext() -> nn.Module:
    """Return ConvNeXt in the size atto: depths 2, 2, 6, 2, widths 40 to 320 (Liu et al. 2022)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, 4), ChannelsLast(nn.LayerNorm(40), last=False)]
    for i, (width, depth) in enumerate(((40, 2), (80, 2), (160, 6), (320, 2))):
        if i:
            norm = ChannelsLast(nn.LayerNorm(width // 2), last=False)
            layers += [norm, nn.Conv2d(width // 2, width, 2, 2)]
        for _ in range(depth):
            near = ChannelsLast(nn.Conv2d(width, width, 7, padding=3, groups=width))
            up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            layers.append(Scaled(width, near, nn.LayerNorm(width), up, nn.GELU(), down))
    return Pooled(layers, nn.LayerNorm(320), nn.Linear(320, 10))


class Attention(nn.Module):
    """Attend with several heads, each position to all, or to earlier ones alone."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, 2)]
        y = functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Added(nn.Module):
    """Add to the input what layers compute of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def blocks(width: int, heads: int, depth: int, *, causal: bool = False) -> nn.Sequential:
    """Return blocks of a transformer, with normalization first."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers.append(Added(nn.LayerNorm(width), Attention(width, heads, causal=causal)))
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        layers.append(Added(nn.LayerNorm(width), up, nn.GELU(), down))
    return nn.Sequential(*layers, nn.LayerNorm(width))


class VisionTransformer(nn.Module):
    """Classify by a transformer over patches of 8 x 8 pixels: ViT-tiny, 12 layers of 192 (Dosovitskiy et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 192, 8, 8), nn.Parameter(0.02 * torch.randn(1, 1, 192))
        self.positions = nn.Parameter(0.02 * torch.randn(65, 192))
        self.blocks, self.head = blocks(192, 3, 12), nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(x.shape[0], 1, 192), patches], 1) + self.positions
        return self.head(self.blocks(y)[:, 0])


class LanguageModel(nn.Module):
    """Predict the next token: `depth` layers, of which each position reads earlier ones."""

    def __init__(self, vocabulary: int = 1000, length: int = 64, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = blocks(width, 4, depth, causal=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x) + self.positions))


class Transposed(nn.Module):
    """Apply layers along the axis before the last."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


class Mixer(nn.Module):
    """Mix patches and channels in turn: MLP-Mixer, 8 layers of 192 (Tolstikhin et al. 2021)."""

    def __init__(self, width: int = 192, patches: int = 64) -> None:
        super().__init__()
        self.patches, layers = nn.Conv2d(3, width, 8, 8), list[nn.Module]()
        for _ in range(8):
            tokens = Transposed(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
            channels = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            layers += [Added(nn.LayerNorm(width), tokens), Added(nn.LayerNorm(width), *channels)]
        self.layers = nn.Sequential(*layers, nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Tabular(nn.Module):
    """Classify rows of ten numbers and eight categories by embeddings and a perceptron."""

    def __init__(self, categories: int = 100, size: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(categories, size) for _ in range(8))
        sizes = (10 + 8 * size, 256, 128, 64)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(64, 2))

    def forward(self, x: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        found = [table(categories[:, i]) for i, table in enumerate(self.embeddings)]
        return self.layers(torch.cat([x, *found], 1))


class Recurrent(nn.Module):
    """Classify sequences by a GRU in both directions."""

    def __init__(self, size: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.gru = nn.GRU(size, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0].mean(1))


def autoencoder() -> nn.Module:
    """Return convolutions of images of 28 x 28 to 32 numbers, and back."""
    small = 64 * 7 * 7
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(small, 32), nn.Linear(32, small), nn.ReLU(), nn.Unflatten(1, (64, 7, 7))),
        *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1)),
    )


class Causal(nn.Module):
    """Convolve in time, reading what is earlier alone."""

    def __init__(self, size: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.before, self.layer = 2 * dilation, nn.Conv1d(size, outputs, 3, dilation=dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layer(functional.pad(x, (self.before, 0))))


class Temporal(nn.Module):
    """Classify sequences by dilated convolutions: a temporal convolutional network (Bai et al. 2018)."""

    def __init__(self, size: int = 8, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv1d(size, width, 1)
        self.layers = nn.Sequential(
            *(Added(Causal(width, width, 1 << i), Causal(width, width, 1 << i)) for i in range(5))
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.first(x))[:, :, -1])


class GraphAttention(nn.Module):
    """Attend to a node's neighbours (Velickovic et al. 2018), with the edges of a graph as a matrix."""

    def __init__(self, size: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.linear, self.heads = nn.Linear(size, outputs, bias=False), heads
        self.source = nn.Parameter(torch.randn(heads, outputs // heads, 1) / math.sqrt(outputs))
        self.target = nn.Parameter(torch.randn(heads, outputs // heads, 1) / math.sqrt(outputs))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        scores = functional.leaky_relu(y @ self.source + (y @ self.target).transpose(2, 3), 0.2)
        weights = scores.masked_fill(edges[:, None] == 0, -1e9).softmax(3)
        return (weights @ y).transpose(1, 2).flatten(2)


class GraphNetwork(nn.Module):
    """Classify graphs of 32 nodes by graph attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphAttention(16, 64), GraphAttention(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        y = functional.elu(self.first(x, edges))
        return self.head(functional.elu(self.second(y, edges)).mean(1))


def perceptron() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)))


@dataclass(frozen=True)
class Network:
    """Describe a network.

    Args:
        title: what tables call it.
        build: returns the module, with the parameters of the random seed.
        inputs: returns a batch of the module's inputs, by name.
        classes: of how many classes each target is; 0 for targets that are the input `x`.
    """

    title: str
    build: Callable[[], nn.Module]
    inputs: Callable[[np.random.Generator], Arrays]
    classes: int = 10


def numbers(*shape: int) -> Callable[[np.random.Generator], Arrays]:
    return lambda random: {"x": random.standard_normal(shape, np.float32)}


def rows(random: np.random.Generator, count: int = 256) -> Arrays:
    return {
        "x": random.standard_normal((count, 10), np.float32),
        "categories": random.integers(0, 100, (count, 8)),
    }


def graphs(random: np.random.Generator, count: int = 16, nodes: int = 32) -> Arrays:
    edges = np.maximum(random.random((count, nodes, nodes)) < 0.2, np.eye(nodes)).astype(np.float32)
    return {"x": random.standard_normal((count, nodes, 16), np.float32), "edges": edges}


IMAGES = numbers(8, 3, 64, 64)
NETWORKS = {
    "mobilenet": Network("MobileNetV3-small, 64x64, batch 8", mobilenet, IMAGES),
    "resnet18": Network("ResNet-18, 64x64, batch 8", resnet18, IMAGES),
    "vit": Network("ViT-tiny, 64 patches, batch 8", VisionTransformer, IMAGES),
    "convnext": Network("ConvNeXt-atto, 64x64, batch 8", convnext, IMAGES),
    "efficientnet": Network("EfficientNet-B0, 64x64, batch 8", efficientnet, IMAGES),
    "regnet": Network("RegNetX-400MF, 64x64, batch 8", regnet, IMAGES),
    "mixer": Network("MLP-Mixer, 8 layers of 192, 64 patches, batch 8", Mixer, IMAGES),
    "tabular": Network("tabular, 8 embeddings, batch 256", Tabular, rows, classes=2),
    "gru": Network("GRU in both directions, 32 steps, 64 units, batch 32", Recurrent, numbers(32, 32, 32)),
    "autoencoder": Network("convolutional autoencoder, 28x28, batch 64", autoencoder, numbers(64, 1, 28, 28), 0),
    "tcn": Network("TCN, 10 layers of 64, 128 steps, batch 16", Temporal, numbers(16, 8, 128)),
    "gat": Network("graph attention, 2 layers of 64, 32 nodes, batch 16", GraphNetwork, graphs),
    "language": Network(
        "language model, 4 layers of 128, 64 tokens, batch 8",
        LanguageModel,
        lambda random: {"x": random.integers(0, 1000, (8, 64))},
        classes=1000,
    ),
    "one": Network("MLP 64-256-256-10, batch 1", perceptron, numbers(1, 64)),
}
