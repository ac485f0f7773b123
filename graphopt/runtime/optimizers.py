"""Name the optimizers of ONNX Runtime that a graph must not meet."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphopt.graph.traversal import nodes_of, subgraphs
from graphopt.runtime.device import Device

# It rewrites 1 / b * a to a / b, and loses a if another rule removes its node (tests/faults.py: DivMulFusion).
_UNSAFE = "DivMulFusion"
# onnxruntime 1.19 fuses a Transpose and a MatMul into an operator that has no kernel for double
# (tests/faults.py: MatmulTransposeFusion).
_UNSAFE_IN_DOUBLE = "MatmulTransposeFusion"
# It replaces an If with a constant condition by its branch, and ends the process, or loses values, if that branch has
# such an If, too, in which a node has a body (tests/faults.py: optimizers-end-the-process).
_UNSAFE_IN_CHOICES = "ConstantFolding"
# It makes a Slice of a Gather by a Range, which reads a start below 0 as a distance from the end: the slice is empty
# (tests/faults.py: GatherToSliceFusion).
_UNSAFE_IN_RANGES = "GatherToSliceFusion"


def disabled_optimizers(device: Device, model: ir.Model) -> list[str]:
    """Return the optimizers that a session of a graph must leave out."""
    disabled = [_UNSAFE, *device.machine.slow_optimizers]
    if any(x.dtype == ir.DataType.DOUBLE for x in model.graph.inputs):
        disabled.append(_UNSAFE_IN_DOUBLE)
    if any(node.op_type == "Range" for node in nodes_of(model)):
        disabled.append(_UNSAFE_IN_RANGES)
    if has_nested_choices(model):
        disabled.append(_UNSAFE_IN_CHOICES)
    return disabled


def has_nested_choices(model: ir.Model) -> bool:
    """Return whether a branch of an If has an If, a branch of which has a node with a body.

    Which conditions the runtime finds to be constant is not known.
    """
    choices = [node for node in nodes_of(model) if node.op_type == "If"]
    inner = (x for choice in choices for x in _in_branches(model, choice) if x.op_type == "If")
    return any(subgraphs(x) for choice in inner for x in _in_branches(model, choice))


def _in_branches(model: ir.Model, choice: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes of the branches of an If, in place of calls of functions their nodes."""
    for branch in subgraphs(choice):
        yield from _inlined(model, branch)


def _inlined(model: ir.Model, graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    for node in graph:
        function = model.functions.get(node.op_identifier())
        if function is None:
            yield node
        else:
            yield from _inlined(model, function)
