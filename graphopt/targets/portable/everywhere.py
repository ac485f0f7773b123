"""Write operators in forms that cost nothing on any runtime."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.targets.portable.form import given


def product_of_shape(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Size as the product of the shape. Importers for JAX and tinygrad do not know Size."""
    return [op.ReduceProd(op.shape_of(given(node.inputs[0])), keepdims=0)]


def chain_of_sums(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write a Sum as Adds, from the first to the last. WebGPU has no kernel for Sum."""
    first, *others = map(given, node.inputs)
    return [functools.reduce(op.Add, others, first) if others else op.Identity(first)]
