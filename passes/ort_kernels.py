"""Emit kernels of onnxruntime-training that update all tensors of a step at once, as sequences.

The kernels update in place. SequenceConstruct copies its inputs, so that the buffers of the state do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.roles import needs_training_runtime
from graphopt.graph.values import like


def call(
    op: Emitter,
    model: ir.Model,
    op_type: str,
    scalars: Sequence[ir.Value],
    columns: Sequence[Sequence[ir.Value]],
    updated: Sequence[Sequence[ir.Value]],
    *,
    flag: bool,
    **attributes: Any,
) -> list[list[ir.Value]]:
    """Emit a kernel and return the tensors of its outputs.

    Args:
        scalars: the first inputs.
        columns: the tensors of the other inputs, each of which is a sequence of float32 tensors.
        updated: the columns that the kernel updates and returns.
        flag: whether the first output is a flag that the kernel has run.
    """
    for x in (x for column in columns for x in column):
        if x.dtype != ir.DataType.FLOAT:
            raise GraphoptError(
                f"fused: {op_type} of onnxruntime-training expects float32, found {x.name!r} of {x.dtype}: set "
                f"fused=False"
            )
    needs_training_runtime(model)
    sequences = [op.SequenceConstruct(*column) for column in columns]
    count = flag + len(updated)
    node = ir.node(op_type, [*scalars, *sequences], attributes, domain=MICROSOFT, num_outputs=count)
    model.graph.append(node)
    results = []
    for sequence, column in zip(node.outputs[flag:], updated, strict=True):
        sequence.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
        results.append([like(op.SequenceAt(sequence, i), x) for i, x in enumerate(column)])
    return results
