"""Check what the ONNX checker leaves unchecked in a file, so that other modules may trust a loaded model.

graphopt's metadata is checked once, when a model is loaded: a file may contain any. Metadata written by passes is valid
by construction.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import onnx
import onnx.external_data_helper as external
import onnx_ir as ir
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from graphopt.errors import GraphoptError
from graphopt.graph.limits import Limits, graphs_with_depth
from graphopt.graph.operators import DYNAMIC_PRODUCTS, INTEGER_OPERATORS, MICROSOFT
from graphopt.graph.traversal import wholes_of
from graphopt.graph.values import is_floating, node_label

M = TypeVar("M", bound=Message)

KERNELS = "ai.graphopt"  # the domain of compiled kernels, which only lowering may write
_MANY = 2**48  # elements: more than fits into any memory, and far from overflow
EXTERNAL = onnx.TensorProto.EXTERNAL
_TYPES = {dtype.value for dtype in ir.DataType} - {ir.DataType.UNDEFINED.value}

NCHWC = "com.microsoft.nchwc"
CONVERTING = {"QuantizeLinear", "DequantizeLinear"}


def check_proto(proto: onnx.ModelProto, stored: Mapping[str, int] | None = None) -> None:
    """Raise an error unless text is UTF-8, shapes are possible and tensors have the size that their shape requires.

    Attribute references must name an attribute of the surrounding function.

    Args:
        stored: the bytes of tensors that lie in files, by name.
    """
    refers = False
    for message in messages(proto):
        if isinstance(message, onnx.AttributeProto):
            refers |= message.HasField("ref_attr_name")
        elif isinstance(message, onnx.TensorProto):
            _check_tensor(message, stored or {})
        elif isinstance(message, onnx.TensorShapeProto):
            dims = [dim.dim_value for dim in message.dim if dim.HasField("dim_value")]
            if math.prod(max(dim, 1) for dim in dims) > _MANY:
                raise GraphoptError(f"expected shapes of at most {_MANY:,} elements, found {dims}")
    if refers:
        _check_references(proto.graph, "the graph", ())
    for function in proto.functions if refers else ():
        own = [*function.attribute, *(attribute.name for attribute in function.attribute_proto)]
        _check_references(function, f"function {function.domain}::{function.name}", own)


def check_domains(model: ir.Model) -> None:
    """Raise an error if a node at any depth or a function of a model has the domain of compiled kernels.

    An opset of the domain is removed.
    """
    wholes = wholes_of(model)
    nodes = (node for whole in wholes for graph, _ in graphs_with_depth(whole) for node in graph)
    names = [[node.name, *(y.name for y in node.outputs)] for node in nodes if node.domain == KERNELS]
    if names or any(function.domain == KERNELS for function in model.functions.values()):
        title = f"node {next(filter(None, names[0]), '')[:60]!r}" if names else "a function"
        raise GraphoptError(
            f"{title}: expected operators of the model, found the domain {KERNELS!r} of graphopt's compiled kernels, "
            "which exist only while a step runs: pass the model that was compiled"
        )
    for whole in wholes:
        whole.opset_imports.pop(KERNELS, None)  # ONNX Runtime writes all domains that its process has used


def messages_of(kind: type[M], proto: Message) -> list[M]:
    """Return all messages of a type in a model whose text was checked; skip messages that cannot own any."""
    found: list[M] = []
    waiting: list[Message] = [proto]
    while waiting:
        message = waiting.pop()
        if isinstance(message, kind):
            found.append(message)
        for name, is_repeated in _fields_to(kind.DESCRIPTOR, message.DESCRIPTOR):
            if is_repeated:
                waiting.extend(getattr(message, name))
            elif message.HasField(name):
                waiting.append(getattr(message, name))
    return found


@functools.cache
def _fields_to(kind: Descriptor, owner: Descriptor) -> list[tuple[str, bool]]:
    """Return the fields of messages through which they may own messages of a kind, and whether they are repeated."""
    fields = [field for field in owner.fields if field.message_type is not None]
    return [(field.name, field.is_repeated) for field in fields if kind in _owned(field.message_type)]


@functools.cache
def _owned(owner: Descriptor) -> set[Descriptor]:
    """Return the kinds of messages that messages of a kind may own, at any depth, and this kind."""
    found, waiting = {owner}, [owner]
    while waiting:
        inner = {field.message_type for field in waiting.pop().fields} - found - {None}
        found |= inner
        waiting.extend(inner)
    return found


def check_external(proto: onnx.ModelProto, folder: Path, limits: Limits) -> None:
    """Raise an error unless offsets and lengths of external data are whole numbers and lie inside the files.

    Tensors may share bytes of a file, as tied weights do, if their total size is not much larger than the files.
    Tensors without an offset or a length get it.
    """
    asked, sizes = 0, {}
    # All messages first, so that all text is known to be UTF-8.
    tensors = [x for x in [*messages(proto)] if isinstance(x, onnx.TensorProto)]
    for tensor in [tensor for tensor in tensors if tensor.data_location == EXTERNAL]:
        try:
            info = external.ExternalDataInfo(tensor)
        except ValueError as error:
            raise GraphoptError(f"tensor {tensor.name!r}: external data: {error}") from error
        try:
            size = os.stat(folder / info.location).st_size
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise GraphoptError(f"tensor {tensor.name!r}: external data {info.location!r}: {reason}") from error
        start = info.offset or 0
        length = size - start if info.length is None else info.length
        if not 0 <= start <= start + length <= size:
            raise GraphoptError(
                f"tensor {tensor.name!r}: external data: expected bytes {start:,} to {start + length:,} of "
                f"{info.location!r}, found a file of {size:,} bytes"
            )
        asked += length
        sizes[info.location] = size
        del tensor.external_data[:]
        for key, value in {"location": info.location, "offset": start, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
    if asked > sum(sizes.values()) + limits.constant_bytes:
        raise GraphoptError(
            f"external data: expected tensors of about {sum(sizes.values()):,} bytes, the size of the files, found "
            f"{asked:,}: limits.constant_bytes={asked} allows it"
        )


def _check_references(whole: Message, title: str, names: Collection[str]) -> None:
    for attribute in messages_of(onnx.AttributeProto, whole):
        if attribute.ref_attr_name not in ("", *names):
            raise GraphoptError(
                f"attribute {attribute.name!r}: expected a reference to an attribute of {title} "
                f"({', '.join(names) or 'which has none'}), found {attribute.ref_attr_name!r}"
            )


def messages(proto: Message) -> Iterator[Message]:
    """Yield all messages of a model, parents first; without recursion, because messages may nest to any depth."""
    waiting: list[Message] = [proto]
    while waiting:
        message = waiting.pop()
        yield message
        for field, value in message.ListFields():
            values = value if field.is_repeated else [value]
            if field.message_type is not None:
                waiting.extend(values)
            elif field.type == FieldDescriptor.TYPE_STRING:
                for text in values:
                    if not isinstance(text, str):
                        kind = message.DESCRIPTOR.name.removesuffix("Proto").lower()
                        name = getattr(message, "name", "")
                        raise GraphoptError(f"{kind} {name!r}: {field.name}: expected UTF-8 text, found {text!r}")


def _check_tensor(tensor: onnx.TensorProto, stored: Mapping[str, int]) -> None:
    title = f"tensor {tensor.name!r}"
    if tensor.data_type not in _TYPES:
        raise GraphoptError(f"{title}: expected an element type of ONNX, found {tensor.data_type}")
    if any(dim < 0 for dim in tensor.dims):
        raise GraphoptError(f"{title}: expected dimensions of 0 or more, found {list(tensor.dims)}")
    dtype = ir.DataType(tensor.data_type)
    expected, found, unit = _amounts(tensor, dtype, math.prod(tensor.dims), stored)
    if expected and tensor.data_location == EXTERNAL and tensor.name not in stored and not tensor.raw_data:
        places = [entry.value for entry in tensor.external_data if entry.key == "location"]
        raise GraphoptError(
            f"{title}: expected its numbers in the model's file, found them in {', '.join(places)!r}: "
            "onnx.save(onnx.load(path), another) writes one file"
        )
    if expected != found:
        raise GraphoptError(
            f"{title}: expected {expected:,} {unit}, as {dtype.name.lower()}{list(tensor.dims)} has, found {found:,}"
        )


def _amounts(
    tensor: onnx.TensorProto, dtype: ir.DataType, count: int, stored: Mapping[str, int]
) -> tuple[int, int, str]:
    """Return the expected size of a tensor, its size in the file, and the unit of both."""
    if dtype is ir.DataType.STRING:
        return count, len(tensor.string_data), "texts"
    size = (count * dtype.bitwidth + 7) // 8
    if tensor.data_location == EXTERNAL:
        return size, stored.get(tensor.name, len(tensor.raw_data)), "bytes"
    if tensor.HasField("raw_data"):
        return size, len(tensor.raw_data), "bytes"
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    numbers = len(getattr(tensor, field))
    if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        return 2 * count, numbers, "numbers"
    return size if dtype.bitwidth < 8 else count, numbers, "numbers"  # a byte contains several 4-bit numbers


def refuse_foreign(model: ir.Model) -> None:
    """Refuse a model that a tool wrote for inference alone."""
    integers = None
    for node in model.graph.all_nodes():
        if node.domain == NCHWC:
            raise GraphoptError(
                f"{NCHWC}::{node_label(node)}: ONNX Runtime wrote this file for one kind of processor: train the file "
                f"from before the optimization, or optimize it with ORT_ENABLE_EXTENDED at most"
            )
        if integers is None and node.op_type in INTEGER_OPERATORS and node.domain == MICROSOFT:
            integers = node
    if integers is None:
        return
    many = [x for x in model.graph.initializers.values() if x.const_value is not None and x.const_value.size > 1]
    readers = (node for x in many if is_floating(x) for node in x.consumers())
    if all(node.op_type in INTEGER_OPERATORS | DYNAMIC_PRODUCTS | CONVERTING for node in readers):
        raise GraphoptError(
            f"{node_label(integers)}: the file computes with integers (QOperator format or dynamic quantization), "
            f"which have no gradient: train the file from before the quantization and quantize what is trained"
        )
