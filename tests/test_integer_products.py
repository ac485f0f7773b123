"""Files of quantize_dynamic train, or are a base for adapters: ONNX Runtime's outputs, PyTorch's straight-through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from steps import outputs, weights

import graphopt
import passes

ROWS, WIDE, OUT, RATE = 6, 8, 5, 0.05
OLD = onnxruntime.__version__.startswith("1.19")
HEADER = '<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>'


def network(rng: np.random.Generator) -> onnx.ModelProto:
    """Two products share an input, one has a bias, and one reads their sum."""
    proto = onnx.parser.parse_model(
        f"""{HEADER} g (float[B,T,{WIDE}] x) => (float[B,T,{OUT}] y) {{
            a = MatMul(x, wa) p = Add(a, ba) q = MatMul(x, wb) t = Tanh(p) h = Add(t, q) y = MatMul(h, wc) }}"""
    )
    arrays = {"wa": (WIDE, WIDE), "ba": (WIDE,), "wb": (WIDE, WIDE), "wc": (WIDE, OUT)}
    weights = [(rng.standard_normal(shape).astype(np.float32) / 2, name) for name, shape in arrays.items()]
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(*weight) for weight in weights)
    return proto


def quantized(rng: np.random.Generator, folder: Path, **options: object) -> onnx.ModelProto:
    onnx.save(network(rng), folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", **options)
    return onnx.load(folder / "int8.onnx")


def fused(proto: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Return the file that ONNX Runtime writes after its fusions."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "fused.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "fused.onnx")


FORMS = {
    "int8": {"weight_type": QuantType.QInt8},
    "uint8, per channel": {"weight_type": QuantType.QUInt8, "per_channel": True},
    "int8, per channel, 7 bits": {"weight_type": QuantType.QInt8, "per_channel": True, "reduce_range": True},
}


def adapted(proto: onnx.ModelProto, **options: object) -> graphopt.Executor:
    step = graphopt.compile(
        proto,
        adapter=passes.LoRA("w*", rank=2, alpha=4),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(RATE),
        **options,
    )
    return graphopt.Executor(step, threads=1, native=False)


def straight_through(x: torch.Tensor) -> torch.Tensor:
    """Round to 8 bits by the range of the numbers, as DynamicQuantizeLinear does; the gradient passes."""
    most, least = x.detach().max().clamp(min=0), x.detach().min().clamp(max=0)
    scale = (most - least) / 255
    zero = torch.round(-least / scale)
    rounded = (torch.clamp(torch.round(x.detach() / scale) + zero, 0, 255) - zero) * scale
    return x + (rounded - x).detach()


def stored(proto: onnx.ModelProto, name: str) -> torch.Tensor:
    arrays = {x.name: onnx.numpy_helper.to_array(x).astype(np.float32) for x in proto.graph.initializer}
    parts = [arrays[f"{name}_{part}"] for part in ("quantized", "zero_point", "scale")]
    return torch.tensor((parts[0] - parts[1]) * parts[2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_fused", [False, True])
def test_lora_beside_integers_trains_as_in_pytorch(form: str, is_fused: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    proto = original = quantized(rng, tmp_path, **FORMS[form])
    if is_fused:
        proto = fused(original, tmp_path)
        assert {x.op_type for x in proto.graph.node} & {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    x = rng.standard_normal((2, ROWS, WIDE)).astype(np.float32)
    target = rng.standard_normal((2, ROWS, OUT)).astype(np.float32)
    executor = adapted(proto)
    np.testing.assert_allclose(executor.predict(x=x)["y"], outputs(proto, {"x": x})["y"], rtol=1e-5, atol=1e-5)
    own = {name: torch.tensor(array, requires_grad=True) for name, array in executor.state.items() if "lora" in name}
    assert len(own) == 6
    bias = torch.tensor(next(onnx.numpy_helper.to_array(t) for t in original.graph.initializer if t.name == "ba"))

    def product(h: torch.Tensor, name: str) -> torch.Tensor:
        a, b = (own[f"{name}_quantized.lora_{part}"] for part in "AB")
        return straight_through(h) @ stored(original, name) + (h @ a) @ b * 2

    losses, optimizer = [], torch.optim.SGD(own.values(), RATE)
    for _ in range(6):
        given = torch.tensor(x)
        h = torch.tanh(product(given, "wa") + bias) + product(given, "wb")
        loss = torch.nn.functional.mse_loss(product(h, "wc"), torch.tensor(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((executor.step(x=x, target=target)["loss"], loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-4)
    assert losses[-1][0] < losses[0][0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_integers_train_by_masters_as_in_pytorch(form: str, is_fused: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    original = quantized(rng, tmp_path, **FORMS[form])
    proto = fused(original, tmp_path) if is_fused else original
    x = rng.standard_normal((2, ROWS, WIDE)).astype(np.float32)
    target = rng.standard_normal((2, ROWS, OUT)).astype(np.float32)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(RATE))
    executor = graphopt.Executor(step, threads=1, native=False)
    for name, array in weights(proto).items():
        np.testing.assert_array_equal(weights(executor.trained(into=proto))[name], array)
    own = {name: stored(original, name).requires_grad_() for name in ("wa", "wb", "wc")}
    own["ba"] = torch.tensor(weights(original)["ba"], requires_grad=True)

    def span(w: torch.Tensor, is_signed: bool, each: bool) -> torch.Tensor:
        most, least = (x.values if each else x for x in ((w.max(0), w.min(0)) if each else (w.max(), w.min())))
        if is_signed:
            return torch.maximum(most, -least)
        return most.clamp(min=0) - least.clamp(max=0)

    def product(h: torch.Tensor, name: str) -> torch.Tensor:
        scale, zero = (
            torch.tensor(weights(original)[f"{name}_{x}"].astype(np.float32)) for x in ("scale", "zero_point")
        )
        is_signed, each = weights(original)[f"{name}_quantized"].dtype == np.int8, scale.dim() > 0
        low, high = (-128, 127) if is_signed else (0, 255)
        w = own[name].detach()
        scale = scale * (span(w, is_signed, each) / span(stored(original, name), is_signed, each))
        if not is_signed:
            zero = torch.round(-w.amin(0).clamp(max=0) / scale)
        steps = torch.round(own[name].detach() / scale) + zero
        numbers = (torch.clamp(steps, low, high) - zero) * scale
        passed = torch.where((steps >= low) & (steps <= high), own[name], numbers)
        return straight_through(h) @ (passed + (numbers - passed).detach())

    losses, optimizer = [], torch.optim.SGD(own.values(), RATE)
    for _ in range(20):
        h = torch.tanh(product(torch.tensor(x), "wa") + own["ba"]) + product(torch.tensor(x), "wb")
        loss = torch.nn.functional.mse_loss(product(h, "wc"), torch.tensor(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((executor.step(x=x, target=target)["loss"], loss.item()))
    np.testing.assert_allclose(*np.transpose(losses[:3]), rtol=1e-6)
    np.testing.assert_allclose(*np.transpose(losses), rtol=2e-3)  # one number may round otherwise
    trained = executor.trained(into=proto)
    assert trained.graph.node == proto.graph.node
    found = outputs(trained, {"x": x}, optimize=False)["y"]
    np.testing.assert_allclose(found, executor.predict(x=x)["y"], rtol=1e-4, atol=1e-5)
    assert np.square(found - target).mean() < losses[0][0]
    for tensor in (anew := network(rng)).graph.initializer:  # its float form, quantized anew
        master = executor.parameters.get(f"{tensor.name}_quantized", executor.parameters.get(tensor.name))
        tensor.CopyFrom(onnx.numpy_helper.from_array(master, tensor.name))
    onnx.save(anew, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "anew.onnx", **FORMS[form])
    for name, array in weights(onnx.load(tmp_path / "anew.onnx")).items():
        np.testing.assert_allclose(weights(trained)[name], array, rtol=2e-7, atol=0, err_msg=name)
        assert not name.endswith("_scale") or np.any(array != weights(original)[name])


@pytest.mark.skipif(OLD, reason="onnxruntime 1.19 has no adapters")
@pytest.mark.parametrize("is_fused", [False, True])
def test_integers_take_slots_and_no_merge(is_fused: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    proto = quantized(rng, tmp_path, per_channel=True)
    proto = fused(proto, tmp_path) if is_fused else proto
    x, target = (rng.standard_normal((2, ROWS, n)).astype(np.float32) for n in (WIDE, OUT))
    executor = adapted(proto)
    for _ in range(3):
        executor.step(x=x, target=target)
    expected = executor.predict(x=x)["y"]
    np.testing.assert_allclose(outputs(executor.trained(into=proto), {"x": x})["y"], expected, rtol=1e-4, atol=1e-4)
    file = executor.trained(into=proto, adapters="slots")
    np.testing.assert_array_equal(outputs(file, {"x": x})["y"], outputs(proto, {"x": x})["y"])
    graphopt.save_adapter(executor, tmp_path / "a.onnx_adapter")
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(adapter)
    running = onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = running.run(["y"], {"x": x}, options)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_fused", [False, True])
def test_products_of_two_inputs_are_rounded_on_both_sides(is_fused: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        f"""{HEADER} g (float[B,T,{WIDE}] x) => (float[B,T,T] y) {{
            a = MatMul(x, w) t = Transpose<perm = [0, 2, 1]>(a) k = Tanh(t) y = MatMul(x, k) }}"""
    )
    w = rng.standard_normal((WIDE, WIDE)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    onnx.save(proto, tmp_path / "float.onnx")
    both = {"MatMulConstBOnly": False}
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", extra_options=both)
    proto = onnx.load(tmp_path / "int8.onnx")
    proto = fused(proto, tmp_path) if is_fused else proto
    x, target = rng.standard_normal((2, ROWS, WIDE)).astype(np.float32), np.zeros((2, ROWS, ROWS), np.float32)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(RATE))
    executor = graphopt.Executor(step, threads=1, native=False)
    expected = outputs(proto, {"x": x}, optimize=False)["y"]
    np.testing.assert_allclose(executor.predict(x=x)["y"], expected, rtol=1e-5, atol=1e-5)
    losses = [executor.step(x=x, target=target)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    found = outputs(executor.trained(into=proto), {"x": x}, optimize=False)["y"]
    np.testing.assert_allclose(found, executor.predict(x=x)["y"], rtol=1e-5, atol=1e-5)


def test_an_adapter_trains_beside_a_convolution_of_integers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        f"""{HEADER} g (float[B,2,6,6] x) => (float[B,3,6,6] y) {{
            a = Conv<pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(x, w, b) y = Tanh(a) }}"""
    )
    arrays = {"w": rng.standard_normal((3, 2, 3, 3)) / 3, "b": rng.standard_normal(3)}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()
    )
    onnx.save(proto, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=QuantType.QUInt8)
    proto = onnx.load(tmp_path / "int8.onnx")
    assert "ConvInteger" in {node.op_type for node in proto.graph.node}
    x, target = rng.standard_normal((2, 4, 2, 6, 6)).astype(np.float32), np.zeros((4, 3, 6, 6), np.float32)
    executor = adapted(proto)
    found, expected = executor.predict(x=x[0])["y"], outputs(proto, {"x": x[0]})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    losses = [executor.step(x=x[0], target=target)["loss"] for _ in range(4)]
    assert losses[3] < losses[0]
    with pytest.raises(graphopt.GraphoptError, match="expected a node that reads it as a convolution, found none"):
        executor.trained(into=proto, adapters="slots")
