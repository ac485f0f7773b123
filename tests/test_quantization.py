"""Quantization's gradients, which no finite difference shows: by PyTorch's fake quantization, and in training."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import graphopt
import passes
from graphopt import GraphoptError
from graphopt.testing.gradients import evaluate_reference, gradient_model

RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7)}
X = np.random.default_rng(0).uniform(-3, 3, (4, 6)).astype(np.float32)
SEED = np.random.default_rng(1).uniform(0.5, 1.5, X.shape).astype(np.float32)


def parsed(text: str, *weights: onnx.TensorProto) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>\n{text}')
    model.graph.initializer.extend(weights)
    return model


def fake(kind: str, dims: str, zero: np.ndarray, **attributes: int) -> onnx.ModelProto:
    """Return a model that quantizes x and goes back."""
    options = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    given = f"<{options}>" if options else ""
    return parsed(
        f"g (float[4, 6] x, float{dims} s) => (float[4, 6] y) {{"
        f"q = QuantizeLinear{given}(x, s, z) y = DequantizeLinear{given}(q, s, z) }}",
        helper.make_tensor("z", getattr(onnx.TensorProto, kind.upper()), zero.shape, zero.ravel()),
    )


@pytest.mark.parametrize(("kind", "zero", "scale"), [("int8", 3, 0.011), ("uint8", 100, 0.02), ("int4", 2, 0.3)])
def test_gradients_are_those_of_pytorchs_learned_scale(kind: str, zero: int, scale: float) -> None:
    """Numbers out of range are among them."""
    low, high = RANGES[kind]
    x, s = torch.tensor(X, requires_grad=True), torch.tensor([scale], requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(x, s, torch.tensor([float(zero)]), low, high, 1.0)
    y.backward(torch.tensor(SEED))
    assert 0 < (x.grad == 0).sum() < X.size
    model = gradient_model(fake(kind, "", np.array(zero)))
    found = evaluate_reference(model, {"x": X, "s": np.float32(scale), "y.seed": SEED})
    np.testing.assert_allclose(found["x.grad"], x.grad, rtol=1e-6)
    np.testing.assert_allclose(found["s.grad"], s.grad.item(), rtol=2e-4)


@pytest.mark.parametrize(("kind", "zero"), [("int8", 3), ("uint8", 100)])
def test_what_rounds_into_the_range_is_in_it(kind: str, zero: int) -> None:
    """Less than half a step beyond the last integer has a gradient, and more has none."""
    low, high = RANGES[kind]
    steps = np.array([high - 0.6, high + 0.4, high + 0.6, low + 0.6, low - 0.4, low - 0.6] * 4).reshape(4, 6) - zero
    given = (0.25 * steps).astype(np.float32)
    x = torch.tensor(given, requires_grad=True)
    torch.fake_quantize_per_tensor_affine(x, 0.25, zero, low, high).backward(torch.tensor(SEED))
    model = gradient_model(fake(kind, "", np.array(zero)))
    found = evaluate_reference(model, {"x": given, "s": np.float32(0.25), "y.seed": SEED})["x.grad"]
    assert (found == 0).mean() == pytest.approx(1 / 3)
    np.testing.assert_allclose(found, x.grad, rtol=1e-6)


@pytest.mark.parametrize(("kind", "zero"), [("int8", 0), ("int8", 4), ("uint8", 100)])
def test_a_half_beyond_the_last_integer_rounds_to_even_as_in_pytorch(kind: str, zero: int) -> None:
    """127.5 rounds to 128, which is out of range, and -128.5 to -128, which is in it."""
    low, high = RANGES[kind]
    given = np.tile(0.25 * (np.array([high + 0.5, low - 0.5]) - zero), 12).reshape(4, 6).astype(np.float32)
    x = torch.tensor(given, requires_grad=True)
    torch.fake_quantize_per_tensor_affine(x, 0.25, zero, low, high).backward(torch.tensor(SEED))
    model = gradient_model(fake(kind, "", np.array(zero)))
    found = evaluate_reference(model, {"x": given, "s": np.float32(0.25), "y.seed": SEED})["x.grad"]
    assert 0 < np.count_nonzero(found) < found.size
    np.testing.assert_allclose(found, x.grad, rtol=1e-6)


def test_each_channel_has_a_scale() -> None:
    scales, zeros = np.linspace(0.008, 0.03, 6).astype(np.float32), np.arange(6) - 3
    x, s = torch.tensor(X, requires_grad=True), torch.tensor(scales, requires_grad=True)
    y = torch._fake_quantize_learnable_per_channel_affine(
        x, s, torch.tensor(zeros, dtype=torch.float32), 1, -128, 127, 1.0
    )
    y.backward(torch.tensor(SEED))
    found = evaluate_reference(
        gradient_model(fake("int8", "[6]", zeros, axis=1)), {"x": X, "s": scales, "y.seed": SEED}
    )
    np.testing.assert_allclose(found["x.grad"], x.grad, rtol=1e-6)
    np.testing.assert_allclose(found["s.grad"], s.grad, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("size", [3, 4])  # 2 whole blocks of 6 numbers, or one of 4 and one of 2
def test_each_block_has_a_scale(size: int) -> None:
    scales = np.linspace(0.008, 0.03, 8).reshape(4, 2).astype(np.float32)
    found = evaluate_reference(
        gradient_model(fake("int8", "[4, 2]", np.zeros((4, 2), int), axis=1, block_size=size)),
        {"x": X, "s": scales, "y.seed": SEED},
    )
    steps = X / np.repeat(scales, size, axis=1)[:, :6]
    inside = (np.rint(steps) >= -128) & (np.rint(steps) <= 127)
    slope = np.where(inside, np.rint(steps) - steps, np.clip(np.rint(steps), -128, 127))
    np.testing.assert_allclose(found["x.grad"], SEED * inside, rtol=1e-6)
    np.testing.assert_allclose(found["s.grad"], np.add.reduceat(SEED * slope, [0, size], axis=1), rtol=2e-4, atol=1e-5)


def test_a_dynamic_range_is_that_of_the_numbers() -> None:
    """dy by each number, and through the scale by the extremes: round(x / s) - x / s, times 1 / 255."""
    model = parsed(
        "g (float[4, 6] x) => (float[4, 6] y) { q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }"
    )
    found = evaluate_reference(gradient_model(model), {"x": X, "y.seed": SEED})["x.grad"]
    scale = (X.max() - X.min()) / 255
    zero = np.rint(-X.min() / scale)
    steps = np.clip(np.rint(X / scale) + zero, 0, 255) - zero
    slope = np.sum(SEED * (steps - X / scale)) / 255
    expected = SEED + slope * (np.equal(X, X.max()).astype(np.float32) - np.equal(X, X.min()))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_layer_with_quantized_weights_trains() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    model = parsed(
        "g (float[N, 6] x) => (float[N, 3] y) {"
        "s = Constant<value = float {0.05}>() z = Constant<value = int8 {0}>()"
        "q = QuantizeLinear(w, s, z) d = DequantizeLinear(q, s, z) y = MatMul(x, d) }",
        onnx.numpy_helper.from_array(weight, "w"),
    )
    step = graphopt.compile(model, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1)
    target = (X @ np.random.default_rng(2).standard_normal((6, 3))).astype(np.float32)
    losses = [executor.step(x=X, target=target)["loss"] for _ in range(50)]
    assert losses[-1] < 0.1 * losses[0]
    nodes = [node.op_type for node in executor.trained().graph.node]
    assert nodes.count("QuantizeLinear") == nodes.count("DequantizeLinear") == 1


def stored(dtype: type[np.floating], kind: type[np.integer] = np.int8) -> onnx.ModelProto:
    """Return a product with a weight of integers, which a DequantizeLinear turns into numbers of `dtype`."""
    rng = np.random.default_rng(3)
    number = "float16" if dtype is np.float16 else "float"
    arrays = {
        "q": rng.integers(-50, 50, (6, 3)).astype(kind),
        "scale": np.full(3, 2**-6, dtype),
        "zero": np.zeros(3, kind),
    }
    return parsed(
        f"g ({number}[N, 6] x) => ({number}[N, 3] y) {{"
        "d = DequantizeLinear<axis = 1>(q, scale, zero) y = MatMul(x, d) }",
        *(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()),
    )


@pytest.mark.parametrize("kind", [np.int8, np.int32])
def test_a_weight_behind_a_scale_of_16_bits_trains_as_behind_one_of_32(kind: type[np.integer]) -> None:
    """All numbers and their products are exact in float16, so that the first gradients differ by rounding only."""
    x, target = np.round(X), np.zeros((4, 3))
    masters = []
    for dtype in (np.float16, np.float32):
        step = graphopt.compile(stored(dtype, kind), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
        executor = graphopt.Executor(step, threads=1, native=False)
        executor.step(x=x.astype(dtype), target=target.astype(dtype))
        masters.append(executor.state["q"])
    before = stored(np.float32, kind).graph.initializer[0]
    start = onnx.numpy_helper.to_array(before) * np.float32(2**-6)
    assert masters[0].dtype == np.float32
    np.testing.assert_allclose(masters[0] - start, masters[1] - start, rtol=4e-3, atol=1e-5)


@pytest.mark.parametrize("unfreeze", ["*", "scale", ["q", "scale"]])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_weight_and_its_scale_do_not_train_together(dtype: type[np.floating], unfreeze: str | list[str]) -> None:
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.01)}
    with pytest.raises(GraphoptError, match=r"'q' with 'scale': add the names of one kind to freeze.*\['scale'\]"):
        graphopt.compile(stored(dtype), parameters=passes.Parameters(unfreeze=unfreeze), **steps)
    for trained, frozen in (("q", "scale"), ("scale", "q")):
        parameters = passes.Parameters(unfreeze=unfreeze, freeze=frozen)
        step = graphopt.compile(stored(dtype), parameters=parameters, **steps)
        executor = graphopt.Executor(step, threads=1, native=False)
        executor.step(x=X.astype(dtype), target=np.zeros((4, 3), dtype))
        assert [*executor.parameters] == [trained]


PRODUCTS_OF_INTEGERS = {
    "p = MatMulInteger(q, w, z) f = Cast<to = 1>(p) y = Mul(f, s)": "the product of both scales, as quantize_dynamic",
    "p = MatMulInteger(q, w, z) y = Cast<to = 1>(p)": "one Mul behind it",
    "p = MatMulInteger(q, w) f = Cast<to = 1>(p) t = Mul(s, v) y = Mul(f, t)": "the zero point of its Dynamic",
    "y = com.microsoft.MatMulIntegerToFloat(q, w, v, v, z)": "the scale and the zero point of its Dynamic",
    "u = Cast<to = 2>(x) y = com.microsoft.MatMulIntegerToFloat(u, w, v, v)": "the output of a DynamicQuantizeLinear",
}


@pytest.mark.parametrize("nodes", PRODUCTS_OF_INTEGERS)
def test_products_of_integers_in_other_forms_are_refused(nodes: str) -> None:
    model = parsed(
        f"g (float[4, 6] x) => (float[4, 3] y) {{ q, s, z = DynamicQuantizeLinear(x) {nodes} }}",
        onnx.numpy_helper.from_array(np.ones((6, 3), np.uint8), "w"),
        onnx.numpy_helper.from_array(np.float32(0.5), "v"),
    )
    with pytest.raises(GraphoptError, match=f"^cannot lower .*MatMulInteger.*: .*{PRODUCTS_OF_INTEGERS[nodes]}"):
        gradient_model(model)
