"""Write the states of iterables as JSON, without pickle, and read them."""

from __future__ import annotations

import base64
import importlib
from typing import Any

import numpy as np

from graphopt.errors import GraphoptError

_PLAIN = (bool, int, float, str, type(None))


def encoded(state: Any, path: str = "state") -> Any:
    """Return a state as JSON: plain values and lists as they are, all else as an object whose only key is the type.

    Args:
        state: plain values, bytes, NumPy arrays and PyTorch tensors in lists, tuples and dicts.

    Raises:
        GraphoptError: the state contains another type.

    >>> from graphopt.data.states import decoded, encoded
    >>> encoded({"position": (3, b"ab")})
    {'dict': [['position', {'tuple': [3, {'bytes': 'YWI='}]}]]}
    >>> decoded(encoded({"position": (3, b"ab")}))
    {'position': (3, b'ab')}
    """
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind is dict:
        return {"dict": [[encoded(key, path), encoded(x, f"{path}[{key!r}]")] for key, x in state.items()]}
    if kind in (list, tuple):
        values = [encoded(value, f"{path}[{i}]") for i, value in enumerate(state)]
        return values if kind is list else {"tuple": values}
    if kind is bytes:
        return {"bytes": _text(state)}
    is_tensor = kind.__module__ == "torch" and kind.__name__ == "Tensor"
    if is_tensor or isinstance(state, np.ndarray | np.generic):
        array = np.asarray(state)
        if array.dtype.kind in "biufc":
            return {
                "tensor" if is_tensor else "array": [
                    array.dtype.str,
                    list(array.shape),
                    _text(array.tobytes()),
                ]
            }
    raise GraphoptError(
        f"data: {path}: expected numbers, strings, bytes or arrays in lists, tuples and dicts, found {kind.__name__}: "
        "return such a state, which a checkpoint keeps without pickle"
    )


def decoded(state: Any) -> Any:
    """Return what `encoded` was given."""
    if isinstance(state, list):
        return [decoded(value) for value in state]
    if not isinstance(state, dict):
        return state
    ((kind, value),) = state.items()
    if kind == "dict":
        return {decoded(key): decoded(item) for key, item in value}
    if kind == "tuple":
        return tuple(decoded(item) for item in value)
    if kind == "bytes":
        return base64.b64decode(value)
    dtype, shape, text = value
    array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    return importlib.import_module("torch").from_numpy(array) if kind == "tensor" else array


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
