"""Run JAX and optax: one jitted function per step, donated weights and optimizer state, NHWC images as in Flax.

In bfloat16, products and convolutions read bfloat16, and everything else is computed as in float32 or promoted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from protocol import Job, Step, serve

Weights = dict[str, Any]
RUNNING = ("running_mean", "running_var")
PRODUCTS = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": "highest"}
LOWER: list[Any] = []  # the type that products read, if it is not that of the weights


def lowered(x: jax.Array) -> jax.Array:
    return x.astype(LOWER[0]) if LOWER else x


def linear(w: Weights, name: str, x: jax.Array) -> jax.Array:
    return lowered(x) @ lowered(w[f"{name}.weight"]) + lowered(w[f"{name}.bias"])


def convolution(w: Weights, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    x, kernel = lowered(x), lowered(w[f"{name}.weight"])
    pad = kernel.shape[0] // 2
    y = lax.conv_general_dilated(
        x, kernel, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + lowered(w[f"{name}.bias"]) if f"{name}.bias" in w else y


def mlp(w: Weights, x: jax.Array, new: Weights) -> jax.Array:
    for i in range(sum(name.endswith(".weight") for name in w)):
        x = linear(w, f"layer{i}", jax.nn.relu(x) if i else x)
    return x


def cnn(w: Weights, x: jax.Array, new: Weights) -> jax.Array:
    for name in ("conv0", "conv1"):
        x = jax.nn.relu(convolution(w, name, x))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return linear(w, "head", jax.nn.relu(linear(w, "hidden", x)))


def batch_norm(w: Weights, name: str, x: jax.Array, new: Weights) -> jax.Array:
    x = x.astype(jnp.float32)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    count = x.size // x.shape[-1]
    for part, now in zip(RUNNING, (mean, variance * (count / (count - 1))), strict=True):
        new[f"{name}.{part}"] = 0.9 * w[f"{name}.{part}"] + 0.1 * now
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * w[f"{name}.weight"]) + w[f"{name}.bias"]


def resnet(w: Weights, x: jax.Array, new: Weights) -> jax.Array:
    x = jax.nn.relu(batch_norm(w, "stem_norm", convolution(w, "stem", x), new))
    for i in range(6):
        name, halves = f"blocks.{i}", f"blocks.{i}.shortcut.weight" in w
        y = jax.nn.relu(batch_norm(w, f"{name}.norm1", convolution(w, f"{name}.conv1", x, 1 + halves), new))
        y = batch_norm(w, f"{name}.norm2", convolution(w, f"{name}.conv2", y), new)
        if halves:
            x = batch_norm(w, f"{name}.shortcut_norm", convolution(w, f"{name}.shortcut", x, 2), new)
        x = jax.nn.relu(x + y)
    return linear(w, "head", x.mean((1, 2)))


def layer_norm(w: Weights, name: str, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def transformer(w: Weights, x: jax.Array, new: Weights) -> jax.Array:
    x = w["embedding.weight"][x] + w["positions"]
    for i in range(4):
        name = f"layers.{i}"
        qkv = linear(w, f"{name}.qkv", layer_norm(w, f"{name}.norm1", x))
        query, key, value = (part.reshape(*x.shape[:2], 8, -1) for part in jnp.split(qkv, 3, axis=-1))
        y = jax.nn.dot_product_attention(query, key, value).reshape(x.shape)
        x = x + linear(w, f"{name}.out", y)
        y = jax.nn.gelu(linear(w, f"{name}.up", layer_norm(w, f"{name}.norm2", x)), approximate=False)
        x = x + linear(w, f"{name}.down", y)
    return linear(w, "head", layer_norm(w, "norm", x).mean(1))


def lstm(w: Weights, x: jax.Array, new: Weights) -> jax.Array:
    """Compute an LSTM with ONNX's order of gates: i, o, f, c."""
    recurrent = lowered(w["lstm.R"][0].T)
    gates = lowered(x.transpose(1, 0, 2)) @ lowered(w["lstm.W"][0].T) + w["lstm.B"][0].reshape(2, -1).sum(0)
    zeros = jnp.zeros((x.shape[0], recurrent.shape[0]), x.dtype)

    def cell(state: tuple[jax.Array, jax.Array], gate: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        h, c = state
        i, o, f, g = jnp.split(gate + lowered(h) @ recurrent, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    (h, _), _ = lax.scan(cell, (zeros, zeros), gates)
    return linear(w, "head", h)


FAMILIES: dict[str, Callable[[Weights, jax.Array, Weights], jax.Array]] = {
    "linear": mlp,
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "transformer": transformer,
    "lstm": lstm,
}
OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.01),
}


def build(job: Job) -> Step:
    if job.device == "cuda" and jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX {jax.__version__} finds no GPU: pip install 'jax[cuda13]'")
    jax.config.update("jax_default_matmul_precision", PRODUCTS[job.precision])
    LOWER[:] = [jnp.bfloat16] if job.precision == "bfloat16" else []

    def native(array: np.ndarray) -> np.ndarray:  # from OIHW to HWIO
        return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array

    network, optimizer = FAMILIES[job.family], OPTIMIZERS[job.optimizer](job.rate)
    arrays = {name: jnp.asarray(native(array)) for name, array in job.weights.items()}
    running = {name: array for name, array in arrays.items() if name.endswith(RUNNING)}
    weights = {name: array for name, array in arrays.items() if name not in running}
    images = job.data[0][0].ndim == 4
    batches = [(jnp.asarray(x.transpose(0, 2, 3, 1) if images else x), jnp.asarray(target)) for x, target in job.data]

    def cost(weights: Weights, running: Weights, x: jax.Array, target: jax.Array) -> tuple[jax.Array, Weights]:
        new: Weights = {}
        y = network({**weights, **running}, x, new).astype(jnp.float32)
        if job.classifies:
            return optax.softmax_cross_entropy_with_integer_labels(y, target).mean(), new
        return ((y - target) ** 2).mean(), new

    def update(state: Any, x: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        weights, running, slots = state
        (loss, new), gradients = jax.value_and_grad(cost, has_aux=True)(weights, running, x, target)
        updates, slots = optimizer.update(gradients, slots, weights)
        return (optax.apply_updates(weights, updates), new, slots), loss

    jitted = jax.jit(update, donate_argnums=0)
    state: Any = (weights, running, optimizer.init(weights))

    def step(i: int) -> float:
        nonlocal state
        state, loss = jitted(state, *batches[i])
        return float(loss)

    return step


if __name__ == "__main__":
    serve(build)
