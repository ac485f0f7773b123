"""Change the floating-point types of models and arrays."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from graphopt.graph.operators import takes
from graphopt.graph.traversal import nodes_of
from graphopt.graph.values import is_floating, redirect

_NUMBERS = {"value_float", "value_floats"}  # attributes of Constant


def retype(model: ir.Model, dtype: ir.DataType) -> dict[ir.Value, ir.Shape | None]:
    """Give a model one floating-point type instead of all others, if its operators accept it.

    The types of inner values are left to be inferred. Return the shapes that they had.
    """
    version = model.opset_imports[""]
    results = {y for graph in model.graphs() for y in graph.outputs}
    for graph in model.graphs():
        for x in [*graph.inputs, *graph.initializers.values()]:
            _retype(x, dtype, version)
        for y in graph.outputs if graph is not model.graph else []:
            y.type = ir.TensorType(dtype) if is_floating(y) else y.type
    inferred = {y: y.shape for node in model.graph.all_nodes() for y in node.outputs if y not in results}
    for y in {*inferred, *model.graph.outputs}:
        y.type = y.shape = None
    for function in model.functions.values():
        for node in list(function.all_nodes()):
            _retype_number_of_call(function, node, dtype)
    for node in nodes_of(model):
        if not all(takes(dtype, version, *use) for output in node.outputs for use in output.uses()):
            continue
        if node.op_type == "ConstantOfShape" and not node.attributes:
            node.attributes.add(ir.AttrTensor("value", ir.tensor(np.zeros(1))))
        for name, attribute in list(node.attributes.items()):
            if attribute.ref_attr_name is not None:
                continue
            if name in _NUMBERS:
                del node.attributes[name]
                tensor = ir.tensor(np.array(attribute.value, dtype.numpy()))
                node.attributes.add(ir.AttrTensor("value", tensor))
            elif attribute.type == ir.AttributeType.TENSOR:
                array = as_precision(attribute.as_tensor().numpy(), dtype)
                node.attributes.add(ir.AttrTensor(name, ir.tensor(array)))
            elif _is_precision(node, name) and ir.DataType(attribute.as_int()).is_floating_point():
                node.attributes.add(ir.AttrInt64(name, dtype))
    return inferred


def _retype_number_of_call(function: ir.Function, node: ir.Node, dtype: ir.DataType) -> None:
    """Cast a constant of a function whose number each call of the function gives, as an attribute."""
    if any(node.attributes[name].ref_attr_name is not None for name in _NUMBERS & node.attributes.keys()):
        (number,) = node.outputs
        uses = list(number.uses())
        cast = ir.node("Cast", [number], {"to": dtype})
        (node.graph or function).insert_after(node, cast)
        redirect(uses, cast.outputs[0])
        for outputs in (function.outputs, *([] if node.graph is None else [node.graph.outputs])):
            for i, y in enumerate(outputs):
                outputs[i] = cast.outputs[0] if y is number else y


def _retype(x: ir.Value, dtype: ir.DataType, version: int) -> None:
    """Change the floating-point type of an input or initializer if all its readers accept the new one."""
    if is_floating(x) and all(takes(dtype, version, *use) for use in x.uses()):
        x.type = ir.TensorType(dtype)
        if x.const_value is not None:
            x.const_value = ir.tensor(x.const_value.numpy().astype(dtype.numpy()), name=x.name)


def _is_precision(node: ir.Node, name: str) -> bool:
    """Return whether an attribute names an element type that may be float64."""
    names = {"to", "dtype", "output_dtype", "softmax_precision", "stash_type"}
    return name in names and (node.op_type, name) != ("LayerNormalization", "stash_type")


def as_precision(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Cast floating-point numbers to a precision; return other arrays unchanged."""
    return array.astype(dtype.numpy()) if is_floating_array(array) else array


def is_floating_array(array: object) -> TypeGuard[np.ndarray]:
    """Return whether `array` contains floating-point numbers of a type that NumPy has, or bfloat16 numbers."""
    is_bfloat16 = isinstance(array, np.ndarray) and array.dtype.name == "bfloat16"
    return is_bfloat16 or (isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating))
