"""Fusion: the same numbers from fewer or faster operators, as onnxruntime's CPU kernels are measured to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase, RewriteRuleSet

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.rewriting import Pass, keep_interface
from passes.fusion.arithmetic import Factors, Square
from passes.fusion.column_sums import column_sums
from passes.fusion.convolution import convolution_columns, convolution_inputs
from passes.fusion.gemm_updates import Descent, Momentum, Sum, Transposed
from passes.fusion.pooling import MaskedPool, pooled_planes
from passes.fusion.scaled_gradients import scaled_gradients
from passes.fusion.scan import scan_fission, scan_products
from passes.fusion.shared_gelu import gelu
from passes.simplify import Simplify


def _rewriting(rule: type[RewriteRuleClassBase]) -> Callable[[ir.Model], int]:
    return RewriteRuleSet([rule.rule()], commute=True).apply_to_model  # type: ignore[no-untyped-call]


# A name, and what rewrites a model and tells whether, or how often, it did.
FUSIONS: dict[str, Callable[[ir.Model], int]] = {
    "convolution_inputs": convolution_inputs,
    "convolution_columns": convolution_columns,
    "masked_pool": _rewriting(MaskedPool),
    "pooled_planes": pooled_planes,
    "transposed": _rewriting(Transposed),
    "scaled_gradients": scaled_gradients,
    "factors": _rewriting(Factors),
    "square": _rewriting(Square),
    "descent": _rewriting(Descent),
    "momentum": _rewriting(Momentum),
    "gelu": gelu,
    "scan_products": scan_products,
    "scan_fission": scan_fission,
    "sum": _rewriting(Sum),
    "column_sums": column_sums,
}


@dataclass(frozen=True)
class Fuse(Pass):
    """Rewrite operators into faster ones; results are the same up to rounding.

    Args:
        leave_out: names of fusions to leave out, from `passes.fusion.FUSIONS`.

    Raises:
        GraphoptError: a fusion is unknown.

    >>> from graphopt import models
    >>> steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    >>> plain, fused = (graphopt.compile(models.mlp((4,), 3), **steps, fuse=fuse) for fuse in (None, passes.Fuse()))
    >>> len(fused.graph) < len(plain.graph)
    True
    """

    leave_out: tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.leave_out:
            if name not in FUSIONS:
                raise GraphoptError(unknown("fusion", name, FUSIONS))

    def rewrite(self, model: ir.Model) -> None:
        with keep_interface(model):
            found = [fusion(model) for name, fusion in FUSIONS.items() if name not in self.leave_out]
        if any(found):
            Simplify().rewrite(model)
