"""Define PyTorch modules with control flow that exporters keep, and with sequences of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from in_torch import BOTH, LENGTHS, TorchCase
from in_torch import warm_up as warm_up
from torch import nn
from torch.nn import functional
from torch_own import rows

import passes

DYNAMO, TORCHSCRIPT = BOTH[:2], BOTH[2:]


class Recurrent(nn.Module):
    """Read sequences of any length."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(5, 6, batch_first=True, **options)
        width = (options.get("proj_size") or 6) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


class LastState(nn.Module):
    """Classify by the last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


class RepeatedState(nn.Module):
    """Start from a parameter that is repeated for each row."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(5, 6, batch_first=True), nn.Linear(6, 3)
        self.first = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x):
        h = self.first.repeat(1, x.shape[0], 1)
        return self.head(self.recurrent(x, (h, h) if isinstance(self.recurrent, nn.LSTM) else h)[0])


class Packed(nn.Module):
    """Read packed sequences, whose lengths are an input."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(y).mean(1)


class Attention(nn.Module):
    """Attend over sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.head(self.layer(self.enter(x)))


class Convolutions(nn.Module):
    """Convolve sequences of any length, and pool over them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = (
            nn.Conv1d(5, 6, 3, padding=1),
            nn.Conv1d(6, 6, 3, padding=1),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        h = torch.relu(self.two(functional.gelu(self.one(x.transpose(1, 2)))))
        return self.head(torch.cat([h.mean(-1, keepdim=True) + h.amax(-1, keepdim=True)], -1)[..., 0])


class Conditional(nn.Module):
    """Choose a branch by the data, with torch.cond; both branches read parameters."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)
        self.shared = shared

    def forward(self, x):
        first, second = self.one, self.one if self.shared else self.two
        h = torch.cond(x.sum() > 0, lambda x: torch.tanh(first(x)), lambda x: second(x) * 0.5, (x,))
        return self.head(h)


class Scanned(nn.Module):
    """Scan a cell over the steps of a sequence; outside the export, a Python loop."""

    def __init__(self, leaky: bool) -> None:
        super().__init__()
        self.enter, self.again, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.leak = nn.Parameter(torch.tensor(0.5)) if leaky else None

    def step(self, h, x):
        new = torch.tanh(self.enter(x) + self.again(h))
        new = new if self.leak is None else self.leak * h + (1 - self.leak) * new
        return new, new * 1.0

    def forward(self, x):
        steps, h = x.transpose(0, 1), x.new_zeros(x.shape[0], 6)
        if torch.compiler.is_exporting():
            from torch._higher_order_ops.scan import scan

            _, ys = scan(self.step, h, steps)
        else:
            found = []
            for row in steps:
                h, y = self.step(h, row)
                found.append(y)
            ys = torch.stack(found)
        return self.head(ys.transpose(0, 1))


@torch.jit.script
def scripted_loop(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    h = torch.zeros_like(x[:, 0])
    for i in range(x.size(1)):
        h = torch.tanh(x[:, i] + h @ weight + bias)
    return h


@torch.jit.script
def scripted_branch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):  # noqa: SIM108 - a branch of TorchScript
        y = torch.tanh(x @ weight)
    else:
        y = x @ weight.t() * bias
    return y


@torch.jit.script
def scripted_collection(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = []
    h = torch.zeros_like(x[:, 0])
    for i in range(x.size(1)):
        h = torch.sigmoid(x[:, i] @ weight + h)
        found.append(h)
    return torch.stack(found, 1)


FUNCTIONS = {"loop": scripted_loop, "branch": scripted_branch, "collection": scripted_collection}


class Scripted(nn.Module):
    """Call a function of TorchScript, by its name, whose control flow the tracing exporter keeps."""

    def __init__(self, function: str, parameters: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 5) / 2), nn.Parameter(torch.randn(5) / 2)
        self.enter, self.head, self.function = nn.Linear(5, 5), nn.Linear(5, 3), function
        self.count = parameters

    def forward(self, x):
        return self.head(FUNCTIONS[self.function](self.enter(x), *(self.weight, self.bias)[: self.count]))


class Module(nn.Module):
    """Loop over the steps and branch on the data, compiled by torch.jit.script."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.other, self.head = nn.Linear(10, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for i in range(x.size(1)):
            h = torch.tanh(self.cell(torch.cat([x[:, i], h], 1)))
        if bool(h.sum() > 0):  # noqa: SIM108 - a branch of TorchScript
            h = h + self.other(h)
        else:
            h = h * 2.0
        return self.head(h)


class Layers(nn.Module):
    """Loop over the layers of a list, compiled by torch.jit.script."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


def steps(batch: int, length: int):
    return (torch.randn(batch, length, 5),)


def packed(batch: int, length: int):
    lengths = torch.randint(1, length + 1, (batch,)).sort(descending=True)[0]
    lengths[0] = length
    return torch.randn(batch, length, 5), lengths


def case(build: Callable[[], nn.Module], inputs: Callable[..., Any], **options: Any) -> TorchCase:
    return TorchCase(build, inputs, **{"ways": BOTH, **options})


def recurrent(kind: type[nn.RNNBase], **options: Any) -> TorchCase:
    return case(lambda: Recurrent(kind, **options), steps, lengths=LENGTHS)


ANY: dict[str, Any] = {"lengths": LENGTHS}
NEWER: dict[str, Any] = {"ways": DYNAMO}
OLDER: dict[str, Any] = {"ways": TORCHSCRIPT}
CLASSES: dict[str, Any] = {"loss": passes.CrossEntropy()}

CASES = {
    "RNN, any length": recurrent(nn.RNN),
    "RNN of ReLU, any length": recurrent(nn.RNN, nonlinearity="relu"),
    "GRU, any length": recurrent(nn.GRU),
    "LSTM, any length": recurrent(nn.LSTM),
    "LSTM of two layers, any length": recurrent(nn.LSTM, num_layers=2),
    "LSTM without biases, any length": recurrent(nn.LSTM, bias=False),
    "LSTM with projections, any length": recurrent(nn.LSTM, proj_size=4),
    "GRU, bidirectional, any length": recurrent(nn.GRU, bidirectional=True),
    "LSTM, bidirectional, any length": recurrent(nn.LSTM, bidirectional=True),
    "last state of a GRU, any length": case(lambda: LastState(nn.GRU), steps, **ANY, **CLASSES),
    "last state of an LSTM, any length": case(lambda: LastState(nn.LSTM), steps, **ANY, **CLASSES),
    "repeated first state, RNN": case(lambda: RepeatedState(nn.RNN), steps, **ANY),
    "repeated first state, GRU": case(lambda: RepeatedState(nn.GRU), steps, **ANY),
    "repeated first state, LSTM": case(lambda: RepeatedState(nn.LSTM), steps, **ANY),
    "packed LSTM": case(lambda: Packed(nn.LSTM), packed, **ANY, **OLDER),
    "packed GRU": case(lambda: Packed(nn.GRU), packed, **ANY, **OLDER),
    "attention, any length": case(Attention, steps, **ANY),
    "convolutions, any length": case(Convolutions, steps, **ANY),
    "torch.cond": case(lambda: Conditional(False), rows(5), **NEWER),
    "torch.cond, one layer in both branches": case(lambda: Conditional(True), rows(5), **NEWER),
    "scan": case(lambda: Scanned(False), rows(4, 5), **NEWER),
    "scan, leaky": case(lambda: Scanned(True), rows(4, 5), **NEWER),
    "scan, any length": case(lambda: Scanned(False), steps, **ANY, **NEWER),
    "scripted loop": case(lambda: Scripted("loop", 2), rows(4, 5), **OLDER),
    "scripted loop, any length": case(lambda: Scripted("loop", 2), steps, **ANY, **OLDER),
    "scripted loop that collects": case(lambda: Scripted("collection", 1), rows(4, 5), **OLDER),
    "scripted branch": case(lambda: Scripted("branch", 2), rows(5), branches=True, **OLDER),
    "ScriptModule, loop and branch": case(Module, steps, script=True, branches=True, **ANY, **OLDER),
    "ScriptModule, list of layers": case(Layers, rows(5), script=True, **OLDER),
}  # fmt: skip
