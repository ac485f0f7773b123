"""Convolutions with a kernel as large as their image, as gradients of weights are: products of more columns."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphopt.emitter import Emitter, like

FEW = 12  # batch elements, the input channels of a forward pass


def convolution_weights(model: ir.Model) -> bool:
    """Rewrite such convolutions, which ONNX Runtime unfolds into a product of few columns for each batch element.

    Measured in examples/benchmarks/convolution.py: 1.4 to 4 times as fast.
    """
    found = [node for node in model.graph if node.op_type == "Conv" and node.domain == ""]
    rewritten = False
    with Emitter(model) as op:
        for node in found:
            y = _rewritten(op, node)
            if y is not None:
                ir.convenience.replace_all_uses_with(
                    node.outputs[0], like(y, node.outputs[0]), replace_graph_outputs=True
                )
                rewritten = True
    return rewritten


def _rewritten(op: Emitter, node: ir.Node) -> ir.Value | None:
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    kernel, (batch, *sizes) = _sizes(w)[2:], _sizes(node.outputs[0]) or [None]
    taps = [size for size in sizes[1:] if size]
    places, positions = math.prod(taps), math.prod(size or 0 for size in kernel)
    if len(taps) < len(kernel) or positions < 2 * places or positions <= 16:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    if len(kernel) < 3 and (batch is None or batch >= FEW):
        return _along_batch(op, node, x, w)
    plain = node.attributes.get_int("group", 1) == 1 and len(node.inputs) == 2
    return _unfolded(op, node, x, w, batch, taps) if plain and batch and places < 32 else None


def _sizes(x: ir.Value) -> list[int | None]:
    """Return the sizes of `x`, None where unknown; of an unknown rank none."""
    return [size if isinstance(size, int) else None for size in x.shape or ()]


def _along_batch(op: Emitter, node: ir.Node, x: ir.Value, w: ir.Value) -> ir.Value:
    """Let the batch be a last spatial axis, along which the kernel has one tap: one product of all its columns."""
    n = len(_sizes(x)) - 2
    ones, pads = [1] * n, list(node.attributes.get_ints("pads", [0] * (2 * n)))
    image = op.Unsqueeze(op.Transpose(x, perm=[*range(1, n + 2), 0]), [0])
    y = op.Conv(
        image,
        op.Unsqueeze(w, [-1]),
        *node.inputs[2:],
        strides=[*node.attributes.get_ints("strides", ones), 1],
        dilations=[*node.attributes.get_ints("dilations", ones), 1],
        pads=[*pads[:n], 0, *pads[n:], 0],
        group=node.attributes.get_int("group", 1),
    )
    return op.Transpose(op.Squeeze(y, [0]), perm=[n + 1, *range(n + 1)])


def _unfolded(op: Emitter, node: ir.Node, x: ir.Value, w: ir.Value, batch: int, taps: list[int]) -> ir.Value:
    """Multiply the kernel, channel by channel, with what of the image lies under it at each place; add these up.

    With batch and channels exchanged, as they are in a forward pass, that is a convolution by a kernel for each place.
    """
    n = len(taps)
    swap = [1, 0, *range(2, n + 2)]
    places = math.prod(taps)
    one_hot = np.tile(np.eye(places).reshape(places, 1, *taps), [batch, 1, *[1] * n])
    ones = [1] * n
    columns = op.Conv(
        op.Transpose(x, perm=swap),
        op.constant(one_hot, like=x),
        strides=node.attributes.get_ints("dilations", ones),
        dilations=node.attributes.get_ints("strides", ones),
        pads=node.attributes.get_ints("pads", [0] * (2 * n)),
        group=batch,
    )
    rows = op.Transpose(op.Reshape(op.Transpose(w, perm=swap), [0, 0, -1]), perm=[0, 2, 1])
    products = op.ReduceSum(op.MatMul(op.Reshape(columns, [0, 0, -1]), rows), [0], keepdims=0)
    y = op.Reshape(products, [batch, *taps, -1])
    return op.Transpose(y, perm=[0, n + 1, *range(1, n + 1)])
