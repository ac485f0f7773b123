"""Real networks compile and train, and gradients of theirs agree with finite differences.

The light models of the onnx package are nine architectures of opset 9 without weights; `rapidocr`, `silero-vad` and
`magika` are packages that carry pretrained ones. The heavy ones: pytest -n0 -m exhaustive tests/test_real_models.py
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import builders
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import graphopt
import passes
from graphopt.graph.roles import Role, with_role
from graphopt.testing.gradients import as_precision, in_precision
from graphopt.testing.reference import evaluator

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
CHAOTIC = ("densenet121", "inception_v2", "resnet50")  # 1e-6 of the image moves ResNet-50's gradient by 2 %

Feeds = dict[str, np.ndarray]


class Case(NamedTuple):
    """A model, data for it, and the steps of the pipeline that say how to train it."""

    model: ir.Model
    feeds: Feeds
    steps: Mapping[str, Any]
    rate: float = 0.05


def losses(case: Case) -> list[float]:
    """Return the losses of ten steps."""
    optimizer, clip = passes.SGD(case.rate), passes.ClipGlobalNorm(1.0)
    step = graphopt.compile(case.model, optimizer=optimizer, clip=clip, **case.steps)
    executor = graphopt.Executor(step, report=["loss"])
    return [executor.step(case.feeds)["loss"] for _ in range(10)]


def gradients(step: ir.Model, feeds: Feeds) -> Feeds:
    """Return the gradient of each parameter, computed by the runtime in float32."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(ir.to_proto(step).SerializeToString(), options)
    names = [str(value.name) for value in with_role(step, Role.GRADIENT)]
    found = session.run(names, feeds)
    return {name.removesuffix(".grad"): y for name, y in zip(names, found, strict=True)}


def in_double(step: ir.Model, feeds: Feeds) -> tuple[ReferenceEvaluator, Feeds]:
    """Return the reference evaluator of a graph in float64, and data for it."""
    double = ir.DataType.DOUBLE
    return evaluator(in_precision(step, double)), {name: as_precision(x, double) for name, x in feeds.items()}


def check_gradients(case: Case, *, chaotic: bool = False, count: int = 5, distance: float = 1e-7) -> None:
    """Compare the runtime's gradient of random parameters, an element each, with differences in float64.

    The element is one of at least a twentieth of the largest in its parameter's gradient. The loss of the forward
    graph, which no gradient pass has seen, is computed by the reference evaluator. Where the model is chaotic, so
    that rounding to float32 moves its gradient by percents, the training graph too is computed in float64, and the
    runtime's gradient must be near that.
    """
    random = np.random.default_rng(0)
    step = graphopt.compile(case.model, **case.steps)
    weights = {str(v.name): v.const_value.numpy() for v in with_role(step, Role.PARAMETER)}
    found = {name: g for name, g in gradients(step, case.feeds).items() if np.abs(g).max() > 1e-6}
    assert len(found) >= count
    names = random.choice(list(found), count, replace=False).tolist()
    if chaotic:
        some = graphopt.compile(case.model, **case.steps, parameters=passes.Parameters(names))
        double, feeds = in_double(some, case.feeds)
        for name, gradient in zip(names, double.run([f"{name}.grad" for name in names], feeds), strict=True):
            assert np.linalg.norm(found[name] - gradient) < 0.1 * np.linalg.norm(gradient), name
            found[name] = gradient
    forward, feeds = in_double(graphopt.compile(case.model, **case.steps, gradient=None), case.feeds)
    for name in names:
        gradient = np.abs(found[name])
        index = tuple(random.choice(np.argwhere(gradient >= gradient.max() / 20)))
        values = []
        for sign in (1, -1):
            moved = weights[name].astype(np.float64)
            moved[index] += sign * distance
            values.append(forward.run(["loss"], {**feeds, name: moved})[0])
        expected = (values[0] - values[1]) / (2 * distance)
        assert abs(found[name][index] - expected) < 1e-3 * gradient.max() + 1e-7, f"{name} at {index}"


def check(case: Case, *, chaotic: bool = False) -> None:
    trajectory = losses(case)
    assert np.isfinite(trajectory).all()
    assert trajectory[-1] < 0.95 * trajectory[0], trajectory
    check_gradients(case, chaotic=chaotic)


def light(name: str) -> Case:
    """Return an architecture with random weights and one random image.

    Convolutions and linear layers are scaled as He et al. 2015 say; all numbers of the files are 0.02, and scales and
    variances of 0.02 make each of DenseNet's 121 normalizations shrink its input to a 350th.
    """
    random = np.random.default_rng(0)
    model = graphopt.load(LIGHT / f"light_{name}.onnx")
    passes.Normalize()(model)
    for value in model.graph.initializers.values():
        if value.dtype == ir.DataType.FLOAT:
            array = _weight(value, random).astype(np.float32)
            value.const_value = ir.tensor(array, name=value.name)
    (x,), (y,) = model.graph.inputs, model.graph.outputs
    image = random.standard_normal(x.shape.numpy(), np.float32)
    target = np.full([size for axis, size in enumerate(y.shape.numpy()) if axis != 1], 7)
    loss = passes.CrossEntropy(from_logits=name == "densenet121")  # the others end with Softmax
    steps = {"loss": loss, "training": passes.TrainingMode()}
    return Case(model, {str(x.name): image, "target": target}, steps)


def _weight(value: ir.Value, random: np.random.Generator) -> np.ndarray:
    shape = value.shape.numpy()
    if len(shape) > 1:
        return random.standard_normal(shape, np.float32) * np.sqrt(2 / np.prod(shape[1:]), dtype=np.float32)
    user, index = value.uses()[0]
    if user.op_type == "Unsqueeze":  # along the channels, for Mul and Add
        scales = user.outputs[0].consumers()[0].op_type == "Mul"
    else:
        scales = user.op_type == "BatchNormalization" and index in (1, 4)
    return random.uniform(0.8, 1.2, shape) if scales else random.normal(0, 0.05, shape)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "squeezenet" else pytest.mark.exhaustive)
        for name in sorted(path.stem.removeprefix("light_") for path in LIGHT.glob("*.onnx"))
    ],
)
@pytest.mark.slow
def test_an_architecture_of_opset_9_trains(name: str) -> None:
    check(light(name), chaotic=name in CHAOTIC)


def opset_23() -> onnx.ModelProto:
    """Return a transformer's block of operators that opset 23 brought, from 6 tokens of 16 numbers to 5 classes."""
    random = np.random.default_rng(0)
    shapes = {"wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "wo": (16, 16), "head": (16, 5)}
    weights = {name: random.standard_normal(shape) / 4 for name, shape in shapes.items()}
    weights |= {"g1": random.uniform(0.5, 1.5, 16), "g2": random.uniform(0.5, 1.5, 16)}
    angles = np.arange(6)[:, None] / 100.0 ** (np.arange(2) / 2)
    return builders.model(
        """g (float[2,6,16] x) => (float[2,6,5] y) {
            places = Constant<value = int64[2,6] {0,1,2,3,4,5,0,1,2,3,4,5}>()
            n = RMSNormalization(x, g1)
            q = MatMul(n, wq)  k = MatMul(n, wk)  v = MatMul(n, wv)
            rq = RotaryEmbedding<num_heads = 4>(q, "rotary.cos", "rotary.sin", places)
            rk = RotaryEmbedding<num_heads = 4>(k, "rotary.cos", "rotary.sin", places)
            a = Attention<is_causal = 1, q_num_heads = 4, kv_num_heads = 4>(rq, rk, v)
            o = MatMul(a, wo)
            h = Add(x, o)
            m = RMSNormalization(h, g2)
            y = MatMul(m, head)
        }""",
        opset=23,
        **weights,
        **{"rotary.cos": np.cos(angles), "rotary.sin": np.sin(angles)},
    )


@pytest.mark.slow
def test_a_model_of_opset_23_trains() -> None:
    random = np.random.default_rng(1)
    proto = opset_23()
    x = random.standard_normal((2, 6, 16), np.float32)
    steps = {"loss": passes.CrossEntropy(axis=2), "parameters": passes.Parameters(freeze="rotary.*")}
    case = Case(graphopt.load(proto), {"x": x, "target": random.integers(0, 5, (2, 6))}, steps, rate=0.5)
    check(case)
    step = graphopt.compile(case.model, optimizer=passes.SGD(), **steps)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(graphopt.Executor(step).predict(x=x)["y"], expected, rtol=1e-4, atol=1e-5)


def pretrained(package: str, path: str) -> ir.Model:
    """Return a model that a package carries; the test is skipped where the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed: see the extras of pyproject.toml")
    return graphopt.load(Path(spec.origin).parent / path)


@pytest.mark.slow
def test_a_detector_of_file_types_is_fine_tuned() -> None:
    model = pretrained("magika", "models/standard_v3_3/model.onnx")
    random = np.random.default_rng(0)
    feeds = {"bytes": random.integers(0, 257, (4, 2048), np.int32), "target": random.integers(0, 214, 4)}
    check(Case(model, feeds, {"loss": passes.CrossEntropy(from_logits=False)}))


IMAGES = {
    "ch_ppocr_mobile_v2.0_cls_mobile": ((4, 3, 48, 192), passes.CrossEntropy(from_logits=False), 0.05),
    "PP-OCRv6_rec_small": ((1, 3, 48, 160), passes.CrossEntropy(axis=2, from_logits=False), 0.002),
    "PP-OCRv6_det_small": ((1, 3, 64, 64), passes.BinaryCrossEntropy(from_logits=False), 0.05),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if "cls" in x else pytest.mark.exhaustive) for x in IMAGES])
@pytest.mark.slow
def test_a_reader_of_text_in_images_is_fine_tuned(name: str) -> None:
    model = pretrained("rapidocr", f"models/{name}.onnx")
    shape, loss, rate = IMAGES[name]
    random = np.random.default_rng(0)
    feeds: Feeds = {"x": random.uniform(-1, 1, shape).astype(np.float32)}
    target = {"cls": random.integers(0, 2, 4), "rec": random.integers(0, 18710, (1, 20))}
    target["det"] = random.integers(0, 2, (1, 1, 64, 64)).astype(np.float32)
    feeds["target"] = next(y for part, y in target.items() if part in name)
    check(Case(model, feeds, {"loss": loss}, rate))


def fixed(model: ir.Model, feeds: Feeds, **constants: Any) -> ir.Model:
    """Give a model's inputs the sizes of some data, and some the values of constants: then its Ifs are decided."""
    for x in list(model.graph.inputs):
        if x.name in constants:
            model.graph.inputs.remove(x)
            x.const_value = ir.tensor(np.asarray(constants[x.name], x.dtype.numpy()), name=x.name)
            model.graph.register_initializer(x)
        else:
            x.shape = ir.Shape(feeds[str(x.name)].shape)
    return model


def speech(**more: np.ndarray) -> Feeds:
    random = np.random.default_rng(0)
    state = random.uniform(-1, 1, (2, 2, 128)).astype(np.float32)
    return {"input": random.uniform(-1, 1, (2, 576)).astype(np.float32), "state": state, **more}


@pytest.mark.parametrize("name", ["silero_vad", "silero_vad_16k_op15"])
@pytest.mark.slow
def test_a_detector_of_speech_is_fine_tuned(name: str) -> None:
    """An LSTM, the size of the input and the sampling rate decide between branches of dozens of Ifs."""
    feeds = speech(target=np.array([[0], [1]], np.float32))
    model = fixed(pretrained("silero_vad", f"data/{name}.onnx"), feeds, sr=16000)
    check(Case(model, feeds, {"loss": passes.BinaryCrossEntropy(from_logits=False, output="output")}))


@pytest.mark.slow
def test_a_detector_of_speech_runs() -> None:
    """The runtime's own optimizers end the process (`test_runtime_optimizers.py`)."""
    feeds = speech()
    model = fixed(pretrained("silero_vad", "data/silero_vad.onnx"), feeds, sr=16000)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    expected = session.run(["output"], feeds)[0]
    np.testing.assert_allclose(graphopt.run(model, feeds)["output"], expected, rtol=1e-4)
    np.testing.assert_allclose(graphopt.predict(model, feeds)["output"], expected, rtol=1e-4)


@pytest.mark.slow
def test_a_detector_of_speech_with_its_if_is_fine_tuned() -> None:
    """The sampling rate is fed, and gradients go through the branch that it takes."""
    feeds = speech(sr=np.array(16000), target=np.array([[0], [1]], np.float32))
    model = pretrained("silero_vad", "data/silero_vad_op18_ifless.onnx")
    check(Case(model, feeds, {"loss": passes.BinaryCrossEntropy(from_logits=False, output="output")}))


@pytest.mark.parametrize("name", [pytest.param("squeezenet", marks=pytest.mark.exhaustive), "silero_vad"])
@pytest.mark.slow
def test_mixed_precision_trains_a_real_model(name: str) -> None:
    """The scale is at first one that gradients do not bear: steps are left out until it is."""
    if name == "silero_vad":
        feeds = speech(target=np.array([[0], [1]], np.float32))
        model = fixed(pretrained("silero_vad", "data/silero_vad.onnx"), feeds, sr=16000)
        case = Case(model, feeds, {"loss": passes.BinaryCrossEntropy(from_logits=False, output="output")})
    else:
        case = light(name)
    optimizer, clip = passes.SGD(case.rate), passes.ClipGlobalNorm(1.0)
    mixed = {
        "precision": passes.MixedPrecision(),
        "gradient": passes.Gradient(loss_scale=2.0**24),
        "loss_scale": passes.DynamicLossScale(),
    }
    step = graphopt.compile(case.model, optimizer=optimizer, clip=clip, **case.steps, **mixed)
    executor = graphopt.Executor(step)
    expected = losses(case)
    found = [executor.step(case.feeds)["loss"] for _ in range(30)]
    left_out = 30 - int(executor.state["step"])
    assert 0 < left_out < 25
    np.testing.assert_allclose(found[: left_out + 1], expected[0], rtol=1e-2)
    np.testing.assert_allclose(found[left_out : left_out + 3], expected[:3], rtol=2e-2)
    trained = executor.trained()
    onnx.checker.check_model(trained, full_check=True)
    assert onnx.TensorProto.FLOAT16 not in {tensor.data_type for tensor in trained.graph.initializer}
