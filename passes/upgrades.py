"""Bring nodes of older opsets to the working opset, each with the meaning that it has in its file.

A change is registered for the opset that made it. All other changes of ONNX up to the working opset only add element
types, attributes or optional inputs whose defaults mean what was meant before: `tests/test_upgrades.py` goes through
ONNX's schemas, and runs each node as it is in the file and as it is converted.
See https://github.com/onnx/onnx/blob/main/docs/Changelog.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import schema_of
from graphopt.graph.opsets import OPSET
from graphopt.graph.traversal import all_nodes, sort, subgraphs
from graphopt.graph.values import constant_of, given, operator_of, rank, swap
from passes.lowering.registry import freeze

# A change edits a node in place, or returns what replaces its first output.
Change = Callable[[Emitter, ir.Node], ir.Value | None]

CHANGES: dict[str, dict[int, Change]] = {}

_ARITHMETIC = ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
_REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
    *("ReduceProd", "ReduceSumSquare"),
)
_MODES = {"bilinear": "linear", "bicubic": "cubic"}  # of GridSample: names before opset 20, and names since


def upgrade(model: ir.Model) -> None:
    """Convert the default domain from an older opset to the working opset. Functions keep their opset.

    Raises:
        GraphoptError: a node means something that the working opset cannot express. The error names the node.
    """
    version = model.opset_imports.setdefault("", OPSET)
    if version >= OPSET:
        return
    model.opset_imports[""] = OPSET
    with Emitter(model) as op:
        _upgrade(op, model.graph, version)


def align(model: ir.Model, functions: Iterable[ir.Function]) -> None:
    """Give functions the model's opset, so that they can be inlined, if their operators are the same in both.

    Raises:
        GraphoptError: an operator changed in between. ONNX's checker and ONNX Runtime refuse such files.
    """
    version = model.opset_imports.setdefault("", OPSET)
    for function in functions:
        own = function.opset_imports.get("", version)
        for node in all_nodes(function) if own != version else ():
            here, there = (schema_of("", node.op_type, opset) for opset in (own, version))
            if node.domain == "" and (here and here.since_version) != (there and there.since_version):
                raise GraphoptError(
                    f"function {function.domain}::{function.name}: expected operators that are the same in its opset "
                    f"{own} and the model's opset {version}, found {node.op_type}: inline the function before"
                )
        function.opset_imports[""] = version


def _upgrade(op: Emitter, graph: ir.Graph, version: int) -> None:
    sort(graph)
    for node in list(graph):
        for body in subgraphs(node):
            with op.within(body) as inner:
                _upgrade(inner, body, version)
        if node.domain:
            continue
        node.version = None
        node.attributes.pop("consumed_inputs", None)
        for change in [x for since, x in CHANGES.get(node.op_type, {}).items() if version < since]:
            try:
                result = change(op, node)
            except ValueError as error:  # a GraphoptError too
                raise GraphoptError(
                    f"{operator_of(node)} node {node.name or node.outputs[0].name!r} of opset {version}: {line(error)}"
                ) from error
            if result is not None:
                result.type, result.shape = (
                    node.outputs[0].type or result.type,
                    node.outputs[0].shape or result.shape,
                )
                swap(node.outputs[0], result)
                graph.remove(node, safe=True)
                break
        else:
            if any(y.type is None or y.shape is None for y in node.outputs):
                op.infer(node)
    sort(graph)


def since(opset: int, *op_types: str) -> Callable[[Change], Change]:
    """Register what becomes of nodes from before an opset. Register the opsets of an operator in order."""

    def register(change: Change) -> Change:
        for op_type in op_types:
            CHANGES.setdefault(op_type, {})[opset] = change
        return change

    return register


def _attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Remove an attribute of a node and return its value."""
    attribute = node.attributes.pop(name, None)
    if attribute is not None and attribute.is_ref():
        raise GraphoptError(f"expected an attribute {name} with a value, found a reference: inline the function")
    return default if attribute is None else attribute.value


def _set(node: ir.Node, **attributes: Any) -> None:
    node.attributes.update({x.name: x for x in ir.convenience.convert_attributes(attributes)})


def _set_input(node: ir.Node, index: int, value: ir.Value) -> None:
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(index, value)


def _becomes_input(opset: int, index: int, name: str, *op_types: str) -> None:
    """Register that whole numbers, which were an attribute before an opset, are an input since."""

    def move(op: Emitter, node: ir.Node) -> None:
        numbers = _attribute(node, name)
        if numbers is not None:
            _set_input(node, index, op.constant(np.array(numbers, np.int64)))

    since(opset, *op_types)(move)


def _input(node: ir.Node, index: int) -> ir.Value:
    x = node.inputs[index] if index < len(node.inputs) else None
    if x is None:
        raise GraphoptError(f"expected an input {index}, found none")
    return x


def _rank(x: ir.Value) -> int:
    if x.shape is None:
        raise GraphoptError(
            f"expected an input of known rank, found {x.name!r}, whose rank cannot be inferred: declare its shape in "
            f"value_info"
        )
    return rank(x)


@since(7, *_ARITHMETIC)
def _broadcast(op: Emitter, node: ir.Node) -> None:
    """Align the second operand with the axes of the first that begin at `axis`; by default, with the last ones."""
    axis, broadcasts = _attribute(node, "axis"), _attribute(node, "broadcast", 0)
    a, b = _input(node, 0), _input(node, 1)
    if not broadcasts or axis is None:
        return
    after = _rank(a) - axis % _rank(a) - _rank(b)
    if after > 0:
        node.replace_input_with(1, op.Unsqueeze(b, [*range(_rank(b), _rank(b) + after)]))


@since(7, "Gemm")
def _gemm(op: Emitter, node: ir.Node) -> None:
    _attribute(node, "broadcast")  # C aligned with the last axes, as it always does since


@since(7, "PRelu")
def _prelu(op: Emitter, node: ir.Node) -> None:
    """Align a vector of slopes with the channels, which are the second axis."""
    x, slope = _input(node, 0), _input(node, 1)
    if _rank(slope) == 1 and _rank(x) > 2:
        node.replace_input_with(1, op.Unsqueeze(slope, [*range(1, _rank(x) - 1)]))


@since(7, "BatchNormalization")
def _test_mode(op: Emitter, node: ir.Node) -> None:
    if not _attribute(node, "is_test", 0):
        _set(node, training_mode=1)


@since(9, "BatchNormalization")
def _over_space(op: Emitter, node: ir.Node) -> ir.Value | None:
    """Normalize each number by statistics of its own if `spatial` is 0."""
    if _attribute(node, "spatial", 1):
        return None
    if "training_mode" in node.attributes or any(y.uses() or y.is_graph_output() for y in node.outputs[1:]):
        raise GraphoptError("expected spatial=1 in training mode, found 0: export the model for inference")
    x, scale, shift, mean, variance = map(given, node.inputs)
    deviation = op.Sqrt(freeze(variance) + node.attributes.get_float("epsilon", 1e-5))
    return (x - freeze(mean)) / deviation * scale + shift


@since(14, "BatchNormalization")
def _training_mode(op: Emitter, node: ir.Node) -> None:
    """Normalize by the batch if the node returns statistics, which is how older nodes ask for it."""
    if any(y.uses() or y.is_graph_output() for y in node.outputs[3:]):
        raise GraphoptError(
            "expected no reader of the batch's own statistics, found one: export with opset 14 or newer"
        )
    if any(y.uses() or y.is_graph_output() for y in node.outputs[1:]):
        _set(node, training_mode=1)
    node.resize_outputs(3 if "training_mode" in node.attributes else 1)


@since(6, "Cast")
def _cast(op: Emitter, node: ir.Node) -> None:
    name = str(_attribute(node, "to", "")).upper()
    if name not in ir.DataType.__members__:
        raise GraphoptError(f"expected the name of an element type in `to`, found {name!r}")
    _set(node, to=ir.DataType[name].value)


@since(11, "Clip")
def _clip(op: Emitter, node: ir.Node) -> None:
    """Make inputs of the bounds, unless they are those of float32, which leave every number as it is."""
    x, ends = _input(node, 0), np.finfo(np.float32)
    for i, (name, end) in enumerate([("min", ends.min), ("max", ends.max)], 1):
        bound = _attribute(node, name)
        if bound is not None and np.float32(bound) != end:
            _set_input(node, i, op.constant(bound, x))


@since(4, "Concat")
def _concat(op: Emitter, node: ir.Node) -> None:
    _set(node, axis=_attribute(node, "axis", 1))


@since(20, "DFT")
def _dft(op: Emitter, node: ir.Node) -> None:
    _set_input(node, 2, op.constant(np.array(_attribute(node, "axis", 1), np.int64)))


@since(7, "Dropout")
def _dropout(op: Emitter, node: ir.Node) -> None:
    if not _attribute(node, "is_test", 0):
        _set_input(node, 2, op.constant(True))


@since(10, "Dropout")
def _mask(op: Emitter, node: ir.Node) -> None:
    if len(node.outputs) < 2 or not (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        return
    x, mask = _input(node, 0), node.outputs[1]
    numbers = op.Cast(x, to=x.dtype)
    swap(mask, numbers)
    mask.type = ir.TensorType(ir.DataType.BOOL)
    numbers.producer().replace_input_with(0, mask)


@since(12, "Dropout")
def _ratio(op: Emitter, node: ir.Node) -> None:
    ratio = _attribute(node, "ratio")
    if ratio is not None:
        _set_input(node, 1, op.constant(ratio, _input(node, 0)))


@since(20, "GridSample")
def _grid_sample(op: Emitter, node: ir.Node) -> None:
    mode = _attribute(node, "mode", "bilinear")
    _set(node, mode=_MODES.get(mode, mode))


@since(21, "GroupNormalization")
def _group_normalization(op: Emitter, node: ir.Node) -> None:
    """Repeat scale and shift, of which a group has one, for each of its channels."""
    x, groups = _input(node, 0), node.attributes.get_int("num_groups")
    channels = op.Div(op.shape_of(x, 1, 2), [groups])
    for i in (1, 2):
        each = op.Expand(op.Unsqueeze(_input(node, i), [1]), op.Concat([1], channels, axis=0))
        node.replace_input_with(i, op.Reshape(each, [-1]))


@since(2, "GlobalLpPool", "LpPool")
def _whole_power(op: Emitter, node: ir.Node) -> None:
    p = float(_attribute(node, "p", 2.0))
    if not p.is_integer():
        raise GraphoptError(f"expected a whole number p, found {p}")
    _set(node, p=int(p))


@since(2, "Pad")
def _paddings(op: Emitter, node: ir.Node) -> None:
    _set(node, pads=_attribute(node, "paddings", ()))


@since(11, "Pad")
def _pad(op: Emitter, node: ir.Node) -> None:
    _set_input(node, 1, op.constant(np.array(_attribute(node, "pads", ()), np.int64)))
    value = _attribute(node, "value", 0.0)
    if value:
        _set_input(node, 2, op.constant(value, _input(node, 0)))


@since(7, "GRU", "LSTM", "RNN")
def _sequence(op: Emitter, node: ir.Node) -> None:
    y = node.outputs[0]
    if not _attribute(node, "output_sequence", 0) and (y.uses() or y.is_graph_output()):
        raise GraphoptError("expected output_sequence=1 for the sequence that is read, found 0")


_becomes_input(5, 1, "shape", "Reshape")
_becomes_input(13, 1, "axes", "ReduceSum", "Squeeze", "Unsqueeze")
_becomes_input(18, 1, "axes", *_REDUCTIONS)


@since(16, "RoiAlign")
def _roi_align(op: Emitter, node: ir.Node) -> None:
    _set(node, coordinate_transformation_mode="output_half_pixel")


@since(9, "Scan")
def _scan(op: Emitter, node: ir.Node) -> None:
    raise GraphoptError("expected a Scan without a batch axis, found one: export with opset 9 or newer")


@since(11, "Scatter")
def _scatter(op: Emitter, node: ir.Node) -> None:
    node.op_type = "ScatterElements"


@since(6, "Selu")
def _selu(op: Emitter, node: ir.Node) -> None:
    _set(node, alpha=_attribute(node, "alpha", 1.6732), gamma=_attribute(node, "gamma", 1.0507))


@since(10, "Slice")
def _slice(op: Emitter, node: ir.Node) -> None:
    for i, name in enumerate(("starts", "ends", "axes"), 1):
        numbers = _attribute(node, name)
        if numbers is not None:
            _set_input(node, i, op.constant(np.array(numbers, np.int64)))


@since(13, "Hardmax", "LogSoftmax", "Softmax")
def _along_all_later_axes(op: Emitter, node: ir.Node) -> ir.Value | None:
    """Normalize over `axis` and all axes after it together."""
    x, axis = _input(node, 0), _attribute(node, "axis", 1)
    if x.shape is not None and axis % max(rank(x), 1) == rank(x) - 1:
        _set(node, axis=-1)
        return None
    rows = op.call_op(node.op_type, [op.Flatten(x, axis=axis)], {"axis": -1})
    return op.Reshape(rows, op.Shape(x))


@since(2, "Split")
def _first_split(op: Emitter, node: ir.Node) -> None:
    if "axis" not in node.attributes:
        raise GraphoptError("expected an attribute axis, found none: export with opset 2 or newer")
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        parts = constant_of(node.inputs[1])
        if parts is None:
            raise GraphoptError("expected constant sizes of parts, found others: export with opset 13 or newer")
        _set(node, split=parts.astype(np.int64).tolist())
        node.replace_input_with(1, None)
        node.resize_inputs(1)


_becomes_input(13, 1, "split", "Split")


@since(18, "Split")
def _counted(op: Emitter, node: ir.Node) -> None:
    if len(node.inputs) < 2 or node.inputs[1] is None:
        _set(node, num_outputs=len(node.outputs))


@since(6, "Tile")
def _tile(op: Emitter, node: ir.Node) -> None:
    """Repeat one axis alone."""
    x, (times, axis) = _input(node, 0), (constant_of(each) for each in (_input(node, 1), _input(node, 2)))
    if times is None or axis is None:
        raise GraphoptError("expected a constant axis and number of tiles, found others: export with opset 6 or newer")
    repeats = np.ones(_rank(x), np.int64)
    repeats[int(axis.item())] = int(times.item())
    node.replace_input_with(2, None)
    node.resize_inputs(2)
    node.replace_input_with(1, op.constant(repeats))


@since(10, "TopK")
def _top_k(op: Emitter, node: ir.Node) -> None:
    _set_input(node, 1, op.constant(np.array([_attribute(node, "k")], np.int64)))


@since(7, "Upsample")
def _height_and_width(op: Emitter, node: ir.Node) -> None:
    _set(node, scales=[1.0, 1.0, _attribute(node, "height_scale"), _attribute(node, "width_scale")])


@since(9, "Upsample")
def _scales(op: Emitter, node: ir.Node) -> None:
    _set_input(node, 1, op.constant(np.array(_attribute(node, "scales"), np.float32)))


@since(11, "Resize", "Upsample")
def _resize(op: Emitter, node: ir.Node) -> ir.Value:
    """Resize with coordinates that are multiples of 1 / scale, as ONNX Runtime does before opset 11.

    Of the nearest pixels, it takes the one before the coordinate, but the one after it along axes that shrink.
    """
    x, scales, mode = _input(node, 0), _input(node, 1), _attribute(node, "mode", "nearest")
    how = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    if mode != "nearest":
        return op.Resize(x, None, scales, **how)
    known = constant_of(scales)
    if known is None or not ((known >= 1).all() or (known <= 1).all()):
        x = op.Resize(x, None, op.Max(scales, 1.0), **how, nearest_mode="floor")
        scales = op.Min(scales, 1.0)
    grows = known is not None and bool((known >= 1).all())
    return op.Resize(x, None, scales, **how, nearest_mode="floor" if grows else "ceil")
