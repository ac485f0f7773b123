"""Values that PyTorch's exporter folded train as the parameters from which it made them, whatever tool came after."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import onnxoptimizer
import onnxruntime
import onnxsim
import onnxslim
import pytest
import torch
from test_exported_modules import exported
from torch import nn
from torch.nn import functional
from twins import descended

import graphopt
import passes

LEARNING_RATE = 0.05


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate, self.scale = (
            nn.Linear(6, 3),
            nn.Parameter(torch.rand(6)),
            nn.Parameter(torch.randn(6)),
        )
        self.register_buffer("mask", (torch.rand(3, 6) > 0.5).float())

    def forward(self, x):
        h = x * (1 - self.rate) + x[:, :1] * (self.rate + 1e-3)
        h = h * functional.softmax(self.scale, -1) + h * torch.exp(-self.rate) + self.scale
        masked = functional.linear(h, self.layer.weight * self.mask, self.layer.bias)
        return masked + functional.linear(h, self.layer.weight)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 4), nn.Linear(4, 7)
        self.more = nn.Parameter(torch.randn(3, 20))

    def forward(self, x):
        return self.layer(self.words(x)) @ torch.cat([self.words.weight.t(), self.more], 0)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.layer = nn.Parameter(torch.randn(4, 5)), nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x) @ self.w
        return h + nn.functional.conv1d(x[:, :, None], self.w.t().unsqueeze(-1)).squeeze(-1)


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.time = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.11))

    def forward(self, x):
        return torch.sin(x + (torch.zeros(1) + self.time / 2)) + self.time / 2 * self.layer(x) + self.time * x


class ClassToken(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(*shape, 6)), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.cat([self.token.expand(x.shape[0], 1, 6), x], 1)
        return self.layer(h.softmax(1)[:, 0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.head.weight = self.words.weight

    def forward(self, x):
        h, _ = self.recurrent(torch.relu(self.words(x)) / math.sqrt(8))
        return self.head(torch.tanh(h))


def words() -> torch.Tensor:
    return torch.randint(0, 20, (2, 5))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "maps": (Maps, lambda: torch.randn(4, 5, 6)),
    "joined": (Joined, words),
    "turned": (Turned, lambda: torch.randn(5, 4)),
    "one number": (OneNumber, lambda: torch.randn(2, 3)),
    "class token": (lambda: ClassToken(1, 1), lambda: torch.randn(4, 5, 6)),
    "class token of rank 1": (ClassToken, lambda: torch.randn(4, 5, 6)),
    "tied": (Tied, words),
}


def stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    for holder in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info):
        del holder.metadata_props[:]
    return proto


def without_value_info(proto: onnx.ModelProto) -> onnx.ModelProto:
    del proto.graph.value_info[:]
    return proto


def optimized(proto: onnx.ModelProto, level: str, folder) -> onnx.ModelProto:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


TOOLS = {
    "no metadata": lambda proto, folder: stripped(proto),
    "no value_info": lambda proto, folder: without_value_info(proto),
    "onnxslim": lambda proto, folder: onnxslim.slim(proto),
    "onnxsim": lambda proto, folder: onnxsim.simplify(proto)[0],
    "onnxoptimizer": lambda proto, folder: onnxoptimizer.optimize(proto),
    "basic": lambda proto, folder: optimized(proto, "ORT_ENABLE_BASIC", folder),
    "extended": lambda proto, folder: optimized(proto, "ORT_ENABLE_EXTENDED", folder),
}


def assert_trains_as_pytorch(module: nn.Module, inputs: Callable[[], torch.Tensor], proto) -> set[str]:
    """Compare losses and weights of equal names and shapes, and return the names of all that train."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = passes.CustomLoss(lambda op, prediction, target: prediction * target)
        step = graphopt.compile(proto, loss=loss, optimizer=passes.SGD(LEARNING_RATE))
    executor = graphopt.Executor(step, threads=1)
    optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE)
    torch.manual_seed(1)
    for number in range(4):
        x = inputs()
        y = module(x)
        target = torch.randn(y.shape)
        wanted = (y * target).mean()
        descended(wanted, optimizer)
        found = executor.step(x=x.numpy(), target=target.numpy())["loss"]
        assert found == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6), number
    expected = dict(module.named_parameters())
    for name, array in executor.parameters.items():
        if name in expected and expected[name].shape == array.shape:
            np.testing.assert_allclose(array, expected[name].detach().numpy(), atol=1e-5, err_msg=name)
    return set(executor.parameters)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sample(7)
@pytest.mark.slow
def test_folded_values_train_as_their_parameters(name: str, optimize: bool, dynamic: bool) -> None:
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = make().eval()
    trained = assert_trains_as_pytorch(module, inputs, exported(module, inputs(), optimize, dynamic))
    assert len(trained) <= len(list(module.parameters()))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.slow
def test_ties_and_literals_survive_another_tool(tool: str, tmp_path) -> None:
    torch.manual_seed(0)
    module = Tied().eval()
    proto = TOOLS[tool](exported(module, words(), True), tmp_path)
    trained = assert_trains_as_pytorch(module, words, proto)
    assert len(trained) == 4, trained


@pytest.mark.slow
def test_missing_records_are_said() -> None:
    proto = stripped(exported(Tied().eval(), words(), True))
    with pytest.warns(UserWarning, match="another tool removed the records"):
        passes.Normalize()(graphopt.load(proto))


@pytest.mark.parametrize("field", ["freeze", "pattern"])
@pytest.mark.slow
def test_patterns_name_the_parameters_from_which_values_were_made(field: str) -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()
    proto = exported(module, torch.randn(2, 5, 8), True)

    def trained(**options) -> set[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = graphopt.compile(proto, loss=passes.MeanSquaredError(), **options)
        return set(graphopt.Executor(step).parameters) if "optimizer" in options else set()

    sgd = passes.SGD(0.1)
    every = trained(optimizer=sgd)
    renamed = [name for name in every if name.startswith("val_")]
    assert len(renamed) >= 2
    kept = trained(optimizer=sgd, parameters=passes.Parameters(**{field: "*weight"}))
    chosen = kept if field == "pattern" else every - kept
    assert chosen == {name for name in every if name.endswith("weight") or name in renamed}
    one = trained(optimizer=sgd, parameters=passes.Parameters(**{field: "linear1.weight"}))
    assert len(one if field == "pattern" else every - one) == 1


@pytest.mark.slow
def test_groups_regularizers_and_diagnostics_name_them_too() -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()
    proto = exported(module, torch.randn(2, 5, 8), True)
    steps = {
        "regularizer": passes.L2(0.1, parameters="linear1.weight"),
        "clip": passes.ReportGradients("linear1.weight"),
        "optimizer": passes.SGD(0.1, groups=[passes.Group("linear1.weight", learning_rate=0.0)]),
    }
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), **steps)
    executor = graphopt.Executor(step, threads=1)
    name = next(name.removesuffix(".gradient") for name in executor.reported if name.endswith(".gradient"))
    before = {key: array.copy() for key, array in executor.parameters.items()}
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    executor.step(x=x, target=x)
    moved = {key for key, array in executor.parameters.items() if not np.array_equal(array, before[key])}
    assert name not in moved and len(moved) >= len(before) - 2
