"""Replace operators by fewer or faster ones that compute the same values, as measured on ONNX Runtime's CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase, RewriteRuleSet

from graphopt.errors import GraphoptError, unknown
from graphopt.graph import plain
from graphopt.graph.metadata import InferenceForm
from graphopt.graph.rewriting import Pass, interface_kept
from graphopt.graph.roles import STATE, with_role
from graphopt.graph.simplify import Simplify
from graphopt.targets.onnxruntime.arithmetic import CombineScalarFactors, SquareAsProduct
from graphopt.targets.onnxruntime.column_sums import column_sums_as_product
from graphopt.targets.onnxruntime.convolution import (
    transposed_convolution_as_convolution,
    widen_convolution_products,
)
from graphopt.targets.onnxruntime.gemm_updates import FoldMomentum, FoldSum, FoldTranspose, FoldUpdate
from graphopt.targets.onnxruntime.pooling import MaskBeforeUpsampling, pool_channels_as_batch
from graphopt.targets.onnxruntime.scaled_gradients import fold_rate_into_loss_gradient
from graphopt.targets.onnxruntime.scan import hoist_weight_gradients, vectorize_steps
from graphopt.targets.onnxruntime.shared_gelu import share_gelu_distribution


def _rewriting(rule: type[RewriteRuleClassBase]) -> Callable[[ir.Model], int]:
    return RewriteRuleSet([rule.rule()], commute=True).apply_to_model  # type: ignore[no-untyped-call]


# Each function rewrites a model and returns whether, or how many times, it changed something. Recipes use the names.
FUSIONS: dict[str, Callable[[ir.Model], int]] = {
    "transposed_convolution_as_convolution": transposed_convolution_as_convolution,
    "widen_convolution_products": widen_convolution_products,
    "mask_before_upsampling": _rewriting(MaskBeforeUpsampling),
    "pool_channels_as_batch": pool_channels_as_batch,
    "fold_transpose_into_gemm": _rewriting(FoldTranspose),
    "fold_rate_into_loss_gradient": fold_rate_into_loss_gradient,
    "combine_scalar_factors": _rewriting(CombineScalarFactors),
    "square_as_product": _rewriting(SquareAsProduct),
    "fold_update_into_gemm": _rewriting(FoldUpdate),
    "fold_momentum_into_gemm": _rewriting(FoldMomentum),
    "share_gelu_distribution": share_gelu_distribution,
    "hoist_weight_gradients": hoist_weight_gradients,
    "vectorize_steps": vectorize_steps,
    "fold_sum_into_gemm": _rewriting(FoldSum),
    "column_sums_as_product": column_sums_as_product,
}


def _sorted(model: ir.Model) -> bool:
    """Sort a graph, since a fusion may read its nodes in order and put new ones behind their readers."""
    model.graph.sort()
    return True


@dataclass(frozen=True)
class Fuse(Pass):
    """Rewrite operators into faster ones. Results stay the same up to rounding.

    Args:
        leave_out: names of fusions to leave out, from `graphopt.targets.onnxruntime.FUSIONS`.

    Raises:
        GraphoptError: `leave_out` contains an unknown name.

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
        unfused = model.clone()
        with interface_kept(model):
            changed = [
                fusion(model) and _sorted(model)
                for name, fusion in FUSIONS.items()
                if name not in self.leave_out
            ]
        if not with_role(model, *STATE):  # nothing trains, so that there is no inference model to restore
            for node in model.graph.all_nodes():
                for y in node.outputs:
                    InferenceForm.remove(y)
        if any(changed):
            Simplify().rewrite(model)
            plain.remember(model, unfused)
