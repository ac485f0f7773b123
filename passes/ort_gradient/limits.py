"""Check the operators that onnxruntime-training's builder needs in another form or differentiates incorrectly."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import constant_of
from passes.gradients.walk import further_output


def fit_to_builder(op: Emitter, node: ir.Node) -> None:
    """Convert a node to the form that the builder supports: with the outputs that it reads, and one number type."""
    if node.domain != "":
        return
    x = node.inputs[0]
    if node.op_type == "LayerNormalization":
        for index in (1, 2):
            further_output(node, index, ir.DataType(node.attributes.get_int("stash_type", 1)), None)
    elif node.op_type == "Dropout" and _is_trained(node):
        further_output(node, 1, ir.DataType.BOOL, node.outputs[0].shape)
    elif node.op_type == "Dropout" and not any(mask.uses() for mask in node.outputs[1:]):
        node.op_type = "Identity"
        node.attributes.clear()
        node.resize_inputs(1)
        node.resize_outputs(1)
    elif node.op_type == "Pow":
        exponent = node.inputs[1]
        assert x is not None and exponent is not None
        if exponent.dtype != x.dtype:
            known = constant_of(exponent)
            typed = op.Cast(exponent, to=x.dtype) if known is None else op.constant(known, like=x)
            node.replace_input_with(1, typed)


def _is_trained(node: ir.Node) -> bool:
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is not None and (constant_of(mode) is None or bool(constant_of(mode)))


def _text(node: ir.Node, name: str) -> str:
    return node.attributes.get_string(name, "none")


def _dims(x: ir.Value | None) -> tuple[int | ir.SymbolicDim, ...]:
    return () if x is None or x.shape is None else tuple(x.shape)


def _are_known(dims: Iterable[int | ir.SymbolicDim]) -> bool:
    return all(isinstance(dim, int) for dim in dims)


def _is_stretched(x: ir.Value | None, y: ir.Value) -> bool:
    want, have = _dims(x), _dims(y)
    return len(want) < len(have) or any(w == 1 and h != 1 for w, h in zip(want, have, strict=True))


# What the builder differentiates incorrectly, without an error unless the reason says so, and the reason.
WRONG: tuple[tuple[str, Callable[[ir.Node, frozenset[ir.Value]], object], str], ...] = (
    ("AveragePool", lambda node, _: "SAME" in _text(node, "auto_pad"), "does not pad by auto_pad"),
    (
        "AveragePool",
        lambda node, _: all(node.attributes.get_int(name, 0) for name in ("ceil_mode", "count_include_pad")),
        "counts no padding under ceil_mode",
    ),
    ("AveragePool", lambda node, _: {*node.attributes.get_ints("dilations", ())} - {1}, "ignores dilations"),
    ("AveragePool", lambda node, _: len(_dims(node.inputs[0])) == 5, "is wrong in three dimensions"),
    ("AveragePool", lambda node, _: not _are_known(_dims(node.inputs[0])), "needs all sizes of its input"),
    ("Conv", lambda node, _: "SAME" in _text(node, "auto_pad"), "does not pad by auto_pad"),
    ("Dropout", lambda node, _: not _is_trained(node), "drops in inference, too"),
    ("Gelu", lambda node, _: _text(node, "approximate") == "tanh", "is the exact one's"),
    (
        "Gemm",
        lambda node, active: (
            any(x in active and _dims(x) == () for x in node.inputs[2:])
            and node.attributes.get_float("beta", 1.0) != 1.0
        ),
        "does not sum to a scalar C under beta",
    ),
    (
        "LayerNormalization",
        lambda node, _: any(y.is_graph_output() or y.uses() for y in node.outputs[1:]),
        "ignores its mean and deviation",
    ),
    ("MatMul", lambda node, _: any(len(_dims(x)) == 1 for x in node.inputs), "takes matrices alone"),
    (
        "MaxPool",
        lambda node, _: not _are_known(_dims(node.inputs[0])[1:]),
        "needs all sizes of its input but the first",
    ),
    ("MaxPool", lambda node, _: node.attributes.get_int("storage_order", 0) == 1, "ignores storage_order"),
    ("Pad", lambda node, _: len(node.inputs) > 3 and node.inputs[3] is not None, "ignores axes"),
    ("ScatterElements", lambda node, _: _text(node, "reduction") != "none", "ignores reduction"),
    ("ScatterND", lambda node, _: _text(node, "reduction") != "none", "ignores reduction"),
    (
        "Where",
        lambda node, active: any(x in active and _is_stretched(x, node.outputs[0]) for x in node.inputs[1:]),
        "does not sum where it broadcasts",
    ),
)


def wrong(node: ir.Node, active: frozenset[ir.Value]) -> str:
    """Return the errors in the builder's gradient of a node, or an empty text."""
    if node.domain != "":
        return ""
    reasons = (reason for op_type, test, reason in WRONG if op_type == node.op_type and test(node, active))
    return ", ".join(f"has it wrong: it {reason}" for reason in reasons)
