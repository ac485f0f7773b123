"""Rewrite pads, windows and Gelus into the form that all passes and runtimes support."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import RewriteRule, RewriteRuleSet

from graphopt.graph.shapes import is_ceiled
from graphopt.graph.values import constant_of, dims_of
from passes.gradients.rules.shape import spread_pads
from passes.gradients.rules.windows import cropped, halved, window_of

_SCALED: list[Callable[[Any], Any]] = [lambda x: x / math.sqrt(2), lambda x: x * math.sqrt(0.5)]
_GROUPED: list[Callable[[Any, Any], Any]] = [
    lambda x, phi: (x * phi) * 0.5,
    lambda x, phi: x * (phi * 0.5),
    lambda x, phi: (x * 0.5) * phi,
]


def _gelu_rule(scaled: Callable[[Any], Any], grouped: Callable[[Any, Any], Any]) -> RewriteRule:
    return RewriteRule(lambda op, x: grouped(x, op.Erf(scaled(x)) + 1.0), lambda op, x: op.Gelu(x))


# Exporters before opset 20 write x (1 + erf(x / sqrt 2)) / 2, Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415
GELU = RewriteRuleSet([_gelu_rule(*forms) for forms in itertools.product(_SCALED, _GROUPED)], commute=True)


def pads_for_output_shapes(model: ir.Model) -> None:
    """Replace the `output_shape` of a ConvTranspose by equivalent pads if the sizes of its input are known.

    ONNX infers a wrong rank if the output is smaller than the input.
    """
    for node in model.graph:
        if node.op_type != "ConvTranspose" or node.domain != "" or "output_shape" not in node.attributes:
            continue
        x, w = node.inputs[:2]
        assert x is not None and w is not None
        shape = x.shape
        if (
            shape is None
            or w.shape is None
            or not all(isinstance(n, int) for n in [*shape[2:], *w.shape[2:]])
        ):
            continue
        window = window_of(x, node, w, "NOTSET")
        more = node.attributes.get_ints("output_padding", [0] * len(window.kernel))
        sizes = node.attributes.get_ints("output_shape")[-len(window.kernel) :]
        totals = cropped(window, shape[2:], sizes, more)
        if (totals < 0).any():
            continue
        window = halved(window, totals, node.attributes.get_string("auto_pad", "NOTSET"))
        node.attributes.pop("output_shape")
        node.attributes.pop("auto_pad", None)
        node.attributes.add(ir.AttrInt64s("pads", [*window.begin, *window.end]))


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
