"""Write operators that ONNX Runtime's CUDA provider lacks as others. The version is that of onnxruntime-gpu 1.31."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.targets.bfloat16 import in_float32, is_of_bfloat16
from graphopt.targets.portable.form import Form


def _even_pads(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write ConvTranspose with other pads at the end than at the start as one with the lesser pads, and a Slice.

    There is no kernel for such pads, which the gradient of a convolution with strides has.
    """
    pads = list(node.attributes.get_ints("pads", ()) or ())
    starts, ends = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    if starts == ends:
        return None
    least = list(map(min, starts, ends))
    y = op.ConvTranspose(*node.inputs, **{**node.attributes, "pads": [*least, *least]})
    first = [start - pad for start, pad in zip(starts, least, strict=True)]
    last = [pad - end or sys.maxsize for end, pad in zip(ends, least, strict=True)]
    return [op.Slice(y, first, last, list(range(2, 2 + len(least))))]


def _without_bfloat16(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Compute an operator on bfloat16 in float32: there is no kernel for it."""
    return in_float32(op, node) if is_of_bfloat16(node) else None


def _stays(op: Emitter, node: ir.Node) -> None:
    """Leave an operator that has a kernel there, and not on all runtimes."""


_WITHOUT_BFLOAT16 = (
    *("ArgMax", "ArgMin", "Ceil", "CumSum", "DepthToSpace", "Equal", "Floor", "Greater", "GreaterOrEqual"),
    *("LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "Mean", "PRelu", "Pad", "Reciprocal"),
    *("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd", "Resize"),
)
CUDA: dict[str, Form] = {
    **dict.fromkeys(_WITHOUT_BFLOAT16, _without_bfloat16),
    "ConvTranspose": _even_pads,
    "Size": _stays,
    "Sum": _stays,
}
