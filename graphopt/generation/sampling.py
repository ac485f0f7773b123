"""Choose the next token by the logits of a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphopt.arguments import Checked
from graphopt.fields import check_options
from graphopt.files import ReadName
from graphopt.intervals import within


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """Declare how tokens are chosen, and how many.

    As in transformers, the logits are divided by the temperature, and then tokens are left out by `top_k`, and of
    those that remain by `top_p`.

    Args:
        max_tokens: the number of tokens to write, if the model does not end the text before.
        temperature: the divisor of the logits: below 1, likely tokens become more likely. 0 takes the most likely one.
        top_k: the number of the most likely tokens to draw from; None for all.
        top_p: draw from the most likely tokens whose probabilities sum to at least this.
        seed: the seed of what is drawn.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020, section 3.

    >>> from graphopt.generation.sampling import Sampling
    >>> Sampling(temperature=1.0, top_p=0.6).probabilities(numpy.log([0.1, 0.5, 0.4])).round(3).tolist()
    [0.0, 0.556, 0.444]
    """

    max_tokens: int = within("[1, inf)", 100, whole=True)
    temperature: float = within("[0, inf)", 0.0)
    top_k: int | None = within("[1, inf)", None, whole=True)
    top_p: float = within("(0, 1]", 1.0)
    seed: int = within("[0, inf)", 0, whole=True)

    def __post_init__(self) -> None:
        check_options(self, "generate")

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probability of each token to be drawn, for a temperature above 0."""
        scores = self._scaled(logits)
        if self.top_k is not None and self.top_k < len(scores):
            scores[scores < np.partition(scores, -self.top_k)[-self.top_k]] = -np.inf
        rates = np.exp(scores - scores.max())
        rates /= rates.sum()
        if self.top_p < 1:
            order = np.argsort(rates)
            rates[order[:-1][np.cumsum(rates[order])[:-1] <= 1 - self.top_p]] = 0
        return rates / rates.sum()

    def log_probability(self, logits: np.ndarray, token: int) -> float:
        """Return the logarithm of the probability of a token among all, for a temperature above 0."""
        scores = self._scaled(logits)
        return float(scores[token] - scores.max() - np.log(np.exp(scores - scores.max()).sum()))

    def _scaled(self, logits: np.ndarray) -> np.ndarray:
        return logits.astype(np.float64) / self.temperature

    def choose(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """Return the next token."""
        if self.temperature == 0:
            return int(logits.argmax())
        rates = self.probabilities(logits)
        return int(random.choice(len(rates), p=rates))


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Sampling):
    """Declare the options of `graphopt generate`.

    Args:
        chat: the prompt is a message of a chat, which the tokenizer's template turns into text.
        tokenizer: as in `graphopt.TextGenerator`; by default, that of the data, or the file beside the model.
        adapter: as in `graphopt.TextGenerator`.

    >>> from graphopt.generation.sampling import GenerateOptions
    >>> GenerateOptions(temperature=0.5).max_tokens
    100
    """

    chat: bool = False
    tokenizer: ReadName | None = None
    adapter: ReadName | None = None
