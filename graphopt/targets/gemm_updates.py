"""Fold parameter updates into the Gemm that computes the gradient: its term beta C costs no extra time."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from graphopt.graph.values import like


class _FoldIntoGemm(RewriteRuleClassBase):
    """Match a Gemm without C whose output has a single reader."""

    def check(self, op: Any, *args: Any, **values: Any) -> MatchResult:
        result, g = MatchResult(), values["g"]
        gemm = g.producer()
        assert gemm is not None
        if len(gemm.inputs) > 2 or len(g.uses()) != 1 or g.is_graph_output():
            return result.fail("the product has another reader or already has a C")
        if gemm.attributes.get_float("alpha", 1.0) != 1.0:
            return result.fail("the product has an alpha")
        scalar, state = values.get("scalar"), values["state"]
        if scalar is not None and (scalar.shape is None or len(scalar.shape) != 0):
            return result.fail("the factor is not a scalar")
        return result if state.shape == g.shape else result.fail("the shapes differ")


def _transpose_flags(g: ir.Value) -> dict[str, int]:
    gemm = g.producer()
    assert gemm is not None
    return {name: gemm.attributes.get_int(name, 0) for name in ("transA", "transB")}


def _width(x: ir.Value) -> int:
    """Return the product of the known sizes of a value. The batch size is often unknown at compile time."""
    return math.prod(size for size in x.shape or () if isinstance(size, int))


class FoldTranspose(RewriteRuleClassBase):
    """Rewrite (a b)' as b' a': the gradient of a weight that the model transposes."""

    def pattern(self, op: Any, a: Any, b: Any) -> Any:
        g = op.Gemm(a, b, _outputs=["g"], _allow_other_attributes=True)
        return op.Transpose(g, _outputs=["y"], _allow_other_attributes=True)

    def check(self, op: Any, *args: Any, **values: Any) -> MatchResult:
        result, g = MatchResult(), values["g"]
        gemm = g.producer()
        if values["y"].producer().attributes.get_ints("perm", [1, 0])[0] == 0:
            return result.fail("the transpose keeps the order of axes")
        alone = len(gemm.inputs) == 2 and len(g.uses()) == 1 and not g.is_graph_output()
        return result if alone else result.fail("the product has another reader or already has a C")

    def rewrite(self, op: Any, a: Any, b: Any, g: ir.Value, y: ir.Value) -> Any:
        gemm = g.producer()
        assert gemm is not None
        flags = _transpose_flags(g)
        alpha = gemm.attributes.get_float("alpha", 1.0)
        return op.Gemm(b, a, alpha=alpha, transA=1 - flags["transB"], transB=1 - flags["transA"])


class FoldUpdate(_FoldIntoGemm):
    """Rewrite the plain SGD update w - rate (a b) as (a (-rate b)) + w, and scale the smaller of a and b."""

    def pattern(self, op: Any, state: Any, scalar: Any, a: Any, b: Any) -> Any:
        g = op.Gemm(a, b, _outputs=["g"], _allow_other_attributes=True)
        return op.Sub(state, op.Mul(scalar, g))

    def rewrite(self, op: Any, state: Any, scalar: Any, a: Any, b: Any, g: ir.Value) -> Any:
        minus = like(op.Neg(scalar), scalar)
        if _width(a) < _width(b):
            return op.Gemm(like(op.Mul(minus, a), a), b, state, **_transpose_flags(g))
        return op.Gemm(a, like(op.Mul(minus, b), b), state, **_transpose_flags(g))


class FoldSum(_FoldIntoGemm):
    """Rewrite w + (a b) as one Gemm."""

    def pattern(self, op: Any, state: Any, a: Any, b: Any) -> Any:
        return op.Add(state, op.Gemm(a, b, _outputs=["g"], _allow_other_attributes=True))

    def rewrite(self, op: Any, state: Any, a: Any, b: Any, g: ir.Value) -> Any:
        return op.Gemm(a, b, state, **_transpose_flags(g))


class FoldMomentum(_FoldIntoGemm):
    """Rewrite the momentum update mu m + (a b), with a constant mu, as one Gemm."""

    def pattern(self, op: Any, state: Any, scalar: Any, a: Any, b: Any) -> Any:
        g = op.Gemm(a, b, _outputs=["g"], _allow_other_attributes=True)
        return op.Add(op.Mul(scalar, state), g)

    def check(self, op: Any, *args: Any, **values: Any) -> MatchResult:
        result = super().check(op, *args, **values)
        if result and ir.convenience.get_const_tensor(values["scalar"]) is None:
            return result.fail("the factor is not a constant")
        if result and values["g"].dtype != ir.DataType.FLOAT:
            return result.fail("the attribute beta has only float32 precision")
        return result

    def rewrite(self, op: Any, state: Any, scalar: Any, a: Any, b: Any, g: ir.Value) -> Any:
        tensor = ir.convenience.get_const_tensor(scalar)
        assert tensor is not None
        return op.Gemm(a, b, state, beta=float(tensor.numpy()), **_transpose_flags(g))
