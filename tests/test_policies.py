"""Preferences without pairs, policies and their rollouts: losses and gradients are PyTorch's, advantages TRL's."""

from __future__ import annotations

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any

import messages
import numpy as np
import pytest
import torch
from builders import mlp, run
from language import save_lines, save_tokenizer
from test_generate import CACHED, with_weights
from test_pair_losses import MASKS, TOKENS, language_model, torch_weights

import graphopt
import passes
from graphopt import data
from graphopt.cli import main
from graphopt.data import Characters

RNG = np.random.default_rng(1)


def test_ppo_is_pytorchs() -> None:
    proto = mlp(dtype=np.float64)
    step = graphopt.compile(proto, loss=passes.PPO(0.1, 0.3, entropy=0.2), optimizer=passes.SGD(1.0))
    x, action = RNG.standard_normal((6, 4)), RNG.integers(0, 3, 6)
    advantages, old = RNG.standard_normal(6), -RNG.uniform(0.5, 2, 6)
    feeds = {"x": x, "action": action, "advantages": advantages, "old_log_probabilities": old}
    (outputs,) = run(step, 1, feeds)
    w = torch_weights(proto)
    hidden = torch.tanh(torch.tensor(x) @ w["fc0.weight"].T + w["fc0.bias"])
    policy = torch.distributions.Categorical(logits=hidden @ w["fc1.weight"].T + w["fc1.bias"])
    ratio = (policy.log_prob(torch.tensor(action)) - torch.tensor(old)).exp()
    a = torch.tensor(advantages)
    expected = -(torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a) + 0.2 * policy.entropy()).mean()
    expected.backward()
    assert outputs["loss"] == pytest.approx(expected.item(), rel=1e-9)
    for key, value in w.items():
        np.testing.assert_allclose(outputs[f"{key}.next"], (value - value.grad).detach().numpy(), rtol=1e-7, atol=1e-9)


def test_odds_of_a_sure_completion_are_finite() -> None:
    """Its mean log-probability is 0, where PyTorch's log1mexp is infinite."""
    proto = language_model(np.float32)
    sure = copy.deepcopy(proto)
    for x in sure.graph.initializer:
        x.CopyFrom(graphopt_array(x.name, np.zeros(x.dims, np.float32)))
    executor = graphopt.Executor(graphopt.compile(sure, loss=passes.ORPO(), optimizer=passes.SGD(1.0)))
    assert np.isfinite(executor.step({**TOKENS, **MASKS})["loss"])


def graphopt_array(name: str, array: np.ndarray) -> Any:
    import onnx

    return onnx.numpy_helper.from_array(array, name)


# --- Rollouts ---

PROMPTS = [{"prompt": "012", "answer": 1}, {"prompt": "7", "answer": 2}, {"prompt": "abc", "answer": 3}]


def digits(completions: list[str], **_: Any) -> list[float]:
    """Return the share of characters that are digits."""
    return [sum(c.isdigit() for c in text) / len(text) for text in completions]


def sampled(**options: Any) -> tuple[graphopt.Executor, dict[str, Any]]:
    steps = {"loss": passes.GRPO(**options), "optimizer": passes.AdamW(0.02)}
    step = graphopt.compile(with_weights(CACHED), adapter=passes.LoRA(rank=2), **steps)
    executor = graphopt.Executor(step, threads=1, native=False)
    chosen = {"tokenizer": Characters(), "generations": 4, "max_tokens": 4, "batch_size": 2}
    return executor, {"model": with_weights(CACHED), **chosen}


@pytest.mark.parametrize("adapter", [passes.LoRA(rank=2), None], ids=["slots", "weights"])
def test_rollouts_by_a_cache_are_those_of_the_executor(adapter: Any) -> None:
    """Rewards get TRL's arguments, and the log-probabilities are those of the graph, also after training."""
    steps = {"loss": passes.GRPO(temperature=0.8), "optimizer": passes.AdamW(0.05), "adapter": adapter}
    executor = graphopt.Executor(graphopt.compile(with_weights(CACHED), **steps), threads=1, native=False)
    given: list[Any] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> Any:
        given.append((prompts, completions, completion_ids, answer))
        return [float(len(set(text))) for text in completions]

    options = {"tokenizer": Characters(), "generations": 4, "max_tokens": 4, "batch_size": 2}
    cached = graphopt.Rollouts(executor, PROMPTS, reward, model=with_weights(CACHED), **options)
    whole = graphopt.Rollouts(executor, PROMPTS, reward, **options)
    assert len(cached) == 2
    graphopt.fit(executor, cached, epochs=2, validation=None)
    cached.set_epoch(5)
    whole.set_epoch(5)
    for mine, other in zip(cached, whole, strict=True):
        assert mine.keys() == other.keys() == executor.inputs.keys()
        for name, x in mine.items():
            np.testing.assert_allclose(x, other[name], atol=1e-5)
    prompts, completions, ids, answers = given[-1]
    assert {"prompt": prompts[0], "answer": answers[0]} in PROMPTS
    assert Characters().decode(ids[0]) == completions[0]
    logits = executor.predict(input_ids=mine["input_ids"])["logits"]
    log_p = torch.tensor(logits / 0.8).log_softmax(-1)[:, :-1]
    log_p = log_p.gather(-1, torch.tensor(mine["input_ids"][:, 1:, None]).long())[..., 0].numpy()
    counted = mine["completion_mask"][:, 1:] == 1
    np.testing.assert_allclose(mine["old_log_probabilities"][:, 1:][counted], log_p[counted], atol=2e-5)
    groups = mine["rewards"].reshape(-1, 4)
    np.testing.assert_allclose(mine["advantages"].reshape(-1, 4).mean(1), 0, atol=1e-6)
    assert len(groups) == 1  # of the last prompt


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 3])
def test_a_run_resumes_bit_for_bit(iterations: int, tmp_path: Path) -> None:
    def trained(stop: int | None, **fit: Any) -> dict[str, np.ndarray]:
        executor, options = sampled(beta=0.1)
        rollouts = graphopt.Rollouts(executor, PROMPTS, digits, iterations=iterations, **options)
        callback = [] if stop is None else [Stop(stop)]
        graphopt.fit(executor, rollouts, epochs=3, validation=None, callbacks=callback, **fit)
        return executor.state

    whole = trained(None)
    trained(4, checkpoint=tmp_path)
    again = trained(None, checkpoint=tmp_path, resume=True)
    assert all((whole[name] == again[name]).all() for name in whole)


class Stop(graphopt.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any, record: Any) -> None:
        run.control.should_stop = run.step == self.step


@pytest.mark.slow
def test_a_model_learns_what_is_rewarded() -> None:
    executor, options = sampled()
    rollouts = graphopt.Rollouts(executor, PROMPTS, digits, **{**options, "generations": 8})
    records = graphopt.fit(executor, rollouts, epochs=15, validation=None)
    assert records[0]["reward"] < 0.7 and records[-1]["reward"] > 0.9


@pytest.mark.slow
def test_the_best_weights_are_those_of_the_reward_of_held_out_prompts(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Rewards of several functions are added, with their weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("two_rewards.py").write_text(
        "from pathlib import Path\n"
        "def digits(prompts, completions, **_):\n"
        "    with Path('asked.txt').open('a') as file: print(*sorted({*prompts}), file=file)\n"
        "    return [sum(c.isdigit() for c in x) / len(x) for x in completions]\n"
        "def one(completions, **_):\n"
        "    return [1.0] * len(completions)\n"
    )
    save_lines(Path("prompts.jsonl"), [*PROMPTS, {"prompt": "5", "answer": 4}])
    graphopt.save(with_weights(CACHED), "decoder.onnx")
    command = [
        "decoder.onnx",
        "data=prompts",
        "data.path=prompts.jsonl",
        "loss=grpo",
        "adapter=lora",
        "quiet=true",
    ]
    command += ["reward=[two_rewards:digits,two_rewards:one]", "trust=[two_rewards]", "folder=run"]
    command += ["rollouts.max_tokens=4", "rollouts.reward_weights=[1,2]", "generate.tokenizer=characters"]
    command += [
        "optimizer.learning_rate=0.05",
        "fit.epochs=4",
        "fit.validation=0.25",
        "executor.native=false",
    ]
    assert main(command) == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    rewards = [record["validation_reward"] for record in records]
    assert len(rewards) == 4 and all(2 <= x <= 3 for x in [*rewards, records[0]["reward"]])
    trained, held_out, *_ = (line.split() for line in Path("asked.txt").read_text().splitlines())
    assert len(trained) == 3 and len(held_out) == 1 and not {*trained} & {*held_out}
    best = np.argmax(rewards) + 1
    assert Path("run/checkpoints/best").read_text() == f"step-{best:08d}\n"  # an epoch is a step
    assert main(["evaluate", "run"]) == 1
    assert "expected a run on rows with a loss, found one with rewards" in " ".join(capsys.readouterr().err.split())


def test_rewards_of_which_none_counts_are_told() -> None:
    executor, options = sampled()
    with pytest.warns(UserWarning, match="reward: None or NaN for all completions of a batch"):
        next(iter(graphopt.Rollouts(executor, PROMPTS, lambda completions, **_: [None] * len(completions), **options)))


def test_a_reward_of_the_working_directory_is_told_how_to_be_found(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The installed command imports nothing because it lies in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [place for place in sys.path if place])
    Path("rewards_here.py").write_text("raise SystemExit('it ran')\n")
    save_lines(Path("prompts.jsonl"), PROMPTS)
    graphopt.save(with_weights(CACHED), "decoder.onnx")
    command = ["decoder.onnx", "data=prompts", "data.path=prompts.jsonl", "loss=grpo", "folder=run"]
    assert main([*command, "reward=rewards_here:digits", "trust=[rewards_here]"]) == 1
    assert (
        "reward: cannot find 'rewards_here:digits': No module named 'rewards_here': rewards_here is in this folder, "
        "which python -m graphopt searches" in " ".join(capsys.readouterr().err.split())
    )


def test_labelled_completions_have_rows_with_those_of_others(tmp_path: Path) -> None:
    file = str(save_tokenizer(tmp_path))
    lines = [{"prompt": f"Up {i}", "completion": f" above {i}", "label": i != 1} for i in range(3)]
    found = data.text(save_lines(tmp_path / "a.jsonl", lines), tokenizer=file)
    arrays = {name: np.asarray(x) for name, x in found.arrays.items()}
    assert arrays["label"].tolist() == [1, 0, 1]
    decode = data.Tokenizer(file).decode
    for i in range(3):
        for end, other in (("", i), ("_mismatched", (i - 1) % 3)):
            row = arrays[f"input_ids{end}"][i][arrays[f"attention_mask{end}"][i]]
            assert decode(row).startswith(f"Up {i} above {other}")
            inside = arrays[f"input_ids{end}"][i][arrays[f"completion_mask{end}"][i]]
            assert decode(inside).startswith(f" above {other}")


# --- Mistakes ---


untrained = functools.cache(sampled)


def refused(reward: Any = digits, prompts: Any = PROMPTS, executor: Any = None, **changed: Any) -> None:
    own, options = untrained()
    for _ in graphopt.Rollouts(executor or own, prompts, reward, **{**options, **changed}):
        pass


def other_executor() -> graphopt.Executor:
    step = graphopt.compile(mlp(), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    return graphopt.Executor(step, native=False)


def prefetched() -> None:
    executor, options = sampled()
    graphopt.fit(executor, graphopt.Rollouts(executor, PROMPTS, digits, **options), validation=None, prefetch=1)


def read(lines: list[Any]) -> data.Dataset:
    return data.prompts(save_lines(Path("a.jsonl"), lines))


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("policies_mistakes"))
def test_mistakes_are_told_in_a_line(call: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    messages.refused("policies_mistakes", call, globals())
