"""Write a model as a message for ONNX's inference, and read the types and shapes that this writes into the message."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph.message_inference import graphs_in, infer_message
from graphopt.graph.storage import replace_nodes, without_weights
from graphopt.graph.traversal import subgraphs, values_in

_WHOLE = onnx.numpy_helper.from_array(np.zeros(1, np.int64))
_ANY = onnx.numpy_helper.from_array(np.ones(1, bool))
_SHORT = 64  # elements of a vector that bodies get
_KEEPS_NAMES = 10  # the opset whose Slice keeps the names of axes that it cuts (tests/faults.py: Slice-10)
_AXES_ARE_INPUTS_SINCE = 13  # opset of Unsqueeze; before, they are an attribute
_BOUNDS = (1, 2)  # the inputs of a Slice that say where it begins and ends


def message_for_inference(model: ir.Model, propagate: bool) -> onnx.ModelProto:
    """Return a message of a model in which ONNX's inference finds what it would not, and guesses nothing.

    Args:
        propagate: whether inference will propagate data.
    """
    message = without_weights(model)
    version = next((opset.version for opset in message.opset_import if opset.domain == ""), 1)
    fed = {x.name for x in message.graph.input}
    constants: dict[str, onnx.TensorProto] = {}
    for graph in graphs_in(message.graph):
        constants |= {x.name: x for x in graph.initializer if x.name not in fed}
        constants |= {x.output[0]: x.attribute[0].t for x in graph.node if x.op_type == "Constant"}
        if graph is not message.graph:
            _bring_in(graph, constants)
    keeps_names = version == _KEEPS_NAMES
    for graph in graphs_in(message.graph):
        if propagate and any(node.op_type == "Range" for node in graph.node):
            _count_by_shape(graph, version)
        if propagate or keeps_names:
            _hide_bounds(graph, () if keeps_names else constants)
    return message


def _bring_in(body: onnx.GraphProto, constants: Mapping[str, onnx.TensorProto]) -> None:
    """Give a body copies of the short vectors around it that it reads: ONNX does not look outside a body."""
    own = {y for node in body.node for y in node.output} | {x.name for x in body.initializer}
    copies: dict[str, onnx.NodeProto] = {}
    for node in body.node:
        for i, name in enumerate(node.input):
            tensor = None if name in own else constants.get(name)
            if tensor is not None and tensor.data_type == onnx.TensorProto.INT64 and math.prod(tensor.dims) <= _SHORT:
                inner = f"{name}/inside {body.name}"
                copies[inner] = onnx.helper.make_node("Constant", [], [inner], value=tensor)
                node.input[i] = inner
    if copies:
        replace_nodes(body, [*copies.values(), *body.node])


def _hide_bounds(graph: onnx.GraphProto, constants: Collection[str]) -> None:
    """Hide the bounds of a Slice that are not among some constants: ONNX takes them for 0 (tests/faults.py: Slice)."""
    make, slices = onnx.helper.make_node, [(i, x) for i, x in enumerate(graph.node) if x.op_type == "Slice"]
    for i, node in reversed(slices):  # what is put before a node moves those behind it
        place = next((i for i in _BOUNDS if i < len(node.input) and node.input[i] not in constants), None)
        if place is not None and not node.domain:
            bound, y = node.input[place], node.output[0]
            node.input[place] = f"{y}/bound"
            graph.node.insert(i, make("Compress", [bound, f"{y}/any"], [f"{y}/bound"]))
            graph.node.insert(i, make("Constant", [], [f"{y}/any"], value=_ANY))


def _count_by_shape(graph: onnx.GraphProto, version: int) -> None:
    """Replace each Range(a, b, 1) by ConstantOfShape(b - a), whose size ONNX infers."""
    numbers = {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    numbers |= {x.name: x for x in graph.initializer}

    def is_number(name: str, number: int) -> bool:
        tensor = numbers.get(name)
        if tensor is None or tensor.data_type != onnx.TensorProto.INT64 or math.prod(tensor.dims) != 1:
            return False
        return int(onnx.numpy_helper.to_array(tensor).item()) == number

    counts = {x.output[0]: x for x in graph.node if x.op_type == "Range" and is_number(x.input[2], 1)}
    make, nodes = onnx.helper.make_node, []
    for node in graph.node:
        if counts.keys().isdisjoint(node.output):
            nodes.append(node)
            continue
        (start, limit, _), y = node.input, node.output[0]
        if not is_number(start, 0):
            nodes.append(make("Sub", [limit, start], [f"{y}/count"]))
            limit = f"{y}/count"
        if version < _AXES_ARE_INPUTS_SINCE:
            nodes.append(make("Unsqueeze", [limit], [f"{y}/size"], axes=[0]))
        else:
            nodes.append(make("Constant", [], [f"{y}/axis"], value_ints=[0]))
            nodes.append(make("Unsqueeze", [limit, f"{y}/axis"], [f"{y}/size"]))
        nodes.append(onnx.helper.make_node("ConstantOfShape", [f"{y}/size"], [y], node.name, value=_WHOLE))
    if counts:
        replace_nodes(graph, nodes)


def types_in(graph: ir.Graph, typed: onnx.GraphProto) -> Iterator[tuple[ir.Value, onnx.TypeProto]]:
    """Yield each value of a graph and its bodies that has a type in a message of the graph, and this type."""
    named = declared_in(typed)
    for value in values_in(graph):
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


def infer_types(model: ir.Model, propagate: bool = False) -> None:
    """Set the types and shapes that ONNX infers, by default without data propagation.

    Raises:
        InferenceError, ValueError: what ONNX raises, `INFERENCE_ERRORS`. Nothing has changed.
    """
    take_types(model.graph, infer_message(message_for_inference(model, propagate), propagate=propagate).graph)


def take_types(graph: ir.Graph, typed: onnx.GraphProto) -> None:
    """Copy types and shapes to a graph and its bodies from a message of the graph."""
    for value, found in types_in(graph, typed):
        if (kind := type_of(found)) is not None:
            shape = shape_of(found)
            value.type, value.shape = kind, value.shape if shape is None else shape


def type_of(found: onnx.TypeProto) -> ir.TypeProtocol | None:
    if found.HasField("tensor_type") and found.tensor_type.elem_type and not found.denotation:
        return ir.TensorType(ir.DataType(found.tensor_type.elem_type))
    return ir.serde.deserialize_type_proto_for_type(found)


def shape_of(found: onnx.TypeProto) -> ir.Shape | None:
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
