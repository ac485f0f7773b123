"""Call a method that the author of a pass writes, and check the values that it returns.

An error is one line that names the class and its method, what is due, and what came back.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.arithmetic import explain_attribute
from graphopt.graph.values import may_be_alike


def name_of_method(owner: object, method: str) -> str:
    """Return the class and the method, for errors."""
    return f"{type(owner).__name__}.{method}"


def ask(owner: object, method: str, *given: object) -> object:
    """Call a method of a pass that its author has written, and return what comes back.

    Raises:
        GraphoptError: the method does not take these arguments, or sets an option.
    """
    function, where = getattr(owner, method), name_of_method(owner, method)
    try:
        return call(function, where, "" if callable(function) else _due(owner, method), given)
    except _OtherArguments as error:
        if not error.is_of(where):  # but of a method that this one has asked
            raise
        raise error.of(_due(owner, method)) from None


def _due(owner: object, method: str) -> str:
    """Return the arguments of a method in the class that declares it, without `self`."""
    base = next(kind for kind in reversed(type(owner).__mro__) if method in vars(kind))
    due = inspect.signature(vars(base)[method])
    return _plain(due.replace(parameters=list(due.parameters.values())[1:]))


class _OtherArguments(GraphoptError):
    """Report that a function does not take the arguments that it is called with."""

    def __init__(self, where: str, due: str, count: int, found: str) -> None:
        self._parts = where, count, found
        all_of_them = f", {count} arguments in all" if "*" in due else ""
        super().__init__(f"{where}: expected a function of {due}{all_of_them}, found one of {found}")

    def is_of(self, where: str) -> bool:
        """Return whether it is about this function."""
        return self._parts[0] == where

    def of(self, due: str) -> _OtherArguments:
        """Return the error of a function of other arguments."""
        where, count, found = self._parts
        return _OtherArguments(where, due, count, found)


def call(function: Callable[..., object], where: str, due: str, given: Sequence[object]) -> object:
    """Call an author's function of the arguments that `due` names, as `ask` does."""
    if not callable(function):
        raise GraphoptError(f"{where}: expected a function of {due}, found {kind_of(function)}")
    try:
        try:
            return function(*given)
        except AttributeError as error:
            explain_attribute(error)
            raise
    except FrozenInstanceError as error:
        raise GraphoptError(
            f"{where}: expected options that stay as they are, found one that the method sets ({error}): use a variable"
        ) from error
    except GraphoptError as error:
        if _is_librarys(function) or str(error).startswith(where.partition(".")[0]):
            raise
        raise GraphoptError(f"{where}: {error}") from error
    except TypeError:
        try:
            signature = inspect.signature(function)
            signature.bind(*given)
        except TypeError:
            raise _OtherArguments(where, due, len(given), _plain(signature)) from None
        except ValueError:  # a function without a signature, or a method without `self`
            if inspect.ismethod(function):
                found = f"{_plain(inspect.signature(function.__func__))}, without self"
                raise _OtherArguments(where, due, len(given), found) from None
        raise


def _is_librarys(function: Callable[..., object]) -> bool:
    """Return whether a function is the library's own, which names itself in its errors."""
    return getattr(function, "__module__", "").partition(".")[0] in ("graphopt", "passes")


def _plain(signature: inspect.Signature) -> str:
    """Return the names of a signature's parameters."""
    return str(
        signature.replace(
            parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
    )


def told(found: object) -> str:
    """Return what came back, in words: of a value, its type and its shape."""
    if isinstance(found, ir.Value):
        dtype = "unknown type" if found.dtype is None else found.dtype.name.lower()
        return f"a value {dtype}{'' if found.shape is None else _shape(found.shape)}"
    if isinstance(found, list | tuple):
        inner = sorted({kind_of(x) for x in found})
        return f"{kind_of(found)} of {len(found)}{f' ({inner[0]})' if len(inner) == 1 else ''}"
    if isinstance(found, enum.Enum):
        return f"{type(found).__name__}.{found.name}"
    if isinstance(found, bool | int | float):
        return f"the number {found}"
    return kind_of(found)


def _shape(shape: ir.Shape) -> str:
    return f"[{','.join('?' if dim is None else str(dim) for dim in shape)}]"


def floating(found: object, where: str, due: str, like: ir.Value | None = None) -> ir.Value:
    """Return a value with floating-point numbers that a method has returned.

    Args:
        due: what is due, in words.
        like: a value whose element type and shape the value must have.

    Raises:
        GraphoptError: it is something else.
    """
    if not isinstance(found, ir.Value):
        remedy = "" if found is None and like is not None else _remedy(found)
        raise GraphoptError(f"{where}: expected {due}, found {told(found)}{remedy}")
    is_number = like is None or like.dtype is None or like.dtype.is_floating_point()
    if is_number and found.dtype is not None and not found.dtype.is_floating_point():
        raise GraphoptError(
            f"{where}: expected {due}, in floating-point numbers, found {told(found)}: write op.Cast(x, to=...)"
        )
    if like is not None and (_differs(found.dtype, like.dtype) or not may_be_alike(found.shape, like.shape)):
        raise GraphoptError(f"{where}: expected {due}, {told(like)}, found {told(found)}")
    return found


def _differs(a: ir.DataType | None, b: ir.DataType | None) -> bool:
    return a is not None and b is not None and a != b


def scalar(found: object, where: str, due: str, dtype: ir.DataType | None = None) -> ir.Value:
    """Return a value of one floating-point number, of an element type if one is given, that a method has returned."""
    value = floating(found, where, due)
    if value.shape is not None and len(value.shape) > 0:
        reduce = "op.ReduceSum or op.ReduceMean, with keepdims=0, makes one number of it"
        raise GraphoptError(f"{where}: expected {due}, one number, found {told(value)}: {reduce}")
    if _differs(value.dtype, dtype):
        raise GraphoptError(f"{where}: expected {due} in the type {dtype and dtype.name.lower()}, found {told(value)}")
    return value


def several(found: object, where: str, due: str, count: int) -> Sequence[object]:
    """Return the sequence of so many things that a method has returned.

    Raises:
        GraphoptError: it is no list or tuple, or of another length.
    """
    if not isinstance(found, list | tuple):
        remedy = ": return [value]" if isinstance(found, ir.Value) and count == 1 else _remedy(found)
        raise GraphoptError(f"{where}: expected {due}, {count} in a list or tuple, found {told(found)}{remedy}")
    if len(found) != count:
        raise GraphoptError(f"{where}: expected {due}, {count} in a list or tuple, found {told(found)}")
    return found


def _remedy(found: object) -> str:
    """Return what to do in place of something that is no value."""
    if found is None:
        return ": end the method with a return statement"
    if isinstance(found, int | float | np.generic | np.ndarray):
        return ": op.constant(number, like=x) makes a value of it"
    if isinstance(found, list | tuple) and len(found) == 1:
        return ": return the value itself"
    if inspect.isgenerator(found):
        return ": return a list of what it yields"
    return ""
