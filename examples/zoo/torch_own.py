"""Define PyTorch modules for the zoo, awkward ones among them."""

from __future__ import annotations

import math

import torch
from comparison import optimizers
from in_torch import TorchCase
from in_torch import warm_up as warm_up
from torch import nn
from torch.nn import functional

import passes

UNFOLDED = (
    "dynamo, dynamic",
    "dynamo unfolded, dynamic",
    "torchscript, static",
    "torchscript unfolded, static",
)
STATIC = ("dynamo, static", "dynamo unfolded, static", "torchscript, static")
ALL = ("dynamo, dynamic", "dynamo, static", "torchscript, dynamic", "torchscript, static")
CLASSES = {"loss": passes.CrossEntropy()}
TOKENS = {"loss": passes.CrossEntropy(axis=-1)}
MOMENTS = passes.SGD(0.01, momentum=0.9), passes.Adam(1e-3, epsilon=1e-4)
FOUR = {"optimizers": (*optimizers(0.01), *MOMENTS)}


def rows(*shape: int):
    return lambda batch: (torch.randn(batch, *shape),)


def words(length: int, most: int = 11):
    return lambda batch: (torch.randint(1, most, (batch, length)),)


class Residual(nn.Module):
    def __init__(self, depth: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(depth, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(depth, channels, 1, stride, bias=False)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 12, 2))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        y = self.blocks(self.stem(x))
        return self.head(functional.adaptive_avg_pool2d(y, 1).flatten(1))


class Encoder(nn.Module):
    """Encode by a Transformer; positions are a parameter, or sines in a buffer."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        if learned:
            self.positions = nn.Parameter(torch.randn(6, 16) / 4)
        else:
            self.register_buffer("positions", sines(6, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x) + self.positions).mean(1))


def sines(length: int, width: int) -> torch.Tensor:
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], 1)


class Translation(nn.Module):
    """Map sequences to sequences: the encoder's last state is the decoder's first."""

    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.source, self.sink = nn.Embedding(11, 8), nn.Embedding(11, 8)
        self.encoder = kind(8, 12, batch_first=True, **options)
        self.decoder = kind(8, 12, batch_first=True, **options)
        self.head = nn.Linear(12, 11)

    def forward(self, source, sink):
        _, state = self.encoder(self.source(source))
        y, _ = self.decoder(self.sink(sink), state)
        return self.head(y)


class Attending(nn.Module):
    """Map sequences to sequences with attention; the decoder is a cell in a loop (Bahdanau et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.GRU(8, 12, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(24, 12)
        self.cell = nn.GRUCell(8 + 24, 12)
        self.score = nn.Linear(24 + 12, 1)
        self.head = nn.Linear(12, 11)

    def forward(self, source, sink):
        memory, last = self.encoder(self.embedding(source))
        h = torch.tanh(self.bridge(torch.cat([last[0], last[1]], 1)))
        steps = []
        for x in self.embedding(sink).unbind(1):
            queries = h[:, None].expand(-1, memory.shape[1], -1)
            weights = self.score(torch.tanh(torch.cat([memory, queries], 2))).softmax(1)
            h = self.cell(torch.cat([x, (weights * memory).sum(1)], 1), h)
            steps.append(self.head(h))
        return torch.stack(steps, 1)


class LearnedState(nn.Module):
    """Run a recurrent layer whose first state is a parameter."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(5, 8, batch_first=True)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.cell = nn.Parameter(torch.randn(1, 1, 8)) if kind is nn.LSTM else None
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.first.expand(1, x.shape[0], 8).contiguous()
        state = h if self.cell is None else (h, self.cell.expand(1, x.shape[0], 8).contiguous())
        return self.head(self.recurrent(x, state)[0][:, -1])


class SpatialTransformer(nn.Module):
    """Transform images by a learned affine map (Jaderberg et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
        self.classify = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x):
        theta = self.locate(x).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        grid = functional.affine_grid(theta, x.shape, align_corners=False)
        return self.classify(functional.grid_sample(x, grid, align_corners=False))


class Warp(nn.Module):
    """Sample an image on a grid that a convolution computes, as for optical flow."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(2, 2, 3, padding=1)
        self.refine = nn.Conv2d(2, 2, 3, padding=1)
        line = torch.linspace(-0.8, 0.8, 6)
        self.register_buffer("grid", torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)[None])

    def forward(self, x):
        grid = self.grid + 0.1 * self.flow(x).permute(0, 2, 3, 1)
        return self.refine(functional.grid_sample(x, grid, padding_mode="border", align_corners=True))


class Normalized(nn.Module):
    """Alternate convolutions and normalizations."""

    def __init__(self, *normalizations: nn.Module) -> None:
        super().__init__()
        parts = []
        for normalization in normalizations:
            parts += [nn.Conv2d(8 if parts else 2, 8, 3, padding=1), normalization, nn.ReLU()]
        self.body = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)


class GraphNetwork(nn.Module):
    """Send messages along edges, summed or averaged at their ends by scatter_add or index_add."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.enter, self.message, self.leave = nn.Linear(4, 8), nn.Linear(16, 8), nn.Linear(8, 2)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]]))

    def forward(self, x):
        start, end = self.edges
        h = torch.relu(self.enter(x))
        m = torch.relu(self.message(torch.cat([h[:, start], h[:, end]], -1)))
        if self.method == "scatter_add":
            index = end[None, :, None].expand(x.shape[0], -1, 8)
            total = torch.zeros(x.shape[0], 5, 8).scatter_add(1, index, m)
        else:
            total = torch.zeros_like(h).index_add(1, end, m)
        return self.leave(h + total)


class Rotary(nn.Module):
    """Attend with rotary positions: buffers contain frequencies or tables of cosines (Su et al. 2021)."""

    def __init__(self, tables: bool) -> None:
        super().__init__()
        self.embedding, self.qkv, self.head = (
            nn.Embedding(11, 16),
            nn.Linear(16, 48, bias=False),
            nn.Linear(16, 11),
        )
        frequencies = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)
        if tables:
            angles = torch.arange(6)[:, None] * frequencies.repeat(2)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        else:
            self.register_buffer("inv_freq", frequencies, persistent=False)
        self.tables = tables

    def forward(self, x):
        batch, length = x.shape
        q, k, v = self.qkv(self.embedding(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if self.tables:
            cos, sin = self.cos, self.sin
        else:
            angles = torch.outer(torch.arange(length).float(), self.inv_freq).repeat(1, 2)
            cos, sin = angles.cos(), angles.sin()
        q, k = (y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin for y in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(y.transpose(1, 2).reshape(batch, length, 16))


class Gpt(nn.Module):
    """Model language causally: the mask is a buffer of -1e9, the head is tied to the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 16), nn.Embedding(6, 16)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU("tanh"), nn.Linear(32, 16))
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.register_buffer("mask", torch.triu(torch.full((6, 6), -1e9), 1))

    def forward(self, x):
        h = self.words(x) + self.positions.weight
        q, k, v = self.qkv(self.norm1(h)).view(x.shape[0], 6, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(8) + self.mask).softmax(-1)
        h = h + self.out((weights @ v).transpose(1, 2).reshape(x.shape[0], 6, 16))
        return self.head(self.norm3(h + self.mlp(self.norm2(h))))


class Nerf(nn.Module):
    """Encode coordinates by frequencies before a perceptron (Mildenhall et al. 2020)."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        frequencies = 2.0 ** torch.arange(4)
        if buffer:
            self.register_buffer("frequencies", frequencies)
        else:
            self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(27, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        angles = (x[..., None] * self.frequencies).flatten(-2)
        return self.mlp(torch.cat([x, angles.sin(), angles.cos()], -1))


class FourierFeatures(nn.Module):
    """Encode coordinates by random frequencies in a buffer (Tancik et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 8))
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        angles = 2 * math.pi * x @ self.frequencies
        return self.mlp(torch.cat([angles.sin(), angles.cos()], -1))


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 12) / 4)
        self.down, self.up = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(12))

    def forward(self, x):
        h = torch.tanh(functional.linear(x, self.weight, self.down))
        return functional.linear(h, self.weight.t(), self.up)


class Pinn(nn.Module):
    """Compute a solution and its derivative explicitly: every weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 16), nn.Linear(16, 1)
        self.middle = nn.Linear(16, 16)

    def forward(self, x):
        h1 = torch.tanh(self.first(x))
        d1 = (1 - h1 * h1) * self.first.weight.t()
        h2 = torch.tanh(self.middle(h1))
        d2 = (1 - h2 * h2) * (d1 @ self.middle.weight.t())
        return torch.cat([self.second(h2), d2 @ self.second.weight.t()], 1)


class Siamese(nn.Module):
    """Compare two inputs of one network; a temperature of rank 0 scales the similarity."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))
        self.temperature, self.offset = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.3))

    def forward(self, a, b):
        likeness = functional.cosine_similarity(self.encode(a), self.encode(b))
        return likeness * self.temperature + self.offset


class Contrastive(nn.Module):
    """Compare all pairs of a batch, scaled by the exponential of a parameter of rank 0, as CLIP's head."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(7, 5)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        a, b = (functional.normalize(part(x), dim=-1) for part, x in ((self.image, image), (self.text, text)))
        return self.logit_scale.exp() * a @ b.t()


class FreshNorms(nn.Module):
    """Use new LayerNorms: equal ones and zeros, which an exporter may merge."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for linear in self.linears:
            nn.init.zeros_(linear.bias)

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + torch.tanh(linear(norm(x)))
        return x


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = torch.relu(self.down1(x))
        return self.out(torch.cat([a, self.up(torch.relu(self.down2(a)))], 1))


class SuperResolution(nn.Module):
    """Increase the resolution (Shi et al. 2016), with a parallel bilinear path."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.act = nn.PReLU(6)

    def forward(self, x):
        y = functional.pixel_shuffle(self.b(self.act(self.a(x))), 2)
        return y + functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.weights, self.biases = nn.Parameter(torch.randn(3, 6, 4) / 3), nn.Parameter(torch.zeros(3, 4))

    def forward(self, x):
        experts = torch.einsum("bi,eio->beo", x, self.weights) + self.biases
        return (self.gate(x).softmax(-1)[..., None] * experts).sum(1)


class WideAndDeep(nn.Module):
    """Recommend by crossed embeddings of ids, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.bias = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Embedding(9, 1)
        self.deep = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids, numbers):
        user, item = self.users(ids[:, 0]), self.items(ids[:, 1])
        wide = (user * item).sum(-1, keepdim=True) + self.bias(ids[:, 1])
        return wide + self.deep(torch.cat([user, item, numbers], -1))


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Sequential(nn.Linear(3, 8), nn.ELU()), nn.Linear(16, 2)

    def forward(self, x):
        h = self.each(x)
        return self.all(torch.cat([h.mean(1), h.amax(1)], -1))


class Temporal(nn.Module):
    """Stack dilated causal convolutions with weight normalization, which computes weights from parameters."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(norm(nn.Conv1d(4, 4, 2, dilation=2**i)) for i in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for i, conv in enumerate(self.convs):
            x = x + torch.relu(conv(functional.pad(x, (2**i, 0))))
        return self.head(x[..., -1])


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(2, 8, 3), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = functional.hardswish(self.conv(x))
        gate = functional.hardsigmoid(self.up(torch.relu(self.down(h.mean((2, 3), keepdim=True)))))
        return self.head((h * gate).mean((2, 3)))


class Queries(nn.Module):
    """Attend by learned queries with nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 8))
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(24, 2)

    def forward(self, x):
        queries = self.queries.expand(x.shape[0], -1, -1)
        return self.head(self.attention(queries, x, x, need_weights=False)[0].flatten(1))


class Flow(nn.Module):
    """Couple affinely; masks are buffers of zeros and ones (Dinh et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]]))
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for mask, net in zip(self.mask, self.nets, strict=True):
            s, t = net(x * mask).chunk(2, -1)
            x = x * mask + (1 - mask) * (x * (torch.tanh(s) * self.scale).exp() + t)
        return x


class Hypernetwork(nn.Module):
    """Compute the weights of one network by another."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.bias = nn.Linear(3, 5 * 4), nn.Parameter(torch.zeros(4))

    def forward(self, x, context):
        return torch.bmm(x[:, None], self.make(context).view(-1, 5, 4))[:, 0] + self.bias


class Splines(nn.Module):
    """Evaluate a Kolmogorov-Arnold layer: radial bases on a grid in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 6))
        self.coefficients = nn.Parameter(torch.randn(4 * 6, 3) / 5)
        self.base = nn.Linear(4, 3)

    def forward(self, x):
        bases = torch.exp(-(((x[..., None] - self.grid) / 0.8) ** 2)).flatten(1)
        return bases @ self.coefficients + self.base(functional.silu(x))


class Standardized(nn.Module):
    """Standardize inputs and outputs by buffers of means and deviations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("deviation", torch.rand(5) + 0.5)
        self.register_buffer("scale", torch.tensor(2.5))
        self.mlp = nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 2))

    def forward(self, x):
        return self.mlp((x - self.mean) / self.deviation) * self.scale


class NeuralOde(nn.Module):
    """Integrate a small network by Euler's method."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.log_step = (
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
            nn.Parameter(torch.tensor(-2.0)),
        )

    def forward(self, x):
        for _ in range(4):
            x = x + self.log_step.exp() * self.field(x)
        return x


class LowRank(nn.Module):
    """Add a trained correction of low rank to a frozen layer (Hu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.base(x) + 0.5 * self.b(self.a(x))))


class RootMeanSquare(nn.Module):
    """Compute RMSNorm as libraries of language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Gated(nn.Module):
    """Combine RMSNorm, grouped queries and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm1, self.norm2 = nn.Embedding(11, 16), RootMeanSquare(16), RootMeanSquare(16)
        self.q, self.kv, self.o = nn.Linear(16, 16, False), nn.Linear(16, 8, False), nn.Linear(16, 16, False)
        self.gate, self.up, self.down = (
            nn.Linear(16, 24, False),
            nn.Linear(16, 24, False),
            nn.Linear(24, 16, False),
        )

    def forward(self, x):
        h = self.embedding(x)
        y = self.norm1(h)
        q = self.q(y).view(-1, 6, 4, 4).transpose(1, 2)
        k, v = self.kv(y).view(-1, 6, 1, 8).transpose(1, 2).expand(-1, 4, -1, -1).chunk(2, -1)
        mask = torch.full((6, 6), float("-inf")).triu(1)
        h = h + self.o(((q @ k.transpose(-1, -2) / 2 + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = self.norm2(h)
        h = h + self.down(functional.silu(self.gate(y)) * self.up(y))
        return h @ self.embedding.weight.t()


class StateSpace(nn.Module):
    """Unroll a diagonal recurrence over the steps; its rate is -exp of a logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, 5).repeat(6, 1)))
        self.d, self.enter = nn.Parameter(torch.ones(6)), nn.Linear(6, 6 + 4 + 4)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        rate, b, c = self.enter(x).split([6, 4, 4], -1)
        rate = functional.softplus(rate)
        h = torch.zeros(x.shape[0], 6, 4)
        for t in range(x.shape[1]):
            decay = torch.exp(-rate[:, t, :, None] * self.a_log.exp())
            h = decay * h + (rate[:, t] * x[:, t])[..., None] * b[:, t, None]
        return self.head((h * c[:, -1, None]).sum(-1) + self.d * x[:, -1])


class Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0])


class Spectral(nn.Module):
    """Divide a weight by its largest singular value, from vectors in buffers (spectral normalization)."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(norm(nn.Linear(5, 8)), nn.LeakyReLU(), norm(nn.Linear(8, 1)))

    def forward(self, x):
        return self.body(x)


class ScaledLayers(nn.Module):
    """Scale layers by LayerScale and by single numbers of shapes (1,) and (1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.gamma = nn.Parameter(1e-1 * torch.ones(6))
        self.one, self.two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        x = x + self.gamma * torch.tanh(self.a(x))
        return self.two * (x + self.one * torch.tanh(self.b(x)))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 16, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, "relu", batch_first=True)
        self.encoder, self.head = (
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), y], 1) + self.positions
        return self.head(self.encoder(y)[:, 0])


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.tokens = nn.Sequential(nn.Linear(5, 10), nn.GELU(), nn.Linear(10, 5))
        self.channels = nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = self.enter(x)
        h = h + self.tokens(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        return self.head((h + self.channels(self.norm2(h))).mean(1))


class Recursive(nn.Module):
    """Apply one layer three times, as ALBERT shares its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(x + torch.tanh(self.layer(x)))
        return x


class Gaussians(nn.Module):
    """Compute a mixture's log-likelihood: log-sum-exp over components."""

    def __init__(self) -> None:
        super().__init__()
        self.centers, self.widths, self.logits = (nn.Parameter(torch.randn(s)) for s in ((4, 3), (4, 3), (4,)))

    def forward(self, x):
        z = (x[:, None] - self.centers) * (-self.widths).exp()
        return torch.logsumexp(self.logits.log_softmax(0) - (z * z / 2 + self.widths).sum(-1), 1, keepdim=True)


class Prototypes(nn.Module):
    """Quantize vectors by soft assignment to a codebook, with distances by cdist's expansion."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook, self.enter = nn.Parameter(torch.randn(5, 4)), nn.Linear(6, 4)

    def forward(self, x):
        h = self.enter(x)
        distances = (h * h).sum(1, keepdim=True) - 2 * h @ self.codebook.t() + (self.codebook**2).sum(1)
        return (-distances).softmax(-1) @ self.codebook


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2), nn.SiLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def pairs(*sizes: int):
    return lambda batch: tuple(torch.randn(batch, size) for size in sizes)


def sentences(batch: int):
    return torch.randint(1, 11, (batch, 6)), torch.randint(1, 11, (batch, 5))


def ids_and_numbers(batch: int):
    return torch.randint(0, 9, (batch, 2)), torch.randn(batch, 3)


CASES = {
    "mlp": TorchCase(mlp, rows(8), ways=ALL, **CLASSES),
    "cnn": TorchCase(cnn, rows(1, 8, 8), ways=ALL, **CLASSES, **FOUR),
    "resnet": TorchCase(ResNet, rows(3, 8, 8), ways=ALL, **CLASSES),
    "encoder, learned positions": TorchCase(lambda: Encoder(True), words(6), **CLASSES),
    "encoder, positions a buffer": TorchCase(lambda: Encoder(False), words(6), ways=ALL, **CLASSES),
    "translation, LSTM": TorchCase(lambda: Translation(nn.LSTM), sentences, ways=ALL, **TOKENS),
    "translation, GRU": TorchCase(lambda: Translation(nn.GRU), sentences, **TOKENS),
    "translation, RNN of two layers": TorchCase(lambda: Translation(nn.RNN, num_layers=2), sentences, **TOKENS),
    "translation, attention": TorchCase(Attending, sentences, **TOKENS),
    "learned first state, LSTM": TorchCase(lambda: LearnedState(nn.LSTM), rows(4, 5)),
    "learned first state, GRU": TorchCase(lambda: LearnedState(nn.GRU), rows(4, 5)),
    "bidirectional LSTM": TorchCase(Bidirectional, words(6), **TOKENS),
    "spatial transformer": TorchCase(SpatialTransformer, rows(1, 8, 8), **CLASSES),
    "optical flow": TorchCase(Warp, rows(2, 6, 6)),
    "group normalization": TorchCase(
        lambda: Normalized(nn.GroupNorm(2, 8), nn.GroupNorm(1, 8)), rows(2, 6, 6), ways=ALL, **CLASSES
    ),
    "instance normalization": TorchCase(
        lambda: Normalized(nn.InstanceNorm2d(8, affine=True), nn.InstanceNorm2d(8)), rows(2, 6, 6), ways=ALL
    ),
    "graph network, scatter_add": TorchCase(lambda: GraphNetwork("scatter_add"), rows(5, 4)),
    "graph network, index_add": TorchCase(lambda: GraphNetwork("index_add"), rows(5, 4), ways=ALL[:2]),
    "rotary, frequencies": TorchCase(lambda: Rotary(False), words(6), **TOKENS),
    "rotary, tables": TorchCase(lambda: Rotary(True), words(6), ways=ALL, **TOKENS),
    "GPT, own head": TorchCase(lambda: Gpt(False), words(6), **TOKENS),
    "GPT, tied head": TorchCase(lambda: Gpt(True), words(6), ways=ALL, **TOKENS),
    "NeRF, frequencies a buffer": TorchCase(lambda: Nerf(True), rows(3), ways=ALL),
    "NeRF, frequencies a constant": TorchCase(lambda: Nerf(False), rows(3)),
    "Fourier features": TorchCase(FourierFeatures, rows(2)),
    "tied autoencoder": TorchCase(TiedAutoencoder, rows(12), ways=ALL),
    "PINN": TorchCase(Pinn, rows(1), ways=ALL),
    "siamese": TorchCase(Siamese, pairs(6, 6), ways=ALL),
    "contrastive": TorchCase(Contrastive, pairs(6, 7), ways=STATIC, **CLASSES),
    "fresh layer norms": TorchCase(FreshNorms, rows(8), fresh=True, ways=UNFOLDED),
    "U-Net": TorchCase(Unet, rows(1, 8, 8)),
    "super-resolution": TorchCase(SuperResolution, rows(1, 6, 6)),
    "mixture of experts": TorchCase(Experts, rows(6), **CLASSES),
    "wide and deep": TorchCase(WideAndDeep, ids_and_numbers),
    "deep sets": TorchCase(DeepSets, rows(5, 3)),
    "temporal, weight norm": TorchCase(Temporal, rows(4, 8), ways=UNFOLDED),
    "squeeze and excite": TorchCase(SqueezeExcite, rows(2, 6, 6), **CLASSES),
    "learned queries": TorchCase(Queries, rows(5, 8)),
    "normalizing flow": TorchCase(Flow, rows(4)),
    "hypernetwork": TorchCase(Hypernetwork, pairs(5, 3)),
    "splines": TorchCase(Splines, rows(4)),
    "standardized": TorchCase(Standardized, rows(5), ways=ALL),
    "neural ODE": TorchCase(NeuralOde, rows(4)),
    "low rank on a frozen layer": TorchCase(LowRank, rows(6), freeze="base.*"),
    "gated, RMSNorm, tied": TorchCase(Gated, words(6), **TOKENS),
    "state space": TorchCase(StateSpace, rows(5, 6)),
    "spectral norm": TorchCase(Spectral, rows(5), ways=UNFOLDED[:2]),
    "scaled layers": TorchCase(ScaledLayers, rows(6), ways=ALL),
    "vision transformer": TorchCase(VisionTransformer, rows(1, 8, 8), **CLASSES),
    "MLP-mixer": TorchCase(Mixer, rows(5, 6)),
    "recursive": TorchCase(Recursive, rows(8)),
    "mixture of Gaussians": TorchCase(Gaussians, rows(3), ways=UNFOLDED),
    "prototypes": TorchCase(Prototypes, rows(6), ways=UNFOLDED),
}  # fmt: skip
