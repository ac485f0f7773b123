"""Files of integers train, and come back as they are: by ONNX Runtime's quantizer and a PyTorch interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from steps import assert_equal, exported, outputs, weights

import graphopt
import passes

F = torch.nn.functional
HEADER = '<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>'
INT8 = {"activation_type": QuantType.QInt8}
RATE = 0.1

NETWORKS = {
    "cnn": """g (float[N,2,8,8] x) => (float[N,5] y) {
        a = Conv<pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(x, a_w, a_b) ar = Relu(a)
        p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(ar)
        b = Conv<strides = [2, 2], group = 2, kernel_shape = [2, 2]>(p, b_w, b_b) br = Relu(b)
        f = Flatten(br) c = Gemm<transB = 1>(f, c_w, c_b) cr = Relu(c) y = MatMul(cr, d_w) }""",
    "others": """g (float[N,2,8,8] x) => (float[N,5] y) {
        a = Conv<pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(x, a_w, a_b) l = LeakyRelu<alpha = 0.1>(a)
        s = Sigmoid(a) m = Mul(l, s) t = Add(m, a) j = Concat<axis = 1>(t, l)
        p = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(j) v = GlobalAveragePool(p) f = Flatten(v)
        c = Gemm<transB = 1>(f, e_w, c_b) k = Softmax<axis = -1>(c) y = MatMul(k, d_w) }""",
}
SHAPES = {
    **{"a_w": (4, 2, 3, 3), "a_b": (4,), "b_w": (4, 2, 2, 2), "b_b": (4,)},
    **{"c_w": (6, 16), "c_b": (6,), "e_w": (6, 8), "d_w": (6, 5)},
}
CASES = [
    ("cnn", {}),
    ("cnn", {"per_channel": True}),
    ("cnn", INT8 | {"per_channel": True}),
    ("cnn", {"weight_type": QuantType.QUInt8}),
    ("cnn", {"extra_options": {"ForceQuantizeNoInputCheck": True}}),
    ("others", {}),
    ("others", INT8),
]


class Rows(CalibrationDataReader):
    def __init__(self, x: np.ndarray) -> None:
        self.rows = iter([{"x": x}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.rows, None)


def parsed(text: str, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f"{HEADER} {text}")
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(x, name) for name, x in arrays.items() if name in read)
    return proto


def batch(count: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((count, 2, 8, 8)).astype(np.float32), rng.standard_normal((count, 5)).astype(np.float32)


def qoperators(network: str, folder: Path, **options: Any) -> onnx.ModelProto:
    """Return a network in the QOperator format, as ONNX Runtime writes it."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) / shape[-1] for name, shape in SHAPES.items()}
    onnx.save(parsed(NETWORKS[network], arrays), folder / "float.onnx")
    given = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, **options}
    given["quant_format"] = QuantFormat.QOperator
    quantize_static(folder / "float.onnx", folder / "int8.onnx", Rows(batch()[0]), **given)
    return onnx.load(folder / "int8.onnx")


def executor(proto: onnx.ModelProto, rate: float = RATE) -> graphopt.Executor:
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(rate))
    return graphopt.Executor(step, threads=1, native=False)


# --- An interpreter of the QOperator format with masters ---

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "QLinearAdd": torch.add,
    "QLinearMul": torch.mul,
    "QLinearMatMul": torch.matmul,
    "QLinearSigmoid": torch.sigmoid,
    "QLinearLeakyRelu": lambda x: F.leaky_relu(x, 0.1),
    "QLinearSoftmax": lambda x: torch.softmax(x, -1),
    "QLinearAveragePool": lambda x: F.avg_pool2d(x, 2),
    "QLinearGlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
    "QLinearConcat": lambda *x: torch.cat(x, 1),
    "QGemm": lambda x, w, b=None: F.linear(x, w, b),
    "MaxPool": lambda x: F.max_pool2d(x, 2),
    "Flatten": lambda x: x.flatten(1),
}


def rounded(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, limits: tuple[int, int], axis: int = 0
) -> torch.Tensor:
    """Round to integers of a scale, and back; what rounds into the range has the gradient of the rounded number."""
    if scale.numel() > 1:
        shape = [-1 if i == axis else 1 for i in range(x.dim())]
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    steps = torch.round(x.detach() / scale) + zero
    numbers = (torch.clamp(steps, *limits) - zero) * scale
    passed = torch.where((steps >= limits[0]) & (steps <= limits[1]), x, numbers)
    return passed + (numbers - passed).detach()


class Interpreter:
    """Compute what a file in the QOperator format computes, in floats that stand for its integers."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto, self.arrays = proto, weights(proto)
        self.masters: dict[str, torch.Tensor] = {}
        self.layouts: dict[str, tuple[torch.Tensor, torch.Tensor, tuple[int, int], int]] = {}

    def number(self, name: str) -> torch.Tensor:
        array = torch.tensor(self.arrays[name].astype(np.float32))
        return array.reshape(()) if array.numel() == 1 else array

    def limits(self, name: str) -> tuple[int, int]:
        information = np.iinfo(self.arrays[name].dtype)
        return int(information.min), int(information.max)

    def weight(self, name: str, scale: torch.Tensor, zero: torch.Tensor, axis: int) -> torch.Tensor:
        if name not in self.masters:
            shape = [-1 if i == axis else 1 for i in range(self.arrays[name].ndim)]
            numbers = torch.tensor(self.arrays[name].astype(np.float32))
            spread = [part.reshape(shape) if part.numel() > 1 else part for part in (scale, zero)]
            self.masters[name] = ((numbers - spread[1]) * spread[0]).requires_grad_()
        return rounded(self.masters[name], scale, zero, self.limits(name), axis)

    def __call__(self, x: np.ndarray) -> torch.Tensor:
        values = {"x": torch.tensor(x)}
        for node in self.proto.graph.node:
            names, (y, *_) = node.input, node.output
            if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
                q = values[names[0]]
                if node.op_type == "QuantizeLinear":
                    q = rounded(q, self.number(names[1]), self.number(names[2]), self.limits(names[2]))
                values[y] = q
                continue
            if not node.op_type.startswith("Q"):
                values[y] = OPERATORS[node.op_type](values[names[0]])
                continue
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            places = {"QLinearConcat": range(2, len(names), 3)}.get(node.op_type, (0, 3) if len(names) > 5 else (0,))
            result = {"QLinearConcat": 0, "QLinearConv": 6, "QGemm": 7}.get(node.op_type, 3 * len(places))
            operands, scales = [], []
            for place in places:
                q, scale, zero = names[place], self.number(names[place + 1]), self.number(names[place + 2])
                axis = 1 if node.op_type == "QLinearMatMul" else 0
                operands.append(values[q] if q in values else self.weight(q, scale, zero, axis))
                scales.append(scale)
            bias = {"QLinearConv": 8, "QGemm": 6}.get(node.op_type)
            if bias is not None and names[bias]:
                steps = scales[0] * scales[1]
                operands.append(self.weight(names[bias], steps, torch.tensor(0.0), 0))
            if node.op_type == "QLinearConv":
                pads = attributes.get("pads", [0])[0]
                strides = attributes.get("strides", [1])[0]
                value = F.conv2d(*operands, strides, pads, groups=attributes.get("group", 1))
            else:
                value = OPERATORS[node.op_type](*operands)
            zero = names[result + 1]
            values[y] = rounded(value, self.number(names[result]), self.number(zero), self.limits(zero))
        return values[self.proto.graph.output[0].name]


@pytest.mark.parametrize(("network", "options"), CASES)
def test_files_of_qoperators_train_as_in_pytorch(network: str, options: dict[str, Any], tmp_path: Path) -> None:
    proto = qoperators(network, tmp_path, **options)
    assert sum(node.op_type.startswith("Q") for node in proto.graph.node) > 4
    own, theirs, (x, target) = executor(proto), Interpreter(proto), batch()
    expected = outputs(proto, {"x": x}, optimize=False)["y"]
    np.testing.assert_array_equal(own.predict(x=x)["y"], expected)
    np.testing.assert_array_equal(theirs(x).detach(), expected)
    assert set(own.parameters) == set(theirs.masters)
    assert_equal(weights(own.trained(into=proto)), weights(proto))
    losses, optimizer = [], torch.optim.SGD(theirs.masters.values(), RATE)
    for _ in range(20):
        loss = F.mse_loss(theirs(x), torch.tensor(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((own.step(x=x, target=target)["loss"], loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-6)
    for name, master in theirs.masters.items():
        np.testing.assert_allclose(own.parameters[name], master.detach(), rtol=1e-4, atol=1e-6)
    trained = own.trained(into=proto)
    assert trained.graph.node == proto.graph.node
    assert {name: x.dtype for name, x in weights(trained).items()} == {
        name: x.dtype for name, x in weights(proto).items()
    }
    found = outputs(trained, {"x": x}, optimize=False)["y"]
    np.testing.assert_array_equal(found, own.predict(x=x)["y"])
    assert np.square(found - target).mean() < np.square(expected - target).mean()


@pytest.mark.parametrize("network", NETWORKS)
def test_adapters_train_beside_qoperators(network: str, tmp_path: Path) -> None:
    proto, (x, target) = qoperators(network, tmp_path), batch()
    options = {"loss": passes.MeanSquaredError(), "optimizer": passes.AdamW(0.02)}
    step = graphopt.compile(proto, adapter=passes.LoRA("*", rank=2), **options)
    own = graphopt.Executor(step, threads=1, native=False)
    assert all(".lora_" in name for name in own.parameters)
    expected = outputs(proto, {"x": x}, optimize=False)["y"]
    np.testing.assert_array_equal(own.predict(x=x)["y"], expected)
    losses = [own.step(x=x, target=target)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]
    found = outputs(own.trained(), {"x": x}, optimize=False)["y"]
    np.testing.assert_array_equal(found, own.predict(x=x)["y"])
    assert np.any(found != expected)
    with pytest.raises(graphopt.GraphoptError, match=r"'a_w_quantized': QLinearConv rounds .* leave out into"):
        own.trained(into=proto)


def test_other_operators_on_integers_compute_what_onnxruntime_does() -> None:
    """QLinearWhere, a Softmax over several axes, Pad, Resize, Split and Transpose of integers."""
    nodes = """g (float[N,2,4,4] x, bool[1] c) => (float[N,5] y) {
        q = QuantizeLinear(x, s, z)
        w = com.microsoft.QLinearWhere(c, q, s, z, k, s, z, t, z)
        r = Resize<mode = "nearest">(w, , scales) d = Pad(r, pads, z) u = Transpose<perm = [0, 1, 3, 2]>(d)
        e = com.microsoft.QLinearSoftmax<axis = 2, opset = 11>(u, t, z, f, g)
        h = Flatten(e) p, o = Split<axis = 1>(h, parts) y = com.microsoft.QGemm(p, f, g, v, s, z, b) }"""
    rng = np.random.default_rng(0)
    arrays = {
        "s": np.float32(0.03), "t": np.float32(0.04), "f": np.float32(1 / 256), "z": np.uint8(120), "g": np.uint8(0),
        "k": np.full((1,), 30, np.uint8), "v": rng.integers(0, 256, (90, 5)).astype(np.uint8),
        "b": rng.integers(-900, 900, 5).astype(np.int32), "scales": np.float32([1, 1, 2, 2]),
        "pads": np.int64([0, 0, 1, 0, 0, 0, 0, 1]), "parts": np.int64([90, 72]),
    }  # fmt: skip
    proto = parsed(nodes, {name: np.asarray(x) for name, x in arrays.items()})
    own, x, target = executor(proto, 0.01), batch()[0][:, :, :4, :4], batch()[1]
    for chosen in (np.array([True]), np.array([False])):
        feeds = {"x": x, "c": chosen}
        expected = outputs(proto, feeds, optimize=False)["y"]
        np.testing.assert_allclose(own.predict(feeds)["y"], expected, atol=0.03 * 255 * 2 / 256)  # a step of Softmax
    assert set(own.parameters) >= {"v", "b"}
    found = [own.step(x=x, c=np.array([True]), target=target)["loss"] for _ in range(5)]
    assert found[-1] < found[0]
    assert outputs(own.trained(into=proto), feeds)["y"].shape == expected.shape


def test_averages_half_way_between_integers_are_no_disagreement() -> None:
    """ONNX Runtime sums the window of a newer AveragePool in another order, which decides many ties otherwise."""
    w = np.random.default_rng(0).integers(-100, 100, (32, 5)).astype(np.int8)
    proto = parsed(
        """g (float[N,2,8,8] x) => (float[N,5] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        p = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(d) r = QuantizeLinear(p, s, z)
        e = DequantizeLinear(r, s, z) f = Flatten(e) m = DequantizeLinear(w, k) y = MatMul(f, m) }""",
        {"s": np.float32(0.197261), "z": np.uint8(113), "w": w, "k": np.float32(0.01)},
    )
    (x, target) = batch()
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(RATE))
    own = graphopt.Executor(step, threads=1, native=False, verify=True)
    assert np.any(own.predict(x=x)["y"] != outputs(proto, {"x": x}, optimize=False)["y"])
    losses = [own.step(x=x, target=target)["loss"] for _ in range(3)]
    assert losses[-1] < losses[0]


FAULTS = {
    "a scale of 0": ("s", np.float32(0), r"its scale 's': expected finite numbers other than 0"),
    "several scales of data": (
        "s",
        np.float32([0.1, 0.2]),
        r"its scale 's' is not covered: expected one number",
    ),
    "a computed scale": ("s", None, r"expected its scale 's' to be an initializer, found a computed value"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_scales_are_refused_in_a_line(fault: str) -> None:
    name, numbers, words = FAULTS[fault]
    arrays = {"s": np.float32(0.1), "z": np.uint8(0), "w": np.ones((4, 5), np.uint8), name: numbers}
    computed = "s = Exp(l)" if numbers is None else ""
    proto = parsed(
        f"""g (float[N,4] x, float l) => (float[N,5] y) {{ {computed} q = QuantizeLinear(x, t, z)
        p = QLinearMatMul(q, s, z, w, t, z, t, z) y = DequantizeLinear(p, t, z) }}""",
        {"t": np.float32(0.1)} | {key: x for key, x in arrays.items() if x is not None},
    )
    with pytest.raises(graphopt.GraphoptError, match=f"^cannot lower QLinearMatMul node .*{words}") as error:
        executor(proto)
    assert "\n" not in str(error.value)


def test_floats_of_8_bits_are_refused_in_a_line() -> None:
    proto = parsed(
        "g (float[N,4] x) => (float[N,5] y) { f = DequantizeLinear(w, s) y = MatMul(x, f) }",
        {"s": np.float32(0.1)},
    )
    proto.opset_import[0].version = 21
    proto.ir_version = 10
    numbers = np.random.default_rng(0).standard_normal(20).tolist()
    proto.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT8E4M3FN, (4, 5), numbers))
    with pytest.raises(graphopt.GraphoptError, match=r"^weight 'w': expected integers .*, found float8e4m3fn: freeze"):
        executor(proto)


def test_large_weights_of_4_bits_come_back() -> None:
    rng = np.random.default_rng(0)
    proto = parsed(
        "g (float[N,64] x) => (float[N,64] y) { f = DequantizeLinear<axis = 1>(w, s, z) y = MatMul(x, f) }",
        {"s": rng.uniform(0.01, 0.02, 64).astype(np.float32)},
    )
    proto.opset_import[0].version, proto.ir_version = 21, 10
    for name, shape in (("w", (64, 64)), ("z", (64,))):
        numbers = rng.integers(0, 16, shape).ravel().tolist()
        proto.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.UINT4, shape, numbers))
    own, x = executor(proto), rng.standard_normal((16, 64)).astype(np.float32)
    assert_equal(weights(own.trained(into=proto)), weights(proto))
    for _ in range(5):
        own.step(x=x, target=np.zeros((16, 64), np.float32))
    found = outputs(own.trained(into=proto), {"x": x}, optimize=False)["y"]
    np.testing.assert_array_equal(found, own.predict(x=x)["y"])


def test_what_a_runtime_may_round_is_no_disagreement() -> None:
    """ONNX Runtime rounds the input to 8 bits at accuracy_level=4, which builders for CPUs write."""
    rng = np.random.default_rng(0)
    proto = parsed(
        """g (float[N,64] x) => (float[N,5] y) {
        y = com.microsoft.MatMulNBits<K = 64, N = 5, bits = 4, block_size = 32, accuracy_level = 4>(x, b, s) }""",
        {
            "b": rng.integers(0, 256, (5, 2, 16)).astype(np.uint8),
            "s": rng.uniform(0.01, 0.1, 10).astype(np.float32),
        },
    )
    step = graphopt.compile(
        proto,
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.01),
        parameters=passes.Parameters(unfreeze="b"),
    )
    own, target = graphopt.Executor(step, threads=1, native=False, verify=True), batch()[1]
    x = rng.standard_normal((16, 64)).astype(np.float32)
    losses = [own.step(x=x, target=target)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]


def test_scales_of_whole_numbers_in_floats_do_not_train() -> None:
    """torchao's Int8WeightOnlyConfig is exported so: integers in float32, and their scales as a recorded parameter."""

    class Quantized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.register_buffer("whole", torch.randint(-127, 128, (5, 8), dtype=torch.int8))
            self.scale = torch.nn.Parameter(torch.rand(5) / 100)
            self.bias = torch.nn.Parameter(torch.zeros(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.whole.to(x.dtype).t()) * self.scale + self.bias

    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((16, 8)).astype(np.float32), batch()[1]
    proto = exported(Quantized(), torch.tensor(x), dynamo=True)
    with pytest.warns(UserWarning, match="'scale' .the scale of a quantized weight"):
        own = executor(proto)
    assert set(own.parameters) == {"bias"}
    losses = [own.step(x=x, target=target)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]


# --- Dynamic files ---


def dynamic(text: str, arrays: dict[str, np.ndarray], folder: Path, **options: Any) -> onnx.ModelProto:
    onnx.save(parsed(text, arrays), folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", **options)
    return onnx.load(folder / "int8.onnx")


def test_an_embedding_of_integers_trains(tmp_path: Path) -> None:
    """quantize_dynamic gathers integers, transposes them, and multiplies by them as they are."""
    rng = np.random.default_rng(0)
    arrays = {
        "e": rng.standard_normal((9, 8)),
        "w": rng.standard_normal((8, 5)),
        "v": rng.standard_normal((8, 5)),
    }
    proto = dynamic(
        """g (int64[N,3] i) => (float[N,5] y) { h = Gather(e, i) t = Transpose<perm = [1, 0, 2]>(h)
        a = MatMul(t, w) k = Tanh(t) b = MatMul(k, v) c = Add(a, b) y = ReduceMean<axes = [0], keepdims = 0>(c) }""",
        {name: x.astype(np.float32) for name, x in arrays.items()},
        tmp_path,
    )
    assert proto.graph.node[0].op_type == "Gather"
    assert proto.graph.node[0].input[0] == "e_quantized"
    own, feeds, target = executor(proto), {"i": rng.integers(0, 9, (16, 3))}, batch()[1]
    expected = outputs(proto, feeds, optimize=False)["y"]
    np.testing.assert_allclose(own.predict(feeds)["y"], expected, rtol=1e-5, atol=1e-6)
    assert set(own.parameters) == {"e_quantized", "w_quantized", "v_quantized"}
    for _ in range(20):
        own.step(**feeds, target=target)
    trained = own.trained(into=proto)
    assert all(np.any(weights(trained)[name] != weights(proto)[name]) for name in own.parameters)
    found = outputs(trained, feeds, optimize=False)["y"]
    np.testing.assert_allclose(found, own.predict(feeds)["y"], rtol=1e-5, atol=1e-6)
    assert np.square(found - target).mean() < 0.9 * np.square(expected - target).mean()


OLD = """g (float[N,2,4,4] x) => (float[N,3,4,4] y) {
    q, s, z = DynamicQuantizeLinear(x) bs = Mul(s, ws) t = Div(b, bs) f = Floor(t) bq = Cast<to = 6>(f)
    c = ConvInteger<pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(q, w, z, wz) r = Reshape(bq, shape)
    a = Add(c, r) k = Cast<to = 1>(a) ks = Mul(s, ws) y = Mul(k, ks) }"""


def test_biases_that_are_added_as_integers_train_as_in_pytorch() -> None:
    """ONNX Runtime's quantize_dynamic of 2021 wrote them."""
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.integers(0, 256, (3, 2, 3, 3)).astype(np.uint8), "ws": np.float32(0.01), "wz": np.uint8(128),
        "b": rng.standard_normal(3).astype(np.float32), "shape": np.int64([1, -1, 1, 1]),
    }  # fmt: skip
    proto = parsed(OLD, {name: np.asarray(x) for name, x in arrays.items()})
    own, x = executor(proto), batch()[0][:, :, :4, :4]
    target = np.zeros((16, 3, 4, 4), np.float32)
    np.testing.assert_allclose(
        own.predict(x=x)["y"], outputs(proto, {"x": x}, optimize=False)["y"], rtol=1e-5, atol=1e-5
    )
    b = torch.tensor(arrays["b"], requires_grad=True)
    w = (torch.tensor(arrays["w"].astype(np.float32) - 128) * 0.01).requires_grad_()
    data, optimizer = torch.tensor(x), torch.optim.SGD([b, w], RATE)
    scale = (data.max() - data.min()) / 255
    seen = rounded(data, scale, torch.round(-data.min() / scale), (0, 255))
    for _ in range(10):
        steps = scale * 0.01
        floor = b + (torch.floor(b / steps) * steps - b).detach()
        filters = rounded(w, torch.tensor(0.01), torch.tensor(128.0), (0, 255))
        loss = F.mse_loss(F.conv2d(seen, filters, floor, padding=1), torch.tensor(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(own.step(x=x, target=target)["loss"], loss.item(), rtol=1e-5)
    trained = own.trained(into=proto)
    assert trained.graph.node == proto.graph.node
    assert {name for name, array in weights(trained).items() if np.any(array != weights(proto)[name])} == {
        "w",
        "b",
    }


@pytest.mark.parametrize("options", [{}, {"per_channel": True}], ids=["whole", "rows"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_an_lstm_of_integers_trains(direction: str, options: dict[str, Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count = 1 + (direction == "bidirectional")
    shapes = {"w": (count, 24, 8), "r": (count, 24, 6), "b": (count, 48), "v": (6 * count, 5)}
    arrays = {name: rng.uniform(-0.4, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}
    proto = dynamic(
        f"""g (float[3,N,8] x) => (float[N,5] y) {{
        h, a, c = LSTM<hidden_size = 6, direction = "{direction}">(x, w, r, b)
        t = Transpose<perm = [1, 0, 2]>(a) f = Flatten(t) y = MatMul(f, v) }}""",
        arrays,
        tmp_path,
        **options,
    )
    assert "DynamicQuantizeLSTM" in {node.op_type for node in proto.graph.node}
    own, target = executor(proto), batch()[1]
    feeds = {"x": rng.standard_normal((3, 16, 8)).astype(np.float32)}
    expected = outputs(proto, feeds, optimize=False)["y"]
    np.testing.assert_allclose(own.predict(feeds)["y"], expected, atol=1e-5)
    assert set(own.parameters) == {"w_quantized", "r_quantized", "b", "v_quantized"}
    assert_equal(weights(own.trained(into=proto)), weights(proto))
    for _ in range(20):
        own.step(**feeds, target=target)
    trained = own.trained(into=proto)
    assert all(np.any(weights(trained)[name] != weights(proto)[name]) for name in own.parameters)
    found = outputs(trained, feeds, optimize=False)["y"]
    np.testing.assert_allclose(own.predict(feeds)["y"], found, atol=1e-5)
    assert np.square(found - target).mean() < np.square(expected - target).mean()


def test_weights_train_behind_nodes_that_move_integers() -> None:
    """Of standard operators alone: no gradient passes MaxPool and Reshape of integers."""
    rng = np.random.default_rng(0)
    arrays = {
        "u": rng.integers(-100, 100, (4, 2, 1, 1)).astype(np.int8), "us": np.full(4, 0.01, np.float32),
        "v": rng.integers(-100, 100, (16, 3)).astype(np.int8), "vs": np.full(3, 0.01, np.float32),
        "s": np.float32([0.02]), "z": np.uint8([7]), "shape": np.int64([-1, 16]),
    }  # fmt: skip
    text = """g (float[N,2,4,4] x) => (float[N,3] y) {
        w = DequantizeLinear<axis = 0>(u, us) c = Conv<kernel_shape = [1, 1]>(x, w) q = QuantizeLinear(c, s, z)
        p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(q) f = Reshape(p, shape)
        d = DequantizeLinear(f, s, z) k = DequantizeLinear<axis = 1>(v, vs) y = MatMul(d, k) }"""
    proto = parsed(text, {name: np.asarray(x) for name, x in arrays.items()})
    own, x = executor(proto), batch()[0][:, :, :4, :4]
    assert {"u", "v"} <= own.parameters.keys()
    np.testing.assert_array_equal(own.predict(x=x)["y"], outputs(proto, {"x": x}, optimize=False)["y"])


def test_a_mean_that_the_runtime_only_describes_is_lowered_and_comes_back():
    """NumPy is its oracle: ONNX Runtime has no kernel of QLinearReduceMean."""
    proto = parsed(
        """g (float[N,2,8,8] x) => (float[N,5] y) { q = QuantizeLinear(x, s, z)
            m = com.microsoft.QLinearReduceMean<axes = [2, 3], keepdims = 0>(q, s, z, t, u)
            h = DequantizeLinear(m, t, u) y = MatMul(h, w) }""",
        {
            **{"s": np.array(0.03, np.float32), "z": np.array(117, np.uint8), "t": np.array(0.004, np.float32)},
            **{"u": np.array(120, np.uint8), "w": np.eye(2, 5, dtype=np.float32)},
        },
    )
    x, target = batch()
    step = executor(proto)
    q = np.clip(np.rint(x / np.float32(0.03)) + 117, 0, 255)
    mean = ((q - 117) * np.float32(0.03)).mean((2, 3))
    expected = (np.clip(np.rint(mean / np.float32(0.004)) + 120, 0, 255) - 120) * np.float32(0.004)
    np.testing.assert_allclose(step.predict(x=x)["y"][:, :2], expected, atol=0.0041)  # a step, where a sum is a half
    first, *_, last = (float(step.step(x=x, target=target)["loss"]) for _ in range(5))
    assert last < first
    found = step.trained(into=proto)
    assert [node.op_type for node in found.graph.node] == [node.op_type for node in proto.graph.node]


@pytest.mark.skipif(onnxruntime.__version__.startswith("1.19"), reason="it has no opset 23")
def test_scales_of_16_bits_train_behind_floats_of_32():
    """`output_dtype` of opset 23; the oracle is the gradient of float32 scales of the same numbers."""
    rng = np.random.default_rng(3)
    q, scale = rng.integers(-127, 128, (5, 4), dtype=np.int8), rng.uniform(0.02, 0.06, 4).astype(np.float16)
    found = []
    for dtype in (np.float16, np.float32):
        proto = onnx.parser.parse_model(
            """<ir_version: 11, opset_import: ["": 23]> g (float[N,5] x) => (float[N,4] y) {
            v = DequantizeLinear<axis = 1, output_dtype = 1>(w, s) y = MatMul(x, v) }"""
        )
        arrays = {"w": q, "s": scale.astype(dtype)}
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(x, name) for name, x in arrays.items())
        step = executor(proto, 0.01)
        x, target = np.linspace(-1, 1, 40, dtype=np.float32).reshape(8, 5), np.ones((8, 4), np.float32)
        found.append([float(step.step(x=x, target=target)["loss"]) for _ in range(4)])
        assert [node.op_type for node in step.trained().graph.node] == ["DequantizeLinear", "MatMul"]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert found[0][-1] < found[0][0]
