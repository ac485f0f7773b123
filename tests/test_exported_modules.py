"""Modules whose files say little of their shapes, or of what pads, train as in PyTorch."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from steps import exported as export
from torch import nn
from twins import descended

import graphopt
import passes

LEARNING_RATE = 0.1


class Words(nn.Module):
    """The row that pads gets a gradient from the tied head alone."""

    def __init__(self, padding: int | None = 3, tied: bool = True) -> None:
        super().__init__()
        self.items, self.middle = nn.Embedding(7, 4, padding_idx=padding), nn.Linear(4, 4)
        self.head = None if tied else nn.Linear(4, 7)
        nn.init.normal_(self.items.weight)

    def forward(self, x):
        h = torch.tanh(self.middle(self.items(x)))
        return h @ self.items.weight.t() if self.head is None else self.head(h)


class Queries(nn.Module):
    """Attention of other keys than queries splits its weight into parts of two sizes, as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.attend = (
            nn.Parameter(torch.randn(3, 4)),
            nn.MultiheadAttention(4, 2, batch_first=True),
        )

    def forward(self, x):
        return self.attend(self.queries[None].repeat(x.shape[0], 1, 1), x, x)[0]


class Repeated(nn.Module):
    """A recurrence whose first state, a parameter, is repeated for each row, which hides its size."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.first = kind(4, 5, batch_first=True), nn.Parameter(torch.randn(1, 1, 5))
        self.states = 2 if kind is nn.LSTM else 1

    def forward(self, x):
        first = self.first.repeat(1, x.shape[0], 1)
        return self.recurrent(x, (first, first) if self.states == 2 else first)[0]


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(seed))


def words(seed: int) -> torch.Tensor:
    return torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(seed))


def exported(module: nn.Module, x: torch.Tensor, optimize: bool, dynamic: bool = False) -> onnx.ModelProto:
    shapes = {"dynamic_shapes": [{0: torch.export.Dim.DYNAMIC}]} if dynamic else {}
    return export(module, x, dynamo=True, optimize=optimize, **shapes)


def check(module: nn.Module, proto: onnx.ModelProto, draw) -> graphopt.Executor:
    """Train four steps on both sides; return the executor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(LEARNING_RATE))
    executor, optimizer = graphopt.Executor(step), torch.optim.SGD(module.parameters(), LEARNING_RATE)
    for seed in range(4):
        x = draw(seed)
        y = module(x)
        target = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
        loss = nn.functional.mse_loss(y, target)
        descended(loss, optimizer)
        assert executor.step(x=x.numpy(), target=target.numpy())["loss"] == pytest.approx(loss.item(), rel=1e-5)
    found = graphopt.run(executor.trained(), {"x": draw(9).numpy()})["y"]
    np.testing.assert_allclose(found, module(draw(9)).detach().numpy(), atol=1e-5)
    return executor


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.slow
def test_the_row_that_pads_does_not_train(padding: int | None, tied: bool, optimize: bool, dynamic: bool) -> None:
    torch.manual_seed(0)
    module = Words(padding, tied)
    before = module.items.weight.detach().numpy().copy()
    proto = exported(module, words(0), optimize, dynamic)
    executor = check(module, proto, words)
    after = module.items.weight.detach().numpy()
    np.testing.assert_allclose(executor.parameters["items.weight"], after, atol=1e-5)
    assert (after[3] == before[3]).all() == (padding == 3 and not tied)
    assert "Where" not in {node.op_type for node in executor.trained().graph.node}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.slow
def test_parts_of_a_split_weight_have_their_own_sizes(optimize: bool, dynamic: bool) -> None:
    torch.manual_seed(0)
    module = Queries()
    check(module, exported(module, numbers(0), optimize, dynamic), numbers)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.slow
def test_the_attribute_tells_the_size_of_a_recurrence(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    module = Repeated(kind)
    check(module, exported(module, numbers(0), optimize=False, dynamic=True), numbers)


def test_a_file_that_the_runtime_has_written_may_have_names_of_its_constants(tmp_path) -> None:
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.recurrent, self.head = nn.Embedding(7, 4), nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.recurrent(self.words(x))[0])

    module = Reader()
    torch.onnx.export(module, (words(0),), tmp_path / "x.onnx", dynamo=False, input_names=["x"], output_names=["y"])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "x.onnx"), options, providers=["CPUExecutionProvider"])
    proto = onnx.load(tmp_path / "optimized.onnx")
    if not graphopt.Device("cpu").trains:  # onnxruntime-training 1.19.2 does not do so yet
        assert any(x.name.startswith("gemm_input_shape") for x in proto.graph.initializer)
    trained = check(module, proto, words).trained()
    assert {x.name for x in trained.graph.initializer} == {x.name for x in proto.graph.initializer}
