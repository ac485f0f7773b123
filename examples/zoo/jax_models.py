"""Define JAX modules of flax and equinox, exported by jax2onnx."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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

    def train(self, batches: Sequence[Batch], double: bool) -> Training:
        with jax.enable_x64(double):
            kind = jnp.float64 if double else jnp.float32
            weights = jax.tree.map(lambda w: jnp.asarray(w, kind), self.weights)
            optimizer = optax_optimizer(self.case.optimizer)
            state = optimizer.init(weights)
            losses = []
            for batch in batches[:-1]:
                x, target = self._arrays(batch, kind)
                loss, gradients = jax.value_and_grad(self._loss)(weights, x, target)
                updates, state = optimizer.update(gradients, state, weights)
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


def optax_optimizer(step: passes.SGD | passes.Adam) -> optax.GradientTransformation:
    if isinstance(step, passes.SGD):
        return optax.sgd(step.learning_rate, step.momentum)
    return optax.adam(step.learning_rate, step.beta1, step.beta2, step.epsilon)


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


def equinox_mlp() -> eqx.Module:
    return eqx.nn.MLP(6, 3, 8, 2, activation=jax.nn.tanh, key=jax.random.key(0))


CLASSES = {"loss": passes.CrossEntropy(axis=-1)}

CASES = {
    "flax, perceptron": JaxCase(Perceptron, (6,), **CLASSES),
    "flax, convolutions": JaxCase(Convolutional, (6, 6, 2), **CLASSES),
    "flax, attention": JaxCase(Attention, (6,), 11, **CLASSES),
    "flax, tied": JaxCase(Tied, (6,), 11, **CLASSES),
    "equinox, perceptron": JaxCase(equinox_mlp, (6,), optimizer=passes.Adam(1e-3)),
    "equinox, convolution": JaxCase(Convolution, (2, 8, 8), **CLASSES),
}  # fmt: skip
