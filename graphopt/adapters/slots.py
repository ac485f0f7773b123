"""Add slots for adapters to a model: inputs whose defaults have rank 0, so that the model computes what it did.

One file takes adapters of every rank: y' = f y + (x A) B, with `NAME.lora_A` and `NAME.lora_B` of symbolic rank, and
`NAME.lora_factor` for DoRA, whose default is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.adapters.combined import LORA_A, CombinedAdapter
from graphopt.adapters.targets import AdapterTarget, WeightSource, readers_of
from graphopt.errors import GraphoptError, nearest
from graphopt.graph.emitter import Emitter
from graphopt.graph.merging import Adapted
from graphopt.graph.operators import DYNAMIC_PRODUCTS, MICROSOFT
from graphopt.graph.postprocessing import DEQUANTIZE
from graphopt.graph.values import dtype_of, given, like, node_label, producer_of, swap
from graphopt.graph.weight_kinds import weight_kinds_of


class _Untyped(Emitter):
    """Emit nodes without types, which values of a file may lack."""

    def _infer_shapes(self, node: ir.Node) -> None:
        pass


def add_slots(proto: onnx.ModelProto, adapters: Sequence[CombinedAdapter], *, filled: bool = False) -> None:
    """Add slots to a model in place, of which everything but the nodes beside them stays as it is.

    Args:
        adapters: the adapters that the slots are for.
        filled: whether these fill the slots for good, which are then no inputs.

    Raises:
        GraphoptError: the model lacks a weight or a product that reads it, or has slots already. Nothing is changed.
    """
    model = ir.from_proto(proto)
    known = ir.convenience.create_value_mapping(model.graph)
    weights = {name: x for name, x in known.items() if x.is_initializer() or _is_constant(x)}
    found = [(x, _targets(weights, x.first.note), x.arrays() if filled else {}) for x in adapters]
    names = {x.name for x in [*model.graph.inputs, *model.graph.initializers.values()]}
    for adapter in adapters:
        if f"{adapter.name}.{LORA_A}" in names:
            raise GraphoptError(
                f"slots: expected a model without '{adapter.name}.{LORA_A}', found one with slots: take the original"
            )
    for adapter, targets, arrays in found:
        dtype, values = _type_read(targets[0]), []
        for name, default, dims in adapter.defaults():
            values.append(ir.val(name, dtype, dims))
            array = np.ascontiguousarray(arrays.get(name, default).astype(dtype.numpy()))
            proto.graph.initializer.append(ir.to_proto(ir.tensor(array, dtype=dtype, name=name)))
            if not filled:
                proto.graph.input.append(ir.to_proto(values[-1]))
        for target in targets:
            _join(model, target, *values)
    del proto.graph.node[:]
    proto.graph.node.extend(map(ir.to_proto, model.graph))


def _targets(weights: Mapping[str, ir.Value], note: Adapted) -> list[AdapterTarget]:
    """Return the places where a model reads the weight of an adapter as the training graph does."""
    if note.weight not in weights:
        meant = nearest(note.weight, weights)
        raise GraphoptError(
            f"slots: expected a model with the weight {note.weight!r}, found none{f', but {meant!r}' if meant else ''}"
            ": give the file that was compiled"
        )
    source, found = WeightSource(weights[note.weight]), []
    for node, index in readers_of(source.weight):
        kind, w = weight_kinds_of(node).get(index), node.inputs[index]
        if kind is None and node.op_type.startswith(("QGemm", "QLinear")):
            raise GraphoptError(
                f"into: weight {note.weight!r}: {node.op_type} rounds its product to integers before an adapter can be "
                "added: leave out into, and the trained model has the adapter between QuantizeLinear and "
                "DequantizeLinear, or save the adapter alone"
            )
        if kind is None and node.domain:  # the training graph has other operators in its place
            raise GraphoptError(
                f"slots: weight {note.weight!r}: expected a node that reads it as a {note.kind}, found "
                f"{node.domain}::{node.op_type}, of which this is unknown: passes.weight_kind({node.domain!r}, "
                f"{node.op_type!r}, {index}, ...) registers it"
            )
        if kind is not None and kind.name == note.kind and w is not None:
            found.append(AdapterTarget(node, index, kind, source, w if kind.x is None else _product(node)))
    if not found:
        raise GraphoptError(
            f"slots: weight {note.weight!r}: expected a node that reads it as a {note.kind}, found none"
        )
    return found


def _product(node: ir.Node) -> ir.Value:
    """Return what a node multiplies: of integers, what a Cast and a Mul by the scales make of them."""
    y = node.outputs[0]
    for op_type in ("Cast", "Mul") if node.op_type == "MatMulInteger" else ():
        readers = list(y.consumers())
        if [reader.op_type for reader in readers] != [op_type]:
            raise GraphoptError(
                f"slots: {node_label(node)}: expected one {op_type} behind it, as quantize_dynamic writes it, found "
                f"{len(readers)} other readers"
            )
        y = readers[0].outputs[0]
    return y


def _is_constant(x: ir.Value) -> bool:
    node = x.producer()
    return node is not None and node.op_type == "Constant" and "value" in node.attributes


def _type_read(target: AdapterTarget) -> ir.DataType:
    """Return the type in which a node multiplies by a weight."""
    if target.node.op_type in DYNAMIC_PRODUCTS:
        return ir.DataType.FLOAT
    scale = target.reading.scale
    return _type_of(target.node.inputs[target.index if scale is None else scale])


def _type_of(x: ir.Value | None) -> ir.DataType:
    """Return the type of a weight after nodes that turn, cast or dequantize it."""
    x = given(x)
    node = x.producer()
    if node is None:
        return dtype_of(x)
    if _is_constant(x):
        return node.attributes["value"].as_tensor().dtype
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to"))
    return _type_of(node.inputs[1 if node.op_type == DEQUANTIZE else 0])


def _join(model: ir.Model, target: AdapterTarget, a: ir.Value, b: ir.Value, *factors: ir.Value) -> None:
    """Add the product with a slot to what a node computes, or to the weight that it reads."""
    node, y, is_weight = target.node, target.y, target.is_weight_itself
    place = node if is_weight else producer_of(y)
    graph, name = node.graph, next(x.name for x in place.outputs if x.name)
    assert isinstance(graph, ir.Graph)
    op: Emitter = _Untyped(model)
    op, count = (op if graph is model.graph else op.within(graph)), len(graph)
    changed = like(ir.val(f"{name}.slot.{target.index}"), y)
    if not is_weight:
        swap(y, changed)
        y.name = f"{name}.slot"
    own = target.laid_out(op)
    base, delta = own.y, own.up(op, own.down(op, own.x, a), b)
    axis = 1 - len(a.shape or ()) if own.reading.is_filters else own.axis
    for factor in factors:
        bias, is_taken = (None, False) if is_weight else _take_bias(target)
        if bias is not None:
            bias = own.scaled_bias(op, bias, like=b)
            bias = _along(op, bias, axis) if own.reading.is_filters else bias
            delta, base = op.Add(delta, bias), base if is_taken else op.Sub(base, bias)
        base = op.Mul(base, _along(op, factor, axis))
    if is_weight:
        node.replace_input_with(target.index, target.given_back(op, op.Add(base, delta)))
    else:
        op.call_op("Add", [base, delta], {}, outputs=[changed])
    made = list(graph)[count:]
    graph.remove(made)
    (graph.insert_before if is_weight else graph.insert_after)(place, made)
    for i, each in enumerate(made):
        each.outputs[0].name = name if each.outputs[0] is changed else f"{name}.slot.{target.index}.{i}"
        each.name = f"{each.outputs[0].name}/slot"


def _take_bias(target: AdapterTarget) -> tuple[ir.Value | None, bool]:
    """Return the bias of a node, and whether it is gone from there, where it is optional."""
    node, index = target.node, target.reading.bias
    if index is None or index >= len(node.inputs):
        return None, False
    bias, is_optional = node.inputs[index], node.domain in ("", MICROSOFT)
    if is_optional:
        node.replace_input_with(index, None)
        while node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
    return bias, is_optional


def _along(op: Emitter, vector: ir.Value, axis: int) -> ir.Value:
    """Emit a vector so that it broadcasts along an axis."""
    return vector if axis == -1 else op.Reshape(vector, op.constant([-1, *[1] * (-axis - 1)]))
