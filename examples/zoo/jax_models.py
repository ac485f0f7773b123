"""Define JAX modules of flax and equinox, exported by jax2onnx."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import numpy as np
import onnx
import optax
from comparison import Batch, Case, Model, Training
from flax import nnx
from jax import numpy as jnp
from jax2onnx import to_onnx

import passes

BATCH = 4


@dataclass(frozen=True)
class JaxCase(Case):
    """Describe a module with one input.

    Args:
        build: a function that returns the module, which is called with a batch.
        shape: the shape of a row of the input.
        words: the number of different integers in the input; 0 for floating-point numbers.
    """

    build: Callable[[], Any]
    shape: Sequence[int]
    words: int = 0

    exporters = ("jax2onnx, dynamic", "jax2onnx, static")

    def model(self, exporter: str) -> JaxModel:
        module = self.build()
        if isinstance(module, nnx.Module):
            definition, weights, rest = nnx.split(module, nnx.Param, ...)

            def merge(weights: Any) -> Any:
                return nnx.merge(definition, weights, rest)
        else:
            weights, rest = eqx.partition(module, eqx.is_inexact_array)

            def merge(weights: Any) -> Any:
                return jax.vmap(eqx.combine(weights, rest))

        random = np.random.default_rng(0)
        weights = jax.tree.map(lambda w: w + random.normal(0, 0.05, w.shape).astype(np.float32), weights)
        return JaxModel(self, merge, weights, "B" if exporter.endswith("dynamic") else BATCH)


@dataclass(frozen=True)
class JaxModel(Model):
    case: JaxCase
    merge: Callable[[Any], Any]
    weights: Any
    rows: int | str

    def batches(self, count: int) -> list[Batch]:
        random = np.random.default_rng(1)
        return [self._batch(random, BATCH + (i % 2 if self.rows == "B" else 0)) for i in range(count)]

    def _batch(self, random: np.random.Generator, rows: int) -> Batch:
        shape = (rows, *self.case.shape)
        x = random.integers(0, self.case.words, shape) if self.case.words else random.normal(0, 1, shape)
        x = x.astype(np.int32 if self.case.words else np.float32)
        y = self.merge(self.weights)(jnp.asarray(x))
        if isinstance(self.case.loss, passes.CrossEntropy):
            return Batch({"in_0": x}, random.integers(0, y.shape[-1], y.shape[:-1]))
        return Batch({"in_0": x}, random.normal(0, 1, y.shape).astype(np.float32))

    def parameters(self) -> dict[str, np.ndarray]:
        return named(self.weights)

    def export(self) -> onnx.ModelProto:
        kind = jnp.int32 if self.case.words else jnp.float32
        spec = jax.ShapeDtypeStruct((self.rows, *self.case.shape), kind)
        model = to_onnx(self.merge(self.weights), [spec])
        assert isinstance(model, onnx.ModelProto)
        return model

    def train_as_recorded(self, optimizer: Any, batches: Sequence[Batch]) -> Training:
        with mock.patch.object(jax.lax, "stop_gradient", lambda x: x):
            return self.train(optimizer, batches, double=False)

    def train(self, optimizer: Any, batches: Sequence[Batch], double: bool) -> Training:
        with jax.enable_x64(double):
            kind = jnp.float64 if double else jnp.float32
            weights = jax.tree.map(lambda w: jnp.asarray(w, kind), self.weights)
            transformation = optax_optimizer(optimizer)
            state = transformation.init(weights)
            losses = []
            for batch in batches[:-1]:
                x, target = self._arrays(batch, kind)
                loss, gradients = jax.value_and_grad(self._loss)(weights, x, target)
                updates, state = transformation.update(gradients, state, weights)
                weights = optax.apply_updates(weights, updates)
                losses.append(float(loss))
            predictions = np.asarray(self.merge(weights)(self._arrays(batches[-1], kind)[0]))
            trained = named(weights)
        return Training(losses, trained, predictions, {name: weight.size for name, weight in trained.items()})

    def _loss(self, weights: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        y = self.merge(weights)(x)
        if isinstance(self.case.loss, passes.CrossEntropy):
            return optax.softmax_cross_entropy_with_integer_labels(y, target).mean()
        return ((y - target) ** 2).mean()

    def _arrays(self, batch: Batch, kind: Any) -> list[jax.Array]:
        arrays = (batch.inputs["in_0"], batch.target)
        return [jnp.asarray(x, kind if x.dtype.kind == "f" else None) for x in arrays]


def named(weights: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def optax_optimizer(step: passes.SGD | passes.AdamW) -> optax.GradientTransformation:
    if isinstance(step, passes.SGD):
        return optax.sgd(step.learning_rate)
    moments = step.beta1, step.beta2, step.epsilon
    return optax.adamw(step.learning_rate, *moments, weight_decay=step.weight_decay)


class Perceptron(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.a, self.b, self.norm = (
            nnx.Linear(6, 8, rngs=rngs),
            nnx.Linear(8, 3, rngs=rngs),
            nnx.LayerNorm(8, rngs=rngs),
        )

    def __call__(self, x):
        return self.b(nnx.relu(self.norm(self.a(x))))


class Convolutional(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.a, self.norm = nnx.Conv(2, 4, (3, 3), rngs=rngs), nnx.GroupNorm(4, 2, rngs=rngs)
        self.b = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.gelu(self.norm(self.a(x))).mean((1, 2)))


class Attention(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.words, self.positions = nnx.Embed(11, 8, rngs=rngs), nnx.Param(jnp.zeros((1, 6, 8)))
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm, self.head = nnx.RMSNorm(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        h = self.words(x) + self.positions[...]
        return self.head(h + self.attention(self.norm(h)))


class Tied(nnx.Module):
    """Build a head tied to the embedding."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.words, self.mlp = nnx.Embed(11, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.words.attend(nnx.tanh(self.mlp(self.words(x))))


class Convolution(eqx.Module):
    a: eqx.nn.Conv2d
    b: eqx.nn.Linear

    def __init__(self) -> None:
        one, two = jax.random.split(jax.random.key(0))
        self.a, self.b = eqx.nn.Conv2d(2, 4, 3, key=one), eqx.nn.Linear(4 * 36, 3, key=two)

    def __call__(self, x):
        return self.b(jax.nn.relu(self.a(x)).reshape(-1))


class Scan(nnx.Module):
    """Scan a leaky cell over the steps of a sequence."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.enter, self.again = nnx.Linear(5, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        def step(h, row):
            h = 0.5 * h + 0.5 * jnp.tanh(row + self.again(h))
            return h, h

        rows = jnp.swapaxes(self.enter(x), 0, 1)
        _, ys = jax.lax.scan(step, jnp.zeros_like(rows[0, :, :6]), rows)
        return self.head(jnp.swapaxes(ys, 0, 1))


class ScanWeights(nnx.Module):
    """Scan over layers whose weights are stacked, as large language models do."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.weights = nnx.Param(jax.random.normal(jax.random.key(1), (3, 6, 6)) / 3)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, self.weights[...])
        return self.head(h)


class Loop(nnx.Module):
    """Apply a layer three times by fori_loop, which JAX differentiates as a scan."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layer, self.head = nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.lax.fori_loop(0, 3, lambda i, h: h + jnp.tanh(self.layer(h)), x))


class Branches(nnx.Module):
    """Choose a branch by the data."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.one, self.two = nnx.Linear(6, 4, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        one, two = (lambda x: jnp.tanh(self.one(x))), (lambda x: 0.5 * self.two(x))
        return self.head(jax.lax.cond(x.sum() > 0, one, two, x))


class Recurrent(nnx.Module):
    """Scan a cell of flax; its first state is 0."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        rngs = nnx.Rngs(0)
        self.cell, self.head = kind(5, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        rows = jnp.swapaxes(x, 0, 1)
        h = jnp.zeros_like(x[:, 0, :1]) * jnp.ones(6)
        state = h if isinstance(self.cell, nnx.GRUCell) else (h, h)
        _, ys = jax.lax.scan(self.cell, state, rows)
        return self.head(jnp.swapaxes(ys, 0, 1))


class Rounding(nnx.Module):
    """Round, straight through."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.one, self.two = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        h = self.one(x)
        return self.two(h + jax.lax.stop_gradient(jnp.round(h) - h))


class Coupling(nnx.Module):
    """Couple affinely, as a normalizing flow."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.one, self.two = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        a, b = jnp.split(x, 2, -1)
        s, t = jnp.split(self.two(jnp.tanh(self.one(a))), 2, -1)
        return jnp.concatenate([a, b * jnp.exp(jnp.tanh(s)) + t], -1)


def equinox_mlp() -> eqx.Module:
    return eqx.nn.MLP(6, 3, 8, 2, activation=jax.nn.tanh, key=jax.random.key(0))


CLASSES = {"loss": passes.CrossEntropy(axis=-1)}

CASES = {
    "flax, perceptron": JaxCase(Perceptron, (6,), **CLASSES),
    "flax, convolutions": JaxCase(Convolutional, (6, 6, 2), **CLASSES),
    "flax, attention": JaxCase(Attention, (6,), 11, **CLASSES),
    "flax, tied": JaxCase(Tied, (6,), 11, **CLASSES),
    "flax, scan": JaxCase(Scan, (4, 5)),
    "flax, scan over layers": JaxCase(ScanWeights, (6,)),
    "flax, fori_loop": JaxCase(Loop, (6,)),
    "flax, cond": JaxCase(Branches, (6,)),
    "flax, LSTM": JaxCase(lambda: Recurrent(nnx.OptimizedLSTMCell), (4, 5)),
    "flax, GRU": JaxCase(lambda: Recurrent(nnx.GRUCell), (4, 5)),
    "flax, rounding straight through": JaxCase(Rounding, (6,), unrecorded=("jax2onnx",)),
    "flax, coupling": JaxCase(Coupling, (6,)),
    "equinox, perceptron": JaxCase(equinox_mlp, (6,)),
    "equinox, convolution": JaxCase(Convolution, (2, 8, 8), **CLASSES),
}  # fmt: skip
