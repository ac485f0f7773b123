"""Store weights in the form of the file that they came from, if they train in another one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import GraphoptError
from graphopt.graph.metadata import STORED, STORED_TYPE
from graphopt.graph.traversal import extracted_between
from graphopt.graph.values import constant_of, is_floating, name_of


def store(model: ir.Model) -> None:
    """Replace each node that rounds a weight to its form in the file by the result, under the weight's name."""
    graph = model.graph
    for node in [node for node in graph if STORED.is_set(node)]:
        weight, y = _weight(node), node.outputs[0]
        if weight is not None:
            stored = _computed(model, weight, y)
            y.name, name = f"{y.name}/computed", name_of(weight)
            del graph.initializers[name]
            weight.name = f"{name}/float"
            graph.register_initializer(weight)
            value = ir.Value(name=name, type=ir.TensorType(stored.dtype), shape=y.shape, const_value=stored)
            graph.register_initializer(value)
            ir.convenience.replace_all_uses_with(y, value, replace_graph_outputs=True)
    RemoveUnusedNodesPass()(model)
    for value in graph.initializers.values():
        stored_type = STORED_TYPE.read(value)
        if stored_type is not None and value.const_value is not None:
            dtype = ir.DataType[stored_type]
            value.const_value = ir.tensor(value.const_value.numpy().astype(dtype.numpy()), name=value.name)
            value.type = ir.TensorType(dtype)


def standing_for(x: ir.Value) -> np.ndarray | None:
    """Return the numbers that an initializer stands for: its own, or those that its DequantizeLinear makes of it."""
    if x.const_value is None or x.dtype is None:
        return None
    if is_floating(x) and not any(node.op_type == DEQUANTIZE for node in x.consumers()):
        return x.const_value.numpy()
    return next((result for node in x.consumers() if (result := dequantized(node)) is not None), None)


DEQUANTIZE = "DequantizeLinear"


def dequantized(node: ir.Node) -> np.ndarray | None:
    """Return (q - zero) scale in float32 for a DequantizeLinear of constants, or None for another node."""
    if node.op_type != DEQUANTIZE or node.domain != "":
        return None
    q, scale, zero = (constant_of(x) for x in [*node.inputs, None][:3])
    if q is None or scale is None or (zero is None and len(node.inputs) > 2 and node.inputs[2] is not None):
        return None
    floating = is_floating(node.inputs[0])
    wide = q.astype(np.float32 if floating else np.int64)
    if zero is not None and not floating:
        wide = wide - broadcastable(node, zero.astype(np.int64), wide.shape)
    return wide.astype(np.float32) * broadcastable(node, scale.astype(np.float32), wide.shape)


def broadcastable(node: ir.Node, numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the scale or the zero point of a DequantizeLinear in a form that broadcasts to its input's shape."""
    if numbers.size == 1 and numbers.ndim < 2:
        return numbers.reshape(())
    axis = node.attributes.get_int("axis", 1) % len(shape)
    block = node.attributes.get_int("block_size", 0)
    if block:
        return np.repeat(numbers, block, axis=axis).take(range(shape[axis]), axis=axis)
    return numbers.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _weight(node: ir.Node) -> ir.Value | None:
    """Return the initializer that a node rounds, through other nodes."""
    x = node.inputs[0]
    while x is not None and (before := x.producer()) is not None:
        x = before.inputs[0] if before.inputs else None
    return x if x is not None and x.is_initializer() else None


def _computed(model: ir.Model, weight: ir.Value, y: ir.Value) -> ir.TensorProtocol:
    part = extracted_between(model.graph, [weight], [y])
    proto = ir.to_proto(ir.Model(part, ir_version=model.ir_version))
    if weight.const_value is None:
        raise GraphoptError(f"weight {weight.name!r}: expected its numbers, found none")
    (array,) = ReferenceEvaluator(proto).run(None, {name_of(weight): weight.const_value.numpy()})
    return ir.tensor(array, dtype=y.dtype, name=name_of(weight))
