"""Return facts about values (name, type, dimensions, constant contents), and exchange one value for another."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata

Named = ir.Value | ir.Node | str
_SIZE = re.compile(r"\d{1,9}|[A-Za-z_]\w*", re.ASCII)
_TYPES = {
    dtype.numpy().name: dtype
    for dtype in (
        *(ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BOOL),
        *(ir.DataType.INT64, ir.DataType.INT32, ir.DataType.INT8, ir.DataType.UINT8),
    )
}


def name_of(x: Named) -> str:
    """Return the name of a value or a node, which has one, or a name itself."""
    return x if isinstance(x, str) else str(x.name)


def is_floating(value: ir.Value | None) -> bool:
    """Return whether a value has a floating-point type."""
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def is_number(x: ir.Value | None) -> bool:
    """Return whether a value is known to be a scalar."""
    return x is not None and x.shape is not None and len(x.shape) == 0


def dtype_of(x: ir.Value) -> ir.DataType:
    """Return the element type of a value, which has one."""
    assert x.dtype is not None
    return x.dtype


def wide_type(x: ir.Value) -> ir.DataType:
    """Return the type in which numbers like those of `x` are summed: float32 for 16 bits."""
    return ir.DataType.FLOAT if dtype_of(x).itemsize < 4 else dtype_of(x)


def dims_of(x: ir.Value) -> tuple[int | ir.SymbolicDim, ...]:
    """Return the dimensions of `x`, numbers or symbols."""
    if x.shape is None:
        raise GraphoptError(f"the gradient by {x.name!r} needs its rank, which could not be inferred")
    return tuple(x.shape)


def rank(x: ir.Value) -> int:
    """Return the number of axes of `x`."""
    return len(dims_of(x))


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of a constant value, or None if the value is not constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def constant_number(value: ir.Value | None) -> float | None:
    """Return the only number of a constant value, or None for other values."""
    array = constant_of(value)
    return array.item() if array is not None and array.size == 1 else None


def tensor_bytes(tensor: ir.TensorProtocol | None) -> int:
    """Return the size of a tensor of numbers in bytes; 0 for text, whose size has no bound that matters here."""
    return 0 if tensor is None or tensor.dtype is ir.DataType.STRING else tensor.nbytes


def like(value: ir.Value, model: ir.Value) -> ir.Value:
    """Declare that `value` has the shape and element type of `model`, where inference cannot see it."""
    value.shape = model.shape
    value.type = model.type
    return value


def swap(old: ir.Value, new: ir.Value) -> ir.Value:
    """Give `new` the name, the metadata and the readers of `old`, and return it."""
    name, old.name = old.name, f"{old.name}/replaced"
    metadata.copy(old, new)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.name = name
    return new


def tensor_type(where: str, text: object) -> tuple[ir.DataType, ir.Shape]:
    """Return the element type and shape that a text such as `int64[N,3]` declares, with NumPy's names of types.

    Args:
        where: what the text belongs to, for errors.

    Raises:
        GraphoptError: the text declares no type.

    >>> tensor_type("target", "int64[N,3]")
    (DataType.INT64, Shape([SymbolicDim(N), 3]))
    """
    match = re.fullmatch(r"(\w+)\[([\w\s,]*)\]", str(text), re.ASCII)
    sizes = [size.strip() for size in match[2].split(",")] if match and match[2].strip() else []
    if match is None or match[1] not in _TYPES or not all(map(_SIZE.fullmatch, sizes)):
        raise GraphoptError(
            f"{where}: expected a type and a shape such as int64[N,3], found {text!r}; types: {', '.join(_TYPES)}"
        )
    return _TYPES[match[1]], ir.Shape([int(size) if size.isdigit() else size for size in sizes])
