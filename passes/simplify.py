"""Cleans a graph up."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer

from graphopt.rewriting import Pass, outputs_kept


@dataclass(frozen=True)
class Simplify(Pass):
    """Fold constants, merge common subexpressions, drop what no output needs; the numbers stay the same."""

    def rewrite(self, model: ir.Model) -> None:
        with outputs_kept(model):
            onnxscript.optimizer.optimize(model)
            common.IdentityEliminationPass()(model)
            common.CommonSubexpressionEliminationPass()(model)
            common.RemoveUnusedNodesPass()(model)
