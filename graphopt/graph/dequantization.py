"""Dequantize frozen weights where they are used, so that one of them at a time is in memory in full precision.

A DequantizeLinear of constants depends on nothing. A runtime folds it, or runs all of them first, and an output that
the backward pass reads again stays alive: both hold the weights as floats (QLoRA, Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314, dequantizes a weight for each product).
"""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.copying import again
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.operators import RANDOM
from graphopt.graph.roles import STATE, Role, role_of
from graphopt.graph.tables import dequantizes_frozen, gather_packed_rows
from graphopt.graph.traversal import subgraphs, values_read
from graphopt.graph.values import dims_of, given, is_read, like

_EARLY = {*STATE, Role.HYPERPARAMETER}


def dequantize_late(model: ir.Model) -> bool:
    """Give each reader of a dequantized weight a DequantizeLinear of its own, which waits for its other inputs.

    A Gather of rows dequantizes these rows alone. What is computed from weights alone in between, such as a transpose
    or the sum with an adapter, is computed for each reader, too. The inference form of a training graph keeps one
    DequantizeLinear that waits for nothing. Return whether anything changed.
    """
    gathers = gather_packed_rows(model)
    weights = _Weights(model.graph)
    if not weights.expanded:
        return gathers
    with Emitter(model) as op:
        late = _Late(op, weights)
        for node in weights.readers:
            with op.before(node):
                late.serve(node)
    unread = [node for node in reversed(weights.nodes) if not any(map(is_read, node.outputs))]
    model.graph.remove(unread, safe=True)
    return True


class _Weights:
    """Find the values that are computed from weights alone, and the nodes that read them and depend on data."""

    def __init__(self, graph: ir.Graph) -> None:
        # Each DequantizeLinear of a frozen weight, and what follows from weights alone
        self.nodes: list[ir.Node] = []
        self.expanded: set[ir.Value] = set()  # their outputs
        self.readers: list[ir.Node] = []
        self.position: dict[ir.Value, int] = {}  # of values that depend on data, in the graph
        self.position.update((x, -1) for x in graph.inputs if role_of(x) not in _EARLY)
        for i, node in enumerate(graph):
            read = values_read(node)
            if node.op_type in RANDOM or any(x in self.position for x in read):
                self.position.update((y, i) for y in node.outputs)
                if not self.expanded.isdisjoint(node.inputs):
                    self.readers.append(node)
            elif not subgraphs(node) and (dequantizes_frozen(node) or not self.expanded.isdisjoint(node.inputs)):
                self.nodes.append(node)
                self.expanded.update(node.outputs)

    def latest(self, node: ir.Node) -> ir.Value:
        """Return the input of a reader that is computed last."""
        return max((x for x in node.inputs if x in self.position), key=lambda x: self.position[x])


class _Late:
    """Emit copies of what is computed from weights alone, for one reader or several that wait for the same value."""

    def __init__(self, op: Emitter, weights: _Weights) -> None:
        self._op, self._weights = op, weights
        self._zeros: dict[ir.Value, ir.Value] = {}
        self._copies: dict[ir.Value, dict[ir.Value, ir.Value]] = {}  # by the value that they wait for

    def serve(self, node: ir.Node) -> None:
        """Replace the inputs of a reader by copies."""
        awaited = self._weights.latest(node)
        for i, x in enumerate(node.inputs):
            if x in self._weights.expanded:
                node.replace_input_with(i, self._copy(x, awaited))

    def _copy(self, x: ir.Value, awaited: ir.Value) -> ir.Value:
        node, copies = x.producer(), self._copies.setdefault(awaited, {})
        if x not in self._weights.expanded or node is None:
            return x
        if x not in copies:
            read = {y: self._copy(y, awaited) for y in node.inputs if y is not None}
            if dequantizes_frozen(node):
                scale = given(node.inputs[1])
                read[scale] = self._after(read[scale], awaited)
            copies |= again(self._op, [node], read, notes=True)
        return copies[x]

    def _after(self, scale: ir.Value, awaited: ir.Value) -> ir.Value:
        """Return a scale reshaped by a shape that depends on another value. A size of 0 means the size of the scale."""
        op, rank = self._op, len(dims_of(scale))
        if awaited not in self._zeros:
            # The index of the only one of at most one element: no runtime folds it
            never = op.Cast(op.Less(op.Abs(op.first(awaited)), 0.0), to=ir.DataType.INT64)
            self._zeros[awaited] = op.ReduceSum(never, [0])
        zero = self._zeros[awaited]
        form = InferenceForm(same_as=0)
        if rank == 0:
            return form.write(like(op.Squeeze(form.write(op.Reshape(scale, zero + 1)), [0]), scale))
        shape = zero if rank == 1 else op.Expand(zero, [rank])
        return form.write(like(op.Reshape(scale, shape), scale))
