"""Say what each operator computes, in C: the expression of an element, and how a row or a whole tensor is reduced.

`{0}`, `{1}`, ... are the operands, which have the type of the result unless the operator says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

CTYPES = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.INT64: "int64_t",
    ir.DataType.INT32: "int32_t",
    ir.DataType.BOOL: "uint8_t",
}
FLOATING = {"float", "double"}

# Arithmetic and predicates: the runtime's results, bit for bit.
EXACT_IN_C = {
    "Abs": "{0} < 0 ? -{0} : {0}",
    "Add": "{0} + {1}",
    "And": "{0} & {1}",
    "Equal": "{0} == {1}",
    "Greater": "{0} > {1}",
    "GreaterOrEqual": "{0} >= {1}",
    "Identity": "{0}",
    "IsNaN": "{0} != {0}",
    "Less": "{0} < {1}",
    "LessOrEqual": "{0} <= {1}",
    "Mul": "{0} * {1}",
    "Neg": "-{0}",
    "Not": "!{0}",
    "Or": "{0} | {1}",
    "Sub": "{0} - {1}",
    "Where": "{0} ? {1} : {2}",
    "Xor": "{0} ^ {1}",
}

# Functions of floating numbers; `F` stands for the suffix of C's functions of float.
OF_FLOATING = {
    "Abs": "fabs{F}({0})",
    "Ceil": "ceil{F}({0})",
    "Div": "{0} / {1}",
    "Floor": "floor{F}({0})",
    "Reciprocal": "1 / {0}",
    "Relu": "{0} > 0 || {0} != {0} ? {0} : 0",
    "Round": "rint{F}({0})",
    "Sign": "{0} > 0 ? 1 : {0} < 0 ? -1 : {0} + 0",
    "Softsign": "{0} / (1 + fabs{F}({0}))",
    "Sqrt": "sqrt{F}({0})",
}

# Transcendental functions of float32, in functions.h; C's own for float64, which is not vectorized.
TRANSCENDENTAL = {
    "Erf": ("erf_float({0})", "erf({0})"),
    "Exp": ("exp_float({0})", "exp({0})"),
    "Log": ("log_float({0})", "log({0})"),
    "Sigmoid": ("sigmoid_float({0})", "1 / (1 + exp(-{0}))"),
    "Tanh": ("tanh_float({0})", "tanh({0})"),
}

# Operators whose operands have types of their own: their number decides nothing, only the result's type.
MIXED = {"Cast", "Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Where"}

# What a reduction starts from, how it takes in one more element, and OpenMP's name of it: C's own or of functions.h.
REDUCTIONS = {
    "sum": ("0", "{0} += {1};", "+"),
    "maximum": ("-INFINITY", "{0} = MAXIMUM({0}, {1});", "maximum"),
    "minimum": ("INFINITY", "{0} = MINIMUM({0}, {1});", "minimum"),
    "largest number": ("-INFINITY", "{0} = {1} > {0} ? {1} : {0};", "max"),  # passes over NaN
}
REDUCING = {
    "ReduceSum": "sum",
    "ReduceMean": "sum",
    "ReduceSumSquare": "sum",
    "ReduceL2": "sum",
    "ReduceMax": "maximum",
    "ReduceMin": "minimum",
}

# Operators that are computed row by row, from sums over the last axis, and how many outputs they have.
ROWS = {"LayerNormalization": 3, "LogSoftmax": 1, "RMSNormalization": 1, "Softmax": 1}


def literal(number: float, ctype: str) -> str:
    """Return a number as C writes it, exactly."""
    if ctype not in FLOATING:
        return f"{int(number)}LL" if ctype == "int64_t" else str(int(number))
    if number != number:
        return "NAN"
    if number in (float("inf"), float("-inf")):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    text = float(number).hex() + ("f" if ctype == "float" else "")
    return f"({text})" if number < 0 else text


def expression(
    op_type: str, ctype: str, source: str, attributes: Mapping[str, Any], inputs: int
) -> str | None:
    """Return the C expression of an element; None if kernels do not compute the operator.

    Args:
        ctype: the C type of the result.
        source: the C type of the first operand.
        inputs: the number of operands.
    """
    floating = ctype in FLOATING
    if floating and op_type in TRANSCENDENTAL:
        return TRANSCENDENTAL[op_type][ctype == "double"]
    if floating and op_type in OF_FLOATING:
        return OF_FLOATING[op_type].replace("{F}", "f" if ctype == "float" else "")
    if op_type in EXACT_IN_C and (op_type in MIXED or ctype == source):
        return EXACT_IN_C[op_type]
    if op_type == "Cast":
        return _cast(ctype, source)
    if floating and op_type in ATTRIBUTED:
        return ATTRIBUTED[op_type](lambda name: literal(float(attributes[name]), ctype))
    if floating and op_type in VARIADIC and inputs:
        return VARIADIC[op_type](inputs)
    return None


def _cast(ctype: str, source: str) -> str | None:
    if ctype == "uint8_t":
        return "{0} != 0"
    if source in FLOATING and ctype not in FLOATING:
        return None  # what becomes of numbers that do not fit is the runtime's affair
    return f"({ctype}){{0}}"


# Operators with attributes, from a function that returns an attribute as a literal.
ATTRIBUTED: Mapping[str, Callable[[Callable[[str], str]], str]] = {
    "HardSigmoid": lambda of: f"CLAMP({of('alpha')} * {{0}} + {of('beta')}, 0, 1)",
    "LeakyRelu": lambda of: f"{{0}} >= 0 ? {{0}} : {of('alpha')} * {{0}}",
    "ThresholdedRelu": lambda of: f"{{0}} > {of('alpha')} ? {{0}} : 0",
}

VARIADIC: Mapping[str, Callable[[int], str]] = {
    "Max": lambda count: _nested("MAXIMUM", count),
    "Min": lambda count: _nested("MINIMUM", count),
    "Sum": lambda count: " + ".join(f"{{{i}}}" for i in range(count)),
}


def _nested(macro: str, count: int) -> str:
    text = "{0}"
    for i in range(1, count):
        text = f"{macro}({text}, {{{i}}})"
    return text
