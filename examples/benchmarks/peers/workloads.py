"""Write the models and data of the benchmark to files, so that all peers start from the same weights and rows.

A workload consists of NAME.onnx, an inference model of opset 17 with a dynamic batch; NAME.weights.npz, its weights by
name; NAME.data.npz, 20 batches of `x` and `target`; and NAME.txt, its title. Weights of linear layers have the shape
[inputs, outputs], those of convolutions [outputs, inputs, height, width], and those of the LSTM ONNX's shape.

Half of the batches repeat the rows of the other half with different noise in the targets. No network can memorize them,
so that gradients never vanish into denormal numbers, however long a peer runs.

Run it: python workloads.py FOLDER NAME...
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

STEPS = 20  # the number of batches, and of the steps of which losses are compared


class Network:
    """Build an ONNX graph: `network(...)` adds a node and returns the name of its output."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}

    def __call__(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def weight(self, name: str, *shape: int, scale: float = 0.01, mean: float = 0.0) -> str:
        self.weights[name] = (mean + scale * self.random.standard_normal(shape)).astype(np.float32)
        return name

    def constant(self, *values: float, dtype: Any = np.float32) -> str:
        array = np.array(values if dtype == np.int64 else values[0], dtype)
        self.constants[f"c{len(self.constants)}"] = array
        return f"c{len(self.constants) - 1}"

    def linear(self, x: str, name: str, size: int, outputs: int, operator: str = "Gemm") -> str:
        w = self.weight(f"{name}.weight", size, outputs, scale=math.sqrt(2 / size))
        b = self.weight(f"{name}.bias", outputs)
        return self("Gemm", x, w, b) if operator == "Gemm" else self("Add", self("MatMul", x, w), b)

    def convolution(
        self, x: str, name: str, size: int, outputs: int, kernel: int = 3, stride: int = 1, bias: bool = False
    ) -> str:
        scale = math.sqrt(2 / (size * kernel * kernel))
        inputs = [self.weight(f"{name}.weight", outputs, size, kernel, kernel, scale=scale)]
        inputs += [self.weight(f"{name}.bias", outputs)] if bias else []
        shape = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        return self("Conv", x, *inputs, **shape)

    def batch_norm(self, x: str, name: str, channels: int) -> str:
        means = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
        return self(
            "BatchNormalization",
            x,
            *(self.weight(f"{name}.{part}", channels, mean=mean) for part, mean in means.items()),
        )

    def layer_norm(self, x: str, name: str, width: int) -> str:
        weight, bias = self.weight(f"{name}.weight", width, mean=1.0), self.weight(f"{name}.bias", width)
        return self("LayerNormalization", x, weight, bias, axis=-1)

    def gelu(self, x: str) -> str:
        erf = self("Erf", self("Div", x, self.constant(math.sqrt(2))))
        return self("Mul", self("Mul", x, self("Add", erf, self.constant(1.0))), self.constant(0.5))


def mlp(network: Network, sizes: Sequence[int]) -> str:
    x = "x"
    for i in range(len(sizes) - 1):
        x = network.linear(network("Relu", x) if i else x, f"layer{i}", sizes[i], sizes[i + 1])
    return x


def cnn(network: Network) -> str:
    x, depth = "x", 1
    for i, channels in enumerate((32, 64)):
        x = network("Relu", network.convolution(x, f"conv{i}", depth, channels, bias=True))
        x, depth = network("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), channels
    hidden = network(
        "Relu",
        network.linear(network("Reshape", x, network.constant(0, -1, dtype=np.int64)), "hidden", 64 * 7 * 7, 128),
    )
    return network.linear(hidden, "head", 128, 10)


def resnet(network: Network) -> str:
    """Build a residual network (He et al. 2016) with three stages of two blocks, of 32, 64 and 128 channels."""
    x = network("Relu", network.batch_norm(network.convolution("x", "stem", 3, 32), "stem_norm", 32))
    depth = 32
    for i, channels in enumerate((32, 32, 64, 64, 128, 128)):
        name, stride = f"blocks.{i}", 1 + (channels != depth)
        y = network.convolution(x, f"{name}.conv1", depth, channels, stride=stride)
        y = network("Relu", network.batch_norm(y, f"{name}.norm1", channels))
        y = network.convolution(y, f"{name}.conv2", channels, channels)
        y = network.batch_norm(y, f"{name}.norm2", channels)
        if channels != depth:
            x = network.convolution(x, f"{name}.shortcut", depth, channels, kernel=1, stride=stride)
            x = network.batch_norm(x, f"{name}.shortcut_norm", channels)
        x, depth = network("Relu", network("Add", x, y)), channels
    return network.linear(
        network("Reshape", network("GlobalAveragePool", x), network.constant(0, -1, dtype=np.int64)),
        "head",
        128,
        10,
    )


def transformer(network: Network, width: int = 256, heads: int = 8, length: int = 64) -> str:
    """Build an encoder of four layers with normalization first, GELU, and a mean over positions at the end."""
    embedding = network.weight("embedding.weight", 1000, width, scale=1.0)
    x = network("Add", network("Gather", embedding, "x"), network.weight("positions", length, width))
    split = network.constant(0, length, heads, width // heads, dtype=np.int64)
    joined = network.constant(0, length, width, dtype=np.int64)
    for i in range(4):
        name = f"layers.{i}"
        y = network.layer_norm(x, f"{name}.norm1", width)
        y = network.linear(y, f"{name}.qkv", width, 3 * width, "MatMul")
        parts = [network("Reshape", part, split) for part in network("Split", y, outputs=3, axis=-1)]
        query, key, value = (
            network("Transpose", part, perm=perm)
            for part, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        scale = network.constant(1 / math.sqrt(width // heads))
        scores = network("Softmax", network("Mul", network("MatMul", query, key), scale), axis=-1)
        y = network("Transpose", network("MatMul", scores, value), perm=[0, 2, 1, 3])
        y = network.linear(network("Reshape", y, joined), f"{name}.out", width, width, "MatMul")
        x = network("Add", x, y)
        y = network.layer_norm(x, f"{name}.norm2", width)
        y = network.gelu(network.linear(y, f"{name}.up", width, 4 * width, "MatMul"))
        x = network("Add", x, network.linear(y, f"{name}.down", 4 * width, width, "MatMul"))
    mean = network("ReduceMean", network.layer_norm(x, "norm", width), axes=[1], keepdims=0)
    return network.linear(mean, "head", width, 10)


def lstm(network: Network, size: int = 64, hidden: int = 128) -> str:
    scale = math.sqrt(1 / hidden)
    weights = (
        network.weight("lstm.W", 1, 4 * hidden, size, scale=scale),
        network.weight("lstm.R", 1, 4 * hidden, hidden, scale=scale),
        network.weight("lstm.B", 1, 8 * hidden),
    )
    x = network("Transpose", "x", perm=[1, 0, 2])
    _, last = network("LSTM", x, *weights, outputs=2, hidden_size=hidden)
    return network.linear(network("Squeeze", last, network.constant(0, dtype=np.int64)), "head", hidden, 10)


@dataclass(frozen=True)
class Workload:
    """Describe a workload; `classes` is 0 for a regression, and `vocabulary` is 0 for rows of numbers."""

    title: str
    build: Callable[[Network], object]
    batch: int
    row: tuple[int, ...]
    classes: int = 10
    vocabulary: int = 0


def perceptron(batch: int, *sizes: int) -> Workload:
    title = f"MLP {'-'.join(map(str, sizes))}, batch {batch}"
    return Workload(title, lambda network: mlp(network, sizes), batch, sizes[:1])


WORKLOADS = {
    "linear": Workload(
        "linear regression, 2 features, batch 10", lambda network: mlp(network, (2, 1)), 10, (2,), classes=0
    ),
    "mlp-small": perceptron(32, 64, 256, 256, 10),
    "mlp-wide": perceptron(128, 784, 1024, 1024, 10),
    "cnn": Workload("CNN 28x28 (conv 32, 64; fc 128), batch 64", cnn, 64, (1, 28, 28)),
    "resnet": Workload("residual network 32x32, 0.7 M parameters, batch 16", resnet, 16, (3, 32, 32)),
    "transformer": Workload(
        "transformer encoder, 4 layers of 256, 64 tokens, batch 8", transformer, 8, (64,), vocabulary=1000
    ),
    "lstm": Workload("LSTM, 32 steps of 64, 128 units, batch 32", lstm, 32, (32, 64)),
}


def workload(name: str) -> Workload:
    """Return a workload.

    `mlp-BATCHxWIDTHxDEPTH` is a perceptron with DEPTH hidden layers of WIDTH units. `NAME-batchROWS` is the workload
    NAME with batches of so many rows.
    """
    known, _, rows = name.partition("-batch")
    if rows:
        return replace(workload(known), batch=int(rows), title=f"{known}, batch {rows}")
    if name in WORKLOADS:
        return WORKLOADS[name]
    batch, width, depth = map(int, name.removeprefix("mlp-").split("x"))
    return perceptron(batch, 64, *[width] * depth, 10)


def data(work: Workload) -> dict[str, np.ndarray]:
    """Return 20 batches; targets come from a linear teacher with noise, and 30 % of labels are redrawn."""
    random = np.random.default_rng(1)
    shape = (STEPS // 2, work.batch, *work.row)
    if work.vocabulary:
        x = random.integers(0, work.vocabulary, shape)
        features = np.eye(work.vocabulary, dtype=np.float32)[x].mean(axis=2)
    else:
        x = random.standard_normal(shape, np.float32)
        features = x.reshape(*shape[:2], -1)
    x, features = np.concatenate([x, x]), np.concatenate([features, features])
    scores = features @ random.standard_normal((features.shape[-1], work.classes or 1), np.float32)
    if not work.classes:
        return {"x": x, "target": scores + 0.1 * random.standard_normal(scores.shape, np.float32)}
    drawn = random.integers(0, work.classes, scores.shape[:2])
    target = np.where(random.random(scores.shape[:2]) < 0.3, drawn, scores.argmax(axis=-1))
    return {"x": x, "target": target.astype(np.int64)}


def model(work: Workload) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return the inference model, from `x` to `y`, and its weights."""
    network = Network()
    work.build(network)
    network.nodes[-1].output[0] = "y"
    element = onnx.TensorProto.INT64 if work.vocabulary else onnx.TensorProto.FLOAT
    arrays = {**network.weights, **network.constants}
    graph = helper.make_graph(
        network.nodes,
        "network",
        [helper.make_tensor_value_info("x", element, ["batch", *work.row])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", work.classes or 1])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    proto = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(proto, full_check=True)
    return proto, network.weights


def write(folder: Path, name: str) -> None:
    """Write the files of a workload."""
    work = workload(name)
    proto, weights = model(work)
    onnx.save(proto, folder / f"{name}.onnx")
    np.savez(folder / f"{name}.weights.npz", **weights)
    np.savez(folder / f"{name}.data.npz", **data(work))
    (folder / f"{name}.txt").write_text(work.title)


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        write(Path(sys.argv[1]), chosen)
