"""Look up operator schemas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir


@functools.cache
def defaults(domain: str, op_type: str, version: int) -> dict[str, Any]:
    """Return the default values of an operator's attributes; of an unknown operator, an empty mapping."""
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return {}
    protos = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    return {name: ir.serde.deserialize_attribute(proto).value for name, proto in protos.items() if proto.name}


@functools.cache
def input_name(domain: str, op_type: str, version: int, index: int) -> str:
    """Return the name of an operator's input, or its index if the operator is unknown."""
    try:
        inputs = onnx.defs.get_schema(op_type, version, domain).inputs
    except onnx.defs.SchemaError:
        return f"input {index}"
    last = len(inputs) - 1
    formal = inputs[min(index, last)]
    variadic = formal.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    return f"{formal.name}[{index - last}]" if variadic else formal.name


def takes(dtype: ir.DataType, version: int, node: ir.Node, index: int) -> bool:
    """Return whether an input of a node accepts a floating-point type; a few accept float32 only."""
    if node.domain != "":
        return True
    schema = onnx.defs.get_schema(node.op_type, version, "")
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    return (
        not any("float" in name for name in formal.types) or f"tensor({dtype.name.lower()})" in formal.types
    )


def attributes_of(node: ir.Node, versions: Mapping[str, int]) -> dict[str, Any]:
    """Return the values of a node's attributes, including the schema's defaults."""
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    return defaults(node.domain, node.op_type, versions.get(node.domain, 1)) | given
