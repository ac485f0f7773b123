"""Read and add floating-point initializers."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from graphopt.graph.operators import LITERALS
from graphopt.graph.traversal import all_nodes
from graphopt.graph.values import constant_of, name_of


def weights_in(model: ir.Model) -> list[ir.Value]:
    """Return the floating-point initializers of a model, including its bodies."""
    return [value for graph in model.graphs() for value in graph.initializers.values() if is_weight(value)]


def literals_in(model: ir.Model) -> list[str]:
    """Return the names of the constants that nodes of a model hold, including its bodies."""
    nodes = all_nodes(model.graph)
    return [name_of(node.outputs[0]) for node in nodes if node.op_type in LITERALS and node.domain == ""]


def is_weight(x: ir.Value | None) -> bool:
    """Return whether a value is a floating-point initializer and not an input."""
    tensor = None if x is None or x.is_graph_input() or not x.is_initializer() else x.const_value
    return tensor is not None and tensor.dtype.is_floating_point()


def array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def fill_value(x: ir.Value | None) -> float | None:
    """Return the number with which a constant is filled, or None."""
    numbers = constant_of(x)
    if numbers is None or numbers.size == 0 or not np.all(numbers == numbers.flat[0]):
        return None
    return float(numbers.flat[0])


def replace_by(model: ir.Model, value: ir.Value, computed: ir.Value) -> None:
    """Remove an initializer, in whose place nodes read a computed value."""
    ir.convenience.replace_all_uses_with(value, computed, replace_graph_outputs=True)
    del model.graph.initializers[name_of(value)]


def register(model: ir.Model, name: str, numbers: np.ndarray, taken: Collection[str] | None = None) -> ir.Value:
    """Register an initializer under a name, or under a similar free one.

    Args:
        taken: the names of the model's values, if they are known.
    """
    if taken is None:
        taken = ir.convenience.create_value_mapping(model.graph)
    free = free_name(name, taken)
    value = ir.val(free, const_value=ir.tensor(numbers, name=free))
    model.graph.register_initializer(value)
    return value


def free_name(name: str, taken: Collection[str]) -> str:
    names = itertools.chain([name], (f"{name}.{i}" for i in itertools.count(1)))
    return next(candidate for candidate in names if candidate not in taken)
