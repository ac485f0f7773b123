"""Plain SGD: gradients that come already times minus the rate, for what is computed from a loss is linear in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.names import next_of
from graphopt.graph.roles import Role, with_role
from graphopt.graph.traversal import values_read
from graphopt.graph.values import like

# In which inputs an operator is linear: in each of them, or in some together.
IN_EACH = {"Conv", "ConvTranspose", "Gemm", "MatMul", "Mul"}
IN_FIRST = {"Div", "Flatten", "Identity", "Neg", "ReduceMean", "ReduceSum", "Reshape", "Slice", "Split"} | {
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}
IN_ALL = {"Add", "Concat", "Sub", "Sum"}


def scaled_gradients(model: ir.Model) -> bool:
    """Replace w - rate g by w + g', where g' = -rate g is the gradient if that of the loss is scaled by -rate.

    What scales the loss's gradient anyway, 1 / N of a mean, then does so by another number; a product a parameter less.
    """
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


def is_number(x: ir.Value | None) -> bool:
    """Tell whether a value is known to be a scalar."""
    return x is not None and x.shape is not None and len(x.shape) == 0


def _descent(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Return the product of a node w - rate g, if nothing else reads it, and the node; of 32 bits or more."""
    product = node.inputs[1].producer() if node.op_type == "Sub" and node.inputs[1] is not None else None
    if product is None or product.op_type != "Mul" or len(product.outputs[0].uses()) != 1:
        return None
    wide = node.outputs[0].dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return (product, node) if wide and is_number(product.inputs[0]) else None


def _ends(root: ir.Value, nodes: Sequence[ir.Node], updates: Collection[ir.Node]) -> list[ir.Node]:
    """Return the products of updates that all come of `root`, linearly; none where something else does, too."""
    scaled, ends = {root}, []
    for node in nodes:
        if not scaled.intersection(values_read(node)):
            continue
        if node in updates and node.inputs[0] not in scaled:
            ends.append(node)
        elif _is_linear(node, [x in scaled for x in node.inputs]):
            scaled.update(node.outputs)
        else:
            return []
    return [] if any(x.is_graph_output() for x in scaled) else ends


def _is_linear(node: ir.Node, scaled: Sequence[bool]) -> bool:
    """Tell whether a node's outputs are scaled as some of its inputs are."""
    if node.op_type in IN_EACH:
        return sum(scaled) == 1 and len(scaled) == 2
    if node.op_type in IN_FIRST:
        return scaled[0] and sum(scaled) == 1
    return node.op_type in IN_ALL and all(scaled)
