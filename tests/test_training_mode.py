"""BatchNormalization and Dropout as they train, and their inference form again."""

from __future__ import annotations

import functools
import warnings

import messages
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch_models
from builders import TYPES, model, run
from onnx.reference import ReferenceEvaluator
from torch import nn
from twins import assert_trains_as

import graphopt
import passes
from graphopt.derivatives import normal_form
from graphopt.graph import roles
from graphopt.graph.emitter import Emitter
from graphopt.graph.randomness import uniform
from graphopt.graph.roles import Role
from graphopt.testing import gradients as testing
from graphopt.testing.reference import evaluator

RNG = np.random.default_rng(6)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.bn1 = nn.BatchNorm2d(4, momentum=0.2)
        self.bn2 = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv(x)))
        return self.head(self.bn2(y.flatten(1)))


def network(seed=0):
    torch.manual_seed(seed)
    return Normalized()


class StandardizedWeights(nn.Module):
    """A convolution whose weight is normalized at each call, in evaluation too: no running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(2, 4, 4), nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.conv.weight.reshape(1, 4, -1)
        weight = nn.functional.batch_norm(rows, None, None, weight=self.gain, training=True)
        return nn.functional.conv2d(x, weight.reshape_as(self.conv.weight), self.conv.bias).flatten(1)


def batches(count):
    torch.manual_seed(1)
    return [(torch.randn(6, 2, 4, 4), torch.randint(0, 4, (6,))) for _ in range(count)]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batch_normalization_trains_as_pytorchs(mode):
    trained = network().train(mode == "train")
    proto = torch_models.export(trained, batches(1)[0][0], "torchscript")  # which updates the statistics, to train
    trained.train()
    step = graphopt.compile(
        proto,
        training=passes.TrainingMode(),
        loss=passes.CrossEntropy(),
        optimizer=passes.SGD(0.05, momentum=0.9),
    )
    onnx.checker.check_model(ir.to_proto(step), full_check=True)
    executor = graphopt.Executor(step, threads=1)
    optimizer = torch.optim.SGD(trained.parameters(), 0.05, momentum=0.9)
    assert_trains_as(executor, trained, optimizer, batches(8), nn.functional.cross_entropy)
    roles_ = {value.name: roles.role_of(value) for value in step.graph.inputs}
    statistics = [value for name, value in executor.state.items() if roles_[name] is Role.STATISTIC]
    assert len(statistics) == 4
    for expected in (trained.bn1.running_mean.numpy(), trained.bn2.running_mean.numpy()):
        assert any(np.allclose(s, expected, atol=1e-4) for s in statistics if s.shape == expected.shape)
    x = batches(1)[0][0]
    inference = executor.trained()
    onnx.checker.check_model(inference, full_check=True)
    found = ReferenceEvaluator(inference).run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(found, executor.predict(x=x.numpy())["y"], rtol=1e-4, atol=1e-5)
    one = ReferenceEvaluator(inference).run(None, {"x": x.numpy()[:1]})[0]
    np.testing.assert_allclose(one, found[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.slow
def test_the_running_variance_of_a_pytorch_model_is_pytorchs(exporter, rows):
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Tanh(), nn.Linear(4, 2))
    network.eval()
    step = graphopt.compile(
        torch_models.export(network, torch.randn(4, 5), exporter),
        training=passes.TrainingMode(),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    executor = graphopt.Executor(step)
    optimizer = torch.optim.SGD(network.train().parameters(), 0.1)
    drawn = [(torch.randn(rows, 5), torch.randn(rows, 2)) for _ in range(10)]
    assert_trains_as(executor, network, optimizer, drawn)
    statistics = [executor.state[str(v.name)] for v in roles.with_role(step, Role.STATISTIC)]
    for expected in (network[1].running_mean, network[1].running_var):
        assert any(np.allclose(found, expected, rtol=1e-4, atol=1e-5) for found in statistics)
    x = torch.randn(20, 5)
    (found,) = graphopt.run(executor.trained(), {"x": x.numpy()}).values()
    np.testing.assert_allclose(found, network.eval()(x).detach(), rtol=1e-3, atol=1e-4)


NORMALIZED = """g (T[N,3,S] x) => (T[N,3,S] y) {
    y = BatchNormalization<momentum=0.6>(x, scale, shift, mean, variance)
}"""


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("producer", "option", "degrees"),
    [("", None, 0), ("keras", None, 0), ("", True, 1), ("pytorch", None, 1), ("pytorch", False, 0)],
)
@pytest.mark.parametrize("shape", [(4, 3, 5), (1, 3, 2), (1, 3, 1)])
def test_the_running_variance_divides_by_the_count_of_its_exporter(producer, option, degrees, dtype, shape):
    weights = {name: np.ones(3) for name in ("scale", "variance")} | dict.fromkeys(["shift", "mean"], np.zeros(3))
    proto = model(NORMALIZED.replace("T[", f"{TYPES[dtype]}["), dtype=dtype, **weights)
    proto.producer_name = producer
    step = graphopt.compile(
        proto,
        training=passes.TrainingMode(unbiased_variance=option),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    executor = graphopt.Executor(step)
    x = np.random.default_rng(2).standard_normal(shape).astype(dtype)
    executor.step(x=x, target=x)
    ddof = degrees if x.size > 3 else 0
    expected = 0.6 + 0.4 * x.astype(np.float64).var(axis=(0, 2), ddof=ddof)
    rtol = {np.float16: 3e-3, np.float32: 1e-5, np.float64: 1e-7}[dtype]
    np.testing.assert_allclose(executor.state["variance"], expected, rtol=rtol)


def test_the_running_variance_of_more_values_than_16_bits_hold_is_finite():
    weights = {name: np.ones(3) for name in ("scale", "variance")} | dict.fromkeys(["shift", "mean"], np.zeros(3))
    proto = model(NORMALIZED.replace("T[", "float16["), dtype=np.float16, **weights)
    training = passes.TrainingMode(unbiased_variance=True)
    step = graphopt.compile(
        proto, training=training, loss=passes.MeanSquaredError(reduction="sum"), optimizer=passes.SGD(0.0)
    )
    x = np.tile(np.array([-1, 1], np.float16), (70, 3, 500))
    executor = graphopt.Executor(step, on_nonfinite="warn")
    executor.step(x=x, target=x)
    np.testing.assert_allclose(executor.state["variance"], np.ones(3), rtol=1e-2)


def dropout(ratio="ratio", training="training"):
    return model(
        f"""g (float[N,40] x) => (float[N,40] y) {{
            ratio = Constant<value = float {{0.3}}>()
            training = Constant<value = bool {{0}}>()
            h = Mul(x, w)
            y = Dropout(h, {ratio}, {training})
        }}""",
        w=np.ones(40),
    )


def test_dropout_drops_its_share_another_each_step_and_the_same_when_resumed(tmp_path):
    step = graphopt.compile(
        dropout(),
        training=passes.TrainingMode(seed=3),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.0),
    )
    x = np.ones((500, 40), np.float32)
    executor = graphopt.Executor(step)
    first = executor.step(x=x, target=x)["y"]
    executor.save(tmp_path / "state")
    second = executor.step(x=x, target=x)["y"]
    kept = first != 0
    assert abs(kept.mean() - 0.7) < 0.01
    np.testing.assert_allclose(first[kept], 1 / 0.7, rtol=1e-6)
    assert abs((kept & (second != 0)).mean() - 0.49) < 0.015
    for lag in (1, 2, 40):  # neighbours in a row and in a column are independent
        flat = kept.ravel()
        assert abs(np.corrcoef(flat[:-lag], flat[lag:])[0, 1]) < 0.03
    again = graphopt.Executor(step)
    again.load(tmp_path / "state")
    np.testing.assert_array_equal(again.step(x=x, target=x)["y"], second)
    reference = run(step, 2, {"x": x, "target": x})
    np.testing.assert_array_equal(reference[0]["y"], first)
    np.testing.assert_array_equal(reference[1]["y"], second)
    np.testing.assert_array_equal(executor.predict(x=x)["y"], x)
    names = [node.op_type for node in executor.trained().graph.node]
    assert names == ["Mul"]


def drawing(shape, seed=0, number=1):
    """Return a graph that draws the numbers of a mask, given the step."""
    inputs = [ir.Value(name="step", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))]
    drawn = ir.Model(ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}, name="drawing"), ir_version=10)
    with Emitter(drawn) as op:
        y = uniform(op, op.constant(np.array(shape)), inputs[0], seed, number)
        drawn.graph.outputs.append(y)
    return drawn


def openvino(proto, feeds):
    core = pytest.importorskip("openvino").Core()
    return core.compile_model(core.read_model(proto.SerializeToString()), "CPU")(feeds)[0]


EVALUATORS = {
    "onnx": lambda proto, feeds: ReferenceEvaluator(proto).run(None, feeds)[0],
    "onnxruntime": lambda proto, feeds: next(iter(graphopt.run(proto, feeds).values())),
    "openvino": openvino,
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", [0, 2**31 - 1])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_masks_are_the_same_on_every_runtime(evaluator, seed):
    proto = ir.to_proto(drawing([3, 70, 11], seed))
    even, odd, offset = np.random.default_rng([seed, 1]).integers(-(2**31), 2**31, 3, np.int32).tolist()
    for step in (0, 1, 2, 1000, 2**31 - 1):
        found = EVALUATORS[evaluator](proto, {"step": np.array(step)})
        assert (found.dtype, found.shape) == (np.int32, (3, 70, 11))
        key = (even & ~1) * step + (odd | 1)
        expected = [mixed(i * 0x9E3779B1 + key * step + offset, key) for i in range(found.size)]
        np.testing.assert_array_equal(found.ravel(), expected)


def mixed(x, key):
    """Return the hash of one of Python's integers, which do not wrap."""
    for summand in (key, 0x846CA68B):
        x = signed(x)
        x *= int(signed(128 * x) / 2**16) + signed(summand)
    return signed(x)


def signed(number):
    return (number + 2**31) % 2**32 - 2**31


def deviation(counts):
    """Return by how many standard deviations chi-squared of equally likely cells is beside its mean."""
    freedom = counts.size - 1
    squares = ((counts - counts.mean()) ** 2).sum() / counts.mean()
    return (squares - freedom) / np.sqrt(2 * freedom)


def pairs(a, b, cells=32):
    return np.bincount((a >> 27) * cells + (b >> 27) + cells * cells // 2 + cells // 2, minlength=cells**2)


@pytest.mark.parametrize("generator", ["mask", "numpy"])
@pytest.mark.slow
def test_masks_pass_the_tests_of_random_numbers(generator):
    """Each figure is beyond 5 standard deviations once in a million; those of NumPy's generator are beside it."""

    @functools.cache
    def source(seed, number, size):
        return evaluator(drawing([size], seed, number))

    def drawn(step, seed=0, number=1, size=2**17):
        if generator == "numpy":
            return np.random.default_rng([step, seed, number]).integers(-(2**31), 2**31, size, np.int32)
        return source(seed, number, size).run(None, {"step": np.array(step)})[0]

    steps = [drawn(step) for step in (*range(8), 1000, 2**31 - 1)]
    found = {"bins": [deviation(np.bincount((x >> 22) + 512, minlength=1024)) for x in steps]}
    found["neighbours"] = [
        deviation(pairs(x[:-by], x[by:])) for x in steps for by in (1, 2, 3, 7, 64, 256, 1024, 4096, 12345, 65536)
    ]
    found["steps"] = [deviation(pairs(steps[i], steps[i + by])) for by in (1, 2, 4) for i in range(8 - by)]
    found["steps far apart"] = [deviation(pairs(steps[5], drawn(5 + 2**k))) for k in range(4, 24)]
    found["seeds"] = [deviation(pairs(steps[0], drawn(0, seed=seed))) for seed in (1, 2, 2**31)]
    found["numbers"] = [deviation(pairs(steps[0], drawn(0, number=number))) for number in (0, 2, 3)]
    many = np.stack([drawn(step, size=256) for step in range(1001)])
    found["one place"] = [deviation(np.bincount((x >> 27) + 16, minlength=32)) for x in many.T]
    found["one place, steps apart"] = [
        deviation(pairs(many[:-by].ravel(), many[by:].ravel())) for by in (1, 2, 3, 8, 16, 64, 256)
    ]
    for name, figures in found.items():
        assert np.abs(figures).max() < 6, name
        assert abs(np.mean(figures)) < 5 / np.sqrt(len(figures)), name
    signs = np.where(many < 0, 1, -1)
    correlations = (signs @ signs.T)[np.triu_indices(1001, 1)] / 16
    assert np.abs(correlations).max() < 6.5
    assert correlations.std() == pytest.approx(1, abs=0.01)


def test_masks_have_no_pattern():
    """The spectrum of white noise of 2^18 numbers has no line above 20 times its mean, but once in 2000."""
    noise = evaluator(drawing([512, 512]))
    previous = None
    for step in (0, 1, 2, 1000, 2**40):
        drawn = noise.run(None, {"step": np.array(step)})[0]
        assert drawn.dtype == np.int32
        assert drawn.min() < -(2**31) * 0.999 < 2**31 * 0.999 < drawn.max()
        for share in (0.1, 0.5):
            kept = (drawn < (2 * share - 1) * 2**31) - share
            assert abs(kept.mean()) < 4 * np.sqrt(share * (1 - share) / kept.size)
            for axes in ((0,), (1,), (0, 1)):
                spectrum = np.abs(np.fft.fftn(kept - kept.mean(), axes=axes)) ** 2
                if len(axes) == 1:
                    spectrum = spectrum.mean(axis=1 - axes[0])
                assert spectrum.max() < 20 * spectrum.mean()
            if previous is not None:
                assert abs(np.corrcoef(kept.ravel(), (previous < (2 * share - 1) * 2**31).ravel())[0, 1]) < 4 / 512
        previous = drawn


def test_dropout_of_nothing_is_nothing():
    proto = dropout(ratio="zero")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0), "zero"))
    step = graphopt.compile(proto, training=passes.TrainingMode(), loss=passes.MeanSquaredError())
    assert "Range" not in {node.op_type for node in step.graph}


def test_the_gradient_of_dropout_is_that_of_what_it_kept():
    step = graphopt.compile(dropout(), training=passes.TrainingMode(), loss=passes.MeanSquaredError())
    x = RNG.standard_normal((3, 40)).astype(np.float32)
    outputs = run(step, 1, {"x": x, "target": 0 * x})[0]
    scale = outputs["y"] / x
    np.testing.assert_allclose(outputs["w.grad"], (2 * outputs["y"] * scale * x / x.size).sum(0), rtol=1e-4, atol=1e-7)


def test_a_normalization_without_running_statistics_trains_as_pytorchs():
    torch.manual_seed(0)
    trained = StandardizedWeights()
    proto = torch_models.export(trained, batches(1)[0][0], "torchscript")
    step = graphopt.compile(
        proto, training=passes.TrainingMode(), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.05)
    )
    executor = graphopt.Executor(step, threads=1)
    optimizer = torch.optim.SGD(trained.parameters(), 0.05)
    assert_trains_as(executor, trained, optimizer, batches(5), nn.functional.cross_entropy, 1e-5)
    x = batches(1)[0][0]
    predicted = graphopt.run(executor.trained(), {"x": x.numpy()})["y"]
    np.testing.assert_allclose(predicted, trained.eval()(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_equal_statistics_of_two_nodes_stay_apart():
    proto = model(
        """g (float[N,3] x) => (float[N,3] y) {
            a = BatchNormalization(x, ones, zeros, zeros, ones)
            b = Mul(a, two)
            y = BatchNormalization(b, ones, zeros, zeros, ones)
        }""",
        ones=np.ones(3),
        zeros=np.zeros(3),
        two=np.full(3, 2.0),
    )
    step = graphopt.compile(
        proto,
        training=passes.TrainingMode(),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.0),
    )
    executor = graphopt.Executor(step)
    x = RNG.standard_normal((50, 3)).astype(np.float32) + 5
    executor.step(x=x, target=x)
    statistics = [value for name, value in executor.state.items() if name.startswith("zeros.")]
    assert len(statistics) == 2
    np.testing.assert_allclose(statistics[0], 0.1 * x.mean(0), rtol=1e-4)
    np.testing.assert_allclose(statistics[1], 0, atol=1e-5)
    trained = executor.trained()
    found = evaluator(ir.from_proto(trained)).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, executor.predict(x=x)["y"], rtol=1e-4, atol=1e-4)


def test_a_batch_of_unknown_rank_is_not_normalized():
    text = """g (float[N,4] x, int64[K] s) => (float[M] y) {
        h = Reshape(x, s) b = BatchNormalization(h, one, zero, zero, one) y = Flatten(b) }"""
    given = {"one": np.ones(4), "zero": np.zeros(4)}
    with pytest.raises(graphopt.GraphoptError, match=r"BatchNormalization node .*: expected an input of known rank"):
        graphopt.Pipeline(a=passes.Normalize(), b=passes.TrainingMode())(model(text, **given))


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (3, 2, 4, 3)])
@pytest.mark.slow
def test_gradients_through_batch_statistics_equal_finite_differences(shape):
    proto = model(
        f"""g (double[{",".join(map(str, shape))}] x) => (double[{",".join(map(str, shape))}] y) {{
            y = BatchNormalization<epsilon = 0.01>(x, scale, bias, mean, variance)
        }}""",
        dtype=np.float64,
        scale=RNG.uniform(0.5, 2, shape[1]),
        bias=RNG.standard_normal(shape[1]),
        mean=np.zeros(shape[1]),
        variance=np.ones(shape[1]),
    )
    trained = normal_form(proto)
    passes.Parameters()(trained)
    passes.TrainingMode()(trained)
    for statistic in roles.with_role(trained, Role.NEXT):
        trained.graph.outputs.remove(statistic)
    feeds = {"x": RNG.standard_normal(shape)}
    feeds |= {name: RNG.uniform(0.5, 2, shape[1]) for name in ("scale", "bias")}
    for x in trained.graph.inputs:
        trained.graph.initializers.pop(x.name, None)
    testing.check_gradient(trained, feeds, tolerance=1e-6)
    again = testing.gradient_model(trained)
    for output in again.graph.outputs:
        output.name = f"first.{output.name}"
    seeds = {"y.seed": RNG.standard_normal(shape)}
    testing.check_gradient(again, feeds | seeds, tolerance=2e-6)


class Shared(nn.Module):
    """One normalization, called for each input in turn."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((i + 1) * self.body(x + i) for i in range(self.calls))


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.slow
def test_calls_of_one_normalization_move_one_pair_of_statistics_in_turn(exporter, calls):
    torch.manual_seed(3)
    network = Shared(calls).eval()
    x, t = torch.randn(8, 3), torch.randn(8, 4)
    step = graphopt.compile(
        torch_models.export(network, x, exporter),
        training=passes.TrainingMode(),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    statistics = [str(v.name) for v in roles.with_role(step, Role.STATISTIC)]
    assert len(statistics) == 2
    executor = graphopt.Executor(step)
    optimizer = torch.optim.SGD(network.train().parameters(), 0.1)
    assert_trains_as(executor, network, optimizer, [(x, t)] * 5)
    for expected in (network.body[1].running_mean, network.body[1].running_var):
        assert any(np.allclose(executor.state[name], expected, rtol=1e-3, atol=1e-4) for name in statistics)
    (found,) = graphopt.run(executor.trained(), {"x": x.numpy()}).values()
    np.testing.assert_allclose(found, network.eval()(x).detach(), rtol=1e-3, atol=1e-4)


def two_normalizations(first, second, drop="false"):
    """Return a network with two normalizations in the given modes, and a Dropout."""
    rng = np.random.default_rng(8)
    weights = {}
    for i in (1, 2):
        weights |= {f"bn{i}.weight": rng.uniform(0.5, 1.5, 4), f"bn{i}.bias": rng.standard_normal(4)}
        weights |= {f"bn{i}.mean": rng.standard_normal(4), f"bn{i}.var": rng.uniform(0.5, 1.5, 4)}
    return model(
        f"""g (float[N,3] x) => (float[N,4] y) {{
            h = MatMul(x, w)
            a = BatchNormalization<training_mode={first}, momentum=0.9>(
                h, "bn1.weight", "bn1.bias", "bn1.mean", "bn1.var")
            r = Tanh(a)
            b = BatchNormalization<training_mode={second}, momentum=0.9>(
                r, "bn2.weight", "bn2.bias", "bn2.mean", "bn2.var")
            ratio = Constant<value = float {{0.5}}>()
            mode = Constant<value = bool {{{int(drop == "true")}}}>()
            y = Dropout(b, ratio, mode)
        }}""",
        w=rng.standard_normal((3, 4)),
        **weights,
    )


LIVE = {
    "the file's modes by default": ((0, 1), {}, {"bn2"}),
    "both by default": ((1, 1), {}, {"bn1", "bn2"}),
    "all that are not left out, by a statistic": (
        (0, 0),
        {"training": passes.TrainingMode(dropout=False, leave_out="bn1.mean")},
        {"bn2"},
    ),
    "all that are not left out, by a weight": (
        (1, 1),
        {"training": passes.TrainingMode(dropout=False, leave_out=["bn2.*"])},
        {"bn1"},
    ),
    "none": ((1, 1), {"training": passes.TrainingMode(batch_normalization=False, dropout=False)}, set()),
}


def torch_twin(proto, live):
    """Return the network in PyTorch, with the normalizations that are not live in evaluation mode."""
    weights = {x.name: torch.tensor(onnx.numpy_helper.to_array(x)) for x in proto.graph.initializer}
    norms = {}
    for name in ("bn1", "bn2"):
        norms[name] = nn.BatchNorm1d(4, momentum=0.1).train(name in live)
        norms[name].load_state_dict(
            {
                "weight": weights[f"{name}.weight"],
                "bias": weights[f"{name}.bias"],
                "running_mean": weights[f"{name}.mean"],
                "running_var": weights[f"{name}.var"],
                "num_batches_tracked": torch.tensor(0),
            }
        )
    w = nn.Parameter(weights["w"])
    parameters = [w, *norms["bn1"].parameters(), *norms["bn2"].parameters()]
    return norms, parameters, lambda x: norms["bn2"](torch.tanh(norms["bn1"](x @ w)))


@pytest.mark.parametrize("case", LIVE)
def test_a_normalization_in_inference_form_stays_frozen_beside_a_live_one(case):
    modes, steps, live = LIVE[case]
    proto = two_normalizations(*modes)
    proto.producer_name = "pytorch"
    proto.graph.node[1].output.extend(["m1", "v1"] if modes[0] else [])
    proto.graph.node[3].output.extend(["m2", "v2"] if modes[1] else [])
    norms, parameters, network = torch_twin(proto, live)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1), **steps)
    executor = graphopt.Executor(step)
    optimizer = torch.optim.SGD(parameters, 0.1)
    drawn = [(torch.randn(6, 3), torch.randn(6, 4)) for _ in range(5)]
    assert_trains_as(executor, network, optimizer, drawn, rtol=1e-5)
    trained, x = executor.trained(), drawn[-1][0]
    found = {x.name: onnx.numpy_helper.to_array(x) for x in trained.graph.initializer}
    for name, norm in norms.items():
        norm.eval()
        np.testing.assert_allclose(found[f"{name}.mean"], norm.running_mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[f"{name}.var"], norm.running_var, rtol=1e-5, atol=1e-6)
    assert not any(x.name == "training_mode" and x.i for node in trained.graph.node for x in node.attribute)
    (one,) = graphopt.run(trained, {"x": x.numpy()[:1]}).values()
    np.testing.assert_allclose(one, network(x[:1]).detach(), rtol=1e-4, atol=1e-5)


def test_a_dropout_that_the_file_has_in_training_mode_drops_by_default_and_not_in_inference():
    step = graphopt.compile(two_normalizations(0, 0, "true"), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.0))
    executor = graphopt.Executor(step)
    x = RNG.standard_normal((50, 3)).astype(np.float32)
    dropped = [np.mean(executor.step(x=x, target=np.zeros((50, 4), np.float32))["y"] == 0) for _ in range(2)]
    assert all(0.3 < share < 0.7 for share in dropped)
    found = [next(iter(graphopt.run(executor.trained(), {"x": x}).values())) for _ in range(2)]
    assert np.count_nonzero(found[0] == 0) == 0
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("training", "warned"),
    [
        ("default", True),
        (None, False),
        (passes.TrainingMode(), False),
        (passes.TrainingMode(as_exported=True), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", [0, 1])
def test_a_file_that_normalizes_by_its_batch_is_named(training: object, warned: bool, mode: int) -> None:
    """Without the pass it predicts as the file does; with it, by running statistics."""
    text = f"""<ir_version: 9, opset_import: ["" : 17]> g (float[N,4,3] x) => (float[N,4,3] y)
        <float[4] s = {{1,1,1,1}}, float[4] b = {{0,0,0,0}}, float[4] m = {{0,0,0,0}}, float[4] v = {{1,1,1,1}}>
        {{ y{", mm, vv" if mode else ""} = BatchNormalization<training_mode={mode}>(x, s, b, m, v) }}"""
    file = onnx.parser.parse_model(text)
    x = np.random.default_rng(0).normal(3, 2, (8, 4, 3)).astype(np.float32)
    given = {} if training == "default" else {"training": training}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = graphopt.compile(file, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1), **given)
    said = [str(x.message) for x in caught if "normalize by the batch" in str(x.message)]
    assert len(said) == (warned and mode)
    (expected,) = ReferenceEvaluator(file).run(["y"], {"x": x})
    is_kept = training is None or not mode
    assert np.allclose(graphopt.Executor(step).predict(x=x)["y"], expected, atol=1e-5) == is_kept


def test_normalizations_in_a_row_without_an_optimizer_are_fused_without_a_warning():
    """Both move their statistics in one form, the second by what the first computes: joined, they were a cycle."""
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,2] y)'
        " { a = BatchNormalization(x, s, o, m, v) b = BatchNormalization(a, s2, o2, m, v) y = MatMul(b, w) }"
    )
    rng, proto = np.random.default_rng(0), onnx.parser.parse_model(text)
    for name, shape in dict.fromkeys(("s", "o", "s2", "o2", "m", "v"), (4,)).items() | {("w", (4, 2))}:
        array = rng.random(shape).astype(np.float32) + 0.1
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    step = graphopt.compile(proto, training=passes.TrainingMode(), loss=passes.MeanSquaredError(), optimizer=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor = graphopt.Executor(step, native=False)
        executor.step(x=rng.random((8, 4)).astype(np.float32), target=np.ones((8, 2), np.float32))


def test_a_note_of_batch_statistics_in_a_trained_file_counts_for_nothing():
    """Files that were trained before release 0.1 have it: the gradient took constants for statistics of the batch."""
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,3] x) => (float[N,4] y)'
        " { a = MatMul(x, w) y = BatchNormalization(a, s, o, m, v) }"
    )
    rng, proto = np.random.default_rng(0), onnx.parser.parse_model(text)
    for name, shape in {"w": (3, 4), "s": (4,), "o": (4,), "m": (4,), "v": (4,)}.items():
        array = rng.random(shape).astype(np.float32) + 0.1
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    feeds = {"x": rng.random((6, 3)).astype(np.float32), "target": np.ones((6, 4), np.float32)}
    found = []
    for noted in (False, True):
        if noted:
            proto.graph.node[1].metadata_props.add(key="graphopt.of_batch", value="true")
        step = graphopt.compile(proto, training=None, loss=passes.MeanSquaredError())
        found.append(graphopt.run(step, feeds)["w.grad"])
    np.testing.assert_array_equal(*found)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("training_mode_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("training_mode_mistakes", call, globals())
