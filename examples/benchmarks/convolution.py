"""Measure a convolution and its gradients before and after passes.Fuse, and the limit.

The limit is a single matrix product with the same number of multiplications and at most 1024 rows and columns. Times
are medians of rounds in which all forms take turns.

Run it: python examples/benchmarks/convolution.py THREADS
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

import graphopt
import passes
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session


class Shape(NamedTuple):
    batch: int
    channels: int
    size: int
    filters: int
    kernel: int
    stride: int = 1


SHAPES = [
    Shape(64, 1, 28, 32, 3),
    Shape(64, 32, 14, 64, 3),
    Shape(16, 3, 32, 32, 3),
    Shape(16, 32, 32, 32, 3),
    Shape(16, 64, 16, 64, 3),
    Shape(16, 128, 8, 128, 3),
    Shape(16, 256, 4, 256, 3),
    Shape(16, 32, 32, 64, 3, 2),
    Shape(16, 32, 32, 64, 1, 2),
    Shape(8, 64, 32, 64, 3),
    Shape(4, 3, 64, 32, 7, 2),
]

FORMS = ["limit", "forward", "forward, fused", "by x", "by x, fused", "by w", "by w, fused"]


def convolution(shape: Shape) -> onnx.ModelProto:
    pad, channels, size = shape.kernel // 2, shape.channels, shape.size
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{shape.batch},{channels},{size},{size}] x) => (float[{shape.batch},{shape.filters},k,l] y) {{
            y = Conv<pads = {[pad] * 4}, strides = {[shape.stride] * 2}>(x, w)
        }}""")
    weights = np.zeros((shape.filters, channels, shape.kernel, shape.kernel), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return onnx.shape_inference.infer_shapes(model)


def as_input(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its weights as an input, as in training."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    weights = copy.graph.initializer.pop()
    copy.graph.input.append(onnx.helper.make_tensor_value_info(weights.name, weights.data_type, weights.dims))
    return copy


def product(flops: float) -> onnx.ModelProto:
    rows = 1024
    depth = max(1, round(flops / (2 * rows * rows)))
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{rows},{depth}] a, float[{depth},{rows}] b) => (float[{rows},{rows}] y) {{ y = MatMul(a, b) }}""")


def runner(model: ir.Model | onnx.ModelProto, threads: int) -> Callable[[], object]:
    """Return a function that runs a graph once on random data."""
    session = Session(Device(threads=threads, flush_denormals=False), graphopt.load(model)).ort
    random = np.random.default_rng(0)
    feeds = {x.name: random.standard_normal(x.shape, np.float32) for x in session.get_inputs()}
    return lambda: session.run(None, feeds)


def fused(model: ir.Model | onnx.ModelProto) -> ir.Model:
    copy = graphopt.load(model)
    passes.Fuse()(copy)
    return copy


def measure(shape: Shape, rounds: int, threads: int) -> dict[str, float]:
    """Return the median milliseconds of each form."""
    model = convolution(shape)
    positions = ((shape.size + 2 * (shape.kernel // 2) - shape.kernel) // shape.stride + 1) ** 2
    flops = 2.0 * shape.batch * shape.channels * shape.filters * shape.kernel**2 * positions
    trained = as_input(model)
    graphs: dict[str, ir.Model | onnx.ModelProto] = {
        "forward": trained,
        "by x": graphopt.grad(trained, ["x"], seeded=True, keep=False),
        "by w": graphopt.grad(trained, ["w"], seeded=True, keep=False),
    }
    graphs |= {f"{name}, fused": fused(graph) for name, graph in graphs.items()}
    graphs["limit"] = product(flops)
    runs = {name: runner(graphs[name], threads) for name in FORMS}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(0.03)  # until the threads of the previous form sleep
            run()
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main(shapes: list[Shape] = SHAPES, rounds: int = 15, threads: int = 1) -> dict[Shape, dict[str, float]]:
    print(" ".join(f"{name:>8}" for name in Shape._fields), " ".join(f"{name:>14}" for name in FORMS))
    results = {}
    for shape in shapes:
        results[shape] = times = measure(shape, rounds, threads)
        row = " ".join(f"{value:>14.2f}" for value in times.values())
        print(" ".join(f"{value:>8}" for value in shape), row)
    return results


if __name__ == "__main__":
    main(threads=int(sys.argv[1]) if len(sys.argv) > 1 else 1)
