"""CasADi finds the derivatives of a file by the names of the files beside it, and they are PyTorch's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("casadi")

import casadi as ca
from test_derivatives import Attention, Recurrent, exported
from torch import nn

import graphopt

N = 2


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 2, stride=2)
        self.up, self.last = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Conv2d(6, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(torch.cat([h, self.up(torch.tanh(self.down(h)))], 1))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.second, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.head(nn.functional.silu(h + self.second(torch.tanh(self.norm(h)))).mean((2, 3)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


NETWORKS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), (4,)),
    "CNN": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)), (1, 4, 4)),
    "CNN, pools, LSTM": (Recurrent, (1, 8, 8)),
    "attention": (Attention, (3, 8)),
    "LSTM": (Words, (3, 3)),
    "U-Net": (UNet, (1, 4, 4)),
    "ResNet": (ResNet, (1, 4, 4)),
}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
    monkeypatch.setenv("CASADI_ONNXRUNTIME_LIB", str(path))


@pytest.mark.parametrize("name", NETWORKS)
def test_casadi_finds_derivatives_of_a_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    module = make().eval()
    graphopt.family(exported(module, torch.randn(3, *shape)), tmp_path / "f.onnx")
    x = torch.randn(N, *shape)
    builder = ca.GraphBuilder(str(tmp_path / "f.onnx"))
    builder.bind_dim("n", N)
    f = builder.create("f")

    def flat(value: torch.Tensor) -> np.ndarray:  # CasADi's matrices are stored by columns
        array = value.detach().numpy()
        return array.flatten("F" if array.ndim == 2 else "C")

    symbol = ca.MX.sym("x", *f.size_in(0))
    fed = flat(x).reshape(f.size_in(0), order="F")
    y = f(symbol)
    jacobian = np.array(ca.Function("J", [symbol], [ca.jacobian(y, symbol)])(fed))
    hessian = np.array(ca.Function("H", [symbol], [ca.hessian(ca.sumsqr(y), symbol)[0]])(fed))
    v = torch.randn_like(x)
    products = ca.Function("v", [symbol], [ca.jtimes(y, symbol, flat(v).reshape(f.size_in(0), order="F"))])

    rows = torch.autograd.functional.jacobian(module, x)
    flatten = lambda t, like: np.stack([flat(row) for row in t.reshape(-1, *like.shape)])  # noqa: E731
    by_output = flatten(rows, x)
    order = flat(torch.arange(module(x).numel()).reshape(module(x).shape))
    close(jacobian, by_output[order])
    close(np.array(products(fed)).flatten("F"), jacobian @ flat(v))
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        second = torch.autograd.functional.hessian(lambda x: (module(x) ** 2).sum(), x)
    places = flat(torch.arange(x.numel()).reshape(x.shape))
    close(hessian, flatten(second, x)[places])


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * abs(expected).max())
