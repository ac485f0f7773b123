"""Replace operators of ONNX's reference evaluator that onnx 1.23 computes wrongly, partly or only in float32."""

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
    """Return the reference evaluator of a model, with the corrected operators."""
    return ReferenceEvaluator(ir.to_proto(model), new_ops=MENDED)
