"""Measure compile time against the size of the model, for onnx's light models and chains of growing depth.

Run it: python examples/benchmarks/compile_time.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import graphopt
import passes
from graphopt.models import mlp

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
DEPTHS = (50, 100, 200, 400, 800, 1600)


def residual(depth: int, width: int = 8) -> onnx.ModelProto:
    """Return a chain of x + Relu(x w + b)."""
    lines, weights, last = [], [], "x0"
    for i in range(depth):
        lines.append(f"p{i} = Gemm({last}, w{i}, b{i})  r{i} = Relu(p{i})  x{i + 1} = Add({last}, r{i})")
        last = f"x{i + 1}"
        for name, shape in ((f"w{i}", (width, width)), (f"b{i}", (width,))):
            weights.append(onnx.numpy_helper.from_array(np.full(shape, 0.01, np.float32), name))
    text = f"g (float[N,{width}] x0) => (float[N,{width}] {last}) {{ {' '.join(lines)} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    proto.graph.initializer.extend(weights)
    return proto


def models() -> Iterator[tuple[str, ir.Model]]:
    """Yield the models and their names."""
    for path in sorted(LIGHT.glob("*.onnx"), key=lambda path: len(onnx.load(path).graph.node)):
        yield path.stem.removeprefix("light_"), graphopt.load(path)
    for depth in DEPTHS:
        yield f"perceptron, {depth} layers", mlp((8,), 8, hidden=(8,) * depth)
    for depth in DEPTHS:
        yield f"residual, {depth} layers", graphopt.load(residual(depth))


def main(only: str = "") -> dict[str, tuple[int, int, float]]:
    """Print a line per model whose name contains `only`; return the nodes before and after, and the seconds."""
    loss, optimizer = passes.MeanSquaredError(), passes.SGD(momentum=0.9)
    print(f"{'model':<24}{'nodes':>8}{'after':>8}{'seconds':>9}{'nodes/s':>9}")
    rows = {}
    for name, model in models():
        if only not in name:
            continue
        start = time.perf_counter()
        step = graphopt.compile(model, loss=loss, optimizer=optimizer)
        seconds = time.perf_counter() - start
        rows[name] = (len(model.graph), len(step.graph), seconds)
        print(
            f"{name:<24}{len(model.graph):>8}{len(step.graph):>8}{seconds:>9.2f}{len(model.graph) / seconds:>9.0f}"
        )
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
