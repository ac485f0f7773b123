"""Return facts about values: type, dimensions, constant contents."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError


def is_floating(value: ir.Value | None) -> bool:
    """Return whether a value has a floating-point type."""
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def dims_of(x: ir.Value) -> tuple[int | ir.SymbolicDim, ...]:
    """Return the dimensions of `x`, numbers or symbols."""
    if x.shape is None:
        raise GraphoptError(f"the gradient by {x.name!r} needs its rank, which could not be inferred")
    return tuple(x.shape)


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of a constant value, or None if the value is not constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def like(value: ir.Value, model: ir.Value) -> ir.Value:
    """Declare that `value` has the shape and element type of `model`, where inference cannot see it."""
    value.shape = model.shape
    value.type = model.type
    return value
