"""Cleans a graph up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
import onnxscript.rewriter
from onnxscript.rewriter.rules.common import (
    cast_cast_rule,
    expand_before_binary_op_rules,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    reshape_reshape_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
)

from graphopt.rewriting import Pass, outputs_kept

__all__ = ["Simplify"]

# Not all that onnxscript's optimizer applies: its rule for x + 0 takes an epsilon of 1e-8 for 0.
RULES = [
    cast_cast_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    transpose_transpose_rule,
    reshape_reshape_rule,
    unsqueeze_unsqueeze_rule,
    *expand_before_binary_op_rules,
]


def _makes_no_room(node: ir.Node) -> bool | None:
    """Refuse to fold what makes a large constant of a small one."""
    return False if node.op_type in ("Expand", "ConstantOfShape", "Tile") else None


@contextlib.contextmanager
def _results_kept(model: ir.Model) -> Iterator[None]:
    """Keep an Identity that is a body's output: without it the output could be an outer value, which is invalid."""
    outputs = [output for graph in model.graphs() if graph is not model.graph for output in graph.outputs]
    nodes = [
        node for node in (output.producer() for output in outputs) if node and node.op_type == "Identity"
    ]
    for node in nodes:
        node.domain = "graphopt.aside"
    yield
    for node in nodes:
        node.domain = ""


@dataclass(frozen=True)
class Simplify(Pass):
    """Fold constants, merge common subexpressions, drop what no output needs; the numbers stay the same."""

    def rewrite(self, model: ir.Model) -> None:
        with outputs_kept(model), _results_kept(model):
            onnxscript.rewriter.rewrite(model, RULES)
            onnxscript.optimizer.fold_constants(model, should_fold=_makes_no_room)
            common.IdentityEliminationPass()(model)
            common.CommonSubexpressionEliminationPass()(model)
            onnxscript.rewriter.rewrite(model, RULES)
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
            common.OutputFixPass()(model)
            common.NameFixPass()(model)
