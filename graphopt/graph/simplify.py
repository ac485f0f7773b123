"""Simplify graphs: fold constants, merge common subexpressions, rewrite arithmetic, and remove unused nodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.rewriter
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase
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

from graphopt.graph import metadata
from graphopt.graph.algebra import simplify_algebra
from graphopt.graph.folding import fold
from graphopt.graph.metadata import GRADIENT_OF
from graphopt.graph.rewriting import Pass, interface_kept, needed, protect, seams
from graphopt.graph.roles import STATE, with_role
from graphopt.graph.traversal import results_when_ready
from graphopt.graph.values import constant_number, is_floating


class ReciprocalOf(RewriteRuleClassBase):
    """Keep the node 1 / x: ONNX Runtime turns (1 / x) y into y / x, which takes longer and rounds differently."""

    def pattern(self, op: Any, one: Any, x: Any) -> Any:
        return op.Div(one, x)

    def check(self, op: Any, *args: Any, **values: Any) -> MatchResult:
        result, x, one = MatchResult(), values["x"], values["one"]
        if constant_number(one) != 1 or not is_floating(x):
            return result.fail("expected a floating-point division of 1")
        fits = x.shape is not None and one.shape is not None and len(one.shape) <= len(x.shape)
        return result if fits else result.fail("another shape")

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Reciprocal(x)


# onnxscript's rewrite rules without its rule for x + 0, which treats an epsilon of 1e-8 as 0.
# The key is an operator that every rule of the entry replaces: without it in the graph, the rules are not tried.
REWRITE_RULES = {
    "Cast": [cast_cast_rule, no_op_cast_rule],
    "Div": [ReciprocalOf.rule()],  # type: ignore[no-untyped-call]
    "Expand": [no_op_expand_rule],
    "Reshape": [reshape_reshape_rule],
    "Transpose": [no_op_transpose_rule, transpose_transpose_rule],
    "Unsqueeze": [unsqueeze_unsqueeze_rule],
}


_RULES = threading.Lock()  # onnxscript's rules keep what they match


def _rewrite(model: ir.Model) -> None:
    nodes = list(model.graph.all_nodes())
    present = {node.op_type for node in nodes}
    rules = [rule for op_type, rules in REWRITE_RULES.items() if op_type in present for rule in rules]
    expanded = {
        f"_{user.op_type}"
        for node in nodes
        if node.op_type == "Expand"
        for user in node.outputs[0].consumers()
    }
    rules += [rule for rule in expand_before_binary_op_rules if str(rule.name).endswith(tuple(expanded))]
    if rules:
        with _RULES:
            onnxscript.rewriter.rewrite(model, rules)


@contextlib.contextmanager
def _one_output(model: ir.Model) -> Iterator[None]:
    """Replace all outputs by one during the block, because onnx_ir scans the outputs for each node that it removes.

    A node separates each output from the new one, because replacing an input scans the inputs of its node.
    """
    outputs = model.graph.outputs
    readers = [ir.Node("graphopt.interface", "Output", [output]) for output in outputs]
    whole = ir.Node("graphopt.interface", "Outputs", [reader.outputs[0] for reader in readers])
    model.graph.extend([*readers, whole])
    outputs[:] = whole.outputs
    try:
        yield
    finally:
        remaining = [reader for x in whole.inputs if x is not None and (reader := x.producer()) is not None]
        outputs[:] = [output for reader in remaining if (output := reader.inputs[0]) is not None]
        model.graph.remove({whole, *remaining})
        for reader in remaining:
            reader.replace_input_with(0, None)


def simplify(model: ir.Model) -> None:
    """Simplify a graph inside a pass, and keep the order of the remaining nodes."""
    with interface_kept(model), protect(needed(model)):
        with _one_output(model):
            _rewrite(model)
            fold(model)
            common.IdentityEliminationPass()(model)
            common.CommonSubexpressionEliminationPass()(model)
            _rewrite(model)
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        common.OutputFixPass()(model)
        common.RemoveUnusedNodesPass()(model)  # folding leaves unused initializers
        common.NameFixPass()(model)


def _note_gradients(model: ir.Model) -> None:
    """Move the notes that values are gradients from copies, which will go, to the values."""
    for node in model.graph:
        y, x = node.outputs[0], node.inputs[0] if node.inputs else None
        name = GRADIENT_OF.read(y) if node.op_type == "Identity" else None
        if name is not None and x is not None and x.producer() is not None:
            GRADIENT_OF.remove(y)
            GRADIENT_OF.write(x, GRADIENT_OF.read(x) or name)


@dataclass(frozen=True)
class Simplify(Pass):
    """Fold constants, merge common subexpressions, and compute less in a step. The results stay the same.

    Exporters' notes that no pass reads, such as stack traces, are removed. Result nodes are ordered so that ONNX
    Runtime computes each as soon as its inputs are ready.

    >>> graphopt.Pipeline(simplify=passes.Simplify())(models.linear((2,), 1)).graph.num_nodes()
    1
    """

    def rewrite(self, model: ir.Model) -> None:
        _note_gradients(model)
        simplify(model)
        if with_role(model, *STATE):  # algebra shares what a gradient computes
            with interface_kept(model), protect(seams(model)):
                changed = simplify_algebra(model)
            if changed:
                simplify(model)
        for node in model.graph.all_nodes():
            metadata.remove_foreign(node)
        results_when_ready(model.graph)
