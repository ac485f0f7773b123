"""Let a language model complete prompts, reward the completions, and make batches of them, which train the model."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from graphopt.adapters.combined import adaptations
from graphopt.arguments import Checked
from graphopt.data import Dataset
from graphopt.data.language.documents import Tokenized
from graphopt.data.language.rows import ATTENTION, COMPLETION, POSITIONS, TOKENS, arranged
from graphopt.data.language.tokenizer import Vocabulary, vocabulary_of
from graphopt.errors import GraphoptError, kind_of, line, some, unknown
from graphopt.generation.decoder import DecoderInputs
from graphopt.generation.text import TextGenerator
from graphopt.graph.loading import Source
from graphopt.graph.merging import adapted
from graphopt.graph.metadata import TEMPERATURE, original_name
from graphopt.graph.roles import Role, role_of, with_role
from graphopt.runtime.executor import Executor
from graphopt.runtime.executor_state import trained_into
from graphopt.runtime.saved_adapter import slot_arrays

_ADVANTAGES, _OLD, _REWARDS = "advantages", "old_log_probabilities", "rewards"
_SCALES = ("group", "batch", "none")
_LEAST_DEVIATION = 1e-4  # as in TRL
_LORA = "LoRA"

Reward = Callable[..., Sequence[float | None]]
Scale = Literal["group", "batch", "none"]


class Rollouts(Checked):
    """Let a model complete prompts, and yield batches of its completions, for `fit` with `passes.GRPO`.

    The completions are drawn from the model with its weights of that moment, `generations` of each prompt at once. An
    advantage is the reward of a completion less the mean of its prompt's. An epoch has each prompt once. What is drawn
    depends only on the seed, the epoch and the place in it, so that a resumed run draws the same.

    Args:
        executor: the executor of a training graph with `passes.GRPO`, which `fit` also gets.
        prompts: mappings with `prompt`, a text or the messages of a chat, and other columns; or `data.prompts(path)`.
        reward: a function of `prompts`, `completions`, `completion_ids` and the columns, lists with an entry for each
            completion, which takes them by name, and returns the reward of each, or None for one that does not count.
            Completions of chats are lists of one message. Functions for TRL's GRPOTrainer fit. The reward of several
            functions is the sum of theirs.
        model: the model that was compiled, a path for example, which keeps keys and values of earlier tokens. Adapters
            alone are put into its slots; other weights are written into it for each batch. Without it, the executor
            computes the whole text for each token.
        tokenizer: as in `graphopt.TextGenerator`.
        batch_size: the number of prompts of a batch.
        generations: the number of completions of each prompt.
        iterations: the number of steps that train on each batch.
        reward_weights: the factor of the rewards of each function; 1 for each by default.
        scale_rewards: divide advantages by the standard deviation of the rewards of the `group` of a prompt, or of the
            `batch`, plus 1e-4; or by `none`.
        max_tokens, top_k, top_p: as in `graphopt.generate`. The temperature is that of the loss.
        shuffle: whether the order of the prompts is drawn.
        seed: the seed of what is drawn.

    Raises:
        GraphoptError: the graph, the prompts or an option are wrong.

    >>> model = models.transformer((12,), 100, width=8, layers=1)
    >>> step = graphopt.compile(model, loss=passes.GRPO(), optimizer=passes.AdamW(1e-2))
    >>> executor = graphopt.Executor(step)
    >>> def short(completions, **_):
    ...     return [-float(len(text.strip())) for text in completions]
    >>> options = {"tokenizer": "characters", "generations": 4, "max_tokens": 5}
    >>> rollouts = graphopt.Rollouts(executor, [{"prompt": "Say "}], short, **options)
    >>> records = graphopt.fit(executor, rollouts, epochs=2, validation=None)
    >>> sorted(records[-1])[:4]
    ['clip_share', 'completion_length', 'epoch', 'learning_rate']
    """

    reads_state = True  # batches depend on the weights

    def __init__(
        self,
        executor: Executor,
        prompts: Dataset | Sequence[Mapping[str, object]],
        reward: Reward | Sequence[Reward],
        *,
        model: Source | None = None,
        tokenizer: str | os.PathLike[str] | Vocabulary | None = None,
        batch_size: int = 8,
        generations: int = 8,
        iterations: int = 1,
        reward_weights: Sequence[float] | None = None,
        scale_rewards: Scale = "group",
        max_tokens: int = 256,
        top_k: int | None = None,
        top_p: float = 1.0,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        least = {"batch_size": 1, "generations": 2, "iterations": 1, "max_tokens": 1}
        given = {"batch_size": batch_size, "generations": generations, "iterations": iterations}
        for name, number in {**given, "max_tokens": max_tokens}.items():
            if type(number) is not int or number < least[name]:
                raise GraphoptError(f"Rollouts({name}): expected {least[name]} or more, found {number!r}")
        if scale_rewards not in _SCALES:
            raise GraphoptError(f"Rollouts: {unknown('scale_rewards', str(scale_rewards), _SCALES)}")
        temperature = TEMPERATURE.read(executor.model) if isinstance(executor, Executor) else None
        if temperature is None:
            raise GraphoptError(
                "Rollouts: expected the executor of a training graph with passes.GRPO, found another: compile with "
                "loss=passes.GRPO()"
            )
        self._columns = _columns(prompts)
        self._rewards: Sequence[Reward] = [reward] if callable(reward) else _listed(reward)
        for function in self._rewards:
            own = (x for x in self._columns if x != "prompt")
            _check_reward(function, ["prompts", "completions", "completion_ids", *own])
        weights = [1.0] * len(self._rewards) if reward_weights is None else [*reward_weights]
        if len(weights) != len(self._rewards) or not all(map(math.isfinite, weights)):
            raise GraphoptError(
                f"Rollouts(reward_weights): expected a finite number for each function, {len(self._rewards)} in all, "
                f"found {weights}"
            )
        self._weights = np.array(weights, np.float32)
        self._executor, self._scale = executor, scale_rewards
        self._batch_size, self._generations, self._iterations = batch_size, generations, iterations
        self._sampling = {"max_tokens": max_tokens, "top_k": top_k, "top_p": top_p}
        self._sampling["temperature"] = float(temperature)
        self._shuffle, self.seed, self._epoch = shuffle, seed, 0
        self._writer = _Writer(executor, model, tokenizer)
        writer = self._writer.current()
        self._prompts = [writer.encoded(prompt) for prompt in self._columns["prompt"]]
        inputs = DecoderInputs(x for x in executor.inputs.values() if role_of(x) is Role.DATA)
        self._ids, longest = inputs.ids, max(map(len, self._prompts)) + max_tokens
        self._width = inputs.length or longest
        if longest > self._width:
            raise GraphoptError(
                f"Rollouts: expected prompts and max_tokens of at most {self._width} tokens, the length of the model, "
                f"found {longest}: lower max_tokens, or export the model with a dynamic length"
            )

    def __len__(self) -> int:
        return math.ceil(len(self._prompts) / self._batch_size) * self._iterations

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with the next iterator."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return _Epoch(self, self._epoch, self._iterations)

    def draw(self, epoch: int, number: int) -> dict[str, np.ndarray] | None:
        """Return a batch of completions of the model as it is; None after the last one."""
        count = len(self._prompts)
        order = np.arange(count)
        if self._shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(count)
        chosen = order[number * self._batch_size :][: self._batch_size].repeat(self._generations)
        if not len(chosen):
            return None
        random = [np.random.default_rng([self.seed, epoch, number, i]) for i in range(len(chosen))]
        prompts, writer = [self._prompts[i] for i in chosen], self._writer.current()
        completions = writer.complete(prompts, random, **self._sampling)
        rewards = self._rewarded(chosen, [x.tokens for x in completions], writer.vocabulary)
        rows = [np.array([*p, *x.tokens], np.int32) for p, x in zip(prompts, completions, strict=True)]
        counted = [np.arange(len(row)) >= len(p) for p, row in zip(prompts, rows, strict=True)]
        end = writer.vocabulary.end or 0
        arrays = arranged(Tokenized(rows, counted, False), self._width, "Rollouts", filled=True, pad=end)
        old = np.zeros((len(rows), self._width), np.float32)
        for row, p, x in zip(old, prompts, completions, strict=True):
            row[len(p) : len(p) + len(x.tokens)] = x.log_probabilities
        given = {
            self._ids: arrays[TOKENS],
            **{name: arrays[name] for name in (COMPLETION, ATTENTION, POSITIONS)},
        }
        given |= {_OLD: old, _ADVANTAGES: advantages_of(rewards, self._generations, self._scale)}
        given[_REWARDS] = np.nan_to_num(rewards)
        zero = np.zeros((len(rows), self._width), np.int64)
        inputs = self._executor.inputs
        return {
            name: np.asarray(given.get(name, zero))
            for name in inputs
            if role_of(inputs[name]) is not Role.HYPERPARAMETER
        }

    def _rewarded(self, rows: np.ndarray, completions: Sequence[list[int]], vocabulary: Vocabulary) -> np.ndarray:
        columns = {name: [values[i] for i in rows] for name, values in self._columns.items()}
        prompts = columns.pop("prompt")
        texts = [vocabulary.decode(x[:-1] if x[-1] in vocabulary.ends else x) for x in completions]
        told = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        given = {"prompts": prompts, "completions": told, "completion_ids": [*completions], **columns}
        rewards = weighted([_numbers(reward, given) for reward in self._rewards], self._weights)
        if np.isnan(rewards).all():
            warnings.warn("reward: None or NaN for all completions of a batch, which trains nothing", stacklevel=2)
        return rewards


class _Epoch(Iterator[dict[str, np.ndarray]]):
    """Yield the batches of an epoch, each several times; its state has the batch that is not done."""

    def __init__(self, rollouts: Rollouts, epoch: int, iterations: int) -> None:
        self._rollouts, self._epoch, self._iterations = rollouts, epoch, iterations
        self._done = 0
        self._batch: dict[str, np.ndarray] | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        number, again = divmod(self._done, self._iterations)
        if not again:
            self._batch = self._rollouts.draw(self._epoch, number)
        if self._batch is None:
            raise StopIteration
        self._done += 1
        return self._batch

    def state_dict(self) -> dict[str, object]:
        return {"done": self._done, "batch": self._batch if self._done % self._iterations else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done, self._batch = state["done"], state["batch"]


class _Writer:
    """Hold what generates with the weights of an executor."""

    def __init__(
        self, executor: Executor, model: Source | None, tokenizer: str | os.PathLike[str] | Vocabulary | None
    ) -> None:
        near = model if isinstance(model, str | os.PathLike) else None
        self._executor, self._model = executor, model
        self._vocabulary, self._device = vocabulary_of(tokenizer, near), executor.device_options
        own = {name for note in adapted(executor.model) if note.adapter == _LORA for name in note.values}
        trained = {original_name(x) for x in with_role(executor.model, Role.PARAMETER)}
        self._takes_slots = model is not None and trained <= own
        self._writer: TextGenerator | None = None

    def current(self) -> TextGenerator:
        """Return the generator with the weights of now."""
        executor, model, vocabulary = self._executor, self._model, self._vocabulary
        if model is None:
            self._writer = self._writer or TextGenerator(executor, vocabulary)
        elif not self._takes_slots:
            trained = executor.trained(into=model)
            self._writer = TextGenerator(trained, vocabulary, device=self._device)
        else:
            step, state = executor.model, executor.state
            if self._writer is None:
                slots = trained_into(step, state, model, slots=True).message()
                self._writer = TextGenerator(slots, vocabulary, device=self._device)
            self._writer.put(slot_arrays(adaptations(step, state, "Rollouts")))
        return self._writer


def _numbers(reward: Reward, given: Mapping[str, Any]) -> np.ndarray:
    """Return what a function rewards completions with; NaN for those that do not count."""
    name, count = f"reward {getattr(reward, '__name__', kind_of(reward))!r}", len(given["completions"])
    found = reward(**given)
    try:
        rewards = np.array([np.nan if x is None else x for x in found], np.float32)
    except (TypeError, ValueError) as error:
        raise GraphoptError(
            f"{name}: expected a list with a number or None for each completion, found {kind_of(found)}: {line(error)}"
        ) from error
    if rewards.shape != (count,) or np.isinf(rewards).any():
        raise GraphoptError(
            f"{name}: expected a finite number or None for each of {count} completions, found "
            f"{'infinity' if rewards.shape == (count,) else f'an array of shape {list(rewards.shape)}'}"
        )
    return rewards


def weighted(rewards: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
    """Return the weighted sum of rewards without those that are NaN, and NaN where all are.

    >>> from graphopt.training.rollouts import weighted
    >>> weighted([numpy.float32([1, 3]), numpy.float32([5, numpy.nan])], numpy.float32([1, 0.5])).tolist()
    [3.5, 3.0]
    """
    table = np.stack(rewards, axis=1)
    sums: np.ndarray = np.nansum(table * weights, axis=1)
    return np.where(np.isnan(table).all(axis=1), np.float32(np.nan), sums)


def advantages_of(rewards: np.ndarray, generations: int, scale: Scale) -> np.ndarray:
    """Return the rewards less the mean of their group, divided by a standard deviation; 0 for those that are NaN.

    >>> from graphopt.training.rollouts import advantages_of
    >>> advantages_of(numpy.float32([1, 3, 5, 5]), 2, "none").tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    groups = rewards.astype(np.float32).reshape(-1, generations)
    from_mean = groups - _mean(groups, 1)
    if scale != "none":
        axis = 1 if scale == "group" else None
        count = np.isfinite(groups).sum(axis=axis, keepdims=True)
        square = _mean((groups - _mean(groups, axis)) ** 2, axis)
        correction = (count / np.maximum(count - 1, 1)).astype(np.float32)
        from_mean = from_mean / (np.sqrt(square * correction) + np.float32(_LEAST_DEVIATION))
    return np.nan_to_num(from_mean).reshape(-1)


def _mean(x: np.ndarray, axis: int | None) -> np.ndarray:
    """Return the mean of numbers that are not NaN."""
    count = np.isfinite(x).sum(axis=axis, keepdims=True)
    total: np.ndarray = np.nansum(x, axis=axis, keepdims=True)
    return total / np.maximum(count, 1).astype(np.float32)


def _listed(rewards: object) -> Sequence[Any]:
    """Return functions that reward completions as a list; anything else as one of them, for the error about it."""
    return [*rewards] if isinstance(rewards, list | tuple) and rewards else [rewards]


def _check_reward(reward: object, names: Sequence[str]) -> None:
    """Raise an error unless something is a function that takes arguments by name."""
    if not callable(reward):
        raise GraphoptError(f"Rollouts(reward): expected a function, found {kind_of(reward)}")
    try:
        inspect.signature(reward).bind(**dict.fromkeys(names))
    except TypeError as error:
        mend = ": add **others" if "unexpected" in str(error) else ", of which the rows of prompts lack some"
        raise GraphoptError(
            f"Rollouts(reward): expected a function that takes {', '.join(names)} by name, found one of "
            f"{inspect.signature(reward)}{mend}"
        ) from None
    except ValueError:  # a function without a signature
        return


def _columns(prompts: Dataset | Sequence[Mapping[str, object]]) -> dict[str, Sequence[Any]]:
    if isinstance(prompts, Dataset):
        columns: dict[str, Sequence[Any]] = {name: [*x] for name, x in prompts.table.items()}
        found = [*columns, *prompts.arrays]
    else:
        rows = [row if isinstance(row, Mapping) else {} for row in prompts]
        found = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: [row.get(name) for row in rows] for name in found}
    if any(x is None for x in columns.get("prompt", [None])):
        raise GraphoptError(
            f"Rollouts: expected rows with a prompt, found {some(found) or 'none'}: data.prompts(path) reads them"
        )
    return columns
