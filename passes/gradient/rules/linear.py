"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphopt.emitter import Emitter
from passes.gradient.registry import rule


@rule("MatMul")
def matmul(op: Emitter, node: ir.Node, dy: ir.Value) -> Sequence[ir.Value | None]:
    a, b = node.inputs
    return op.MatMul(dy, op.Transpose(b)), op.MatMul(op.Transpose(a), dy)
