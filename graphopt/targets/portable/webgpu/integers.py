"""Compute with integers of 64 bits in 32, from -2^31 to 2^31 - 1: of labels, positions and counters of steps.

Inputs and outputs keep their types. 1.27 has few kernels for 64 bits, and those of 0.4 compute in 32 bits. Arithmetic
on shapes stays: the CPU computes it without reading from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import GROWING, LITERALS, SHAPE_READERS, formal_of, schema_of
from graphopt.graph.values import constant_of, rank
from graphopt.targets.portable.form import Form, given
from graphopt.targets.portable.webgpu import arithmetic

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64
_RANGE = np.iinfo(np.int32)
_NARROWED = (
    *("Add", "Sub", "Mul", "Div", "Max", "Min", "Mod", "Neg", "Abs", "Sign", "Where", "Clip", "CumSum"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    *("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd"),
    *("Concat", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Squeeze"),
    *("ScatterElements", "ScatterND", "Transpose"),
)


def nodes_on_shapes(model: ir.Model) -> list[str]:
    """Return the names of nodes that compute only with shapes and constants, which a CPU computes for the device.

    The runtime reads a device value back where such a node runs on the device and its result says what to compute.
    """
    of_shapes: set[ir.Value] = set()
    names = []
    for node in model.graph.all_nodes():
        inputs = [x for x in node.inputs if x is not None and (x.is_graph_input() or constant_of(x) is None)]
        small = all(y.shape is not None and rank(y) < 2 for y in node.outputs)
        if node.domain or node.op_type in LITERALS | GROWING or not small:
            continue
        if node.op_type in SHAPE_READERS or (inputs and of_shapes.issuperset(inputs)):
            of_shapes.update(node.outputs)
            names += [node.name] if node.name and node.op_type not in SHAPE_READERS else []
    return names


def _narrowed(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write an operator of integers of 64 bits as one of 32, between casts."""
    schema = schema_of("", node.op_type, op.versions[""])
    if schema is None or _is_arithmetic_on_shapes(op, node):
        return None
    inputs: list[ir.Value | None] = list(node.inputs)
    for i, x in enumerate(inputs):
        # T and V are the types of what is computed with; those of sizes and axes have other names.
        if x is not None and formal_of(schema, i).type_str in ("T", "V"):
            inputs[i] = _in_32_bits(op, x)
            if inputs[i] is None:
                return None
    (y,) = op.emit_again(node, inputs)
    return [op.Cast(y, to=INT64) if y.dtype == INT32 else y]


def _in_32_bits(op: Emitter, x: ir.Value) -> ir.Value | None:
    """Return a value in 32 bits; None if a constant does not fit."""
    numbers, source = constant_of(x), x.producer()
    if numbers is not None:
        fits = numbers.size == 0 or (numbers.min() >= _RANGE.min and numbers.max() <= _RANGE.max)
        return op.constant(numbers.astype(np.int32)) if fits else None
    if source is not None and source.op_type == "Cast" and given(source.inputs[0]).dtype == INT32:
        return source.inputs[0]
    return op.Cast(x, to=INT32)


def _is_arithmetic_on_shapes(op: Emitter, node: ir.Node) -> bool:
    """Return whether a node computes only with shapes and constants, or with the counters of a loop."""
    waiting, seen = list(node.inputs), set()
    while waiting:
        x = waiting.pop()
        if x is None or x in seen or constant_of(x) is not None:
            continue
        seen.add(x)
        source = x.producer()
        if source is None:
            if not op.is_in_body or x.graph is not node.graph or x.shape is None or rank(x):
                return False
        elif source.op_type not in SHAPE_READERS | LITERALS:
            waiting += source.inputs
    return True


def _of_integers(op_type: str) -> Form:
    """Return the form of an operator: in 32 bits if it computes in 64, and otherwise as for other types."""
    other = arithmetic.FORMS.get(op_type) or _IN_32_BITS.get(op_type)

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        data = given(node.inputs[1 if op_type == "Where" else 0])
        if data.dtype == INT64:
            return _narrowed(op, node)
        return None if other is None or (op_type in _IN_32_BITS and data.dtype != INT32) else other(op, node)

    return form


def _negative(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Subtract from 0. There is no kernel for Neg of integers."""
    return [0 - given(node.inputs[0])]


def _absolute(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Compare with 0. There is no kernel for Abs of integers."""
    x = given(node.inputs[0])
    return [op.Where(op.Less(x, op.constant(0, like=x)), 0 - x, x)]


def _remainder(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Subtract a multiple of the divisor; the sign is the divisor's, or with fmod the dividend's. Mod has no kernel."""
    x, divisor = map(given, node.inputs)
    rest = x - divisor * (x / divisor)
    if node.attributes.get_int("fmod", 0):
        return [rest]
    zero = op.constant(0, like=x)
    return [op.Where(op.Less(rest * divisor, zero), rest + divisor, rest)]


_IN_32_BITS: dict[str, Form] = {"Abs": _absolute, "Mod": _remainder, "Neg": _negative}
FORMS: dict[str, Form] = {op_type: _of_integers(op_type) for op_type in _NARROWED}
