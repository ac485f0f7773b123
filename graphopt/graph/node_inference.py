"""Infer the outputs of single nodes by ONNX, once for nodes that are alike, as those of a network's layers are."""

from __future__ import annotations

from collections.abc import Hashable

import onnx
import onnx_ir as ir

from graphopt.graph.message_inference import FRAGILE
from graphopt.graph.operators import STANDARD
from graphopt.graph.values import name_of

# The type and the shape of an output; None stands for what ONNX does not infer. Shapes are frozen.
Inferred = tuple[ir.TypeProtocol | None, ir.Shape | None]

_MOST_NUMBERS = 20  # of a constant that inference reads
_MOST_KNOWN = 2**14  # kinds of nodes, of about a kilobyte each
_PLAIN = {
    *(ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING),
    *(ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS),
}
_known: dict[Hashable, list[Inferred]] = {}


def infer_outputs(node: ir.Node, version: int) -> list[Inferred]:
    """Return the types and shapes of a node's outputs, as they follow from its inputs in an opset version.

    Raises:
        Exception: what ONNX raises, or ValueError if the type of an input is unknown.
    """
    kind = _kind(node, version)
    found = None if kind is None else _known.get(kind)
    if found is None:
        found = _infer(node, version)
        if kind is None or node.domain not in STANDARD or not all(type(its) is ir.TensorType for its, _ in found):
            return found
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[kind] = found
    return [(its and ir.TensorType(its.dtype), shape) for its, shape in found]


def _kind(node: ir.Node, version: int) -> Hashable | None:
    """Return all that inference reads of a node but names; None if it is long, or of other types than tensors."""
    parts: list[Hashable] = [node.op_type, node.domain, version, *(bool(y.name) for y in node.outputs)]
    for x in node.inputs:
        if x is None:
            parts.append(None)
            continue
        tensor = _read(x)
        numbers = None if tensor is None else _numbers(tensor)
        if type(x.type) is not ir.TensorType or (tensor is not None and numbers is None):
            return None
        parts.append((x.type.dtype, None if x.shape is None else x.shape.dims, numbers))
    for attribute in node.attributes.data.values():
        value = attribute.value
        if attribute.type is ir.AttributeType.TENSOR and value is not None and value.size <= _MOST_NUMBERS:
            value = _numbers(value)
        elif attribute.type not in _PLAIN:
            return None
        if value is None:  # a reference to an attribute of a function, too
            return None
        parts.append((attribute.name, attribute.type, tuple(value) if isinstance(value, list) else value))
    return tuple(parts)


def _read(x: ir.Value) -> ir.TensorProtocol | None:
    """Return the constant that inference reads of an input, or None."""
    tensor = x.const_value
    return None if tensor is None or tensor.size > _MOST_NUMBERS else tensor


def _numbers(tensor: ir.TensorProtocol) -> Hashable | None:
    if tensor.dtype is ir.DataType.STRING or isinstance(tensor, ir.ExternalTensor):
        return None
    return tensor.dtype, tuple(tensor.shape.dims), tensor.tobytes()


def _infer(node: ir.Node, version: int) -> list[Inferred]:
    types: dict[str, onnx.TypeProto] = {}
    numbers: dict[str, onnx.TensorProto] = {}
    for x in node.inputs:
        if x is None:
            continue
        if x.type is None:
            raise ValueError(f"expected an input with a type, found {x.name!r} without one")
        types[name_of(x)] = proto = ir.serde.serialize_type(x.type)
        if x.shape is not None:
            ir.serde.serialize_shape_into(proto, x.shape)
        if (tensor := _read(x)) is not None:
            numbers[name_of(x)] = ir.serde.serialize_tensor(tensor)
    if node.op_type in FRAGILE and any(
        isinstance(dim, int) and dim < 0 for x in node.inputs if x is not None for dim in x.shape or ()
    ):
        raise ValueError(f"{node.op_type}: expected inputs with sizes of 0 or more, found others")
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    found = onnx.shape_inference.infer_node_outputs(schema, ir.serde.serialize_node(node), types, numbers)
    return [_inferred(found.get(name_of(y))) for y in node.outputs]


def _inferred(found: onnx.TypeProto | None) -> Inferred:
    if found is None:
        return None, None
    return ir.serde.deserialize_type_proto_for_type(found), ir.serde.deserialize_type_proto_for_shape(found)
