"""Random convolutions of any geometry, many in one graph."""

from __future__ import annotations

import numpy as np
import onnx
from builders import model

from graphopt.graph.loading import load


def drawn(rng, number, with_relu):
    """Return a statement that convolves input x of a number with its weights, the shapes of both and of a bias, and the
    least sizes of x along the axes of space.
    """
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
        least = -(-(2 * np.maximum(*pads.reshape(2, -1)) - reach + 1) // strides) + 1
    else:
        least = reach - pads.reshape(2, -1).sum(axis=0)
    text = ", ".join(f"{name} = [{','.join(map(str, values))}]" for name, values in attributes.items())
    bias, relu = rng.random() < 0.5, (rng.random() < 0.3) and with_relu
    operands = f"x{number}, w{number}" + (f", b{number}" if bias else "")
    result = f"z{number}" if relu else f"y{number}"
    statement = f"{result} = {'ConvTranspose' if transposed else 'Conv'}<{text}, group = {group}>({operands})"
    if relu:
        statement += f"\ny{number} = Relu(z{number})"
    shape = [channels, filters // group] if transposed else [filters, channels // group]
    least = np.maximum(least, 1).tolist()
    return statement, [channels, *sizes], [*shape, *kernel], [filters] if bias else None, least


def convolutions(count, relu=True, seed=0):
    """Return a graph of many convolutions whose batch is not known, its weights, and the shapes of its inputs."""
    graph, weights, shapes, _ = _graph_of(count, relu, seed, is_open=False)
    return graph, weights, shapes


def open_convolutions(count, seed):
    """Return a graph of many convolutions of images of any sizes, its weights, and the least shapes of its inputs."""
    graph, weights, shapes, least = _graph_of(count, True, seed, is_open=True)
    return graph, weights, {name: [shape[0], *least[name]] for name, shape in shapes.items()}


def _graph_of(count, relu, seed, is_open):
    rng = np.random.default_rng(seed)
    statements, inputs, outputs, shapes, weights, fewest = [], [], [], {}, {}, {}
    for i in range(count):
        statement, x, w, b, least = drawn(rng, i, relu)
        statements.append(statement)
        space = [f"S{i}_{axis}" for axis in range(len(x) - 1)] if is_open else x[1:]
        inputs.append(f"float[N, {', '.join(map(str, [x[0], *space]))}] x{i}")
        inputs.append(f"float[{', '.join(map(str, w))}] w{i}")
        outputs.append(f"float[{', '.join('ABCDE'[: len(w)])}] y{i}")
        shapes[f"x{i}"], fewest[f"x{i}"] = x, least
        weights[f"w{i}"] = rng.standard_normal(w).astype(np.float32)
        if b:
            inputs.append(f"float[{b[0]}] b{i}")
            weights[f"b{i}"] = rng.standard_normal(b).astype(np.float32)
    proto = model(f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(statements)} }}")
    return load(onnx.shape_inference.infer_shapes(proto)), weights, shapes, fewest
