"""Weights that train in files of PyTorch's older exporter (`dynamo=False`), compared with the module's parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
import pytest
import torch
from builders import model
from steps import exported
from test_weights import decided, origin, trained
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from twins import assert_trains_as

import graphopt
import passes


class Own(nn.Module):
    """Take parameters and buffers by name, and a function of the module and the input."""

    def __init__(self, function: Callable, parameters: dict | None = None, **rest) -> None:
        super().__init__()
        for name, x in (parameters or {}).items():
            self.register_parameter(name, nn.Parameter(torch.as_tensor(x, dtype=torch.float32)))
        for name, x in rest.items():
            if isinstance(x, nn.Module):
                self.add_module(name, x)
            else:
                self.register_buffer(name, torch.as_tensor(x, dtype=torch.float32))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def randomized(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p += 0.1 * torch.randn(p.shape)
    return module.eval()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def pruned(layer: nn.Module, keep: bool = True) -> nn.Module:
    prune.random_unstructured(layer, "weight", 0.4)
    if not keep:
        prune.remove(layer, "weight")
    return layer


def made(m, x):
    return F.linear(F.relu(F.linear(x, m.weight * m.mask, m.bias)), m.last * m.mask.T)


def yolo(m, x):
    raw = m.head(x).flatten(2)
    xy, wh = raw[:, :2], raw[:, 2:4]
    return torch.cat([(xy.sigmoid() + m.a) * m.stride, wh.exp() * m.b, raw[:, 4:].sigmoid()], 1)


def yolov5(m, x):
    y = m.head(x).view(len(x), 3, 6, 4, 4).permute(0, 1, 3, 4, 2).sigmoid()
    xy = (y[..., :2] * 2 + m.grid) * m.stride
    wh = (y[..., 2:4] * 2) ** 2 * m.anchor_grid
    return torch.cat((xy, wh, y[..., 4:]), -1)


def ssd(m, x):
    loc = m.head(x).flatten(2).transpose(1, 2)
    return torch.cat(
        [
            m.priors[:, :2] + loc[..., :2] * 0.1 * m.priors[:, 2:],
            m.priors[:, 2:] * (loc[..., 2:] * 0.2).exp(),
        ],
        -1,
    )


def fcos(m, x):
    distances = m.head(x).flatten(2).transpose(1, 2).exp()
    return torch.cat([m.points - distances[..., :2], m.points + distances[..., 2:]], -1)


def rotary(m, x):
    t = torch.arange(x.shape[1]).float()
    angle = torch.outer(t, m.inv_freq).repeat(1, 2)
    q = m.q(x)
    half = torch.cat([-q[..., 4:], q[..., :4]], -1)
    return q * angle.cos() + half * angle.sin()


def rotary_cached(m, x):
    q = m.q(x)
    half = torch.cat([-q[..., 4:], q[..., :4]], -1)
    return q * m.cos_table[: x.shape[1]] + half * m.sin_table[: x.shape[1]]


def causal(m, x):
    scores = m.q(x) @ m.k(x).transpose(1, 2) / 8**0.5
    return (scores + m.bias_table).softmax(-1) @ x


def where_causal(m, x):
    scores = m.q(x) @ m.k(x).transpose(1, 2) / 8**0.5
    return scores.masked_fill(m.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf")).softmax(-1) @ x


def multiplied_causal(m, x):
    return (m.q(x) @ m.k(x).transpose(1, 2) * m.tri) @ x


def coupling(m, x):
    a = x * m.b
    return a + (1 - m.b) * (x * m.s(a).tanh().exp() + m.t(a))


def pool(m, x):
    return F.conv2d(F.pad(m.first(x), (1, 1, 1, 1), mode="reflect"), m.filt, stride=2, groups=4)


def binomial(channels: int, n: int = 3) -> torch.Tensor:
    row = torch.tensor([math.comb(n - 1, k) for k in range(n)], dtype=torch.float32)
    return (torch.outer(row, row) / row.sum() ** 2).expand(channels, 1, n, n).contiguous()


def gaussian(channels: int) -> torch.Tensor:
    row = torch.exp(-(torch.arange(-2, 3).float() ** 2) / 2.42)
    row = row / row.sum()
    return torch.outer(row, row).expand(channels, 1, 5, 5).contiguous()


SOBEL = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])[None, None]
WAVES = np.sin(np.arange(6)[:, None] * (1 / 10 ** (np.arange(8) // 2 / 4)) + np.pi / 2 * (np.arange(8) % 2))
MESH = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="xy"), 0)
PRIORS = torch.cat([(MESH.reshape(2, 16).T + 0.5) / 4, torch.tensor([[0.2, 0.35]]).expand(16, 2)], 1)
TRIU = torch.triu(torch.full((6, 6), float("-inf")), 1)


class Row(NamedTuple):
    """A module, the shape of its input, and how many numbers train if the exporter replaced parameters by others."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    folded: int | None = None


def head(channels: int) -> nn.Module:
    return nn.Conv2d(3, channels, 1)


def lin(columns: int = 8, bias: bool = True) -> nn.Module:
    return nn.Linear(8, columns, bias=bias)


V, T, IMG, S = (3, 8), (2, 6, 8), (2, 3, 8, 8), (2, 3, 4, 4)  # rows, sequences, images, small images
ROWS: dict[str, Row] = {
    "linear": Row(lambda: nn.Sequential(lin(), nn.ReLU(), lin()), V),
    "linear of sequences": Row(lambda: nn.Sequential(lin(), nn.ReLU(), lin(4, False)), T),
    "pruned linear": Row(lambda: nn.Sequential(pruned(lin()), nn.ReLU(), lin()), V),
    "pruned linear of sequences": Row(lambda: nn.Sequential(pruned(lin()), nn.ReLU(), lin()), T),
    "pruned convolution": Row(lambda: nn.Sequential(pruned(nn.Conv2d(3, 4, 3)), nn.ReLU()), IMG),
    "pruned bias": Row(lambda: prune.random_unstructured(lin(), "bias", 0.5), V),
    "structured pruning": Row(lambda: prune.ln_structured(lin(), "weight", 0.5, 2, 0), V),
    "pruning made permanent": Row(lambda: pruned(lin(), keep=False), V),
    "masked autoencoder": Row(
        lambda: Own(
            made,
            {"weight": normal(8, 8), "bias": normal(8), "last": normal(8, 8)},
            mask=torch.tril(torch.ones(8, 8)),
        ),
        V,
    ),
    "masked autoencoder of sequences": Row(
        lambda: Own(
            made,
            {"weight": normal(8, 8), "bias": normal(8), "last": normal(8, 8)},
            mask=torch.tril(torch.ones(8, 8)),
        ),
        T,
    ),
    "masked convolution": Row(
        lambda: Own(
            lambda m, x: F.conv2d(x, m.weight * m.mask),
            {"weight": normal(4, 3, 3, 3)},
            mask=torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0, 0]).view(1, 1, 3, 3).expand(4, 3, 3, 3).contiguous(),
        ),
        IMG,
    ),
    "mask of features": Row(
        lambda: Own(lambda m, x: m.layer(x * m.select), layer=lin(), select=[1, 0, 1, 1, 0, 0, 1, 0]), V
    ),
    "coupling layer": Row(lambda: Own(coupling, s=lin(), t=lin(), b=[1, 0] * 4), V),
    "spectral norm": Row(lambda: nn.Sequential(spectral_norm(lin()), nn.ReLU(), spectral_norm(lin(4))), V),
    "spectral norm of a convolution": Row(lambda: spectral_norm(nn.Conv2d(3, 4, 3)), IMG),
    "weight norm": Row(lambda: nn.Sequential(weight_norm(lin()), nn.ReLU(), lin(4)), V, folded=64 + 8 + 36),
    "weight norm of a convolution": Row(lambda: weight_norm(nn.Conv2d(3, 4, 3)), IMG, folded=108 + 4),
    "weight norm as a parametrization": Row(lambda: parametrizations.weight_norm(lin()), V, folded=64 + 8),
    "sum of weights": Row(
        lambda: Own(lambda m, x: x @ (m.a + m.b), {"a": normal(8, 4), "b": normal(8, 4)}), V, folded=32
    ),
    "convolution and batch normalization": Row(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        IMG,
        folded=108 + 4 + 72 + 2,
    ),
    "batch normalization first": Row(lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), IMG),
    "blur pool": Row(lambda: Own(pool, first=nn.Conv2d(3, 4, 3), filt=binomial(4)), IMG),
    "blur by a Gaussian": Row(
        lambda: Own(lambda m, x: F.conv2d(m.first(x), m.g, groups=4), first=nn.Conv2d(3, 4, 3), g=gaussian(4)),
        IMG,
    ),
    "blur of one channel": Row(
        lambda: Own(lambda m, x: m.last(F.conv2d(x[:, :1], m.g)), last=nn.Conv2d(1, 4, 3), g=gaussian(1)), IMG
    ),
    "Sobel": Row(
        lambda: Own(
            lambda m, x: m.last(F.conv2d(x, torch.cat([m.k, m.k.transpose(2, 3)]).repeat(1, 3, 1, 1))),
            last=nn.Conv2d(2, 4, 3),
            k=SOBEL,
        ),
        IMG,
    ),
    "Sobel as one buffer": Row(
        lambda: Own(
            lambda m, x: m.last(F.conv2d(x[:, :1], m.k)),
            last=nn.Conv2d(2, 4, 3),
            k=torch.cat([SOBEL, SOBEL.transpose(2, 3)]),
        ),
        IMG,
    ),
    "depthwise convolution": Row(lambda: nn.Conv2d(3, 3, 3, groups=3), IMG),
    "YOLO with short names": Row(
        lambda: Own(yolo, head=head(7), a=MESH.reshape(1, 2, 16), stride=8.0, b=[[[10.0], [14.0]]]), S
    ),
    "YOLO with half steps": Row(
        lambda: Own(yolo, head=head(7), a=MESH.reshape(1, 2, 16) + 0.5, stride=[16.0], b=[[[3.625], [11.65625]]]),
        S,
    ),
    "YOLO of version 5": Row(
        lambda: Own(
            yolov5,
            head=head(18),
            grid=MESH.permute(1, 2, 0)[None, None] - 0.5,
            stride=8.0,
            anchor_grid=torch.tensor([10.0, 13, 16, 30, 33, 23]).view(1, 3, 1, 1, 2),
        ),
        S,
    ),
    "SSD": Row(lambda: Own(ssd, head=head(4), priors=PRIORS), S),
    "FCOS": Row(lambda: Own(fcos, head=head(4), points=(MESH.reshape(2, 16).T * 8 + 4)), S),
    "clamp": Row(lambda: Own(lambda m, x: m.layer(x).clamp(1e-10, float("inf")).log(), layer=lin()), V),
    "hardtanh": Row(lambda: nn.Sequential(lin(), nn.Hardtanh(-2, 2), nn.ReLU6(), lin()), V),
    "hard swish": Row(lambda: nn.Sequential(lin(), nn.Hardswish(), nn.Hardsigmoid(), lin()), V),
    "sinusoidal table": Row(lambda: Own(lambda m, x: m.layer(x + m.table), layer=lin(), table=WAVES), T),
    "sinusoidal table, sliced": Row(
        lambda: Own(lambda m, x: m.layer(x + m.pe[:, : x.shape[1]]), layer=lin(), pe=WAVES[None]), T
    ),
    "learned positions": Row(
        lambda: Own(lambda m, x: m.layer(x + m.pos_embed), {"pos_embed": normal(1, 6, 8)}, layer=lin()), T
    ),
    "rotary": Row(lambda: Own(rotary, q=lin(), inv_freq=1 / 100 ** (torch.arange(0, 8, 2) / 8)), T),
    "rotary with tables": Row(
        lambda: Own(
            rotary_cached,
            q=lin(),
            cos_table=torch.outer(torch.arange(6.0), 1 / 100 ** (torch.arange(0, 8, 2) / 8)).repeat(1, 2).cos(),
            sin_table=torch.outer(torch.arange(6.0), 1 / 100 ** (torch.arange(0, 8, 2) / 8)).repeat(1, 2).sin(),
        ),
        T,
    ),
    "causal mask of infinities": Row(lambda: Own(causal, q=lin(), k=lin(), bias_table=TRIU), T),
    "causal mask of large numbers": Row(
        lambda: Own(causal, q=lin(), k=lin(), bias_table=torch.triu(torch.full((6, 6), -100.0), 1)), T
    ),
    "causal mask by a comparison": Row(
        lambda: Own(where_causal, q=lin(), k=lin(), tril=torch.tril(torch.ones(8, 8))), T
    ),
    "causal mask by a product": Row(
        lambda: Own(multiplied_causal, q=lin(), k=lin(), tri=torch.tril(torch.ones(6, 6))), T
    ),
    "slopes": Row(
        lambda: Own(causal, q=lin(), k=lin(), bias_table=-0.25 * (torch.arange(6)[:, None] - torch.arange(6)).abs()),
        T,
    ),
    "learned bias of attention": Row(lambda: Own(causal, {"bias_table": normal(6, 6)}, q=lin(), k=lin()), T),
    "constants as buffers": Row(
        lambda: Own(lambda m, x: (m.layer(x) - m.mean) / m.std, layer=lin(), mean=[0.485] * 8, std=[0.229] * 8),
        V,
    ),
    "statistics of the input": Row(
        lambda: Own(
            lambda m, x: m.layer((x - m.m) / m.s),
            layer=nn.Conv2d(3, 4, 3),
            m=torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1),
            s=torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1),
        ),
        IMG,
    ),
    "learned temperature": Row(
        lambda: Own(lambda m, x: m.layer(x) * m.temperature.exp(), {"temperature": 0.7}, layer=lin()), V
    ),
    "learned temperature as a divisor": Row(lambda: Own(lambda m, x: m.layer(x) / m.t, {"t": [0.7]}, layer=lin()), V),
    "fixed temperature": Row(lambda: Own(lambda m, x: m.layer(x) / 0.07 + 1e-5, layer=lin()), V),
    "LayerScale": Row(
        lambda: Own(lambda m, x: x + m.gamma * m.layer(x), {"gamma": 1e-4 * torch.ones(8)}, layer=lin()), T
    ),
    "ScaleNorm": Row(lambda: Own(lambda m, x: m.layer(m.g * F.normalize(x, dim=-1)), {"g": 2.8}, layer=lin()), T),
    "RMSNorm": Row(
        lambda: Own(
            lambda m, x: m.layer(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight),
            {"weight": torch.ones(8)},
            layer=lin(),
        ),
        T,
    ),
    "learned queries": Row(
        lambda: Own(
            lambda m, x: (m.queries @ m.k(x).transpose(1, 2)).softmax(-1) @ x,
            {"queries": normal(4, 8)},
            k=lin(),
        ),
        T,
    ),
    "class token": Row(
        lambda: Own(
            lambda m, x: m.layer(torch.cat([m.cls.expand(x.shape[0], -1, -1), x], 1)),
            {"cls": normal(1, 1, 8)},
            layer=lin(),
        ),
        T,
    ),
    "mask token": Row(
        lambda: Own(
            lambda m, x: m.layer(x * (x > 0) + m.mask_token * (x <= 0)),
            {"mask_token": normal(1, 1, 8)},
            layer=lin(),
        ),
        T,
    ),
    "PReLU": Row(lambda: nn.Sequential(lin(), nn.PReLU(), lin(), nn.PReLU(8)), V),
    "PACT": Row(lambda: Own(lambda m, x: torch.minimum(F.relu(m.layer(x)), m.alpha), {"alpha": 1.3}, layer=lin()), V),
    "embedding with padding": Row(
        lambda: Own(lambda m, x: m.head(m.words((x > 0).long())), words=nn.Embedding(4, 8, padding_idx=0), head=lin()),
        V,
    ),
    "tied embedding": Row(
        lambda: Own(lambda m, x: F.linear(m.words((x > 0).long()), m.words.weight), words=nn.Embedding(4, 8)),
        V,
    ),
    "average of weights as buffers": Row(lambda: Own(lambda m, x: m.layer(x), layer=lin(), weight_ema=normal(8, 8)), V),
    "codebook": Row(
        lambda: Own(lambda m, x: m.layer(x @ m.codes.T), {"codes": normal(5, 8)}, layer=nn.Linear(5, 4)), V
    ),
    "weight standardization": Row(
        lambda: Own(lambda m, x: F.conv2d(x, (m.w - m.w.mean((1, 2, 3), keepdim=True)) / 2), {"w": normal(4, 3, 3, 3)}),
        IMG,
    ),
    "LSTM": Row(lambda: Own(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(8, 4, batch_first=True)), T),
    "GRU": Row(
        lambda: Own(
            lambda m, x: m.head(m.rnn(x)[0]),
            rnn=nn.GRU(8, 8, batch_first=True, bidirectional=True),
            head=nn.Linear(16, 2),
        ),
        T,
    ),
    "attention": Row(
        lambda: Own(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)),
        T,
    ),
    "low-rank adapter": Row(
        lambda: Own(
            lambda m, x: m.base(x) + (x @ m.a.T @ m.b.T) * 0.5,
            {"a": normal(2, 8), "b": normal(8, 2)},
            base=lin(),
        ),
        T,
    ),
    "radial basis": Row(
        lambda: Own(
            lambda m, x: m.layer(torch.exp(-0.5 * (x.sum(-1, keepdim=True) - m.offset) ** 2)),
            layer=lin(),
            offset=torch.linspace(0, 5, 8),
        ),
        V,
    ),
    "bins of a distribution": Row(
        lambda: Own(lambda m, x: (m.layer(x).softmax(-1) * m.project).sum(-1), layer=lin(), project=torch.arange(8.0)),
        T,
    ),
    "bins as a product": Row(
        lambda: Own(lambda m, x: m.layer(x).softmax(-1) @ m.bins, layer=lin(), bins=torch.arange(8.0)), T
    ),
    "selective scan": Row(
        lambda: Own(
            lambda m, x: m.layer(x[..., None] * -torch.exp(m.A_log)).sum(-1),
            {"A_log": torch.arange(1.0, 9).log().repeat(8, 1)},
            layer=lin(),
        ),
        V,
    ),
}


def export(row: Row) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    module = randomized(row.make())
    return module, exported(module, torch.randn(row.shape), dynamo=False)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.sample(24)
def test_parameters_train_and_buffers_do_not(name: str) -> None:
    module, proto = export(ROWS[name])
    loaded, _ = decided(proto)
    found = {name: int(np.prod(value.shape.numpy())) for name, value in trained(loaded).items()}
    expected = sum(parameter.numel() for parameter in module.parameters())
    assert sum(found.values()) == (ROWS[name].folded or expected), found
    assert not set(found) & {name for name, _ in module.named_buffers()}


@pytest.mark.parametrize(
    "name",
    ["pruned linear", "weight norm", "sum of weights", "convolution and batch normalization", "codebook"],
)
def test_what_the_exporter_computed_is_unsure(name: str) -> None:
    loaded, said = decided(export(ROWS[name])[1])
    folded = [value for value in trained(loaded) if value.startswith("onnx::")]
    assert folded and not any(origin(loaded, value).certain for value in folded)
    assert any(repr(value) in line for value in folded for line in said)


@pytest.mark.parametrize("name", ["linear of sequences", "attention", "LSTM", "PReLU"])
def test_a_transposed_weight_of_a_layer_is_certain(name: str) -> None:
    assert decided(export(ROWS[name])[1])[1] == []


STEPS = ("pruned linear", "pruned linear of sequences", "pruned convolution", "masked autoencoder of sequences",
         "mask of features", "coupling layer", "spectral norm", "blur pool", "YOLO of version 5")  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_ten_steps_are_those_of_the_module(name: str) -> None:
    twin, proto = export(ROWS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01, momentum=0.9))
    executor = graphopt.Executor(step, threads=1, native=False)
    optimizer = torch.optim.SGD(twin.parameters(), 0.01, momentum=0.9)
    inputs = [torch.randn(ROWS[name].shape) for _ in range(10)]
    assert_trains_as(executor, twin, optimizer, [(x, torch.zeros_like(twin(x))) for x in inputs])


def test_a_bound_of_clip_is_a_constant_even_if_it_is_shared() -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { h = MatMul(x, w)\n c = Clip(h, lo, hi)\n y = Mul(c, lo) }"
    proto = model(text, w=np.random.default_rng(0).normal(size=(4, 4)), lo=np.array(-0.51234), hi=np.array(np.inf))
    for name in ("lo", "hi"):
        for node in proto.graph.node:
            node.input[:] = [f"onnx::Clip_{name}" if x == name else x for x in node.input]
        next(x for x in proto.graph.initializer if x.name == name).name = f"onnx::Clip_{name}"
    proto.producer_name = "pytorch"
    assert list(trained(decided(proto)[0])) == ["w"]


def test_a_single_number_with_a_name_is_unsure() -> None:
    own = Own(lambda m, x: torch.minimum(m.layer(x), m.upper), layer=lin(), upper=2.5)
    loaded, said = decided(export(Row(lambda: own, V))[1])
    assert not origin(loaded, "upper").certain and "'upper'" in said[0]


def called(module: nn.Module, function: Callable) -> nn.Module:
    return Own(lambda m, x: m.last(function(m.m, x)), m=module, last=lin(3))


def twice(m, x):
    return torch.tanh(m(torch.tanh(m(x))))


def feed() -> nn.Module:
    return nn.Sequential(lin(12), nn.ReLU(), nn.Linear(12, 8))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


class Network(nn.Module):
    """Blocks with layers of each kind that the exporter folds."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = lin(bias=False)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": lin(12), "down": nn.Linear(12, 8)}) for _ in range(2))
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Sequential(nn.PReLU(6), lin(4))

    def forward(self, x):
        h = self.enter(x)
        for block in self.blocks:
            h = h + block["down"](torch.tanh(block["up"](h)))
        h = self.attend(h, h, h, need_weights=False)[0]
        return self.head(self.norm(h))


# Modules of which each parameter is in the file, laid out in some way.
PATHS: dict[str, Callable[[], nn.Module]] = {
    "layers of each kind": Network,
    "encoder": lambda: nn.TransformerEncoder(transformer(), 2, enable_nested_tensor=False),
    "nested lists": lambda: nn.Sequential(nn.Sequential(feed(), lin(bias=False)), nn.Sequential(feed())),
    "numbered names": lambda: Own(
        lambda m, x: m.fc_1(torch.tanh(m.fc(torch.tanh(m.fc_2(x))))), fc=lin(), fc_1=lin(), fc_2=lin()
    ),
    "recurrent": lambda: Own(
        lambda m, x: m.head(m.rnn(x)[0]),
        rnn=nn.LSTM(8, 4, num_layers=2, batch_first=True, bidirectional=True),
        head=lin(),
    ),
}
SHARED: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: called(lin(), twice),
    "a layer without a bias": lambda: called(lin(bias=False), twice),
    "a Sequential": lambda: called(feed(), twice),
    "three times": lambda: called(feed(), lambda m, x: m(twice(m, x))),
    "two halves": lambda: called(feed(), lambda m, x: m(x[:, :3]) * m(x[:, 3:])),
    "a module that has a Sequential": lambda: called(Own(lambda m, x: x + m.net(x), net=feed()), twice),
    "a Sequential in a Sequential": lambda: called(nn.Sequential(nn.Sequential(feed(), nn.ReLU()), lin()), twice),
    "a list of a Sequential": lambda: called(nn.ModuleList([feed()]), lambda m, x: twice(m[0], x)),
    "without biases": lambda: called(nn.Sequential(lin(12, False), nn.Linear(12, 8, bias=False)), twice),
    "with norms": lambda: called(nn.Sequential(nn.LayerNorm(8), feed()), lambda m, x: x + m(x + m(x))),
    "an encoder's layer": lambda: called(transformer(), twice),
    "numbered names": lambda: called(
        Own(lambda m, x: m.a_1(torch.tanh(m.a(x))), a=lin(bias=False), a_1=lin(bias=False)), twice
    ),
}


def numbers(parameters) -> int:
    return sum(parameter.numel() for parameter in parameters)


def numbers_in(values) -> int:
    return sum(int(np.prod(value.shape.numpy())) for value in values)


@pytest.mark.parametrize("name", PATHS)
def test_each_parameter_has_its_path(name: str) -> None:
    module, proto = export(Row(PATHS[name], T))
    loaded, said = decided(proto)
    found = {path for value in trained(loaded) for path in origin(loaded, value).sources or (value,)}
    assert found == dict(module.named_parameters()).keys() and not said


@pytest.mark.parametrize("name", [*PATHS, *SHARED])
@pytest.mark.sample(4)
def test_a_pattern_reaches_the_weights_of_a_module(name: str) -> None:
    module, proto = export(Row((PATHS | SHARED)[name], T))
    normalized = graphopt.load(proto)
    passes.Normalize()(normalized)
    for child in [path for path, part in module.named_modules() if path and [*part.parameters()]]:
        own = numbers(module.get_submodule(child).parameters())
        assert numbers_in(trained(decided(normalized, pattern=f"{child}.*")[0]).values()) == own, child
        if own < (whole := numbers(module.parameters())):
            frozen, said = decided(normalized, freeze=f"{child}.*")
            assert numbers_in(trained(frozen).values()) == whole - own and not said, child
    for path, parameter in [*module.named_parameters()][::3]:
        frozen, said = decided(normalized, freeze=path)
        assert numbers_in(trained(frozen).values()) == whole - parameter.numel() or "which has" in said[0], path


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.sample(6)
def test_a_module_that_is_called_again_trains_once(name: str) -> None:
    twin, proto = export(Row(SHARED[name], T))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1, native=False)
    assert sum(x.size for x in executor.parameters.values()) == numbers(twin.parameters())
    data = [(x := torch.randn(T), torch.ones_like(twin(x))) for _ in range(4)]
    assert_trains_as(executor, twin, torch.optim.SGD(twin.parameters(), 0.1), data, rtol=1e-5)


def test_groups_reach_the_weights_of_a_module() -> None:
    module, proto = export(Row(Network, T))
    still = passes.Group("blocks.1.*", learning_rate=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1, groups=(still,)))
    executor = graphopt.Executor(step, native=False)
    before = {name: np.array(x) for name, x in executor.parameters.items()}
    executor.step(x=np.ones(T, np.float32), target=np.zeros((2, 6, 4), np.float32))
    kept = [x.size for name, x in executor.parameters.items() if np.array_equal(x, before[name])]
    assert sum(kept) == numbers(module.blocks[1].parameters())


def test_what_has_no_path_belongs_to_the_module_that_reads_it() -> None:
    summed = {"a": normal(8, 4), "b": normal(8, 4)}
    inner = Own(lambda m, x: torch.tanh(x) @ (m.a + m.b), summed)
    _, proto = export(Row(lambda: Own(lambda m, x: m.inner(m.first(x)), inner=inner, first=lin()), V))
    assert numbers_in(trained(decided(proto, pattern="inner.*")[0]).values()) == 32


def test_a_pattern_that_reaches_a_part_of_a_joined_value_is_said() -> None:
    _, proto = export(Row(PATHS["recurrent"], T))
    _, said = decided(proto, freeze="rnn.weight_ih_l0")
    assert any("which has rnn.weight_ih_l0_reverse, too" in line for line in said)
    assert decided(proto, freeze=["rnn.weight_ih_l0", "rnn.weight_ih_l0_reverse"])[1] == []


def test_a_pattern_that_reaches_a_bias_without_its_weight_is_said() -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { h = MatMul(x, W)\n a = Add(h, layer.bias)\n y = MatMul(a, V) }"
    rng = np.random.default_rng(0)
    arrays = {"W": rng.normal(size=(4, 4)), "bias": rng.normal(size=4), "V": rng.normal(size=(4, 4))}
    proto = model(text.replace("layer.bias", "bias"), **arrays)
    for node in proto.graph.node:
        node.input[:] = ["layer.bias" if x == "bias" else x for x in node.input]
    next(x for x in proto.graph.initializer if x.name == "bias").name = "layer.bias"
    _, said = decided(proto, freeze="layer.*")
    assert any("'layer.bias' and not 'layer.weight', which may be 'W'" in line for line in said)
    for pattern in ("*.bias", ["layer.*", "W"]):
        assert decided(proto, freeze=pattern)[1] == []
    group = passes.Group("layer.*", learning_rate=0.0)
    with pytest.warns(UserWarning, match="SGD: groups: pattern='layer.\\*': expected the weights of layers"):
        graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1, groups=(group,)))


def scaled(m, x):
    return m.head(torch.tanh(m.layer(x)) * torch.sigmoid(m.p))


def shifted(m, x):
    return m.head(torch.tanh(m.layer(x) + m.p))


def divided(m, x):
    return m.head(torch.tanh(m.layer(x) / (m.p.abs() + 0.1)))


NAMES = (
    "std",
    "log_std",
    "means",
    "mask",
    "token_mask",
    "pe",
    "window",
    "grid",
    "cos",
    "strides",
    "anchors",
    "freqs",
    "inv_freq",
    "attention_mask",
    "tril",
    "priors",
    "default_boxes",
    "position_ids",
)


def named(name: str, x: torch.Tensor, function: Callable, is_parameter: bool) -> nn.Module:
    made = Own(lambda m, x: function(m, x), layer=lin(), head=lin(3))
    if is_parameter:
        made.register_parameter(name, nn.Parameter(x))
    else:
        made.register_buffer(name, x)
    made.function = lambda m, x: function(Named(m, name), x)
    return made


class Named:
    """Give a module's attribute the name `p`."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.p, self.layer, self.head = getattr(module, name), module.layer, module.head


@pytest.mark.parametrize("function", [scaled, shifted, divided])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(8)
def test_a_parameter_with_the_name_of_a_buffer_trains_and_is_unsure(name: str, function: Callable) -> None:
    made = named(name, torch.randn(8, generator=torch.Generator().manual_seed(0)), function, True)
    loaded, said = decided(export(Row(lambda: made, V))[1])
    assert name in trained(loaded) and not origin(loaded, name).certain
    assert any("; trained, which changes" in line and f"{name!r}" in line for line in said)


def multiplied(m, x):
    return m.head(torch.tanh(m.layer(x)) * m.p)


@pytest.mark.parametrize("function", [multiplied, shifted])
@pytest.mark.parametrize("name", ["running_scale", "running_mean"])
def test_a_running_number_that_only_multiplies_is_no_statistic(name: str, function: Callable) -> None:
    made = named(name, torch.randn(8, generator=torch.Generator().manual_seed(0)), function, True)
    loaded, said = decided(export(Row(lambda: made, V))[1])
    assert (name in trained(loaded)) == (name == "running_scale" and function is multiplied)
    assert any(f"{name!r}" in line for line in said)


REGULAR = {
    "mask": [1.0, 0, 1, 1, 0, 0, 1, 0],
    "attn_mask": [0.0, 0, -10000, 0, -10000, 0, 0, 0],
    "priors": [0.25, 0.25, 0.1, 0.2, 0.75, 0.25, 0.1, 0.2],
    "inv_freq": 1e4 ** (-torch.arange(8) / 8),
    "position_ids": torch.arange(8.0),
    "window": torch.hann_window(8),
    "window_": torch.hamming_window(8, periodic=False),
    "freq": torch.logspace(0, 3, 8),
    "n_": -2 * math.pi * torch.arange(-8, 0.0) / 16000,
    "pixel_mean": [123.675, 116.28, 103.53, 123.675, 116.28, 103.53, 103.53, 116.28],
    "std": [0.229, 0.224, 0.225, 0.229, 0.224, 0.225, 0.229, 0.224],
    "slopes": 2.0 ** -torch.arange(1.0, 9),
    "t": torch.linspace(0, 1, 8),
    "running_var": [1.51234, 0.71234, 0.63421, 1.12345, 0.91234, 1.21234, 0.81234, 0.51234],
    "mel_basis": [0.0, 0, 0.0123456, 0.123456, 0.056789, 0, 0, 0],
}


@pytest.mark.parametrize("function", [shifted, multiplied])
@pytest.mark.parametrize("name", REGULAR)
@pytest.mark.sample(8)
def test_a_buffer_with_regular_numbers_does_not_train(name: str, function: Callable) -> None:
    made = named(name, torch.as_tensor(REGULAR[name]), function, False)
    loaded, said = decided(export(Row(lambda: made, V))[1])
    assert name not in trained(loaded)
    assert origin(loaded, name).certain or any(
        "; not trained, which keeps" in line and f"{name!r}" in line for line in said
    )


def test_a_mean_beside_a_deviation_does_not_train() -> None:
    generator = torch.Generator().manual_seed(0)
    own = Own(
        lambda m, x: m.layer(x) * m.target_std + m.target_mean,
        layer=lin(),
        target_std=torch.rand(8, generator=generator),
        target_mean=torch.randn(8, generator=generator),
    )
    loaded, said = decided(export(Row(lambda: own, V))[1])
    assert {*trained(loaded)} == {"layer.weight", "layer.bias"} and "'target_std'" in said[0]


BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "random Fourier features": lambda: Own(
        lambda m, x: m.o(torch.cos(x @ m.B + m.phase)), o=lin(), B=normal(8, 8), phase=normal(8)
    ),
    "reservoir": lambda: Own(
        lambda m, x: m.o(torch.tanh(torch.tanh(x @ m.w_in) @ m.w_res)),
        o=lin(),
        w_in=normal(8, 8),
        w_res=normal(8, 8),
    ),
    "adjacency": lambda: Own(lambda m, x: m.o(m.adj @ x), o=lin(), adj=torch.softmax(normal(3, 3), 1)),
    "teacher": lambda: Own(
        lambda m, x: m.o(F.linear(x, m.teacher_w, m.teacher_b)),
        o=lin(),
        teacher_w=normal(8, 8),
        teacher_b=normal(8),
    ),
    "codebook": lambda: Own(
        lambda m, x: m.o(x + m.codes[(x[:, None] - m.codes).abs().sum(2).argmin(1)]),
        o=lin(),
        codes=normal(5, 8),
    ),
    "learned positions": lambda: Own(lambda m, x: m.o(x + m.pos_embed), {"pos_embed": normal(1, 8)}, o=lin()),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_name_that_no_module_of_pytorch_has_is_unsure(name: str) -> None:
    module, proto = export(Row(BUFFERS[name], V))
    loaded, said = decided(proto)
    own = {name for name in trained(loaded) if not name.startswith("o.")}
    assert own and own <= module.state_dict().keys()
    assert all(not origin(loaded, name).certain and f"{name!r}" in said[0] for name in own)
    assert all(origin(loaded, name).certain for name in trained(loaded).keys() - own)


@pytest.mark.parametrize("spread", [lambda k: k.expand(4, 1, 5, 5), lambda k: k.repeat(4, 1, 1, 1)])
def test_a_filter_that_is_spread_over_the_channels_does_not_train(spread: Callable) -> None:
    own = Own(lambda m, x: F.conv2d(m.first(x), spread(m.k), groups=4), first=nn.Conv2d(3, 4, 3), k=gaussian(1))
    _, proto = export(Row(lambda: own, IMG))
    assert {*trained(decided(proto)[0])} == {"first.weight", "first.bias"}


class HalfLinear(nn.Linear):
    """Compute with fewer bits than the parameters have, as autocast does."""

    def forward(self, x):
        return F.linear(x.half(), self.weight.half(), self.bias.half()).float()


def test_a_copy_of_fewer_bits_is_unsure() -> None:
    loaded, said = decided(export(Row(lambda: nn.Sequential(HalfLinear(8, 8), lin()), T))[1])
    assert [origin(loaded, name).certain for name in trained(loaded)].count(False) == 2
    assert "0.weight, transposed by the exporter and rounded to float16" in said[0]


TOOLS = {"onnxslim": "slim", "onnxsim": "simplify"}


def rewritten(tool: str, proto: onnx.ModelProto) -> onnx.ModelProto:
    result = getattr(pytest.importorskip(tool), TOOLS[tool])(proto)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("fill", [1.0, 0.6])
def test_a_deviation_that_starts_with_equal_numbers_trains(fill: float) -> None:
    made = named("std", torch.full((8,), fill), lambda m, x: m.head(m.layer(x) * 0.5 + m.p), True)
    loaded, _ = decided(export(Row(lambda: made, V))[1])
    assert "std" in trained(loaded) and not origin(loaded, "std").certain


@pytest.mark.parametrize("tool", TOOLS)
def test_a_pattern_reaches_what_a_tool_folded(tool: str) -> None:
    module = PATHS["nested lists"]()
    proto = rewritten(tool, exported(module, torch.randn(T), dynamo=False, do_constant_folding=False))
    for child in ("0.0", "0.1", "1.0"):
        found = trained(decided(proto, pattern=f"{child}.*")[0])
        assert numbers_in(found.values()) == numbers(module.get_submodule(child).parameters()), child


@pytest.mark.parametrize("tool", TOOLS)
def test_a_batch_normalization_that_a_tool_folded_is_said(tool: str) -> None:
    module = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    options = {"do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE}
    loaded, said = decided(rewritten(tool, exported(module, torch.randn(IMG), dynamo=False, **options)))
    assert {path for name in trained(loaded) for path in origin(loaded, name).sources} == {
        "0.weight",
        "0.bias",
    }
    assert "BatchNormalization, in whose place it trains" in said[0]


class WrittenOut(nn.Module):
    """Normalize by running statistics without the function of PyTorch, as torchvision's FrozenBatchNorm2d."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            x = torch.rand(4) + 0.5
            self.register_buffer(name, x) if is_frozen else self.register_parameter(name, nn.Parameter(x))
        self.register_buffer("running_mean", torch.randn(4))
        self.register_buffer("running_var", torch.rand(4) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale + (self.bias - self.running_mean * scale)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_normalization_that_the_module_computes_is_unsure(is_frozen: bool) -> None:
    """The file of a frozen one and that of one that trains are the same."""
    module = nn.Sequential(nn.Linear(3, 4), WrittenOut(is_frozen), nn.ReLU(), nn.Linear(4, 2)).eval()
    loaded, said = decided(exported(module, torch.randn(2, 3), dynamo=False, do_constant_folding=False))
    assert {"1.weight", "1.bias"} <= trained(loaded).keys()
    assert any("'1.weight' (weight or bias of a normalization" in text for text in said)
    assert not any("'0.weight'" in text for text in said)
