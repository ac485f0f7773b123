"""Fold the learning rate of plain SGD into the gradient of the loss, on which all gradients depend linearly."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import BILINEAR, JOINTLY_LINEAR, LINEAR_IN_FIRST
from graphopt.graph.roles import Role, with_role
from graphopt.graph.traversal import values_read
from graphopt.graph.values import is_number, like, next_of


def fold_rate_into_loss_gradient(model: ir.Model) -> bool:
    """Replace w - rate g by w + g', where g' = -rate g results from scaling the gradient of the loss by -rate.

    The factor that already scales this gradient, such as 1 / N of a mean, absorbs -rate. One product per parameter
    disappears.
    """
    model.graph.sort()
    updates = dict(filter(None, map(_descent, _following(model))))
    replaced = False
    nodes = list(model.graph)
    with Emitter(model) as op:
        for i, root in enumerate(nodes):
            factor = next(filter(is_number, root.inputs), None) if root.op_type == "Mul" and updates else None
            ends = [] if factor is None else _ends(root.outputs[0], nodes[i + 1 :], updates)
            rates = {product.inputs[0] for product in ends}
            if factor is None or len(rates) != 1:
                continue
            (rate,) = rates
            assert rate is not None
            constant = ir.convenience.get_const_tensor(factor)
            behind = factor.producer()
            if constant is not None:
                scale = rate * -float(constant.numpy())
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


def _following(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that compute parameters' next values."""
    names = {next_of(x) for x in with_role(model, Role.PARAMETER)}
    return [y.producer() for y in with_role(model, Role.NEXT) if y.name in names and y.producer()]  # type: ignore[misc]


def _descent(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Return the product rate g and the node w - rate g, if only that node reads the product and it is not 16-bit."""
    product = node.inputs[1].producer() if node.op_type == "Sub" and node.inputs[1] is not None else None
    if product is None or product.op_type != "Mul" or len(product.outputs[0].uses()) != 1:
        return None
    wide = node.outputs[0].dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return (product, node) if wide and is_number(product.inputs[0]) else None


def _ends(root: ir.Value, nodes: Sequence[ir.Node], updates: Collection[ir.Node]) -> list[ir.Node]:
    """Return the products of updates if all depend linearly on `root`, and none if anything else depends on it.

    Args:
        nodes: the nodes after `root`, in topological order; nothing is returned if they lack a reader.
    """
    scaled, ends, seen = {root}, [], set()
    for node in nodes:
        if not scaled.intersection(values_read(node)):
            continue
        seen.add(node)
        if node in updates and node.inputs[0] not in scaled:
            ends.append(node)
        elif _is_linear(node, [x in scaled for x in node.inputs]):
            scaled.update(node.outputs)
        else:
            return []
    whole = all(seen.issuperset(x.consumers()) and not x.is_graph_output() for x in scaled)
    return ends if whole else []


def _is_linear(node: ir.Node, scaled: Sequence[bool]) -> bool:
    """Return whether scaling the given inputs of a node scales its outputs."""
    if node.op_type in BILINEAR:
        return sum(scaled) == 1 and len(scaled) == 2
    if node.op_type in LINEAR_IN_FIRST:
        return scaled[0] and sum(scaled) == 1
    return node.op_type in JOINTLY_LINEAR and all(scaled)
