"""Hybrid decoders train without their states: rows of any length, PyTorch's numbers, and the file with its caches."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from steps import outputs
from twins import descended

import graphopt
import passes
from graphopt.graph.postprocessing import Caches

OLD = onnxruntime.__version__.startswith("1.19")
pytestmark = pytest.mark.skipif(OLD, reason="onnxruntime 1.19 lacks these operators")
B, D, HEADS, SIZE = 2, 8, 2, 4
LENGTHS = (3, 45)  # less than a chunk, and more
STATES = "float[B,16,2] one, float[B,2,4,4] two"
PRESENT = "float[B,16,2] three, float[B,2,4,4] four"


def hybrid(rng: np.random.Generator) -> onnx.ModelProto:
    """A convolution and a linear attention, whose states have names that say nothing."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[B,T,{D}] x, {STATES}) => (float[B,T,{D}] logits, {PRESENT}) {{
            p = MatMul(x, w) t = Transpose<perm = [0, 2, 1]>(p)
            c, three = com.microsoft.CausalConvWithState<activation = "silu">(t, filters, bias, one)
            u = Transpose<perm = [0, 2, 1]>(c) q, k = Split<axis = 2, num_outputs = 2>(u)
            shape = Constant<value = int64[4] {{0, 0, 2, 4}}>() flat = Constant<value = int64[3] {{0, 0, 8}}>()
            ks = Reshape(k, shape) kn = LpNormalization<axis = -1, p = 2>(ks) kf = Reshape(kn, flat)
            a = MatMul(x, wa) e = MatMul(x, we)
            decay, beta = com.microsoft.LinearAttentionGate(a, dt_bias, neg_exp_A, e)
            y, four = com.microsoft.LinearAttention<q_num_heads = 2, kv_num_heads = 2>(q, kf, x, two, decay, beta)
            n = com.microsoft.GatedRMSNorm<epsilon = 0.001>(y, norm, x) logits = MatMul(n, wo) }}"""
    )
    shapes = {"w": (D, 16), "filters": (16, 1, 3), "bias": (16,), "wa": (D, 2), "we": (D, 2), "dt_bias": (2,)}
    shapes |= {"norm": (SIZE,), "wo": (D, D)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    arrays["neg_exp_A"] = np.array([-0.5, -1.5], np.float32)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


def of_torch(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute one position after the other."""
    p = torch.nn.functional.pad((x @ w["w"]).mT, (2, 0))
    u = torch.nn.functional.silu(torch.nn.functional.conv1d(p, w["filters"], w["bias"], groups=16)).mT
    q, k = u.chunk(2, -1)
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)) for part in (q, k, x))
    k = k / k.norm(dim=-1, keepdim=True)
    grown = torch.exp(w["neg_exp_A"] * torch.nn.functional.softplus(x @ w["wa"] + w["dt_bias"]))
    rate, state, rows = torch.sigmoid(x @ w["we"]), x.new_zeros(len(x), HEADS, SIZE, SIZE), []
    for t in range(x.shape[1]):
        state = state * grown[:, t, :, None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        delta = rate[:, t, :, None] * (v[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / SIZE**0.5)
    y = torch.stack(rows, 1)
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 0.001) * w["norm"]
    return (y.flatten(2) * torch.nn.functional.silu(x)) @ w["wo"]


def fed(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": x, "one": np.zeros((B, 16, 2), np.float32), "two": np.zeros((B, 2, 4, 4), np.float32)}


def rows(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    x, target = rng.standard_normal((2, B, length, D)).astype(np.float32)
    return x, target


def test_a_hybrid_trains_as_pytorch_does_and_keeps_its_states() -> None:
    rng = np.random.default_rng(0)
    proto = hybrid(rng)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    caches = Caches.read(step)
    assert caches is not None
    assert ({*caches.inputs}, {*caches.outputs}) == ({"one", "two"}, {"three", "four"})
    executor = graphopt.Executor(step, threads=1)
    assert list(executor.inputs) == ["x", "target"] and "neg_exp_A" not in executor.parameters
    own = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in proto.graph.initializer}
    trained = [w.requires_grad_() for name, w in own.items() if name != "neg_exp_A"]
    optimizer, losses = torch.optim.SGD(trained, 0.1), []
    for length in LENGTHS * 3:
        x, target = rows(rng, length)
        found, expected = executor.predict(x=x)["logits"], of_torch(torch.tensor(x), own)
        np.testing.assert_allclose(found, expected.detach(), rtol=1e-4, atol=2e-6)
        loss = torch.nn.functional.mse_loss(expected, torch.tensor(target))
        descended(loss, optimizer)
        losses.append((executor.step(x=x, target=target)["loss"], loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)
    file = executor.trained(into=proto)
    assert [x.name for x in file.graph.input] == [x.name for x in proto.graph.input]
    x, _ = rows(rng, 9)
    whole = outputs(file, fed(x))
    np.testing.assert_allclose(whole["logits"], executor.predict(x=x)["logits"], rtol=1e-4, atol=2e-6)
    first = outputs(file, fed(x[:, :5]))
    rest = outputs(file, {"x": x[:, 5:], "one": first["three"], "two": first["four"]})
    np.testing.assert_allclose(rest["logits"], whole["logits"][:, 5:], rtol=1e-4, atol=2e-6)


def test_the_trained_model_without_caches_computes_the_states() -> None:
    rng = np.random.default_rng(1)
    proto = hybrid(rng)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    x, _ = rows(rng, 7)
    found, expected = outputs(graphopt.Executor(step).trained(), {"x": x}), outputs(proto, fed(x))
    for name in ("logits", "three", "four"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-6)


def test_lora_beside_a_hybrid_goes_into_slots() -> None:
    rng = np.random.default_rng(2)
    proto = hybrid(rng)
    step = graphopt.compile(
        proto, adapter=passes.LoRA("w*", rank=2), loss=passes.MeanSquaredError(), optimizer=passes.Adam(0.01)
    )
    executor = graphopt.Executor(step, threads=1)
    x, target = rows(rng, 40)
    losses = [executor.step(x=x, target=target)["loss"] for _ in range(4)]
    assert losses[3] < losses[0]
    merged, slots = executor.trained(into=proto), executor.trained(into=proto, adapters="slots")
    np.testing.assert_array_equal(outputs(slots, fed(x))["logits"], outputs(proto, fed(x))["logits"])
    found = outputs(merged, fed(x))["logits"]
    np.testing.assert_allclose(found, executor.predict(x=x)["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_equal_keys_are_no_trouble(rate: float) -> None:
    """A repeated token writes one key again and again: the powers of its products would overflow."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[B,T,8] q, float[B,T,8] k, float[B,T,8] v, float[B,T,2] b) => (float[B,T,8] y) {
            y, s = com.microsoft.LinearAttention<q_num_heads = 2, kv_num_heads = 2, update_rule = "delta">(
                q, k, v, , , b) }"""
    )
    rng = np.random.default_rng(0)
    q, v = rng.standard_normal((2, 1, 150, 8)).astype(np.float32)
    feeds = {"q": q, "k": np.full_like(q, 0.5), "v": v, "b": np.full((1, 150, 2), rate, np.float32)}
    model = graphopt.load(proto)
    passes.Normalize()(model)
    found, expected = outputs(model, feeds)["y"], outputs(proto, feeds)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_state_that_something_else_reads_stays() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[B,4,T] x, float[B,4,2] state) => (float[B,4,T] y, float[B,4,2] present) {
            c, present = com.microsoft.CausalConvWithState(x, w, , state)
            axes = Constant<value = int64[1] {2}>() s = ReduceSum(state, axes) y = Add(c, s) }"""
    )
    w = np.ones((4, 1, 3), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    model = graphopt.load(proto)
    passes.Normalize()(model)
    assert [x.name for x in model.graph.inputs] == ["x", "state"] and Caches.read(model) is None
    feeds = {"x": np.ones((1, 4, 3), np.float32), "state": np.full((1, 4, 2), 2, np.float32)}
    np.testing.assert_allclose(outputs(model, feeds)["y"], outputs(proto, feeds)["y"], rtol=1e-6)
