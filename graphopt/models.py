"""Build untrained inference models with an input `x` and an output `y`.

Every builder takes the shape of one row of `x`, without the batch, as a number or several, and the number of outputs.
The batch stays dynamic. The seed determines the initial weights. Layers before a ReLU use He's normal initialization,
others Glorot's uniform one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder, nn

from graphopt.arguments import checked, no_attribute
from graphopt.errors import GraphoptError
from graphopt.graph.metadata import FROZEN
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.shown import shown

_BUILDERS = ("cnn", "linear", "mlp", "transformer")
_MAX = 2**27  # weights of a model
MOST_LAYERS = 1_000
_PERMUTATIONS = [0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]  # of the axes of queries, keys and values


@checked()
def linear(features: int | Sequence[int], outputs: int, *, seed: int = 0) -> ir.Model:
    """Return a linear model: one affine map of the flattened features.

    Args:
        features: the shape of a row, or the number of features of a row of a table.
        outputs: the number of outputs.
        seed: the seed of the initial weights.
    """
    return mlp(features, outputs, hidden=(), seed=seed)


@checked()
def mlp(
    features: int | Sequence[int], outputs: int, *, hidden: int | Sequence[int] = (128, 64), seed: int = 0
) -> ir.Model:
    """Return a multilayer perceptron of the flattened features, with ReLU between its layers.

    Args:
        features, outputs, seed: as in `graphopt.models.linear`.
        hidden: the units of each hidden layer, or of the only one.
    """
    features = _row(features)
    hidden = (hidden,) if isinstance(hidden, int) else hidden
    random = _Random(seed, outputs=outputs, hidden=hidden)
    sizes = [math.prod(features), *hidden, outputs]
    layers: list[nn.Module] = [_Apply("Flatten")] if len(features) != 1 else []
    for i, (size, following) in enumerate(itertools.pairwise(sizes)):
        last = i == len(hidden)
        layers += [_Linear(size, following, random, relu=not last)] + ([] if last else [_Apply("Relu")])
    return _model("mlp" if hidden else "linear", _Layers(layers), features)


@checked()
def cnn(
    features: int | Sequence[int],
    outputs: int,
    *,
    channels: int | Sequence[int] = (16, 32),
    hidden: int = 64,
    seed: int = 0,
) -> ir.Model:
    """Return a convolutional network for images: 3x3 convolution, ReLU and 2x2 max pooling for each of `channels`.

    Args:
        features, outputs, seed: as in `graphopt.models.linear`.
        channels: the channels of each convolution, or of the only one.
        hidden: the units of the hidden layer.

    Raises:
        GraphoptError: the features are not images (channels, height, width).
    """
    features = _row(features)
    if len(features) != 3:
        raise GraphoptError(
            f"model cnn: expected images, rows of shape [channels, height, width], found {list(features)}"
        )
    channels = (channels,) if isinstance(channels, int) else channels
    random = _Random(seed, outputs=outputs, channels=channels, hidden=hidden)
    depth, height, width = features
    layers: list[nn.Module] = []
    for following in channels:
        layers += [_Convolution(depth, following, random), _Apply("Relu")]
        depth = following
        if min(height, width) >= 2:
            layers.append(_Apply("MaxPool", kernel_shape=[2, 2], strides=[2, 2]))
            height, width = height // 2, width // 2
    layers += [_Apply("Flatten"), _Linear(depth * height * width, hidden, random, relu=True), _Apply("Relu")]
    layers.append(_Linear(hidden, outputs, random))
    return _model("cnn", _Layers(layers), features)


@checked()
def transformer(
    features: int | Sequence[int],
    outputs: int,
    *,
    vocabulary: int | None = None,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    causal: bool = True,
    seed: int = 0,
) -> ir.Model:
    """Return a transformer over sequences of int64 tokens, with `outputs` numbers for each position.

    Args:
        features, outputs, seed: as in `graphopt.models.linear`.
        vocabulary: the number of different tokens; `outputs` by default.
        width: the size of a token's vector.
        heads: the heads of each attention.
        layers: the number of layers, each an attention and a feed-forward part.
        causal: let each position attend to itself and earlier positions only.

    Raises:
        GraphoptError: the features are not sequences (length,), or `heads` does not divide `width`.
    """
    features = _row(features)
    if len(features) != 1:
        raise GraphoptError(
            f"model transformer: expected sequences of tokens, rows of shape [length], found {list(features)}"
        )
    words = vocabulary or outputs
    random = _Random(seed, outputs=outputs, vocabulary=words, width=width, heads=heads, layers=layers)
    if width % heads:
        raise GraphoptError(f"model transformer: expected heads that divide width {width}, found {heads}")
    blocks = [_Block(features[0], width, heads, causal, random) for _ in range(layers)]
    network = _Transformer(features[0], words, width, outputs, blocks, random)
    return _model("transformer", network, features, ir.DataType.INT64)


def _row(features: int | Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a row; a number is that of the features of a table."""
    shape: object = (features,) if isinstance(features, int) else features
    if (
        isinstance(shape, str | bytes)
        or not isinstance(shape, Sequence)
        or not all(isinstance(size, int) and size > 0 for size in shape)
    ):
        raise GraphoptError(
            f"model: expected the shape of a row, such as 64 or (1, 8, 8), found {features!r} as features"
        )
    return tuple(shape)


def _model(name: str, network: nn.Module, features: Sequence[int], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(["batch", *features]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name=name)
    y = network(GraphBuilder(graph).op, x)
    y.name = "y"
    graph.outputs.append(y)
    for constant in (x for x in graph.initializers.values() if not isinstance(x, nn.Parameter)):
        FROZEN.set(constant)
    return shown(ir.Model(graph, ir_version=IR_VERSION, producer_name="graphopt"))


def _parameter(array: np.ndarray) -> nn.Parameter:
    array = array.astype(np.float32)
    return nn.Parameter(array.shape, data=ir.tensor(array))


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return self.layers(op, x)


class _Linear(nn.Module):
    def __init__(self, size: int, outputs: int, random: _Random, relu: bool = False) -> None:
        super().__init__()
        bound, shape = math.sqrt(6 / (size + outputs)), (size, outputs)
        self.weight = random.normal(math.sqrt(2 / size), shape) if relu else random.uniform(bound, shape)
        self.bias = _parameter(np.zeros(outputs))

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        if x.shape is not None and len(x.shape) == 2:
            return op.Gemm(x, self.weight, self.bias)
        return op.Add(op.MatMul(x, self.weight), self.bias)


class _Convolution(nn.Module):
    def __init__(self, depth: int, channels: int, random: _Random) -> None:
        super().__init__()
        self.weight = random.normal(math.sqrt(2 / (9 * depth)), (channels, depth, 3, 3))
        self.bias = _parameter(np.zeros(channels))

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return op.Conv(x, self.weight, self.bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1])


class _Apply(nn.Module):
    """Apply an operator without weights."""

    def __init__(self, op_type: str, **attributes: int | Sequence[int]) -> None:
        super().__init__()
        self._op_type, self._attributes = op_type, attributes

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return getattr(op, self._op_type)(x, **self._attributes)


class _Random:
    """Draw initial weights, up to a number that fits into memory, of a model with options that are sizes."""

    def __init__(self, seed: int, **sizes: int | Sequence[int]) -> None:
        if seed < 0:
            raise GraphoptError(f"seed: expected 0 or more, found {seed}")
        for name, size in sizes.items():
            for dim in size if isinstance(size, Sequence) and not isinstance(size, str) else [size]:
                if not isinstance(dim, int) or not 1 <= dim <= (MOST_LAYERS if name == "layers" else _MAX):
                    raise GraphoptError(f"model: expected whole numbers from 1 in {name}, found {dim!r}")
        self._drawn, self._left = np.random.default_rng(seed), _MAX

    def normal(self, deviation: float, shape: tuple[int, ...]) -> nn.Parameter:
        return _parameter(self._drawn.normal(0, deviation, self._counted(shape)))

    def uniform(self, bound: float, shape: tuple[int, ...]) -> nn.Parameter:
        return _parameter(self._drawn.uniform(-bound, bound, self._counted(shape)))

    def _counted(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self._left -= math.prod(shape)
        if self._left < 0:
            raise GraphoptError(f"model: expected at most {_MAX:,} weights, found more: choose smaller sizes")
        return shape


class _LayerNormalization(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = _parameter(np.ones(width))
        self.bias = _parameter(np.zeros(width))

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return op.LayerNormalization(x, self.scale, self.bias, axis=-1)


class _Attention(nn.Module):
    def __init__(self, length: int, width: int, heads: int, causal: bool, random: _Random) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (_Linear(width, width, random) for _ in range(4))
        self._split = [0, length, heads, width // heads]
        self._joined = [0, length, width]
        self._visible = np.tril(np.ones((length, length), np.bool_)) if causal else None

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        query, key, value = (
            op.Transpose(op.Reshape(project(op, x), self._split), perm=perm)
            for project, perm in zip((self.query, self.key, self.value), _PERMUTATIONS, strict=True)
        )
        scores = op.Mul(op.MatMul(query, key), 1 / math.sqrt(self._split[-1]))
        if self._visible is not None:
            scores = op.Where(op.Constant(value=ir.tensor(self._visible)), scores, -1e4)
        mixed = op.MatMul(op.Softmax(scores, axis=-1), value)
        return self.output(op, op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), self._joined))


class _Block(nn.Module):
    def __init__(self, length: int, width: int, heads: int, causal: bool, random: _Random) -> None:
        super().__init__()
        self.attention_norm = _LayerNormalization(width)
        self.attention = _Attention(length, width, heads, causal, random)
        self.hidden_norm = _LayerNormalization(width)
        self.hidden = _Linear(width, 4 * width, random, relu=True)
        self.output = _Linear(4 * width, width, random)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        x = op.Add(x, self.attention(op, self.attention_norm(op, x)))
        hidden = op.Relu(self.hidden(op, self.hidden_norm(op, x)))
        return op.Add(x, self.output(op, hidden))


class _Transformer(nn.Module):
    def __init__(
        self,
        length: int,
        vocabulary: int,
        width: int,
        outputs: int,
        blocks: Sequence[nn.Module],
        random: _Random,
    ) -> None:
        super().__init__()
        self.embedding = random.normal(0.1, (vocabulary, width))
        self.positions = random.normal(0.1, (length, width))
        self.blocks = nn.ModuleList(list(blocks))
        self.norm = _LayerNormalization(width)
        self.head = _Linear(width, outputs, random)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y = op.Add(op.Gather(self.embedding, x), self.positions)
        for block in self.blocks:
            y = block(op, y)
        return self.head(op, self.norm(op, y))


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, _BUILDERS)
