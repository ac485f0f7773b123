"""Define losses of policies, whose actions, such as the tokens of completions, have had rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import TEMPERATURE
from graphopt.graph.values import dims_of, dtype_of, rank
from graphopt.intervals import within
from passes.losses.completions import CompletionLoss, mean_of_tokens, total
from passes.losses.loss import Loss, new_input

__all__ = ["GRPO", "PPO"]

_ADVANTAGES, _OLD, _REWARDS, _ACTION = "advantages", "old_log_probabilities", "rewards", "action"


@dataclass(frozen=True)
class PPO(Loss):
    """Compute -min(r A, clip(r) A) for actions that a policy took, and their advantages A (Schulman et al. 2017).

    r is the probability of the action now, divided by the one when it was taken. The output of the model has the logits
    of the actions on its last axis. Inputs, with an entry for each action, are `action`, int64, its number;
    `advantages`; and `old_log_probabilities`, the logarithm of its probability when it was taken. For the tokens of a
    language model, see `GRPO`.

    Args:
        epsilon_low, epsilon_high: clip r to [1 - epsilon_low, 1 + epsilon_high]; None for the same as `epsilon_low`.
        entropy: the factor of the entropy of the policy, which is subtracted from the loss.

    Raises:
        GraphoptError: the output has less than two axes.

    >>> step = graphopt.compile(models.mlp((4,), 2), loss=passes.PPO(), optimizer=passes.Adam(3e-4))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'action', 'advantages', 'old_log_probabilities']
    """

    epsilon_low: float = within("[0, 1]", 0.2)
    epsilon_high: float | None = within("[0, inf)", None)
    entropy: float = within("[0, inf)", 0.0)

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        if rank(prediction) < 2:
            raise GraphoptError(
                f"PPO: expected logits of shape [rows, actions], found {prediction.name!r} of shape {prediction.shape}"
            )
        dtype, shape = dtype_of(prediction), ir.Shape(dims_of(prediction)[:-1])
        kinds = {_ACTION: ir.DataType.INT64, _ADVANTAGES: dtype, _OLD: dtype}
        names = {name: target_name.replace("target", name, 1) for name in kinds}
        return [new_input(model, names[name], kind, shape) for name, kind in kinds.items()]

    def compare(self, op: Emitter, prediction: ir.Value, *operands: ir.Value) -> ir.Value:
        action, advantages, old = operands
        log_p = op.LogSoftmax(prediction, axis=-1)
        taken = op.Squeeze(op.GatherElements(log_p, op.Unsqueeze(action, [-1]), axis=-1), [-1])
        loss, *_ = _clipped(op, taken - old, advantages, self.epsilon_low, self.epsilon_high)
        return loss + self.entropy * op.ReduceSum(op.Exp(log_p) * log_p, [-1], keepdims=0) if self.entropy else loss


@dataclass(frozen=True)
class GRPO(CompletionLoss):
    """Compute PPO's clipped loss of the tokens of completions, whose advantages are those of groups (Shao et al. 2024).

    `graphopt.Rollouts` lets the model complete prompts, and makes the inputs: tokens; `completion_mask`, int64 [rows,
    tokens], 1 where a token belongs to a completion; `advantages` [rows]; `old_log_probabilities` [rows, tokens], the
    logarithm of the probability of each token, at its place, when it was drawn; and `rewards` [rows], whose mean a step
    reports as `reward`. It also reports `kl`, if `beta` is not 0, `clip_share`, the share of tokens whose loss is
    clipped, and `completion_length`. Names of options are those of TRL's GRPOConfig, except `epsilon_low`, its epsilon.

    Args:
        beta: the factor of the distance from the reference, e^d - d - 1 for d = log r / p of each token.
        epsilon_low, epsilon_high: see `PPO`.
        loss_type: what the loss is divided by: `grpo`, each completion by its tokens; `dapo` and `bnpo`, all by the
            tokens of the step; `dr_grpo`, each by `max_completion_length`.
        importance_sampling_level: clip the ratio of each `token`, or, as GSPO does, the geometric mean of a `sequence`.
        use_bias_correction_kl: multiply the distance by the ratio, so that its gradient is unbiased.
        max_completion_length: the number of tokens of the longest completion, for `dr_grpo`.
        temperature: the divisor of logits when completions are drawn.
        reference: where r comes from, as in `DPO`: `initial` or `inputs`.
        tokens: the name of the input of token ids; see `CausalLanguageModel`.
        blocks: the number of blocks of tokens; see `CausalLanguageModel`.

    Raises:
        GraphoptError: a word is unknown, or the model is none that `CausalLanguageModel` accepts.

    >>> model = models.transformer((6,), 16, vocabulary=16)
    >>> step = graphopt.compile(model, loss=passes.GRPO(beta=0.04), optimizer=passes.AdamW(1e-5))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'completion_mask', 'advantages', 'old_log_probabilities', 'rewards']
    """

    beta: float = within("[0, inf)", 0.0)
    epsilon_low: float = within("[0, 1]", 0.2)
    epsilon_high: float | None = within("[0, inf)", None)
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    use_bias_correction_kl: bool = True
    max_completion_length: int = within("[1, inf)", 256, whole=True)
    temperature: float = within("(0, inf)", 1.0)
    reference: Literal["initial", "inputs"] = "initial"
    tokens: str | None = None
    blocks: int | Literal["auto"] | None = within("[1, inf)", "auto", whole=True, choices=("auto", None))

    def companions(self) -> list[str]:
        return []

    def scores(self, op: Emitter, tokens: ir.Value, counts: ir.Value, present: ir.Value) -> list[ir.Value]:
        return [tokens, counts]

    def inputs(self, model: ir.Model, score: ir.Value, target_name: str) -> list[ir.Value]:
        TEMPERATURE.write(model, str(float(self.temperature)))
        dtype, dims = dtype_of(score), dims_of(score)
        shapes = {_ADVANTAGES: dims[:1], _OLD: dims, _REWARDS: dims[:1]}
        names = {name: target_name.replace("target", name, 1) for name in shapes}
        return [new_input(model, names[name], dtype, ir.Shape(shape)) for name, shape in shapes.items()]

    def metrics(self, op: Emitter, *operands: ir.Value) -> Mapping[str, ir.Value]:
        _, _, counts, _, _, rewards = operands
        _, is_clipped, kl = self._parts(op, *operands)
        lengths = total(op, counts)
        all_tokens = op.Max(op.ReduceSum(counts, keepdims=0), 1.0)
        shares = {"clip_share": is_clipped, **({} if kl is None else {"kl": kl})}
        means = {name: op.ReduceSum(x * counts, keepdims=0) / all_tokens for name, x in shares.items()}
        return {"reward": rewards, **means, "completion_length": lengths}

    def _parts(self, op: Emitter, *operands: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Emit the clipped loss of each token, 1 for those that are clipped, and the distance from the reference."""
        ratio, tokens, counts, advantages, old, _ = operands
        rolled = op.Concat(op.Slice(old, [1], [2**62], [1]), op.Slice(old, [0], [1], [1]), axis=1)
        log_ratio = tokens - rolled * counts
        if self.importance_sampling_level == "sequence":
            log_ratio = op.Unsqueeze(mean_of_tokens(op, log_ratio, counts), [1])
        columns = op.Unsqueeze(advantages, [1])
        loss, is_clipped, share = _clipped(op, log_ratio, columns, self.epsilon_low, self.epsilon_high)
        if not self.beta:
            return loss, is_clipped, None
        kl = op.Exp(op.Neg(ratio)) + ratio - 1.0
        return loss, is_clipped, kl * share if self.use_bias_correction_kl else kl

    def compare(self, op: Emitter, prediction: ir.Value, *operands: ir.Value) -> ir.Value:
        counts = operands[2]
        loss, _, kl = self._parts(op, *operands)
        loss = counts * (loss if kl is None else loss + self.beta * kl)
        if self.loss_type == "grpo":
            return mean_of_tokens(op, loss, counts)
        return total(op, loss) / float(self.max_completion_length) if self.loss_type == "dr_grpo" else loss

    def weight(self, op: Emitter, prediction: ir.Value, *operands: ir.Value) -> ir.Value | None:
        return operands[2] if self.loss_type in ("dapo", "bnpo") else None


def _clipped(
    op: Emitter, log_ratio: ir.Value, advantages: ir.Value, low: float, high: float | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Emit the loss of each action, 1 for those whose ratio is clipped, and the ratio."""
    ratio = op.Exp(log_ratio)
    bounds = [1.0 - low, 1.0 + (low if high is None else high)]
    clipped = op.Clip(ratio, *(op.constant(x, like=ratio) for x in bounds))
    free, bound = ratio * advantages, clipped * advantages
    return op.Neg(op.Min(free, bound)), op.Cast(op.Less(bound, free), to=ratio.dtype), ratio
