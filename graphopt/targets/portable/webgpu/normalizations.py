"""Center what normalizations read: the kernels compute a variance as a difference of two means, which may be large."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.targets.portable.form import Form, given, is_read


def _centered(first: int) -> Form:
    """Return the form of a normalization over the axes from one on, unless the node's `axis` says which."""

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        x, *weights = node.inputs
        if x is None or x.shape is None or x.dtype != ir.DataType.FLOAT or _is_centered(x):
            return None
        axes = list(range(node.attributes.get_int("axis", first) % len(x.shape), len(x.shape)))
        mean = op.ReduceMean(x, axes)
        y, *statistics = op.emit_again(node, [op.Sub(x, mean), *weights])
        if statistics and is_read(node.outputs[1]):
            statistics[0] = mean
        return [y, *statistics]

    return form


def _is_centered(x: ir.Value) -> bool:
    """Return whether a value is another one minus its mean."""
    node = x.producer()
    if node is None or node.op_type != "Sub":
        return False
    mean = given(node.inputs[1]).producer()
    return mean is not None and mean.op_type == "ReduceMean" and mean.inputs[0] is node.inputs[0]


FORMS: dict[str, Form] = {"InstanceNormalization": _centered(2), "LayerNormalization": _centered(-1)}
