"""Write elementwise operators, and LogSoftmax, as arithmetic."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import constant_of, dims_of, dtype_of
from graphopt.targets.portable.everywhere import ALONG_NO_AXIS, celu, mean
from graphopt.targets.portable.form import Form, given, is_read


def _log_softmax(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write LogSoftmax as x - max - log sum exp (x - max). There is no kernel for LogSoftmax."""
    x, axis = node.inputs[0], [node.attributes.get_int("axis", -1)]
    shifted = op.Sub(x, op.ReduceMax(x, axis))
    return [op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), axis)))]


def _log_sum_exp(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write ReduceLogSumExp as max + log sum exp (x - max). The kernel is infinite from 89 on."""
    along_none = ALONG_NO_AXIS[node.op_type](op, node)
    if along_none is not None:
        return along_none
    if "axes" in node.attributes:  # before opset 18
        return None
    x, axes = given(node.inputs[0]), node.inputs[1] if len(node.inputs) > 1 else None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    largest = op.ReduceMax(x, axes, **{**attributes, "keepdims": 1})
    limit = float(np.finfo(dtype_of(x).numpy()).max)
    finite = op.Clip(largest, op.constant(-limit, like=x), op.constant(limit, like=x))  # inf - inf is NaN
    rest = op.Log(op.ReduceSum(op.Exp(op.Sub(x, finite)), axes, **attributes))
    return [op.Add(rest, finite if attributes.get("keepdims", 1) else op.Squeeze(finite, axes))]


def _circular(name: str) -> Form:
    """Return the form of Sin, Cos or Tan: polynomials on [-pi/4, pi/4], after a reduction by parts of pi/2.

    WGSL promises 2^-11 between -pi and pi, and nothing beyond. Parts and polynomials are those of Cephes (Moshier,
    `sinf.c`), exact to 1e-7 up to 8,192 quarters of a turn.
    """

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        x = given(node.inputs[0])
        if x.dtype != ir.DataType.FLOAT:
            return None
        turns = op.Floor(x * (2 / math.pi) + 0.5)
        r = functools.reduce(lambda rest, part: rest - turns * part, _PARTS, x)
        z = r * r
        sine = r + r * z * _polynomial(op, z, _SINE)
        cosine = 1 - z * 0.5 + z * z * _polynomial(op, z, _COSINE)
        halves = op.Floor(turns * 0.5)
        is_odd = op.Greater(turns, halves * 2)
        if name == "Tan":
            return [op.Where(is_odd, op.Neg(cosine), sine) / op.Where(is_odd, sine, cosine)]
        if name == "Cos":  # a quarter ahead
            halves, is_odd = op.Floor((turns + 1) * 0.5), op.Not(is_odd)
        sign = 1 - (halves - op.Floor(halves * 0.5) * 2) * 2
        return [op.Where(is_odd, cosine, sine) * sign]

    return form


_PARTS = (
    1.5703125,
    4.837512969970703e-4,
    7.549789948768648e-8,
)  # of pi/2: products by small numbers are exact
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def _polynomial(op: Emitter, z: ir.Value, factors: Sequence[float]) -> ir.Value:
    first, *others = factors
    return functools.reduce(lambda y, factor: y * z + factor, others, op.constant(first, like=z))


def _asinh(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Take Asinh of the magnitude. The kernel is wrong below -4,000, where x + sqrt(x^2 + 1) vanishes."""
    x = given(node.inputs[0])
    source = x.producer()
    if source is not None and source.op_type == "Abs":
        return None
    y = op.Asinh(op.Abs(x))
    return [op.Where(op.Less(x, op.constant(0, like=x)), op.Neg(y), y)]


def _extreme(compare: str) -> Form:
    """Return the form of Max or Min, which choose by a comparison. 1.27 has no kernels for them.

    It keeps a NaN of the first operand, or of the one that is no constant.
    """

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
        def chosen(a: ir.Value, b: ir.Value) -> ir.Value:
            a, b = (b, a) if constant_of(a) is not None else (a, b)
            return op.Where(getattr(op, compare)(a, b), b, a)

        first, *others = map(given, node.inputs)
        return [functools.reduce(chosen, others, first) if others else op.Identity(first)]

    return form


def _sign(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Sign as comparisons, which keep 0 and NaN. There is no kernel for Sign."""
    x = given(node.inputs[0])
    zero, one, less = (op.constant(number, like=x) for number in (0, 1, -1))
    return [op.Where(op.Greater(x, zero), one, op.Where(op.Less(x, zero), less, x))]


def _round(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Round as Floor and comparisons; halves go to the even number. There is no kernel for Round."""
    x = given(node.inputs[0])
    low = op.Floor(x)
    rest, half = x - low, low * 0.5
    odd = op.Greater(half, op.Floor(half))
    above, tied = op.Greater(rest, 0.5), op.And(op.Equal(rest, 0.5), odd)
    up = op.Cast(above, to=x.dtype) + op.Cast(tied, to=x.dtype)
    return [op.Where(op.Greater(up, 0.0), low + up, op.Where(op.Greater(rest, 0.0), low, x))]


def _selu(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Selu as a multiple of Elu. There is no kernel for Selu."""
    alpha = node.attributes.get_float("alpha", 1.6732632423543772)
    return [op.Elu(node.inputs[0], alpha=alpha) * node.attributes.get_float("gamma", 1.0507009873554805)]


def _softsign(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Softsign as x / (1 + |x|). There is no kernel for Softsign."""
    x = given(node.inputs[0])
    return [x / (op.Abs(x) + 1)]


def _shrink(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Shrink as comparisons. There is no kernel for Shrink."""
    x, bias = given(node.inputs[0]), node.attributes.get_float("bias", 0.0)
    limit, zero = op.constant(node.attributes.get_float("lambd", 0.5), like=x), op.constant(0, like=x)
    below = op.Where(op.Less(x, op.Neg(limit)), x + bias, zero)
    return [op.Where(op.Greater(x, limit), x - bias, below)]


def _prelu(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write PRelu as a comparison. 1.27 has no kernel for PRelu."""
    x, slope = map(given, node.inputs)
    return [op.Where(op.Less(x, op.constant(0, like=x)), x * slope, x)]


def _power(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Give the exponent of Pow the type of the base, and both the same shape if one has a last axis of size 1.

    The kernel fails for two types. It has no variant that broadcasts such an axis to one of 4, 8 or more elements.
    """
    x, exponent = map(given, node.inputs)
    shapes = [dims_of(value) for value in (x, exponent) if value.shape is not None and set(value.shape) - {1}]
    narrow = len(shapes) == 2 and shapes[0][-1] != shapes[1][-1]
    if x.dtype == exponent.dtype and not narrow:
        return None
    exponent = op.cast(exponent, x.dtype)
    if narrow:
        x = op.Where(op.Greater(exponent, exponent), exponent, x)  # an Expand would be simplified away
        exponent = op.Where(op.Greater(x, x), x, exponent)
    return [op.Pow(x, exponent)]


def _dropout(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Leave out a Dropout of inference. There is no kernel for Dropout."""
    training = constant_of(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else False
    if training is None or training or any(map(is_read, node.outputs[1:])):
        return None
    return [op.Identity(node.inputs[0])]


def _either(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Or as an And of opposites. There is no kernel for Or."""
    return [op.Not(op.And(*map(op.Not, node.inputs)))]


FORMS: dict[str, Form] = {
    **ALONG_NO_AXIS,
    "Asinh": _asinh,
    "Celu": celu,
    "Cos": _circular("Cos"),
    "Dropout": _dropout,
    "LogSoftmax": _log_softmax,
    "Max": _extreme("Less"),
    "Mean": mean,
    "Min": _extreme("Greater"),
    "Or": _either,
    "PRelu": _prelu,
    "Pow": _power,
    "ReduceLogSumExp": _log_sum_exp,
    "Round": _round,
    "Selu": _selu,
    "Shrink": _shrink,
    "Sign": _sign,
    "Sin": _circular("Sin"),
    "Softsign": _softsign,
    "Tan": _circular("Tan"),
}
