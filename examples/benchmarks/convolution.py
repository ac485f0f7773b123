"""What the gradient of a convolution costs: by its input, by its weights before and after passes.Fuse, and the limit.

The limit is a bare matrix product of the same number of multiplications, 1024 rows and columns at most, in the same
run. One thread, median of rounds in which each takes its turn.

Run it: python examples/benchmarks/convolution.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

import graphopt
import passes
from graphopt.device import Device


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


def convolution(shape: Shape) -> onnx.ModelProto:
    pad, channels, size = shape.kernel // 2, shape.channels, shape.size
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{shape.batch},{channels},{size},{size}] x) => (float[{shape.batch},{shape.filters},k,l] y) {{
            y = Conv<pads = {[pad] * 4}, strides = {[shape.stride] * 2}>(x, w)
        }}""")
    weights = np.zeros((shape.filters, channels, shape.kernel, shape.kernel), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return onnx.shape_inference.infer_shapes(model)


def product(flops: float) -> onnx.ModelProto:
    rows = 1024
    depth = max(1, round(flops / (2 * rows * rows)))
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{rows},{depth}] a, float[{depth},{rows}] b) => (float[{rows},{rows}] y) {{ y = MatMul(a, b) }}""")


def runner(model: ir.Model | onnx.ModelProto) -> Callable[[], object]:
    """Return what runs a graph once on random data."""
    session = Device("cpu", 1, deterministic=False).session(graphopt.load(model))
    random = np.random.default_rng(0)
    feeds = {x.name: random.standard_normal(x.shape, np.float32) for x in session.get_inputs()}
    return lambda: session.run(None, feeds)


def measure(shape: Shape, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each form."""
    model = convolution(shape)
    by_weights = graphopt.grad(model, ["w"], seeded=True, keep=False)
    fused = by_weights.clone()
    passes.Fuse()(fused)
    positions = ((shape.size + 2 * (shape.kernel // 2) - shape.kernel) // shape.stride + 1) ** 2
    flops = 2.0 * shape.batch * shape.channels * shape.filters * shape.kernel**2 * positions
    graphs = {
        "limit": product(flops),
        "forward": model,
        "by input": graphopt.grad(model, ["x"], seeded=True, keep=False),
        "by weights": by_weights,
        "fused": fused,
    }
    runs = {name: runner(graph) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main(shapes: list[Shape] = SHAPES, rounds: int = 15) -> dict[Shape, dict[str, float]]:
    header = ("batch", "channels", "size", "filters", "kernel", "stride")
    print(" ".join(f"{name:>8}" for name in header), end="")
    print(
        " ".join(f"{name:>11}" for name in ("limit", "forward", "by input", "by weights", "fused", "ratio"))
    )
    results = {}
    for shape in shapes:
        results[shape] = times = measure(shape, rounds)
        print(" ".join(f"{value:>8}" for value in shape), end="")
        ratio = times["by weights"] / times["fused"]
        print(" ".join(f"{value:>11.2f}" for value in [*times.values(), ratio]))
    return results


if __name__ == "__main__":
    main()
