"""Folds constants: what ONNX's reference evaluator computes bit for bit as ONNX Runtime does, and never a weight."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir
import onnxscript.optimizer

from graphopt.graph.metadata import UNTRAINED
from graphopt.graph.rewriting import protect
from graphopt.graph.roles import Role, with_role

# Operators that leave an implementation no choice of a bit. The rest stays in the graph, where the runtime folds it.
EXACT = {
    *("Abs", "Add", "Div", "Mul", "Neg", "Reciprocal", "Sub"),
    *("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Where", "Xor"),
    *("Cast", "Concat", "Flatten", "Gather", "GatherND", "Identity", "Reshape", "Shape", "Size", "Slice"),
    *("Squeeze", "Transpose", "Unsqueeze"),
}
EXACT_INTEGERS = EXACT | {
    *("Clip", "ConstantOfShape", "CumSum", "Expand", "Max", "Min", "Mod", "NonZero", "Range", "ReduceMax"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ScatterND", "Sign", "Tile"),
}
GROWING = {"ConstantOfShape", "Expand", "Range", "Tile"}
SMALL = 100  # elements
MANY = 4096  # tensors that one Split makes: the time that it takes grows with their square


def fold(model: ir.Model, *, floating: bool = True, infer_shapes: bool = False) -> None:
    """Replace nodes that read constants alone by initializers, in place.

    What is computed from a weight stays, as someone may train it or differentiate by it. Until parameters are chosen,
    every floating initializer may be a weight; afterwards, those marked as untrained are.

    Args:
        floating: fold floating numbers too, not integers and booleans alone.
        infer_shapes: infer types and shapes on the way, and fold what follows from them.
    """
    weights = set(_weights(model))

    def should_fold(node: ir.Node) -> bool | None:
        y = node.outputs[0]
        exact = EXACT if _is_floating(y) else EXACT_INTEGERS
        if node.op_type not in exact or not weights.isdisjoint(node.inputs):
            return False
        if _is_floating(y) and not floating:
            return False
        return _is_small(y) if node.op_type in GROWING else None

    with protect(_splits_of_many(model)):  # for which onnxscript writes out as many tensors
        onnxscript.optimizer.fold_constants(model, onnx_shape_inference=infer_shapes, should_fold=should_fold)


def _splits_of_many(model: ir.Model) -> Iterator[ir.Node]:
    for node in model.graph.all_nodes():
        x = node.inputs[0] if node.op_type == "SplitToSequence" and node.domain == "" else None
        if x is not None and any(isinstance(dim, int) and dim > MANY for dim in x.shape or ()):
            yield node


def _weights(model: ir.Model) -> Iterator[ir.Value]:
    chosen = bool(with_role(model, Role.PARAMETER))
    for graph in model.graphs():
        for x in graph.initializers.values():
            if _is_floating(x) and (not chosen or UNTRAINED.is_set(x)):
                yield x


def _is_floating(x: ir.Value) -> bool:
    return x.dtype is not None and x.dtype.is_floating_point()


def _is_small(x: ir.Value) -> bool:
    return x.shape is not None and x.shape.is_static() and math.prod(x.shape.numpy()) <= SMALL
