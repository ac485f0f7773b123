"""Weights of float files become a frozen base of a few bits, as ONNX Runtime's quantizer makes them."""

from __future__ import annotations

import messages
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from builders import mlp, model
from onnx import numpy_helper

import graphopt
import passes
from graphopt import cli

RNG = np.random.default_rng(3)
SIZES = (96, 40, 8)


def unpacked(packed, bits):
    parts = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], -1)


def products(w, name="w", transposed=False):
    """Return y = x w + b."""
    k, n = w.shape
    if transposed:
        return model(
            f"g (float[M,{k}] x) => (float[M,{n}] y) {{ y = Gemm<transB=1>(x, {name}, b) }}",
            **{name: w.T.copy()},
            b=np.zeros(n),
        )
    return model(
        f"g (float[M,{k}] x) => (float[M,{n}] y) {{ p = MatMul(x, {name}) y = Add(p, b) }}",
        **{name: w},
        b=np.zeros(n),
    )


def by_runtimes_quantizer(w, bits, block, symmetric):
    """Return the integers, scales and zero points of MatMulNBitsQuantizer."""
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    config = quantizer.DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=symmetric, bits=bits)
    run = quantizer.MatMulNBitsQuantizer(products(w), algo_config=config)
    run.process()
    found = {x.name: numpy_helper.to_array(x) for x in run.model.model.graph.initializer}
    (node,) = (node for node in run.model.model.graph.node if node.op_type == "MatMulNBits")
    q, scales = unpacked(found[node.input[1]], bits), found[node.input[2]].ravel()
    blocks = -(-w.shape[0] // block)
    if symmetric:
        return q.reshape(-1, block), scales, np.full(scales.size, 2 ** (bits - 1))
    zeros = unpacked(found[node.input[3]].reshape(w.shape[1], -1), bits)[:, :blocks]
    return q.reshape(-1, block), scales, zeros.ravel()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_integers_are_those_of_the_runtimes_quantizer(bits, block, symmetric, transposed):
    w = RNG.standard_normal((100, 7)).astype(np.float32)
    w[:32, 0], w[:, 1] = 0, np.abs(w[:, 1])
    loaded = graphopt.load(products(w, transposed=transposed))
    passes.Normalize()(loaded)
    passes.QuantizeWeights(bits=bits, block=block, symmetric=symmetric)(loaded)
    (node,) = (node for node in loaded.graph if node.op_type == "DequantizeLinear")
    found = [x.const_value.numpy().astype(np.float32) for x in node.inputs]
    q, scales, zeros = by_runtimes_quantizer(w, bits, block, symmetric)
    inside = (np.arange(q.size).reshape(7, -1) % (-(-100 // block) * block) < 100).reshape(q.shape)
    np.testing.assert_array_equal(found[0][inside], q[inside])
    np.testing.assert_array_equal(found[1], scales)
    np.testing.assert_array_equal(found[2], zeros)


def test_pieces_of_a_large_weight_are_quantized_one_after_the_other(monkeypatch):
    w = RNG.standard_normal((64, 40)).astype(np.float32)
    whole = graphopt.load(products(w))
    parts = graphopt.load(products(w))
    passes.QuantizeWeights()(whole)
    monkeypatch.setattr("passes.quantization.quantize_weights._NUMBERS_AT_ONCE", 200)
    passes.QuantizeWeights()(parts)
    tensors = [x.graph.initializers["w"].const_value.tobytes() for x in (whole, parts)]
    assert tensors[0] == tensors[1]


def weights_of(step, name, shape, *, transposed=False):
    """Return what a quantized weight stands for, as [inputs, outputs]."""
    node = next(x for x in step.graph if x.op_type == "DequantizeLinear" and x.inputs[0].name == name)
    q, zero = (node.inputs[i].const_value.numpy().astype(np.float32) for i in (0, 2))
    scale = node.inputs[1]
    while scale.producer() is not None:
        scale = scale.producer().inputs[0]
    floats = (q - zero[:, None]) * scale.const_value.numpy()[:, None]
    return floats.reshape(shape[1], -1)[:, : shape[0]].T


def test_adapters_on_a_quantized_base_train_as_pytorchs():
    proto = mlp(SIZES)
    steps = {"quantize": passes.QuantizeWeights(), "adapter": passes.LoRA("*.weight", rank=4, alpha=8)}
    step = graphopt.compile(proto, **steps, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1)
    state = {name: torch.tensor(x, requires_grad=True) for name, x in executor.parameters.items()}
    assert {*state} == {f"fc{i}.weight.lora_{x}" for i in (0, 1) for x in "AB"}
    own = {x.name: torch.tensor(numpy_helper.to_array(x)) for x in proto.graph.initializer}
    base = [torch.tensor(weights_of(step, f"fc{i}.weight", SIZES[i : i + 2])) for i in (0, 1)]
    x, t = (RNG.standard_normal((5, n)).astype(np.float32) for n in (SIZES[0], SIZES[-1]))
    optimizer = torch.optim.SGD(state.values(), 0.1)

    def layer(h, i):
        a, b = state[f"fc{i}.weight.lora_A"], state[f"fc{i}.weight.lora_B"]
        return h @ base[i] + 2 * (h @ a) @ b + own[f"fc{i}.bias"]

    for _ in range(20):
        optimizer.zero_grad()
        y = layer(torch.tanh(layer(torch.tensor(x), 0)), 1)
        loss = torch.nn.functional.mse_loss(y, torch.tensor(t))
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(executor.step(x=x, target=t)["loss"], loss.item(), rtol=1e-6)
    floats = [v.const_value.size for v in step.graph.initializers.values() if v.dtype is ir.DataType.FLOAT]
    assert max(floats) <= 4 * SIZES[0]  # of an adapter


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_is_not_quantized_trains_beside(dtype):
    proto = mlp(SIZES, dtype=dtype)
    step = graphopt.compile(
        proto,
        quantize=passes.QuantizeWeights("fc0.*", bits=8, symmetric=False),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    executor = graphopt.Executor(step, threads=1)
    assert set(executor.parameters) == {"fc0.bias", "fc1.weight", "fc1.bias"}
    x, t = (RNG.standard_normal((5, n)).astype(dtype) for n in (SIZES[0], SIZES[-1]))
    losses = [executor.step(x=x, target=t)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    trained = executor.trained()
    onnx.checker.check_model(trained, full_check=True)
    (found,) = graphopt.run(trained, {"x": x}).values()
    np.testing.assert_allclose(
        found,
        executor.predict(x=x)["y"],
        rtol=2e-2 if dtype is np.float16 else 1e-5,
        atol=1e-2 if dtype is np.float16 else 1e-5,
    )


def test_an_embedding_that_is_tied_to_the_last_layer_stays():
    proto = model(
        """g (int64[N] x) => (float[N,50] y) {
            e = Gather(table, x) h = MatMul(e, w) t = Transpose<perm=[1,0]>(table) y = MatMul(h, t) }""",
        table=RNG.standard_normal((50, 32)),
        w=RNG.standard_normal((32, 32)),
    )
    loaded = graphopt.load(proto)
    passes.QuantizeWeights()(loaded)
    kinds = {x.name: x.dtype for x in loaded.graph.initializers.values()}
    assert kinds["table"] is ir.DataType.FLOAT and kinds["w"] is ir.DataType.UINT4


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("quantize_weights_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("quantize_weights_mistakes", call, globals())


FORMS = {
    "columns": ((64, 24), (2, 24), {"axis": 0, "block_size": 32}, "MatMul(x, d)"),
    "rows": ((24, 64), (24, 2), {"axis": 1, "block_size": 32}, "Gemm<transB=1>(x, d)"),
    "rows, last axis": ((24, 64), (24, 2), {"axis": -1, "block_size": 32}, "Gemm<transB=1>(x, d)"),
    "channels": ((64, 24), (24,), {"axis": 1}, "MatMul(x, d)"),
    "tensor": ((64, 24), (), {}, "MatMul(x, d)"),
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT8", "UINT8"])
@pytest.mark.parametrize("form", FORMS)
def test_frozen_weights_of_qdq_files_stay_integers(form, kind, zero):
    """Files of onnxruntime's and Olive's quantizers in QDQ format, and of torch's quantization."""
    shape, scales, attributes, product = FORMS[form]
    dtype = ir.DataType[kind]
    low, high = int(dtype.min), int(dtype.max)
    q, z = RNG.integers(low, high + 1, shape), RNG.integers(low, high + 1, scales)
    s = (RNG.uniform(0.5, 1, scales) / (high - low)).astype(np.float32)
    options = ", ".join(f"{name}={value}" for name, value in attributes.items())
    proto = model(
        f"""g (float[M,64] x0) => (float[M,24] y) {{
            x = Mul(x0, gain) d = DequantizeLinear{f"<{options}>" if options else ""}(q, s{", z" if zero else ""})
            y = {product} }}""",
        s=s,
        gain=RNG.standard_normal(64),
    )
    code = getattr(onnx.TensorProto, kind)
    proto.graph.initializer.append(onnx.helper.make_tensor("q", code, shape, q.ravel()))
    if zero:
        proto.graph.initializer.append(onnx.helper.make_tensor("z", code, scales, np.ravel(z)))
    axis, block = attributes.get("axis", 1), attributes.get("block_size")
    wide = [np.repeat(a, block, axis) if block else a for a in (s, z * zero)]
    floats = ((q - wide[1]) * wide[0]).astype(np.float32)
    w = torch.tensor(floats if "transB" not in product else floats.T.copy())
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters("gain"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.05),
    )
    executor = graphopt.Executor(step, threads=1)
    x, t = (RNG.standard_normal((5, n)).astype(np.float32) for n in (64, 24))
    gain = torch.tensor(executor.parameters["gain"], requires_grad=True)
    y = (torch.tensor(x) * gain) @ w
    np.testing.assert_allclose(executor.predict(x0=x)["y"], y.detach(), rtol=1e-5, atol=1e-6 * float(y.abs().max()))
    optimizer = torch.optim.SGD([gain], 0.05)
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss((torch.tensor(x) * gain) @ w, torch.tensor(t))
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(executor.step(x0=x, target=t)["loss"], loss.item(), rtol=1e-6)
    assert sum(node.op_type == "DequantizeLinear" for node in step.graph) == 2
    assert step.graph.initializers["q"].dtype is dtype
    assert max(v.const_value.size for v in step.graph.initializers.values() if v.dtype is ir.DataType.FLOAT) <= 64


@pytest.mark.slow
def test_the_command_quantizes(tmp_path):
    code = cli.main(
        [
            "model=mlp",
            "quantize=weights",
            "quantize.bits=8",
            "adapter=lora",
            "fit.epochs=1",
            f"folder={tmp_path / 'run'}",
        ]
    )
    assert not code
    assert b"lora_A" in (tmp_path / "run" / "step.onnx").read_bytes()
