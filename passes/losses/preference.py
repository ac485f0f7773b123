"""Define losses of preferences: of completions of a prompt, some are better than others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import dims_of
from graphopt.intervals import within
from passes.differentiate import stop_gradient
from passes.losses.classification import softplus
from passes.losses.completions import CompletionLoss, mean_of_tokens, total
from passes.losses.loss import new_input

__all__ = ["DPO", "KTO", "ORPO", "SimPO"]

_NEAREST_TO_ONE = -1e-7  # the largest mean log-probability whose odds are finite


class PairedPreference(CompletionLoss):
    """Compare a chosen with a rejected completion, whose rewards are scores times `beta`."""

    beta: float

    def companions(self) -> list[str]:
        return ["rejected"]

    def metrics(self, op: Emitter, *operands: ir.Value) -> Mapping[str, ir.Value]:
        return _margin(op, self.beta * (operands[0] - operands[1]))


@dataclass(frozen=True)
class DPO(PairedPreference):
    """Compute -log sigmoid(beta d), where d compares a chosen with a rejected completion (Rafailov et al. 2023).

    d is log p(chosen) / r(chosen) - log p(rejected) / r(rejected), for the probabilities p of the model and r of a
    reference. Inputs of the model, such as `input_ids`, have the prompts with the chosen completions, and those such as
    `input_ids_rejected` the same prompts with the rejected ones. `completion_mask` and `completion_mask_rejected`,
    int64 [rows, tokens], are 1 where a token belongs to a completion. Each step reports `reward_margin`, the mean
    of beta d, and `reward_accuracy`, the share of examples in which d is positive.

    Args:
        beta: the factor of d: the larger, the closer the model stays to the reference.
        loss_type: the function of d, as in TRL: `sigmoid`; `hinge` for max(0, 1 - beta d); `ipo` for
            (d - 1 / (2 beta))^2 of means over tokens (Azar et al. 2023); `robust` for noisy preferences (Chowdhury et
            al. 2024).
        label_smoothing: the probability that a preference is the wrong way round, of `sigmoid` and `robust`.
        average: take the means of log-probabilities over the tokens of a completion, not their sums.
        reference: `initial` for the model before training, whose adapters are off and whose weights the graph shares
            unless they train; `inputs` for log-probabilities that you feed as `reference` and `reference_rejected`;
            `none` for no reference.
        tokens: the name of the input of token ids; see `CausalLanguageModel`.
        blocks: the number of blocks of tokens; see `CausalLanguageModel`.

    Raises:
        GraphoptError: a word is unknown, or the model is none that `CausalLanguageModel` accepts.

    >>> model = models.transformer((6,), 16, vocabulary=16)
    >>> step = graphopt.compile(model, loss=passes.DPO(beta=0.1), optimizer=passes.AdamW(1e-3))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'completion_mask', 'x_rejected', 'completion_mask_rejected']
    """

    beta: float = within("(0, inf)", 0.1)
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    label_smoothing: float = within("[0, 0.5)", 0.0)
    average: bool = False
    reference: Literal["initial", "inputs", "none"] = "initial"
    tokens: str | None = None
    blocks: int | Literal["auto"] | None = within("[1, inf)", "auto", whole=True, choices=("auto", None))

    def scores(self, op: Emitter, tokens: ir.Value, counts: ir.Value, present: ir.Value) -> list[ir.Value]:
        is_mean = self.average or self.loss_type == "ipo"
        return [mean_of_tokens(op, tokens, counts) if is_mean else total(op, tokens)]

    def compare(self, op: Emitter, prediction: ir.Value, *rows: ir.Value) -> ir.Value:
        return _FUNCTIONS[self.loss_type](op, rows[0] - rows[1], self.beta, self.label_smoothing)


def _sigmoid(op: Emitter, d: ir.Value, beta: float, noise: float) -> ir.Value:
    losses = softplus(op, -beta * d)
    return (1 - noise) * losses + noise * softplus(op, beta * d) if noise else losses


def _robust(op: Emitter, d: ir.Value, beta: float, noise: float) -> ir.Value:
    return ((1 - noise) * softplus(op, -beta * d) - noise * softplus(op, beta * d)) / (1 - 2 * noise)


_FUNCTIONS: dict[str, Callable[[Emitter, ir.Value, float, float], ir.Value]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": lambda op, d, beta, noise: op.Relu(1 - beta * d),
    "ipo": lambda op, d, beta, noise: op.Pow(d - 1 / (2 * beta), 2),
}


@dataclass(frozen=True)
class SimPO(PairedPreference):
    """Compute -log sigmoid(beta d - gamma), where d compares two completions without a reference (Meng et al. 2024).

    d is the difference of the mean log-probabilities of the tokens of the chosen and of the rejected completion. The
    model has the inputs of `DPO`, and each step reports `reward_margin` and `reward_accuracy` alike. TRL's CPOTrainer
    does the same with `loss_type="simpo"` and `cpo_alpha=0`, where gamma is `simpo_gamma`.

    Args:
        beta: the factor of d.
        gamma: the margin by which the chosen completion is to lead.
        label_smoothing: the probability that a preference is the wrong way round.
        tokens: the name of the input of token ids; see `CausalLanguageModel`.
        blocks: the number of blocks of tokens; see `CausalLanguageModel`.

    Raises:
        GraphoptError: the model is none that `CausalLanguageModel` accepts.

    >>> model = models.transformer((6,), 16, vocabulary=16)
    >>> step = graphopt.compile(model, loss=passes.SimPO(), optimizer=passes.AdamW(1e-3))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'completion_mask', 'x_rejected', 'completion_mask_rejected']
    """

    beta: float = within("(0, inf)", 2.0)
    gamma: float = within("[0, inf)", 1.0)
    label_smoothing: float = within("[0, 0.5)", 0.0)
    tokens: str | None = None
    blocks: int | Literal["auto"] | None = within("[1, inf)", "auto", whole=True, choices=("auto", None))

    def scores(self, op: Emitter, tokens: ir.Value, counts: ir.Value, present: ir.Value) -> list[ir.Value]:
        return [mean_of_tokens(op, tokens, counts)]

    def compare(self, op: Emitter, prediction: ir.Value, *rows: ir.Value) -> ir.Value:
        return _sigmoid(op, rows[0] - rows[1] - self.gamma / self.beta, self.beta, self.label_smoothing)


@dataclass(frozen=True)
class ORPO(PairedPreference):
    """Compute the cross-entropy of chosen examples - beta log sigmoid(d), for odds of completions (Hong et al. 2024).

    d is the difference of log(p / (1 - p)) of the chosen and the rejected completion, where log p is the mean
    log-probability of the tokens of a completion. The cross-entropy is the mean over all tokens of the chosen
    examples, those of prompts included, as in TRL's ORPOTrainer. There is no reference. Padding is on the right, unless
    the model has an input `attention_mask`. The model has the inputs of `DPO`, and each step reports `reward_margin`
    and `reward_accuracy` alike.

    Args:
        beta: the factor of the log-odds, which the paper calls lambda.
        tokens: the name of the input of token ids; see `CausalLanguageModel`.
        blocks: the number of blocks of tokens; see `CausalLanguageModel`.

    Raises:
        GraphoptError: the model is none that `CausalLanguageModel` accepts.

    >>> model = models.transformer((6,), 16, vocabulary=16)
    >>> step = graphopt.compile(model, loss=passes.ORPO(), optimizer=passes.AdamW(1e-3))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'completion_mask', 'x_rejected', 'completion_mask_rejected']
    """

    beta: float = within("[0, inf)", 0.1)
    tokens: str | None = None
    blocks: int | Literal["auto"] | None = within("[1, inf)", "auto", whole=True, choices=("auto", None))

    counts_prompts: ClassVar[bool] = True

    def scores(self, op: Emitter, tokens: ir.Value, counts: ir.Value, present: ir.Value) -> list[ir.Value]:
        # Up to the end of the completion
        inside = op.Greater(op.CumSum(counts, op.constant(1), reverse=1), 0.0)
        inside = present * op.Cast(inside, to=present.dtype)
        return [mean_of_tokens(op, tokens * counts, counts), total(op, tokens * inside), total(op, inside)]

    def compare(self, op: Emitter, prediction: ir.Value, *rows: ir.Value) -> ir.Value:
        _, _, chosen, rejected, log_p, _, counts, _ = rows
        odds = _log_odds(op, chosen) - _log_odds(op, rejected)
        cross_entropy = -log_p / op.Max(op.ReduceMean(counts, keepdims=0), 1.0)
        return cross_entropy + self.beta * softplus(op, -odds)


@dataclass(frozen=True)
class KTO(CompletionLoss):
    """Compute 1 - sigmoid(beta (d - z)) of desirable completions and 1 - sigmoid(beta (z - d)) of others.

    d is log p / r of a completion, for the probability p of the model and r of a reference. z is the mean of log p / r
    of completions of other prompts over the rows of a step, at least 0, through which nothing trains (Ethayarajh et
    al. 2024). Inputs of the model, such as `input_ids`, have prompts with completions, those such as
    `input_ids_mismatched` the same prompts with completions of others; `completion_mask` and
    `completion_mask_mismatched`, int64 [rows, tokens], are 1 where a token belongs to a completion. `label`, int64
    [rows], is 1 for desirable completions and 0 for others. Each step reports `reward_margin`, the mean of beta (d - z)
    of desirable and of beta (z - d) of other completions, and `reward_accuracy`, the share in which it is positive.

    Args:
        beta: the factor of d: the larger, the closer the model stays to the reference.
        loss_type: `kto`; or `apo_zero_unpaired`, in which z is 0, without inputs of mismatched completions
            (D'Oosterlinck et al. 2024). Names are TRL's.
        desirable_weight: the weight of the losses of desirable completions.
        undesirable_weight: the weight of the losses of others.
        reference: where r comes from, as in `DPO`: `initial`, `inputs` or `none`.
        tokens: the name of the input of token ids; see `CausalLanguageModel`.
        blocks: the number of blocks of tokens; see `CausalLanguageModel`.

    Raises:
        GraphoptError: a word is unknown, or the model is none that `CausalLanguageModel` accepts.

    >>> model = models.transformer((6,), 16, vocabulary=16)
    >>> step = graphopt.compile(model, loss=passes.KTO(beta=0.1), optimizer=passes.AdamW(1e-3))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'completion_mask', 'x_mismatched', 'completion_mask_mismatched', 'label']
    """

    beta: float = within("(0, inf)", 0.1)
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: float = within("[0, inf)", 1.0)
    undesirable_weight: float = within("[0, inf)", 1.0)
    reference: Literal["initial", "inputs", "none"] = "initial"
    tokens: str | None = None
    blocks: int | Literal["auto"] | None = within("[1, inf)", "auto", whole=True, choices=("auto", None))

    def companions(self) -> list[str]:
        return ["mismatched"] if self.loss_type == "kto" else []

    def scores(self, op: Emitter, tokens: ir.Value, counts: ir.Value, present: ir.Value) -> list[ir.Value]:
        return [total(op, tokens)]

    def inputs(self, model: ir.Model, score: ir.Value, target_name: str) -> list[ir.Value]:
        name = target_name.replace("target", "label", 1)
        return [new_input(model, name, ir.DataType.INT64, ir.Shape(dims_of(score)))]

    def metrics(self, op: Emitter, *operands: ir.Value) -> Mapping[str, ir.Value]:
        return _margin(op, self._advantage(op, *operands))

    def _advantage(self, op: Emitter, *operands: ir.Value) -> ir.Value:
        """Emit beta (d - z) of desirable completions, and beta (z - d) of others."""
        d, label = operands[0], operands[-1]
        if self.companions():
            d = d - stop_gradient(op, op.Relu(op.ReduceMean(operands[1], keepdims=0)))
        return self.beta * op.Where(_is_true(op, label), d, op.Neg(d))

    def compare(self, op: Emitter, prediction: ir.Value, *rows: ir.Value) -> ir.Value:
        losses = op.Sigmoid(op.Neg(self._advantage(op, *rows)))
        if self.desirable_weight == self.undesirable_weight == 1.0:
            return losses
        weights = [op.constant(x, like=losses) for x in (self.desirable_weight, self.undesirable_weight)]
        return losses * op.Where(_is_true(op, rows[-1]), *weights)


def _is_true(op: Emitter, label: ir.Value) -> ir.Value:
    return op.cast(label, ir.DataType.BOOL)


def _margin(op: Emitter, margin: ir.Value) -> Mapping[str, ir.Value]:
    right = op.Cast(op.Greater(margin, 0.0), to=margin.dtype)
    return {"reward_margin": margin, "reward_accuracy": right}


def _log_odds(op: Emitter, x: ir.Value) -> ir.Value:
    """Emit log(p / (1 - p)) from x = log p; 1 - e^x = -tanh(x / 2) (1 + e^x) loses no digits near 0."""
    x = op.Min(x, _NEAREST_TO_ONE)
    return x - op.Log(op.Neg(op.Tanh(0.5 * x)) * (1.0 + op.Exp(x)))
