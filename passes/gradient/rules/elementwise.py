"""Elementwise operators: local derivatives, from calculus; and operators without gradient."""

from __future__ import annotations

from passes.gradient.registry import elementwise, no_gradient

elementwise(
    {
        "Add": (lambda op, a, b, y: 1, lambda op, a, b, y: 1),
        "Sub": (lambda op, a, b, y: 1, lambda op, a, b, y: -1),
        "Mul": (lambda op, a, b, y: b, lambda op, a, b, y: a),
        "Div": (lambda op, a, b, y: 1 / b, lambda op, a, b, y: -y / b),
        "Neg": (lambda op, x, y: -1,),
        "Identity": (lambda op, x, y: 1,),
        "Abs": (lambda op, x, y: op.Sign(x),),
        "Exp": (lambda op, x, y: y,),
        "Log": (lambda op, x, y: 1 / x,),
        "Sqrt": (lambda op, x, y: 0.5 / y,),
        "Tanh": (lambda op, x, y: 1 - y * y,),
        "Sigmoid": (lambda op, x, y: y * (1 - y),),
        "Relu": (lambda op, x, y: op.Cast(op.Greater(y, 0.0), to=y.dtype),),
    }
)

no_gradient("Shape", "Size", "ArgMax", "ArgMin", "NonZero", "Equal", "Greater", "Less", "Not", "Constant")
