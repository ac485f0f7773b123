"""Find the part of a model that computes the logits of each token alone, and compute its loss in blocks of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import STOP_GRADIENT
from graphopt.graph.operators import ELEMENTWISE_OPERATORS, VIEWS
from graphopt.graph.roles import FED, role_of
from graphopt.graph.traversal import values_read
from graphopt.graph.values import constant_of, dims_of, like, name_of, producer_of, rank, redirect
from graphopt.graph.weight_kinds import PRODUCT, weight_kinds_of
from passes.gradients.rules.blocks import BLOCK_LOGITS, TokenBlocks, in_blocks, token_losses
from passes.gradients.rules.control_flow import scan_over

_MANY_CLASSES = 4096  # from this number of classes on, blocks pay
_LOGITS_OF_A_BLOCK = 2**23  # the numbers in a block of logits
_FEWEST_TOKENS = 128  # the fewest tokens of a block, which reads all weights of the head
_MOST_HEAD_NODES = 64  # a head has no more nodes


@dataclass(frozen=True)
class TokenHead:
    """Hold the nodes, in graph order, that compute the logits of a token from numbers of the same token."""

    nodes: Sequence[ir.Node]
    hidden: Sequence[ir.Value]
    logits: ir.Value


def find_head(logits: ir.Value) -> TokenHead | None:
    """Return the smallest part before the logits that begins with products with weights, or None.

    Beside the product itself, it may have a bias, a soft cap, factors, casts, and the products of an adapter.
    """
    graph = logits.graph
    if not isinstance(graph, ir.Graph):
        return None
    fed = {x for x in graph.inputs if role_of(x) in FED}
    position: dict[ir.Node | None, int] = {}
    for i, each in enumerate(graph):
        position[each] = i
        if not fed.isdisjoint(values_read(each)):
            fed.update(each.outputs)
    front = {logits: False}  # whether all ways from a value to the logits have a product
    nodes: list[ir.Node] = []
    best = None
    while len(nodes) < _MOST_HEAD_NODES:
        last = [x for x in front if (made := x.producer()) is not None and _is_tokenwise(made, fed)]
        if not last:
            break
        y = max(last, key=lambda x: position[x.producer()])
        node, behind = producer_of(y), front.pop(y)
        nodes.append(node)
        behind = behind or _is_product(node)
        for x in _tokens(node, fed):
            front[x] = front.get(x, True) and behind
        if all(front.values()) and (best is None or len(front) < len(best.hidden)):
            best = TokenHead(nodes[::-1], list(front), logits)
        if len(front) == 1 and all(front.values()):
            break
    return best


def compute_all_logits(model: ir.Model, logits: ir.Value) -> None:
    """Make a head that reads the last token alone read all tokens in training. Predictions are those of the file.

    Files of onnxruntime-genai's builder with `prune_lm_head=true` have a Gather before the head, others a Slice.
    """
    head = find_head(logits) if dims_of(logits)[1] == 1 else None
    if head is None or len(head.hidden) > 1:
        return
    (last,) = head.hidden
    node = last.producer()
    if node is not None and node.op_type == "Unsqueeze" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or not _keeps_last(node) or node.inputs[0] is None:
        return
    whole, uses = node.inputs[0], list(last.uses())
    with Emitter(model) as op:
        both = InferenceForm(same_as=0, predicting=True).write(op.Concat(last, whole, axis=1))
        tokens = like(op.Slice(both, [1], [2**62], [1]), whole)
        redirect(uses, InferenceForm(same_as=0, predicting=True).write(tokens))
    model.graph.sort()
    for each in head.nodes:
        for y in each.outputs:
            first, _, *others = dims_of(y)
            y.shape = ir.Shape([first, dims_of(whole)[1], *others])
    first, _, *others = dims_of(logits)
    logits.shape = ir.Shape([first, f"tokens of {name_of(logits)}", *others])  # one in predictions


def _keeps_last(node: ir.Node) -> bool:
    """Return whether a node keeps the last token of each row."""
    places = [constant_of(x) for x in node.inputs[1:4]]
    if node.op_type == "Gather":
        is_second = node.attributes.get_int("axis", 0) == 1
    else:
        is_second = node.op_type == "Slice" and len(places) == 3 and places[2] is not None and [*places[2]] == [1]
    return is_second and places[0] is not None and [*places[0].ravel()] == [-1]


def _tokens(node: ir.Node, fed: set[ir.Value]) -> list[ir.Value]:
    """Return the inputs of a node that have a row for each token."""
    if node.op_type not in ELEMENTWISE_OPERATORS:
        return [x for x in node.inputs[:1] if x is not None]
    lead = dims_of(node.outputs[0])[:-1]
    return [x for x in node.inputs if x in fed and x is not None and dims_of(x)[:-1] == lead and lead]


def _is_tokenwise(node: ir.Node, fed: set[ir.Value]) -> bool:
    """Return whether a node computes each row of its output from the same rows of its inputs."""
    if any(x is not None and x.shape is None for x in (*node.inputs, *node.outputs)):
        return False
    y = node.outputs[0]
    form = InferenceForm.read(y)
    if STOP_GRADIENT.is_set(node) or (form is not None and not form.merged):
        return False  # a copy in a body would not switch to inference
    own = [*dict.fromkeys(_tokens(node, fed))]
    others = [x for x in node.inputs if x is not None and x not in own]
    if not own or any(x in fed and rank(x) > 1 for x in others):
        return False
    if node.op_type in VIEWS and node.op_type != "Identity":
        return isinstance(dims_of(y)[-1], int) and dims_of(y)[-1] == dims_of(own[0])[-1] and rank(own[0]) > 1
    if node.op_type == "MatMul":
        return rank(others[0]) == 2 if others else False
    if node.op_type == "Gemm":
        return not node.attributes.get_int("transA", 0)
    if _is_product(node):
        return True
    flat = all(all(dim == 1 for dim in dims_of(x)[:-1]) for x in others)
    return node.domain == "" and node.op_type in ELEMENTWISE_OPERATORS and flat


def _is_product(node: ir.Node) -> bool:
    """Return whether a node multiplies each row of its first input by a weight."""
    return any(kind.name == PRODUCT and kind.x == 0 for kind in weight_kinds_of(node).values())


def losses_of_tokens(
    op: Emitter,
    prediction: ir.Value,
    label: ir.Value,
    smoothing: float,
    blocks: int | Literal["auto"] | None,
    loss: str,
) -> ir.Value:
    """Emit the cross-entropy of each token, in the shape of `label`, in blocks if that is wanted and possible.

    Args:
        prediction: the logits, with the classes along the last axis.
        blocks: the number of blocks; None for all logits at once; `auto` for blocks if there are many classes.
        loss: what wants them, for the warning.
    """
    classes, head = dims_of(prediction)[-1], None
    if blocks is not None and (blocks != "auto" or not isinstance(classes, int) or classes >= _MANY_CLASSES):
        head = find_head(prediction)
        if head is None:
            warnings.warn(
                f"{loss}: expected {name_of(prediction)!r} to come out of a product with a weight, found "
                f"{getattr(prediction.producer(), 'op_type', 'an input')}: a step holds the logits of all tokens",
                stacklevel=2,
            )
    if head is None:
        losses = token_losses(op, prediction, label, smoothing)
    else:
        losses = losses_in_blocks(op, head, label, smoothing, None if blocks == "auto" else blocks)
    return op.cast(losses, prediction.dtype)


def losses_in_blocks(op: Emitter, head: TokenHead, label: ir.Value, smoothing: float, blocks: int | None) -> ir.Value:
    """Emit the cross-entropy of each token, in the shape of `label`, by a Scan over blocks of tokens.

    Args:
        blocks: the number of blocks; None for so many that a block has about `_LOGITS_OF_A_BLOCK` logits, and at
            least `_FEWEST_TOKENS` rows.
    """
    classes = dims_of(head.logits)[-1]
    most = max(_FEWEST_TOKENS, _LOGITS_OF_A_BLOCK // classes) if isinstance(classes, int) else _FEWEST_TOKENS
    tokens = op.Size(label)
    count = op.Max(op.Div(tokens + (most - 1), most), 1)
    if blocks is not None:
        count = op.Min(op.Max(tokens, 1), blocks)
    rows = op.Div(tokens + (count - 1), count)
    sizes = op.Concat(op.Unsqueeze(count, [0]), op.Unsqueeze(rows, [0]), axis=0)
    behind = op.Unsqueeze(count * rows - tokens, [0])  # rows that fill up the last block
    name = name_of(head.logits)
    one, padded, lead = [f"{name}/tokens"], [f"{name}/padded"], [f"{name}/blocks", f"{name}/rows"]

    def split(x: ir.Value, *width: int | ir.SymbolicDim) -> ir.Value:
        size = [op.constant([dim]) if isinstance(dim, int) else op.Shape(x, start=-1) for dim in width]
        flat = op.Reshape(x, op.Concat(op.Unsqueeze(tokens, [0]), *size, axis=0) if width else [-1])
        none = [0] * len(width)
        flat.shape = ir.Shape([*one, *width])
        longer = op.Pad(flat, op.Concat([0, *none], behind, *([none] if width else []), axis=0))
        longer.shape = ir.Shape([*padded, *width])
        whole = op.Reshape(longer, op.Concat(sizes, *size, axis=0) if width else sizes)
        whole.shape = ir.Shape([*lead, *width])
        return whole

    def step(op: Emitter, _: list[ir.Value], slices: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        *hidden, own = slices
        logits = _copied(op, head, hidden)
        BLOCK_LOGITS.mark(logits)
        return [], [token_losses(op, logits, own, smoothing)]

    sequences = [*(split(x, dims_of(x)[-1]) for x in head.hidden), split(label)]
    (losses,) = scan_over(op, step, [], sequences)
    losses.shape = ir.Shape(lead)
    TokenBlocks(smoothing).write(in_blocks(losses))
    longer = op.Reshape(losses, [-1])
    longer.shape = ir.Shape(padded)
    flat = op.Slice(longer, [0], op.Unsqueeze(tokens, [0]))
    flat.shape = ir.Shape(one)
    return like(op.Reshape(flat, op.shape_of(label)), ir.Value(type=losses.type, shape=label.shape))


def _copied(op: Emitter, head: TokenHead, hidden: Sequence[ir.Value]) -> ir.Value:
    """Emit the nodes of a head on the rows of a block, and return their logits."""
    copies = dict(zip(head.hidden, hidden, strict=True))
    for node in head.nodes:
        inputs = [None if x is None else copies.get(x, x) for x in node.inputs]
        if node.op_type in VIEWS:  # rows stay rows
            copies[node.outputs[0]] = copies[node.inputs[0]]  # type: ignore[index]
            continue
        if node.op_type in ELEMENTWISE_OPERATORS:
            inputs = [
                op.Reshape(x, [-1]) if x is not None and x not in copies.values() and rank(x) > 1 else x for x in inputs
            ]
        turned = inputs[1].producer() if node.op_type == "MatMul" and inputs[1] is not None else None
        if turned is not None and turned.op_type == "Transpose" and constant_of(inputs[1]) is None:
            copies[node.outputs[0]] = op.Gemm(inputs[0], turned.inputs[0], transB=1)
        else:
            copies[node.outputs[0]] = op.emit_again(node, inputs)[0]
    return copies[head.logits]
