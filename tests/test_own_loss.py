"""Models that compute their own loss: as onnxcustom and TrainingSession took them, and as PyTorch exports them."""

from __future__ import annotations

import io

import messages
import numpy as np
import onnx
import pytest
import torch
from builders import model
from torch import nn
from twins import descended

import graphopt
import passes
from graphopt.training.fit import fit

X, T = (np.random.default_rng(4).standard_normal((12, n)).astype(np.float32) for n in (3, 1))
WEIGHTS = {"coef": np.array([[0.5], [-1.0], [2.0]]), "intercept": np.zeros((1, 1))}
TRAINED = passes.Parameters(pattern=["coef", "intercept"])

# As onnxcustom.utils.orttraining_helper.add_loss_output leaves a linear regression, with an elastic loss of weights
# and a penalty: the loss first, of shape [1, 1], whose label has the model's element type.
ADDED = """g (float[N,3] X, float[N,1] label, float[N] weight) => (float[1,1] loss, float[N,1] variable) {
    p = MatMul(X, coef)
    variable = Add(p, intercept)
    diff = Sub(variable, label)
    distance = Abs(diff)
    near = Mul(distance, l1_weight)
    square = Mul(diff, diff)
    far = Mul(square, l2_weight)
    rows = Add(near, far)
    column = Constant<value = int64[2] {-1, 1}>()
    w = Reshape(weight, column)
    weighted = Mul(rows, w)
    score = ReduceSum(weighted)
    one = Constant<value = int64[1] {-1}>()
    flat = Reshape(coef, one)
    squares = Mul(flat, flat)
    norm = ReduceSum<keepdims=1>(squares)
    penalty = Mul(norm, penalty_weight)
    loss = Add(score, penalty)
}"""
CONSTANTS = {"l1_weight": np.array([0.1]), "l2_weight": np.array([0.9]), "penalty_weight": np.array([0.01])}


def added():
    return model(ADDED, **WEIGHTS, **CONSTANTS)


def elastic(weights, weight):
    coef, intercept = weights
    diff = torch.from_numpy(X) @ coef + intercept - torch.from_numpy(T)
    rows = (0.1 * diff.abs() + 0.9 * diff**2) * torch.from_numpy(weight)[:, None]
    return rows.sum() + 0.01 * (coef**2).sum()


@pytest.mark.parametrize(
    "loss", [passes.OwnLoss("loss"), passes.OwnLoss("loss", sample_weight="weight"), passes.OwnLoss()]
)
def test_the_form_of_add_loss_output_trains(loss):
    step = graphopt.compile(added(), parameters=TRAINED, loss=loss, optimizer=passes.SGD(0.01))
    assert [y.name for y in step.graph.outputs][:2] == ["loss", "variable"]
    executor = graphopt.Executor(step)
    weight = np.linspace(0.5, 2, 12).astype(np.float32)
    weights = [torch.tensor(w, dtype=torch.float32, requires_grad=True) for w in WEIGHTS.values()]
    optimizer = torch.optim.SGD(weights, 0.01)
    for _ in range(10):
        expected = elastic(weights, weight)
        descended(expected, optimizer)
        found = executor.step(X=X, label=T, weight=weight)
        assert isinstance(found["loss"], float)
        np.testing.assert_allclose(found["loss"], expected.item(), rtol=1e-5)
    for name, w in zip(WEIGHTS, weights, strict=True):
        np.testing.assert_allclose(executor.parameters[name], w.detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        executor.evaluate(X=X, label=T, weight=weight)["loss"], elastic(weights, weight).item(), rtol=1e-5
    )
    predicted = executor.predict(X=X)["variable"]
    trained = executor.trained()
    assert [x.name for x in trained.graph.input] == ["X"]
    assert {x.name for x in trained.graph.initializer} == set(WEIGHTS)
    found = graphopt.run(trained, {"X": X})["variable"]
    np.testing.assert_allclose(found, predicted, rtol=1e-5, atol=1e-6)


def test_fit_and_the_trainer_call_targets_and_weights_by_their_own_names():
    loss, optimizer = passes.OwnLoss(sample_weight="weight"), passes.SGD(0.01)
    step = graphopt.compile(added(), parameters=TRAINED, loss=loss, optimizer=optimizer)
    executor = graphopt.Executor(step)
    weight = np.ones(12, np.float32)
    data = {"X": X, "target": T, "sample_weight": weight}
    records = fit(executor, data, epochs=3, batch_size=4, validation=0.25)
    assert records[-1]["validation_loss"] < records[0]["validation_loss"]
    trainer = graphopt.Trainer(added(), loss=loss, optimizer=optimizer, parameters=TRAINED, max_iter=3, batch_size=4)
    trainer.fit(X, T, weight)
    assert trainer.train_losses_[-1] < trainer.train_losses_[0]
    found = graphopt.run(trainer.get_trained_onnx(), {"X": X})["variable"]
    np.testing.assert_allclose(trainer.predict(X), found, rtol=1e-5, atol=1e-6)
    with pytest.raises(graphopt.GraphoptError, match="expected a loss per row"):
        trainer.losses(X, T, weight)


def test_penalties_clipping_and_rows_of_several_outputs_go_with_it():
    step = graphopt.compile(
        added(),
        parameters=TRAINED,
        loss=passes.OwnLoss("loss"),
        regularizer=passes.L2(0.1),
        clip=passes.ClipGlobalNorm(0.5),
        optimizer=passes.AdamW(0.01),
        schedule=passes.Constant(),
    )
    found = graphopt.Executor(step).step(X=X, label=T, weight=np.ones(12, np.float32))
    assert found["loss"] > found["data_loss"] > 0
    assert found["gradient_norm"] > 0.5


class Labelled(nn.Module):
    """A model as transformers' are: the loss of labels first, then the logits."""

    def __init__(self, logits=True):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 4)
        self.logits = logits

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.embedding(input_ids)).mean(1))
        loss = nn.functional.cross_entropy(logits, labels)
        return (loss, logits) if self.logits else loss


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.slow
def test_a_pytorch_model_that_returns_its_loss_trains(exporter, logits):
    torch.manual_seed(1)
    network = Labelled(logits)
    batch = torch.randint(0, 11, (6, 5)), torch.randint(0, 4, (6,))
    names = {
        "input_names": ["input_ids", "labels"],
        "output_names": ["objective", "logits"] if logits else ["objective"],
    }
    if exporter == "dynamo":
        rows = torch.export.Dim("rows")
        dims = {"input_ids": {0: rows}, "labels": {0: rows}}
        proto = torch.onnx.export(network, batch, dynamo=True, dynamic_shapes=dims, verbose=False, **names).model_proto
    else:
        buffer = io.BytesIO()
        dims = {name: {0: "rows"} for name in ("input_ids", "labels", "logits")}
        torch.onnx.export(network, batch, buffer, dynamo=False, opset_version=17, dynamic_axes=dims, **names)
        proto = onnx.load_from_string(buffer.getvalue())
    step = graphopt.compile(proto, loss=passes.OwnLoss("objective"), optimizer=passes.SGD(0.5))
    executor = graphopt.Executor(step)
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    for rows in (6, 3, 8):
        ids, labels = torch.randint(0, 11, (rows, 5)), torch.randint(0, 4, (rows,))
        out = network(ids, labels)
        loss = out[0] if logits else out
        descended(loss, optimizer)
        found = executor.step(input_ids=ids.numpy(), labels=labels.numpy())
        np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    trained = executor.trained()
    ids, labels = ids.numpy(), labels.numpy()
    if logits:
        assert [x.name for x in trained.graph.input] == ["input_ids"]
        expected = network(torch.from_numpy(ids), torch.from_numpy(labels))[1].detach()
        np.testing.assert_allclose(executor.predict(input_ids=ids)["logits"], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(graphopt.run(trained, {"input_ids": ids})["logits"], expected, rtol=1e-4, atol=1e-6)
    else:
        feeds = {"input_ids": ids, "labels": labels}
        (found,) = graphopt.run(trained, feeds).values()
        np.testing.assert_allclose(found, executor.evaluate(feeds)["loss"], rtol=1e-6)
        with pytest.raises(graphopt.GraphoptError, match=r"other than the model's own loss.*use evaluate"):
            executor.predict(feeds)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("own_loss_mistakes"))
def test_what_is_no_loss_is_refused(call: str) -> None:
    messages.refused("own_loss_mistakes", call, globals())


def test_another_loss_of_a_single_number_says_that_it_may_be_one():
    proto = model(
        "g (float[N,3] x) => (float y) { h = MatMul(x, w)\n y = ReduceSum<keepdims=0>(h) }", w=np.ones((3, 1))
    )
    with pytest.warns(UserWarning, match=r"compares 'y', which is one number.*passes.OwnLoss\('y'\)"):
        graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD())
