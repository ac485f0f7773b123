"""Continue a text, or answer in a chat, by a language model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphopt.arguments import Checked, checked
from graphopt.data.language.chats import ChatTemplate, Message, check_messages
from graphopt.data.language.tokenizer import Tokenizer, Vocabulary, vocabulary_of
from graphopt.errors import GraphoptError
from graphopt.generation.decoder import decoder_of
from graphopt.generation.sampling import Sampling
from graphopt.graph.loading import Source, load
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor

Prompt = str | Sequence[int] | Sequence[Message] | None


class Completion(NamedTuple):
    """Hold the tokens of a completion, with the one that ends it, and the logarithms of their probabilities."""

    tokens: list[int]
    log_probabilities: list[float]


class TextGenerator(Checked):
    """Continue texts by a language model that stays loaded.

    A model reads tokens, and returns the logits of the next token at each position. If it takes the keys and values of
    earlier tokens, such as files of onnxruntime-genai's model builder and of optimum, they are kept; otherwise, the
    model computes the whole text for each token. A model of rows of a fixed length reads the last tokens.

    Args:
        model: a path, an onnx.ModelProto, an onnx_ir.Model, or an executor, whose current weights count.
        tokenizer: tokenizer.json, its folder, `characters`, or a tokenizer; by default, the file beside the model.
        adapter: an adapter's file of ONNX Runtime, or a folder of peft. It is active in a model with slots for the
            file, and otherwise merged into the weights.
        device: where the model computes; by default, on the CPU. An executor has its own device.

    Raises:
        GraphoptError: there is no tokenizer, or the model is no language model.

    >>> from graphopt import models
    >>> model = models.transformer((8,), 100, width=8, layers=1)
    >>> writer = graphopt.TextGenerator(model, "characters")
    >>> len(writer.generate("The ", max_tokens=5))
    5
    """

    def __init__(
        self,
        model: Source | Executor,
        tokenizer: str | os.PathLike[str] | Vocabulary | None = None,
        *,
        adapter: str | os.PathLike[str] | None = None,
        device: str | Device | None = None,
    ) -> None:
        near = model if isinstance(model, str | os.PathLike) else None
        self.vocabulary = vocabulary_of(tokenizer, near)
        chosen = device if isinstance(device, Device) else Device(device or "cpu")
        loaded = model if isinstance(model, Executor) else load(model)
        self._decoder = decoder_of(loaded, chosen, None if adapter is None else Path(adapter))

    def generate(self, prompt: Prompt = None, **options: object) -> str:
        """Return the text after a prompt; `graphopt.generate` explains the arguments."""
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: Prompt = None, **options: object) -> Iterator[str]:
        """Yield the text after a prompt, piece by piece, as soon as each is a whole character."""
        text = self.vocabulary.stream()
        return filter(None, map(text, self.tokens(self.encoded(prompt), **options)))

    def encoded(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt."""
        if prompt is None or (not isinstance(prompt, str) and not len(prompt)):
            prompt = ""
        if isinstance(prompt, str):
            first = self.vocabulary.end if self.vocabulary.start is None else self.vocabulary.start
            tokens = self.vocabulary.encode(prompt) or ([] if first is None else [first])
            if not tokens:
                raise GraphoptError(
                    "prompt: expected a text, because the tokenizer has no token that starts one, found none"
                )
            return tokens
        if all(isinstance(token, int | np.integer) for token in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        messages = [*prompt]
        check_messages(messages, "prompt")
        if not isinstance(self.vocabulary, Tokenizer):
            raise GraphoptError("prompt: expected text for a tokenizer of characters, found messages of a chat")
        chat = ChatTemplate(self.vocabulary).prompt(messages)
        return next(self.vocabulary.encoded([chat], special=False))[0].tolist()

    def tokens(self, prompt: Sequence[int], **options: Any) -> Iterator[int]:
        """Yield the tokens that follow others, up to one that ends a text."""
        chosen = Sampling(**options)
        size = self.vocabulary.size
        if wrong := [token for token in prompt if not 0 <= token < size]:
            raise GraphoptError(f"prompt: expected tokens from 0 to {size - 1:,}, found {wrong[0]}")
        if not prompt:
            raise GraphoptError("prompt: expected a token or more, found none")
        return self._following(prompt, chosen)

    def _following(self, prompt: Sequence[int], chosen: Sampling) -> Iterator[int]:
        for (token,), _ in self._drawn([prompt], chosen, [np.random.default_rng(chosen.seed)]):
            if token in self.vocabulary.ends:
                return
            yield token

    def _drawn(
        self, prompts: Sequence[Sequence[int]], chosen: Sampling, random: Sequence[np.random.Generator]
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the next token of each text, and the logits [rows, classes] that it is drawn from."""
        self._decoder.clear(len(prompts))
        read = np.array(prompts, np.int64)
        for _ in range(chosen.max_tokens):
            logits = self._decoder.read(read)
            if not np.isfinite(logits.max(axis=1)).all():
                raise GraphoptError("model: expected finite logits, found NaN or infinity: it was not trained well")
            tokens = [chosen.choose(row, each) for row, each in zip(logits, random, strict=True)]
            yield tokens, logits
            read = np.array(tokens, np.int64)[:, None]

    def complete(
        self, prompts: Sequence[Sequence[int]], random: Sequence[np.random.Generator], **options: Any
    ) -> list[Completion]:
        """Return a completion of each prompt, drawn by a generator of its own.

        Prompts of one length are read at once, with their cache.
        """
        chosen = Sampling(**options)
        found: dict[int, Completion] = {}
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for _, group in itertools.groupby(order, key=lambda i: len(prompts[i])):
            same = [*group]
            most = self._decoder.most_rows or len(same)
            for rows in (same[i : i + most] for i in range(0, len(same), most)):
                drawn = [prompts[i] for i in rows], [random[i] for i in rows]
                found |= zip(rows, self._complete(*drawn, chosen), strict=True)
        return [found[i] for i in range(len(prompts))]

    def _complete(
        self, prompts: Sequence[Sequence[int]], random: Sequence[np.random.Generator], chosen: Sampling
    ) -> list[Completion]:
        completions = [Completion([], []) for _ in prompts]
        for tokens, logits in self._drawn(prompts, chosen, random):
            for each, token, row in zip(completions, tokens, logits, strict=True):
                if not each.tokens or each.tokens[-1] not in self.vocabulary.ends:
                    each.tokens.append(token)
                    each.log_probabilities.append(chosen.log_probability(row, token))
            if all(each.tokens[-1] in self.vocabulary.ends for each in completions):
                break
        return completions

    def put(self, weights: Mapping[str, np.ndarray]) -> None:
        """Compute with other values of a model's slots from now on."""
        self._decoder.put(weights)


@checked("name the options")
def generate(
    model: Source | Executor,
    prompt: Prompt = None,
    *,
    tokenizer: str | os.PathLike[str] | Vocabulary | None = None,
    adapter: str | os.PathLike[str] | None = None,
    device: str | Device | None = None,
    **options: Any,
) -> str:
    """Return the text that a language model writes after a prompt, until it ends the text or `max_tokens` are written.

    Args:
        model, tokenizer, adapter, device: as in `graphopt.TextGenerator`.
        prompt: a text, tokens, or the messages of a chat, which the template of the tokenizer turns into text. Without
            a prompt, the model starts a text.
        options: `max_tokens`, 100 by default; `temperature`, 0 for the most likely token each time; `top_k`, `top_p`
            and `seed`.

    Raises:
        GraphoptError: there is no tokenizer, the model is no language model, or an option is wrong.

    >>> from graphopt import models
    >>> model = models.transformer((8,), 100, width=8, layers=1)
    >>> text = graphopt.generate(model, "The ", tokenizer="characters", max_tokens=5, temperature=0.8)
    """
    return TextGenerator(model, tokenizer, adapter=adapter, device=device).generate(prompt, **options)
