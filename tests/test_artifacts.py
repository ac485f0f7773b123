"""Artifacts on a device: losses as the executor's, step by step, and parameters back in the model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from builders import identity, linear, mlp, model
from steps import assert_close, outputs
from test_losses import CASES as LOSSES

import graphopt
import passes
from graphopt.errors import GraphoptError
from graphopt.on_device import artifacts, checkpoint
from graphopt.on_device.artifacts import FILES

TRAINS = hasattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder")
training = pytest.mark.skipif(not TRAINS, reason="onnxruntime-training is not installed")
stock = pytest.mark.skipif(TRAINS, reason="onnxruntime-training is installed")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 16, 4)).astype(np.float32)
Y = RNG.standard_normal((2, 16, 3)).astype(np.float32)
IMAGES = 1 + RNG.standard_normal((2, 16, 1, 8, 8)).astype(np.float32)
LABELS = RNG.integers(0, 3, (2, 16))
STEPS = 20

OPTIMIZERS = [
    passes.SGD(0.1),
    passes.SGD(0.1, weight_decay=0.1),
    passes.SGD(0.1, momentum=0.9),
    passes.SGD(0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    passes.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    passes.AdamW(0.01),
    passes.AdamW(0.01, 0.8, 0.9, 1e-3, weight_decay=0.3),
    passes.Adam(0.01),
    passes.Adam(0.01, weight_decay=0),
    passes.Adam(0.01, weight_decay=0.1),
]
CLIPS = [None, passes.ClipGlobalNorm(0.1), passes.ClipGlobalNorm(1), passes.ClipValue(0.01)]


def cnn() -> onnx.ModelProto:
    """Return a convolution, BatchNormalization, Dropout and a linear layer."""
    rng = np.random.default_rng(1)
    return model(
        """g (float[N,1,8,8] x) => (float[N,3] y) {
            a = Conv<pads=[1,1,1,1]>(x, filters)
            n = BatchNormalization<momentum=0.8>(a, scale, shift, mean, variance)
            r = Relu(n)
            p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
            d = Dropout(p, ratio)
            f = Flatten(d)
            y = Gemm<transB=1>(f, w, b)
        }""",
        filters=rng.standard_normal((4, 1, 3, 3)) / 3,
        scale=np.ones(4),
        shift=np.zeros(4),
        mean=np.zeros(4),
        variance=np.ones(4),
        ratio=np.array(0.3),
        w=rng.standard_normal((3, 64)) / 8,
        b=np.zeros(3),
    )


def sum_of_two() -> onnx.ModelProto:
    """Return a model of two BatchNormalizations with other scales, whose initial statistics an exporter merged."""
    return model(
        """g (float[N,3] x) => (float[N,3] y) {
            a = BatchNormalization(x, scale, shift, mean, variance)
            b = Relu(a)
            y = BatchNormalization(b, other, shift, mean, variance)
        }""",
        scale=np.ones(3),
        other=np.full(3, 2.0),
        shift=np.zeros(3),
        mean=np.zeros(3),
        variance=np.ones(3),
    )


def exported(folder: Path, source: Any, **steps: Any) -> tuple[graphopt.Executor, Any, Any, Any]:
    """Return the executor of a pipeline, and the state, module and optimizer of its artifacts."""
    graphopt.export_artifacts(source, graphopt.standard(**steps), folder)
    executor = graphopt.Executor(graphopt.compile(source, **steps), threads=1)
    return executor, *graphopt.load_artifacts(folder)


def train(module: Any, optimizer: Any, *data: np.ndarray) -> float:
    loss = float(module(*data))
    optimizer.step()
    module.lazy_reset_grad()
    return loss


def saved(state: Any, path: Path, *, moments: bool = False) -> dict[str, np.ndarray]:
    from onnxruntime.training.api import CheckpointState

    CheckpointState.save_checkpoint(state, path, include_optimizer_state=moments)
    return artifacts.parameters(path)


def predicted(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return outputs(proto, {"x": x})["y"]


@training
@pytest.mark.parametrize("clip", CLIPS, ids=repr)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_losses_are_the_executors(optimizer, clip, tmp_path):
    steps = {"loss": passes.MeanSquaredError(), "optimizer": optimizer, "clip": clip}
    executor, state, module, update = exported(tmp_path, mlp(), **steps)
    for i in range(STEPS):
        expected = executor.step(x=X[i % 2], target=Y[i % 2])["loss"]
        assert train(module, update, X[i % 2], Y[i % 2]) == pytest.approx(expected, rel=1e-5)
    after = saved(state, tmp_path / "after")
    assert list(after) == list(executor.parameters)
    assert_close(after, executor.parameters, rtol=1e-4, atol=1e-5)


@training
@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [
        (passes.SGD(0.1), None),
        (passes.SGD(0.1, momentum=0.9), passes.ClipGlobalNorm(0.5)),
        (passes.AdamW(0.01), passes.ClipGlobalNorm(0.5)),
    ],
    ids=repr,
)
def test_batch_statistics_train_and_running_ones_evaluate(optimizer, clip, tmp_path):
    steps = {"training": passes.TrainingMode(), "loss": passes.CrossEntropy()}
    executor, state, module, update = exported(tmp_path, cnn(), **steps, optimizer=optimizer, clip=clip)
    for i in range(STEPS):
        expected = executor.step(x=IMAGES[i % 2], target=LABELS[i % 2])["loss"]
        assert train(module, update, IMAGES[i % 2], LABELS[i % 2]) == pytest.approx(expected, rel=1e-5)
    module.eval()
    loss, y = module(IMAGES[0], LABELS[0])
    expected = executor.evaluate(x=IMAGES[0], target=LABELS[0])
    assert float(loss) == pytest.approx(expected["loss"], rel=1e-4)
    np.testing.assert_allclose(y, expected["y"], rtol=1e-4, atol=1e-4)
    after = saved(state, tmp_path / "after")
    assert abs(after["mean"]).max() > 0.1
    for name in ("mean", "variance"):
        np.testing.assert_allclose(after[name], executor.state[name], rtol=1e-5, atol=1e-6)
    assert after["graphopt.step"] == STEPS
    module.export_model_for_inferencing(tmp_path / "inference.onnx", ["y"])
    for back in (
        onnx.load(tmp_path / "inference.onnx"),
        graphopt.from_checkpoint(cnn(), tmp_path / "after"),
        graphopt.from_checkpoint(tmp_path / "eval_model.onnx", tmp_path / "after"),
        graphopt.from_checkpoint(graphopt.compile(cnn(), **steps, optimizer=optimizer), tmp_path / "after"),
    ):
        np.testing.assert_allclose(predicted(back, IMAGES[0]), y, rtol=1e-4, atol=1e-5)


@training
def test_gradients_of_onnxruntime_training(tmp_path):
    steps = {
        "loss": passes.CrossEntropy(),
        "gradient": passes.OrtGradient(),
        "optimizer": passes.SGD(0.1, momentum=0.9),
        "clip": passes.ClipGlobalNorm(0.1),
    }
    executor, _, module, update = exported(tmp_path, mlp((64, 16, 3)), **steps)
    for i in range(STEPS):
        images = IMAGES[i % 2].reshape(16, 64)
        expected = executor.step(x=images, target=LABELS[i % 2])["loss"]
        assert train(module, update, images, LABELS[i % 2]) == pytest.approx(expected, rel=1e-5)


@training
@pytest.mark.parametrize(
    ("loss", "prediction", "target", "_"),
    LOSSES,
    ids=[f"{i}-{type(case[0]).__name__}" for i, case in enumerate(LOSSES)],
)
def test_every_loss_trains(loss, prediction, target, _, tmp_path):
    x = prediction.astype(np.float32)
    target = target.astype(np.float32 if target.dtype.kind == "f" else np.int64)
    source = identity(",".join(["N", *map(str, x.shape[1:])]))
    steps = {"parameters": passes.Parameters(pattern="w"), "loss": loss, "optimizer": passes.AdamW(1e-3)}
    executor, _, module, update = exported(tmp_path, source, **steps)
    for _ in range(3):
        expected = executor.step(x=x, target=target)["loss"]
        assert train(module, update, x, target) == pytest.approx(expected, rel=1e-5)


@training
def test_two_losses_penalties_and_weights_of_rows(tmp_path):
    source = model(
        "g (float[N,4] x) => (float[N,3] y, float[N,3] z) { y = MatMul(x, w)\n z = Add(y, b) }",
        w=RNG.standard_normal((4, 3)),
        b=np.zeros(3),
    )
    losses = passes.Losses({"y": passes.MeanSquaredError(), "z": passes.Huber(sample_weight=True)}, weights={"z": 0.5})
    steps = {"loss": losses, "regularizer": passes.L2(0.01), "optimizer": passes.SGD(0.1, momentum=0.9)}
    executor, _, module, update = exported(tmp_path, source, **steps)
    weights = RNG.random(16).astype(np.float32)
    assert module.input_names() == list(executor.inputs) == ["x", "target_y", "target_z", "sample_weight"]
    feeds = dict(zip(executor.inputs, (X[0], Y[0], Y[1], weights), strict=True))
    for _ in range(STEPS):
        expected = executor.step(feeds)["loss"]
        assert train(module, update, *feeds.values()) == pytest.approx(expected, rel=1e-5)
    module.eval()
    assert module.output_names() == [*executor.evaluate(feeds)]


@training
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_gradients_add_up_until_they_are_reset(optimizer, tmp_path):
    steps = {
        "loss": passes.MeanSquaredError(reduction="sum"),
        "optimizer": optimizer,
        "clip": passes.ClipGlobalNorm(0.1),
    }
    executor, _, module, update = exported(tmp_path, mlp(), **steps)
    halves = [(X[0, :8], Y[0, :8]), (X[0, 8:], Y[0, 8:])]
    for _ in range(STEPS):
        expected = executor.step(x=X[0], target=Y[0])["loss"]
        losses = [float(module(*half)) for half in halves]
        update.step()
        module.lazy_reset_grad()
        assert sum(losses) == pytest.approx(expected, rel=1e-5)


@training
@pytest.mark.parametrize("optimizer", [passes.SGD(0.1, momentum=0.9), passes.AdamW(0.01)], ids=repr)
def test_a_checkpoint_resumes_bit_for_bit(optimizer, tmp_path):
    steps = {"training": passes.TrainingMode(), "loss": passes.CrossEntropy(), "optimizer": optimizer}
    _, state, module, update = exported(tmp_path, cnn(), **steps)
    for _ in range(3):
        train(module, update, IMAGES[0], LABELS[0])
    saved(state, tmp_path / "checkpoint", moments=True)
    expected = [train(module, update, IMAGES[1], LABELS[1]) for _ in range(3)]
    _, module, update = graphopt.load_artifacts(tmp_path)
    assert [train(module, update, IMAGES[1], LABELS[1]) for _ in range(3)] == expected


CONTINUED = [
    (passes.SGD(0.1), None),
    (passes.SGD(0.1, momentum=0.9), passes.ClipGlobalNorm(0.5)),
    (passes.SGD(0.1, momentum=0.9, dampening=0.5, nesterov=True, weight_decay=0.1), None),
    (passes.AdamW(0.01, 0.8, 0.9, 1e-3, weight_decay=0.3), None),
    (passes.Adam(0.01, weight_decay=0.1), passes.ClipGlobalNorm(0.5)),
]


@training
@pytest.mark.parametrize("network", ["mlp", "cnn"])
@pytest.mark.parametrize(("optimizer", "clip"), CONTINUED, ids=repr)
def test_training_goes_on_with_its_moments_on_a_device_and_back(network, optimizer, clip, tmp_path):
    """Steps on the desktop, on the device and on the desktop again are those of one desktop run."""
    source, inputs, targets = (mlp(), X, Y) if network == "mlp" else (cnn(), IMAGES, LABELS)
    loss = passes.MeanSquaredError() if network == "mlp" else passes.CrossEntropy()
    steps = {"training": passes.TrainingMode(), "loss": loss, "optimizer": optimizer, "clip": clip}
    pipeline, step = graphopt.standard(**steps), graphopt.compile(source, **steps)
    whole, first, last = (graphopt.Executor(step, threads=1) for _ in range(3))
    expected = [whole.step(x=inputs[i % 2], target=targets[i % 2])["loss"] for i in range(15)]
    found = [first.step(x=inputs[i % 2], target=targets[i % 2])["loss"] for i in range(5)]
    first.save(tmp_path / "checkpoint.safetensors")
    graphopt.export_artifacts(source, pipeline, tmp_path / "memory", state=first.state)
    graphopt.export_artifacts(source, pipeline, tmp_path / "file", state=tmp_path / "checkpoint.safetensors")
    assert (tmp_path / "memory" / "checkpoint").read_bytes() == (tmp_path / "file" / "checkpoint").read_bytes()
    state, module, update = graphopt.load_artifacts(tmp_path / "file")
    found += [train(module, update, inputs[i % 2], targets[i % 2]) for i in range(5, 10)]
    saved(state, tmp_path / "after", moments=True)
    last.update_state(graphopt.state_from_checkpoint(step, pipeline, tmp_path / "after"))
    assert last.steps == 10
    found += [last.step(x=inputs[i % 2], target=targets[i % 2])["loss"] for i in range(10, 15)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    for name, array in whole.state.items():
        if not name.startswith("filters"):  # before a normalization: their moments are differences of equal numbers
            np.testing.assert_allclose(last.state[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


@training
def test_a_checkpoint_without_moments_says_how_to_save_them(tmp_path):
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.AdamW(0.01)}
    executor, state, _, _ = exported(tmp_path, mlp(), **steps)
    saved(state, tmp_path / "after")
    with pytest.raises(GraphoptError, match=r"expected .*, found none: save it with include_optimizer_state=True"):
        graphopt.state_from_checkpoint(executor.model, graphopt.standard(**steps), tmp_path / "after")


def test_the_state_goes_through_the_files(tmp_path):
    """Without onnxruntime-training: what is written is read again, up to the rounding of the moments' factors."""
    steps = {
        "training": passes.TrainingMode(),
        "loss": passes.CrossEntropy(),
        "optimizer": passes.AdamW(0.01),
    }
    pipeline, executor = (
        graphopt.standard(**steps),
        graphopt.Executor(graphopt.compile(cnn(), **steps), threads=1),
    )
    for i in range(3):
        executor.step(x=IMAGES[i % 2], target=LABELS[i % 2])
    graphopt.export_artifacts(cnn(), pipeline, tmp_path, state=executor.state)
    back = graphopt.state_from_checkpoint(executor.model, pipeline, tmp_path)
    assert back.keys() == executor.state.keys() and back["step"] == 3
    assert_close(back, executor.state, rtol=1e-6, atol=0)
    assert artifacts.parameters(tmp_path)["graphopt.step"] == 3


def test_states_of_other_graphs(written, tmp_path):
    sgd, adam = (
        graphopt.standard(loss=passes.MeanSquaredError(), optimizer=optimizer)
        for optimizer in (passes.SGD(0.1, momentum=0.9), passes.AdamW(0.5))
    )
    step = graphopt.compile(mlp(), **adam)
    state = graphopt.Executor(step).state
    for pipeline, given, line in (
        (
            sgd,
            state,
            r"^state 'fc0.bias.momentum': expected float32\[8\], found none: pass the state of an executor",
        ),
        (adam, {}, r"^state 'fc0.bias.exp_sum': expected float32\[8\], found none"),
        (adam, {**state, "fc1.bias": np.zeros(4, np.float32)}, r"^state 'fc1.bias': .*found float32\[4\]"),
        (adam, tmp_path / "nowhere", "nowhere"),
        (adam, graphopt.Executor(step), r"^state: expected arrays by name .*: write executor.state"),
    ):
        with pytest.raises(GraphoptError, match=line):
            graphopt.export_artifacts(mlp(), pipeline, tmp_path / "out", state=given)
    assert not (tmp_path / "out").exists()
    for graph, pipeline, line in (
        (mlp(), adam, "expected a training graph, found one without state to update: use from_checkpoint"),
        (
            step,
            sgd,
            "expected the optimizer of the training graph, whose slots are exp_sum, exp_sum_sq, found SGD",
        ),
        (step, adam, r"'step': expected int64\[\], found none: save it with include_optimizer_state=True"),
        (
            graphopt.compile(linear(), **adam),
            adam,
            "'b': expected float32.*, found none: take the checkpoint of this",
        ),
    ):
        with pytest.raises(GraphoptError, match=line):
            graphopt.state_from_checkpoint(graph, pipeline, written)


@training
def test_the_program_sets_the_rate(tmp_path):
    from onnxruntime.training.api import LinearLRScheduler

    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.2, momentum=0.9)}
    executor, _, module, update = exported(tmp_path, mlp(), **steps)
    assert update.get_learning_rate() == pytest.approx(0.2)
    scheduler = LinearLRScheduler(update, STEPS, 3, 0.2)  # which has the two counts the other way round
    rates = []
    for _ in range(STEPS):
        executor.learning_rate = update.get_learning_rate()
        rates.append(executor.learning_rate)
        expected = executor.step(x=X[0], target=Y[0])["loss"]
        assert train(module, update, X[0], Y[0]) == pytest.approx(expected, rel=1e-5)
        scheduler.step()
    np.testing.assert_allclose(rates[:4], [0, 0.2 / 3, 0.4 / 3, 0.2], rtol=1e-6)
    assert rates[-1] < rates[-2] < 0.03


@training
def test_parameters_as_one_vector(tmp_path):
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    executor, _, module, _ = exported(tmp_path, mlp(), **steps)
    vector = module.get_contiguous_parameters(trainable_only=True).numpy()
    np.testing.assert_array_equal(vector, executor.contiguous())


@training
def test_a_classifier_of_scikit_learn(tmp_path):
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPClassifier

    x, labels = X.reshape(-1, 4), LABELS.ravel()
    classifier = MLPClassifier((5,), random_state=0).partial_fit(x, labels, classes=[0, 1, 2])
    source = to_onnx(classifier, x[:1], options={"zipmap": True})
    steps = {"loss": passes.CrossEntropy(from_logits=False), "optimizer": passes.SGD(0.1)}
    executor, state, module, update = exported(tmp_path, source, **steps)
    data = next(name for name in executor.inputs if name != "target")
    for _ in range(STEPS):
        expected = executor.step({data: x, "target": labels})["loss"]
        assert train(module, update, x, labels) == pytest.approx(expected, rel=1e-5)
    saved(state, tmp_path / "after")
    back = graphopt.from_checkpoint(tmp_path / "eval_model.onnx", tmp_path / "after")
    assert [y.name for y in back.graph.output] == [y.name for y in source.graph.output]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder of artifacts; any runtime writes them."""
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.5))
    graphopt.export_artifacts(mlp(), pipeline, tmp_path / "artifacts")
    return tmp_path / "artifacts"


def test_the_files(written):
    assert sorted(os.listdir(written)) == sorted(FILES)
    for name in FILES[:3]:
        proto = onnx.load(written / name)
        assert proto.ir_version <= 10
        assert {opset.domain: opset.version for opset in proto.opset_import}.get("", 0) <= 21
    graph = onnx.load(written / "training_model.onnx").graph
    names = ["fc0.bias", "fc0.weight", "fc1.bias", "fc1.weight"]
    buffers = [f"{name}_grad.accumulation.buffer" for name in names]
    assert [x.name for x in graph.input] == ["x", "target", *names, *buffers, "lazy_reset_grad"]
    assert [y.name for y in graph.output] == ["loss", *(f"{name}_grad.accumulation.out" for name in names)]
    graph = onnx.load(written / "eval_model.onnx").graph
    assert [x.name for x in graph.input] == ["x", "target", *names]
    assert [y.name for y in graph.output] == ["loss", "y"]


def test_a_checkpoint_read_is_what_was_written(written):
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in mlp().graph.initializer}
    for path in (written, written / "checkpoint"):
        read = artifacts.parameters(path)
        assert read.keys() == weights.keys()
        for name, array in weights.items():
            np.testing.assert_array_equal(read[name], array, strict=True)
    back = graphopt.from_checkpoint(mlp(seed=1), written)
    np.testing.assert_array_equal(predicted(back, X[0]), predicted(mlp(), X[0]))


def test_names_are_those_of_the_model(tmp_path):
    pipeline = graphopt.standard(
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(),
        sort=passes.SortInitializers(rename="{index}_{name}"),
    )
    graphopt.export_artifacts(mlp(), pipeline, tmp_path)
    weights = {tensor.name for tensor in mlp().graph.initializer}
    assert artifacts.parameters(tmp_path).keys() == weights
    assert {x.name for x in onnx.load(tmp_path / "training_model.onnx").graph.input} >= weights
    for source in (mlp(seed=1), graphopt.compile(mlp(seed=1), **pipeline)):
        back = graphopt.from_checkpoint(source, tmp_path)
        np.testing.assert_array_equal(predicted(back, X[0]), predicted(mlp(), X[0]))


def test_statistics_that_nodes_share_are_apart(tmp_path):
    pipeline = graphopt.standard(training=passes.TrainingMode(), loss=passes.MeanSquaredError(), optimizer=passes.SGD())
    graphopt.export_artifacts(sum_of_two(), pipeline, tmp_path)
    with pytest.raises(GraphoptError, match=r"only one of the two has .*: use the eval_model.onnx beside"):
        graphopt.from_checkpoint(sum_of_two(), tmp_path)
    back = graphopt.from_checkpoint(tmp_path / "eval_model.onnx", tmp_path)
    x = X[0, :, :3]
    np.testing.assert_allclose(predicted(back, x), predicted(sum_of_two(), x), rtol=1e-6)


REFUSED = {
    "schedule": ({"schedule": passes.Linear(10)}, r"schedule=Linear.*call Optimizer.set_learning_rate"),
    "accumulate": ({"accumulate": passes.Accumulate(2)}, r"accumulate=Accumulate.*call Optimizer.step less"),
    "unroll": ({"accumulate": passes.Unroll(2)}, r"unroll=Unroll.*: leave it out"),
    "groups": (
        {"optimizer": passes.SGD(groups=(passes.Group("*.bias", 2.0),))},
        r"^SGD: groups: expected none .*: leave them out",
    ),
    "bits": ({"optimizer": passes.AdamW(slot_bits=8)}, r"^AdamW: slot_bits: expected 32 on a device"),
    "average": ({"average": passes.EMA()}, r"^average=EMA.*: leave it out, or average"),
    "kernel": ({"optimizer": passes.Lion()}, r"optimizer=Lion.*: use SGD, Adam or AdamW"),
    "optimizer": ({"optimizer": None}, r"expected one optimizer, found 0"),
    "gradient": ({"gradient": None}, r"add passes.Gradient"),
    "rows": ({"loss": passes.MeanSquaredError(reduction="none")}, r"a loss that is one number"),
}


@pytest.mark.parametrize(("steps", "line"), REFUSED.values(), ids=REFUSED)
def test_what_a_device_cannot_do(steps, line, tmp_path):
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(), **steps}
    with pytest.raises(GraphoptError, match=line) as raised:
        graphopt.export_artifacts(mlp(), graphopt.standard(**steps), tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not os.listdir(tmp_path)


# What the optimizer model does, or what changes no number.
TRANSLATED = {
    "learning_rate",
    "weight_decay",
    "groups",
    "momentum",
    "dampening",
    "nesterov",
    "beta1",
    "beta2",
}
TRANSLATED |= {"epsilon", "max_norm", "limit", "fused", "flat", "rate_in_velocity", "slot_bits"}


@pytest.mark.parametrize("kind", [passes.SGD, passes.Adam, passes.AdamW, passes.ClipGlobalNorm, passes.ClipValue])
def test_every_option_is_translated(kind):
    assert {field.name for field in dataclasses.fields(kind)} <= TRANSLATED


PIPELINE = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD())
OWN_UPDATE = type("Own", (passes.SGD,), {"update": lambda self, op, w, g, rate, t: (w - rate * op.Sign(g),)})


@pytest.mark.parametrize(
    ("source", "pipeline", "line"),
    [
        (linear(dtype=np.float64), PIPELINE, r"parameters of float32.*found 'b' of DOUBLE: convert"),
        (
            graphopt.compile(mlp(), **PIPELINE),
            PIPELINE,
            r"expected an inference model, found a training graph",
        ),
        (
            model("g (float[N,3] x_grad) => (float[N,3] y) { y = Mul(x_grad, w) }", w=np.ones(3)),
            PIPELINE,
            r"does not reserve, found input 'x_grad'",
        ),
        (
            mlp(),
            graphopt.standard(loss=passes.MeanSquaredError(), optimizer=OWN_UPDATE()),
            r"has no kernel for",
        ),
    ],
    ids=["double", "step", "name", "own"],
)
def test_models_that_no_device_trains(source, pipeline, line, tmp_path):
    with pytest.raises(GraphoptError, match=line):
        graphopt.export_artifacts(source, pipeline, tmp_path / "out")
    assert not os.listdir(tmp_path)


@pytest.mark.filterwarnings("ignore:the model uses opset")
def test_an_opset_that_is_too_new(tmp_path):
    source = model(
        "g (bfloat16[N,3] x) => (float[N,3] y) { a = Softplus(x)\n c = Cast<to=1>(a)\n y = Mul(c, w) }",
        opset=22,
        w=np.ones(3),
    )
    with pytest.raises(GraphoptError, match=r"of opset 21 and IR version 10 or older, found 22 and"):
        graphopt.export_artifacts(source, PIPELINE, tmp_path / "out")
    assert not os.listdir(tmp_path)


def test_parameters_that_a_checkpoint_has_no_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_LIMIT", 100)
    with pytest.raises(GraphoptError, match=r"expected parameters of less than 2 GB.*: freeze some"):
        graphopt.export_artifacts(mlp(), PIPELINE, tmp_path / "out")
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(GraphoptError, match="out: expected a folder to write to"):
        graphopt.export_artifacts(mlp(), PIPELINE, tmp_path / "out")


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_missing(name, written):
    (written / name).unlink()
    with pytest.raises(GraphoptError, match=f"found no {name}: export the artifacts again"):
        graphopt.load_artifacts(written)


@stock
def test_another_runtime_does_not_train_them(written):
    with pytest.raises(
        GraphoptError,
        match=r"expected onnxruntime-training and torch.*No module.*pip install onnxruntime-training",
    ):
        graphopt.load_artifacts(written)


@training
def test_a_damaged_file_does_not_load(written):
    (written / "optimizer_model.onnx").write_bytes(b"no model")
    with pytest.raises(GraphoptError, match="onnxruntime-training cannot load the artifacts"):
        graphopt.load_artifacts(written)


def test_a_checkpoint_of_another_model(written):
    with pytest.raises(GraphoptError, match=r"found those of another: only one of the two has fc0.bias, "):
        graphopt.from_checkpoint(linear(), written)
    with pytest.raises(GraphoptError, match=r"'fc0.bias': expected float32\[9\], found float32\[8\]"):
        graphopt.from_checkpoint(mlp((4, 9, 3)), written)
    with pytest.raises(GraphoptError, match=r"'fc0.bias': expected float64\[8\], found float32\[8\]"):
        graphopt.from_checkpoint(mlp(dtype=np.float64), written)
    with pytest.raises(GraphoptError, match=r"found those of another: only one of the two has b, fc0.bias"):
        graphopt.from_checkpoint(graphopt.compile(linear(), **PIPELINE), written)


def test_files_that_are_no_checkpoint(written, tmp_path):
    with pytest.raises(GraphoptError, match="absent: no such file"):
        artifacts.parameters(tmp_path / "absent")
    with pytest.raises(GraphoptError, match=r"expected a checkpoint of onnxruntime-training, found another"):
        artifacts.parameters(written / "eval_model.onnx")
    whole = (written / "checkpoint").read_bytes()
    for size in range(0, len(whole) - 4, 13):  # but the last bytes, which fill the file up
        (tmp_path / "part").write_bytes(whole[:size])
        with pytest.raises(GraphoptError, match=r"part: (the checkpoint is damaged|expected a checkpoint of)"):
            artifacts.parameters(tmp_path / "part")


@training
def test_a_checkpoint_without_values(tmp_path):
    weights = [tensor.SerializeToString() for tensor in mlp().graph.initializer]
    onnxruntime.capi._pybind_state.save_checkpoint(weights, [], str(tmp_path / "nominal"), True)
    with pytest.raises(GraphoptError, match="expected a checkpoint that contains the parameters"):
        artifacts.parameters(tmp_path / "nominal")
    onnxruntime.capi._pybind_state.save_checkpoint(weights, [], str(tmp_path / "peers"), False)
    back = graphopt.from_checkpoint(mlp(seed=1), tmp_path / "peers")
    np.testing.assert_array_equal(predicted(back, X[0]), predicted(mlp(), X[0]))
