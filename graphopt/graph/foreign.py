"""Recognize files that tools wrote for inference alone, and say what to do in place of training them."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.operators import INTEGER_OPERATORS, MICROSOFT
from graphopt.graph.values import is_floating, name_of

NCHWC = "com.microsoft.nchwc"
FOR_ONE_PROCESSOR = (
    "ONNX Runtime wrote this file for one kind of processor: train the file from before the optimization, or optimize "
    "it with ORT_ENABLE_EXTENDED at most"
)
IN_INTEGERS = (
    "the file computes with integers (QOperator format or dynamic quantization), which have no gradient: train the "
    "file from before the quantization and quantize what is trained"
)
CONVERTING = {"QuantizeLinear", "DequantizeLinear"}


def refuse_foreign(model: ir.Model) -> None:
    """Refuse a model that a tool wrote for inference alone."""
    integers = None
    for node in model.graph.all_nodes():
        if node.domain == NCHWC:
            raise GraphoptError(f"{NCHWC}::{node.op_type} node {_name(node)!r}: {FOR_ONE_PROCESSOR}")
        if integers is None and node.op_type in INTEGER_OPERATORS and node.domain in ("", MICROSOFT):
            integers = node
    if integers is not None and not any(map(_may_train, model.graph.initializers.values())):
        raise GraphoptError(f"{integers.op_type} node {_name(integers)!r}: {IN_INTEGERS}")


def _may_train(weight: ir.Value) -> bool:
    """Return whether a weight is more than one number and read by other nodes than those of quantization."""
    many = weight.const_value is not None and weight.const_value.size > 1
    quantizing = INTEGER_OPERATORS | CONVERTING
    return is_floating(weight) and many and any(x.op_type not in quantizing for x in weight.consumers())


def _name(node: ir.Node) -> str:
    return node.name or name_of(node.outputs[0])
