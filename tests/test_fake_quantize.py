"""Models train with simulated integers, and their files in integers compute what the training graph evaluates."""

from __future__ import annotations

import collections
import warnings

import messages
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from builders import mlp, model
from onnx import numpy_helper
from steps import outputs

import graphopt
import passes
from graphopt import data, models
from graphopt.graph import inference

RNG = np.random.default_rng(5)
X = RNG.standard_normal((48, 6)).astype(np.float32)
T = RNG.standard_normal((48, 3)).astype(np.float32)
IMAGES = RNG.standard_normal((24, 3, 8, 8)).astype(np.float32)


def normal(*shape, scale=0.4):
    return RNG.standard_normal(shape) * scale


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
            e = Conv(q, w2, b2) a = Add(e, r) f = Relu(a) p = GlobalAveragePool(f) v = Flatten(p)
            y = Gemm<transB=1>(v, w3, b3) }""",
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
FOLD = passes.FoldBatchNormalization()


def executor_of(network, rows, target, observer="ema", steps=None, **options):
    """Return an executor of a fake-quantized network whose ranges are those of the rows."""
    pipeline = graphopt.standard(
        quantize=[FOLD, passes.FakeQuantize(**options)],
        training=passes.TrainingMode(observer=observer),
        **{"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.05), **(steps or {})},
    )
    arrays = {"x": rows, "target": target}
    step = graphopt.adapt(pipeline, network, arrays, validation=None, shuffle=False)(network)
    return graphopt.Executor(step, threads=1, native=False)


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
