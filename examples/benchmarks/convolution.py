"""Measure a convolution and its gradients: as they are, after passes.Fuse, as kernels, and the limit.

The limit is a single matrix product with the same number of multiplications and at most 1024 rows and columns. The
blocked form is ONNX Runtime's own for constant weights, written by hand for weights that change: the input, the weights
and the output are arranged anew. It needs numbers of channels that its block divides. Times are medians of rounds in
which all forms take turns, in milliseconds.

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
from graphopt.targets.native.lowering import lower_to_kernels


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

BLOCK = 16  # channels, in ONNX Runtime's blocked form with AVX-512

FORMS = [
    "limit",
    *("forward", "blocked", "kernels"),
    *("by x", "by x, fused", "by x, kernels"),
    *("by w", "by w, fused", "by w, kernels"),
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


def as_input(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its weights as an input, as in training."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    weights = copy.graph.initializer.pop()
    copy.graph.input.append(onnx.helper.make_tensor_value_info(weights.name, weights.data_type, weights.dims))
    return copy


def blocked(shape: Shape) -> onnx.ModelProto | None:
    """Return the convolution in ONNX Runtime's blocked form; None if the numbers of channels do not fit."""
    batch, channels, size, filters, kernel, stride = shape
    if channels % BLOCK or filters % BLOCK:
        return None
    geometry = f"pads = {[kernel // 2] * 4}, strides = {[stride] * 2}, kernel_shape = {[kernel] * 2}"
    split = [filters // BLOCK, BLOCK, channels // BLOCK, BLOCK, kernel, kernel]
    whole = [filters, channels, kernel, kernel]
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft.nchwc" : 1]>
        g (float[{batch},{channels},{size},{size}] x, float{whole} w) => (float[{batch},{filters},k,l] y)
        <int64[6] split = {{{", ".join(map(str, split))}}}, int64[4] whole = {{{", ".join(map(str, whole))}}}> {{
            w1 = Reshape(w, split) w2 = Transpose<perm = [0, 2, 4, 5, 3, 1]>(w1) w3 = Reshape(w2, whole)
            x1 = com.microsoft.nchwc.ReorderInput(x)
            y1 = com.microsoft.nchwc.Conv<{geometry}, dilations = [1, 1], group = 1>(x1, w3)
            y = com.microsoft.nchwc.ReorderOutput<channels = {filters}>(y1)
        }}""")


def product(flops: float) -> onnx.ModelProto:
    rows = 1024
    depth = max(1, round(flops / (2 * rows * rows)))
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{rows},{depth}] a, float[{depth},{rows}] b) => (float[{rows},{rows}] y) {{ y = MatMul(a, b) }}""")


def runner(model: ir.Model | onnx.ModelProto, threads: int, kernels: bool = False) -> Callable[[], object]:
    """Return a function that runs a graph once on random data."""
    loaded = graphopt.load(model)
    lowered = lower_to_kernels(loaded, threads=threads) if kernels else None
    device = Device(threads=threads, flush_denormals=False, native=False)
    session = Session(device, loaded) if lowered is None else Session(device, lowered.model, library=lowered.library)
    random = np.random.default_rng(0)
    feeds = {x.name: random.standard_normal(x.shape, np.float32) for x in session.ort.get_inputs()}
    return lambda: session.ort.run(None, feeds)


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
    runs = {name: runner(graph, threads) for name, graph in graphs.items()}
    runs["limit"] = runner(product(flops), threads)
    if (form := blocked(shape)) is not None:
        runs["blocked"] = runner(form, threads)
    runs["kernels"] = runner(trained, threads, kernels=True)
    for name in "by x", "by w":
        runs[f"{name}, fused"] = runner(fused(graphs[name]), threads)
        runs[f"{name}, kernels"] = runner(fused(graphs[name]), threads, kernels=True)
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
    print(
        "|",
        " | ".join([", ".join(Shape._fields), *FORMS]),
        "|\n|",
        " | ".join(["---"] + ["---:"] * len(FORMS)),
        "|",
    )
    results = {}
    for shape in shapes:
        results[shape] = times = measure(shape, rounds, threads)
        figures = [f"{times[form]:.2f}" if form in times else "" for form in FORMS]
        print("|", " | ".join([", ".join(map(str, shape)), *figures]), "|", flush=True)
    return results


if __name__ == "__main__":
    main(threads=int(sys.argv[1]) if len(sys.argv) > 1 else 1)
