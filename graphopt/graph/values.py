"""Return facts about values (type, dimensions, constant contents), derive names, and exchange one value for another.

A function that derives a name, such as that of a state's next value, accepts a name or a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata

Named = ir.Value | ir.Node | str
_Naming = Callable[[Named], str]

COUNTERS = "graphopt."  # the prefix of entries in an on-device checkpoint that are not weights
FIRST_ROW = "first_row"  # the input of `grad` that shifts the positions in masks
ROWS = "rows"  # the output of `grad` that weighs a batch
SHARE = "share"  # the input of `apply` by which it multiplies the sums over all workers
_SIZE = re.compile(r"\d{1,9}|[A-Za-z_]\w*", re.ASCII)
_TYPES = ("float32", "float64", "float16", "bool", "int64", "int32", "int8", "uint8")


def name_of(x: Named) -> str:
    """Return the name of a value or a node, which has one, or a name itself."""
    return x if isinstance(x, str) else str(x.name)


def operator_of(node: ir.Node) -> str:
    """Return the name of a node's operator, with its domain unless it is ONNX's own."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def node_label(node: ir.Node) -> str:
    """Return the operator and the name of a node, or the name of its first output, for errors."""
    return f"{node.op_type} node {node.name or name_of(node.outputs[0])!r}"


def _suffixed(suffix: str) -> tuple[_Naming, _Naming]:
    """Return a function that appends a suffix to a name, and one that removes it."""
    return lambda x: f"{name_of(x)}{suffix}", lambda x: name_of(x).removesuffix(suffix)


next_of, state_of = _suffixed(".next")  # the output that replaces a state after the step
gradient_of, value_of = _suffixed(".grad")  # the gradient with respect to a value
seed_of, output_of = _suffixed(".seed")  # the input that weighs an output in a vector-Jacobian product
report_of, _ = _suffixed(".gradient")  # the output that reports the gradient with respect to a parameter
local_of, _ = _suffixed(".local")  # a worker's own value of an output that replaces a state
constant_copy_of, _ = _suffixed(".constant")  # the copy of a weight that stays constant


def of_worker(value: Named, rank: int) -> str:
    """Return the name of a worker's value, as another worker reads it."""
    return f"{name_of(value)}.{rank}"


def is_floating(value: ir.Value | None) -> bool:
    """Return whether a value has a floating-point type."""
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def is_read(value: ir.Value) -> bool:
    """Return whether a node reads a value, or the value is an output of the graph."""
    return bool(value.uses()) or value.is_graph_output()


def is_number(x: ir.Value | None) -> bool:
    """Return whether a value is known to be a scalar."""
    return x is not None and x.shape is not None and len(x.shape) == 0


def is_static(value: ir.Value) -> bool:
    """Return whether the shape of a value is known."""
    return value.shape is not None and value.shape.is_static()


def dtype_of(x: ir.Value) -> ir.DataType:
    """Return the element type of a value, which has one."""
    if x.dtype is None:
        raise GraphoptError(f"value {x.name!r}: expected an element type, found none")
    return x.dtype


def wide_type(x: ir.Value) -> ir.DataType:
    """Return the type in which numbers like those of `x` are summed: float32 for 16 bits."""
    return ir.DataType.FLOAT if dtype_of(x).itemsize < 4 else dtype_of(x)


def dims_of(x: ir.Value) -> tuple[int | ir.SymbolicDim, ...]:
    """Return the dimensions of `x`, numbers or symbols."""
    if x.shape is None:
        raise GraphoptError(
            f"the gradient by {x.name!r} needs its rank, which could not be inferred: declare the shapes of the "
            f"model's inputs, or of {x.name!r} in value_info"
        )
    return tuple(x.shape)


def rank(x: ir.Value) -> int:
    """Return the number of axes of `x`."""
    return len(dims_of(x))


def size_name(dim: int | ir.SymbolicDim) -> str:
    """Return the name of a dimension, or an empty text for a number or an unknown dimension."""
    return "" if isinstance(dim, int) or dim.value is None else dim.value


def size_names(values: Iterable[ir.Value]) -> set[str]:
    """Return the names of the dimensions of values."""
    return {name for x in values for dim in x.shape or () if (name := size_name(dim))}


def may_be_alike(a: ir.Shape | None, b: ir.Shape | None) -> bool:
    """Return whether two shapes may be the same, as far as sizes are known."""
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(
        m == n for m, n in zip(a, b, strict=True) if isinstance(m, int) and isinstance(n, int)
    )


def given(x: ir.Value | None) -> ir.Value:
    """Return an input that its operator requires."""
    if x is None:
        raise GraphoptError("expected an input that the operator requires, found none")
    return x


def producer_of(x: ir.Value) -> ir.Node:
    """Return the node that computes a value."""
    node = x.producer()
    if node is None:
        raise GraphoptError(f"value {x.name!r}: expected a node that computes it, found none")
    return node


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of a constant value, or None if the value is not constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def fixed(x: ir.Value | None) -> np.ndarray | None:
    """Return the array of a value that nobody can feed, or None if the value may change."""
    return None if x is None or x.is_graph_input() else constant_of(x)


def spread(x: ir.Value) -> np.ndarray | None:
    """Return the array of a value that nobody can feed, or the one that Expand repeats."""
    node = x.producer()
    return fixed(node.inputs[0] if node is not None and node.op_type == "Expand" else x)


def constant_number(value: ir.Value | None) -> float | None:
    """Return the only number of a constant value, or None for other values."""
    array = constant_of(value)
    return array.item() if array is not None and array.size == 1 else None


def bytes_of(x: ir.Value) -> int:
    """Return the size of a value of numbers in bytes; a dimension that is known only at run time counts as 1."""
    if x.shape is None or x.dtype in (None, ir.DataType.STRING):
        return 0
    count = math.prod(dim for dim in x.shape if isinstance(dim, int))
    return (count * x.dtype.bitwidth + 7) // 8


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


def redirect(uses: Iterable[tuple[ir.Node, int]], other: ir.Value) -> None:
    """Make nodes read another value. Each use is a node and the number of its input."""
    for node, index in list(uses):
        node.replace_input_with(index, other)


def constant_before(node: ir.Node, numbers: np.ndarray, name: str) -> ir.Value:
    """Put a Constant before a node, and return its output, which is named after the node's."""
    tensor = ir.tensor(numbers)
    y = ir.val(f"{node.outputs[0].name}/{name}", tensor.dtype, tensor.shape.numpy())
    if node.graph is not None:
        node.graph.insert_before(node, ir.node("Constant", [], {"value": tensor}, outputs=[y]))
    return y


def tensor_type(where: str, text: object) -> tuple[ir.DataType, ir.Shape]:
    """Return the element type and shape that a text such as `int64[N,3]` declares, with NumPy's names of types.

    Args:
        where: what the text belongs to, for errors.

    Raises:
        GraphoptError: the text declares no type.

    >>> tensor_type("target", "int64[N,3]")
    (INT64, Shape([SymbolicDim('N'), 3]))
    """
    match = re.fullmatch(r"(\w+)\[([\w\s,]*)\]", str(text), re.ASCII)
    sizes = [size.strip() for size in match[2].split(",")] if match and match[2].strip() else []
    if match is None or match[1] not in _TYPES or not all(map(_SIZE.fullmatch, sizes)):
        raise GraphoptError(
            f"{where}: expected a type and a shape such as int64[N,3], found {text!r}; types: {', '.join(_TYPES)}"
        )
    dims = [int(size) if size.isdigit() else size for size in sizes]
    return ir.DataType.from_numpy(np.dtype(match[1])), ir.Shape(dims)
