"""ONNX's reference evaluator, with operators mended that onnx 1.23 computes wrong, in part or in float32 alone."""

from __future__ import annotations

import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from graphopt.testing.reference import elements, loops, sampling, windows

MENDED = [
    *(elements.Erf, elements.GatherElements, elements.Gelu, elements.LRN, elements.LpNormalization),
    *(elements.Pad, elements.Softsign, elements.Unique),
    *(loops.GRU, loops.LSTM, loops.Loop, loops.RNN, loops.Scan),
    *(sampling.AffineGrid, sampling.DeformConv, sampling.GridSample, sampling.MaxRoiPool),
    *(windows.AveragePool, windows.ConvTranspose, windows.GlobalLpPool, windows.GlobalMaxPool),
    *(windows.LpPool, windows.MaxPool),
]


def evaluator(model: ir.Model) -> ReferenceEvaluator:
    """Return the reference evaluator of a model."""
    return ReferenceEvaluator(ir.to_proto(model), new_ops=MENDED)
