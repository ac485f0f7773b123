"""Define PyTorch modules with structure: flows, graphs, recommenders, masks, shared layers and normalized weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from in_torch import BOTH, TorchCase
from in_torch import warm_up as warm_up
from stopped_gradients import perceptron
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch_own import pairs, rows, words

import passes

STATIC = tuple(way.replace("dynamic", "static") for way in BOTH)
EDGES = (0, 1, 2, 3, 4, 0, 2, 3), (1, 2, 3, 4, 0, 2, 0, 3)


class RealNvp(nn.Module):
    """Return the negative log-likelihood of affine couplings with masks in buffers (Dinh et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("masks", torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]))
        self.scales = nn.ModuleList(perceptron(4, 8, 4, activation=nn.Tanh) for _ in range(3))
        self.shifts = nn.ModuleList(perceptron(4, 8, 4) for _ in range(3))

    def forward(self, x):
        log_determinant = x.new_zeros(x.shape[0])
        for mask, scale, shift in zip(self.masks, self.scales, self.shifts, strict=True):
            s, t = torch.tanh(scale(x * mask)) * (1 - mask), shift(x * mask) * (1 - mask)
            x = x * mask + (1 - mask) * (x * s.exp() + t)
            log_determinant = log_determinant + s.sum(-1)
        return ((x.pow(2) + math.log(2 * math.pi)).sum(-1) / 2 - log_determinant).mean()


class Glow(nn.Module):
    """Normalize activations, mix channels by an LU-factored matrix, couple halves (Kingma, Dhariwal 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.log_scale = nn.Parameter(torch.randn(4) / 5), nn.Parameter(torch.randn(4) / 5)
        self.lower, self.upper = nn.Parameter(torch.randn(4, 4) / 3), nn.Parameter(torch.randn(4, 4) / 3)
        self.log_diagonal = nn.Parameter(torch.randn(4) / 5)
        self.register_buffer("permutation", torch.eye(4)[[2, 0, 3, 1]])
        self.couple = perceptron(2, 8, 4)

    def forward(self, x):
        x = (x + self.bias) * self.log_scale.exp()
        lower = self.lower.tril(-1) + torch.eye(4, dtype=x.dtype)
        upper = self.upper.triu(1) + torch.diag(self.log_diagonal.exp())
        a, b = (x @ self.permutation @ lower @ upper).chunk(2, -1)
        s, t = self.couple(a).chunk(2, -1)
        s = torch.sigmoid(s + 2)
        z = torch.cat([a, (b + t) * s], -1)
        log_determinant = self.log_scale.sum() + self.log_diagonal.sum() + s.log().sum(-1)
        return (z.pow(2).sum(-1) / 2 - log_determinant).mean()


class PlanarFlow(nn.Module):
    """Transform by planar flows (Rezende, Mohamed 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.w = nn.Parameter(torch.randn(2, 4) / 2), nn.Parameter(torch.randn(2, 4) / 2)
        self.b = nn.Parameter(torch.randn(2))

    def forward(self, x):
        total = 0
        for u, w, b in zip(self.u, self.w, self.b, strict=True):
            u = u + (functional.softplus(w @ u) - 1 - w @ u) * w / (w @ w)
            h = torch.tanh(x @ w + b)
            total = total + (1 + (1 - h * h) * (w @ u)).abs().log()
            x = x + u * h[:, None]
        return (x.pow(2).sum(-1) / 2 - total).mean()


class Masked(nn.Linear):
    """Multiply the weight by a mask in a buffer."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x):
        return functional.linear(x, self.weight * self.mask, self.bias)


class Made(nn.Module):
    """Estimate a density autoregressively by masked layers (Germain et al. 2015)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        degrees, hidden = torch.arange(5), torch.arange(12) % 4
        self.hidden = Masked((hidden[:, None] >= degrees).float())
        self.out = Masked((degrees.repeat(outputs)[:, None] > hidden).float())

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


class AutoregressiveFlow(nn.Module):
    """Return the negative log-likelihood of masked autoregressive flows (Papamakarios et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Made(2) for _ in range(2))

    def forward(self, x):
        total = 0
        for layer in self.layers:
            shift, log_scale = layer(x).chunk(2, -1)
            log_scale = torch.tanh(log_scale)
            x, total = ((x - shift) * (-log_scale).exp()).flip(-1), total + log_scale.sum(-1)
        return (x.pow(2).sum(-1) / 2 + total).mean()


class MaskedConvolution(nn.Conv2d):
    """Hide the pixels after the current one, as PixelCNN does (van den Oord et al. 2016)."""

    def __init__(self, *sizes: int, center: bool) -> None:
        super().__init__(*sizes, padding=1)
        mask = torch.ones(3, 3)
        mask[1, 1 + center :], mask[2] = 0, 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        return functional.conv2d(x, self.weight * self.mask, self.bias, padding=1)


def pixel_cnn() -> nn.Module:
    first, last = MaskedConvolution(1, 6, 3, center=False), MaskedConvolution(6, 4, 3, center=True)
    return nn.Sequential(first, nn.ReLU(), last)


def pruned(structured: bool, removed: bool = False) -> nn.Module:
    """Prune by magnitude with torch.nn.utils.prune, which keeps masks in buffers until they are removed."""
    module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in (module[0], module[2]):
        if structured:
            prune.ln_structured(layer, "weight", 0.3, 2, 0)
        else:
            prune.l1_unstructured(layer, "weight", 0.5)
        if removed:
            prune.remove(layer, "weight")
    return module


def pruned_convolution() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    prune.random_unstructured(module[0], "weight", 0.4)
    prune.ln_structured(module[2], "weight", 0.4, 2, 0)
    prune.l1_unstructured(module[4], "bias", 1)
    return module


class GraphConvolution(nn.Module):
    """Multiply by a normalized adjacency matrix in a buffer (Kipf, Welling 2017)."""

    def __init__(self) -> None:
        super().__init__()
        adjacency = torch.eye(5)
        adjacency[EDGES] = 1
        degree = adjacency.sum(1).rsqrt()
        self.register_buffer("adjacency", degree[:, None] * adjacency * degree)
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.adjacency @ self.two(torch.relu(self.adjacency @ self.one(x)))


class Messages(nn.Module):
    """Hold a list of edges in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor(EDGES))

    def summed(self, messages: torch.Tensor) -> torch.Tensor:
        """Sum messages of shape [rows, edges, width] at the ends of edges."""
        zeros = messages.new_zeros(messages.shape[0], 5, messages.shape[2])
        return zeros.index_add(1, self.edges[1], messages)


class GraphSage(Messages):
    """Average neighbours, by sums and counts (Hamilton et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)

    def forward(self, x):
        total = self.summed(x[:, self.edges[0]])
        count = self.summed(torch.ones_like(x[:, self.edges[0], :1])).clamp(min=1)
        return torch.relu(self.own(x) + self.other(total / count))


class GraphAttention(Messages):
    """Weight messages by a softmax over the edges of a node (Velickovic et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.bias = nn.Linear(4, 6, bias=False), nn.Parameter(torch.randn(6))
        self.start, self.end = nn.Parameter(torch.randn(6, 1)), nn.Parameter(torch.randn(6, 1))

    def forward(self, x):
        h, (start, end) = self.project(x), self.edges
        score = functional.leaky_relu((h @ self.start)[:, start] + (h @ self.end)[:, end], 0.2)
        index = end[None, :, None].expand(x.shape[0], -1, 1)
        most = torch.full_like(h[..., :1], -1e9).scatter_reduce(1, index, score, "amax")
        weight = (score - most[:, end]).exp()
        return self.summed(weight * h[:, start]) / self.summed(weight) + self.bias


class EdgeConvolution(Messages):
    """Take the largest message at each node (Wang et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = perceptron(8, 8, 6), nn.Linear(6, 2)

    def forward(self, x):
        start, end = self.edges
        m = self.message(torch.cat([x[:, end], x[:, start] - x[:, end]], -1))
        index = end[None, :, None].expand(x.shape[0], -1, 6)
        zeros = m.new_zeros(x.shape[0], 5, 6)
        return self.out(zeros.scatter_reduce(1, index, m, "amax", include_self=False))


class GatedGraph(Messages):
    """Update nodes by a GRU cell from summed messages (Li et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message = nn.Linear(4, 6), nn.Linear(6, 6)
        self.cell, self.head = nn.GRUCell(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(self.enter(x))
        for _ in range(2):
            m = self.summed(self.message(h)[:, self.edges[0]])
            h = self.cell(m.flatten(0, 1), h.flatten(0, 1)).view(-1, 5, 6)
        return self.head(h.mean(1))


class GraphIsomorphism(nn.Module):
    """Sum neighbours along edges that are an input, and nodes of each graph (Xu et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = perceptron(4, 8, 6), perceptron(6, 8, 6)
        self.epsilon, self.head = nn.Parameter(torch.zeros(2)), nn.Linear(6, 3)

    def forward(self, x, start, end, graph):
        for i, layer in enumerate((self.one, self.two)):
            x = layer((1 + self.epsilon[i]) * x + torch.zeros_like(x).index_add(0, end, x[start]))
        return self.head(x.new_zeros(2, 6).index_add(0, graph, x))


def graphs(batch: int):
    x, edges = torch.randn(6, 4), torch.randint(0, 6, (2, 9))
    return x, edges[0], edges[1], torch.tensor([0, 0, 0, 1, 1, 1])


class Bags(nn.Module):
    """Embed bags of ids."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(11, 6, mode=mode), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.bags(x))


class WeightedBags(nn.Module):
    """Sum the embeddings of a bag with given weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, x, weight):
        return self.head((self.table(x) * weight[..., None]).sum(1))


class Dlrm(nn.Module):
    """Interact embeddings and numbers by their inner products (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(9, 4, mode="sum") for _ in range(3))
        self.bottom, self.top = perceptron(3, 8, 4), perceptron(4 + 6, 8, 1)

    def forward(self, ids, numbers):
        x = self.bottom(numbers)
        parts = torch.stack([x, *(table(ids[:, i : i + 1]) for i, table in enumerate(self.tables))], 1)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, (parts @ parts.transpose(1, 2))[:, i, j]], 1))


class DeepFm(nn.Module):
    """Add linear terms, a factorization machine and a perceptron over one table of fields (Guo et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, 9, 18]))
        self.linear, self.factors = nn.Embedding(27, 1), nn.Embedding(27, 4)
        self.deep, self.bias = perceptron(12, 8, 1), nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        ids = ids + self.offsets
        v = self.factors(ids)
        pairwise = (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(-1, keepdim=True) / 2
        return self.linear(ids).sum(1) + pairwise + self.deep(v.flatten(1)) + self.bias


class Cross(nn.Module):
    """Cross features (Wang et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 2) for _ in range(3))
        self.layers, self.head = nn.ModuleList(nn.Linear(9, 9) for _ in range(2)), nn.Linear(9, 1)

    def forward(self, ids, numbers):
        first = x = torch.cat([*(table(ids[:, i]) for i, table in enumerate(self.tables)), numbers], 1)
        for layer in self.layers:
            x = first * layer(x) + x
        return self.head(x)


class TwoTowers(nn.Module):
    """Score all pairs of a batch, with a temperature that is the exponential of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 6), nn.Embedding(9, 6)
        self.user, self.item = perceptron(6, 8, 5), perceptron(6, 8, 5)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, user, item):
        a = functional.normalize(self.user(self.users(user)), dim=-1)
        b = functional.normalize(self.item(self.items(item)), dim=-1)
        logits = a @ b.t() / self.temperature.exp()
        return -logits.log_softmax(-1).diagonal().mean()


class SequentialRecommender(nn.Module):
    """Predict the next item by attention; the head is tied, item 0 pads (Kang, McAuley 2018)."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(11, 8, padding_idx=padding), nn.Embedding(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        mask = torch.full((6, 6), float("-inf")).triu(1)
        h = self.layer(self.items(x) * math.sqrt(8) + self.positions.weight, mask.to(self.positions.weight))
        return h @ self.items.weight.t()


class SiameseNormalized(nn.Module):
    """Compare two inputs of one network that normalizes batches."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, a, b):
        return (self.encode(a) - self.encode(b)).abs()


class SharedHead(nn.Module):
    """Apply one convolutional head with BatchNormalization to the levels of a pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, 2, 1)
        self.head = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))

    def forward(self, x):
        one = torch.relu(self.stem(x))
        levels = one, torch.relu(self.down(one))
        return torch.cat([self.head(level).flatten(2) for level in levels], 2)


class OneOfTwoNormalizations(nn.Module):
    """Use a BatchNormalization in its inference form beside one that learns its statistics, as fine-tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("variance", torch.rand(6) + 0.5)

    def forward(self, x):
        x = functional.batch_norm(x, self.mean, self.variance)
        return self.head(torch.relu(self.norm(self.a(x))))


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """Project onto the simplex (Martins, Astudillo 2016)."""
    ordered, _ = x.sort(-1, descending=True)
    sums = ordered.cumsum(-1) - 1
    counts = torch.arange(1, x.shape[-1] + 1)
    support = (ordered * counts > sums).sum(-1, keepdim=True)
    return torch.relu(x - sums.gather(-1, support - 1) / support)


class TabNet(nn.Module):
    """Attend to features in steps with a shared, normalized transformation (Arik, Pfister 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shared, self.glu = nn.BatchNorm1d(6), nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.attend = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def transform(self, x):
        return functional.glu(self.glu(self.shared(x)))

    def forward(self, x):
        x = self.norm(x)
        h, prior, total = self.transform(x), torch.ones_like(x), 0
        for attend in self.attend:
            mask = sparsemax(attend(h) * prior)
            prior = prior * (1.3 - mask)
            h = self.transform(mask * x)
            total = total + torch.relu(h)
        return self.head(total)


class FeatureTokens(nn.Module):
    """Attend between the tokens of features and a class token (Gorishniy et al. 2021)."""

    def __init__(self, shape: Sequence[int], repeated: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(5, 8))
        self.token, self.repeated = nn.Parameter(torch.randn(shape)), repeated
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        token = self.token.view(1, -1, 8)
        token = token.repeat(x.shape[0], 1, 1) if self.repeated else token.expand(x.shape[0], -1, -1)
        return self.head(self.layer(torch.cat([token, x[..., None] * self.weight + self.bias], 1))[:, 0])


class ObjectQueries(nn.Module):
    """Decode by the rows of a table that are repeated for each image (Carion et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.head = nn.Embedding(3, 8), nn.Linear(8, 4)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        return self.head(self.decoder(self.queries.weight[None].repeat(x.shape[0], 1, 1), x))


class MaskToken(nn.Module):
    """Replace masked patches by a learned token (He et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.enter, self.head = (
            nn.Parameter(torch.randn(1, 1, 8)),
            nn.Linear(6, 8),
            nn.Linear(8, 6),
        )
        self.mix = nn.Linear(5, 5)

    def forward(self, x, mask):
        h = torch.where(mask > 0, self.token, self.enter(x))
        return self.head(torch.tanh(self.mix(h.transpose(1, 2))).transpose(1, 2))


def patches(batch: int):
    return torch.randn(batch, 5, 6), torch.randint(0, 2, (batch, 5, 1))


def critic(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(5, 8)), nn.LeakyReLU(), norm(nn.Linear(8, 3)))


def convolutional_critic(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Conv2d(2, 4, 3)), nn.LeakyReLU(), nn.Flatten(), norm(nn.Linear(64, 3)))


class SoftTree(nn.Module):
    """Mix leaves by the probabilities of their paths (Frosst, Hinton 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.leaves = nn.Linear(5, 3), nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        p = torch.sigmoid(self.split(x))
        left, right = torch.stack([1 - p[:, 1], p[:, 1]], 1), torch.stack([1 - p[:, 2], p[:, 2]], 1)
        return torch.cat([(1 - p[:, :1]) * left, p[:, :1] * right], 1) @ self.leaves


class FixedSum(nn.Module):
    """Combine frozen transforms of a parameter: 1 - m, 1 + epsilon, a softmax and a decay."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.epsilon = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
        self.filter, self.rate = nn.Parameter(torch.randn(6)), nn.Parameter(torch.rand(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        gate = self.mixing * x + (1 - self.mixing) * torch.tanh(x)
        return self.head(gate * (1 + self.epsilon) * self.filter.softmax(0) * torch.exp(-self.rate))


class PartlyTied(nn.Module):
    """Score by an embedding's transpose joined with a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.own = nn.Parameter(torch.randn(8, 4) / 3)

    def forward(self, x):
        return torch.tanh(self.middle(self.embedding(x))) @ torch.cat([self.embedding.weight.t(), self.own], 1)


def ids_and_numbers(batch: int):
    return torch.randint(0, 9, (batch, 3)), torch.randn(batch, 3)


def ids_and_weights(batch: int):
    return torch.randint(0, 11, (batch, 5)), torch.rand(batch, 5)


def users_and_items(batch: int):
    return torch.randint(0, 9, (batch,)), torch.randint(0, 9, (batch,))


def case(build: Callable[[], nn.Module], inputs: Callable[..., Any], **options: Any) -> TorchCase:
    return TorchCase(build, inputs, **{"ways": BOTH, **options})


OWN: dict[str, Any] = {"loss": passes.OwnLoss()}
CLASSES: dict[str, Any] = {"loss": passes.CrossEntropy()}
TOKENS: dict[str, Any] = {"loss": passes.CrossEntropy(axis=-1)}
FIXED: dict[str, Any] = {"ways": STATIC}
EIGHT: dict[str, Any] = {"batch": 8}

CASES = {
    "RealNVP": case(RealNvp, rows(4), **OWN),
    "Glow": case(Glow, rows(4), **OWN),
    "planar flow": case(PlanarFlow, rows(4), **OWN),
    "MADE": case(lambda: Made(1), rows(5)),
    "masked autoregressive flow": case(AutoregressiveFlow, rows(5), **OWN),
    "PixelCNN": case(pixel_cnn, rows(1, 6, 6), **CLASSES),
    "pruned": case(lambda: pruned(False), rows(6), **CLASSES),
    "pruned, structured": case(lambda: pruned(True), rows(6), **CLASSES),
    "pruned for good": case(lambda: pruned(False, removed=True), rows(6), fresh=True, **CLASSES),
    "pruned convolutions": case(pruned_convolution, rows(2, 6, 6), **CLASSES),
    "GCN": case(GraphConvolution, rows(5, 4)),
    "GraphSAGE": case(GraphSage, rows(5, 4)),
    "GAT": case(GraphAttention, rows(5, 4)),
    "EdgeConv": case(EdgeConvolution, rows(5, 4)),
    "gated graph network": case(GatedGraph, rows(5, 4)),
    "GIN, edges an input": case(GraphIsomorphism, graphs, **FIXED),
    "embedding bags, sum": case(lambda: Bags("sum"), words(5)),
    "embedding bags, mean": case(lambda: Bags("mean"), words(5)),
    "embedding bags, max": case(lambda: Bags("max"), words(5)),
    "embedding bags, weighted": case(WeightedBags, ids_and_weights),
    "DLRM": case(Dlrm, ids_and_numbers),
    "DeepFM": case(DeepFm, lambda batch: (torch.randint(0, 9, (batch, 3)),)),
    "DCN": case(Cross, ids_and_numbers),
    "two towers": case(TwoTowers, users_and_items, **OWN),
    "SASRec": case(lambda: SequentialRecommender(None), words(6), **TOKENS),
    "SASRec, padded": case(lambda: SequentialRecommender(3), words(6), unrecorded=("torchscript",), **TOKENS),
    "siamese, BatchNormalization": case(SiameseNormalized, pairs(6, 6), **EIGHT),
    "shared head, BatchNormalization": case(SharedHead, rows(2, 8, 8), **EIGHT),
    "a frozen and a live BatchNormalization": case(
        OneOfTwoNormalizations, rows(6), training=passes.TrainingMode(leave_out="mean"), **EIGHT
    ),
    "TabNet": case(TabNet, rows(6), **EIGHT, **CLASSES),
    "FT-Transformer": case(lambda: FeatureTokens((1, 1, 8)), rows(5), ways=(*BOTH, *STATIC)),
    "FT-Transformer, token of rank 1": case(lambda: FeatureTokens((8,)), rows(5), **FIXED),
    "FT-Transformer, repeated registers": case(lambda: FeatureTokens((3, 8), True), rows(5), ways=(*BOTH, *STATIC)),
    "DETR": case(ObjectQueries, rows(5, 8), ways=(*BOTH, *STATIC)),
    "masked autoencoder": case(MaskToken, patches, ways=(*BOTH, *STATIC)),
    "spectral norm, parametrization": case(lambda: critic(parametrizations.spectral_norm), rows(5)),
    "spectral norm, hook": case(lambda: critic(nn.utils.spectral_norm), rows(5)),
    "spectral norm of convolutions": case(
        lambda: convolutional_critic(parametrizations.spectral_norm), rows(2, 6, 6)
    ),
    "weight norm, parametrization": case(lambda: critic(parametrizations.weight_norm), rows(5)),
    "weight norm, hook": case(lambda: critic(nn.utils.weight_norm), rows(5)),
    "weight norm of convolutions": case(lambda: convolutional_critic(parametrizations.weight_norm), rows(2, 6, 6)),
    "soft tree": case(SoftTree, rows(5)),
    "functions of parameters": case(FixedSum, rows(6)),
    "partly tied head": case(PartlyTied, words(6), **TOKENS),
}  # fmt: skip
