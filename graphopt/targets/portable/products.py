"""Write products by frozen weights in forms that OpenVINO computes correctly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import constant_of


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
