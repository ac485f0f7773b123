"""Differentiate elementwise operators by a table of local derivatives, and a few by separate rules.

Bengio et al., https://arxiv.org/abs/1308.3432: the derivative of rounding is treated as 1. Jacob et al.,
https://arxiv.org/abs/1712.05877: it is 0 if a quantized number is out of range. The gradients of the scale from both
operators sum to the gradient of Esser et al., https://arxiv.org/abs/1902.08153. A zero point is an integer and has no
gradient.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import STOP_GRADIENT
from graphopt.graph.values import constant_number, constant_of, dims_of, dtype_of, like, rank
from passes.gradients.registry import Active, Gradients, elementwise, one_line_rules, rule
from passes.gradients.walk import expansion, further_output


def mask(op: Emitter, condition: Value, x: Value) -> Value:
    """Return 1 where `condition` is true and 0 elsewhere, in the element type of `x`."""
    return op.Cast(condition, to=x.dtype)


def nonzero(op: Emitter, x: Value) -> Value:
    """Return `x` with 0 replaced by 1, to divide by it."""
    return x + mask(op, op.Equal(x, 0.0), x)


def _positive(op: Emitter, x: Value) -> Value:
    """Return 1 where `x` > 0 and 0 elsewhere, in the element type of `x`.

    In float32, emit a HardSigmoid of maximal slope: one kernel instead of a comparison and a cast. It takes 0.16 ms
    for 524288 elements instead of 0.22 on onnxruntime 1.31.1 and 0.46 on 1.19.2. Numbers below 1e-30 lie on its slope.
    Its `beta` is slightly below 0 because OpenVINO takes 0 for the default 0.5 (tests/faults.py: HardSigmoid-beta).
    """
    if x.dtype != ir.DataType.FLOAT:
        return mask(op, op.Greater(x, 0.0), x)
    return STOP_GRADIENT.mark(op.HardSigmoid(x, alpha=1e30, beta=-1e-30))


def _power(op: Emitter, x: Value, p: Value, y: Value) -> Value | float:
    """Return d(x^p)/dx = p x^(p-1), simplified for a known exponent, and 0 if p is 0, even at x = 0."""
    n = constant_number(p)
    if n is None:
        p = op.Cast(p, to=x.dtype)
        return p * op.Pow(x, p - 1 + mask(op, op.Equal(p, 0.0), p))
    n = float(n)
    if n in (0, 1):
        return n
    if n == 0.5:
        return 0.5 / y
    return n * x if n == 2 else n * op.Pow(x, op.constant(n - 1, like=x))


def gelu(op: Emitter, x: Value, approximate: str) -> Value:
    """Return the derivative of Gelu, x Phi(x), or of its tanh form (Hendrycks, Gimpel, https://arxiv.org/abs/1606.08415)."""
    if approximate == "none":
        z = x * math.sqrt(0.5)
        density = op.Exp(-0.5 * math.log(2 * math.pi) - z * z)
        return 0.5 + 0.5 * op.Erf(z) + x * density
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    t = op.Tanh(x * (scale + scale * cubic * square))
    return 0.5 + 0.5 * t + 0.5 * x * (1 - t * t) * (scale + 3 * scale * cubic * square)


elementwise(
    {
        "Add": (lambda op, a, b, y: 1, lambda op, a, b, y: 1),
        "Sub": (lambda op, a, b, y: 1, lambda op, a, b, y: -1),
        "Mul": (lambda op, a, b, y: b, lambda op, a, b, y: a),
        "Div": (lambda op, a, b, y: 1 / b, lambda op, a, b, y: -y / b),
        "Mod": (lambda op, a, b, y: 1, lambda op, a, b, y: op.Round((y - a) / b)),
        "Pow": (_power, lambda op, x, p, y: y * op.Log(nonzero(op, x))),  # where x is 0, y is 0 or constant
        "PRelu": (
            lambda op, x, slope, y: 1 + mask(op, op.Less(x, 0.0), x) * (slope - 1),
            lambda op, x, slope, y: op.Min(x, 0.0),
        ),
        "Identity": (lambda op, x, y: 1,),
        "Neg": (lambda op, x, y: -1,),
        "Reciprocal": (lambda op, x, y: -y * y,),
        "Abs": (lambda op, x, y: op.Sign(x),),
        "Sqrt": (lambda op, x, y: 0.5 / y,),
        "Exp": (lambda op, x, y: y,),
        "Log": (lambda op, x, y: 1 / x,),
        "Erf": (lambda op, x, y: op.Exp(math.log(2 / math.sqrt(math.pi)) - x * x),),
        "Sin": (lambda op, x, y: op.Cos(x),),
        "Cos": (lambda op, x, y: -op.Sin(x),),
        "Tan": (lambda op, x, y: 1 + y * y,),
        "Asin": (lambda op, x, y: 1 / op.Sqrt(1 - x * x),),
        "Acos": (lambda op, x, y: -1 / op.Sqrt(1 - x * x),),
        "Atan": (lambda op, x, y: 1 / (1 + x * x),),
        "Sinh": (lambda op, x, y: op.Cosh(x),),
        "Cosh": (lambda op, x, y: op.Sinh(x),),
        "Tanh": (lambda op, x, y: 1 - y * y,),
        "Asinh": (lambda op, x, y: 1 / op.Sqrt(1 + x * x),),
        "Acosh": (lambda op, x, y: 1 / op.Sqrt(x * x - 1),),
        "Atanh": (lambda op, x, y: 1 / (1 - x * x),),
        "Sigmoid": (lambda op, x, y: y * (1 - y),),
        "HardSigmoid": (lambda op, x, y, alpha: alpha * mask(op, op.Greater(y * (1 - y), 0.0), x),),
        "HardSwish": (lambda op, x, y: op.Clip(x / 6 + 0.5, 0.0, 1.0) + x / 6 * mask(op, op.Less(op.Abs(x), 3.0), x),),
        "Relu": (lambda op, x, y: _positive(op, y),),
        "LeakyRelu": (lambda op, x, y, alpha: alpha + (1 - alpha) * _positive(op, x),),
        "ThresholdedRelu": (lambda op, x, y, alpha: mask(op, op.Greater(x, alpha), x),),
        "Elu": (
            lambda op, x, y, alpha: (
                1 + op.Min(y, 0.0) if alpha == 1 else 1 + mask(op, op.Less(x, 0.0), x) * (y + (alpha - 1))
            ),
        ),
        "Celu": (lambda op, x, y, alpha: 1 + op.Min(y, 0.0) * (1 / alpha),),
        "Selu": (lambda op, x, y, alpha, gamma: gamma + mask(op, op.Less(x, 0.0), x) * (y + gamma * (alpha - 1)),),
        "Gelu": (lambda op, x, y, approximate: gelu(op, x, approximate),),
        "Mish": (  # Misra, https://arxiv.org/abs/1908.08681
            lambda op, x, y: (t := op.Tanh(op.Softplus(x))) + x * op.Sigmoid(x) * (1 - t * t),
        ),
        "Softplus": (lambda op, x, y: op.Sigmoid(x),),
        "Softsign": (lambda op, x, y: (1 - op.Abs(y)) * (1 - op.Abs(y)),),
        "Shrink": (lambda op, x, y, lambd: mask(op, op.Greater(op.Abs(x), lambd), x),),
    }
)


one_line_rules(
    {
        "Cast": lambda op, dy, x: [op.Cast(dy, to=x.dtype)],
        "CastLike": lambda op, dy, x, target: [op.Cast(dy, to=x.dtype)],
        "Mean": lambda op, dy, *inputs: [dy * (1 / len(inputs))] * len(inputs),
        "Sum": lambda op, dy, *inputs: [dy] * len(inputs),
        "Where": lambda op, dy, condition, a, b: [None, chosen := dy * mask(op, condition, dy), dy - chosen],
    }
)


@rule("Clip")
def clip(op: Emitter, dy: Value, x: Value, low: Input = None, high: Input = None, *, y: Value) -> Gradients:
    """Pass the gradient between the bounds; if the lower bound exceeds the upper one, the upper one wins.

    In 16 bits `x` is not compared with `y`: ONNX Runtime's CPU provider may round only one of them.
    """
    never = op.constant(False)
    below = never if low is None else op.Less(x, low)
    above = never if high is None else op.Greater(x if low is None else op.Max(x, low), high)
    inside = op.Equal(x, y) if dtype_of(x).itemsize > 2 else op.Not(op.Or(below, above))
    return [
        dy * mask(op, inside, x),
        low and dy * mask(op, op.And(below, op.Not(above)), x),
        high and dy * mask(op, above, x),
    ]


@rule("Max", "Min")
def extremum(op: Emitter, dy: Value, *inputs: Value, node: Node) -> Gradients:
    """Pass the gradient to the first of equal inputs: each input takes the rest if no later input exceeds it."""
    compare, most = (op.GreaterOrEqual, op.Max) if node.op_type == "Max" else (op.LessOrEqual, op.Min)
    gradients = []
    for i, x in enumerate(inputs[:-1], 1):
        after = inputs[i] if len(inputs) == i + 1 else most(*inputs[i:])
        gradients.append(dy * mask(op, compare(x, after), dy))
        dy = dy - gradients[-1]
    return [*gradients, dy]


@rule("Dropout")
def dropout(op: Emitter, dy: Value, x: Value, ratio: Input = None, training: Input = None, *, node: Node) -> Gradients:
    """Divide the gradients of the kept elements, which the second output marks, by 1 - ratio."""
    known = constant_of(training)
    if training is None or (known is not None and not known.item()):
        return [dy]
    unmasked = further_output(node, 1, ir.DataType.BOOL, x.shape)
    share = 0.5 if ratio is None else op.Cast(1 - ratio, to=x.dtype)
    if known is None:
        share = op.Where(training, share, op.CastLike(1.0, x))
    return [dy * mask(op, unmasked, x) / share]


@expansion("QuantizeLinear")
def quantize_linear(
    op: Emitter, x: Value, scale: Value, zero_point: Input = None, *, y: Value, axis: int, block_size: int
) -> list[Value]:
    """Pass the gradient of numbers that round into the range of integers; halves round to even."""
    steps, dtype = x / stretched(op, scale, x, axis, block_size), dtype_of(y)
    low, high = float(dtype.min), float(dtype.max)
    if dtype.is_floating_point():
        return [op.Clip(steps, low, high)]
    rounded = op.Round(steps)
    if zero_point is not None:
        zero = op.Cast(zero_point, to=scale.dtype)
        rounded = rounded + stretched(op, zero, x, axis, block_size)
    inside = op.And(op.GreaterOrEqual(rounded, low), op.LessOrEqual(rounded, high))
    return [op.Where(inside, steps, 0.0)]


@expansion("DynamicQuantizeLinear")
def dynamic_quantize_linear(op: Emitter, x: Value) -> list[Value]:
    """Pass all gradients: the range contains all numbers and 0, so that no number is clipped."""
    most, least = op.ReduceMax(x, keepdims=0), op.ReduceMin(x, keepdims=0)
    scale = (op.Max(most, 0.0) - op.Min(least, 0.0)) / 255
    return [x / scale, scale]


def stretched(op: Emitter, scale: Value, x: Value, axis: int, block_size: int) -> Value:
    if rank(scale) == 0:
        return scale
    ones = op.ConstantOfShape(op.shape_of(x), value=ir.tensor([1], dtype=ir.DataType.INT8))
    steps = op.DequantizeLinear(ones, scale, axis=axis, block_size=block_size)
    steps.shape = x.shape
    return steps


@rule("DequantizeLinear")
def dequantize_linear(
    op: Emitter, dy: Value, x: Value, scale: Value, *zero: Input, active: Active, axis: int, block_size: int
) -> Gradients:
    """Differentiate y = (x - zero) scale, with one scale for all elements, per position on an axis, or per block."""
    dx = None
    if x in active:
        dx = dy * op.cast(stretched(op, scale, x, axis, block_size), dy.dtype)  # `output_dtype` may be another
        dx.shape = x.shape
    if scale not in active:
        return [dx, None]
    ones = op.Expand(op.CastLike(1.0, scale), op.shape_of(scale))
    steps = op.DequantizeLinear(x, like(ones, scale), *zero, axis=axis, block_size=block_size)
    terms = dy * op.Cast(steps, to=dy.dtype)
    return [dx, by_scale(op, terms, x, scale, axis, block_size)]


def by_scale(op: Emitter, terms: Value, x: Value, scale: Value, axis: int, block_size: int) -> Value:
    """Sum the terms of all elements that share a scale."""
    if rank(scale) == 0:
        return terms
    axis %= rank(x)
    if block_size == 0:
        rest = [i for i in range(rank(x)) if i != axis]
        return like(op.ReduceSum(terms, rest, keepdims=0), scale) if rest else terms
    size, blocks = dims_of(x)[axis], dims_of(scale)[axis]
    if not isinstance(size, int) or not isinstance(blocks, int):
        raise GraphoptError(
            f"DequantizeLinear of {x.name!r}: a scale's gradient needs blocks of known sizes, found {x.shape}: freeze "
            "the scale"
        )
    if size < blocks * block_size:  # the last block is not full
        missing = np.zeros(2 * rank(x), np.int64)
        missing[rank(x) + axis] = blocks * block_size - size
        terms = op.Pad(terms, missing)
    split = op.constant(np.array([blocks, block_size], np.int64))
    before, after = [op.shape_of(x, 0, axis)] * (axis > 0), [op.shape_of(x, axis + 1)] * (axis + 1 < rank(x))
    rows = op.Reshape(terms, op.Concat(*before, split, *after, axis=0))
    return like(op.ReduceSum(rows, [axis + 1], keepdims=0), scale)
