"""What PyTorch's default exporter merges, masks and folds trains as in PyTorch where the file proves what it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import graphopt
import passes

STEPS = 6


class Scaled(nn.Module):
    """A residual layer with a layer scale, whose first value is the same in all layers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.c, self.gamma = nn.Conv2d(4, 4, 3, padding=1), nn.Parameter(value * torch.ones(4))

    def forward(self, x):
        return x + self.c(x) * self.gamma.reshape(1, -1, 1, 1)


class Joined(nn.Module):
    """A bias of queries and values, joined with zeros for keys, as in SwinV2 and BEiT; all start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        bias = torch.cat([self.q_bias, torch.zeros(4), self.v_bias])
        q, k, v = functional.linear(x, self.qkv.weight, bias).chunk(3, -1)
        return x + torch.sigmoid(q) * torch.tanh(k) + v


class Moved(nn.Module):
    """Two layers with a bias behind a view, in one module or in two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        h = torch.tanh(self.a(x)) * self.first.view(1, 4)
        return torch.tanh(self.b(h)) * self.second.view(1, 4)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.register_buffer("keep", torch.tril(torch.ones(6, 6)))

    def forward(self, x):
        return functional.linear(torch.tanh(x), self.w * self.keep, self.b)


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.w, self.o = function, nn.Parameter(torch.randn(*shape) * 0.5), nn.Linear(6, 6)

    def forward(self, x):
        return self.o(torch.tanh(self.function(self.w, x)))


def pruned() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    for index in (0, 2):
        prune.l1_unstructured(module[index], "weight", 0.5)
    return module


def convolutions(value: float) -> nn.Module:
    return nn.Sequential(Scaled(value), Scaled(value), nn.Flatten(), nn.Linear(100, 3))


SOFTPLUS = functional.softplus
# A module, the shape of its input, and whether everything that trains is certain.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "layer scales of 1e-6": (lambda: convolutions(1e-6), (4, 4, 5, 5), True),
    "layer scales of 1": (lambda: convolutions(1.0), (4, 4, 5, 5), True),
    "two in one module": (Moved, (5, 4), False),
    "one layer twice": (
        lambda: nn.Sequential(*[Scaled(0.1)] * 2, nn.Flatten(), nn.Linear(100, 3)), (4, 4, 5, 5), True
    ),
    "pruned": (pruned, (5, 6), False),
    "masked": (Masked, (5, 6), False),
    "causal": (
        lambda: Function(lambda w, x: (torch.exp(w) * torch.tril(torch.ones(6, 6))) @ x, 6, 6), (5, 6, 6), False
    ),
    "softplus": (lambda: Function(lambda w, x: x * SOFTPLUS(w), 6), (5, 6), True),
    "-softplus": (lambda: Function(lambda w, x: -SOFTPLUS(w) * x, 6), (5, 6), True),
    "exp(-softplus)": (lambda: Function(lambda w, x: torch.exp(-SOFTPLUS(w)) * x, 6), (5, 6), True),
    "exp(-exp)": (lambda: Function(lambda w, x: torch.exp(-torch.exp(w)) * x, 6), (5, 6), True),
    "-exp": (lambda: Function(lambda w, x: -torch.exp(w) * x, 6), (5, 6), True),
}  # fmt: skip


def trained(model: Any, module: nn.Module, shape: tuple[int, ...], optimizer: str) -> tuple[Any, list[str], Any, Any]:
    """Train ten steps on both sides; return the executor, what was warned about, and both losses."""
    x = torch.randn(shape)
    target = torch.randn(module(x).shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = graphopt.compile(model, loss=passes.MeanSquaredError(), optimizer=getattr(passes, optimizer)(0.05))
    executor = graphopt.Executor(step, native=False)
    theirs = getattr(torch.optim, optimizer)(module.parameters(), 0.05)
    here, there = [], []
    for _ in range(STEPS):
        theirs.zero_grad()
        loss = functional.mse_loss(module(x), target)
        loss.backward()
        theirs.step()
        there.append(loss.item())
        here.append(executor.step(x=x.numpy(), target=target.numpy())["loss"])
    return executor, [str(one.message) for one in caught], here, there


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.slow
@pytest.mark.sample(6)
def test_the_default_exporter_s_files_train_as_in_pytorch(name: str) -> None:
    build, shape, certain = MODULES[name]
    torch.manual_seed(0)
    module = build().eval()
    program = torch.onnx.export(module, (torch.randn(shape),), dynamo=True, verbose=False, input_names=["x"])
    executor, warned, here, there = trained(program.model_proto, module, shape, "SGD")
    np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)
    assert any("does not say whether" in text for text in warned) != certain
    if name in ("pruned", "masked"):
        kept = sum(int((np.asarray(w) != 0).sum()) for w in executor.parameters.values() if np.ndim(w) == 2)
        assert kept == {"pruned": 36, "masked": 21}[name]


@pytest.mark.slow
def test_biases_that_are_joined_and_dropped_are_left_out() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Joined(), Joined(), nn.Linear(4, 3)).eval()
    program = torch.onnx.export(module, (torch.randn(5, 4),), dynamo=True, verbose=False, input_names=["x"])
    with pytest.warns(UserWarning, match=r"left out 4 parameters, .* '0.q_bias', '0.v_bias', '1.q_bias', '1.v_bias'"):
        graphopt.compile(program.model_proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))


@pytest.mark.slow
def test_a_mask_of_the_older_exporter_needs_no_mask_in_the_file(tmp_path: Any) -> None:
    torch.manual_seed(0)
    module = pruned().eval()
    torch.onnx.export(module, (torch.randn(5, 6),), tmp_path / "m.onnx", dynamo=False, input_names=["x"])
    executor, _, here, there = trained(tmp_path / "m.onnx", module, (5, 6), "SGD")
    np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)
    sizes = [
        sum(numpy_helper.to_array(x).size for x in model.graph.initializer)
        for model in (onnx.load(tmp_path / "m.onnx"), executor.trained())
    ]
    assert sizes[0] == sizes[1]


def pruned_file(zeros: np.ndarray) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(8, 8)), "v": rng.normal(size=(8, 4))}
    weights["w"][zeros] = 0
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "v"], ["y"]),
    ]  # fmt: skip
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", n]) for name, n in (("x", 8), ("y", 4))]
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("optimizer", [passes.SGD(0.1), passes.SGD(0.1, momentum=0.9), passes.AdamW(0.01)])
@pytest.mark.parametrize("kind", ["magnitude", "rows", "few"])
def test_zeros_of_a_pruned_file_stay(kind: str, optimizer: Any) -> None:
    rng = np.random.default_rng(1)
    zeros = {
        "magnitude": rng.random((8, 8)) < 0.6,
        "rows": np.arange(64).reshape(8, 8) < 16,
        "few": np.eye(8) > 5,
    }[kind]
    zeros[0, 0] = True
    model = pruned_file(zeros)
    for unfreeze, stay in ((None, kind != "few"), ("w", False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = graphopt.compile(
                model,
                loss=passes.MeanSquaredError(),
                optimizer=optimizer,
                parameters=passes.Parameters(unfreeze=unfreeze),
            )
        assert any("stay so" in str(one.message) for one in caught) == stay
        executor = graphopt.Executor(step, native=False)
        for _ in range(4):
            executor.step(x=rng.normal(size=(5, 8)).astype("f"), target=rng.normal(size=(5, 4)).astype("f"))
        found = {x.name: numpy_helper.to_array(x) for x in executor.trained().graph.initializer}
        assert set(found) == {"w", "v"}
        assert bool((found["w"][zeros] == 0).all()) == stay
        assert (found["w"][~zeros] != 0).all()
