"""Fold constants that ONNX's reference evaluator and ONNX Runtime compute bit-identically; keep all weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir
import onnxscript.optimizer

from graphopt.errors import GraphoptError, cause
from graphopt.graph.metadata import UNTRAINED
from graphopt.graph.operators import GROWING, PREDICATES, VIEWS
from graphopt.graph.rewriting import protect
from graphopt.graph.roles import Role, with_role
from graphopt.graph.values import is_floating

# Operators with the same result in every implementation, bit for bit. The runtime folds all others.
EXACT = (
    VIEWS
    | PREDICATES
    | {
        *("Abs", "Add", "Div", "Mul", "Neg", "Reciprocal", "Sub"),
        *("Cast", "Concat", "Gather", "GatherND", "Shape", "Size", "Slice", "Transpose", "Where"),
    }
)
EXACT_INTEGERS = EXACT | {
    *("Clip", "ConstantOfShape", "CumSum", "Expand", "Max", "Min", "Mod", "NonZero", "Range", "ReduceMax"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ScatterND", "Sign", "Tile"),
}
SMALL_CONSTANT = 100  # elements
MOST_SPLIT_OUTPUTS = 4096  # outputs of a Split: the time of folding grows with the square of their number


def fold(model: ir.Model, *, floating: bool = True, infer_shapes: bool = False) -> None:
    """Replace nodes whose inputs are all constant by initializers, in place.

    Nodes that depend on a weight stay, because the weight may be trained or differentiated by. Before parameters are
    chosen, every floating-point initializer counts as a weight; afterwards, those marked as untrained do.

    Args:
        floating: fold floating-point numbers too; otherwise only integers and booleans.
        infer_shapes: infer types and shapes in between, and fold the constants that follow from them.
    """
    weights = set(_weights(model))

    def should_fold(node: ir.Node) -> bool | None:
        y = node.outputs[0]
        if any(x is not None and x.dtype is ir.DataType.STRING for x in [*node.inputs, *node.outputs]):
            return False
        exact = EXACT if is_floating(y) else EXACT_INTEGERS
        if node.op_type not in exact or not weights.isdisjoint(node.inputs):
            return False
        if is_floating(y) and not floating:
            return False
        if node.op_type not in GROWING:
            return None
        return y.shape is not None and y.shape.is_static() and math.prod(y.shape.numpy()) <= SMALL_CONSTANT

    try:
        with protect(_splits_of_many(model)):  # onnxscript would write a tensor for each output
            options = {"onnx_shape_inference": infer_shapes, "should_fold": should_fold}
            onnxscript.optimizer.fold_constants(model, **options)
    except RuntimeError as error:  # of a node whose constants it cannot compute with
        raise GraphoptError(
            f"expected constants that can be computed, found others: {cause(error)}"
        ) from error


def _splits_of_many(model: ir.Model) -> Iterator[ir.Node]:
    for node in model.graph.all_nodes():
        x = node.inputs[0] if node.op_type == "SplitToSequence" and node.domain == "" else None
        if x is not None and any(isinstance(dim, int) and dim > MOST_SPLIT_OUTPUTS for dim in x.shape or ()):
            yield node


def _weights(model: ir.Model) -> Iterator[ir.Value]:
    chosen = bool(with_role(model, Role.PARAMETER))
    for graph in model.graphs():
        for x in graph.initializers.values():
            if is_floating(x) and (not chosen or UNTRAINED.is_set(x)):
                yield x
