"""Define losses of preferences: of two completions of a prompt, one is chosen and one is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import TargetSpec
from graphopt.graph.roles import Role, set_role, with_role
from graphopt.graph.values import dims_of, dtype_of, name_of
from graphopt.intervals import within
from passes.losses.causal import CausalLanguageModel
from passes.losses.classification import softplus
from passes.losses.frozen import before_training, put_in, share_weights
from passes.losses.loss import new_input
from passes.losses.pairs import PairLoss, split_outputs, split_rows, stack_inputs

__all__ = ["DPO"]

_REJECTED, _REFERENCE = "rejected", "reference"


@dataclass(frozen=True)
class DPO(PairLoss):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("loss_type", _FUNCTIONS), ("reference", ("initial", "inputs", "none"))):
            if (word := getattr(self, name)) not in known:
                raise GraphoptError(f"DPO: {unknown(name, str(word), known)}")

    def companions(self) -> list[str]:
        return [_REJECTED]

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        causal = CausalLanguageModel(tokens=self.tokens, completion_only=True, blocks=self.blocks)
        part = before_training(model, prediction) if self.reference == "initial" else None
        given = causal.operands(model, prediction, target_name)
        for x in given:
            TargetSpec.remove(x)
        names = {x: name_of(x) for x in with_role(model, Role.DATA)}
        with Emitter(model) as op:
            stacked = stack_inputs(model, op, self.companions(), "DPO")
            given = [stacked.get(x, x) for x in given]
            ratios = split_rows(op, self._log_probabilities(op, causal, prediction, given), 2)
            reference = None
            if part is not None:
                share_weights(model, part)
                (logits,) = put_in(
                    model, part, {name: stacked.get(x, x) for x, name in names.items()}, _REFERENCE
                )
                reference = split_rows(op, self._log_probabilities(op, causal, logits, given), 2)
            elif self.reference == "inputs":
                dtype, shape = dtype_of(ratios[0]), ir.Shape(dims_of(ratios[0]))
                reference = [
                    new_input(model, name, dtype, shape) for name in (_REFERENCE, f"{_REFERENCE}_{_REJECTED}")
                ]
            if reference is not None:
                ratios = [p - r for p, r in zip(ratios, reference, strict=True)]
            split_outputs(model, op, prediction, 2)
            self._report(model, op, self.beta * (ratios[0] - ratios[1]))
        return ratios

    def _log_probabilities(
        self, op: Emitter, causal: CausalLanguageModel, logits: ir.Value, given: list[ir.Value]
    ) -> ir.Value:
        """Emit the log-probability of each row's completion."""
        total = op.Neg(op.ReduceSum(causal.compare(op, logits, *given), [1], keepdims=0))
        if not self.average and self.loss_type != "ipo":
            return total
        weight = causal.weight(op, logits, *given)
        assert weight is not None
        return total / op.Max(op.ReduceSum(weight, [1], keepdims=0), 1.0)

    def _report(self, model: ir.Model, op: Emitter, margin: ir.Value) -> None:
        right = op.Cast(op.Greater(margin, 0.0), to=margin.dtype)
        for name, x in (("reward_margin", margin), ("reward_accuracy", right)):
            state.check_free(model, name)
            mean = op.ReduceMean(x, keepdims=0, _outputs=[name])
            model.graph.outputs.append(set_role(mean, Role.METRIC))

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
