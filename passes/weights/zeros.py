"""Keep the zeros of pruned and masked weights while the other numbers train."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import Flag
from graphopt.graph.operators import CONVOLUTIONS, MATRIX_PRODUCTS
from graphopt.graph.values import like, redirect
from passes.differentiate import stop_gradient
from passes.weights import evidence
from passes.weights.initializers import array

ZEROS_STAY = Flag("graphopt.zeros_stay")  # an initializer that was pruned or masked, whose zeros do not train

_WEIGHTED = CONVOLUTIONS | MATRIX_PRODUCTS
_LEAST_PRUNED_SHARE = 1 / 8  # the smallest share of zeros that indicates pruning: a channel of eight


def stay(value: ir.Value, recorded: bool) -> bool:
    """Return whether the zeros of a weight stay: those of a mask, or of pruning if no record says how it trained."""
    if ZEROS_STAY.is_set(value):
        return True
    return (
        not recorded and is_factor(value) and evidence.is_masked(array(value)) and _share(value) >= _LEAST_PRUNED_SHARE
    )


def is_factor(value: ir.Value) -> bool:
    """Return whether only products and convolutions read a weight, as their weight."""
    uses = list(value.uses())
    return bool(uses) and all(node.op_type in _WEIGHTED and index < 2 for node, index in uses)


def why(value: ir.Value) -> str:
    """Return how many zeros stay, as a phrase."""
    numbers = array(value)
    return f"{int((numbers == 0).sum()):,} of {numbers.size:,} numbers are 0 and stay so, as of pruning or a mask"


def keep(model: ir.Model, weight: ir.Value) -> None:
    """Stop the gradient at the zeros of a weight; inference reads the weight itself."""
    uses = list(weight.uses())
    with Emitter(model) as op:
        zero = op.Equal(weight, op.constant(0, like=weight))
        kept = InferenceForm(same_as=2).write(op.Where(zero, stop_gradient(op, weight), weight))
        like(kept, weight)
    redirect(uses, kept)


def _share(value: ir.Value) -> float:
    numbers = array(value)
    return float(np.mean(numbers == 0))
