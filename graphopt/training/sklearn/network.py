"""Build the networks of scikit-learn as ONNX models, with the passes that train them, and read the inputs of models.

In scikit-learn, a loss is summed over the outputs of a row and averaged over the rows of a batch, and the penalty of
the weights is divided by the rows of the batch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer
from sklearn.utils import check_random_state

import passes
from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.roles import Role, role_of
from graphopt.graph.storage import whole
from graphopt.graph.values import dims_of, dtype_of, rank
from graphopt.intervals import within
from graphopt.pipeline import Pipeline, Step

# How each activation of scikit-learn is emitted. The last two are for outputs only.
_ACTIVATIONS: dict[str, Callable[[Emitter, ir.Value], ir.Value]] = {
    "identity": lambda op, x: x,
    "logistic": lambda op, x: op.Sigmoid(x),
    "tanh": lambda op, x: op.Tanh(x),
    "relu": lambda op, x: op.Relu(x),
    "softmax": lambda op, x: op.Softmax(x, axis=1),
    "exp": lambda op, x: op.Exp(x),
}
HIDDEN = ("identity", "logistic", "tanh", "relu")


@functools.lru_cache(64)
def perceptron(sizes: tuple[int, ...], activation: str, out_activation: str, dtype: str, output: str) -> bytes:
    """Return a serialized perceptron of features `X`, hidden units and outputs, whose weights are 0 for now."""
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    x = ir.Value(name="X", type=ir.TensorType(kind), shape=ir.Shape(["batch", sizes[0]]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="perceptron")
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="graphopt")
    zeros = _layer_arrays(
        [np.zeros(pair, dtype) for pair in itertools.pairwise(sizes)],
        [np.zeros(units, dtype) for units in sizes[1:]],
    )
    y = x
    with Emitter(model) as op:
        weights = [op.initializer(ir.tensor(array, name=name)) for name, array in zeros.items()]
        for w, b in zip(weights[::2], weights[1::2], strict=True):
            y = _ACTIVATIONS[out_activation if b is weights[-1] else activation](op, op.Gemm(y, w, b))
        graph.outputs.append(op.Identity(y, _outputs=[output]))
    return whole(model)


def _layer_arrays(weights: Sequence[np.ndarray], biases: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    layers = enumerate(zip(weights, biases, strict=True))
    return {
        f"layers.{i}.{kind}": array
        for i, layer in layers
        for kind, array in zip(("weight", "bias"), layer, strict=True)
    }


def initial_weights(
    sizes: Sequence[int], activation: str, dtype: str, random: np.random.RandomState
) -> dict[str, np.ndarray]:
    """Draw initial weights as scikit-learn does, in its order: Glorot's uniform distribution (Glorot, Bengio 2010)."""
    weights, biases = [], []
    for fan_in, fan_out in itertools.pairwise(sizes):
        bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (fan_in + fan_out))
        weights.append(random.uniform(-bound, bound, (fan_in, fan_out)).astype(dtype))
        biases.append(random.uniform(-bound, bound, fan_out).astype(dtype))
    return _layer_arrays(weights, biases)


def network_state(fitted: MLPClassifier | MLPRegressor, solver: object) -> dict[str, np.ndarray]:
    """Return the weights of a fitted network by name, and the state of its optimizer if it has the same solver."""
    depth, optimizer = len(fitted.coefs_), getattr(fitted, "_optimizer", None)

    def slots(name: str, factor: float, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        weights = _layer_arrays(arrays[:depth], arrays[depth:])
        return {f"{weight}.{name}": (factor * x).astype(x.dtype) for weight, x in weights.items()}

    state = _layer_arrays(fitted.coefs_, fitted.intercepts_)
    if isinstance(optimizer, SGDOptimizer) and solver == "sgd":
        state |= slots("momentum", -1.0, optimizer.velocities)
    elif isinstance(optimizer, AdamOptimizer) and solver == "adam":
        state |= slots("exp_sum", 1 / (1 - optimizer.beta_1), optimizer.ms)
        state |= slots("exp_sum_sq", 1 / (1 - optimizer.beta_2), optimizer.vs)
        state["step"] = np.array(optimizer.t, np.int64)
    return state


def fill(
    fitted: MLPClassifier | MLPRegressor,
    coefs: Sequence[np.ndarray],
    intercepts: Sequence[np.ndarray],
    state: Mapping[str, np.ndarray],
    *,
    waited: int,
    rate: float,
) -> None:
    """Give weights, and the state of the optimizer, to a network of scikit-learn."""
    fitted.coefs_, fitted.intercepts_, fitted.n_layers_ = [*coefs], [*intercepts], len(coefs) + 1
    fitted._best_coefs, fitted._best_intercepts = [x.copy() for x in coefs], [x.copy() for x in intercepts]
    fitted._no_improvement_count, fitted._random_state = waited, check_random_state(fitted.random_state)
    parameters = fitted.coefs_ + fitted.intercepts_
    names = sorted(_layer_arrays(coefs, intercepts), key=lambda name: name.endswith("bias"))

    def slots(name: str, factor: float) -> list[np.ndarray]:
        empty = dict(zip(names, map(np.zeros_like, parameters), strict=True))
        kept = [state.get(f"{weight}.{name}", empty[weight]) for weight in names]
        return [(factor * x).astype(x.dtype) for x in kept]

    if fitted.solver == "sgd":
        rates = fitted.learning_rate_init, fitted.learning_rate, fitted.momentum
        optimizer = SGDOptimizer(parameters, *rates, fitted.nesterovs_momentum, fitted.power_t)
        optimizer.velocities, optimizer.learning_rate = slots("momentum", -1.0), rate
    else:
        betas = fitted.beta_1, fitted.beta_2
        optimizer = AdamOptimizer(parameters, fitted.learning_rate_init, *betas, fitted.epsilon)
        optimizer.ms, optimizer.vs = slots("exp_sum", 1 - betas[0]), slots("exp_sum_sq", 1 - betas[1])
        optimizer.t = int(state.get("step", 0))
    fitted._optimizer = optimizer


@dataclass(frozen=True)
class Interface:
    """Describe the input and the output of a model."""

    dtype: str  # of its input
    axes: int  # of its input
    op_type: str  # of the operator that computes its output
    outputs: int | None  # of a row; None if the model does not fix their number


def serialized(source: Source) -> bytes:
    proto = source if isinstance(source, onnx.ModelProto) else ir.to_proto(load(source))
    return proto.SerializeToString()


def interface(model: bytes, adapter: Step | Sequence[Step] | None = None) -> Interface:
    """Return the interface of a serialized model, which needs one input, one floating-point output and any batch.

    With an adapter, it is that of the adapted model: a head may predict other classes.
    """
    loaded = load(onnx.load_model_from_string(model))
    predictions = {y.name for y in loaded.graph.outputs if y.dtype is not None and y.dtype.is_floating_point()}
    Pipeline(normalize=passes.Normalize(), adapter=adapter).rewrite(loaded)
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
            "dynamic batch, or take passes.Normalize(batch='free')(model)"
        )
    sizes = [size for size in dims_of(y)[1:] if isinstance(size, int)]
    return Interface(
        dtype=np.dtype(dtype_of(x).numpy()).name,
        axes=rank(x),
        op_type="" if node is None or node.domain else node.op_type,
        outputs=math.prod(sizes) if len(sizes) == rank(y) - 1 else None,
    )


@dataclass(frozen=True)
class LogLoss(passes.BinaryCrossEntropy):
    """Sum the cross-entropies of the outputs of a row, each of which is the probability of a label."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return _of_rows(op, super().compare(op, prediction, target))


@dataclass(frozen=True)
class SquaredError(passes.Loss):
    """Sum (p - t)^2 / 2 over the outputs of a row, for predictions p and targets t."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return _of_rows(op, 0.5 * op.Pow(prediction - target, 2))


@dataclass(frozen=True)
class PoissonDeviance(passes.Loss):
    """Sum t log(t / p) - t + p over the outputs of a row, for predicted rates p and counts t: half the deviance."""

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        counted = op.Max(target, 1e-30)  # 0 log 0 is 0
        return _of_rows(op, target * (op.Log(counted) - op.Log(prediction)) - target + prediction)


@dataclass(frozen=True)
class WeightPenalty(passes.Regularizer):
    """Add alpha / 2 * sum w^2 over matrices and kernels w, divided by the rows of the batch or by their weights."""

    alpha: float = within("[0, inf)", 1e-4)

    def penalty(self, op: Emitter, w: ir.Value) -> ir.Value:
        assert w.graph is not None
        if rank(w) < 2:
            return op.constant(0.0, like=w)
        inputs = {role_of(value): value for value in w.graph.inputs}
        weights = inputs.get(Role.SAMPLE_WEIGHT)
        rows = op.count(inputs[Role.TARGET], [0]) if weights is None else op.ReduceSum(weights, keepdims=0)
        if isinstance(rows, ir.Value) and rows.dtype != w.dtype:
            rows = op.Cast(rows, to=w.dtype)
        return 0.5 * self.alpha * op.ReduceSum(op.Pow(w, 2), keepdims=0) / rows


@dataclass(frozen=True)
class ScikitLearnAdam(passes.Adam):
    """Update as Adam does, with epsilon added to the root of the mean before its bias is corrected.

    This is the efficient form at the end of section 2 of Kingma and Ba (2015).
    """

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, rate: ir.Value, t: ir.Value, *slots: ir.Value
    ) -> tuple[ir.Value, ...]:
        m, v = slots
        m = self.beta1 * m + g
        v = self.beta2 * v + g * g
        t = op.Cast(t, to=ir.DataType.DOUBLE)  # in which 1 - 0.999 loses no digits
        root = math.sqrt(1 - self.beta2)
        bias1, bias2 = (1 - op.Pow(op.constant(beta, like=t), t) for beta in (self.beta1, self.beta2))
        factor = op.Cast((1 - self.beta1) / root * op.Sqrt(bias2) / bias1, to=rate.dtype)
        return w - rate * factor * (m / (op.Sqrt(v) + self.epsilon / root)), m, v


def _of_rows(op: Emitter, elements: ir.Value) -> ir.Value:
    axes = [*range(1, rank(elements))]
    return op.ReduceSum(elements, axes, keepdims=0) if axes else elements
