"""Models train with simulated integers, and their files in integers compute what the training graph evaluates."""

from __future__ import annotations

import collections
import json
import shutil
import subprocess
import sys
from pathlib import Path

import messages
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.ao.quantization as quantization
from builders import mlp, model
from onnx import numpy_helper
from steps import outputs

import graphopt
import passes
from graphopt import cli, models
from graphopt.graph import inference
from graphopt.graph.roles import Role, with_role
from graphopt.inspection.report import report
from graphopt.inspection.sensitivity import sensitivity
from graphopt.targets.native.lowering import plan
from passes.quantization import placement

OLD = onnxruntime.__version__.startswith("1.19")  # it has other integer kernels
RNG = np.random.default_rng(5)
X = RNG.standard_normal((48, 6)).astype(np.float32)
T = RNG.standard_normal((48, 3)).astype(np.float32)
IMAGES = RNG.standard_normal((24, 3, 8, 8)).astype(np.float32)


def normal(*shape, scale=0.4, rng=RNG):
    return rng.standard_normal(shape) * scale


def norm(name, channels):
    """Return the weights of a BatchNormalization."""
    kinds = {"g": 1 + normal(channels), "s": normal(channels), "m": normal(channels)}
    return {f"{name}{key}": x for key, x in kinds.items()} | {f"{name}v": RNG.uniform(0.5, 2, channels)}


def residual():
    """Return a network with a depthwise convolution, BatchNormalization, a sum, and a mean over positions."""
    return model(
        """g (float[N,3,8,8] x) => (float[N,3] y) {
            zero = Constant<value=float {0}>() six = Constant<value=float {6}>()
            c = Conv<pads=[1,1,1,1]>(x, w0, b0) n = BatchNormalization(c, ng, ns, nm, nv) r = Relu(n)
            d = Conv<pads=[1,1,1,1], group=8>(r, w1) o = BatchNormalization(d, og, os, om, ov) q = Clip(o, zero, six)
            e = Conv(q, w2, b2) a = Add(e, r) f = Relu(a) axes = Constant<value=int64[2] {2, -1}>()
            p = ReduceMean<keepdims=0>(f, axes) y = Gemm<transB=1>(p, w3, b3) }""",
        **{"w0": normal(8, 3, 3, 3), "b0": normal(8), "w1": normal(8, 1, 3, 3), "w2": normal(8, 8, 1, 1)},
        **{"b2": normal(8), "w3": normal(3, 8), "b3": normal(3)},
        **norm("n", 8),
        **norm("o", 8),
    )


def branches():
    """Return a network with Concat, MaxPool, AveragePool, LeakyRelu, a transposed convolution and Softmax."""
    return model(
        """g (float[N,3,8,8] x) => (float[N,3] y) {
            a = Conv<pads=[1,1,1,1]>(x, w0, b0) l = LeakyRelu(a) b = Conv(x, w1) s = Sigmoid(b) c = Concat<axis=1>(l, s)
            m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(c) t = ConvTranspose<strides=[2,2]>(m, w2, b2)
            u = AveragePool<kernel_shape=[2,2], strides=[2,2]>(t) d = Conv<strides=[2,2]>(u, w3) e = Relu(d)
            f = Flatten(e) h = MatMul(f, w4) k = Add(h, b4) y = Softmax(k) }""",
        **{"w0": normal(4, 3, 3, 3), "b0": normal(4), "w1": normal(4, 3, 1, 1), "w2": normal(8, 4, 2, 2)},
        **{"b2": normal(4), "w3": normal(5, 4, 1, 1), "w4": normal(20, 3), "b4": normal(3)},
    )


def attention():
    """Return a block of self-attention with a residual connection and a wide layer."""
    return model(
        """g (float[N,4,6] x) => (float[N,4,3] y) {
            n = LayerNormalization(x, g, s) q = MatMul(n, wq) k = MatMul(n, wk) v = MatMul(n, wv)
            t = Transpose<perm=[0,2,1]>(k) p = MatMul(q, t) a = Softmax(p) z = MatMul(a, v) o = MatMul(z, wo)
            ob = Add(o, bo) r = Add(x, ob) h = MatMul(r, w1) hb = Add(h, b1) u = Gelu(hb) y = MatMul(u, w2) }""",
        **{"g": np.ones(6), "s": np.zeros(6), **{name: normal(6, 6) for name in ("wq", "wk", "wv", "wo")}},
        **{"bo": normal(6), "w1": normal(6, 12), "b1": normal(12), "w2": normal(12, 3)},
    )


SEQUENCES = RNG.standard_normal((24, 4, 6)).astype(np.float32)
NETWORKS = {
    "mlp": (lambda: mlp((6, 16, 8, 3), "Relu"), X, (3,)),
    "cnn": (lambda: models.cnn((3, 8, 8), 3, channels=(4, 6), hidden=8), IMAGES, (3,)),
    "residual": (residual, IMAGES, (3,)),
    "branches": (branches, IMAGES, (3,)),
    "attention": (attention, SEQUENCES, (4, 3)),
}
OPTIONS = {
    "int8": ({}, "ema"),
    "7 bits": ({"weight_range": 63, "activations": "int8"}, "ema"),
    "int4": ({"weights": "int4"}, "ema"),
    "int4 in blocks": ({"weights": "int4", "block": 4, "activations": None}, "ema"),
    "int8 in blocks": ({"block": 4}, None),
    "lsq": ({}, "lsq"),
    "fixed": ({"calibrate": "percentile"}, None),
}


def step_of(network, rows, target, observer="ema", steps=None, **options):
    """Return the training graph of a fake-quantized network whose ranges are those of the rows."""
    pipeline = graphopt.standard(
        quantize=passes.FakeQuantize(observer=observer, **options),
        **{"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.05), **(steps or {})},
    )
    arrays = {"x": rows, "target": target}
    return graphopt.adapt(pipeline, network, arrays, validation=None, shuffle=False)(network)


def executor_of(*args, **options):
    return graphopt.Executor(step_of(*args, **options), threads=1, native=False)


def trained(name, observer="ema", steps=None, count=3, **options):
    build, rows, shape = NETWORKS[name]
    target = np.tanh(RNG.standard_normal((len(rows), *shape))).astype(np.float32)
    executor = executor_of(build(), rows, target, observer, steps, **options)
    for _ in range(count):
        executor.step(x=rows, target=target)
    return executor, rows


def simulated(executor):
    """Return the training graph's evaluation as a model."""
    return inference.trained(executor.model, executor.state, as_stored=False)


def run(proto, rows, **options):
    return next(iter(outputs(proto, {"x": rows}, **options).values()))


def kernels(proto, tmp_path):
    """Count the operators of the graph that ONNX Runtime optimizes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return collections.Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)


def initializers(proto):
    return {x.name: numpy_helper.to_array(x) for x in proto.graph.initializer}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_file_in_integers_computes_what_the_training_graph_evaluates(name, options):
    chosen, observer = OPTIONS[options]
    executor, rows = trained(name, observer, **chosen)
    proto = executor.trained()
    onnx.checker.check_model(proto, full_check=True)
    expected = run(simulated(executor), rows, optimize=False)
    np.testing.assert_array_equal(run(proto, rows, optimize=False), expected)
    np.testing.assert_allclose(executor.predict(x=rows)["y"], expected, atol=0.05)
    kinds = {x.name: x.data_type for x in proto.graph.initializer}
    weight = next(name for name in kinds if name in ("fc0.weight", "layers.0.weight", "w0", "wq"))
    assert kinds[weight] == (onnx.TensorProto.INT4 if "int4" in options else onnx.TensorProto.INT8)
    assert onnx.TensorProto.INT32 in kinds.values() or options not in ("int8", "lsq") or name == "attention"
    floats = executor.trained(quantized=False)
    assert not any("Quantize" in node.op_type for node in floats.graph.node)
    assert not any(x.name.endswith((".low", ".high", ".scale")) for x in floats.graph.initializer)


KERNELS = {
    "mlp": {"QGemm": 3},
    "cnn": {"QLinearConv": 2, "QGemm": 2, "NhwcMaxPool": 2},
    "residual": {"QLinearConv": 3, "QGemm": 1, "QLinearAdd": 1, "QLinearGlobalAveragePool": 1},
    "branches": {"QLinearConv": 3, "QLinearConcat": 1, "QLinearSigmoid": 1, "QLinearLeakyRelu": 1},
    "attention": {},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_runtime_computes_products_on_integers(name, tmp_path):
    executor, rows = trained(name)
    proto = executor.trained()
    found = kernels(proto, tmp_path)
    assert {op_type: found[op_type] for op_type in KERNELS[name]} == KERNELS[name], found
    if name != "branches":
        assert not any(found[op_type] for op_type in ("Conv", "Gemm", "MatMul")), found
    off, on = (run(proto, rows, optimize=x) for x in (False, True))
    exact = name in ("mlp", "cnn")
    np.testing.assert_allclose(on, off, rtol=0, atol=1e-5 if exact else 0.03 * np.ptp(off))


ON_A_HASWELL = """import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
numpy.save(sys.argv[3], session.run(None, {"x": numpy.load(sys.argv[2])})[0])"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs QEMU's emulator of x86-64")
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_processor_without_vnni_computes_the_same_of_weights_of_7_bits(name, tmp_path):
    executor, rows = trained(name, weight_range=63)
    onnx.save(executor.trained(), tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", rows)
    names = [tmp_path / file for file in ("model.onnx", "x.npy", "y.npy")]
    command = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", ON_A_HASWELL, *names]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    expected = run(executor.trained(), rows)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=0, atol=1e-6)


class Rounded(torch.nn.Module):
    """PyTorch's fake quantization of a chain of linear or convolutional layers, whose biases are 32-bit integers."""

    def __init__(self, layers, ranges, limit=127, pooled=False):
        super().__init__()
        self.layers, self.limit, self.pooled = torch.nn.ModuleList(layers), limit, pooled
        observed = {"averaging_constant": 0.01, "observer": quantization.MovingAverageMinMaxObserver}
        kind = {"quant_min": 0, "quant_max": 255, "dtype": torch.quint8}
        self.rounds = torch.nn.ModuleList(quantization.FakeQuantize(**observed, **kind) for _ in layers)
        for rounds, (low, high) in zip(self.rounds, ranges, strict=True):
            rounds.activation_post_process.min_val = torch.tensor(low)
            rounds.activation_post_process.max_val = torch.tensor(high)

    def forward(self, x):
        for i, (layer, rounds) in enumerate(zip(self.layers, self.rounds, strict=True)):
            x = rounds(x)
            if i and self.pooled:
                x = torch.nn.functional.max_pool2d(x, 2)
            if isinstance(layer, torch.nn.Linear) and x.dim() > 2:
                x = x.flatten(1)
            axes = tuple(range(1, layer.weight.dim()))
            scale = (layer.weight.detach().abs().amax(axes) / self.limit).clamp(min=torch.finfo().eps)
            w = torch.fake_quantize_per_channel_affine(
                layer.weight, scale, torch.zeros(len(scale)), 0, -self.limit, self.limit
            )
            step = rounds.scale.detach() * scale
            b = layer.bias + (torch.round(layer.bias / step) * step - layer.bias).detach()
            if isinstance(layer, torch.nn.Linear):
                x = torch.nn.functional.linear(x, w, b)
            else:
                x = torch.nn.functional.conv2d(x, w, b, padding=1)
            x = torch.relu(x) if i < len(self.layers) - 1 else x
        return x


def beside_pytorch(
    network, layers, rows, target, names, limit=127, pooled=False, native=False, optimizers=None, atol=1e-6
):
    """Train ten steps in both, and compare losses, ranges and weights."""
    own, twin = optimizers or (passes.SGD(0.05), lambda parameters: torch.optim.SGD(parameters, 0.05))
    step = step_of(network, rows, target, steps={"optimizer": own}, weight_range=limit)
    executor = graphopt.Executor(step, threads=1, native=native)
    weights = initializers(executor.trained(quantized=False))
    for name, layer in layers.items():
        layer.weight.data = torch.tensor(weights[f"{name}.weight"])
        layer.bias.data = torch.tensor(weights[f"{name}.bias"])
    ranges = [[float(executor.state[f"{name}.{end}"]) for end in ("low", "high")] for name in names]
    theirs = Rounded(list(layers.values()), ranges, limit, pooled)
    descent = twin(theirs.parameters())
    found, expected = [], []
    for i in range(10):
        batch = {"x": rows[i::10], "target": target[i::10]}
        found.append(float(executor.step(batch)["loss"]))
        descent.zero_grad()
        loss = torch.nn.functional.mse_loss(theirs(torch.tensor(batch["x"])), torch.tensor(batch["target"]))
        loss.backward()
        descent.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for name, layer in layers.items():
        for kind in ("weight", "bias"):
            trained = executor.state[f"{name}.{kind}"]
            np.testing.assert_allclose(trained, getattr(layer, kind).detach(), rtol=1e-6, atol=atol)
    for name, rounds in zip(names, theirs.rounds, strict=True):
        ends = (rounds.activation_post_process.min_val, rounds.activation_post_process.max_val)
        for end, number in zip(("low", "high"), ends, strict=True):
            np.testing.assert_allclose(executor.state[f"{name}.{end}"], number.item(), rtol=1e-6, atol=1e-6)
    return executor


@pytest.mark.parametrize("limit", [127, 63])
def test_ten_steps_are_those_of_pytorchs_fake_quantization(limit):
    layers = {f"fc{i}": torch.nn.Linear(*sizes) for i, sizes in enumerate([(6, 16), (16, 8), (8, 3)])}
    executor = beside_pytorch(mlp((6, 16, 8, 3), "Relu"), layers, X, T, ["x", "a0", "a1"], limit)
    before = dict(executor.state)
    executor.predict(x=10 * X)
    executor.evaluate(x=10 * X, target=T)
    assert all(np.array_equal(before[name], x) for name, x in executor.state.items())


OPTIMIZERS = {
    "momentum": (
        passes.SGD(0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True),
    ),
    "Adam": (passes.Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    "AdamW": (passes.AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    "Adagrad": (
        passes.Adagrad(0.1, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1),
    ),
    "RMSprop": (passes.RMSprop(0.01), lambda p: torch.optim.RMSprop(p, 0.01)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_of_optimizers_take_the_steps_of_pytorchs_fake_quantization(name):
    layers = {f"fc{i}": torch.nn.Linear(*sizes) for i, sizes in enumerate([(6, 16), (16, 3)])}
    options = {"native": True, "optimizers": OPTIMIZERS[name], "atol": 1e-5}
    beside_pytorch(mlp((6, 16, 3), "Relu"), layers, X, T, ["x", "a0"], **options)


@pytest.mark.parametrize("pooled", [False, True])
def test_ten_steps_of_a_convolution_are_those_of_pytorchs_fake_quantization(pooled):
    """Of equal maxima of rounded numbers, the first one has the gradient."""
    pool = "p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)" if pooled else "p = Identity(r)"
    inputs = 64 if pooled else 256
    network = model(
        f"""g (float[N,3,8,8] x) => (float[N,3] y) {{ c = Conv<pads=[1,1,1,1]>(x, "c0.weight", "c0.bias") r = Relu(c)
            {pool} v = Flatten(p) y = Gemm<transB=1>(v, "fc.weight", "fc.bias") }}""",
        **{"c0.weight": normal(4, 3, 3, 3, scale=0.1), "c0.bias": normal(4)},
        **{"fc.weight": normal(3, inputs, scale=0.1), "fc.bias": normal(3)},
    )
    layers = {"c0": torch.nn.Conv2d(3, 4, 3, padding=1), "fc": torch.nn.Linear(inputs, 3)}
    beside_pytorch(network, layers, IMAGES, T[:24], ["x", "r"], pooled=pooled)


def test_ten_steps_of_adapters_are_those_of_pytorchs_fake_quantization_of_merged_weights():
    steps = {"adapter": passes.LoRA(["fc0.weight", "fc1.weight"], rank=2, alpha=4)}
    executor = executor_of(mlp((6, 16, 3), "Relu"), X, T, None, steps)
    base = {name: torch.tensor(x) for name, x in initializers(executor.trained(quantized=False)).items()}
    own = {name: torch.tensor(x, requires_grad=True) for name, x in executor.parameters.items()}
    assert all(".lora_" in name for name in own)
    file = initializers(executor.trained())
    descent, found, expected = torch.optim.SGD(own.values(), 0.05), [], []
    for _ in range(10):
        found.append(float(executor.step(x=X, target=T)["loss"]))
        x = torch.tensor(X)
        for i, name in enumerate(["x", "a0"]):
            scale, zero = file[f"{name}.scale"].item(), int(file[f"{name}.zero_point"])
            x = torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)
            down, up = (own[f"fc{i}.weight.lora_{part}"] for part in "AB")
            merged, b = base[f"fc{i}.weight"] + 2 * (down @ up).T, base[f"fc{i}.bias"]
            step = scale * merged.detach().abs().amax(1) / 127
            x = x @ rounded_in_pytorch(merged, 0).T + torch.round(b / step) * step
            x = x if i else torch.relu(x)
        loss = torch.nn.functional.mse_loss(x, torch.tensor(T))
        descent.zero_grad()
        loss.backward()
        descent.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for name, x in own.items():
        np.testing.assert_allclose(executor.parameters[name], x.detach(), rtol=1e-5, atol=1e-6)


def rounded_in_pytorch(w, axis, limit=127):
    scale = (w.detach().abs().amax([i for i in range(w.dim()) if i != axis]) / limit).clamp(min=torch.finfo().eps)
    return torch.fake_quantize_per_channel_affine(w, scale, torch.zeros(len(scale)), axis, -limit, limit)


GATES = {"LSTM": ([0, 3, 1, 2], ""), "GRU": ([1, 0, 2], ", linear_before_reset=1"), "RNN": ([0], "")}


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", GATES)
def test_embeddings_and_recurrences_train_as_in_pytorch(kind, directions, native):
    torch.manual_seed(0)
    table, head = torch.randn(9, 6, requires_grad=True), torch.randn(4 * directions, 3, requires_grad=True)
    cell = getattr(torch.nn, kind)(6, 4, bidirectional=directions == 2)
    order, attributes = GATES[kind]
    ends = ["", "_reverse"][:directions]

    def onnx_order(x):
        return torch.cat([x.chunk(len(order))[i] for i in order])

    def stacked(name):
        return torch.stack([onnx_order(getattr(cell, f"{name}_l0{end}")) for end in ends])

    weights = {"w": stacked("weight_ih"), "r": stacked("weight_hh"), "table": table, "v": head}
    way = "bidirectional" if directions == 2 else "forward"
    weights["b"] = torch.cat([stacked("bias_ih"), stacked("bias_hh")], 1)
    proto = model(
        f"""g (int64[5,N] x) => (float[5,N,3] y) {{ e = Gather(table, x)
            h = {kind}<hidden_size=4, direction="{way}"{attributes}>(e, w, r, b)
            t = Transpose<perm=[0,2,1,3]>(h) shape = Constant<value=int64[3] {{5, -1, {4 * directions}}}>()
            f = Reshape(t, shape) y = MatMul(f, v) }}""",
        **{name: x.detach().numpy() for name, x in weights.items()},
    )
    tokens, target = RNG.integers(0, 9, (5, 8)), RNG.standard_normal((5, 8, 3)).astype(np.float32)
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.05)}
    step = graphopt.compile(proto, quantize=passes.FakeQuantize(activations=None), **steps)
    executor = graphopt.Executor(step, threads=1, native=native)
    found, expected = [], []
    descent = torch.optim.SGD([table, head, *cell.parameters()], 0.05)
    for _ in range(10):
        found.append(float(executor.step(x=tokens, target=target)["loss"]))
        own = dict(cell.named_parameters())
        for name in ("weight_ih_l0", "weight_hh_l0"):
            each = torch.stack([own[f"{name}{end}"] for end in ends])
            for end, w in zip(ends, rounded_in_pytorch(each, 0 if directions == 2 else 1), strict=True):
                own[f"{name}{end}"] = w
        rows = torch.nn.functional.embedding(torch.tensor(tokens), rounded_in_pytorch(table[None], 0)[0])
        states, _ = torch.func.functional_call(cell, own, rows)
        y = states @ rounded_in_pytorch(head, 1)
        loss = torch.nn.functional.mse_loss(y, torch.tensor(target))
        descent.zero_grad()
        loss.backward()
        descent.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(executor.state["table"], table.detach(), rtol=1e-5, atol=1e-6)
    proto = executor.trained()
    onnx.checker.check_model(proto, full_check=True)
    assert all(initializers(proto)[name].dtype == np.int8 for name in ("table", "w", "r", "v"))
    assert [node.op_type for node in proto.graph.node][:2] == ["Gather", "DequantizeLinear"]
    evaluated = run(simulated(executor), tokens, optimize=False)
    np.testing.assert_array_equal(run(proto, tokens, optimize=False), evaluated)
    np.testing.assert_allclose(run(proto, tokens), evaluated, atol=0.05)  # the runtime rounds what v multiplies
    floats = executor.trained(quantized=False)
    onnx.checker.check_model(floats, full_check=True)
    np.testing.assert_allclose(run(floats, tokens), evaluated, atol=0.1)


def test_learnt_scales_have_pytorchs_gradients():
    """Of `torch._fake_quantize_learnable_per_tensor_affine`, whose factor is 1 / sqrt(n 255)."""
    network = mlp((6, 3), "Relu")
    weights = initializers(network)
    executor = executor_of(network, X, T, "lsq", calibrate="percentile")
    low, high = float(X.min()), float(X.max())
    scale = torch.tensor([(high - low) / 255 * 0.6], requires_grad=True)
    executor.state = {**executor.state, "x.scale": np.array(0.6, np.float32)}
    zero = torch.tensor([float(np.rint(-low / np.float32((high - low) / 255)))])
    factor = 1 / np.sqrt(6 * 255)
    x = torch._fake_quantize_learnable_per_tensor_affine(torch.tensor(X), scale, zero, 0, 255, factor)
    w, b = torch.tensor(weights["fc0.weight"]), torch.tensor(weights["fc0.bias"])
    steps = w.abs().amax(1) / 127
    w = torch.fake_quantize_per_channel_affine(w, steps, torch.zeros(3), 0, -127, 127)
    b = torch.round(b / (steps * scale.detach())) * steps * scale.detach()
    loss = torch.nn.functional.mse_loss(torch.nn.functional.linear(x, w, b), torch.tensor(T))
    loss.backward()
    found = executor.step(x=X, target=T)["loss"]
    np.testing.assert_allclose(found, loss.item(), rtol=1e-6)
    moved = executor.state["x.scale"] - np.float32(0.6)
    np.testing.assert_allclose(moved, -0.05 * scale.grad.numpy()[0] * (high - low) / 255, rtol=1e-3)


@pytest.mark.parametrize(("weights", "kind"), [("int4", "parameter"), ("int8", "statistic")])
def test_scales_train_beside_weights_of_4_bits_and_follow_batches_beside_8(weights, kind):
    step = step_of(mlp((6, 3), "Relu"), X, T, "auto", weights=weights)
    names = {x.name for x in with_role(step, Role(kind))}
    assert ("x.scale" in names, "x.low" in names) == (kind == "parameter", kind == "statistic")


def test_learnt_scales_have_a_free_name():
    proto = model(
        "g (float[N,6] x) => (float[N,3] y) { h = MatMul(x, w) r = Mul(h, 'x.scale') y = MatMul(r, v) }".replace(
            "'", '"'
        ),
        **{"w": normal(6, 8), "x.scale": normal(8), "v": normal(8, 3)},
    )
    executor = executor_of(proto, X, T, "lsq")
    assert {"x.scale", "x.scale.1"} <= executor.parameters.keys()
    executor.step(x=X, target=T)
    found = executor.trained()
    np.testing.assert_array_equal(run(found, X, optimize=False), run(simulated(executor), X, optimize=False))
    assert initializers(found)["x.scale"].shape == (8,)


@pytest.mark.parametrize(
    "other", ["y = MatMul(f, v)", "u = Transpose(p) m = MatMul(x, u) g = MatMul(m, n) k = MatMul(f, v) y = Add(g, k)"]
)
def test_gates_that_pytorchs_exporter_sorts_are_rounded_before(other):
    """But those that another operator reads, too, as it also is with other weights."""
    order = " ".join(f"i{k} = Slice(p, a{k}, a{k + 1}, zero)" for k in (0, 3, 1, 2))
    proto = model(
        f"""g (float[5,N,6] x) => (float[5,N,3] y) {{
            {" ".join(f"a{k} = Constant<value=int64[1] {{{4 * k}}}>()" for k in range(5))}
            zero = Constant<value=int64[1] {{0}}>() one = Constant<value=int64[1] {{1}}>() {order}
            c = Concat<axis=0>(i0, i3, i1, i2) w = Unsqueeze(c, zero) h = LSTM<hidden_size=4>(x, w, r)
            f = Squeeze(h, one) {other} }}""",
        **{"p": normal(16, 6), "r": normal(1, 16, 4), "v": normal(4, 3)},
        **({"n": normal(16, 3)} if "Transpose" in other else {}),
    )
    rows, target = RNG.standard_normal((5, 8, 6)).astype(np.float32), np.zeros((5, 8, 3), np.float32)
    executor = executor_of(proto, rows, target)
    losses = [float(executor.step(x=rows, target=target)["loss"]) for _ in range(3)]
    assert losses[-1] < losses[0]
    found = executor.trained()
    kinds = {name: x.dtype for name, x in initializers(found).items()}
    assert (kinds["r"], kinds["v"], kinds["p"]) == (np.int8, np.int8, np.float32 if "Transpose" in other else np.int8)
    assert "Transpose" in other or initializers(found)["p.scale"].shape == (16,)
    expected = run(simulated(executor), rows, optimize=False)
    np.testing.assert_array_equal(run(found, rows, optimize=False), expected)


def test_what_a_weight_is_made_of_is_looked_through_once():
    """Each of 40 parts is read twice: 2 ** 40 ways lead to the weight."""
    parts = " ".join(f"c{i} = Concat<axis=0>(w{i}, w{i}) w{i + 1} = Slice(c{i}, zero, end, zero)" for i in range(40))
    proto = model(
        f"""g (float[5,N,3] x) => (float[5,1,N,4] y) {{
            {parts} w = Unsqueeze(w40, zero) y = RNN<hidden_size=4>(x, w, r) }}""",
        **{"w0": normal(4, 3), "r": normal(1, 4, 4), "zero": np.array([0]), "end": np.array([4])},
    )
    fake = passes.FakeQuantize(activations=None)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1), quantize=fake)
    rows, target = normal(5, 2, 3).astype(np.float32), np.zeros((5, 1, 2, 4), np.float32)
    executor = graphopt.Executor(step)
    executor.step(x=rows, target=target)
    assert initializers(executor.trained())["w0"].dtype == np.int8


@pytest.mark.parametrize("ends", ["g = Flatten(p) h = Dropout(g, half)", "g = Dropout(p, half) h = Flatten(g)"])
@pytest.mark.parametrize("training", [passes.TrainingMode(), None])
def test_what_a_dropout_passes_is_rounded_once(training, ends, tmp_path):
    proto = model(
        f"""g (float[N,3,8,8] x) => (float[N,3] y) {{
            c = Conv(x, w, b) r = Relu(c) half = Constant<value=float {{0.5}}>() d = Dropout(r, half)
            e = Conv(d, v) f = Relu(e) p = GlobalAveragePool(f) {ends} y = Gemm(h, u, a) }}""",
        **{
            "w": normal(4, 3, 3, 3),
            "b": normal(4),
            "v": normal(5, 4, 3, 3),
            "u": normal(5, 3),
            "a": normal(3),
        },
    )
    executor = executor_of(proto, IMAGES, T[:24], steps={"training": training})
    executor.step(x=IMAGES, target=T[:24])
    found = executor.trained()
    assert collections.Counter(node.op_type for node in found.graph.node)["QuantizeLinear"] == 5
    expected = run(simulated(executor), IMAGES, optimize=False)
    np.testing.assert_array_equal(run(found, IMAGES, optimize=False), expected)
    counts = kernels(found, tmp_path)
    assert (counts["QLinearConv"], counts["QGemm"], counts["Conv"], counts["Gemm"]) == (2, 1, 0, 0)


COMPOSED = {
    "accumulated": {"accumulate": passes.Accumulate(2)},
    "recomputed": {"recompute": passes.Recompute()},
    "16 bits": {"precision": passes.MixedPrecision()},
    "penalty and clipping": {"regularizer": passes.L2(1e-3), "clip": passes.ClipGlobalNorm(0.1)},
    "averages": {"average": passes.EMA(0.9)},
    "frozen": {"parameters": passes.Parameters(freeze="*.bias", unfreeze="layers.0.*")},
    "standardized": {"standardize": passes.Standardize(0.5, 2.0)},
}


@pytest.mark.parametrize("steps", COMPOSED)
def test_the_file_is_exact_with_other_passes(steps):
    executor, rows = trained("cnn", steps=COMPOSED[steps])
    expected = run(simulated(executor), rows, optimize=False)
    np.testing.assert_array_equal(run(executor.trained(), rows, optimize=False), expected)


ADAPTED = {
    "int8": ({}, "ema"),
    "int4 in blocks": OPTIONS["int4 in blocks"],
    "norms beside learnt scales": ({}, "lsq"),
}


@pytest.mark.parametrize("options", ADAPTED)
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "attention"])
def test_weights_are_rounded_with_their_adapters(name, options, tmp_path):
    chosen, observer = ADAPTED[options]
    lora = passes.LoRA(None if name == "mlp" else "*w*", rank=2, alpha=2, dora=options.startswith("norms"))
    if name == "residual":
        lora = passes.LoRA(["w0", "w2", "w3"], rank=2, alpha=2, dora=lora.dora)
    executor, rows = trained(name, observer, {"adapter": lora}, count=0, **chosen)
    before = {x.op_type for x in executor.trained().graph.node}
    target = np.tanh(RNG.standard_normal((len(rows), *NETWORKS[name][2]))).astype(np.float32)
    losses = [float(executor.step(x=rows, target=target)["loss"]) for _ in range(6)]
    assert losses[-1] < losses[0]
    proto = executor.trained()
    onnx.checker.check_model(proto, full_check=True)
    assert {x.op_type for x in proto.graph.node} == before
    assert not any(".lora_" in name for name in initializers(proto))
    expected = run(simulated(executor), rows, optimize=False)
    np.testing.assert_array_equal(run(proto, rows, optimize=False), expected)
    np.testing.assert_allclose(executor.predict(x=rows)["y"], expected, atol=1e-5)
    if name == "mlp" and options == "int8":
        assert kernels(proto, tmp_path)["QGemm"] == 3
        floats, first = (initializers(x) for x in (executor.trained(quantized=False), mlp((6, 16, 8, 3), "Relu")))
        down, up = (executor.state[f"fc0.weight.lora_{x}"] for x in "AB")
        merged = first["fc0.weight"] + (down @ up).T
        np.testing.assert_allclose(floats["fc0.weight"], merged, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(floats["fc2.weight"], first["fc2.weight"])


def test_the_command_writes_a_calibrated_file_without_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["graphopt"])
    onnx.save(mlp((6, 16, 3), "Relu"), "my.onnx")
    labels = T.argmax(1)
    np.savez("rows.npz", x=X, target=labels)
    given = [
        "my.onnx",
        "data=npz",
        "data.path=rows.npz",
        "fit.epochs=0",
        "fit.shuffle=false",
        "schedule=cosine",
    ]
    assert cli.main([*given, "quantize=int8", "folder=out"]) == 0
    (record,) = (json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines())
    y = run(onnx.load("out/trained.onnx"), X[-10:], optimize=False)
    assert record["accuracy"] == pytest.approx((y.argmax(1) == labels[-10:]).mean())
    found = initializers(onnx.load("out/trained.onnx"))
    assert found["fc0.weight"].dtype == np.int8
    assert found["x.scale"] == pytest.approx((max(X[:-10].max(), 0) - min(X[:-10].min(), 0)) / 255)
    assert cli.main([*given, "quantize=none,int8", "folder=both", "-m"]) == 0
    assert [json.loads(Path(f"both/{i}/result.json").read_text())["epoch"] for i in range(2)] == [0, 0]


@pytest.mark.parametrize("quantize", ["int8", "int8_lsq"])
def test_evaluation_of_a_run_is_that_of_its_file(quantize, tmp_path, monkeypatch):
    """Ranges that have moved, and scales that have trained, are not in trained.onnx as they train."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["graphopt"])
    onnx.save(mlp((6, 16, 3), "Relu"), "my.onnx")
    np.savez("rows.npz", x=X, target=np.tanh(T))
    given = [
        "my.onnx",
        "data=npz",
        "data.path=rows.npz",
        "fit.epochs=2",
        "fit.shuffle=false",
        "fit.export=last",
    ]
    given += ["optimizer.learning_rate=0.05", "loss=mean_squared_error", "folder=out", f"quantize={quantize}"]
    assert cli.main([*given, "quantize.momentum=0.5"]) == 0
    record = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    monkeypatch.setattr(sys, "argv", ["graphopt"])
    assert cli.main(["evaluate", "out"]) == 0
    assert json.loads(Path("out/metrics.json").read_text())["loss"] == pytest.approx(record["validation_loss"])
    y = run(onnx.load("out/trained.onnx"), X[-10:], optimize=False)
    assert np.square(y - np.tanh(T[-10:])).mean() == pytest.approx(record["validation_loss"], rel=1e-4)


def test_a_distilled_file_is_exact(tmp_path):
    teacher = str(tmp_path / "teacher.onnx")
    graphopt.save(models.cnn((3, 8, 8), 3, channels=(8,), seed=1), teacher)
    labels = RNG.integers(0, 3, len(IMAGES))
    executor = executor_of(NETWORKS["cnn"][0](), IMAGES, labels, steps={"loss": passes.Distillation(teacher)})
    executor.step(x=IMAGES, target=labels)
    expected = run(simulated(executor), IMAGES, optimize=False)
    np.testing.assert_array_equal(run(executor.trained(), IMAGES, optimize=False), expected)


def test_folding_keeps_what_the_model_computes():
    proto = model(
        """g (float[N,3,8,8] x) => (float[N,4] y) {
            a = Conv(x, w0) b = BatchNormalization<epsilon=0.01>(a, ng, ns, nm, nv)
            c = ConvTranspose<group=2>(b, w1, b1) d = BatchNormalization(c, og, os, om, ov)
            p = GlobalAveragePool(d) f = Flatten(p) h = Gemm<alpha=0.5>(f, w2) i = BatchNormalization(h, pg, ps, pm, pv)
            k = MatMul(i, w3) y = BatchNormalization(k, qg, qs, qm, qv) }""",
        **{
            "w0": normal(6, 3, 3, 3),
            "w1": normal(6, 2, 3, 3),
            "b1": normal(4),
            "w2": normal(4, 5),
            "w3": normal(5, 4),
        },
        **{**norm("n", 6), **norm("o", 4), **norm("p", 5), **norm("q", 4)},
    )
    loaded = graphopt.load(proto)
    passes.FoldBatchNormalization()(loaded)
    assert not any(node.op_type == "BatchNormalization" for node in loaded.graph)
    np.testing.assert_allclose(run(loaded, IMAGES), run(proto, IMAGES), rtol=1e-4, atol=1e-5)


def test_a_normalization_after_a_bias_of_zeros_that_is_expanded_is_folded(tmp_path):
    """As PyTorch exports a convolution without a bias before a BatchNormalization."""
    proto = model(
        """g (float[N,3,8,8] x) => (float[N,2] y) {
            zero = Constant<value=float[1] {0}>() size = Constant<value=int64[1] {4}>() z = Expand(zero, size)
            c = Conv(x, w, z) n = BatchNormalization(c, ng, ns, nm, nv) r = Relu(n)
            m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r) d = Conv<strides=[3,3]>(m, u) f = Flatten(d)
            y = Gemm(f, v) }""",
        **{"w": normal(4, 3, 3, 3), "u": normal(5, 4, 1, 1), "v": normal(5, 2)},
        **norm("n", 4),
    )
    executor = executor_of(proto, IMAGES, np.zeros((len(IMAGES), 2), np.float32))
    counts = kernels(executor.trained(), tmp_path)
    assert (counts["BatchNormalization"], counts["QLinearConv"]) == (0, 2)
    assert OLD or counts["QuantizeLinear"] == 1
    floats = executor.trained(quantized=False)
    np.testing.assert_allclose(run(floats, IMAGES), run(proto, IMAGES), rtol=1e-4, atol=1e-5)


def test_ranges_of_means_have_names_that_the_file_s_other_values_do_not_change():
    """In files that PyTorch exports, `val_N` compute the axes of a mean, as values without a name are called."""
    axes = """val_0 = Constant<value=int64[2] {2, 3}>() val_1 = Constant<value=int64[1] {2}>()
            axes = Reshape(val_0, val_1)"""
    proto = model(
        f"""g (float[N,3,8,8] x) => (float[N,2] y) {{
            c = Conv(x, w) {axes} p = ReduceMean<keepdims=0>(c, axes) y = Gemm(p, v) }}""",
        **{"w": normal(4, 3, 3, 3), "v": normal(4, 2)},
    )
    step = step_of(proto, IMAGES, np.zeros((len(IMAGES), 2), np.float32))
    assert "p/pooled.low" in step.graph.initializers


def test_a_normalization_that_something_else_feeds_stays():
    proto = model(
        """g (float[N,3,8,8] x) => (float[N,2,6,6] y) {
            a = Conv(x, w) b = BatchNormalization(a, ng, ns, nm, nv) y = Add(a, b) }""",
        w=normal(2, 3, 3, 3),
        **norm("n", 2),
    )
    loaded = graphopt.load(proto)
    passes.FoldBatchNormalization()(loaded)
    assert [node.op_type for node in loaded.graph] == ["Conv", "BatchNormalization", "Add"]


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_with_weights_in_blocks_becomes_a_product_of_few_bits(transposed, tmp_path):
    proto = model(
        f"""g (float[N,64] x) => (float[N,3] y) {{
            a = Gemm<transB={transposed}>(x, w, b) r = Relu(a) y = Gemm<transB={transposed}>(r, v, c) }}""",
        **{"w": normal(32, 64).T if not transposed else normal(32, 64), "b": normal(32), "c": normal(3)},
        v=normal(3, 32).T if not transposed else normal(3, 32),
    )
    rows = RNG.standard_normal((8, 64)).astype(np.float32)
    executor = executor_of(proto, rows, T[:8], weights="int4", block=16, activations=None)
    executor.step(x=rows, target=T[:8])
    found = executor.trained()
    assert OLD or kernels(found, tmp_path)["MatMulNBits"] == 2
    expected = run(simulated(executor), rows, optimize=False)
    np.testing.assert_array_equal(run(found, rows, optimize=False), expected)
    assert initializers(executor.trained(quantized=False))["w"].shape == ((32, 64) if transposed else (64, 32))


def test_ranges_move_only_while_they_are_not_frozen():
    executor = executor_of(mlp((6, 3), "Relu"), X, T, freeze_after=2, momentum=0.5)
    highs = []
    for i in range(4):
        executor.step(x=(2 + i) * X, target=T)
        highs.append(float(executor.state["x.high"]))
    start = float(X.max())
    expected = [1.5 * start, 2.25 * start, 2.25 * start, 2.25 * start]
    np.testing.assert_allclose(highs, expected, rtol=1e-6)


@pytest.mark.parametrize("method", ["percentile", "entropy"])
def test_calibration_leaves_out_outliers(method):
    rows = np.concatenate([X] * 200)
    rows[0, 0] = 1000
    targets = np.concatenate([T] * 200)
    executor = executor_of(mlp((6, 3), "Relu"), rows[:2048], targets[:2048], None, calibrate=method)
    (scale,) = (x for name, x in initializers(executor.trained()).items() if name == "x.scale")
    assert scale < 1000 / 255 if method == "entropy" else scale < 1010 / 255


@pytest.mark.parametrize(("opset", "weights"), [(13, "int8"), (20, "int8"), (17, "int4")])
def test_the_file_has_the_opset_that_it_had_unless_its_integers_need_a_newer_one(opset, weights):
    proto = model(
        "g (float[N,6] x) => (float[N,3] y) { h = Gemm(x, w, b) r = Relu(h) y = MatMul(r, v) }",
        opset=opset,
        **{"w": normal(6, 8), "b": normal(8), "v": normal(8, 3)},
    )
    executor = executor_of(proto, X, T, weights=weights)
    executor.step(x=X, target=T)
    found = executor.trained()
    assert found.opset_import[0].version == (opset if weights == "int8" else 21)
    expected = run(simulated(executor), X, optimize=False)
    np.testing.assert_array_equal(run(found, X, optimize=False), expected)


def test_outputs_that_other_products_read_stay_outputs():
    proto = model(
        """g (float[N,3,8,8] x) => (float[N,4,8,8] c, float[N,4,4,4] p, float[N,3,4,4] y) {
            c = Conv<pads=[1,1,1,1]>(x, w, b) p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(c) y = Conv(p, v) }""",
        **{"w": normal(4, 3, 3, 3), "b": normal(4), "v": normal(3, 4, 1, 1)},
    )
    arrays = {"x": IMAGES, "target": np.tanh(normal(24, 3, 4, 4)).astype(np.float32)}
    steps = {"loss": passes.MeanSquaredError(output="y"), "optimizer": passes.SGD(0.05)}
    pipeline = graphopt.standard(quantize=passes.FakeQuantize(), **steps)
    executor = graphopt.Executor(graphopt.adapt(pipeline, proto, arrays, validation=None)(proto), native=False)
    executor.step(arrays)
    found = outputs(executor.trained(), arrays, optimize=False)
    expected = outputs(simulated(executor), arrays, optimize=False)
    assert [*found] == ["c", "p", "y"]
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])


def test_products_that_share_a_bias_have_integers_of_their_own():
    proto = model(
        """g (float[N,6] x) => (float[N,4] y) { h = Gemm(x, w, b) r = Relu(h) i = Gemm(r, v, b) j = Relu(i)
            y = Gemm(j, u, c) }""",
        **{"w": normal(6, 4), "v": normal(4, 4), "b": normal(4), "u": normal(4, 4), "c": normal(4)},
    )
    executor = executor_of(proto, X, np.tanh(normal(48, 4)).astype(np.float32))
    found = executor.trained()
    whole = {name for name, x in initializers(found).items() if x.dtype == np.int32}
    assert whole == {"b.integers", "b.integers.1", "c"}
    np.testing.assert_array_equal(run(found, X, optimize=False), run(simulated(executor), X, optimize=False))


TIED = {
    "its transpose": "t = Transpose<perm=[1,0]>(w) y = MatMul(r, t)",
    "all of it": "y = Gemm<transB=1>(r, w)",
    "its columns": "y = MatMul(r, w)",
}


@pytest.mark.parametrize("head", TIED)
@pytest.mark.parametrize("options", ["int8", "int4"])
def test_a_tied_table_is_rounded_once_and_trains_as_in_pytorch(head, options, tmp_path):
    rng = np.random.default_rng(0)
    rows = "s = Transpose<perm=[1,0]>(w) e = Gather(s, x)" if head == "its columns" else "e = Gather(w, x)"
    proto = model(
        f"g (int64[N] x) => (float[N,9] y) {{ {rows} h = Gemm(e, v, b) r = Tanh(h) {TIED[head]} }}",
        **{
            "w": normal(6, 9, rng=rng) if head == "its columns" else normal(9, 6, rng=rng),
            "v": normal(6, 6, rng=rng),
            "b": normal(6, rng=rng),
        },
    )
    ranges = {"e": (-2.0, 2.1), "r": (-1.0, 1.1)} if options == "int8" else None
    quantize = passes.FakeQuantize(
        weights=options, ranges=ranges, observer=None, activations="uint8" if ranges else None, block=None
    )
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    executor = graphopt.Executor(graphopt.compile(proto, quantize=quantize, **steps), threads=1, native=False)
    x, target = rng.integers(0, 9, 32), rng.integers(0, 9, 32)
    own = {name: torch.tensor(array, requires_grad=True) for name, array in initializers(proto).items()}
    scales = {
        name: ((ends[1] - ends[0]) / 255, round(-ends[0] / (ends[1] - ends[0]) * 255))
        for name, ends in (ranges or {}).items()
    }
    descent, found, expected = torch.optim.SGD(own.values(), 0.1), [], []
    for _ in range(5):
        found.append(float(executor.step(x=x, target=target)["loss"]))
        table = rounded_in_pytorch(own["w"][None], 0)[0]
        table = table.T if head == "its columns" else table
        v, b = rounded_in_pytorch(own["v"], 1, 127 if ranges else 7), own["b"]
        e = table[torch.tensor(x)]
        if ranges:
            e = torch.fake_quantize_per_tensor_affine(e, *scales["e"], 0, 255)
            step = scales["e"][0] * own["v"].detach().abs().amax(0) / 127
            b = b + (torch.round(b / step) * step - b).detach()
        r = torch.tanh(e @ v + b)
        r = torch.fake_quantize_per_tensor_affine(r, *scales["r"], 0, 255) if ranges else r
        loss = torch.nn.functional.cross_entropy(r @ table.T, torch.tensor(target))
        descent.zero_grad()
        loss.backward()
        descent.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(executor.state["w"], own["w"].detach(), rtol=1e-5, atol=1e-6)
    found = executor.trained()
    onnx.checker.check_model(found, full_check=True)
    assert initializers(found)["w"].dtype == np.int8
    assert initializers(found)["w"].shape == initializers(proto)["w"].shape
    evaluated = run(simulated(executor), x, optimize=False)
    np.testing.assert_array_equal(run(found, x, optimize=False), evaluated)
    np.testing.assert_allclose(run(found, x), evaluated, atol=0.05)
    if ranges and not OLD:
        counts = kernels(found, tmp_path)
        assert (counts["QGemm"] + counts["MatMulIntegerToFloat"], counts["MatMul"] + counts["Gemm"]) == (2, 0), counts
    floats = run(executor.trained(quantized=False), x)
    np.testing.assert_allclose(floats, evaluated, atol=0.3)


def test_a_product_by_a_tied_table_whose_bias_stays_in_floats_has_no_integer_kernel(tmp_path):
    proto = model(
        "g (int64[N] x) => (float[N,9] y) { e = Gather(w, x) r = Tanh(e) y = Gemm<transB=1>(r, w, c) }",
        **{"w": normal(9, 6), "c": normal(9)},
    )
    quantize = passes.FakeQuantize(ranges={"r": (-1.0, 1.1)})
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    executor = graphopt.Executor(graphopt.compile(proto, quantize=quantize, **steps), threads=1)
    assert ("Gemm", "float: its bias stays in floats") in [row[1:] for row in placement.kernels(executor.model.graph)]
    if not OLD:
        counts = kernels(executor.trained(), tmp_path)
        assert (counts["QGemm"], counts["Gemm"]) == (0, 1), counts


@pytest.mark.parametrize("other", ["k = Mul(w, w)", "k = Identity(w)", "k = Gather<axis=1>(w, zero)"])
def test_a_table_that_something_else_reads_stays_in_float(other):
    """Its transpose is no activation either."""
    proto = model(
        f"""g (int64[N] x) => (float[N,5] y, float[A,B] k) {{ zero = Constant<value=int64[1] {{0}}>() e = Gather(w, x)
            h = MatMul(e, v) t = Transpose<perm=[1,0]>(w) y = MatMul(h, t) {other} }}""",
        **{"w": normal(5, 4), "v": normal(4, 4)},
    )
    loaded = graphopt.load(proto)
    passes.FakeQuantize(ranges={"e": (-1.0, 1.0)})(loaded)
    rounded = {node.inputs[0].name for node in loaded.graph if node.op_type == "QuantizeLinear"}
    assert rounded == {"e", "v"}


def test_a_table_of_columns_stays_in_float():
    proto = model(
        """g (int64[6] x) => (float[6,3] y) { e = Gather<axis = 1>(w, x) t = Transpose<perm = [1, 0]>(e)
            y = MatMul(t, v) }""",
        w=normal(6, 6),
        v=normal(6, 3),
    )
    arrays = {"x": np.array([3, 1, 1, 0, 5, 2]), "target": np.arange(6) % 3}
    quantize = passes.FakeQuantize(activations=None)
    step = graphopt.compile(proto, quantize=quantize, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.0))
    found = graphopt.run(graphopt.Executor(step, threads=1).trained(), {"x": arrays["x"]})["y"]
    np.testing.assert_allclose(found, graphopt.run(proto, {"x": arrays["x"]})["y"], atol=0.1)


def test_kernels_compute_rounding_with_what_is_around_it():
    executor, _ = trained("cnn", count=0)
    kernels = plan(executor.model)
    assert not any("QuantizeLinear" in node.op_type for node in kernels.model.graph)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [None, False, True])
def test_kernels_train_as_the_runtime_does(dora):
    steps = {} if dora is None else {"adapter": passes.LoRA(rank=2, dora=dora), "optimizer": passes.AdamW(0.01)}
    step = step_of(mlp((6, 16, 8, 3), "Relu"), X, T, steps=steps)
    one, other = (graphopt.Executor(step, threads=1, native=native) for native in (False, True))
    for _ in range(5):
        first, second = (each.step(x=X, target=T)["loss"] for each in (one, other))
        np.testing.assert_allclose(first, second, rtol=1e-5)
    np.testing.assert_allclose(other.predict(x=X)["y"], run(other.trained(), X, optimize=False), atol=1e-5)


def test_the_report_names_integer_kernels_and_what_stops_them():
    proto = branches()
    pipeline = graphopt.standard(
        quantize=passes.FakeQuantize(leave_out="w3"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    arrays = {"x": IMAGES, "target": np.abs(T[:24])}
    lines = report(proto, graphopt.adapt(pipeline, proto, arrays, validation=None)).summary().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("integers"))
    assert [" ".join(line.split()) for line in lines[start : start + 6]] == [
        "integers 3 of 5 products by ONNX Runtime's integer kernels",
        "w0 Conv QLinearConv",
        "w1 Conv QLinearConv",
        "w2 ConvTranspose float: the runtime has no integer kernel for ConvTranspose",
        "w3 Conv float: its second factor stays in floats: it is no weight of its own, or is left out",
        "w4 MatMul QLinearMatMul",
    ]


def test_sensitivity_is_the_change_when_one_product_alone_is_rounded():
    proto, arrays = mlp((6, 8, 3), "Relu"), {"x": X, "target": T}
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    pipeline = graphopt.standard(quantize=passes.FakeQuantize(weights="int4"), **steps)
    pipeline = graphopt.adapt(pipeline, proto, arrays, validation=None)
    result = report(proto, pipeline)
    lines = [*sensitivity(result, pipeline, lambda model: iter([outputs(model, {"x": X})]))]
    found = {name: float(error) for error, name in map(str.split, lines[1:])}
    (learnt,) = pipeline["quantize"]
    alone = graphopt.load(proto)
    passes.FakeQuantize("int4", pattern="fc1.*", ranges={"a0": learnt.ranges["a0"]})(alone)
    y, rounded = run(proto, X), run(alone, X)
    expected = np.linalg.norm(y - rounded) / np.linalg.norm(y)
    assert found["fc1.weight"] == pytest.approx(expected, rel=0.01)
    assert found.keys() == {"fc0.weight", "fc1.weight"}


@pytest.mark.parametrize("call", messages.calls("fake_quantize_mistakes"))
def test_mistakes(call):
    messages.refused("fake_quantize_mistakes", call, globals())
