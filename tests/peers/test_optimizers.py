"""Optimizers against optax, schedulefree, transformers and bitsandbytes, over 100 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch

optax = pytest.importorskip("optax")
schedulefree = pytest.importorskip("schedulefree")
bitsandbytes = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
jax = pytest.importorskip("jax")

from builders import mlp, run  # noqa: E402

import graphopt  # noqa: E402
import passes  # noqa: E402
from passes.optimizers.slots import dynamic_table  # noqa: E402

X = np.random.default_rng(1).standard_normal((16, 4))
T = np.tanh(X[:, :3])
LOSS = {"loss": passes.MeanSquaredError()}


def weights(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {x.name: onnx.numpy_helper.to_array(x).copy() for x in proto.graph.initializer}


def loss_of(w: Any, x: Any, t: Any, library: Any) -> Any:
    hidden = library.tanh(x @ w["fc0.weight"].T + w["fc0.bias"])
    return ((hidden @ w["fc1.weight"].T + w["fc1.bias"] - t) ** 2).mean()


OF_OPTAX = {
    "LAMB": (passes.LAMB(0.01, weight_decay=0.1), lambda: optax.lamb(0.01, weight_decay=0.1)),
    "LAMB of options": (
        passes.LAMB(0.02, beta1=0.8, beta2=0.99, epsilon=1e-3),
        lambda: optax.lamb(0.02, 0.8, 0.99, 1e-3),
    ),
    "Lion": (passes.Lion(1e-3, weight_decay=0.1), lambda: optax.lion(1e-3, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", OF_OPTAX)
def test_a_hundred_steps_are_optaxs(name: str) -> None:
    optimizer, twin = OF_OPTAX[name]
    step = graphopt.compile(mlp(dtype=np.float64), optimizer=optimizer, **LOSS)
    with jax.enable_x64(True):
        w = {key: jax.numpy.array(x) for key, x in weights(mlp(dtype=np.float64)).items()}
        chain = twin()
        held = chain.init(w)
        for outputs in run(step, 100, {"x": X, "target": T}):
            loss, gradient = jax.value_and_grad(loss_of)(w, X, T, jax.numpy)
            np.testing.assert_allclose(outputs["loss"], loss, rtol=1e-8)
            moves, held = chain.update(gradient, held, w)
            w = optax.apply_updates(w, moves)
        for key, x in w.items():
            np.testing.assert_allclose(outputs[f"{key}.next"], x, rtol=1e-7, atol=1e-10)


OF_TORCH = {
    "schedule-free": (
        {
            "optimizer": passes.ScheduleFreeAdamW(0.01, weight_decay=0.1, weight_power=0.5),
            "schedule": passes.Constant(warmup=10),
        },
        lambda w: schedulefree.AdamWScheduleFree(w, 0.01, weight_decay=0.1, warmup_steps=10, r=0.5),
    ),
    "Adafactor of transformers": (
        {"optimizer": passes.Adafactor(1e-3, scale_parameter=False, relative_step=False, epsilon=1e-15)},
        lambda w: transformers.optimization.Adafactor(
            w, 1e-3, scale_parameter=False, relative_step=False, eps=(1e-30, 1e-3)
        ),
    ),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_hundred_steps_are_the_packages(name: str) -> None:
    steps, twin = OF_TORCH[name]
    step = graphopt.compile(mlp(dtype=np.float64), **LOSS, **steps)
    w = {key: torch.tensor(x, requires_grad=True) for key, x in weights(mlp(dtype=np.float64)).items()}
    reference = twin(list(w.values()))
    getattr(reference, "train", lambda: None)()
    for outputs in run(step, 100, {"x": X, "target": T}):
        loss = loss_of(w, torch.tensor(X), torch.tensor(T), torch)
        np.testing.assert_allclose(outputs["loss"], loss.item(), rtol=1e-7)
        reference.zero_grad()
        loss.backward()
        reference.step()
    getattr(reference, "eval", lambda: None)()
    for key, x in w.items():
        np.testing.assert_allclose(outputs[f"{key}.next"], x.detach().numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_bitsandbytess(signed: bool) -> None:
    wanted = bitsandbytes.functional.create_dynamic_map(signed).numpy()
    np.testing.assert_allclose(dynamic_table(signed), wanted, rtol=3e-7)


def nearest(x: torch.Tensor, code: torch.Tensor, largest: torch.Tensor, out: torch.Tensor, size: int) -> None:
    """Quantize as bitsandbytes does on GPUs; its kernel for CPUs looks small numbers up in a coarse table."""
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % size)).view(-1, size)
    most = blocks.abs().amax(1)
    scaled = (blocks / most.clamp(min=1.2e-38)[:, None]).flatten()[: x.numel()]
    out.copy_(torch.bucketize(scaled, (code[1:] + code[:-1]) / 2).to(torch.uint8).view(x.shape))
    largest.copy_(most)


OF_8_BITS = {
    "AdamW": (
        passes.AdamW(1e-3, slot_bits=8),
        lambda w: bitsandbytes.optim.AdamW8bit(w, 1e-3, weight_decay=0.01),
    ),
    "Lion": (passes.Lion(1e-4, slot_bits=8), lambda w: bitsandbytes.optim.Lion8bit(w, 1e-4)),
    "SGD": (
        passes.SGD(1e-2, momentum=0.9, slot_bits=8),
        lambda w: bitsandbytes.optim.SGD8bit(w, 1e-2, momentum=0.9),
    ),
}


@pytest.mark.parametrize("name", OF_8_BITS)
def test_a_hundred_steps_in_8_bits_are_bitsandbytess(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding near the middle of two codes is all that differs: a code's step is 1 % of a number."""
    monkeypatch.setattr("bitsandbytes.backends.cpu.ops._quant_blockwise_fp32_direct", nearest)
    optimizer, twin = OF_8_BITS[name]
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((64, 70)).astype(np.float32), rng.standard_normal((64, 3)).astype(np.float32)
    proto = mlp((70, 65, 3))
    executor = graphopt.Executor(graphopt.compile(proto, optimizer=optimizer, **LOSS), threads=1)
    w = {key: torch.tensor(x, requires_grad=True) for key, x in weights(proto).items()}
    start, reference = weights(proto), twin(list(w.values()))
    for _ in range(100):
        loss = loss_of(w, torch.tensor(x), torch.tensor(t), torch)
        assert executor.step(x=x, target=t)["loss"] == pytest.approx(loss.item(), rel=1e-3)
        reference.zero_grad()
        loss.backward()
        reference.step()
    for key, tensor in w.items():
        move = tensor.detach().numpy() - start[key]
        error = np.abs(executor.parameters[key] - start[key] - move)
        assert error.mean() <= 2e-3 * np.abs(move).mean(), key
