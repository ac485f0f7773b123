"""Features of frozen layers are computed once for each row, and training on them is training of the whole graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch_models
from builders import model
from twins import descended

import graphopt
import passes
from graphopt import models
from graphopt.errors import GraphoptError
from graphopt.training import features
from passes.parts.features import cut_features

RNG = np.random.default_rng(0)
X = RNG.standard_normal((50, 3, 8, 8)).astype(np.float32)
LABELS = RNG.integers(0, 4, 50)
HEAD = {"adapter": passes.Head(classes=4), "loss": passes.CrossEntropy(), "optimizer": passes.AdamW(1e-2)}


def convolutions() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(3, 6, 3, stride=2),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(54, 20), torch.nn.GELU(), torch.nn.Linear(20, 7)).eval()


def attention() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(torch.nn.Flatten(1, 2), layer, torch.nn.Flatten(), torch.nn.Linear(192, 5)).eval()


class Token(torch.nn.Module):
    """Put a class token before the patches, whose sizes are read from the patches, as timm's transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.token = torch.nn.Conv2d(3, 8, 4, stride=4), torch.nn.Parameter(torch.randn(1, 1, 8))
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(patches.shape[0], -1, -1), patches], dim=1)
        return self.head(self.layer(tokens)[:, 0])


NETWORKS = {"convolutions": convolutions, "attention": attention, "token": lambda: Token().eval()}


def exported(network: torch.nn.Module, exporter: str = "dynamo") -> object:
    return torch_models.export(network, torch.tensor(X[:2]), exporter)


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_on_features_is_training_of_the_whole_graph(
    name: str, exporter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, runs, rows = exported(NETWORKS[name](), exporter), [], []
    computed = features._Cache._computed
    monkeypatch.setattr(
        features._Cache, "_computed", lambda self, which: rows.extend(which.tolist()) or computed(self, which)
    )
    for cached in (False, True):
        executor = graphopt.Executor(graphopt.compile(source, **HEAD), native=False)
        rows.clear()
        records = graphopt.fit(
            executor, (X, LABELS), epochs=4, batch_size=16, cache_features=cached, verbose=False, callbacks=[]
        )
        runs.append((executor, records))
    assert sorted(rows) == [0, *range(len(X))]  # the first row tells the shape
    (whole, expected), (other, found) = runs
    for one, two in zip(expected, found, strict=True):
        for key in ("loss", "validation_loss", "accuracy", "step"):
            assert two[key] == pytest.approx(one[key], rel=1e-5), key
    for key, value in whole.state.items():
        np.testing.assert_allclose(other.state[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    assert other.batches == whole.batches == 12
    batch = {next(name for name in other.inputs if name != "target"): X[:3]}
    (prediction,), (again,) = (list(each.predict(batch).values()) for each in (whole, other))
    np.testing.assert_allclose(again, prediction, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_layer_behind_frozen_ones_trains_as_in_pytorch() -> None:
    network = convolutions()
    names = [name for name, _ in network[-1].named_parameters()]
    step = graphopt.compile(
        exported(network),
        parameters=passes.Parameters("6.*"),
        loss=passes.CrossEntropy(),
        optimizer=passes.SGD(0.1),
    )
    executor = graphopt.Executor(step)
    graphopt.fit(
        executor,
        (X, LABELS),
        epochs=5,
        batch_size=25,
        shuffle=False,
        validation=None,
        cache_features=True,
        verbose=False,
    )
    optimizer = torch.optim.SGD(network[-1].parameters(), 0.1)
    for _ in range(5):
        for rows in (slice(25), slice(25, 50)):
            loss = torch.nn.functional.cross_entropy(network(torch.tensor(X[rows])), torch.tensor(LABELS[rows]))
            descended(loss, optimizer)
    assert names == ["weight", "bias"]
    for name, w in network[-1].named_parameters():
        np.testing.assert_allclose(executor.parameters[f"6.{name}"], w.detach().numpy(), rtol=1e-4, atol=1e-6)


def cut(text: str, rows: str = "N", **options: object) -> tuple[list[str], list[str]]:
    """Return the operators of the frozen layers, and the inputs of data of the rest, for weights of 1."""
    shapes = {"w": (4, 4), "v": (4, 3), "s": (4,), "b": (4,), "m": (4,), "d": (4,)}
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if f"{name}" in text}
    base = model(f"g (float[{rows},4] x) => (float[{rows},3] y) {{ {text} }}", **weights)
    step = graphopt.compile(
        base,
        parameters=passes.Parameters("v"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
        **options,
    )
    frozen, rest = cut_features(step)
    return [node.op_type for node in frozen.graph], [
        x.name for x in rest.graph.inputs if x.name in ("x", "a", "t", "n")
    ]


NORMALIZED = "a = MatMul(x, w) n = BatchNormalization(a, s, b, m, d) t = Tanh(n) y = MatMul(t, v)"


def test_features_are_what_rows_have_by_themselves() -> None:
    assert cut("a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v)") == (["MatMul", "Tanh"], ["t"])
    assert cut("a = MatMul(x, w) n = Softmax<axis=0>(a) t = Tanh(n) y = MatMul(t, v)") == (["MatMul"], ["a"])
    assert cut("a = MatMul(x, w) t = Add(a, x) y = MatMul(t, v)") == (["MatMul", "Add"], ["t"])


def test_what_is_gathered_from_a_batch_or_drawn_is_computed_in_each_step() -> None:
    training = passes.TrainingMode()
    assert cut(NORMALIZED, training=training) == (["MatMul"], ["a"])
    assert cut(NORMALIZED)[1] == ["t"]
    ratio = "r = Constant<value_float=0.5>()\n"
    text = f"{ratio} a = MatMul(x, w) t = Dropout(a, r) y = MatMul(t, v)"
    assert cut(text, training=training) == (["MatMul"], ["a"])


def test_parts_of_rows_are_no_features_and_rows_of_a_fixed_batch_are() -> None:
    halves = "a = MatMul(x, w) p = Constant<value_ints=[-1,2]>() h = Reshape(a, p) q = Constant<value_ints=[-1,4]>()\n"
    text = f"{halves} k = Tanh(h) t = Reshape(k, q) y = MatMul(t, v)"
    assert cut(text, rows="6")[1] == ["t"] == cut(text)[1]
    scaled = f"{halves} k = Tanh(h) u = ReduceMean<keepdims=0>(v) n = Mul(k, u) t = Reshape(n, q) y = MatMul(t, v)"
    assert cut(scaled, rows="6") == cut(scaled) == (["MatMul"], ["a"])  # k has two places for each row
    mixed = f"{halves} n = Softmax<axis=0>(h) t = Reshape(n, q) y = MatMul(t, v)"
    assert cut(mixed, rows="6") == cut(mixed) == (["MatMul"], ["a"])


def test_features_that_are_large_lie_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = graphopt.Executor(graphopt.compile(models.mlp((3, 8, 8), 4), **HEAD), native=False)
    expected = graphopt.fit(executor, (X, LABELS), epochs=2, cache_features=True, verbose=False)
    monkeypatch.setattr(features, "IN_MEMORY", 0)
    other = graphopt.Executor(graphopt.compile(models.mlp((3, 8, 8), 4), **HEAD), native=False)
    found = graphopt.fit(other, (X, LABELS), epochs=2, cache_features=True, verbose=False)
    assert [record["loss"] for record in found] == [record["loss"] for record in expected]


WRONG = {
    "nothing is frozen": (
        {"source": models.mlp((3, 8, 8), 4)},
        {},
        "expected frozen layers before those that train, found none that treat each row by itself: freeze some",
    ),
    "transform": ({}, {"transform": lambda batch, random: batch}, "found a transform, which changes them"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_kept_is_refused(name: str) -> None:
    made, options, message = WRONG[name]
    steps = dict(HEAD)
    if "source" in made:
        del steps["adapter"]
    source = made.get("source", models.mlp((3, 8, 8), 4))
    executor = graphopt.Executor(graphopt.compile(source, **steps))
    with pytest.raises(GraphoptError, match=f"cache_features: .*{message}"):
        graphopt.fit(executor, (X, LABELS), epochs=1, cache_features=True, **options)
    with pytest.raises(GraphoptError, match="found batches of an iterable"):
        graphopt.fit(executor, [{"x": X, "target": LABELS}], epochs=1, validation=None, cache_features=True)


@pytest.mark.slow
def test_an_interrupted_run_continues_bit_for_bit(tmp_path: Path) -> None:
    step = graphopt.compile(models.mlp((3, 8, 8), 4), **HEAD)

    def trained(epochs: int, folder: str, **options: object) -> dict[str, np.ndarray]:
        executor = graphopt.Executor(step, native=False)
        graphopt.fit(
            executor,
            (X, LABELS),
            epochs=epochs,
            checkpoint=str(tmp_path / folder),
            cache_features=True,
            **options,
        )
        return executor.state

    whole = trained(6, "whole")
    trained(3, "half")
    again = trained(6, "half", resume=True)
    assert all((again[name] == whole[name]).all() for name in whole)
