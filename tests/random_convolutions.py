"""Random convolutions of any geometry, many in one graph."""

from __future__ import annotations

import numpy as np
import onnx
from builders import model

from graphopt.graph.loading import load


def drawn(rng, number, with_relu):
    """Return a statement that convolves input x of a number with its weights, and the shapes of both and of a bias."""
    axes, transposed = int(rng.choice([1, 2, 2, 2, 3])), rng.random() < 0.35
    group = int(rng.choice([1, 1, 1, 2, 5, 18]))
    sizes = [16, 17, 18, 33, 40] if group <= 2 else [1, 1, 2, 3, 9]
    channels, filters = (int(n) * group for n in rng.choice(sizes, 2))
    strides, kernel = rng.integers(1, 4, axes), rng.integers(1, 5, axes)
    dilations = np.ones_like(kernel) if transposed and max(strides) > 1 else rng.integers(1, 3, axes)
    reach = (kernel - 1) * dilations + 1
    sizes = reach + rng.integers(0, [40, 14, 7][axes - 1], axes)
    if rng.random() < 0.25:  # few places, many filters
        sizes, filters = reach + rng.integers(0, 2, axes), int(rng.choice([50, 67, 130])) * group
    if rng.random() < 0.2 and not transposed:  # as large as the image
        kernel, dilations, sizes = sizes, np.ones_like(kernel), sizes + 1
        reach = kernel
    pads = np.minimum(rng.integers(0, 3, 2 * axes), np.tile(reach, 2) - 1)
    if rng.random() < 0.2:
        kernel, strides, dilations, pads = (
            np.full(len(v), k) for v, k in zip((kernel, strides, dilations, pads), (1, 1, 1, 0), strict=True)
        )
    if axes > 1 and rng.random() < 0.2:  # a sequence, stored as an image
        sizes[-1] = kernel[-1] = strides[-1] = dilations[-1] = 1
        pads[[axes - 1, -1]] = 0
    more = [int(rng.integers(0, s)) for s in strides]
    attributes = {"strides": strides, "dilations": dilations, "pads": pads} | (
        {"output_padding": more} if transposed else {}
    )
    if transposed:
        pads[:] = np.minimum(pads, np.tile((sizes - 1) * strides + reach - 1, 2) // 2)
    text = ", ".join(f"{name} = [{','.join(map(str, values))}]" for name, values in attributes.items())
    bias, relu = rng.random() < 0.5, (rng.random() < 0.3) and with_relu
    operands = f"x{number}, w{number}" + (f", b{number}" if bias else "")
    result = f"z{number}" if relu else f"y{number}"
    statement = f"{result} = {'ConvTranspose' if transposed else 'Conv'}<{text}, group = {group}>({operands})"
    if relu:
        statement += f"\ny{number} = Relu(z{number})"
    shape = [channels, filters // group] if transposed else [filters, channels // group]
    return statement, [channels, *sizes], [*shape, *kernel], [filters] if bias else None


def convolutions(count, relu=True):
    """Return a graph of many convolutions whose batch is not known, its weights, and the shapes of its inputs."""
    rng = np.random.default_rng(0)
    statements, inputs, outputs, shapes, weights = [], [], [], {}, {}
    for i in range(count):
        statement, x, w, b = drawn(rng, i, relu)
        statements.append(statement)
        inputs.append(f"float[N, {', '.join(map(str, x))}] x{i}")
        inputs.append(f"float[{', '.join(map(str, w))}] w{i}")
        outputs.append(f"float[{', '.join('ABCDE'[: len(w)])}] y{i}")
        shapes[f"x{i}"] = x
        weights[f"w{i}"] = rng.standard_normal(w).astype(np.float32)
        if b:
            inputs.append(f"float[{b[0]}] b{i}")
            weights[f"b{i}"] = rng.standard_normal(b).astype(np.float32)
    proto = model(f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(statements)} }}")
    return load(onnx.shape_inference.infer_shapes(proto)), weights, shapes
