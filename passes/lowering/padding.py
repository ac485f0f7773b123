"""Rewrite pads and windows into a form that all passes and runtimes support: pads of all axes, whole windows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.graph.shapes import is_ceiled
from graphopt.graph.values import constant_of, dims_of
from passes.gradients.rules.convolution import window_of
from passes.gradients.rules.shape import spread_pads


def pads_for_output_shapes(model: ir.Model) -> None:
    """Replace the `output_shape` of a ConvTranspose by equivalent pads if the sizes of its input are known.

    ONNX infers a wrong rank if the output is smaller than the input.
    """
    for node in model.graph:
        if node.op_type != "ConvTranspose" or node.domain != "" or "output_shape" not in node.attributes:
            continue
        x, w = node.inputs[:2]
        assert x is not None and w is not None
        shape, weights = x.shape, w.shape
        if shape is None or weights is None:
            continue
        n = len(shape) - 2
        sizes, kernel = list(shape)[2:], list(node.attributes.get_ints("kernel_shape", None) or weights[2:])
        if not all(isinstance(size, int) for size in sizes + kernel):
            continue
        strides, dilations = (node.attributes.get_ints(name, [1] * n) for name in ("strides", "dilations"))
        more = node.attributes.get_ints("output_padding", [0] * n)
        total = node.attributes.get_ints("output_shape")
        totals = (np.array(sizes) - 1) * strides + more + (np.array(kernel) - 1) * dilations + 1 - total[-n:]
        if (totals < 0).any():
            continue
        less, rest = (totals // 2).tolist(), (totals - totals // 2).tolist()
        upper = node.attributes.get_string("auto_pad", "NOTSET") == "SAME_UPPER"
        node.attributes.pop("output_shape")
        node.attributes.pop("auto_pad", None)
        node.attributes.add(ir.AttrInt64s("pads", [*less, *rest] if upper else [*rest, *less]))


def pad_all_axes(model: ir.Model) -> None:
    """Extend a Pad of some axes to all axes. ONNX Runtime 1.31 moves a Transpose incorrectly past a Pad with `axes`."""
    for node in model.graph.all_nodes():
        if node.op_type != "Pad" or node.domain != "" or len(node.inputs) < 4:
            continue
        x, pads, _, axes = node.inputs
        widths, at = constant_of(pads), constant_of(axes)
        if x is None or x.shape is None or widths is None or at is None:
            continue
        spread = ir.tensor(spread_pads(len(x.shape), widths, at))
        output = ir.val(f"{node.outputs[0].name}/pads", spread.dtype, spread.shape.numpy())
        assert node.graph is not None
        node.graph.insert_before(node, ir.node("Constant", [], {"value": spread}, outputs=[output]))
        node.replace_input_with(1, output)
        node.resize_inputs(3)


def whole_windows(model: ir.Model) -> None:
    """Drop the `ceil_mode` of pools where it adds no window. Before opset 22 ONNX infers one window too many."""
    for node in filter(is_ceiled, model.graph.all_nodes()):
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        sizes, counts = dims_of(x)[2:], dims_of(y)[2:]
        if not all(isinstance(size, int) for size in [*sizes, *counts]):
            continue
        window = window_of(x, node)
        room = np.array(sizes) + window.begin + window.end - window.extent
        if (room // window.strides + 1).tolist() == list(counts):
            node.attributes.pop("ceil_mode")
