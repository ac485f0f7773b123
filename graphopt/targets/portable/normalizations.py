"""Write normalizations as arithmetic, or subtract the mean before them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import is_floating
from graphopt.targets.portable.form import Form, given, is_read


def batch_normalization(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write BatchNormalization as arithmetic: Tract and MNN refuse statistics that are no constants."""
    x, scale, bias, mean, variance = map(given, node.inputs)
    if x.shape is None or node.attributes.get_int("training_mode"):
        return None
    deviation = op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5)))
    factor = op.Div(_cast(op, scale, deviation), deviation)
    axes = list(range(1, len(x.shape) - 1))

    def by_channel(y: ir.Value) -> ir.Value:
        return op.Unsqueeze(_cast(op, y, x), axes) if axes else _cast(op, y, x)

    centered = op.Sub(x, by_channel(mean))
    return [op.Add(op.Mul(centered, by_channel(factor)), by_channel(bias))]


def layer_normalization(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write LayerNormalization as reductions if its further outputs are used: OpenVINO lacks them, TVM is wrong."""
    x, scale, *bias = node.inputs
    used = [y for y in node.outputs[1:] if is_read(y)]
    if x is None or x.shape is None or not used:
        return None
    first = node.attributes.get_int("axis", -1) % len(x.shape)
    axes = list(range(first, len(x.shape)))
    wide = op.Cast(x, to=used[0].dtype) if x.dtype != used[0].dtype else x
    mean = op.ReduceMean(wide, axes)
    centered = op.Sub(wide, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5))))
    y = op.Mul(_cast(op, op.Mul(centered, inverse), x), scale)
    for shift in bias:
        y = y if shift is None else op.Add(y, shift)
    return [y, mean, inverse]


def centered(first: int) -> Form:
    """Return the form of a normalization of what is left after the mean is subtracted.

    It is over the axes from its attribute `axis` on, or from axis `first` on if it has none.

    Kernels of ONNX Runtime are wrong where numbers are far from 0: LayerNormalization of its CPU provider up to 1.26
    and of its WebGPU provider, which compute the variance as a difference of means, and InstanceNormalization.
    """

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        x, *weights = node.inputs
        if x is None or x.shape is None or x.dtype != ir.DataType.FLOAT or _is_centered(x):
            return None
        axes = list(range(node.attributes.get_int("axis", first) % len(x.shape), len(x.shape)))
        mean = op.ReduceMean(x, axes)
        y, *statistics = op.emit_again(node, [op.Sub(x, mean), *weights])
        if statistics and is_read(node.outputs[1]):
            statistics[0] = mean
        return [y, *statistics]

    return form


def _is_centered(x: ir.Value) -> bool:
    """Return whether a value is another one minus its mean."""
    node = x.producer()
    if node is None or node.op_type != "Sub":
        return False
    mean = given(node.inputs[1]).producer()
    return mean is not None and mean.op_type == "ReduceMean" and mean.inputs[0] is node.inputs[0]


def _cast(op: Emitter, value: ir.Value, model: ir.Value) -> ir.Value:
    return value if value.dtype == model.dtype or not is_floating(model) else op.Cast(value, to=model.dtype)
