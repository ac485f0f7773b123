"""Read lengths early, before clusters are found."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphopt.targets.native.forms import form_of, sizes_of


def read_shapes_early(model: ir.Model) -> None:
    """Take the shape of what elementwise operators read in place of their result's, which may then stay in a kernel."""
    versions = dict(model.opset_imports)
    for node in model.graph:
        if node.op_type == "Shape" and node.domain == "":
            while (x := _of_same_shape(node.inputs[0], versions)) is not None:
                node.replace_input_with(0, x)


def _of_same_shape(y: ir.Value | None, versions: Mapping[str, int]) -> ir.Value | None:
    """Return a value of the same shape from which an elementwise operator computes a value, or None."""
    node = None if y is None else y.producer()
    form = None if node is None else form_of(node, versions)
    if y is None or node is None or form is None or form.kind != "map":
        return None
    return next((x for x in node.inputs if x is not None and sizes_of(x) == sizes_of(y)), None)
