"""Read the types and shapes that ONNX's inference writes into a message of a model, without another model of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from graphopt.graph.traversal import subgraphs


def types_in(graph: ir.Graph, typed: onnx.GraphProto) -> Iterator[tuple[ir.Value, onnx.TypeProto]]:
    """Yield each value of a graph and its bodies that has a type in a message of the graph, and this type."""
    named = declared_in(typed)
    for value in [*graph.inputs, *(y for node in graph for y in node.outputs)]:
        found = named.get(value.name or "")
        if found is not None:
            yield value, found
    for body, typed_body in bodies_in(graph, typed):
        yield from types_in(body, typed_body)


def declared_in(typed: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """Return the types of a graph's inputs and computed values, without those in bodies, by name."""
    return {x.name: x.type for x in (*typed.input, *typed.value_info, *typed.output)}


def bodies_in(graph: ir.Graph, typed: onnx.GraphProto) -> Iterator[tuple[ir.Graph, onnx.GraphProto]]:
    """Yield the subgraphs of a graph's nodes, each with its message."""
    owners = [bodies for node in graph if (bodies := subgraphs(node))]
    if owners:
        found = ([x.g for x in node.attribute if x.type == onnx.AttributeProto.GRAPH] for node in typed.node)
        for bodies, messages in zip(owners, filter(None, found), strict=True):
            yield from zip(bodies, messages, strict=True)


def take_types(graph: ir.Graph, typed: onnx.GraphProto) -> None:
    """Copy types and shapes to a graph and its bodies from a message of the graph."""
    for value, found in types_in(graph, typed):
        if (kind := type_of(found)) is not None:
            shape = shape_of(found)
            value.type, value.shape = kind, value.shape if shape is None else shape


def type_of(found: onnx.TypeProto) -> ir.TypeProtocol | None:
    """Return a type from its message."""
    if found.HasField("tensor_type") and found.tensor_type.elem_type and not found.denotation:
        return ir.TensorType(ir.DataType(found.tensor_type.elem_type))
    return ir.serde.deserialize_type_proto_for_type(found)


def shape_of(found: onnx.TypeProto) -> ir.Shape | None:
    """Return a shape from the message of a type."""
    if not found.HasField("tensor_type"):
        return ir.serde.deserialize_type_proto_for_shape(found)
    if not found.tensor_type.HasField("shape"):
        return None
    return _shape(found.tensor_type.shape.SerializeToString())


@functools.lru_cache(2**14)
def _shape(content: bytes) -> ir.Shape:
    dims = onnx.TensorShapeProto.FromString(content).dim
    return ir.Shape(map(_dim_of, dims), [dim.denotation or None for dim in dims], frozen=True)


def _dim_of(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    kind = dim.WhichOneof("value")
    return None if kind is None else dim.dim_value if kind == "dim_value" else dim.dim_param


def sizes_of(found: onnx.TypeProto) -> Sequence[int] | None:
    """Return the sizes of a tensor of static shape from the message of its type, or None."""
    shape = shape_of(found)
    return None if shape is None or not shape.is_static() else shape.numpy()
