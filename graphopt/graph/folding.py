"""Fold constants: replace nodes whose inputs are all constant."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.optimizer._constant_folding import (
    DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
    DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
    FoldConstantsPass,
    Replacement,
    _merge_shapes,
    basic_constant_propagation,
    registry,
)

from graphopt.errors import GraphoptError, cause
from graphopt.graph.metadata import UNTRAINED
from graphopt.graph.node_inference import infer_outputs
from graphopt.graph.operators import GROWING, PREDICATES, VIEWS
from graphopt.graph.rewriting import protect
from graphopt.graph.roles import Role, with_role
from graphopt.graph.traversal import all_nodes, subgraphs
from graphopt.graph.values import is_floating, is_static

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


def fold(model: ir.Model, *, only_integers: bool = False) -> None:
    """Replace nodes whose inputs are all constant by initializers, in place.

    Nodes that depend on a weight stay, because the weight may be trained or differentiated by. Before parameters are
    chosen, every floating-point initializer counts as a weight; afterwards, those marked as untrained do.

    Args:
        only_integers: fold integers and booleans, including those that follow from shapes, which are inferred in
            between; by default, fold floating-point numbers too.
    """
    chosen = bool(with_role(model, Role.PARAMETER))
    initializers = (x for graph in model.graphs() for x in graph.initializers.values())
    weights = {x for x in initializers if is_floating(x) and (not chosen or UNTRAINED.is_set(x))}

    def should_fold(node: ir.Node) -> bool | None:
        y = node.outputs[0]
        if any(x is not None and x.dtype is ir.DataType.STRING for x in [*node.inputs, *node.outputs]):
            return False
        if is_floating(y) and only_integers:
            return False
        exact = EXACT if is_floating(y) else EXACT_INTEGERS
        if node.op_type not in exact or not weights.isdisjoint(node.inputs):
            return False
        if node.op_type not in GROWING:
            return None
        return y.shape is not None and y.shape.is_static() and math.prod(y.shape.numpy()) <= SMALL_CONSTANT

    try:
        with protect(_splits_of_many(model)):  # onnxscript would write a tensor for each output
            _Folding(
                shape_inference=only_integers,
                input_size_limit=DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
                output_size_limit=DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
                should_fold=should_fold,
            )(model)
    except RuntimeError as error:  # of a node whose constants it cannot compute with
        raise GraphoptError(f"expected constants that can be computed, found others: {cause(error)}") from error


class _Folding(FoldConstantsPass):
    """onnxscript's folding, which infers nodes that are alike once, and looks closely only at nodes that may change."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._changed: set[ir.Value | None] = set()  # values that have another shape, or a constant, since

    def visit_node(self, node: ir.Node, root: ir.Graph | ir.Function) -> None:
        if node.op_type == "Constant" and node.domain == "":
            basic_constant_propagation([node])
        elif not self._stays(node):
            super().visit_node(node, root)
        elif self.shape_inference:
            self._do_inference(node)

    def replace_node(self, node: ir.Node, replacement: Replacement, root: ir.Graph | ir.Function) -> None:
        self._changed.update(replacement.new_outputs)
        super().replace_node(node, replacement, root)

    def _stays(self, node: ir.Node) -> bool:
        """Return whether a node surely stays: no evaluator takes it, or its inputs are neither known nor constant."""
        known = self._state.symbolic_value_map
        if subgraphs(node) or not any(x is not None and x.const_value is None for x in node.inputs):
            return False
        if not known.keys().isdisjoint(node.inputs):
            return False
        # The evaluator of Add is for sizes.
        operator = node.domain, node.op_type
        return operator not in registry.op_evaluators or (operator == ("", "Add") and is_floating(node.outputs[0]))

    def _prepare_folded_tensor(
        self, node: ir.Node, output_name: str, output_array: object
    ) -> ir.Tensor[np.ndarray] | None:
        if not isinstance(output_array, np.ndarray) or output_array.size > self.output_size_limit:
            return super()._prepare_folded_tensor(node, output_name, output_array)
        return ir.Tensor(output_array, name=output_name)

    def _do_inference(self, node: ir.Node) -> None:
        if all(y.type is not None and is_static(y) for y in node.outputs):
            return
        is_typed = all(y.type is not None and y.shape is not None for y in node.outputs)
        if is_typed and self._changed.isdisjoint(node.inputs):  # as inference of the whole graph found it
            return
        with contextlib.suppress(Exception):
            found = infer_outputs(node, self._opset_imports[node.domain])
            for y, (kind, shape) in zip(node.outputs, found, strict=True):
                if kind is not None:
                    before = y.shape
                    y.shape, y.type = _merge_shapes(before, shape), kind
                    if y.shape != before:
                        self._changed.add(y)


def _splits_of_many(model: ir.Model) -> Iterator[ir.Node]:
    for node in all_nodes(model.graph):
        x = node.inputs[0] if node.op_type == "SplitToSequence" and node.domain == "" else None
        if x is not None and any(isinstance(dim, int) and dim > MOST_SPLIT_OUTPUTS for dim in x.shape or ()):
            yield node
