"""Connectionist temporal classification against PyTorch's."""

from __future__ import annotations

import io
from typing import Any

import messages
import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from builders import model
from twins import descended

import graphopt
import passes
from graphopt.training.evaluation import evaluate

RNG = np.random.default_rng(0)
ROWS, STEPS, CLASSES = 5, 9, 6
X = RNG.standard_normal((ROWS, STEPS, CLASSES))
WEIGHT = 1 + RNG.random((1, STEPS, CLASSES))
# Repeated labels, a row without labels, one that fills all its steps, and one whose labels are all alike.
TARGET = np.array([[1, 2, 3, 3], [5, 5, -1, -1], [-1, -1, -1, -1], [4, 3, 2, 1], [2, 2, 2, 2]])
LENGTHS = np.array([9, 5, 1, 4, 7])
LAYOUTS = {
    "rows, steps, classes": (0, 1, 2),
    "steps, rows, classes": (1, 0, 2),
    "rows, classes, steps": (0, 2, 1),
}


def network(order: tuple[int, ...]) -> onnx.ModelProto:
    """Return y = x w, with the axes of rows, steps and classes in an order."""
    names = {0: "N", 1: str(STEPS), 2: str(CLASSES)}
    dims = ",".join(names[axis] for axis in order)
    return with_weight(f"g (double[{dims}] x) => (double[{dims}] y) {{ y = Mul(x, w) }}", order)


def with_weight(text: str, order: tuple[int, ...] = (0, 1, 2)) -> onnx.ModelProto:
    proto = model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT.transpose(order), "w"))
    return proto


def step_of(loss: passes.CTC, order: tuple[int, ...] = (0, 1, 2)) -> Any:
    return graphopt.compile(network(order), loss=loss, optimizer=passes.SGD(1.0))


def twin(
    target: np.ndarray, lengths: np.ndarray, probabilities: bool = False, **options: Any
) -> tuple[float, np.ndarray]:
    """Return PyTorch's loss and its gradient by the weights."""
    weight = torch.tensor(WEIGHT, requires_grad=True)
    y = torch.tensor(X) * weight
    scores = y.log() if probabilities else y.log_softmax(2)
    counts = torch.tensor((target >= 0).sum(1))
    loss = F.ctc_loss(scores.transpose(0, 1), torch.tensor(target).clamp(0), torch.tensor(lengths), counts, **options)
    loss.backward()
    return loss.item(), weight.grad.numpy()


def check(loss: passes.CTC, expected: tuple[float, np.ndarray], order: tuple[int, ...], **feeds: np.ndarray) -> None:
    executor = graphopt.Executor(step_of(loss, order))
    reported = executor.step(x=X.transpose(order), **feeds)
    np.testing.assert_allclose(reported["loss"], expected[0], rtol=1e-10)
    moved = WEIGHT.transpose(order) - executor.parameters["w"]
    np.testing.assert_allclose(moved, expected[1].transpose(order), atol=1e-12)


@pytest.mark.parametrize("order", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.slow
def test_loss_and_gradient_are_pytorchs(order: tuple[int, ...], reduction: Any, lengths: bool) -> None:
    loss = passes.CTC(axis=order.index(2), time_axis=order.index(1) - 3, input_lengths=lengths, reduction=reduction)
    steps = LENGTHS if lengths else np.full(ROWS, STEPS)
    feeds = {"input_lengths": LENGTHS} if lengths else {}
    check(loss, twin(TARGET, steps, reduction=reduction), order, target=TARGET, **feeds)


def test_the_blank_may_be_any_class() -> None:
    target = np.where(TARGET < 0, TARGET, TARGET - 1)
    expected = twin(target, np.full(ROWS, STEPS), blank=5)
    check(passes.CTC(blank=5), expected, (0, 1, 2), target=target)


def test_a_model_may_predict_probabilities() -> None:
    text = f"""g (double[N,{STEPS},{CLASSES}] x) => (double[N,{STEPS},{CLASSES}] y) {{
        h = Mul(x, w)
        y = Softmax<axis=2>(h)
    }}"""
    step = graphopt.compile(with_weight(text), loss=passes.CTC(from_logits=False), optimizer=passes.SGD(1.0))
    executor = graphopt.Executor(step)
    value, gradient = twin(TARGET, np.full(ROWS, STEPS))
    np.testing.assert_allclose(executor.step(x=X, target=TARGET)["loss"], value, rtol=1e-10)
    np.testing.assert_allclose(WEIGHT - executor.parameters["w"], gradient, atol=1e-12)


@pytest.mark.slow
def test_labels_that_do_not_fit_have_an_infinite_loss_or_none() -> None:
    short = np.array([9, 2, 1, 3, 4])
    with pytest.raises(graphopt.NonFiniteLoss):
        graphopt.Executor(step_of(passes.CTC(input_lengths=True))).step(x=X, target=TARGET, input_lengths=short)
    expected = twin(TARGET, short, zero_infinity=True)
    loss = passes.CTC(input_lengths=True, zero_infinity=True)
    check(loss, expected, (0, 1, 2), target=TARGET, input_lengths=short)


@pytest.mark.parametrize("order", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_may_have_weights_and_a_loss_each(order: tuple[int, ...]) -> None:
    axes = {"axis": order.index(2), "time_axis": order.index(1)}
    each = [
        F.ctc_loss(
            torch.tensor(X[i] * WEIGHT[0]).log_softmax(1),
            torch.tensor(row[row >= 0]),
            torch.tensor(STEPS),
            torch.tensor((row >= 0).sum()),
            reduction="none",
        ).item()
        for i, row in enumerate(TARGET)
    ]
    feeds = {"x": X.transpose(order), "target": TARGET}
    alone = graphopt.compile(network(order), loss=passes.CTC(reduction="none", **axes), gradient=None)
    np.testing.assert_allclose(graphopt.run(alone, feeds)["loss"], each, rtol=1e-10)
    weights = RNG.random(ROWS)
    weighted = graphopt.Executor(step_of(passes.CTC(reduction="sum", sample_weight=True, **axes), order))
    np.testing.assert_allclose(
        weighted.step(**feeds, sample_weight=weights)["loss"], (weights * each).sum(), rtol=1e-10
    )


class Recognizer(torch.nn.Module):
    """A small network in the shape of those that read text in images: a convolution, a recurrence and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = torch.nn.Conv2d(1, 4, (8, 3), padding=(0, 1))
        self.context = torch.nn.GRU(4, 6, bidirectional=True, batch_first=True)
        self.classes = torch.nn.Linear(12, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        columns = torch.relu(self.columns(image)).squeeze(2).transpose(1, 2)
        return self.classes(self.context(columns)[0])


@pytest.mark.parametrize(
    "options", [{"native": False}, {"native": True, "verify": True}, {"steps_per_call": 3}], ids=str
)
@pytest.mark.slow
def test_a_recognizer_trains_as_in_pytorch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = Recognizer()
    images = torch.randn(6, 1, 8, 12)
    target = torch.tensor([[1, 2, 3], [4, 4, -1], [5, -1, -1], [3, 2, 1], [2, 2, -1], [1, 5, 1]])
    buffer = io.BytesIO()
    names = {"input_names": ["x"], "output_names": ["y"]}
    torch.onnx.export(network, (images,), buffer, dynamo=False, dynamic_axes={"x": {0: "N"}}, **names)
    step = graphopt.compile(onnx.load_from_string(buffer.getvalue()), loss=passes.CTC(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, **options)
    found = executor.run([{"x": images.numpy(), "target": target.numpy()}] * 6)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for reported in found:
        scores = network(images).log_softmax(2).transpose(0, 1)
        loss = F.ctc_loss(scores, target.clamp(0), torch.full((6,), 12), (target >= 0).sum(1))
        np.testing.assert_allclose(reported["loss"], loss.item(), rtol=2e-5)
        descended(loss, optimizer)
    y = graphopt.run(executor.trained(), {"x": images.numpy()})["y"]
    np.testing.assert_allclose(y, network(images).detach().numpy(), atol=5e-5)


def test_evaluation_reports_the_loss_alone() -> None:
    executor = graphopt.Executor(step_of(passes.CTC()))
    found = evaluate(executor, {"x": X, "target": TARGET})
    assert set(found) == {"loss"}
    np.testing.assert_allclose(found["loss"], twin(TARGET, np.full(ROWS, STEPS))[0], rtol=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("ctc_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("ctc_mistakes", call, globals())
