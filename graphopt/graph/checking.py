"""Check what the ONNX checker leaves unchecked in a file, so that other modules may trust a loaded model."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import onnx
import onnx.external_data_helper as external
import onnx_ir as ir
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from graphopt.errors import GraphoptError
from graphopt.graph.limits import Limits, graphs_with_depth

KERNELS = "ai.graphopt"  # the domain of compiled kernels, which only lowering may write
_MANY = 2**48  # elements: more than fits into any memory, and far from overflow
EXTERNAL = onnx.TensorProto.EXTERNAL


def check_proto(proto: onnx.ModelProto) -> None:
    """Raise an error unless text is UTF-8, shapes are possible and tensors have the size that their shape requires.

    Attribute references must name an attribute of the surrounding function.
    """
    for message in messages(proto):
        if isinstance(message, onnx.TensorProto):
            _check_tensor(message)
        elif isinstance(message, onnx.TensorShapeProto):
            dims = [dim.dim_value for dim in message.dim if dim.HasField("dim_value")]
            if math.prod(max(dim, 1) for dim in dims) > _MANY:
                raise GraphoptError(f"expected shapes of at most {_MANY:,} elements, found {dims}")
    _check_references(proto.graph, "the graph", ())
    for function in proto.functions:
        own = [*function.attribute, *(attribute.name for attribute in function.attribute_proto)]
        _check_references(function, f"function {function.domain}::{function.name}", own)


def check_domains(model: ir.Model) -> None:
    """Raise an error if a node at any depth or a function of a model has the domain of compiled kernels.

    An opset of the domain is removed.
    """
    wholes: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for whole in wholes:
        nodes = (node for graph, _ in graphs_with_depth(whole) for node in graph)
        compiled = next((node for node in nodes if node.domain == KERNELS), None)
        if compiled is not None:
            names = [compiled.name, *(y.name for y in compiled.outputs)]
            raise _reserved(f"node {next(filter(None, names), '')[:60]!r}")
        whole.opset_imports.pop(KERNELS, None)  # ONNX Runtime writes all domains that its process has used
    if any(function.domain == KERNELS for function in model.functions.values()):
        raise _reserved("a function")


def _reserved(title: str) -> GraphoptError:
    return GraphoptError(
        f"{title}: expected operators of the model, found the domain {KERNELS!r} of graphopt's compiled kernels, which "
        "exist only while a step runs: pass the model that was compiled"
    )


def tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor in a model: weights, and tensors in attributes."""
    return (message for message in messages(proto) if isinstance(message, onnx.TensorProto))


def nodes_of(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node in a model's graphs and functions."""
    return (message for message in messages(proto) if isinstance(message, onnx.NodeProto))


def check_external(proto: onnx.ModelProto, folder: Path, limits: Limits) -> None:
    """Raise an error unless offsets and lengths of external data are whole numbers and lie inside the files.

    Tensors may share bytes of a file, as tied weights do, if their total size is not much larger than the files.
    """
    asked, sizes = 0, {}
    for tensor in list(tensors(proto)):  # complete first, so that all text is known to be UTF-8
        if tensor.data_location != EXTERNAL:
            continue
        try:
            info = external.ExternalDataInfo(tensor)
        except ValueError as error:
            raise GraphoptError(f"tensor {tensor.name!r}: external data: {error}") from error
        try:
            size = os.stat(folder / info.location).st_size
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise GraphoptError(
                f"tensor {tensor.name!r}: external data {info.location!r}: {reason}"
            ) from error
        start = info.offset or 0
        length = size - start if info.length is None else info.length
        if not 0 <= start <= start + length <= size:
            raise GraphoptError(
                f"tensor {tensor.name!r}: external data: expected bytes {start:,} to {start + length:,} of "
                f"{info.location!r}, found a file of {size:,} bytes"
            )
        asked += length
        sizes[info.location] = size
    if asked > sum(sizes.values()) + limits.constant_bytes:
        raise GraphoptError(
            f"external data: expected tensors of about {sum(sizes.values()):,} bytes, the size of the files, found "
            f"{asked:,}: limits.constant_bytes={asked} allows it"
        )


def _check_references(whole: Message, title: str, names: Collection[str]) -> None:
    for message in messages(whole):
        if isinstance(message, onnx.AttributeProto) and message.ref_attr_name not in ("", *names):
            raise GraphoptError(
                f"attribute {message.name!r}: expected a reference to an attribute of {title} "
                f"({', '.join(names) or 'which has none'}), found {message.ref_attr_name!r}"
            )


def messages(proto: Message) -> Iterator[Message]:
    """Yield all messages of a model, parents first; without recursion, because messages may nest to any depth."""
    waiting: list[Message] = [proto]
    while waiting:
        message = waiting.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting.extend(value if field.is_repeated else [value])
            elif field.type == FieldDescriptor.TYPE_STRING:
                for text in value if field.is_repeated else [value]:
                    if not isinstance(text, str):
                        kind, name = (
                            message.DESCRIPTOR.name.removesuffix("Proto"),
                            getattr(message, "name", ""),
                        )
                        raise GraphoptError(
                            f"{kind.lower()} {name!r}: {field.name}: expected UTF-8 text, found {text!r}"
                        )


def _check_tensor(tensor: onnx.TensorProto) -> None:
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        dtype = ir.DataType.UNDEFINED
    if dtype is ir.DataType.UNDEFINED:
        raise GraphoptError(
            f"tensor {tensor.name!r}: expected an element type of ONNX, found {tensor.data_type}"
        )
    if any(dim < 0 for dim in tensor.dims):
        raise GraphoptError(
            f"tensor {tensor.name!r}: expected dimensions of 0 or more, found {list(tensor.dims)}"
        )
    expected, found, unit = _amounts(tensor, dtype, math.prod(tensor.dims))
    if expected != found:
        raise GraphoptError(
            f"tensor {tensor.name!r}: expected {expected:,} {unit}, as {dtype.name.lower()}{list(tensor.dims)} has, "
            f"found {found:,}"
        )


def _amounts(tensor: onnx.TensorProto, dtype: ir.DataType, count: int) -> tuple[int, int, str]:
    """Return the expected size of a tensor, its size in the file, and the unit of both."""
    if dtype is ir.DataType.STRING:
        return count, len(tensor.string_data), "texts"
    size = (count * dtype.bitwidth + 7) // 8
    if tensor.HasField("raw_data") or tensor.data_location == EXTERNAL:
        return size, len(tensor.raw_data), "bytes"
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    numbers = len(getattr(tensor, field))
    if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        return 2 * count, numbers, "numbers"
    return size if dtype.bitwidth < 8 else count, numbers, "numbers"  # a byte contains several 4-bit numbers
