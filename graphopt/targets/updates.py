"""Compute gradients of weights outside of loops, and fold updates into the products that compute gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase, RewriteRuleSet

from graphopt.graph.rewriting import interface_kept
from graphopt.graph.simplify import CombineScalarFactors
from graphopt.targets.gemm_updates import FoldMomentum, FoldSum, FoldTranspose, FoldUpdate
from graphopt.targets.scaled_gradients import fold_rate_into_loss_gradient
from graphopt.targets.scan import hoist_weight_gradients

Rewriting = Callable[[ir.Model], int]  # returns whether, or how many times, it changed a model


def by_rule(rule: type[RewriteRuleClassBase]) -> Rewriting:
    """Return the rewriting that applies a rule wherever it matches, by rules of its own in each thread."""
    return lambda model: RewriteRuleSet([rule.rule()], commute=True).apply_to_model(model)  # type: ignore[no-untyped-call]


UPDATES: dict[str, Rewriting] = {
    "hoist_weight_gradients": hoist_weight_gradients,
    "fold_transpose_into_gemm": by_rule(FoldTranspose),
    "fold_rate_into_loss_gradient": fold_rate_into_loss_gradient,
    "combine_scalar_factors": by_rule(CombineScalarFactors),
    "fold_update_into_gemm": by_rule(FoldUpdate),
    "fold_momentum_into_gemm": by_rule(FoldMomentum),
    "fold_sum_into_gemm": by_rule(FoldSum),
}


def fold_updates(model: ir.Model, leave_out: Collection[str] = ()) -> None:
    """Rewrite the gradients and updates of a training graph whose initial state is detached."""
    with interface_kept(model):
        for name, fold in UPDATES.items():
            if name not in leave_out:
                fold(model)
    model.graph.sort()
