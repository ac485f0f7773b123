"""Adaptation to shifted rows without targets, beside PyTorch; replay of earlier rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from builders import model

import graphopt
import passes
from graphopt import models
from graphopt.cli import command as cli
from graphopt.data import Dataset, replay
from graphopt.data.foreign import as_dataset
from graphopt.errors import GraphoptError
from graphopt.graph.rewriting import Pass

RNG = np.random.default_rng(0)
NETWORK = """g (float[N,6] x) => (float[N,3] y) {
    f = MatMul(x, u)
    n = BatchNormalization<epsilon = 0.00001>(f, scale, bias, mean, var)
    h = Relu(n)
    y = MatMul(h, w)
}"""
WEIGHTS = {
    **{"u": RNG.standard_normal((6, 8)), "w": RNG.standard_normal((8, 3))},
    **{"scale": RNG.random(8) + 0.5, "bias": RNG.standard_normal(8) / 2},
    **{"mean": RNG.standard_normal(8), "var": RNG.random(8) + 0.5},
}
BATCHES = (2 * RNG.standard_normal((20, 32, 6)) + 1).astype(np.float32)
TENT = {
    "parameters": passes.Parameters(operators="BatchNormalization"),
    "training": passes.TrainingMode(dropout=False),
    "loss": passes.Entropy(),
}


@pytest.mark.parametrize("form", ["logits", "probabilities"])
def test_entropies_and_predictions_are_those_of_tent(form: str) -> None:
    """As DequanNet/tent adapts: statistics of the batch, scales and biases alone, one step, the earlier prediction."""
    text = NETWORK if form == "logits" else NETWORK.replace("y = MatMul(h, w)", "z = MatMul(h, w) y = Softmax(z)")
    options = {**TENT, "loss": passes.Entropy(from_logits=form == "logits"), "optimizer": passes.Adam(0.01)}
    executor = graphopt.Executor(graphopt.compile(model(text, **WEIGHTS), **options), report=["loss", "y"])
    assert sorted(executor.parameters) == ["bias", "scale"]
    own = {name: torch.tensor(x).float() for name, x in WEIGHTS.items()}
    scale, bias = (torch.nn.Parameter(own[name].clone()) for name in ("scale", "bias"))
    optimizer = torch.optim.Adam([scale, bias], 0.01)
    for batch in BATCHES:
        f = torch.tensor(batch) @ own["u"]
        h = torch.relu(torch.nn.functional.batch_norm(f, None, None, scale, bias, training=True))
        z = h @ own["w"]
        entropy = -(z.softmax(1) * z.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        entropy.backward()
        optimizer.step()
        found = executor.step(x=batch)
        assert found["loss"] == pytest.approx(entropy.item(), rel=2e-5)
        expected = z if form == "logits" else z.softmax(1)
        np.testing.assert_allclose(found["y"], expected.detach().numpy(), rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(executor.parameters["scale"], scale.detach().numpy(), rtol=1e-4)


def test_what_no_named_operator_reads_does_not_train() -> None:
    assert trained_of(NETWORK, operators="MatMul") == ["u", "w"]
    assert trained_of(NETWORK, operators="MatMul", unfreeze="b*", freeze="u") == ["bias", "w"]
    assert trained_of(NETWORK, operators="Batch*", pattern=["bias", "u"]) == ["bias"]
    with pytest.raises(GraphoptError, match=r"operators='Conv' matches no operator that reads a weight; the model has"):
        trained_of(NETWORK, operators="Conv")


def test_a_weight_that_is_turned_or_rounded_before_a_product_is_of_the_product() -> None:
    turned = NETWORK.replace("y = MatMul(h, w)", "t = Transpose(v) y = MatMul(h, t)")
    for quantize in (None, passes.FakeQuantize(activations=None)):
        assert trained_of(turned, quantize, operators="MatMul") == ["u", "v"]


def trained_of(network: str, quantize: Pass | None = None, **options: str | list[str]) -> list[str]:
    turned = {"v": WEIGHTS["w"].T} if "(v)" in network else {"w": WEIGHTS["w"]}
    steps = {"quantize": quantize, "parameters": passes.Parameters(**options), "loss": passes.Entropy()}
    step = graphopt.compile(model(network, **{**WEIGHTS, **turned}), **steps)
    return sorted(y.name.removesuffix(".grad") for y in step.graph.outputs if y.name.endswith(".grad"))


def test_the_recipe_adapts_a_file_and_leaves_targets_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graphopt.save(model(NETWORK, **WEIGHTS), "network.onnx")
    np.savez("shifted.npz", x=BATCHES.reshape(-1, 6), target=np.zeros(640, np.int64))
    words = ["network.onnx", "experiment=tent", "data=npz", "data.path=shifted.npz", "fit.batch_size=32"]
    assert cli.main([*words, "folder=run", "quiet=true", "executor.native=false"]) == 0
    adapted = graphopt.load("run/trained.onnx").graph.initializers
    changed = {
        n for n, x in adapted.items() if n in WEIGHTS and np.abs(x.const_value.numpy() - WEIGHTS[n]).max() > 1e-4
    }
    assert changed == {"scale", "bias", "mean", "var"}
    optimizer = passes.Adam(0.001)
    executor = graphopt.Executor(graphopt.compile(model(NETWORK, **WEIGHTS), **TENT, optimizer=optimizer))
    for batch in BATCHES:
        executor.step(x=batch)
    expected: ir.Model = graphopt.load(executor.trained())
    for name in changed:
        ours = adapted[name].const_value.numpy()
        np.testing.assert_allclose(ours, expected.graph.initializers[name].const_value.numpy(), rtol=1e-5, atol=1e-6)


def test_targets_that_no_loss_reads_are_told_of() -> None:
    options = {**TENT, "loss": passes.Entropy(), "optimizer": passes.Adam(0.01)}
    executor = graphopt.Executor(graphopt.compile(model(NETWORK, **WEIGHTS), **options))
    rows = {"x": BATCHES[0], "target": np.zeros(len(BATCHES[0]), np.int64)}
    with pytest.warns(UserWarning, match="data: no input of the graph reads 'target', which has no effect"):
        graphopt.fit(executor, rows, epochs=1, verbose=False)


def test_replay_draws_earlier_rows_without_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new, earlier = ({"x": np.arange(100.0)[:, None] + k, "target": np.full(100, k > 0, np.int64)} for k in (0, 1000))
    np.savez("new.npz", **new)
    np.savez("earlier.npz", **earlier)
    both = replay("new.npz", "earlier.npz", share=0.3)
    np.testing.assert_array_equal(both.arrays["x"][:100], new["x"])
    drawn = both.arrays["x"][100:, 0]
    assert (len(drawn), len({*drawn})) == (30, 30)
    assert (drawn >= 1000).all()
    assert both.arrays["target"].tolist() == [0] * 100 + [1] * 30
    assert len(replay("new.npz", "earlier.npz", share=9.0)) == 200
    assert (replay("new.npz", "earlier.npz", share=0.3, seed=1).arrays["x"][100:, 0] != drawn).any()
    words = ["data=replay", "data.path=new.npz", "data.replay=earlier.npz", "data.share=0.3", "fit.epochs=1"]
    assert cli.main([*words, "model=linear", "folder=run", "quiet=true", "executor.native=false"]) == 0
    for wrong, message in (
        (
            lambda: replay("new.npz", Dataset({"x": np.zeros((3, 2))})),
            "expected arrays with rows of shapes {'x': ",
        ),
        (
            lambda: replay("new.npz", "earlier.bin"),
            "expected a file .csv, .tsv, .txt, .npy, .npz, .parquet, .pq, .arrow, .feather, .ipc, or a folder of .npy",
        ),
        (lambda: replay("new.npz", "earlier.npz", seed=-1), "seed: expected a whole number of 0 or more, found -1"),
        (
            lambda: replay("new.npz", "earlier.npz", share=-1.0),
            "share: expected a number of 0 or more, found -1",
        ),
    ):
        with pytest.raises(GraphoptError) as error:
            wrong()
        assert message in str(error.value)


def test_replay_joins_tables_and_numbers_classes_alike(tmp_path: Path) -> None:
    for name, rows in (("new", ["1,u,no", "2,v,yes"]), ("earlier", ["3,u,yes", "4,u,yes"])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["size,kind,target", *rows]) + "\n")
    tables = [graphopt.data.csv(tmp_path / f"{name}.csv", columns="auto") for name in ("new", "earlier")]
    both = replay(*tables, share=1.0)
    assert both.table["size"].tolist() == ["1", "2", "3", "4"]
    assert both.arrays["target"].tolist() == [0, 1, 1, 1]
    (same := tmp_path / "rows.txt").write_text("size,target\n1,0\n2,1\n")
    assert replay(same, same, share=1.0).arrays["target"].tolist() == [0, 1, 0, 1]


def test_names_of_classes_beside_numbers_are_refused() -> None:
    """Numbers may be other places than those of sorted names: such rows were mixed by number."""
    x = np.zeros((4, 2), np.float32)
    named, numbers = as_dataset((x, ["b", "a", "b", "a"])), as_dataset((x, [0, 1, 0, 1]))
    for pair in ((named, numbers), (numbers, named)):
        with pytest.raises(GraphoptError, match=r"replay: expected classes as in the other data, which have (num|the)"):
            replay(*pair)
    step = graphopt.compile(models.mlp((2,), 2), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    with pytest.raises(GraphoptError, match="validation: data: expected classes as in the other data, which have num"):
        graphopt.fit(graphopt.Executor(step), numbers, validation=named)
    executor = graphopt.Executor(step)
    graphopt.fit(executor, named, validation=numbers, epochs=1, verbose=False)  # numbers are places in executor.labels
    assert executor.labels == ["a", "b"]
