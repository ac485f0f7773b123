"""Run a graph in float64: operators without a kernel for it compute in float32."""

from __future__ import annotations

import re

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.precision import retype
from graphopt.graph.values import swap
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session

_NARROW = {"GRU", "LSTM", "RNN"}  # whose kernels for it stop when they run
_WRITTEN_BY = {"Erf": {"Gelu"}}  # operators that the runtime writes by others when it has no kernel for them
_LACKING = re.compile(r"find an implementation for (?:\w+\.)*(\w+)\(")  # ONNX Runtime's words


def in_type(model: ir.Model, dtype: ir.DataType) -> None:
    """Change the floating-point type of a model; outputs keep their other types."""
    types = {y: y.type for y in model.graph.outputs}
    retype(model, dtype)
    for y, kind in types.items():
        is_float = kind is not None and kind.dtype.is_floating_point()
        y.type = ir.TensorType(dtype) if is_float else kind


def in_float64(device: Device, model: ir.Model) -> tuple[Session, ir.Model]:
    """Return a session of a copy of a model in float64, and the copy, whose inputs have the types to feed.

    Raises:
        GraphoptError: the runtime refuses the copy for another reason than a missing kernel.
    """
    narrow = set(_NARROW)
    while True:
        copy = model.clone()
        nodes = list(copy.graph.all_nodes())
        values = {x for node in nodes for x in (*node.inputs, *node.outputs) if x is not None}
        floats = {x for x in values if x.dtype is not None and x.dtype.is_floating_point()}
        in_type(copy, ir.DataType.DOUBLE)
        for x in floats:
            x.type = x.type or ir.TensorType(ir.DataType.DOUBLE)
        with Emitter(copy) as op:
            for node in nodes:
                if node.op_type in narrow and node.graph is not None:
                    inner = op if node.graph is copy.graph else op.within(node.graph)
                    _compute_in_float32(inner, node, floats)
                elif node.op_type == "LayerNormalization":  # its mean and deviation are of float32
                    for y in [y for y in node.outputs[1:] if y.name]:
                        cast = ir.node("Cast", [y], {"to": ir.DataType.DOUBLE})
                        copy.graph.insert_after(node, cast)
                        swap(y, cast.outputs[0])
                        cast.replace_input_with(0, y)
        for y in (y for node in copy.graph.all_nodes() for y in node.outputs if not y.is_graph_output()):
            y.type = y.shape = None  # the runtime infers them
        try:
            return Session(device, copy, optimized=False), copy
        except GraphoptError as error:
            lacking = _LACKING.search(str(error))
            if lacking is None or lacking[1] in narrow:
                raise
            narrow |= {lacking[1], *_WRITTEN_BY.get(lacking[1], ())}


def _compute_in_float32(op: Emitter, node: ir.Node, floats: set[ir.Value]) -> None:
    """Cast what a node reads to float32, and what it computes back; Resize, whose numbers are compared, loses none."""
    parts = 3 if node.op_type == "Resize" else 1  # of 24 bits
    with op.before(node):
        inputs = list(node.inputs)
        results = list[ir.Value]()
        for _ in range(parts):
            wide = [x is not None and bool(x.name) and x in floats for x in node.inputs]
            given = [op.Cast(x, to=ir.DataType.FLOAT) if w else x for x, w in zip(inputs, wide, strict=True)]
            made = [
                op.Cast(y, to=ir.DataType.DOUBLE) if own in floats and own.name else y
                for own, y in zip(node.outputs, op.emit_again(node, given), strict=True)
            ]
            results = [op.Add(*pair) for pair in zip(results, made, strict=True)] if results else made
            if parts > 1:
                inputs[0] = op.Sub(inputs[0], op.Cast(given[0], to=ir.DataType.DOUBLE))
    for own, y in zip(node.outputs, results, strict=True):
        if own.name:
            swap(own, y)
            floats |= {y} if own in floats else set()  # another such node may read it
    assert node.graph is not None
    node.graph.remove(node)
