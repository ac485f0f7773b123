"""Look up operator schemas."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir


@functools.cache
def schema_of(domain: str, op_type: str, version: int) -> onnx.defs.OpSchema | None:
    """Return the schema of an operator in an opset, or None if it is unknown there."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def formal_of(schema: onnx.defs.OpSchema, index: int) -> onnx.defs.OpSchema.FormalParameter:
    """Return the declaration of an input; the last one declares all that follow it."""
    return schema.inputs[min(index, len(schema.inputs) - 1)]


@functools.cache
def defaults(domain: str, op_type: str, version: int) -> dict[str, Any]:
    """Return the default values of an operator's attributes; of an unknown operator, an empty mapping."""
    schema = schema_of(domain, op_type, version)
    attributes = {} if schema is None else schema.attributes
    protos = {name: attribute.default_value for name, attribute in attributes.items()}
    return {name: ir.serde.deserialize_attribute(proto).value for name, proto in protos.items() if proto.name}


@functools.cache
def input_name(domain: str, op_type: str, version: int, index: int) -> str:
    """Return the name of an operator's input, or its index if the operator is unknown."""
    schema = schema_of(domain, op_type, version)
    if schema is None:
        return f"input {index}"
    formal = formal_of(schema, index)
    variadic = formal.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    return f"{formal.name}[{index - len(schema.inputs) + 1}]" if variadic else formal.name


def takes(dtype: ir.DataType, version: int, node: ir.Node, index: int) -> bool:
    """Return whether an input of a node accepts a floating-point type; a few accept float32 only."""
    if node.domain != "":
        return True
    types = formal_of(onnx.defs.get_schema(node.op_type, version, ""), index).types
    return not any("float" in name for name in types) or _type_name(dtype) in types


def fits(schema: onnx.defs.OpSchema, inputs: Sequence[ir.Value | None]) -> bool:
    """Return whether a schema allows the element types of inputs, as far as these are known."""
    typed = [(i, x.dtype) for i, x in enumerate(inputs) if x and isinstance(x.type, ir.TensorType)]
    return all(_type_name(dtype) in formal_of(schema, i).types for i, dtype in typed if dtype is not None)


def _type_name(dtype: ir.DataType) -> str:
    return f"tensor({dtype.name.lower()})"


def full_attributes(node: ir.Node, versions: Mapping[str, int]) -> dict[str, Any]:
    """Return the values of a node's attributes, including the schema's defaults."""
    present = {name: attribute.value for name, attribute in node.attributes.items()}
    return defaults(node.domain, node.op_type, versions.get(node.domain, 1)) | present
