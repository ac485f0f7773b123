"""Define the base class of losses of the log-probabilities of completions, as the model and a reference give them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import onnx_ir as ir

from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.roles import Role, TargetSpec, set_role, with_role
from graphopt.graph.values import dims_of, dtype_of, name_of
from passes.losses.causal import CausalLanguageModel
from passes.losses.frozen import before_training, put_in, share_weights
from passes.losses.loss import new_input
from passes.losses.pairs import PairLoss, split_outputs, split_rows, stack_inputs

_REFERENCE = "reference"


class CompletionLoss(PairLoss):
    """Compare the log-probabilities of completions of each example, in one forward pass.

    A subclass is a dataclass with the fields `tokens` and `blocks` of `CausalLanguageModel`, and `reference` if it has
    one. It implements `scores`, `metrics` and `compare`, and `inputs` if it reads more than tokens and masks. Of the
    scores, `compare` gets first those of the model less those of the reference, for the rows of each companion, then
    those of the model, and then the inputs.
    """

    beta: float
    tokens: str | None
    blocks: int | Literal["auto"] | None

    counts_prompts: ClassVar[bool] = False  # whether the tokens of prompts have log-probabilities, too

    @property
    def _reference(self) -> str:
        return str(getattr(self, _REFERENCE, "none")) if self.beta else "none"

    @abstractmethod
    def scores(self, op: Emitter, tokens: ir.Value, counts: ir.Value, present: ir.Value) -> list[ir.Value]:
        """Emit numbers of each row from the log-probabilities of its tokens.

        `counts` is 1 for tokens of completions, and `present` for those that have log-probabilities; others are 0.
        """

    @abstractmethod
    def metrics(self, op: Emitter, *operands: ir.Value) -> Mapping[str, ir.Value]:
        """Emit what a step reports the means of, from what `compare` gets."""

    def inputs(self, model: ir.Model, score: ir.Value, target_name: str) -> list[ir.Value]:
        """Add further inputs; `score` is the first score of the rows of the first companion."""
        return []

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        causal = CausalLanguageModel(tokens=self.tokens, completion_only=True, blocks=self.blocks)
        part = before_training(model, prediction) if self._reference == "initial" else None
        given = causal.operands(model, prediction, target_name)
        for x in given:
            TargetSpec.remove(x)
        names = {x: name_of(x) for x in with_role(model, Role.DATA)}
        others = self.companions()
        with Emitter(model) as op:
            stacked = stack_inputs(model, op, others, type(self).__name__) if others else {}
            given = [stacked.get(x, x) for x in given]
            policy = self._split_scores(op, causal, prediction, given)
            reference: list[ir.Value] = []
            if part is not None:
                share_weights(model, part)
                (logits,) = put_in(model, part, {name: stacked.get(x, x) for x, name in names.items()}, _REFERENCE)
                reference = self._split_scores(op, causal, logits, given)[: 1 + len(others)]
            elif self._reference == "inputs":
                dtype, shape = dtype_of(policy[0]), ir.Shape(dims_of(policy[0]))
                ends = ["", *(f"_{other}" for other in others)]
                reference = [new_input(model, f"{_REFERENCE}{end}", dtype, shape) for end in ends]
            ratios = policy[: 1 + len(others)]
            if reference:
                ratios = [p - r for p, r in zip(ratios, reference, strict=True)]
            if others:
                split_outputs(model, op, prediction, 1 + len(others))
            operands = [*ratios, *policy, *self.inputs(model, policy[0], target_name)]
            for name, x in self.metrics(op, *operands).items():
                state.check_free(model, name)
                mean = op.ReduceMean(x, keepdims=0, _outputs=[name])
                model.graph.outputs.append(set_role(mean, Role.METRIC))
        return operands

    def _split_scores(
        self, op: Emitter, causal: CausalLanguageModel, logits: ir.Value, given: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Emit the scores, each of the rows of every companion."""
        count = 1 + len(self.companions())
        if (temperature := getattr(self, "temperature", 1.0)) != 1.0:
            logits = logits / temperature
        read = given[:-1] if self.counts_prompts else given
        tokens, counts = op.Neg(causal.compare(op, logits, *read)), causal.weight(op, logits, *given)
        present = causal.weight(op, logits, *read) if self.counts_prompts else counts
        assert counts is not None and present is not None
        found = self.scores(op, tokens, counts, present)
        return found if count == 1 else [part for x in found for part in split_rows(op, x, count)]


def total(op: Emitter, tokens: ir.Value) -> ir.Value:
    """Emit the sum over the tokens of each row."""
    return op.ReduceSum(tokens, [1], keepdims=0)


def mean_of_tokens(op: Emitter, tokens: ir.Value, counts: ir.Value) -> ir.Value:
    """Emit the mean over the tokens of each row that count."""
    return total(op, tokens) / op.Max(total(op, counts), 1.0)
