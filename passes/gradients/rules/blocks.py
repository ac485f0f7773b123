"""Compute the cross-entropy of tokens in blocks, and its gradient in the same pass over them.

The logits of a block exist only while it is computed, in the body of a Scan. If the loss is a weighted sum of the
tokens' losses, with weights that do not depend on these, the gradient of a block's logits is known with them. The Scan
that computes the losses then returns the gradients of what the logits are computed from, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.copying import again
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import IN_BLOCKS, Flag, Note, expect
from graphopt.graph.operators import SHAPE_READERS
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import is_floating, like, producer_of, wide_type
from passes.gradients.registry import Active, Gradients, rule
from passes.gradients.rules.control_flow import copied_body, emit_scan, finish, scan
from passes.gradients.walk import backward, zeros

# In a body that computes losses of tokens: the node of the logits of a block
BLOCK_LOGITS = Flag("graphopt.block_logits")


@dataclass(frozen=True)
class TokenBlocks(Note, key="graphopt.token_blocks", expected="a share for label smoothing"):
    """Mark a Scan that computes the cross-entropy of tokens in blocks from their logits.

    Args:
        label_smoothing: the share of the target that is spread over all classes.
    """

    label_smoothing: float = 0.0

    def check(self) -> None:
        expect(0 <= self.label_smoothing <= 1)


def in_blocks(y: ir.Value) -> ir.Node:
    """Keep the work of the Scan that computes `y` in its loop, and return the Scan."""
    return producer_of(IN_BLOCKS.mark(y))


def token_losses(op: Emitter, logits: ir.Value, label: ir.Value, smoothing: float) -> ir.Value:
    """Emit the cross-entropy of each row of `logits`, given its label, in float32 or wider."""
    return _losses(op, op.LogSoftmax(op.cast(logits, wide_type(logits)), axis=-1), label, smoothing)


def _losses(op: Emitter, log_p: ir.Value, label: ir.Value, smoothing: float) -> ir.Value:
    losses: ir.Value = -op.Squeeze(op.GatherElements(log_p, op.Unsqueeze(label, [-1]), axis=-1), [-1])
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * op.ReduceMean(log_p, [-1], keepdims=0)
    return losses


def _losses_and_gradient(
    op: Emitter, logits: ir.Value, label: ir.Value, weight: ir.Value, smoothing: float
) -> tuple[ir.Value, ir.Value]:
    """Emit the losses of a block, and the gradient of their weighted sum with respect to its logits."""
    log_p = op.LogSoftmax(op.cast(logits, wide_type(logits)), axis=-1)
    place, weight = op.Unsqueeze(label, [-1]), op.Unsqueeze(weight, [-1])
    gradient = op.Exp(log_p) * weight
    if smoothing:
        gradient = gradient - (smoothing / op.count(log_p, [-1])) * weight
    own = op.GatherElements(gradient, place, axis=-1) - (1 - smoothing) * weight
    gradient = like(op.ScatterElements(gradient, place, own, axis=-1), log_p)
    return _losses(op, log_p, label, smoothing), op.cast(gradient, logits.dtype)


@rule("Scan")
def scan_or_blocks(
    op: Emitter, dy: Input, *inputs: ir.Value, node: ir.Node, further: list[Input], active: Active
) -> Gradients:
    """Differentiate the losses of tokens in blocks by one Scan, and any other Scan by another one in reverse."""
    note = TokenBlocks.read(node)
    if note is None or dy is None:
        return scan(op, dy, *inputs, node=node, further=further, active=active)
    count = len(node.inputs)
    body = copied_body(node.attributes["body"].as_graph())
    logits = next(y for inner in body if BLOCK_LOGITS.is_set(inner) for y in inner.outputs)
    *hidden, label = body.inputs
    outer = [x for x in inputs[count:] if x in active and is_floating(x)]
    wanted = [i for i in range(count - 1) if inputs[i] in active]
    with op.within(body) as inner:
        weight = inner.value_like(body.outputs[0])
        losses, seed = _losses_and_gradient(inner, logits, label, weight, note.label_smoothing)
        gradients = backward(inner, body, {logits: seed}, [*(hidden[i] for i in wanted), *outer])
        totals = [inner.value_like(x) for x in outer]
        sums = [like(total + gradients[x], x) for total, x in zip(totals, outer, strict=True)]
        body.inputs[:] = totals
        finish(inner, body, [*sums, like(losses, weight), *(gradients[hidden[i]] for i in wanted)])
    rows = [*hidden, label, weight]
    sequences = [(row, x, 0, 0) for row, x in zip(rows, [*inputs[:count], dy], strict=True)]
    models = [*outer, node.outputs[0], *(inputs[i] for i in wanted)]
    starts = [zeros(op, x) for x in outer]
    results = emit_scan(op, body, starts, sequences, models, [(0, 0)] * (1 + len(wanted)))
    in_blocks(results[-1])
    _read_shapes_elsewhere(op, node, dy)
    if node not in ancestors([dy]):  # otherwise, the weights depend on the losses
        ir.convenience.replace_all_uses_with(node.outputs[0], results[len(outer)])
    places: dict[object, ir.Value] = dict(zip(outer, results, strict=False))
    places.update(zip(wanted, results[len(outer) + 1 :], strict=True))
    return [*(places.get(i) for i in range(count)), *(places.get(x) for x in inputs[count:])]


def _read_shapes_elsewhere(op: Emitter, node: ir.Node, dy: ir.Value) -> None:
    """Make the weights of the losses read shapes from copies that do not depend on the losses themselves."""
    readers = [reader for reader in ancestors([dy]) if reader.op_type in SHAPE_READERS]
    before = [x for reader in readers for x in reader.inputs if x is not None and node in ancestors([x])]
    if not before or not isinstance(node.graph, ir.Graph):
        return
    losses, label = node.outputs[0], node.inputs[-1]
    copies = {losses: like(op.Cast(label, to=losses.dtype), losses)}
    needed = ancestors(before)
    for each in [each for each in node.graph if each in needed]:
        if any(x in copies for x in each.inputs):
            copies |= again(op, [each], copies)
    for reader in readers:
        x = reader.inputs[0]
        if x in copies:
            reader.replace_input_with(0, copies[x])
