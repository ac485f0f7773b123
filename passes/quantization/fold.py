"""Fold BatchNormalization into the product before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import RECURRENT, VIEWS
from graphopt.graph.rewriting import Pass
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import fixed, given, like, name_of, producer_of, redirect, spread, swap
from passes.quantization.placement import Product, products, stopped
from passes.weights.initializers import array, register


@dataclass(frozen=True)
class FoldBatchNormalization(Pass):
    """Fold each BatchNormalization that follows a product with a weight into the weight and its bias.

    For Conv, ConvTranspose, Gemm and MatMul, w' = w g / sqrt(v + e) and b' = (b - m) g / sqrt(v + e) + beta, of the
    scale g, the shift beta, the running mean m and variance v, and e = epsilon (Jacob et al. 2018, section 3.2,
    https://arxiv.org/abs/1712.05877). w' and b' then train, with these statistics. A BatchNormalization stays if its
    statistics are computed, or if something else reads the product or its weight.

    >>> folded = passes.FoldBatchNormalization()
    >>> step = graphopt.compile(models.cnn((1, 8, 8), 10), quantize=folded, loss=passes.CrossEntropy())
    """

    def requires(self, model: ir.Model) -> None:
        self.precedes_gradient(model)

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        for product in list(products(model.graph)):
            if product.axis is not None and product.node.op_type not in RECURRENT:
                _fold(model, product)


def pool_means(model: ir.Model) -> None:
    """Replace each mean over all positions of images' channels by GlobalAveragePool, which has an integer kernel."""
    with Emitter(model) as op:
        for node in list(model.graph):
            if node.op_type != "ReduceMean" or node.domain or len(node.inputs) < 2:
                continue
            x, axes = given(node.inputs[0]), fixed(node.inputs[1])
            count = 0 if x.shape is None or axes is None or x.dtype is not ir.DataType.FLOAT else len(x.shape)
            if axes is not None and count > 3 and sorted(axis % count for axis in axes.ravel()) == [*range(2, count)]:
                y = pooled = op.GlobalAveragePool(x)
                if not node.attributes.get_int("keepdims", 1):
                    y = op.Flatten(pooled)
                    pooled.name = f"{name_of(node.outputs[0])}/pooled"  # by which its range is found again
                swap(node.outputs[0], like(y, node.outputs[0]))
                model.graph.remove(node, safe=True)
    model.graph.sort()


def drop_last(model: ir.Model) -> None:
    """Let each Dropout follow the views behind it, so that what it drops from is rounded once."""
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type in VIEWS and node.domain == "" else None
        drop = None if x is None else x.producer()
        y = node.outputs[0]
        if x is None or drop is None or drop.op_type != "Dropout" or drop.domain or y.is_graph_output():
            continue
        if (
            len(x.uses()) == 1
            and not x.is_graph_output()
            and not any(mask.uses() or mask.is_graph_output() for mask in drop.outputs[1:])
        ):
            readers = list(y.uses())
            node.replace_input_with(0, drop.inputs[0])
            drop.replace_input_with(0, y)
            redirect(readers, like(x, y))
    model.graph.sort()


def write_apart(op: Emitter, product: Product) -> Product:
    """Write a Gemm as MatMul and Sub, of which the runtime makes MatMulNBits; return the product that is left."""
    node, w = product.node, product.read
    if node.op_type != "Gemm" or stopped(node):
        return product
    y = op.MatMul(node.inputs[0], op.Transpose(w, perm=[1, 0]) if product.axis == 0 else w)
    made = Product(producer_of(y), product.weight, given(producer_of(y).inputs[1]), axis=1)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        y = op.Sub(y, op.Neg(node.inputs[2]))  # the runtime makes a Gemm of an Add before an activation
    swap(node.outputs[0], like(y, node.outputs[0]))
    op.graph.remove(node, safe=True)
    return made


def _fold(model: ir.Model, product: Product) -> None:
    node, y = product.node, product.node.outputs[0]
    norm = next(iter(y.consumers()), None)
    if norm is None or norm.op_type != "BatchNormalization" or len(y.uses()) > 1 or y.is_graph_output():
        return
    gain, shift, mean, variance = (fixed(x) for x in norm.inputs[1:5])
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    start = 0.0 if bias is None else spread(bias)
    is_plain = not norm.attributes.get_int("training_mode", 0) and node.attributes.get_float("beta", 1.0) == 1
    is_last = node.op_type not in ("Gemm", "MatMul") or len(y.shape or ()) == 2  # its channels are on axis 1
    if gain is None or shift is None or mean is None or variance is None or start is None:
        return
    if np.size(start) != 1 and (*np.shape(start)[-1:], np.size(start)) != 2 * gain.shape:
        return  # the bias has other numbers for each row
    if (
        not (is_plain and is_last)
        or any(z.uses() or z.is_graph_output() for z in norm.outputs[1:])
        or product.read is not product.weight
    ):
        return
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    factor = gain.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    w, dtype = array(product.weight), array(product.weight).dtype
    product.weight.const_value = ir.tensor((w * _along(node, factor, w)).astype(dtype), name=product.weight.name)
    offset = ((np.ravel(start) - mean) * factor + shift).astype(dtype)
    name = f"{name_of(product.weight).removesuffix('.weight')}.bias"
    if bias is not None and bias.is_initializer() and len(bias.uses()) == 1:
        bias.const_value, bias.shape = ir.tensor(offset, name=bias.name), ir.Shape(offset.shape)
    else:
        fresh = register(model, name, offset)
        if bias is not None:
            metadata.copy(bias, fresh)
        bias = fresh
    with Emitter(model) as op:
        if node.op_type == "MatMul":
            y = op.Add(y, bias)
        else:
            node.resize_inputs(3)
            node.replace_input_with(2, bias)
        swap(norm.outputs[0], y)
    model.graph.remove(norm, safe=True)


def _along(node: ir.Node, factor: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the factors of a weight's outputs in a form that broadcasts to the weight."""
    if node.op_type == "Conv" or (node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0):
        return factor.reshape(-1, *[1] * (w.ndim - 1))
    if node.op_type != "ConvTranspose":
        return factor
    groups = node.attributes.get_int("group", 1)
    each = np.repeat(factor.reshape(groups, -1), len(w) // groups, axis=0)  # [inputs, outputs / groups]
    return each.reshape(*each.shape, *[1] * (w.ndim - 2))
