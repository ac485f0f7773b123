"""Compute gradients of weights outside of loops, and fold updates into the products that compute gradients.

In a Gemm that computes a gradient, the term beta C costs no extra time. The rate of plain SGD folds into the gradient
of the loss, on which all gradients depend linearly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import RewriteRule
from onnxscript.rewriter.pattern import OpsetPatternBuilder, Var

from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import BILINEAR, JOINTLY_LINEAR, LINEAR_IN_FIRST
from graphopt.graph.rewriting import interface_kept
from graphopt.graph.roles import Role, with_role
from graphopt.graph.rules import rule_set
from graphopt.graph.simplify import combine_scalar_factors
from graphopt.graph.values import constant_number, given, is_number, like, next_of, producer_of
from graphopt.targets.scan import hoist_weight_gradients

Rewriting = Callable[[ir.Model], int]  # returns whether, or how many times, it changed a model


def _gemm(op: OpsetPatternBuilder, a: Var, b: Var) -> Var:
    """Return the pattern of a product g, of whose attributes rules decide."""
    return op.Gemm(a, b, _outputs=["g"], _allow_other_attributes=True)


def _alpha(g: ir.Value) -> float:
    return producer_of(g).attributes.get_float("alpha", 1.0)


def _flags(g: ir.Value) -> dict[str, int]:
    return {name: producer_of(g).attributes.get_int(name, 0) for name in ("transA", "transB")}


def _width(x: ir.Value) -> int:
    """Return the product of the known sizes of a value. The batch size is often unknown at compile time."""
    return math.prod(size for size in x.shape or () if isinstance(size, int))


def _is_alone(_: object, g: ir.Value, y: ir.Value | None = None, **values: object) -> bool:
    """Return whether a product has no C and a single reader, which changes the order of axes if it is a transpose."""
    swaps = y is None or producer_of(y).attributes.get_ints("perm", [1, 0])[0] != 0
    return swaps and len(producer_of(g).inputs) == 2 and len(g.uses()) == 1 and not g.is_graph_output()


def _is_plain(_: object, state: ir.Value, g: ir.Value, scalar: ir.Value | None = None, **values: ir.Value) -> bool:
    """Return whether a product has no factor and the shape of a state, and is multiplied by a scalar, if at all."""
    fits = _is_alone(_, g) and _alpha(g) == 1.0 and (scalar is None or is_number(scalar))
    return fits and state.shape == g.shape


def _is_scaled_exactly(_: object, state: ir.Value, g: ir.Value, scalar: ir.Value, **values: ir.Value) -> bool:
    """Return whether a factor is a constant of float32, the precision of the attribute beta."""
    is_exact = constant_number(scalar) is not None and g.dtype == ir.DataType.FLOAT
    return is_exact and _is_plain(_, state, g, scalar)


def _transposed(op: Any, a: ir.Value, b: ir.Value, g: ir.Value, **_: object) -> ir.Value:
    flags = _flags(g)
    return op.Gemm(b, a, alpha=_alpha(g), transA=1 - flags["transB"], transB=1 - flags["transA"])


def _descent(op: Any, state: ir.Value, scalar: ir.Value, a: ir.Value, b: ir.Value, g: ir.Value) -> ir.Value:
    minus = like(op.Neg(scalar), scalar)
    if _width(a) < _width(b):
        return op.Gemm(like(op.Mul(minus, a), a), b, state, **_flags(g))
    return op.Gemm(a, like(op.Mul(minus, b), b), state, **_flags(g))


def _applied(rule: Callable[[], RewriteRule]) -> Rewriting:
    """Return the rewriting that applies a rule wherever it matches, by rules of its own in each thread."""
    return lambda model: rule_set([rule()], commute=True).apply_to_model(model)


def _folded(pattern: Callable[..., Any], gemm: Callable[..., Any], fits: Callable[..., bool]) -> Rewriting:
    return _applied(lambda: RewriteRule(pattern, gemm, fits))


# --- The learning rate in the gradient of the loss ---


def fold_rate_into_loss_gradient(model: ir.Model) -> bool:
    """Replace w - rate g by w + g', where g' = -rate g results from scaling the gradient of the loss by -rate.

    The factor that already scales this gradient, such as 1 / N of a mean, absorbs -rate. One product per parameter
    disappears.
    """
    model.graph.sort()
    names = {next_of(x) for x in with_role(model, Role.PARAMETER)}
    following = [y.producer() for y in with_role(model, Role.NEXT) if y.name in names]
    updates = dict(filter(None, map(_rate_and_update, filter(None, following))))
    replaced = False
    places = {node: i for i, node in enumerate(model.graph)}
    with Emitter(model) as op:
        for root in places:
            scalars = [*filter(is_number, root.inputs)] if root.op_type == "Mul" and updates else []
            factor = min(scalars, key=lambda x: constant_number(x) is None, default=None)
            ends = [] if factor is None else _ends(root.outputs[0], places, updates)
            rates = {product.inputs[0] for product in ends}
            if factor is None or len(rates) != 1:
                continue
            (rate,) = map(given, rates)
            constant, behind = constant_number(factor), factor.producer()
            if constant is not None:
                scale = rate * -constant
            elif behind is not None and behind.op_type == "Neg":
                scale = rate * behind.inputs[0]
            else:
                scale = -rate * factor
            root.replace_input_with(list(root.inputs).index(factor), scale)
            for product in ends:
                update = updates.pop(product)
                old, new = update.outputs[0], op.Add(update.inputs[0], product.inputs[1])
                ir.convenience.replace_all_uses_with(old, like(new, old), replace_graph_outputs=True)
                model.graph.remove([update, product], safe=True)
            replaced = True
    model.graph.sort()
    return replaced


def _rate_and_update(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Return the product rate g and the node w - rate g, if only that node reads the product and it is not 16-bit."""
    product = node.inputs[1].producer() if node.op_type == "Sub" and node.inputs[1] is not None else None
    if product is None or product.op_type != "Mul" or len(product.outputs[0].uses()) != 1:
        return None
    wide = node.outputs[0].dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return (product, node) if wide and is_number(product.inputs[0]) else None


def _ends(root: ir.Value, places: Mapping[ir.Node, int], updates: Collection[ir.Node]) -> list[ir.Node]:
    """Return the products of updates if they alone depend on `root`, all linearly.

    Args:
        places: the place of each node in the order of the graph.
    """
    scaled, ends, waiting = {root}, [], {*root.consumers()}
    while waiting:
        node = min(waiting, key=lambda node: places.get(node, -1))
        waiting.remove(node)
        if node in updates and node.inputs[0] not in scaled:
            ends.append(node)
        elif node in places and _is_linear(node, [x in scaled for x in node.inputs]):
            scaled.update(node.outputs)
            waiting.update(reader for y in node.outputs for reader in y.consumers())
        else:
            return []
    return [] if any(x.is_graph_output() for x in scaled) else ends


def _is_linear(node: ir.Node, scaled: Sequence[bool]) -> bool:
    """Return whether scaling the given inputs of a node scales its outputs."""
    if node.op_type in BILINEAR:
        return sum(scaled) == 1 and len(scaled) == 2
    if node.op_type in LINEAR_IN_FIRST:
        return scaled[0] and sum(scaled) == 1
    return node.op_type in JOINTLY_LINEAR and all(scaled)


UPDATES: dict[str, Rewriting] = {
    "hoist_weight_gradients": hoist_weight_gradients,
    # (a b)' is b' a': the gradient of a weight that the model transposes.
    "fold_transpose_into_gemm": _folded(
        lambda op, a, b: op.Transpose(_gemm(op, a, b), _outputs=["y"], _allow_other_attributes=True),
        _transposed,
        _is_alone,
    ),
    "fold_rate_into_loss_gradient": fold_rate_into_loss_gradient,
    "combine_scalar_factors": _applied(combine_scalar_factors),
    # The plain SGD update w - rate (a b) is (a (-rate b)) + w. The smaller of a and b is scaled.
    "fold_update_into_gemm": _folded(
        lambda op, state, scalar, a, b: op.Sub(state, op.Mul(scalar, _gemm(op, a, b))), _descent, _is_plain
    ),
    # The momentum update is mu m + (a b), with a constant mu.
    "fold_momentum_into_gemm": _folded(
        lambda op, state, scalar, a, b: op.Add(op.Mul(scalar, state), _gemm(op, a, b)),
        lambda op, state, scalar, a, b, g: op.Gemm(a, b, state, beta=constant_number(scalar), **_flags(g)),
        _is_scaled_exactly,
    ),
    "fold_sum_into_gemm": _folded(
        lambda op, state, a, b: op.Add(state, _gemm(op, a, b)),
        lambda op, state, a, b, g: op.Gemm(a, b, state, **_flags(g)),
        _is_plain,
    ),
}


def fold_updates(model: ir.Model, leave_out: Collection[str] = ()) -> None:
    """Rewrite the gradients and updates of a training graph whose initial state is detached."""
    with interface_kept(model):
        for name, fold in UPDATES.items():
            if name not in leave_out:
                fold(model)
    model.graph.sort()
