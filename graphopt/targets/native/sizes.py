"""Read shapes where kernels need not write what has them."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.sizes import sizes_of
from graphopt.targets.native.forms import NodeForms


def read_shapes_early(model: ir.Model, forms: NodeForms) -> None:
    """Take the shape of what elementwise operators read in place of their result's, which may then stay in a kernel."""
    for node in model.graph:
        if node.op_type == "Shape" and node.domain == "":
            while (x := _of_same_shape(node.inputs[0], forms)) is not None:
                node.replace_input_with(0, x)


def _of_same_shape(y: ir.Value | None, forms: NodeForms) -> ir.Value | None:
    """Return a value of the same shape from which an elementwise operator computes a value, or None."""
    node = None if y is None else y.producer()
    if y is None or node is None or not forms.is_map(node):
        return None
    return next((x for x in node.inputs if x is not None and sizes_of(x) == sizes_of(y)), None)
