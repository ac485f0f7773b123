"""Weights that a file stores in few bits train by float32 masters, and return to the form of the file."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from builders import mlp, model
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat
from steps import outputs

import graphopt
import passes
from graphopt.graph.roles import Role, with_role
from graphopt.inspection.report import report

RNG = np.random.default_rng(4)
X = RNG.standard_normal((16, 6)).astype(np.float32)
T = RNG.standard_normal((16, 3)).astype(np.float32)


def initializers(proto):
    return {x.name: numpy_helper.to_array(x) for x in proto.graph.initializer}


def as_written(proto, x=X):
    """Return the output of a file in ONNX Runtime without optimizations."""
    return next(iter(outputs(proto, {"x": x}, optimize=False).values()))


WEIGHTS = {"w": (6, 5), "b": (5,), "v": (5, 3)}
NARROW = {
    "float16": (np.float16, torch.float16),
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16),
}


def narrow(dtype):
    """Return a network whose weights are stored in 16 bits and which computes in float32."""
    stored = {name: RNG.standard_normal(shape) / 2 for name, shape in WEIGHTS.items()}
    casts = "\n".join(f"{name}32 = Cast<to=1>({name})" for name in WEIGHTS)
    proto = model(
        f"""g (float[N,6] x) => (float[N,3] y) {{ {casts}
            h = MatMul(x, w32) a = Add(h, b32) r = Tanh(a) y = MatMul(r, v32) }}"""
    )
    kind = {np.float16: onnx.TensorProto.FLOAT16, ml_dtypes.bfloat16: onnx.TensorProto.BFLOAT16}[dtype]
    for name, numbers in stored.items():
        raw = numbers.astype(dtype).tobytes()
        proto.graph.initializer.append(helper.make_tensor(name, kind, numbers.shape, raw, raw=True))
    return proto


class Rounded(torch.autograd.Function):
    """Round to another type; the gradient passes."""

    @staticmethod
    def forward(ctx, w, dtype):
        return w.to(dtype).float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


OPTIMIZERS = {
    "SGD": (passes.SGD(2e-4), lambda p: torch.optim.SGD(p, 2e-4)),
    "AdamW": (passes.AdamW(1e-5), lambda p: torch.optim.AdamW(p, 1e-5)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", NARROW)
def test_weights_of_16_bits_train_as_pytorchs_with_float32_masters(kind, optimizer):
    numpy_type, torch_type = NARROW[kind]
    proto = narrow(numpy_type)
    ours, theirs = OPTIMIZERS[optimizer]
    executor = graphopt.Executor(graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=ours), threads=1)
    start = {name: x.astype(np.float32) for name, x in initializers(proto).items()}
    masters = {name: torch.tensor(x, requires_grad=True) for name, x in start.items()}
    updates = theirs(list(masters.values()))
    for _ in range(100):
        w, b, v = (Rounded.apply(masters[name], torch_type) for name in WEIGHTS)
        updates.zero_grad()
        loss = torch.nn.functional.mse_loss(torch.tanh(torch.tensor(X) @ w + b) @ v, torch.tensor(T))
        loss.backward()
        updates.step()
        np.testing.assert_allclose(executor.step(x=X, target=T)["loss"], loss.item(), rtol=5e-3)
    trained = executor.trained()
    for name, master in masters.items():
        moved = master.detach().numpy() - start[name]
        found = executor.parameters[name]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found - start[name], moved, rtol=0.02, atol=0.02 * np.abs(moved).max())
        stored = initializers(trained)[name]
        assert stored.dtype == numpy_type
        np.testing.assert_array_equal(stored, found.astype(numpy_type))
    np.testing.assert_array_equal(as_written(trained), executor.predict(x=X)["y"])
    assert [node.op_type for node in trained.graph.node] == [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize(
    "steps",
    [
        {"precision": passes.MixedPrecision("float16")},
        {"gradient": passes.Gradient(loss_scale=64.0), "loss_scale": passes.DynamicLossScale()},
        {"loss_scale": passes.DynamicLossScale()},
        {"accumulate": passes.Accumulate(2)},
        {"regularizer": passes.L2(1e-3), "clip": passes.ClipGlobalNorm(1.0)},
    ],
    ids=lambda steps: "+".join(steps),
)
def test_masters_resume_bit_for_bit_with_other_passes(steps, tmp_path):
    step = graphopt.compile(narrow(np.float16), loss=passes.MeanSquaredError(), optimizer=passes.AdamW(1e-3), **steps)
    one, other = graphopt.Executor(step, threads=1), graphopt.Executor(step, threads=1)
    for _ in range(3):
        one.step(x=X, target=T)
    one.save(tmp_path / "state")
    other.load(tmp_path / "state")
    for executor in (one, other):
        for _ in range(3):
            executor.step(x=X, target=T)
    for name, found in one.state.items():
        np.testing.assert_array_equal(found, other.state[name])
    assert {x.dtype for x in with_role(step, Role.PARAMETER, Role.SLOT)} <= {
        ir.DataType.FLOAT,
        ir.DataType.INT64,
    }
    assert {x.dtype for x in initializers(one.trained()).values()} == {np.dtype(np.float16)}


@pytest.mark.parametrize("optimizer", [passes.SGD(0.1, momentum=0.9), passes.AdamW(0.1)], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("code", [onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE])
def test_vectors_of_several_types_train_together(code, optimizer):
    proto = model(
        f"""g (float[N,3] x) => (float[N,2] y) {{
            h = Cast<to={code}>(x) k = Mul(h, a) s = Add(k, c) r = Cast<to=1>(s) q = MatMul(r, w) y = Add(q, b) }}""",
        b=np.array([1.0, 2.0]),
        w=np.arange(6.0).reshape(3, 2) / 4,
    )
    for name in ("a", "c"):
        proto.graph.initializer.append(helper.make_tensor(name, code, (3,), [1.0, 2.0, 0.5]))
    executor = graphopt.Executor(
        graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=optimizer), threads=1
    )
    x, t = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    before = executor.parameters
    executor.step(x=x, target=t)
    assert all(np.any(before[name] != found) for name, found in executor.parameters.items())
    types = {name: x.dtype for name, x in initializers(proto).items()}
    assert {name: x.dtype for name, x in initializers(executor.trained()).items()} == types


def test_files_for_hosts_predict_with_masters(tmp_path):
    step = graphopt.compile(mlp((6, 5, 3), dtype=np.float16), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    graphopt.export_hosts(step, tmp_path)
    expected = graphopt.Executor(step).predict(x=X.astype(np.float16))["y"]
    (found,) = graphopt.run(str(tmp_path / "inference.onnx"), {"x": X.astype(np.float16)}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


INTEGERS = {
    "int8": ("int8", -128, 127),
    "uint8": ("uint8", 0, 255),
    "int16": ("int16", -32768, 32767),
    "uint16": ("uint16", 0, 65535),
    "int4": ("int4", -8, 7),
    "uint4": ("uint4", 0, 15),
}
SCALES = {"tensor": ((), {}), "channel": ((3,), {"axis": 1}), "block": ((2, 3), {"axis": 0, "block_size": 3})}


def quantized(kind, scales, *, zero=True):
    """Return y = x w + b with integer weights, a bias of int32, and a quantized input."""
    _, low, high = INTEGERS[kind]
    rng = np.random.default_rng(1)
    shape, attributes = SCALES[scales]
    dtype = getattr(onnx.TensorProto, kind.upper())
    middle = (low + high + 1) // 2
    numbers = rng.integers(low, high + 1, (6, 3))
    scale = (rng.uniform(1, 2, shape) / (high - low)).astype(np.float32)
    options = ", ".join(f"{name}={value}" for name, value in attributes.items())
    point = ", wz" if zero else ""
    proto = model(
        f"""g (float[N,6] x) => (float[N,3] y) {{
            xq = QuantizeLinear(x, xs, xz) xf = DequantizeLinear(xq, xs, xz)
            wf = DequantizeLinear<{options}>(w, ws{point}) bf = DequantizeLinear<axis=0>(b, bs)
            h = MatMul(xf, wf) y = Add(h, bf) }}""".replace("<>", ""),
        xs=np.array(0.03),
        bs=np.array([0.001, 0.002, 0.003]),
        ws=scale,
    )
    proto.graph.initializer.extend(
        [
            helper.make_tensor("w", dtype, (6, 3), numbers.ravel()),
            helper.make_tensor("b", onnx.TensorProto.INT32, (3,), [100, -20, 3]),
            helper.make_tensor("xz", onnx.TensorProto.UINT8, (), [128]),
        ]
    )
    if zero:
        points = np.full(shape, middle)
        proto.graph.initializer.append(helper.make_tensor("wz", dtype, shape, points.ravel()))
    return proto


CASES = [(kind, scales, True) for kind in INTEGERS for scales in SCALES]
CASES += [("uint8", "tensor", False)]


@pytest.mark.parametrize(("kind", "scales", "zero"), CASES)
def test_integer_weights_train_and_return_as_integers(kind, scales, zero):
    proto = quantized(kind, scales, zero=zero)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.02))
    executor = graphopt.Executor(step, threads=1)
    assert set(executor.parameters) == {"w", "b"}
    np.testing.assert_array_equal(executor.predict(x=X)["y"], as_written(proto))
    untouched = initializers(executor.trained())
    for name, numbers in initializers(proto).items():
        np.testing.assert_array_equal(untouched[name], numbers)
        assert untouched[name].dtype == numbers.dtype
    losses = [executor.step(x=X, target=T)["loss"] for _ in range(60)]
    assert losses[-1] < losses[0]
    trained = executor.trained()
    onnx.checker.check_model(trained, full_check=True)
    assert sorted(node.op_type for node in trained.graph.node) == sorted(node.op_type for node in proto.graph.node)
    np.testing.assert_array_equal(as_written(trained), executor.predict(x=X)["y"])
    for name in ("xs", "xz", "ws", "bs"):
        np.testing.assert_array_equal(initializers(trained)[name], initializers(proto)[name])


def matmul_n_bits(*, symmetric, form):
    """Return a network whose products have weights of 4 bits, as ONNX Runtime's quantizer writes them."""
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    rng = np.random.default_rng(0)
    proto = model(
        "g (float[N,32] x) => (float[N,3] y) { h = MatMul(x, w) a = Add(h, b) r = Tanh(a) y = MatMul(r, v) }",
        w=rng.standard_normal((32, 32)) / 6,
        b=rng.standard_normal(32),
        v=rng.standard_normal((32, 3)) / 6,
    )
    made = quantizer.MatMulNBitsQuantizer(
        proto, block_size=16, is_symmetric=symmetric, quant_format=getattr(QuantFormat, form)
    )
    made.process()
    return made.model.model


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_of_blocks_train_and_return_as_the_file_has_them(symmetric, form):
    """Half of the scales of symmetric blocks are negative."""
    proto = matmul_n_bits(symmetric=symmetric, form=form)
    before = {name: x for name, x in initializers(proto).items() if name.endswith("_Q4")}
    scales = next(x for name, x in initializers(proto).items() if name.endswith("_scales"))
    assert (scales < 0).any() == symmetric
    parameters = passes.Parameters(unfreeze="*_Q4")
    executor = graphopt.Executor(
        graphopt.compile(proto, parameters=parameters, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)),
        threads=1,
    )
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    assert before.keys() <= executor.parameters.keys()
    untouched = initializers(executor.trained(into=proto))
    assert all(np.array_equal(untouched[name], numbers) for name, numbers in before.items())
    losses = [executor.step(x=x, target=T)["loss"] for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    trained = executor.trained(into=proto)
    assert trained.graph.node == proto.graph.node
    for name, numbers in before.items():
        found = initializers(trained)[name]
        assert (found.dtype, found.shape) == (numbers.dtype, numbers.shape)
        assert np.any(found != numbers)
    found = executor.predict(x=x)["y"]
    np.testing.assert_allclose(as_written(trained, x), found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_of_blocks_do_not_train_with_their_scales(symmetric):
    with pytest.raises(graphopt.GraphoptError, match="quantized weights or their scales to train, found both"):
        graphopt.compile(
            matmul_n_bits(symmetric=symmetric, form="QOperator"),
            parameters=passes.Parameters(unfreeze="*"),
            loss=passes.MeanSquaredError(),
        )


def test_a_file_with_the_runtimes_own_quantization_trains():
    proto = quantized("int8", "channel")
    proto.opset_import[0].version = 17
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.domain = "com.microsoft"
    executor = graphopt.Executor(
        graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.02)), threads=1
    )
    np.testing.assert_array_equal(executor.predict(x=X)["y"], as_written(proto))
    losses = [executor.step(x=X, target=T)["loss"] for _ in range(30)]
    assert losses[-1] < losses[0]
    assert initializers(executor.trained())["w"].dtype == np.int8
    np.testing.assert_array_equal(as_written(executor.trained()), executor.predict(x=X)["y"])


def test_integer_weights_train_as_pytorchs_fake_quantization():
    proto = quantized("int8", "tensor")
    found = initializers(proto)
    s = float(found["ws"])
    w = torch.tensor((found["w"].astype(np.float32)) * s, requires_grad=True)
    b = torch.tensor(found["b"] * found["bs"], requires_grad=True)
    zero = int(found["wz"])
    executor = graphopt.Executor(
        graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.02)), threads=1
    )
    optimizer = torch.optim.SGD([w, b], 0.02)
    x = torch.fake_quantize_per_tensor_affine(torch.tensor(X), 0.03, 128, 0, 255)
    steps = torch.tensor(found["bs"])
    for _ in range(30):
        rounded = b + (torch.round(b / steps) * steps - b).detach()
        y = x @ torch.fake_quantize_per_tensor_affine(w, s, zero, -128, 127) + rounded
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(y, torch.tensor(T))
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(executor.step(x=X, target=T)["loss"], loss.item(), rtol=1e-4)
    np.testing.assert_allclose(executor.parameters["w"], w.detach(), atol=1e-4)
    np.testing.assert_allclose(executor.parameters["b"], b.detach(), atol=1e-4)


def test_frozen_integer_weights_stay_as_they_are():
    proto = quantized("int8", "channel")
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters(freeze="w"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    executor = graphopt.Executor(step)
    assert set(executor.parameters) == {"b"}
    executor.step(x=X, target=T)
    np.testing.assert_array_equal(initializers(executor.trained())["w"], initializers(proto)["w"])


def test_a_quantized_convolution_before_a_pool_opens_and_learns():
    rng = np.random.default_rng(2)
    proto = model(
        """g (float[N,1,8,8] x) => (float[N,3] y) {
            xq = QuantizeLinear(x, s, z) xf = DequantizeLinear(xq, s, z) wf = DequantizeLinear(w, ws)
            c = Conv<pads=[1,1,1,1]>(xf, wf) r = Relu(c)
            rq = QuantizeLinear(r, s, z) rf = DequantizeLinear(rq, s, z)
            p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(rf)
            pq = QuantizeLinear(p, s, z) pf = DequantizeLinear(pq, s, z)
            f = Flatten(pf) y = MatMul(f, v) }""",
        s=np.array(0.03),
        ws=np.array(0.005),
        v=rng.standard_normal((128, 3)) / 10,
    )
    proto.graph.initializer.extend(
        [
            helper.make_tensor("z", onnx.TensorProto.INT8, (), [0]),
            helper.make_tensor("w", onnx.TensorProto.INT8, (8, 1, 3, 3), rng.integers(-100, 100, 72)),
        ]
    )
    step = graphopt.compile(proto, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.05))
    executor = graphopt.Executor(step, threads=1)
    x, t = rng.standard_normal((12, 1, 8, 8)).astype(np.float32), rng.integers(0, 3, 12)
    losses = [executor.step(x=x, target=t)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(as_written(executor.trained(), x), executor.predict(x=x)["y"], rtol=1e-4, atol=1e-5)


WHOLE = {  # as torchao's Int8WeightOnlyConfig is exported, and with the scale on the weight itself
    "of outputs": "h = MatMul(x, w) m = Mul(h, s) a = Add(m, b) r = Relu(a)"
    " i = MatMul(r, v) n = Mul(i, t) y = Add(n, c)",
    "of weights": "p = Mul(w, s) h = MatMul(x, p) a = Add(h, b) r = Relu(a)"
    " q = Mul(t, v) i = MatMul(r, q) y = Add(i, c)",
}


@pytest.mark.filterwarnings("ignore:the model file does not say")
@pytest.mark.parametrize("nodes", WHOLE.values(), ids=WHOLE)
def test_whole_numbers_in_floats_behind_a_scale_train_as_pytorchs_fake_quantization(nodes):
    """Their scales are constants, and whole numbers return."""
    weights = {"w": RNG.integers(-128, 128, (6, 8)), "v": RNG.integers(-128, 128, (8, 3))}
    weights |= {"s": RNG.uniform(1e-3, 4e-3, 8), "t": RNG.uniform(1e-3, 4e-3, (1, 3))}
    weights |= {"b": RNG.standard_normal(8), "c": RNG.standard_normal(3)}
    weights = {name: x.astype(np.float32) for name, x in weights.items()}
    proto = model(f"g (float[N,6] x) => (float[N,3] y) {{ {nodes} }}", **weights)
    executor = graphopt.Executor(
        graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)),
        threads=1,
        native=False,
    )
    assert set(executor.parameters) == {"w", "v", "b", "c"}
    before = initializers(executor.trained())
    assert all(np.array_equal(x, before[name]) for name, x in initializers(proto).items())
    own = {name: torch.tensor(x) for name, x in weights.items()}
    masters = [own[w] * own[s] for w, s in (("w", "s"), ("v", "t"))]
    trained = [x.requires_grad_() for x in (*masters, own["b"], own["c"])]
    descent = torch.optim.SGD(trained, 0.1)
    for _ in range(8):
        w, v = (
            torch.fake_quantize_per_channel_affine(m, own[s].ravel(), torch.zeros(m.shape[1]), 1, -128, 127)
            for m, s in zip(masters, "st", strict=True)
        )
        y = torch.relu(torch.tensor(X) @ w + own["b"]) @ v + own["c"]
        loss = torch.nn.functional.mse_loss(y, torch.tensor(T))
        descent.zero_grad()
        loss.backward()
        descent.step()
        assert float(executor.step(x=X, target=T)["loss"]) == pytest.approx(loss.item(), rel=1e-6)
    found = executor.trained()
    assert initializers(found).keys() == initializers(proto).keys()
    for name, x in initializers(found).items():
        assert name not in "wv" or ((x % 1 == 0).all() and not np.array_equal(x, before[name]))
        assert name not in "st" or np.array_equal(x, before[name])
    np.testing.assert_allclose(as_written(found), executor.predict(x=X)["y"], rtol=1e-5, atol=1e-6)


def test_the_report_names_integers_that_stay_as_they_are():
    proto = model(
        """g (float[N,6] x) => (float[N,3] y) {
            m = ReduceMax<keepdims=0>(x) u = DequantizeLinear(q, m) v = DequantizeLinear(r, zero)
            one = DequantizeLinear(p, s) two = DequantizeLinear(p, t) sum = Add(one, two) a = Add(u, v) b = Add(a, sum)
            w = DequantizeLinear(o, s) c = Add(w, b) y = MatMul(x, c) }""",
        **{"zero": np.zeros(()), "s": np.array(0.1), "t": np.array(0.2)},
    )
    for name in "qrpo":
        whole = numpy_helper.from_array(RNG.integers(-9, 9, (6, 3)).astype(np.int8), name)
        proto.graph.initializer.append(whole)
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    lines = report(proto, pipeline).summary().splitlines()
    start = lines.index("integers   3 tensors of the file stay as they are")
    assert [" ".join(line.split()) for line in lines[start + 1 : start + 4]] == [
        "q its scale is computed",
        "r its scale is 0 or not finite",
        "p nodes read it in several ways",
    ]
    assert set(graphopt.Executor(pipeline(proto), threads=1, native=False).parameters) == {"o"}
