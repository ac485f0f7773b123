"""Measure the limit of a step: only its matrix products and convolutions, and one pass over parameters and state.

Each product, in the forward pass and for both gradients, costs as much as a single MatMul of its shape on the same
runtime. Each convolution and each of its two gradients costs as much as a single Conv. Operands are inputs, as in
training. The pass reads and writes each number of the parameters and optimizer slots once. Gradients of the data are
not counted.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from protocol import Job, arguments, say

SLOTS = {"sgd": 0, "momentum": 1, "adamw": 2}

Shape = tuple[int, ...]
Operation = tuple[str, Shape, Shape, tuple[tuple[str, Any], ...]]


def product(rows: int, inner: int, columns: int, stack: Shape = ()) -> Operation:
    return "MatMul", (*stack, rows, inner), (*stack, inner, columns), ()


def products(rows: int, inner: int, columns: int, stack: Shape, left: bool, right: bool) -> Iterator[Operation]:
    """Yield a product of two matrices, and the products that compute its gradients."""
    yield product(rows, inner, columns, stack)
    if left:
        yield product(rows, columns, inner, stack)
    if right:
        yield product(inner, rows, columns, stack)


def operations(model: onnx.ModelProto, batch: int) -> Iterator[tuple[Operation, int]]:
    """Yield the products and convolutions of a training step, and how often it computes them.

    Models contain Gemm, MatMul, Conv and LSTM. Other operators count as free.
    """
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    shapes: dict[str, Shape] = {array.name: tuple(array.dims) for array in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        shapes[value.name] = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
    trained = {array.name for array in graph.initializer if array.data_type == TensorProto.FLOAT and array.dims}
    for node in graph.node:
        a, b = (shapes.get(name, ()) for name in (*node.input, "")[:2])
        left, right = (name in trained for name in (*node.input, "")[:2])
        if trained.intersection(node.input):
            trained.update(node.output)
        if node.op_type in ("Gemm", "MatMul"):
            flat = len(b) == 2  # one matrix for all rows
            rows, stack = (math.prod(a[:-1]), ()) if flat else (a[-2], a[:-2])
            for found in products(rows, a[-1], b[-1], stack, left, right):
                yield found, 1
        elif node.op_type == "Conv":
            attributes = ((x.name, tuple(helper.get_attribute_value(x))) for x in node.attribute)
            yield ("Conv", a, b, tuple(attributes)), 1 + left + right
        elif node.op_type == "LSTM":
            length, rows, size = a
            gates, hidden = shapes[node.input[2]][1:]
            for found in products(length * rows, size, gates, (), left, right):
                yield found, 1
            yield product(rows, hidden, gates), length
            yield product(rows, gates, hidden), length
            yield product(hidden, length * rows, gates), 1


def session(operation: Operation, threads: int) -> tuple[onnxruntime.InferenceSession, dict[str, Any], int]:
    """Return a session that repeats the operation until it takes 200 us, so that the call itself costs little."""
    operator, a, b, attributes = operation
    random = np.random.default_rng(0)
    feeds = {"a": random.standard_normal(a, np.float32), "b": random.standard_normal(b, np.float32)}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # keeps repetitions apart
    count = 1
    while True:
        names = [f"y{i}" for i in range(count)]
        graph = helper.make_graph(
            [helper.make_node(operator, ["a", "b"], [name], **dict(attributes)) for name in names],
            "bare",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in feeds.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        )
        proto = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
        found = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        found.run(None, feeds)
        start = time.perf_counter()
        found.run(None, feeds)
        if time.perf_counter() - start > 200e-6 or count >= 256:
            return found, feeds, count
        count *= 4


class Limit:
    def __init__(self, job: Job) -> None:
        model = onnx.load(job.model)
        counts: Counter[Operation] = Counter()
        for operation, times in operations(model, len(job.data[0][0])):
            counts[operation] += times
        size = sum(w.size for name, w in job.weights.items() if "running" not in name)
        counts["Mul", (size * (1 + SLOTS[job.optimizer]),), (1,), ()] += 1
        self._counts, self._threads = counts, job.threads

    def measure(self, seconds: float) -> list[float]:
        """Return the sum of the median microseconds of all operations, each run at least three times."""
        share = seconds / len(self._counts)
        parts = (self._time(operation, share) * times for operation, times in self._counts.items())
        return [1e6 * sum(parts)]

    def _time(self, operation: Operation, seconds: float) -> float:
        """Return the seconds of an operation; create one session at a time, because threads of others would spin."""
        bare, feeds, repeated = session(operation, self._threads)
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while len(taken) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            bare.run(None, feeds)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken) / repeated


if __name__ == "__main__":
    job = arguments()
    limit = Limit(job)
    say(losses=None, compile=None, samples=len(job.data[0][0]))
    for line in sys.stdin:
        say(times=limit.measure(float(line)), peak=None)
