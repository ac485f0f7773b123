"""Add slots for adapters to a model: inputs whose defaults have rank 0, so that the model computes what it did.

One file takes adapters of every rank: y' = f y + (x A) B, with `NAME.lora_A` and `NAME.lora_B` of symbolic rank, and
`NAME.lora_factor` for DoRA, whose default is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.helper import get_attribute_value, make_node, make_tensor_value_info, tensor_dtype_to_np_dtype

from graphopt.errors import GraphoptError, nearest
from graphopt.graph.operators import RECURRENT, VIEWS

LORA_A, LORA_B, LORA_FACTOR = "lora_A", "lora_B", "lora_factor"
# The operators that multiply by a weight, by the kind of an adapter, with the numbers of the input that is the weight.
_PRODUCTS: dict[str, dict[str, tuple[int, ...]]] = {
    "product": {"MatMul": (0, 1), "Gemm": (0, 1), "MatMulNBits": (1,)},
    "convolution": {"Conv": (1,)},
    "transposed convolution": {"ConvTranspose": (1,)},
    "embedding": {"Gather": (0,), "GatherBlockQuantized": (0,)},
    "recurrence": {op_type: (1, 2) for op_type in RECURRENT},
}
_SCALES = {
    "MatMulNBits": 2,
    "GatherBlockQuantized": 2,
    "DequantizeLinear": 1,
}  # inputs of the type of the numbers
_BIASES = {"Gemm": 2, "Conv": 2, "ConvTranspose": 2, "MatMulNBits": 5}  # inputs that are added to the product
_PASSING = VIEWS | {"Cast", "DequantizeLinear", "Transpose"}


@dataclass(frozen=True)
class AdapterSlot:
    """Describe the slots of one weight.

    Args:
        name: the name of the slots, to which `.lora_A` and `.lora_B` are appended.
        weight: the name of the weight in the model.
        kind: what reads the weight, as `graphopt.graph.metadata.Adapted` has it.
        a, b: the shapes of A and B, with 0 for the rank.
        factor: whether there is a factor of the outputs.
    """

    name: str
    weight: str
    kind: str
    a: Sequence[int]
    b: Sequence[int]
    factor: bool = False


@dataclass
class _Reader:
    """Hold a node that multiplies by a weight, and write the nodes that join a slot to it."""

    graph: onnx.GraphProto
    node: onnx.NodeProto
    index: int
    dtype: int
    made: list[onnx.NodeProto] = field(default_factory=list)

    def emit(self, op_type: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        """Make a node, and return the name of its output."""
        output = next(filter(None, self.node.output))
        name = to or f"{output}.slot.{self.index}.{len(self.made)}"
        self.made.append(make_node(op_type, inputs, [name], f"{name}/slot", **attributes))
        return name

    def constant(self, numbers: Sequence[int]) -> str:
        """Make a constant of integers, and return its name."""
        return self.emit("Constant", value=numpy_helper.from_array(np.array(numbers, np.int64)))

    def swapped(self, x: str, rank: int) -> str:
        """Make a node that exchanges the last two axes."""
        return self.emit("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])


def add_slots(
    model: onnx.ModelProto, slots: Sequence[AdapterSlot], arrays: Mapping[str, np.ndarray] | None = None
) -> None:
    """Add slots to a model in place.

    Args:
        model: the model.
        slots: the slots.
        arrays: by name, numbers that fill the slots for good, which are then no inputs.

    Raises:
        GraphoptError: the model lacks a weight or a product that reads it, or has slots already. Nothing is changed.
    """
    found = [(slot, list(_readers(model, slot))) for slot in slots]
    names = {x.name for x in [*model.graph.input, *model.graph.initializer]}
    for slot in slots:
        if f"{slot.name}.{LORA_A}" in names:
            raise GraphoptError(
                f"slots: expected a model without '{slot.name}.{LORA_A}', found one with slots: take the original"
            )
    for slot, readers in found:
        _declare(model.graph, slot, readers[0].dtype, arrays or {})
        for reader in readers:
            _join(reader, slot)


def _readers(model: onnx.ModelProto, slot: AdapterSlot) -> Iterator[_Reader]:
    """Yield the products that read a weight, through nodes that only turn, cast or dequantize it."""
    types = {x.name: x.data_type for x in model.graph.initializer}
    for _, node in _nodes(model.graph):
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            types[node.output[0]] = node.attribute[0].t.data_type
    if slot.weight not in types:
        meant = nearest(slot.weight, types)
        raise GraphoptError(
            f"slots: expected a model with the weight {slot.weight!r}, found none{f', but {meant!r}' if meant else ''}"
            ": give the file that was compiled"
        )
    same = {slot.weight}
    is_read = False
    for graph, node in list(_nodes(model.graph)):
        for index, x in enumerate(node.input):
            if x not in same:
                continue
            if node.op_type in _SCALES and (scale := types.get(node.input[_SCALES[node.op_type]])):
                types[x] = scale
            if index in _PRODUCTS[slot.kind].get(node.op_type, ()):
                is_read = True
                yield _Reader(graph, node, index, types[x])
            elif index == 0 and node.op_type in _PASSING:
                same.add(node.output[0])
                to = [attribute.i for attribute in node.attribute if attribute.name == "to"]
                types[node.output[0]] = to[0] if to else types[x]
    if not is_read:
        raise GraphoptError(
            f"slots: weight {slot.weight!r}: expected a node that reads it as a {slot.kind}, found none"
        )


def _nodes(graph: onnx.GraphProto) -> Iterator[tuple[onnx.GraphProto, onnx.NodeProto]]:
    """Yield the nodes of a graph and of the bodies of its nodes, each with its graph."""
    for node in graph.node:
        yield graph, node
        for attribute in node.attribute:
            for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _nodes(body)


def _declare(graph: onnx.GraphProto, slot: AdapterSlot, dtype: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Add the inputs of a slot, with their defaults, or the numbers that fill it."""
    symbols = {LORA_A: f"{slot.name}.rank", LORA_B: f"{slot.name}.rank"}
    if "convolution" in slot.kind:  # groups may share the rank
        symbols[LORA_B] += "_of_group"
        if slot.kind != "convolution":
            symbols[LORA_A] += "_of_group"
    kind = tensor_dtype_to_np_dtype(dtype)
    declared = [(LORA_A, np.zeros(slot.a, kind)), (LORA_B, np.zeros(slot.b, kind))]
    if slot.factor:
        declared.append((LORA_FACTOR, np.ones(1, kind)))
        symbols[LORA_FACTOR] = f"{slot.name}.outputs"
    for suffix, default in declared:
        name = f"{slot.name}.{suffix}"
        if name in arrays:
            graph.initializer.append(
                numpy_helper.from_array(np.ascontiguousarray(arrays[name].astype(kind)), name)
            )
            continue
        dims = (
            [symbols[suffix]] if suffix == LORA_FACTOR else [dim or symbols[suffix] for dim in default.shape]
        )
        graph.initializer.append(numpy_helper.from_array(default, name))
        graph.input.append(make_tensor_value_info(name, dtype, dims))


def _join(reader: _Reader, slot: AdapterSlot) -> None:
    """Insert the nodes that add the product with a slot to what a node computes."""
    a, b, factor = (f"{slot.name}.{suffix}" for suffix in (LORA_A, LORA_B, LORA_FACTOR))
    node, nodes = reader.node, reader.graph.node
    place = next(i for i, other in enumerate(nodes) if other.output == node.output)
    if slot.kind == "recurrence":
        rank = len(slot.a)
        delta = reader.emit("MatMul", reader.swapped(b, rank), reader.swapped(a, rank))
        base = node.input[reader.index]
        if slot.factor:
            base = reader.emit("Mul", base, reader.emit("Reshape", factor, reader.constant([-1, 1])))
        node.input[reader.index] = reader.emit("Add", base, delta)
    else:
        y, delta = node.output[0], _delta(reader, slot, a, b)
        base = f"{y}.slot"
        if slot.factor:
            delta, factor = _with_bias(reader, slot, delta, factor)
            node.output[0] = base
            base = reader.emit("Mul", base, factor)
        node.output[0] = f"{y}.slot"
        reader.emit("Add", base, delta, to=y)
        place += 1
    for offset, new in enumerate(reader.made):
        nodes.insert(place + offset, new)


def _delta(reader: _Reader, slot: AdapterSlot, a: str, b: str) -> str:
    """Emit the product of a node's input with A and B."""
    node = reader.node
    attributes: dict[str, Any] = {x.name: get_attribute_value(x) for x in node.attribute}
    if slot.kind == "embedding":
        return reader.emit("MatMul", reader.emit("Gather", a, node.input[1]), b)
    x, rank = node.input[1 - reader.index], len(slot.a)
    if "convolution" in slot.kind:
        attributes.pop("kernel_shape", None)
        h = reader.emit(node.op_type, x, a, **attributes)
        return reader.emit("Conv", h, b, group=attributes.get("group", 1))
    if attributes.get("transB" if reader.index == 0 else "transA", 0):
        x = reader.swapped(x, 2)
    if reader.index == 0:
        delta = reader.emit(
            "MatMul", reader.swapped(b, rank), reader.emit("MatMul", reader.swapped(a, rank), x)
        )
    else:
        delta = reader.emit("MatMul", reader.emit("MatMul", x, a), b)
    alpha = attributes.get("alpha", 1.0) if node.op_type == "Gemm" else 1.0
    if alpha != 1.0:
        numbers = np.array(alpha, tensor_dtype_to_np_dtype(reader.dtype))
        delta = reader.emit("Mul", delta, reader.emit("Constant", value=numpy_helper.from_array(numbers)))
    return delta


def _with_bias(reader: _Reader, slot: AdapterSlot, delta: str, factor: str) -> tuple[str, str]:
    """Take the bias from a node, add it to delta, and return both that and the factor as they broadcast."""
    node, axes = reader.node, len(slot.a) - 2
    if reader.index == 0 and slot.kind == "product":
        axes = 1
    elif "convolution" not in slot.kind:
        axes = 0
    index = _BIASES.get(node.op_type, len(node.input))
    bias = node.input[index] if index < len(node.input) else ""
    if bias:
        node.input[index] = ""
        while not node.input[-1]:
            node.input.pop()
        beta = next((attribute.f for attribute in node.attribute if attribute.name == "beta"), 1.0)
        if beta != 1.0:
            numbers = np.array(beta, tensor_dtype_to_np_dtype(reader.dtype))
            bias = reader.emit("Mul", bias, reader.emit("Constant", value=numpy_helper.from_array(numbers)))
    if axes:
        shape = reader.constant([-1] + [1] * axes)
        factor = reader.emit("Reshape", factor, shape)
        if bias and node.op_type != "Gemm":
            bias = reader.emit("Reshape", bias, shape)
    return (reader.emit("Add", delta, bias) if bias else delta), factor
