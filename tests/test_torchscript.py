"""Weights that train in files of PyTorch's older exporter (`dynamo=False`), compared with the module's parameters."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
import pytest
import torch
from builders import model
from test_weights import decided, origin, trained
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

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
        lambda: Own(
            lambda m, x: F.conv2d(m.first(x), m.g, groups=4), first=nn.Conv2d(3, 4, 3), g=gaussian(4)
        ),
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
        lambda: Own(
            yolo, head=head(7), a=MESH.reshape(1, 2, 16) + 0.5, stride=[16.0], b=[[[3.625], [11.65625]]]
        ),
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
            cos_table=torch.outer(torch.arange(6.0), 1 / 100 ** (torch.arange(0, 8, 2) / 8))
            .repeat(1, 2)
            .cos(),
            sin_table=torch.outer(torch.arange(6.0), 1 / 100 ** (torch.arange(0, 8, 2) / 8))
            .repeat(1, 2)
            .sin(),
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
        lambda: Own(
            causal, q=lin(), k=lin(), bias_table=-0.25 * (torch.arange(6)[:, None] - torch.arange(6)).abs()
        ),
        T,
    ),
    "learned bias of attention": Row(lambda: Own(causal, {"bias_table": normal(6, 6)}, q=lin(), k=lin()), T),
    "constants as buffers": Row(
        lambda: Own(
            lambda m, x: (m.layer(x) - m.mean) / m.std, layer=lin(), mean=[0.485] * 8, std=[0.229] * 8
        ),
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
    "learned temperature as a divisor": Row(
        lambda: Own(lambda m, x: m.layer(x) / m.t, {"t": [0.7]}, layer=lin()), V
    ),
    "fixed temperature": Row(lambda: Own(lambda m, x: m.layer(x) / 0.07 + 1e-5, layer=lin()), V),
    "LayerScale": Row(
        lambda: Own(lambda m, x: x + m.gamma * m.layer(x), {"gamma": 1e-4 * torch.ones(8)}, layer=lin()), T
    ),
    "ScaleNorm": Row(
        lambda: Own(lambda m, x: m.layer(m.g * F.normalize(x, dim=-1)), {"g": 2.8}, layer=lin()), T
    ),
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
    "PACT": Row(
        lambda: Own(lambda m, x: torch.minimum(F.relu(m.layer(x)), m.alpha), {"alpha": 1.3}, layer=lin()), V
    ),
    "embedding with padding": Row(
        lambda: Own(
            lambda m, x: m.head(m.words((x > 0).long())), words=nn.Embedding(4, 8, padding_idx=0), head=lin()
        ),
        V,
    ),
    "tied embedding": Row(
        lambda: Own(lambda m, x: F.linear(m.words((x > 0).long()), m.words.weight), words=nn.Embedding(4, 8)),
        V,
    ),
    "average of weights as buffers": Row(
        lambda: Own(lambda m, x: m.layer(x), layer=lin(), weight_ema=normal(8, 8)), V
    ),
    "codebook": Row(
        lambda: Own(lambda m, x: m.layer(x @ m.codes.T), {"codes": normal(5, 8)}, layer=nn.Linear(5, 4)), V
    ),
    "weight standardization": Row(
        lambda: Own(
            lambda m, x: F.conv2d(x, (m.w - m.w.mean((1, 2, 3), keepdim=True)) / 2), {"w": normal(4, 3, 3, 3)}
        ),
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
        lambda: Own(
            lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)
        ),
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
        lambda: Own(
            lambda m, x: (m.layer(x).softmax(-1) * m.project).sum(-1), layer=lin(), project=torch.arange(8.0)
        ),
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
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (torch.randn(row.shape),),
            file,
            dynamo=False,
            opset_version=17,
            input_names=["x"],
            output_names=["y"],
        )
    return module, onnx.load_model_from_string(file.getvalue())


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


@pytest.mark.parametrize("name", ["linear of sequences", "attention", "learned positions"])
def test_a_transposed_weight_of_a_layer_is_certain(name: str) -> None:
    assert decided(export(ROWS[name])[1])[1] == []


STEPS = ("pruned linear", "pruned linear of sequences", "pruned convolution", "masked autoencoder of sequences",
         "mask of features", "coupling layer", "spectral norm", "blur pool", "YOLO of version 5")  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_ten_steps_are_those_of_the_module(name: str) -> None:
    twin, proto = export(ROWS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graphopt.compile(
            proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01, momentum=0.9)
        )
    executor = graphopt.Executor(step, threads=1, native=False)
    optimizer = torch.optim.SGD(twin.parameters(), 0.01, momentum=0.9)
    for seed in range(10):
        x = torch.randn(ROWS[name].shape, generator=torch.Generator().manual_seed(seed))
        y = twin(x)
        loss = F.mse_loss(y, torch.zeros_like(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = executor.step(x=x.numpy(), target=np.zeros(y.shape, np.float32))["loss"]
        assert found == pytest.approx(loss.item(), rel=1e-4), seed


def test_a_bound_of_clip_is_a_constant_even_if_it_is_shared() -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { h = MatMul(x, w)\n c = Clip(h, lo, hi)\n y = Mul(c, lo) }"
    proto = model(
        text, w=np.random.default_rng(0).normal(size=(4, 4)), lo=np.array(-0.51234), hi=np.array(np.inf)
    )
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
