"""Define each operator in C: the expression of an element, and how a row or a whole tensor is reduced.

`{0}`, `{1}`, ... are the operands, which have the type of the result unless the operator says otherwise. `{F}` is the
suffix of C's functions of a floating type (`sqrtf`), `{T}` that of the functions in functions.h (`exp_float`), and
`{C}` the type itself. `{alpha}` is the attribute `alpha`, a floating number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

# The types that kernels compute in. An operator of 16-bit floats computes in float and rounds its result, as the
# graph says. The runtime's own operators round only what leaves a chain of them.
CTYPES = {
    ir.DataType.FLOAT: "float",
    ir.DataType.FLOAT16: "float",
    ir.DataType.BFLOAT16: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.INT64: "int64_t",
    ir.DataType.INT32: "int32_t",
    ir.DataType.BOOL: "uint8_t",
}
STORED_TYPES = {**CTYPES, ir.DataType.FLOAT16: "_Float16", ir.DataType.BFLOAT16: "bfloat16"}
# A number rounded to a type that it is not computed in; too large a number becomes infinite.
ROUNDED = {ir.DataType.FLOAT16: "(float)(_Float16){0}", ir.DataType.BFLOAT16: "rounded_to_bfloat16({0})"}
_SUFFIXES = {"float": {"{F}": "f", "{T}": "_float"}, "double": {"{F}": "", "{T}": ""}}
Attributes = Mapping[str, Any]  # by name: numbers, texts and lists, of the types in the schema
FLOATING = frozenset(_SUFFIXES)

# Operators of any type.
OF_ANY = {
    "Abs": "{0} < 0 ? -{0} : {0}",
    "Add": "{0} + {1}",
    "And": "{0} & {1}",
    "BitwiseAnd": "{0} & {1}",
    "BitwiseNot": "~{0}",
    "BitwiseOr": "{0} | {1}",
    "BitwiseXor": "{0} ^ {1}",
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

# Operators of whole numbers: arithmetic wraps, and a divisor is a constant.
_OF_WHOLE = {
    "Add": "({C})((u{C}){0} + (u{C}){1})",
    "Div": "{0} / {1}",
    "Mul": "({C})((u{C}){0} * (u{C}){1})",
    "Neg": "({C})-(u{C}){0}",
    "Sub": "({C})((u{C}){0} - (u{C}){1})",
}

# Operators of floating numbers that a function computes which has the operator's name.
_FUNCTIONS = (
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan", "Tanh"),
    *("Erf", "Exp", "Log", "Mish", "Sigmoid", "Softplus"),
)

# Operators of floating numbers.
OF_FLOATING = {
    **{name: f"{name.lower()}{{T}}({{0}})" for name in _FUNCTIONS},
    "Abs": "fabs{F}({0})",
    "Ceil": "ceil{F}({0})",
    "Celu": "{0} > 0 ? {0} : {alpha} * expm1{T}({0} / {alpha})",
    "Div": "{0} / {1}",
    "Elu": "{0} > 0 ? {0} : {alpha} * expm1{T}({0})",
    "Floor": "floor{F}({0})",
    "HardSigmoid": "CLAMP({alpha} * {0} + {beta}, 0, 1)",
    "HardSwish": "{0} * CLAMP({0} * ({C})(1.0 / 6) + ({C})0.5, 0, 1)",
    "LeakyRelu": "{0} >= 0 ? {0} : {alpha} * {0}",
    "PRelu": "{0} < 0 ? {0} * {1} : {0}",
    "Reciprocal": "1 / {0}",
    "Relu": "{0} > 0 || {0} != {0} ? {0} : 0",
    "Round": "rint{F}({0})",
    "Selu": "{gamma} * ({0} > 0 ? {0} : {alpha} * expm1{T}({0}))",
    "Shrink": "{0} < -{lambd} ? {0} + {bias} : {0} > {lambd} ? {0} - {bias} : 0",
    "Sign": "{0} > 0 ? 1 : {0} < 0 ? -1 : {0} + 0",
    "Softsign": "{0} / (1 + fabs{F}({0}))",
    "Sqrt": "sqrt{F}({0})",
    "Swish": "swish{T}({0}, {alpha})",
    "ThresholdedRelu": "{0} > {alpha} ? {0} : 0",
}

# Operators that the runtime has, or computes, only in float32.
_OF_FLOAT = {"Gelu", "Mish", "Shrink", "Softplus"}

_GELU = {"none": "gelu{T}({0})", "tanh": "gelu_tanh{T}({0})"}

# Powers with these exponents, as the runtime computes them.
_POWERS: Mapping[float | None, str] = {
    -1.0: "1 / {0}",
    -0.5: "1 / ROOT({0}, sqrt{F})",
    0.5: "ROOT({0}, sqrt{F})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
}

# Operators of floating numbers that take in one operand after the other, and what becomes of the result; `{N}` is the
# number of operands.
FOLDED = {
    "Max": ("MAXIMUM({0}, {1})", "{0}"),
    "Mean": ("{0} + {1}", "{0} * ({C})(1.0 / {N})"),
    "Min": ("MINIMUM({0}, {1})", "{0}"),
    "Sum": ("{0} + {1}", "{0}"),
}

# Operators whose operands need not have the type of the result.
_MIXED = {"Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Where"}

# What a reduction starts from, how it takes in one more element, and OpenMP's name of it: C's own or of functions.h.
REDUCTIONS = {
    "sum": ("0", "{0} += {1};", "+"),
    "product": ("1", "{0} *= {1};", "*"),
    "maximum": ("-INFINITY", "{0} = MAXIMUM({0}, {1});", "maximum"),
    "minimum": ("INFINITY", "{0} = MINIMUM({0}, {1});", "minimum"),
    "largest number": ("-INFINITY", "{0} = {1} > {0} ? {1} : {0};", "max"),  # passes over NaN
}

# What is reduced, how, and what becomes of the result; `{N}` is the number of elements. The mean of none is 0.
REDUCING = {
    "ReduceL1": ("fabs{F}({0})", "sum", "{0}"),
    "ReduceL2": ("{0} * {0}", "sum", "sqrt{F}({0})"),
    "ReduceLogSum": ("{0}", "sum", "log{T}({0})"),
    "ReduceMax": ("{0}", "maximum", "{0}"),
    "ReduceMean": ("{0}", "sum", "{0} / ({C})AT_LEAST_1({N})"),
    "ReduceMin": ("{0}", "minimum", "{0}"),
    "ReduceProd": ("{0}", "product", "{0}"),
    "ReduceSum": ("{0}", "sum", "{0}"),
    "ReduceSumSquare": ("{0} * {0}", "sum", "{0}"),
}

# Operators that are computed row by row, from sums over the last axis.
ROW_OPERATORS = frozenset({"LayerNormalization", "LogSoftmax", "RMSNormalization", "Softmax"})


def literal(number: float, ctype: str) -> str:
    """Return a number as C writes it, exactly."""
    if ctype not in FLOATING:
        text = f"{int(number)}LL" if ctype == "int64_t" else str(int(number))
        return f"({int(number) + 1}LL - 1)" if number == -(2**63) else text
    if number != number:
        return "NAN"
    if number in (float("inf"), float("-inf")):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    text = float(number).hex() + ("f" if ctype == "float" else "")
    return f"({text})" if text.startswith("-") else text


def in_type(template: str, ctype: str) -> str:
    """Return an expression with C's functions of a type."""
    for mark, suffix in _SUFFIXES.get(ctype, {}).items():
        template = template.replace(mark, suffix)
    return template.replace("{C}", ctype)


def expression(op_type: str, ctype: str, source: str, attributes: Attributes) -> str | None:
    """Return the C expression of an element; None if kernels do not compute the operator.

    Args:
        ctype: the C type of the result.
        source: the C type of the first operand.
    """
    template = None
    if op_type == "IsInf" and source in FLOATING:
        signs = "-" * bool(attributes["detect_negative"]) + " " * bool(attributes["detect_positive"])
        template = " || ".join(f"{{0}} == {sign.strip()}INFINITY" for sign in signs) or "0"
    elif op_type in _MIXED:
        template = OF_ANY[op_type]
    elif ctype == source and ctype not in FLOATING:
        template = _OF_WHOLE.get(op_type, OF_ANY.get(op_type))
    elif ctype == source and (ctype == "float" or op_type not in _OF_FLOAT):
        template = _of_floating(op_type, ctype, attributes)
    return None if template is None else in_type(template, ctype)


def _of_floating(op_type: str, ctype: str, attributes: Attributes) -> str | None:
    if op_type == "Mod":  # the runtime has no other of floating numbers
        return "fmod{T}({0}, {1})" if attributes["fmod"] else None
    if op_type == "Gelu":
        return _GELU.get(attributes["approximate"])
    if op_type in FOLDED:
        return FOLDED[op_type][0]
    template = OF_FLOATING.get(op_type, OF_ANY.get(op_type))
    for name, value in attributes.items():
        if template is not None and isinstance(value, float):
            template = template.replace(f"{{{name}}}", literal(value, ctype))
    return template


def power(exponent: float | None, ctype: str) -> str:
    """Return the C expression of a power; the exponent is None if it may change."""
    return in_type(_POWERS.get(exponent, "pow{T}({0}, {1})"), ctype)


def cast(to: ir.DataType, source: str, cut: bool = False) -> str:
    """Return the C expression of a number in another type.

    Args:
        cut: whether a whole number may be a floating one that was cut off.
    """
    if to == ir.DataType.BOOL:
        return "{0} != 0"
    if source == CTYPES[ir.DataType.BOOL]:  # compilers make vectors of a choice, not of a conversion
        return "{0} ? 1 : 0"
    rounded = ROUNDED.get(to, f"({CTYPES[to]}){{0}}")
    # GCC takes casts there and back for trunc, which keeps -0. Elsewhere, it makes two branches of the choice of 0
    # and of a function behind it, which it does not vectorize.
    if cut and source not in FLOATING and CTYPES[to] in FLOATING:
        return f"{{0}} == 0 ? 0 : {rounded}"
    return "{0}" if source == CTYPES[to] and to not in ROUNDED else rounded


def loaded(dtype: ir.DataType | None, place: str) -> str:
    """Return the C expression of a number that lies in memory."""
    return f"from_bfloat16({place})" if dtype == ir.DataType.BFLOAT16 else place


def store_statement(dtype: ir.DataType | None, place: str, number: str) -> str:
    """Return the C statement that stores a number in memory; it is one of the type."""
    return f"{place} = {f'to_bfloat16({number})' if dtype == ir.DataType.BFLOAT16 else number};"
