"""Replace operators by fewer or faster ones that compute the same values, as measured on ONNX Runtime's CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.blocks import gather_blocks
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import GRADIENT_OF
from graphopt.graph.rewriting import Pass, interface_kept
from graphopt.graph.roles import STATE, with_role
from graphopt.graph.simplify import Simplify
from graphopt.graph.strictness import check_sorted, is_strict
from graphopt.targets.bfloat16 import compute_bfloat16_in_float32
from graphopt.targets.joining import join_small_vectors
from graphopt.targets.onnxruntime.convolution import (
    pool_channels_as_batch,
    transposed_convolution_as_convolution,
    unpool_first_maxima,
    widen_convolution_products,
)
from graphopt.targets.onnxruntime.vectors import column_sums_as_product
from graphopt.targets.portable.portable import scatter_by_element
from graphopt.targets.scan import vectorize_steps
from graphopt.targets.updates import UPDATES, Rewriting

# Recipes use the names.
FUSIONS: dict[str, Rewriting] = {
    "scatter_by_element": scatter_by_element,
    "compute_bfloat16_in_float32": lambda model: bool(compute_bfloat16_in_float32(model)),
    "transposed_convolution_as_convolution": transposed_convolution_as_convolution,
    "widen_convolution_products": widen_convolution_products,
    "unpool_first_maxima": unpool_first_maxima,
    "pool_channels_as_batch": pool_channels_as_batch,
    **UPDATES,
    "gather_blocks": gather_blocks,
    "vectorize_steps": vectorize_steps,
    "join_small_vectors": join_small_vectors,
    "column_sums_as_product": column_sums_as_product,
}


@dataclass(frozen=True)
class Fuse(Pass):
    """Rewrite operators into faster ones. Results stay the same up to rounding.

    Args:
        leave_out: names of fusions to leave out, from `graphopt.targets.onnxruntime.fuse.FUSIONS`.

    Raises:
        GraphoptError: `leave_out` contains an unknown name.

    >>> from graphopt import models
    >>> steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    >>> plain, fused = (graphopt.compile(models.mlp((4,), 3), **steps, fuse=fuse) for fuse in (None, passes.Fuse()))
    >>> len(fused.graph) < len(plain.graph)
    True
    """

    leave_out: tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.leave_out:
            if name not in FUSIONS:
                raise GraphoptError(unknown("fusion", name, FUSIONS))

    def rewrite(self, model: ir.Model) -> None:
        for node in model.graph:
            for y in node.outputs:
                GRADIENT_OF.remove(y)
        changed = False
        with interface_kept(model):
            for name, fusion in FUSIONS.items():
                if is_strict():
                    check_sorted(model, f"what runs before {name}")
                if name not in self.leave_out and fusion(model):
                    model.graph.sort()  # fusions may read nodes in order, and put new ones behind their readers
                    changed = True
        if not with_role(model, *STATE):  # nothing trains, so that there is no inference model to restore
            for node in model.graph.all_nodes():
                for y in node.outputs:
                    InferenceForm.remove(y)
        if changed:
            Simplify().rewrite(model)
