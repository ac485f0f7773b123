"""Give values the arithmetic of arrays: `x ** 2`, `2 - x`, `x > 0`, `abs(x)`, `a @ b`, with numbers and arrays, too.

The operators are added to onnx_ir's class of values, and emit nodes inside a block `with Emitter(model)` of the same
thread. Outside of blocks, `+`, `-`, `*`, `/` and negation stay onnx_ir's. A boolean value beside another one takes the
type of that one, so that `(x > 0) * x` is a product. A number takes the type of the value, or is refused if it would be
cut.

`==` compares identities, and `hash` follows: values are keys of dictionaries. In a block, a comparison of a value with
a number is an error, and so are the truth, the length and the items of a value, which no graph has when it is written.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError, kind_of

# Python's name of each operator, how it is written, and the ONNX operator.
_BINARY = {
    **{"add": ("+", "Add"), "sub": ("-", "Sub"), "mul": ("*", "Mul"), "truediv": ("/", "Div")},
    **{"pow": ("**", "Pow"), "matmul": ("@", "MatMul"), "mod": ("%", "Mod"), "floordiv": ("//", "Div")},
    **{"and": ("&", "And"), "or": ("|", "Or"), "xor": ("^", "Xor")},
    **{"lt": ("<", "Less"), "le": ("<=", "LessOrEqual")},
    **{"gt": (">", "Greater"), "ge": (">=", "GreaterOrEqual")},
}
_NAME_OF = {sign: name for name, (sign, _) in _BINARY.items()}
_OF_NUMPY: dict[Callable[..., object], str] = {
    **{np.add: "+", np.subtract: "-", np.multiply: "*", np.divide: "/", np.power: "**", np.matmul: "@"},
    **{np.less: "<", np.less_equal: "<=", np.greater: ">", np.greater_equal: ">="},
    **{np.remainder: "%", np.floor_divide: "//"},
}
_LOGICAL = ("&", "|", "^")
_OF_TYPE = ("**", "//", "%")  # what they emit depends on the type of the operands

# Methods of arrays that people call on a value, and NumPy's functions, with the operator that does the same.
_INSTEAD = {
    **{"mean": "ReduceMean", "sum": "ReduceSum", "max": "ReduceMax", "min": "ReduceMin", "abs": "Abs"},
    **{"reshape": "Reshape", "view": "Reshape", "transpose": "Transpose", "T": "Transpose", "pow": "Pow"},
    **{"exp": "Exp", "log": "Log", "sqrt": "Sqrt", "clip": "Clip", "clamp": "Clip", "astype": "Cast"},
    **{"to": "Cast", "size": "Shape", "sign": "Sign", "tanh": "Tanh"},
    **{"sigmoid": "Sigmoid", "squeeze": "Squeeze", "unsqueeze": "Unsqueeze", "where": "Where"},
    **{"maximum": "Max", "minimum": "Min", "absolute": "Abs", "equal": "Equal", "square": "Mul"},
    **{"stack": "Concat", "concatenate": "Concat", "prod": "ReduceProd", "round": "Round"},
    **{"expand_dims": "Unsqueeze"},
    **{"norm": "ReduceL2", "softmax": "Softmax", "argmax": "ArgMax", "flatten": "Flatten", "dot": "MatMul"},
}
# The packages whose own code asks whether a value is there.
_PACKAGES = ("onnx_ir", "onnxscript", "graphopt", "passes")


class UnknownAttribute(GraphoptError, AttributeError):
    """Report that a value lacks an attribute that arrays have."""


class Emits(Protocol):
    """Emit nodes by the names of their operators, as an Emitter does."""

    def constant(self, value: Any, like: ir.Value) -> ir.Value: ...

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value: ...

    def __getattr__(self, op_type: str) -> Any: ...


class Arithmetic:
    """Emit the nodes of Python's operators on values, during a `with` block of this thread."""

    def __init__(self, op: Emits) -> None:
        self._op = op

    def __enter__(self) -> Arithmetic:
        self._outer, _HERE.block = _current_block(), self
        return self

    def __exit__(self, _: object, error: BaseException | None, *where: object) -> None:
        try:
            if isinstance(error, AttributeError):
                explain_attribute(error)
        finally:
            _HERE.block = self._outer

    def binary(self, sign: str, a: Any, b: Any) -> Any:
        """Emit an operator of two operands, one of which is a value."""
        op, (_, op_type) = self._op, _BINARY[_NAME_OF[sign]]
        a, b = self._operand(sign, a, b), self._operand(sign, b, a)
        if sign not in _OF_TYPE:
            return op.op(op_type, a, b)
        first = next(x for x in (a, b) if isinstance(x, ir.Value))
        is_integer = first.dtype is not None and first.dtype.is_integer()
        if sign == "**":  # ONNX does not bind the type of the exponent to that of the base
            a, b = (x if isinstance(x, ir.Value) else op.constant(x, like=first) for x in (a, b))
        if sign == "//":
            if is_integer:
                raise GraphoptError(
                    "//: expected floating-point values, found integers: write op.Div(a, b), which cuts"
                )
            return op.Floor(op.Div(a, b))
        if sign == "%" and not is_integer:
            return op.Sub(a, op.Mul(b, op.Floor(op.Div(a, b))))
        return op.op(op_type, a, b)

    def _operand(self, sign: str, x: object, other: object) -> Any:
        """Return an operand, a boolean value in the type of the other one."""
        if type(x) in (int, float):  # the check by class below takes long for what is no value
            return x
        mask = isinstance(x, ir.Value) and x.dtype == ir.DataType.BOOL and sign not in _LOGICAL
        if isinstance(x, ir.Value):
            if mask and isinstance(other, ir.Value) and other.dtype != ir.DataType.BOOL:
                return self._op.cast(x, other.dtype) if other.dtype is not None else x
            if mask:
                raise GraphoptError(
                    f"{_said(sign, x, other)}: expected numbers, found booleans: write op.Cast(x, to=...) first, in "
                    "the type of the values beside it"
                )
            return x
        numbers = isinstance(x, int | float | np.generic | np.ndarray)
        several = isinstance(x, list | tuple) and all(isinstance(each, int | float) for each in x)
        if isinstance(x, bool) and not (isinstance(other, ir.Value) and other.dtype == ir.DataType.BOOL):
            raise GraphoptError(
                f"{_said(sign, x, other)}: expected a value or a number, found {x}: `==` and `is` compare identities, "
                "and op.Equal(a, b) compares numbers"
            )
        if not (numbers or several):
            raise GraphoptError(f"{_said(sign, x, other)}: expected a value, a number or an array, found {kind_of(x)}")
        return x


_HERE = threading.local()  # `block`: the innermost one of a thread


def _current_block() -> Arithmetic | None:
    """Return the innermost block of this thread, or None."""
    return getattr(_HERE, "block", None)


def _said(sign: str, x: object, other: object) -> str:
    value = x if isinstance(x, ir.Value) else other
    return f"{value.name} {sign}" if isinstance(value, ir.Value) else sign


def _current(sign: str) -> Arithmetic:
    block = _current_block()
    if block is None:
        raise GraphoptError(
            f"{sign} of values: expected a block `with Emitter(model) as op`, found none: write it there"
        )
    return block


def _binary(
    sign: str, reflected: bool, otherwise: Callable[[ir.Value, object], Any] | None
) -> Callable[[ir.Value, object], Any]:
    """Return an operator of values; outside of blocks, it is that of onnx_ir if there is one."""

    def operator(self: ir.Value, other: object) -> Any:
        if otherwise is not None and _current_block() is None:
            return otherwise(self, other)
        return _current(sign).binary(sign, *((other, self) if reflected else (self, other)))

    return operator


def _is_authors(depth: int) -> bool:
    """Return whether code of a pass's author asks, in a block that emits nodes."""
    if _current_block() is None:
        return False
    module = str(sys._getframe(depth + 1).f_globals.get("__name__", ""))
    return module.partition(".")[0] not in _PACKAGES


def _truth(self: ir.Value) -> bool:
    if _is_authors(1):
        raise GraphoptError(
            f"value {self.name!r}: expected no condition of Python, since its numbers are not known yet, found `if`, "
            "`and`, `or`, `not`, `max` or `min` of it: write op.Where(condition, a, b), op.And, op.Or, op.Max or op.Min"
        )
    return True


def _equal(self: ir.Value, other: object) -> Any:
    if self is other or isinstance(other, ir.Value):
        return self is other
    if isinstance(other, int | float | np.generic | np.ndarray) and _current_block() is not None:
        raise GraphoptError(
            f"{self.name} == {other}: expected another value, found {kind_of(other)}: `==` compares identities, and "
            "op.Equal(a, b) compares numbers"
        )
    return NotImplemented


def _absent(expected: str, instead: str) -> Callable[..., NoReturn]:
    def asked(self: ir.Value, *_: object) -> NoReturn:
        raise NotAnArray(f"value {self.name!r}: expected {expected}, found a value of the graph: {instead}")

    return asked


class NotAnArray(GraphoptError, TypeError):
    """Report that a value of a graph is used as an array, whose numbers are known."""


def explain_attribute(error: AttributeError) -> None:
    """Raise an error that says what to write, if an attribute of arrays is asked of a value in a block.

    Raises:
        UnknownAttribute: it is. A method `__getattr__` would say so, too, but slow down all other attributes of values.
    """
    name, value = error.name or "_", error.obj
    if _current_block() is None or not isinstance(value, ir.Value) or name.startswith("_"):
        return
    instead = f"op.{_INSTEAD[name]} does it" if name in _INSTEAD else "operators are attributes of op"
    instead = "write passes.stop_gradient(op, x)" if name == "detach" else instead
    raise UnknownAttribute(f"value {value.name!r}: expected no attribute {name!r} of arrays: {instead}") from error


def _universal(self: ir.Value, function: Callable[..., object], method: str, *args: object, **_: object) -> Any:
    sign = _OF_NUMPY.get(function)
    if sign is not None and method == "__call__":
        return _current(sign).binary(sign, *args)
    raise _of_arrays(self, function)


def _function(self: ir.Value, function: Callable[..., object], *_: object) -> NoReturn:
    raise _of_arrays(self, function)


def _of_arrays(value: ir.Value, function: Callable[..., object]) -> NotAnArray:
    name = getattr(function, "__name__", "")
    known = _INSTEAD.get(name, name.capitalize())
    mend = f"op.{known}" if onnx.defs.has(known) else "the operators of ONNX, such as op.Concat"
    return NotAnArray(f"np.{name}: expected arrays, found value {value.name!r} of the graph: write {mend}")


def _install() -> None:
    for name, (sign, _) in _BINARY.items():
        for method, reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
            if not reflected or sign[0] not in "<>":  # Python exchanges the operands of comparisons itself
                otherwise = getattr(ir.Value, method, None) if sign in "+-*/" else None
                setattr(ir.Value, method, _binary(sign, reflected, otherwise))
    negative: Callable[[ir.Value], Any] = ir.Value.__neg__
    items = "op.Slice, op.Gather and op.Split take parts of it"
    methods: dict[str, Any] = {
        "__abs__": lambda self: _current("abs")._op.Abs(self),
        "__neg__": lambda self: negative(self) if _current_block() is None else _current("-")._op.Neg(self),
        "__pos__": lambda self: self,
        "__invert__": lambda self: _current("~")._op.Not(self),
        "__bool__": _truth,
        "__eq__": _equal,
        "__array_ufunc__": _universal,
        "__array_function__": _function,
        **dict.fromkeys(
            ("__float__", "__int__", "__index__", "__round__", "__lshift__", "__rshift__", "__divmod__"),
            _absent("a number", "Python's functions, such as math.exp, need one: write op.Exp and the like"),
        ),
        "__iter__": _absent("several values", items),
        "__getitem__": _absent("an array", items),
        "__len__": _absent("an array", "its shape is x.shape, and op.Shape(x) when the graph runs"),
    }
    for name, method in methods.items():
        setattr(ir.Value, name, method)


_install()
