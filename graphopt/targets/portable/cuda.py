"""Write operators that ONNX Runtime's CUDA provider lacks as others. The version is that of onnxruntime-gpu 1.31."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
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


def _in_float32(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Compute an operator on bfloat16 in float32. There are no kernels for bfloat16, on the CPU neither."""
    if all(x is None or x.dtype != ir.DataType.BFLOAT16 for x in node.inputs):
        return None
    wide = [
        op.Cast(x, to=ir.DataType.FLOAT) if x is not None and x.dtype == ir.DataType.BFLOAT16 else x
        for x in node.inputs
    ]
    y = getattr(op, node.op_type)(*wide, **node.attributes)
    return [op.Cast(y, to=ir.DataType.BFLOAT16) if node.outputs[0].dtype == ir.DataType.BFLOAT16 else y]


def _stays(op: Emitter, node: ir.Node) -> None:
    """Leave an operator that has a kernel there, and not on all runtimes."""


_WITHOUT_BFLOAT16 = (
    *("ArgMax", "ArgMin", "Ceil", "CumSum", "DepthToSpace", "Equal", "Floor", "Greater", "GreaterOrEqual"),
    *("LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "Mean", "PRelu", "Pad", "Reciprocal"),
    *("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd", "Resize"),
)
CUDA: dict[str, Form] = {
    **dict.fromkeys(_WITHOUT_BFLOAT16, _in_float32),
    "ConvTranspose": _even_pads,
    "Size": _stays,
    "Sum": _stays,
}
