"""Define Keras models on the PyTorch backend, exported by `model.export(format="onnx")`."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import onnx
from comparison import ROUNDINGS, Batch, Case, Model, Training, nudged
from in_torch import warm_up as warm_up
from keras import layers

import passes

BATCH = 4
OPTIMIZERS = passes.SGD(0.01), passes.AdamW(1e-3, epsilon=1e-13)  # Keras adds a larger epsilon elsewhere


@dataclass(frozen=True)
class KerasCase(Case):
    """Describe a model, and a function that draws inputs for a number of rows from a generator."""

    build: Callable[[], keras.Model]
    inputs: Callable[[int, np.random.Generator], np.ndarray]
    ways: Sequence[str] = field(default=("dynamic", "static"), kw_only=True)
    optimizers: Sequence[Any] = field(default=OPTIMIZERS, kw_only=True)

    @property
    def exporters(self) -> Sequence[str]:
        return self.ways

    def model(self, exporter: str) -> KerasModel:
        keras.utils.set_random_seed(0)
        model = self.build()
        model(self.inputs(BATCH, np.random.default_rng(0)))
        random = np.random.default_rng(0)
        for weight in model.weights:
            if "seed" not in weight.path:
                weight.assign(weight + np.abs(random.normal(0, 0.05, weight.shape)))
        return KerasModel(self, model, exporter)


@dataclass(frozen=True)
class KerasModel(Model):
    case: KerasCase
    model: keras.Model
    exporter: str

    def batches(self, count: int) -> list[Batch]:
        random = np.random.default_rng(1)
        return [self._batch(random) for _ in range(count)]

    def _batch(self, random: np.random.Generator) -> Batch:
        x = self.case.inputs(BATCH, random)
        shape = self.model(x).shape
        if isinstance(self.case.loss, passes.CrossEntropy):
            return Batch(self._named(x), random.integers(0, shape[-1], shape[:-1]))
        return Batch(self._named(x), random.normal(0, 1, shape).astype(np.float32))

    def _named(self, x: np.ndarray) -> dict[str, np.ndarray]:
        return {self.model.inputs[0].name: x}

    def parameters(self) -> dict[str, np.ndarray]:
        return {w.path: np.array(keras.ops.convert_to_numpy(w)) for w in self.model.trainable_weights}

    def export(self) -> onnx.ModelProto:
        x = self.case.inputs(BATCH, np.random.default_rng(0))
        signature = [keras.InputSpec(shape=x.shape, dtype=str(x.dtype), name=self.model.inputs[0].name)]
        options = {"input_signature": signature} if self.exporter == "static" else {}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = Path(folder) / "model.onnx"
            with contextlib.redirect_stdout(io.StringIO()):
                self.model.export(str(path), format="onnx", verbose=False, **options)
            return onnx.load(path)

    def rounded_otherwise(self, optimizer: Any, batches: Sequence[Batch]) -> Iterator[Training]:
        """Train with other roundings of the weights: inputs may be integers."""
        weights = self.model.get_weights()
        for seed in range(ROUNDINGS):
            rng = np.random.default_rng(seed)
            try:
                self.model.set_weights([nudged(x, rng) for x in weights])
                yield self.train(optimizer, batches, double=False)
            finally:
                self.model.set_weights(weights)

    def train_as_recorded(self, optimizer: Any, batches: Sequence[Batch]) -> Training:
        with mock.patch.object(keras.ops, "stop_gradient", lambda x: x):
            return self.train(optimizer, batches, double=False)

    def train(self, optimizer: Any, batches: Sequence[Batch], double: bool) -> Training:
        with floats("float64" if double else "float32"):
            model = self.case.build()
            model(next(iter(batches[0].inputs.values())))
            model.set_weights(self.model.get_weights())
            model.compile(optimizer=keras_optimizer(optimizer), loss=keras_loss(self.case.loss))
            losses = []
            for batch in batches[:-1]:
                model.reset_metrics()  # otherwise the loss is a mean over batches
                losses.append(float(model.train_on_batch(*batch.inputs.values(), batch.target)))
            arrays = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_weights]
            predictions = model.predict_on_batch(*batches[-1].inputs.values())
        weights = dict(zip(self.parameters(), arrays, strict=True))
        return Training(losses, weights, predictions, {name: weight.size for name, weight in weights.items()})


@contextlib.contextmanager
def floats(kind: str) -> Iterator[None]:
    keras.config.set_floatx(kind)
    keras.config.set_dtype_policy(kind)
    try:
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def keras_optimizer(step: passes.SGD | passes.AdamW) -> keras.optimizers.Optimizer:
    if isinstance(step, passes.SGD):
        return keras.optimizers.SGD(step.learning_rate)
    return keras.optimizers.AdamW(step.learning_rate, step.weight_decay, step.beta1, step.beta2, step.epsilon)


def keras_loss(loss: object) -> keras.losses.Loss:
    if isinstance(loss, passes.CrossEntropy):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=loss.from_logits)
    return keras.losses.MeanSquaredError()


def numbers(*shape: int):
    return lambda batch, random: random.normal(0, 1, (batch, *shape)).astype(np.float32)


def words(length: int):
    return lambda batch, random: random.integers(1, 11, (batch, length)).astype(np.int32)


def text(*body: layers.Layer) -> keras.Model:
    return keras.Sequential([layers.Input((6,), dtype="int32"), layers.Embedding(11, 8), *body])


def attention() -> keras.Model:
    x = layers.Input((6,), dtype="int32")
    h = layers.Embedding(11, 8)(x)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
    h = layers.LayerNormalization()(h + layers.Dense(8)(layers.Dense(12, activation="gelu")(h)))
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))


def residual(normalization: type[layers.Layer], **options) -> keras.Model:
    x = layers.Input((8, 8, 2))
    h = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    h = layers.ReLU()(h + normalization(**options)(layers.Conv2D(4, 3, padding="same")(h)))
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling2D()(h)))


def dense() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(5, activation="selu"),
            layers.Dense(2),
        ]
    )


def convolutions() -> keras.Model:
    parts = [
        layers.SeparableConv2D(4, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.DepthwiseConv2D(2),
    ]
    return keras.Sequential([layers.Input((8, 8, 2)), *parts, layers.Flatten(), layers.Dense(3)])


def softmax() -> keras.Model:
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(3, activation="softmax")]
    )


class Rounding(layers.Layer):
    """Round, straight through."""

    def call(self, x):
        return x + keras.ops.stop_gradient(keras.ops.round(x) - x)


def rounded() -> keras.Model:
    parts = layers.Dense(8), Rounding(), layers.Dense(3)
    return keras.Sequential([layers.Input((6,)), *parts])


def siamese() -> keras.Model:
    x = layers.Input((2, 6))
    encode = keras.Sequential([layers.Dense(8), layers.BatchNormalization(), layers.Dense(4, activation="tanh")])
    return keras.Model(x, encode(x[:, 0]) - encode(x[:, 1]))


def autoencoder() -> keras.Model:
    down = layers.Conv2D(4, 3, 2, padding="same", activation="relu"), layers.Conv2D(6, 3, activation="elu")
    up = layers.Conv2DTranspose(4, 3, activation="relu"), layers.Conv2DTranspose(2, 4, 2, padding="same")
    return keras.Sequential([layers.Input((8, 8, 2)), *down, *up])


def factorized() -> keras.Model:
    x = layers.Input((3,), dtype="int32")
    v = layers.Embedding(11, 4)(x)
    pairwise = keras.ops.square(keras.ops.sum(v, 1)) - keras.ops.sum(keras.ops.square(v), 1)
    deep = layers.Dense(8, activation="gelu")(layers.Flatten()(v))
    return keras.Model(x, layers.Dense(1)(layers.Concatenate()([pairwise, deep])))


CLASSES = {"loss": passes.CrossEntropy(axis=-1)}

CASES = {
    "Dense": KerasCase(dense, numbers(6)),
    "Dense, softmax": KerasCase(softmax, numbers(6), loss=passes.CrossEntropy(axis=-1, from_logits=False)),
    "SeparableConv2D": KerasCase(convolutions, numbers(8, 8, 2), **CLASSES),
    "residual, BatchNormalization": KerasCase(
        lambda: residual(layers.BatchNormalization), numbers(8, 8, 2), **CLASSES
    ),
    "residual, GroupNormalization": KerasCase(
        lambda: residual(layers.GroupNormalization, groups=2), numbers(8, 8, 2), **CLASSES
    ),
    "LSTM": KerasCase(lambda: text(layers.LSTM(5), layers.Dense(3)), words(6), **CLASSES),
    "GRU, bidirectional": KerasCase(
        lambda: text(layers.Bidirectional(layers.GRU(4, return_sequences=True)), layers.Dense(3)), words(6), **CLASSES
    ),
    "MultiHeadAttention": KerasCase(attention, words(6), **CLASSES),
    "SimpleRNN": KerasCase(
        lambda: text(layers.SimpleRNN(5, return_sequences=True), layers.Dense(3)), words(6), **CLASSES
    ),
    "LSTM on steps": KerasCase(
        lambda: keras.Sequential([layers.Input((5, 4)), layers.LSTM(6, return_sequences=True), layers.Dense(3)]),
        numbers(5, 4),
    ),
    "rounding, straight through": KerasCase(rounded, numbers(6), unrecorded=("dynamic", "static")),
    "siamese, BatchNormalization": KerasCase(siamese, numbers(2, 6)),
    "autoencoder, Conv2DTranspose": KerasCase(autoencoder, numbers(8, 8, 2)),
    "factorization machine": KerasCase(factorized, words(3)),
    "LayerNormalization, PReLU": KerasCase(
        lambda: keras.Sequential(
            [layers.Input((6,)), layers.Dense(8), layers.LayerNormalization(), layers.PReLU(), layers.Dense(3)]
        ),
        numbers(6),
    ),
    "Conv1D on words": KerasCase(
        lambda: text(layers.Conv1D(6, 3, activation="relu"), layers.GlobalMaxPooling1D(), layers.Dense(3)),
        words(6),
        **CLASSES,
    ),
}  # fmt: skip
