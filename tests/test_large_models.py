"""Models of more than protobuf's 2 GB."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from builders import mlp, model

import graphopt
import passes
from graphopt.graph import storage

STEPS = {"loss": passes.MeanSquaredError(), "optimizer": passes.Adam(0.01)}
FEEDS = {
    "x": np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32),
    "target": np.ones((6, 3), np.float32),
}


def small():
    proto = mlp((64, 64, 3))
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "out"
    return proto


def run(source, folder):
    """Compile, save, load, train, and save what was trained; return the losses and the trained weights."""
    step = graphopt.compile(source, parameters=passes.Parameters(freeze="fc0.weight"), **STEPS)
    graphopt.save(step, folder / "step.onnx")
    executor = graphopt.Executor(folder / "step.onnx", threads=1)
    losses = [executor.step(FEEDS)["loss"] for _ in range(3)]
    losses.append(executor.evaluate(FEEDS)["loss"])
    graphopt.save(executor.trained(), folder / "trained.onnx")
    predicted = graphopt.run(graphopt.load(folder / "trained.onnx"), {"x": FEEDS["x"]})["out"]
    return losses, predicted


def test_weights_beside_a_model_train_as_those_in_it(tmp_path, monkeypatch):
    """As though 2 GB were 1000 bytes: files have their weights beside them, sessions theirs in memory."""
    expected = run(small(), tmp_path)
    monkeypatch.setattr(storage, "LIMIT", 1000)
    folder = tmp_path / "large"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(small(), path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    losses, predicted = run(path, folder)
    assert losses == expected[0]
    np.testing.assert_array_equal(predicted, expected[1])
    assert {file.name for file in folder.iterdir()} == {
        f"{name}.onnx{end}" for name in ("model", "step", "trained") for end in ("", ".data")
    }
    assert max(path.stat().st_size for path in folder.glob("*.onnx")) < 16000
    onnx.checker.check_model(folder / "trained.onnx", full_check=True)


def test_a_model_with_weights_beside_it_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "LIMIT", 1000)
    proto = small()
    proto.graph.node[0].attribute.add(name="unknown", i=1, type=onnx.AttributeProto.INT)
    with pytest.raises(graphopt.GraphoptError, match="not a valid ONNX model"):
        graphopt.load(proto)


@pytest.mark.exhaustive
@pytest.mark.parametrize("freeze", [None, "table"])
def test_a_model_of_more_than_2_gb_trains(tmp_path, freeze):
    """An embedding of 2.2 GB, frozen or trained by plain SGD; takes 20 GB of memory."""
    rows, width = 4_400_000, 128
    proto = model(
        "g (int64[N] x) => (float[N,2] y) { h = Gather(table, x)\n y = MatMul(h, head) }",
        head=np.random.default_rng(0).standard_normal((width, 2)),
    )
    table = onnx.TensorProto(name="table", data_type=1, dims=(rows, width), data_location=1)
    table.external_data.add(key="location", value="weights")
    proto.graph.initializer.append(table)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    np.full(rows * width, 0.1, np.float32).tofile(tmp_path / "weights")
    loss, optimizer = passes.MeanSquaredError(), passes.SGD(0.01)
    step = graphopt.compile(path, parameters=passes.Parameters(freeze=freeze), loss=loss, optimizer=optimizer)
    graphopt.save(step, tmp_path / "step.onnx")
    del step
    executor = graphopt.Executor(tmp_path / "step.onnx", low_memory=True)
    (tmp_path / "step.onnx.data").unlink()
    feeds = {"x": np.array([0, rows - 1, 7]), "target": np.ones((3, 2), np.float32)}
    losses = [executor.step(feeds)["loss"] for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    predicted = executor.predict(feeds)["y"]
    graphopt.save(executor.trained(), tmp_path / "trained.onnx")
    del executor
    found = graphopt.run(tmp_path / "trained.onnx", {"x": feeds["x"]})["y"]
    np.testing.assert_allclose(found, predicted, rtol=1e-6)
