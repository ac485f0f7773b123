"""Build the networks of scikit-learn as ONNX models, and read what other models take and return."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer

import passes
from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.storage import whole
from graphopt.graph.values import dims_of, dtype_of, rank

# How each activation of scikit-learn is emitted. The last two are for outputs alone.
_ACTIVATIONS: dict[str, Callable[[Any, ir.Value], ir.Value]] = {
    "identity": lambda op, x: x,
    "logistic": lambda op, x: op.Sigmoid(x),
    "tanh": lambda op, x: op.Tanh(x),
    "relu": lambda op, x: op.Relu(x),
    "softmax": lambda op, x: op.Softmax(x, axis=1),
    "exp": lambda op, x: op.Exp(x),
}
HIDDEN = ("identity", "logistic", "tanh", "relu")


@functools.lru_cache(64)
def perceptron(
    sizes: tuple[int, ...], activation: str, out_activation: str, dtype: str, output: str
) -> bytes:
    """Return a serialized perceptron with an input `X` and weights of 0, named as `layers` says.

    Args:
        sizes: the number of features, of units in each hidden layer, and of outputs.
        activation, out_activation: the activations of hidden layers and of the output, by scikit-learn's names.
    """
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    x = ir.Value(name="X", type=ir.TensorType(kind), shape=ir.Shape(["batch", sizes[0]]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="perceptron")
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="graphopt")
    pairs = list(itertools.pairwise(sizes))
    y = x
    with Emitter(model) as op:
        for i, (names, (fan_in, fan_out)) in enumerate(zip(layers(len(pairs)), pairs, strict=True)):
            for name, shape in zip(names, [(fan_in, fan_out), (fan_out,)], strict=True):
                tensor = ir.tensor(np.zeros(shape, dtype), name=name)
                graph.register_initializer(
                    ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape), const_value=tensor)
                )
            y = op.Gemm(y, *(graph.initializers[name] for name in names))
            y = _ACTIVATIONS[activation if i < len(pairs) - 1 else out_activation](op, y)
        graph.outputs.append(op.Identity(y, _outputs=[output]))
    return whole(model)


def layers(count: int) -> Iterator[tuple[str, str]]:
    """Yield the names of the weights and biases of each layer."""
    return ((f"layers.{i}.weight", f"layers.{i}.bias") for i in range(count))


def _named(weights: Sequence[np.ndarray], biases: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights and biases of all layers by name."""
    pairs = zip(layers(len(weights)), weights, biases, strict=True)
    return {name: array for names, *arrays in pairs for name, array in zip(names, arrays, strict=True)}


def initial_weights(sizes: Sequence[int], activation: str, dtype: str, random: Any) -> dict[str, np.ndarray]:
    """Draw initial weights as scikit-learn does, in its order: Glorot's uniform distribution (Glorot, Bengio 2010)."""

    def draw() -> Iterable[tuple[np.ndarray, np.ndarray]]:
        for fan_in, fan_out in itertools.pairwise(sizes):
            bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (fan_in + fan_out))
            weight = random.uniform(-bound, bound, (fan_in, fan_out))
            yield weight.astype(dtype), random.uniform(-bound, bound, fan_out).astype(dtype)

    return _named(*zip(*draw(), strict=True))


def network_state(fitted: Any, solver: Any) -> dict[str, np.ndarray]:
    """Return the weights of a fitted network by name, and the state of its optimizer if it has the same solver."""
    depth, optimizer = len(fitted.coefs_), getattr(fitted, "_optimizer", None)

    def slots(name: str, factor: float, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        weights = _named(arrays[:depth], arrays[depth:])
        return {f"{weight}.{name}": (factor * x).astype(x.dtype) for weight, x in weights.items()}

    state = _named(fitted.coefs_, fitted.intercepts_)
    if isinstance(optimizer, SGDOptimizer) and solver == "sgd":
        state |= slots("momentum", -1.0, optimizer.velocities)
    elif isinstance(optimizer, AdamOptimizer) and solver == "adam":
        state |= slots("exp_sum", 1 / (1 - optimizer.beta_1), optimizer.ms)
        state |= slots("exp_sum_sq", 1 / (1 - optimizer.beta_2), optimizer.vs)
        state["step"] = np.array(optimizer.t, np.int64)
    return state


@dataclass(frozen=True)
class Interface:
    """Describe what a model reads and predicts."""

    dtype: str  # of its input
    axes: int  # of its input
    op_type: str  # of the operator that computes its output
    outputs: int | None  # of a row; None if the model does not fix their number


def serialized(source: Source) -> bytes:
    """Return a model as bytes."""
    proto = source if isinstance(source, onnx.ModelProto) else ir.to_proto(load(source))
    return proto.SerializeToString()


def interface(model: bytes) -> Interface:
    """Return the interface of a serialized model with one input and one floating-point output.

    Raises:
        GraphoptError: the model has several inputs or outputs, or its batch has a fixed size.
    """
    loaded = load(onnx.load_model_from_string(model))
    predictions = {
        y.name for y in loaded.graph.outputs if y.dtype is not None and y.dtype.is_floating_point()
    }
    passes.Normalize()(loaded)
    inputs = [x for x in loaded.graph.inputs if x.name not in loaded.graph.initializers]
    outputs = [y for y in loaded.graph.outputs if y.name in predictions]
    for kind, values in (("input", inputs), ("floating-point output", outputs)):
        if len(values) != 1 or values[0].shape is None or values[0].dtype is None:
            raise GraphoptError(
                f"model: expected one {kind} of known type and shape, found {[x.name for x in values]}: use "
                f"graphopt.Trainer, or graphopt.fit"
            )
    (x,), (y,) = inputs, outputs
    batch, node = dims_of(x)[0], y.producer()
    if isinstance(batch, int):
        raise GraphoptError(
            f"model: expected a batch of any size, found {batch} rows in input {x.name!r}: export the model with a "
            f"dynamic batch"
        )
    sizes = [size for size in dims_of(y)[1:] if isinstance(size, int)]
    return Interface(
        dtype=np.dtype(dtype_of(x).numpy()).name,
        axes=rank(x),
        op_type="" if node is None or node.domain else node.op_type,
        outputs=math.prod(sizes) if len(sizes) == rank(y) - 1 else None,
    )
