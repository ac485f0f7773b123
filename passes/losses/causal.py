"""Define the loss of language models that predict each token from those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import ON_DEMAND
from graphopt.graph.roles import Role, TargetSpec, role_of, with_role
from graphopt.graph.values import dims_of, like, name_of, rank
from graphopt.intervals import within
from passes.losses.head import compute_all_logits, losses_of_tokens
from passes.losses.loss import Loss, new_input
from passes.losses.packing import keep_apart

__all__ = ["CausalLanguageModel"]

_TOKENS, _ATTENTION_MASK, _OTHERS = "input_ids", "attention_mask", ("position_ids", "token_type_ids")
_LABELS, _COMPLETION_MASK, _SEGMENTS = "labels", "completion_mask", "segments"


@dataclass(frozen=True)
class CausalLanguageModel(Loss):
    """Compute the cross-entropy of each token given those before it, from logits [rows, tokens, classes].

    The logits of a token are compared with the next token, so that the model's own input of tokens is the target. The
    mean is over all tokens that count.

    Args:
        tokens: the name of the input of token ids. By default, `input_ids`, or the only input of whole numbers. Tokens
            whose `attention_mask` is 0 do not count, if the model has such an input.
        labels: add an input `labels`, int64 [rows, tokens], with the target of the tokens. As in Hugging Face's
            transformers, it has a label at the place of its token, and the loss compares it with the logits before.
        ignore_index: the label, or token, that adds nothing to the loss or to its count. An id of padding tokens will
            do, if nothing else has it.
        label_smoothing: the share of the target that is spread over all classes, as in `CrossEntropy`.
        completion_only: add an input `completion_mask`, int64 [rows, tokens]: tokens where it is 0, such as those of a
            prompt, do not count.
        packed: add an input `segments`, int64 [rows, tokens], with the number of the sequence of each token, for rows
            that hold several: a token reads, and predicts, tokens of its own sequence alone, and its position counts
            from the first of them. Tokens with a negative number are padding, and do not count.
        blocks: the number of blocks of tokens in which a step computes the logits, their loss and its gradient, one
            block at a time. None computes all logits at once. `auto` chooses blocks of about 8 million logits, if there
            are at least 4,096 classes.

    Where the file computes the logits of the last token alone, as onnxruntime-genai's builder writes it with
    `prune_lm_head=true`, training computes those of all, and `executor.trained(into=...)` keeps the file's form.

    A step reports the logits only if the executor's `report` names them; `predict` and `evaluate` return them.

    Raises:
        GraphoptError: the output does not have three axes, or the input of tokens is not clear.

    >>> model = models.transformer((6,), 16, vocabulary=16)
    >>> step = graphopt.compile(model, loss=passes.CausalLanguageModel(), optimizer=passes.SGD(0.1))
    >>> executor = graphopt.Executor(step)
    >>> loss = executor.step({"x": numpy.arange(12).reshape(2, 6)})["loss"]
    """

    tokens: str | None = None
    labels: bool = False
    ignore_index: int = within("(-inf, inf)", -100)
    label_smoothing: float = within("[0, 1]", 0.0)
    completion_only: bool = False
    packed: bool = False
    blocks: int | Literal["auto"] | None = within("[1, inf)", "auto", whole=True, choices=("auto", None))

    task = "classification"

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        if rank(prediction) != 3:
            raise GraphoptError(
                f"CausalLanguageModel: expected logits of shape [rows, tokens, classes], found {prediction.name!r} of "
                f"shape {prediction.shape}"
            )
        compute_all_logits(model, prediction)
        ON_DEMAND.set(prediction)
        shape, masks = ir.Shape(dims_of(prediction)[:2]), []
        if self.labels:
            name = target_name.replace("target", _LABELS, 1)
            target = new_input(model, name, ir.DataType.INT64, shape)
        else:
            target = self._tokens(model.graph)
            shape = ir.Shape(dims_of(target))
            masks = [x for x in with_role(model, Role.DATA) if x.name == _ATTENTION_MASK and x.shape == shape]
        if not TargetSpec.is_on(target):
            TargetSpec(name_of(prediction), self.task, **self.metric(prediction)).write(target)
        if self.completion_only:
            name = target_name.replace("target", _COMPLETION_MASK, 1)
            masks.append(new_input(model, name, ir.DataType.INT64, shape))
        if self.packed:
            name = target_name.replace("target", _SEGMENTS, 1)
            masks.append(new_input(model, name, ir.DataType.INT64, shape))
        return [target, *masks]

    def _tokens(self, graph: ir.Graph) -> ir.Value:
        """Return the input of token ids."""
        inputs = {name_of(x): x for x in graph.inputs if role_of(x) is Role.DATA}
        whole = {name: x for name, x in inputs.items() if x.dtype is not None and x.dtype.is_integer()}
        named = whole if self.tokens is None else inputs
        if (name := self.tokens or _TOKENS) in named:
            found = [named[name]]
        else:
            found = [x for name, x in whole.items() if name not in (_ATTENTION_MASK, *_OTHERS)]
        if self.tokens not in (None, *inputs) or len(found) != 1 or rank(found[0]) != 2:
            raise GraphoptError(
                f"CausalLanguageModel(tokens={self.tokens!r}): expected the name of the input of token ids, of shape "
                f"[rows, tokens], the model has {', '.join(inputs)}: name it, or set labels=True to feed the targets"
            )
        return found[0]

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value, *masks: ir.Value) -> ir.Value:
        following = self._following(op, target, *masks)
        counts = op.Not(op.Equal(following, self.ignore_index))
        label = op.Where(counts, following, 0)
        if self.packed and isinstance(prediction.graph, ir.Graph):
            keep_apart(op, prediction.graph, self._tokens(prediction.graph), masks[-1])
            prediction.graph.sort()
        losses = losses_of_tokens(op, prediction, label, self.label_smoothing, self.blocks, type(self).__name__)
        losses = op.Where(counts, losses, op.constant(0.0, like=losses))
        if self.reduction == "none":  # the mean of a row is over its tokens that count
            counts = op.Cast(counts, to=losses.dtype)
            losses = losses / op.Max(op.ReduceMean(counts, [1]), float(np.finfo(np.float32).tiny))
        return losses

    def weight(self, op: Emitter, prediction: ir.Value, target: ir.Value, *masks: ir.Value) -> ir.Value | None:
        counts = op.Not(op.Equal(self._following(op, target, *masks), self.ignore_index))
        return op.Cast(counts, to=prediction.dtype)

    def _following(self, op: Emitter, target: ir.Value, *masks: ir.Value) -> ir.Value:
        """Emit the label of the token after each; those that do not count, and the last one's, are ignored."""
        labels: ir.Value = op.cast(target, ir.DataType.INT64)
        if self.packed:
            *others, segments = masks
            past_end = op.Expand(op.constant([[-1]]), op.Concat(op.Shape(target, end=1), [1], axis=0))
            before = op.Concat(past_end, op.Slice(segments, [0], [-1], [1]), axis=1)
            same = op.And(op.Equal(before, segments), op.GreaterOrEqual(segments, 0))
            masks = (*others, same)
        for mask in masks:
            labels = op.Where(op.cast(mask, ir.DataType.BOOL), labels, self.ignore_index)
        end = op.Expand(op.constant([[self.ignore_index]]), op.Concat(op.Shape(target, end=1), [1], axis=0))
        return like(op.Concat(op.Slice(labels, [1], [2**62], [1]), end, axis=1), labels)

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        classes = dims_of(prediction)[2]
        return {
            "axis": 2,
            "classes": classes if isinstance(classes, int) else None,
            "ignore_index": self.ignore_index,
            "shift": 1,
            "label_smoothing": float(self.label_smoothing),
        }
