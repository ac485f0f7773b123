"""Write operators in forms that any runtime computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import constant_of
from graphopt.targets.portable.form import Form, given


def product_of_shape(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Size as the product of the shape. Importers for JAX and tinygrad do not know Size."""
    return [op.ReduceProd(op.shape_of(given(node.inputs[0])), keepdims=0)]


def chain_of_sums(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write a Sum as Adds, from the first to the last. WebGPU has no kernel for Sum."""
    first, *others = map(given, node.inputs)
    return [functools.reduce(op.Add, others, first) if others else op.Identity(first)]


def mean(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Mean as Adds and a product. WebGPU and CUDA have no kernel for Mean."""
    return [chain_of_sums(op, node)[0] * (1 / len(node.inputs))]


def celu(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Celu as Elu with a scale. WebGPU and CUDA have no kernel for Celu."""
    alpha = node.attributes.get_float("alpha", 1.0)
    return [op.Elu(given(node.inputs[0]) * (1 / alpha)) * alpha]


def _along_no_axis(function: Callable[[Emitter, ir.Value], ir.Value]) -> Form:
    """Return the form of a reduction along no axes, which is a function of each element.

    WebGPU's and CUDA's kernels return their input.
    """

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        axes = np.array([]) if len(node.inputs) < 2 or node.inputs[1] is None else constant_of(node.inputs[1])
        whole = axes is None or axes.size or not node.attributes.get_int("noop_with_empty_axes", 0)
        return None if whole else [function(op, given(node.inputs[0]))]

    return form


ALONG_NO_AXIS: dict[str, Form] = {
    "ReduceL1": _along_no_axis(lambda op, x: op.Abs(x)),
    "ReduceL2": _along_no_axis(lambda op, x: op.Abs(x)),
    "ReduceLogSum": _along_no_axis(lambda op, x: op.Log(x)),
    "ReduceSumSquare": _along_no_axis(lambda op, x: op.Mul(x, x)),
}


def product_by_a_copy(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a Gemm by the transpose of a frozen weight that others read as a product by a transposed copy.

    OpenVINO 2026.4 multiplies by the weight itself in some graphs, such as that of an adapter beside a square weight.
    """
    a, b, *c = node.inputs
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    is_product = (
        attributes.pop("transB", 0) and attributes.pop("alpha", 1.0) == 1 and not attributes.get("transA")
    )
    w = constant_of(b) if is_product and not any(c) and b is not None and not b.is_graph_input() else None
    if a is None or b is None or w is None or len(b.uses()) < 2:
        return None
    return [op.MatMul(a, op.constant(np.ascontiguousarray(w.T)))]
