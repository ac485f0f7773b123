"""Measure compile time against the size of the model, for onnx's light models and chains of growing depth, or files.

Run it: python examples/benchmarks/compile_time.py [NAME] or [FILE.onnx ...]
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


def main(*wanted: str) -> dict[str, tuple[int, int, float]]:
    """Print a line per model; return the nodes of the model and of the step, and the seconds, the least of three.

    Args:
        wanted: files, or a part of the names of the models.
    """
    files = [Path(name) for name in wanted if name.endswith(".onnx")]
    chosen = ((path.stem, graphopt.load(path)) for path in files) if files else models()
    optimizer = passes.AdamW(1e-3) if files else passes.SGD(momentum=0.9)
    loss = passes.CrossEntropy() if files else passes.MeanSquaredError()
    print(f"{'model':<24}{'nodes':>8}{'step':>8}{'seconds':>9}{'ms a node of the step':>23}")
    rows = {}
    for name, model in chosen:
        if not files and not all(part in name for part in wanted):
            continue
        times = []
        for _ in range(3):
            start = time.perf_counter()
            step = graphopt.compile(model, training=passes.TrainingMode(), loss=loss, optimizer=optimizer)
            times.append(time.perf_counter() - start)
        rows[name] = found = (len(model.graph), len(step.graph), min(times))
        print("{:<24}{:>8}{:>8}{:>9.2f}{:>23.2f}".format(name, *found, 1e3 * found[2] / found[1]))
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
