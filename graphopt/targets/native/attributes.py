"""Check nodes against ONNX's schemas, so that lowering may trust their attributes and the number of their inputs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from graphopt.graph import schemas

Schema = onnx.defs.OpSchema


@functools.cache
def _schema(op_type: str, version: int) -> Schema | None:
    try:
        return onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def attributes_of(node: ir.Node, versions: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the values of a node's attributes, including defaults; None for an operator that its opset lacks."""
    if node.domain != "" or _schema(node.op_type, versions.get("", 1)) is None:
        return None
    return schemas.full_attributes(node, versions)


def is_well_formed(model: ir.Model) -> bool:
    """Return whether all nodes have the inputs, outputs and types of attributes that the schema of their operator says.

    ONNX Runtime opens no other model. Operators without a schema are not checked: nothing lowers them.
    """
    version = model.opset_imports.get("", 1)
    return all(_follows(node, version) for node in model.graph.all_nodes() if node.domain == "")


def _follows(node: ir.Node, version: int) -> bool:
    schema = _schema(node.op_type, version)
    if schema is None:
        return True
    required = {name for name, each in schema.attributes.items() if each.required}
    return (
        schema.min_input <= len(node.inputs) <= schema.max_input
        and schema.min_output <= len(node.outputs) <= schema.max_output
        and required <= node.attributes.keys() <= schema.attributes.keys()
        and all(
            not x.is_ref() and x.type.value == schema.attributes[name].type.value  # type: ignore[attr-defined]
            for name, x in node.attributes.items()
        )
        and None not in node.inputs[: schema.min_input]
    )
