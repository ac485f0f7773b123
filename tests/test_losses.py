"""Losses, values and gradients, against PyTorch's; NumPy where PyTorch has none."""

from __future__ import annotations

import io
import json
import math
import warnings

import messages
import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from builders import identity, linear, model, run
from onnxscript import opset21
from onnxscript.onnx_types import DOUBLE
from steps import assert_equal

import graphopt
import passes
from graphopt.training.evaluation import evaluate

RNG = np.random.default_rng(0)
P = RNG.standard_normal((6, 4))
T = RNG.standard_normal((6, 4))
LABELS = np.array([0, 3, 1, 2, 2, 0])
IGNORED = np.array([0, 3, -100, 2, 2, -100])
BINARY = (RNG.random((6, 4)) > 0.5).astype(float)
SHARES = np.exp(T) / np.exp(T).sum(1, keepdims=True)
UNIT = 1 / (1 + np.exp(-P))
SOFT = np.exp(P) / np.exp(P).sum(1, keepdims=True)
IMAGE, IMAGE_LABELS = RNG.standard_normal((2, 3, 4, 5)), RNG.integers(0, 3, (2, 4, 5))
CLASS_WEIGHTS = (0.5, 1.0, 2.0, 0.25)
W = torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)


def weighted_binary(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    weight = 0.5 * (1 - t) + 3 * t
    return F.binary_cross_entropy_with_logits(p, t, weight=weight, reduction="sum") / weight.sum()


CASES = [
    (passes.MeanSquaredError(), P, T, F.mse_loss),
    (passes.MeanSquaredError(reduction="sum"), P, T, lambda p, t: F.mse_loss(p, t, reduction="sum")),
    (passes.MeanAbsoluteError(), P, T, F.l1_loss),
    (passes.Elastic(l1=0.1, l2=0.9), P, T, lambda p, t: 0.1 * F.l1_loss(p, t) + 0.9 * F.mse_loss(p, t)),
    (passes.Huber(delta=0.7), P, T, lambda p, t: F.huber_loss(p, t, delta=0.7)),
    (passes.Quantile(0.3), P, T, lambda p, t: torch.maximum(0.3 * (t - p), -0.7 * (t - p)).mean()),
    (passes.Poisson(), P, abs(T), lambda p, t: F.poisson_nll_loss(p, t)),
    (
        passes.Poisson(log_rates=False),
        UNIT,
        abs(T),
        lambda p, t: F.poisson_nll_loss(p, t, log_input=False, eps=0),
    ),
    (passes.Hinge(), P, 2 * BINARY - 1, lambda p, t: F.relu(1 - p * t).mean()),
    (passes.BinaryCrossEntropy(), P, BINARY, F.binary_cross_entropy_with_logits),
    (passes.BinaryCrossEntropy(), 60 * P, BINARY, F.binary_cross_entropy_with_logits),
    (passes.BinaryCrossEntropy(from_logits=False), UNIT, BINARY, F.binary_cross_entropy),
    (passes.BinaryCrossEntropy(class_weights=(0.5, 3.0)), P, BINARY, weighted_binary),
    (passes.BinaryCrossEntropy(class_weights=(0.5, 3.0)), 60 * P, BINARY, weighted_binary),
    (
        passes.BinaryCrossEntropy(from_logits=False, class_weights=(0.5, 3.0)),
        UNIT,
        BINARY,
        lambda p, t: weighted_binary(torch.logit(p), t),
    ),
    (
        passes.BinaryCrossEntropy(class_weights=(1.0, 3.0), reduction="sum"),
        P,
        BINARY,
        lambda p, t: F.binary_cross_entropy_with_logits(p, t, pos_weight=torch.tensor(3.0), reduction="sum"),
    ),
    (passes.CrossEntropy(), P, LABELS, F.cross_entropy),
    (passes.CrossEntropy(), 300 * P, LABELS, F.cross_entropy),
    (passes.CrossEntropy(reduction="sum"), P, LABELS, lambda p, t: F.cross_entropy(p, t, reduction="sum")),
    (passes.CrossEntropy(axis=-1), P, LABELS, F.cross_entropy),
    (
        passes.CrossEntropy(label_smoothing=0.2),
        P,
        LABELS,
        lambda p, t: F.cross_entropy(p, t, label_smoothing=0.2),
    ),
    (passes.CrossEntropy(class_weights=CLASS_WEIGHTS), P, LABELS, lambda p, t: F.cross_entropy(p, t, W)),
    (passes.CrossEntropy(ignore_index=-100), P, IGNORED, F.cross_entropy),
    (
        passes.CrossEntropy(ignore_index=2, class_weights=CLASS_WEIGHTS, label_smoothing=0.1),
        P,
        LABELS,
        lambda p, t: F.cross_entropy(p, t, W, ignore_index=2, label_smoothing=0.1),
    ),
    (passes.CrossEntropy(target_probabilities=True), P, SHARES, F.cross_entropy),
    (
        passes.CrossEntropy(target_probabilities=True, label_smoothing=0.1, class_weights=CLASS_WEIGHTS),
        P,
        SHARES,
        lambda p, t: F.cross_entropy(p, t, W, label_smoothing=0.1),
    ),
    (passes.CrossEntropy(from_logits=False), SOFT, LABELS, lambda p, t: F.nll_loss(p.log(), t)),
    (passes.CrossEntropy(), IMAGE, IMAGE_LABELS, F.cross_entropy),
    (
        passes.KLDivergence(),
        P,
        SHARES,
        lambda p, t: F.kl_div(F.log_softmax(p, 1), t, reduction="batchmean"),
    ),
    (
        passes.KLDivergence(from_logits=False),
        SOFT,
        SHARES,
        lambda p, t: F.kl_div(p.log(), t, reduction="batchmean"),
    ),
]


def of(loss: passes.Loss, shape: tuple[int, ...]) -> ir.Model:
    """Return the graph of a loss and its gradient with respect to a shift of the prediction."""
    dims = ",".join(["N", *map(str, shape[1:])])
    shift = passes.Parameters(pattern="w")
    return graphopt.compile(identity(dims, "double"), parameters=shift, loss=loss, optimizer=passes.SGD(1.0))


@pytest.mark.parametrize(
    ("loss", "prediction", "target", "twin"),
    CASES,
    ids=[f"{i}-{type(c[0]).__name__}" for i, c in enumerate(CASES)],
)
def test_loss_and_gradient_are_pytorchs(loss, prediction, target, twin):
    outputs = run(of(loss, prediction.shape), 1, {"x": prediction, "target": target})[0]
    x = torch.tensor(prediction, requires_grad=True)
    expected = twin(x, torch.tensor(target))
    expected.backward()
    np.testing.assert_allclose(outputs["loss"], expected.item(), rtol=1e-9)
    np.testing.assert_allclose(-outputs["w.next"], [x.grad.sum().item()], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mask", ["y = Where(m, z, low)", "low_m = Where(m, zero, low)\n y = Add(z, low_m)"])
@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 0.5)])
@pytest.mark.parametrize("first", [0, 2], ids=["left out", "a row's own"])
def test_a_class_that_the_model_masks_is_left_out(mask: str, weights: tuple[float, ...] | None, first: int) -> None:
    """PyTorch looks the logarithm of the class up, so that 0 times -inf does not occur; a masked target's is inf."""
    rng = np.random.default_rng(0)
    x, masked = rng.standard_normal((6, 4)), rng.standard_normal((4, 3))
    m, target = np.array([[True, True, False]] * 3 + [[True] * 3] * 3), np.array([first, 1, 1, 2, 0, 2])
    text = f"g (double[N,4] x, bool[N,3] m) => (double[N,3] y) {{ z = MatMul(x, w)\n {mask} }}"
    net = model(text, w=masked, low=np.array(-np.inf), zero=np.array(0.0), dtype=np.float64)
    steps = {"loss": passes.CrossEntropy(class_weights=weights), "parameters": passes.Parameters("w")}
    step = graphopt.compile(net, optimizer=passes.SGD(1.0), **steps)
    outputs = run(step, 1, {"x": x, "m": m, "target": target})[0]
    w = torch.tensor(masked, requires_grad=True)
    z, left = torch.tensor(x) @ w, torch.tensor(m)
    logits = z + torch.where(left, 0.0, -torch.inf) if "Add" in mask else z.masked_fill(~left, -torch.inf)
    expected = F.cross_entropy(
        logits, torch.tensor(target), None if weights is None else torch.tensor(weights).double()
    )
    expected.backward()
    np.testing.assert_allclose(outputs["loss"], expected.item(), rtol=1e-9)
    np.testing.assert_allclose(masked - outputs["w.next"], w.grad, rtol=1e-8, atol=1e-12)


def test_entropy_leaves_out_classes_of_no_probability_and_needs_two():
    logits = np.where(BINARY > 0, P, -np.inf)
    logits[:, 0] = P[:, 0]
    outputs = run(of(passes.Entropy(), P.shape), 1, {"x": logits})[0]
    expected = torch.distributions.Categorical(logits=torch.tensor(logits)).entropy().mean()
    np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-9)
    np.testing.assert_allclose(outputs["w.next"], [0], atol=1e-12)
    with pytest.raises(graphopt.GraphoptError, match="Entropy: expected two classes or more along axis 1 of 'y', fo"):
        of(passes.Entropy(), (6, 1))


@pytest.mark.parametrize(
    ("loss", "target"),
    [(passes.MeanSquaredError, T), (passes.CrossEntropy, LABELS), (passes.BinaryCrossEntropy, BINARY)],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sample_weights_weigh_rows(loss, target, reduction):
    weights = RNG.random(6)
    step = of(loss(sample_weight=True, reduction=reduction), P.shape)
    weighted = run(step, 1, {"x": P, "target": target, "sample_weight": weights})[0]["loss"]
    plain = of(loss(reduction=reduction), P.shape)
    rows = [float(run(plain, 1, {"x": P[i : i + 1], "target": target[i : i + 1]})[0]["loss"]) for i in range(6)]
    divisor = weights.sum() if reduction == "mean" else 1
    np.testing.assert_allclose(weighted, (weights * rows).sum() / divisor, rtol=1e-12)


@pytest.mark.parametrize(
    ("loss", "labels", "twin"),
    [
        (passes.CrossEntropy(), LABELS, F.cross_entropy),
        (passes.CrossEntropy(ignore_index=2), LABELS, lambda p, t: F.cross_entropy(p, t, ignore_index=2)),
        (passes.CrossEntropy(ignore_index=-100), IGNORED, F.cross_entropy),
        (
            passes.CrossEntropy(label_smoothing=0.2),
            LABELS,
            lambda p, t: F.cross_entropy(p, t, label_smoothing=0.2),
        ),
        (
            passes.CrossEntropy(axis=-1, class_weights=CLASS_WEIGHTS),
            LABELS,
            lambda p, t: F.cross_entropy(p, t, W),
        ),
        (passes.CrossEntropy(target_probabilities=True), SHARES, F.cross_entropy),
        (passes.KLDivergence(), SHARES, lambda p, t: F.kl_div(F.log_softmax(p, 1), t, reduction="batchmean")),
    ],
    ids=lambda value: repr(value) if isinstance(value, passes.Loss) else "",
)
def test_the_data_alone_may_tell_how_many_classes_there_are(loss, labels, twin):
    graph = identity("N,positions", "double")
    step = graphopt.compile(graph, parameters=passes.Parameters(pattern="w"), loss=loss, optimizer=passes.SGD(1.0))
    found = graphopt.Executor(step)
    before = found.parameters["w"]
    outputs = found.step(x=P, target=labels)
    x = torch.tensor(P, requires_grad=True)
    expected = twin(x, torch.tensor(labels))
    expected.backward()
    np.testing.assert_allclose(outputs["loss"], expected.item(), rtol=1e-9)
    np.testing.assert_allclose(before - found.parameters["w"], [x.grad.sum().item()], atol=1e-12)


class Answers(torch.nn.Module):
    """The head and the shape of extractive question answering: where an answer starts, and where it ends."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8)
        self.mixed = torch.nn.Conv1d(8, 8, 3, padding=1)
        self.answers = torch.nn.Linear(8, 2)

    def forward(self, tokens):
        h = torch.tanh(self.mixed(self.embedding(tokens).transpose(1, 2))).transpose(1, 2)
        start, end = self.answers(h).split(1, dim=-1)
        return start.squeeze(-1), end.squeeze(-1)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.slow
def test_question_answering_trains_as_in_pytorch(exporter):
    torch.manual_seed(3)
    network = Answers()
    tokens = torch.randint(0, 13, (4, 7))
    given = {"input_names": ["tokens"], "output_names": ["start", "end"]}
    buffer = io.BytesIO()
    if exporter == "dynamo":
        dims = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("positions")},)
        proto = torch.onnx.export(network, (tokens,), dynamo=True, dynamic_shapes=dims, **given).model_proto
    else:
        dims = {name: {0: "batch", 1: "positions"} for name in ["tokens", "start", "end"]}
        torch.onnx.export(network, (tokens,), buffer, dynamo=False, dynamic_axes=dims, **given)
        proto = onnx.load_from_string(buffer.getvalue())
    heads = dict.fromkeys(["start", "end"], passes.CrossEntropy(ignore_index=-1))
    executor = graphopt.Executor(graphopt.compile(proto, loss=passes.Losses(heads), optimizer=passes.SGD(0.5)))
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    for rows, positions in [(4, 7), (3, 9), (4, 7), (5, 2)] * 3:
        tokens = torch.randint(0, 13, (rows, positions))
        start, end = torch.randint(-1, positions, (2, rows))
        logits = network(tokens)
        losses = [F.cross_entropy(p, t, ignore_index=-1) for p, t in zip(logits, (start, end), strict=True)]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        found = executor.step(tokens=tokens.numpy(), target_start=start.numpy(), target_end=end.numpy())
        np.testing.assert_allclose(found["loss"], sum(losses).item(), rtol=1e-5)
    data = {"tokens": tokens.numpy(), "target_start": start.numpy(), "target_end": end.numpy()}
    assert 0 <= evaluate(executor, data)["target_start.accuracy"] <= 1
    with pytest.raises(graphopt.GraphoptError, match="expected labels from 0 on, found -2"):
        evaluate(executor, {**data, "target_end": np.full(5, -2)})


def test_the_gradient_at_zero_logits_is_exact():
    outputs = run(of(passes.BinaryCrossEntropy(), (2, 1)), 1, {"x": np.zeros((2, 1)), "target": np.zeros((2, 1))})[0]
    np.testing.assert_allclose(outputs["w.next"], [-0.5])


@pytest.mark.parametrize(("activation", "loss"), [("Softmax", "CrossEntropy"), ("Sigmoid", "BinaryCrossEntropy")])
def test_probabilities_are_compared_by_their_logits_where_those_are_in_the_graph(activation, loss):
    proto = model(
        f"g (double[N,3] x) => (double[N,3] y) {{ z = Add(x, w)\n y = {activation}(z) }}",
        w=np.zeros(3),
        dtype=np.float64,
    )
    step = graphopt.compile(proto, loss=getattr(passes, loss)(from_logits=False), optimizer=passes.SGD())
    target = np.array([0]) if loss == "CrossEntropy" else np.array([[1.0, 0.0, 0.0]])
    outputs = graphopt.Executor(step).step(x=np.array([[-900.0, 0.0, 0.0]]), target=target)
    assert math.isfinite(outputs["loss"])
    assert outputs["loss"] > 250
    with pytest.warns(UserWarning, match="comes out of"):
        graphopt.compile(proto, loss=getattr(passes, loss)(), optimizer=passes.SGD())


@pytest.mark.parametrize(
    ("shares", "warns"),
    [
        ("s = ReduceSum(z, axes)\n y = Div(z, s)", True),
        ("a = Abs(z)\n s = ReduceSum(a, axes)\n c = Clip(s, small)\n y = Div(z, c)", True),
        ("s = ReduceL1(z, axes)\n b = Add(s, small)\n y = Div(z, b)", True),
        ("s = ReduceMean(z, axes)\n y = Div(z, s)", False),
        ("s = ReduceSum(w, axes)\n y = Div(z, s)", False),
    ],
)
def test_shares_of_their_own_sum_are_told_to_be_no_logits(shares, warns):
    proto = model(
        f"g (float[N,3] x) => (float[N,3] y) <int64[1] axes = {{-1}}, float small = {{1e-6}}> "
        f"{{ v = Add(x, w)\n z = Exp(v)\n {shares} }}",
        w=np.zeros((1, 3), np.float32),
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        graphopt.compile(proto, loss=passes.CrossEntropy(), optimizer=passes.SGD())
    assert any("comes out of a division by its own sum" in str(x.message) for x in told) == warns


def traced_loss(op, prediction, target):
    return op.Abs(prediction - target) * 2


@onnxscript.script()
def scripted_loss(prediction: DOUBLE[...], target: DOUBLE[...]) -> DOUBLE[...]:
    return opset21.Abs(prediction - target) * 2


@pytest.mark.parametrize(
    "function", [traced_loss, scripted_loss, f"{__name__}:traced_loss"], ids=["traced", "scripted", "named"]
)
def test_a_loss_of_ones_own(function):
    outputs = run(of(passes.CustomLoss(function), P.shape), 1, {"x": P, "target": T})[0]
    np.testing.assert_allclose(outputs["loss"], 2 * abs(P - T).mean())


def contrast(op, left, right, alike):
    """Take the loss of pairs by Hadsell, Chopra and LeCun (2006), with a margin of 1."""
    distance = op.Sqrt(op.ReduceSum(op.Pow(left - right, 2), [1], keepdims=0) + 1e-6)
    return alike * distance * distance + (1 - alike) * op.Pow(op.Max(1 - distance, 0), 2)


def sharpness(op, prediction):
    p = op.Softmax(prediction, axis=1)
    return -op.ReduceSum(p * op.Log(p), [1], keepdims=0)


def test_a_loss_of_pairs_names_its_outputs_and_targets():
    pair = model(
        "g (float[N,2] x, float[N,2] z) => (float[N,2] a, float[N,2] b) { a = MatMul(x, w) b = MatMul(z, w) }",
        w=np.float32([[0.3, 0.1], [-0.2, 0.4]]),
    )
    loss = passes.CustomLoss(contrast, output="a", other_outputs=["b"], targets={"alike": "float32[N]"})
    executor = graphopt.Executor(graphopt.compile(pair, loss=loss, optimizer=passes.SGD(0.5)))
    x, z, alike = (RNG.random(shape, np.float32) for shape in ((5, 2), (5, 2), 5))
    w = torch.tensor([[0.3, 0.1], [-0.2, 0.4]], requires_grad=True)
    for _ in range(3):
        distance = ((((torch.tensor(x) - torch.tensor(z)) @ w) ** 2).sum(1) + 1e-6).sqrt()
        t = torch.tensor(alike)
        expected = (t * distance**2 + (1 - t) * F.relu(1 - distance) ** 2).mean()
        np.testing.assert_allclose(executor.step(x=x, z=z, alike=alike)["loss"], expected.item(), rtol=1e-5)
        (gradient,) = torch.autograd.grad(expected, w)
        w = (w - 0.5 * gradient).detach().requires_grad_()
    np.testing.assert_allclose(executor.parameters["w"], w.detach().numpy(), rtol=1e-5)
    assert set(evaluate(executor, {"x": x, "z": z, "alike": alike})) == {"loss"}
    assert executor.predict(x=x, z=z).keys() == {"a", "b"}


def test_a_loss_may_have_no_target():
    step = graphopt.compile(linear(4, 3), loss=passes.CustomLoss(sharpness, targets={}), optimizer=passes.SGD(0.5))
    executor = graphopt.Executor(step)
    losses = [executor.step(x=P.astype(np.float32))["loss"] for _ in range(9)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


TWO = """g (float[N,2] x) => (float[N,2] a, float[N,2] b, int64[N] c) {
    a = MatMul(x, w)
    b = Add(a, v)
    c = ArgMax<axis=1, keepdims=0>(a)
}"""
W2 = {"w": np.eye(2), "v": np.ones(2)}


def test_several_outputs_have_a_loss_each():
    losses = passes.Losses({"a": passes.CrossEntropy(), "b": passes.MeanSquaredError()}, weights={"b": 0.5})
    step = graphopt.compile(model(TWO, **W2), loss=losses, optimizer=passes.SGD())
    x = P[:, :2].astype(np.float32)
    feeds = {"x": x, "target_a": LABELS % 2, "target_b": x}
    outputs = run(step, 1, feeds)[0]
    np.testing.assert_allclose(outputs["loss_b"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(outputs["loss"], outputs["loss_a"] + 0.5 * outputs["loss_b"], rtol=1e-6)
    assert step.graph.outputs[0].name == "loss"


def test_one_loss_on_several_outputs_must_name_its_own():
    with pytest.raises(
        graphopt.GraphoptError,
        match=r"expected the name of one floating-point output, the model has a .*, b .*loss.output=a",
    ):
        graphopt.compile(model(TWO, **W2), loss=passes.MeanSquaredError(), optimizer=passes.SGD())
    step = graphopt.compile(
        model(TWO, **W2),
        parameters=passes.Parameters(freeze="v"),
        loss=passes.MeanSquaredError(output="a"),
        optimizer=passes.SGD(),
    )
    assert {value.name for value in step.graph.outputs} >= {"loss", "a", "b", "c", "w.next"}


def test_a_target_tells_its_metric():
    step = of(passes.CrossEntropy(ignore_index=1), P.shape)
    target = next(value for value in step.graph.inputs if value.name == "target")
    assert json.loads(target.metadata_props["graphopt.metric"]) == {
        "task": "classification",
        "output": "y",
        "axis": 1,
        "classes": 4,
        "ignore_index": 1,
    }


def test_a_batch_in_which_no_row_counts_changes_nothing():
    step = graphopt.compile(linear(), loss=passes.MeanSquaredError(sample_weight=True), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step)
    before = executor.parameters
    x = np.ones((4, 3), np.float32)
    assert executor.step(x=x, target=x[:, :2], sample_weight=np.zeros(4, np.float32))["loss"] == 0
    assert_equal(executor.parameters, before)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("losses_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("losses_mistakes", call, globals())
