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
from test_pair_losses import MASKS, TOKENS, language_model, log_probabilities, torch_weights
from torch.nn import functional as F  # noqa: N812

import graphopt
import passes
from graphopt import data
from graphopt.cli import main
from graphopt.data import Characters
from graphopt.training.rollouts import advantages_of

RNG = np.random.default_rng(1)
LABEL = np.array([1, 0, 1, 1])
OTHERS = {name.replace("rejected", "mismatched"): x for name, x in {**TOKENS, **MASKS}.items()}
ROLLED = {
    "input_ids": TOKENS["input_ids"],
    "completion_mask": MASKS["completion_mask"],
    "advantages": RNG.standard_normal(4),
    "old_log_probabilities": -RNG.uniform(1, 4, (4, 5)),
    "rewards": RNG.standard_normal(4),
}


def log_p_of_tokens(w: Any, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor(TOKENS["input_ids"])
    logits = torch.tanh(w["words"][ids] @ w["hidden"]) @ w["head"] / temperature
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def orpo(w: Any, _: Any) -> torch.Tensor:
    chosen, rejected = (log_probabilities(w, which, True) for which in ("", "_rejected"))
    odds = [p - torch.log1p(-p.exp()) for p in (chosen, rejected)]
    ends = torch.tensor(MASKS["completion_mask"])[:, 1:].flip(1).cumsum(1).flip(1) > 0
    return -log_p_of_tokens(w)[ends].mean() - 0.3 * F.logsigmoid(odds[0] - odds[1]).mean()


def simpo(w: Any, _: Any) -> torch.Tensor:
    d = log_probabilities(w, "", True) - log_probabilities(w, "_rejected", True)
    return -F.logsigmoid(1.5 * d - 0.7).mean()


def kto(w: Any, start: Any, uses_z: bool = True) -> torch.Tensor:
    chosen, other = (
        log_probabilities(w, which) - log_probabilities(start, which) for which in ("", "_rejected")
    )
    z = other.detach().mean().clamp(min=0) if uses_z else 0.0
    label = torch.tensor(LABEL)
    losses = 1 - torch.sigmoid(0.4 * torch.where(label == 1, chosen - z, z - chosen))
    return (losses * torch.tensor(np.where(LABEL == 1, 1.3, 0.6))).mean()


def grpo(
    w: Any,
    start: Any,
    *,
    by: str,
    level: str = "token",
    beta: float = 0.0,
    t: float = 1.0,
    is_biased: bool = False,
) -> torch.Tensor:
    mask = torch.tensor(MASKS["completion_mask"])[:, 1:]
    p, a = log_p_of_tokens(w, t), torch.tensor(ROLLED["advantages"])[:, None]
    log_ratio = (p - torch.tensor(ROLLED["old_log_probabilities"])[:, 1:]) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.4) * a)
    d = log_p_of_tokens(start, t).detach() - p
    loss = (loss + beta * (d.exp() - d - 1) * (1 if is_biased else ratio)) * mask
    rows = {"grpo": loss.sum(1) / mask.sum(1), "dr_grpo": loss.sum(1) / 7}
    return rows[by].mean() if by in rows else loss.sum() / mask.sum()


WEIGHTS = {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.6}
CLIP = {"epsilon_high": 0.4, "max_completion_length": 7}
CASES: dict[str, tuple[passes.Loss, Any, dict[str, Any]]] = {
    "ORPO": (passes.ORPO(0.3), orpo, {**TOKENS, **MASKS}),
    "SimPO": (passes.SimPO(1.5, 0.7), simpo, {**TOKENS, **MASKS}),
    "KTO": (passes.KTO(**WEIGHTS), kto, {**OTHERS, "label": LABEL}),
    "APO": (
        passes.KTO(**WEIGHTS, loss_type="apo_zero_unpaired"),
        lambda w, start: kto(w, start, False),
        {name: x for name, x in {**OTHERS, "label": LABEL}.items() if "mismatched" not in name},
    ),
    "GRPO of rows": (passes.GRPO(**CLIP, loss_type="grpo"), lambda *w: grpo(*w, by="grpo"), ROLLED),
    "GRPO of sums": (passes.GRPO(**CLIP, loss_type="dr_grpo"), lambda *w: grpo(*w, by="dr_grpo"), ROLLED),
    "GRPO near a reference": (
        passes.GRPO(0.3, **CLIP, temperature=0.7),
        lambda *w: grpo(*w, by="dapo", beta=0.3, t=0.7),
        ROLLED,
    ),
    "GRPO with a biased distance": (
        passes.GRPO(0.3, **CLIP, use_bias_correction_kl=False),
        lambda *w: grpo(*w, by="dapo", beta=0.3, is_biased=True),
        ROLLED,
    ),
    "GRPO of sequences": (
        passes.GRPO(**CLIP, importance_sampling_level="sequence"),
        lambda *w: grpo(*w, by="dapo", level="sequence"),
        ROLLED,
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_steps_are_pytorchs(name: str) -> None:
    loss, twin, feeds = CASES[name]
    proto = language_model()
    step = graphopt.compile(proto, loss=loss, optimizer=passes.SGD(0.5))
    weights, start = torch_weights(proto), torch_weights(language_model())
    optimizer = torch.optim.SGD(weights.values(), 0.5)
    for outputs in run(step, 3, feeds):
        expected = twin(weights, start)
        assert outputs["loss"] == pytest.approx(expected.item(), rel=1e-8)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for key, w in weights.items():
        np.testing.assert_allclose(outputs[f"{key}.next"], w.detach().numpy(), rtol=1e-6, atol=1e-9)


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
        np.testing.assert_allclose(
            outputs[f"{key}.next"], (value - value.grad).detach().numpy(), rtol=1e-7, atol=1e-9
        )


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


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(scale: Any) -> None:
    rewards = RNG.standard_normal((3, 4)).astype(np.float32)
    rewards[1, 2] = np.nan  # of a completion that has no reward
    rewards[2] = 0.5
    x = torch.tensor(rewards)
    found = x - x.nanmean(1, keepdim=True)
    if scale != "none":
        axes = {"group": (1,), "batch": (0, 1)}[scale]
        count = (~x.isnan()).sum(axes, keepdim=True)
        square = ((x - x.nanmean(axes, keepdim=True)) ** 2).nanmean(axes, keepdim=True)
        found = found / ((square * count / (count - 1)).sqrt() + 1e-4)
    expected = found.nan_to_num(0.0).reshape(-1).numpy()
    np.testing.assert_allclose(advantages_of(rewards.reshape(-1), 4, scale), expected, rtol=2e-6, atol=1e-7)


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
def test_the_command_trains_by_a_reward(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_rewards.py").write_text(
        "def digits(completions, answer, **_):\n"
        "    return [sum(c.isdigit() for c in x) / len(x) for x in completions]\n"
    )
    save_lines(Path("prompts.jsonl"), PROMPTS)
    graphopt.save(with_weights(CACHED), "decoder.onnx")
    command = ["decoder.onnx", "data=prompts", "data.path=prompts.jsonl", "loss=grpo", "adapter=lora"]
    command += ["reward=own_rewards:digits", "rollouts.max_tokens=4", "generate.tokenizer=characters"]
    command += ["optimizer.learning_rate=0.02", "fit.epochs=2", "folder=run", "executor.native=false"]
    assert main(command) == 1
    assert (
        "reward: expected graphopt's own or trusted code, found 'own_rewards:digits'"
        in capsys.readouterr().err
    )
    assert main([*command, "trust=[own_rewards]", "quiet=true"]) == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2] and 0 < records[-1]["reward"] < 1
    assert main(["generate", "folder=run", "prompt=01", "generate.max_tokens=3", "quiet=true"]) == 0


@pytest.mark.slow
def test_the_best_weights_are_those_of_the_reward_of_held_out_prompts(
    tmp_path: Path, monkeypatch: Any
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
    graphopt.fit(
        executor, graphopt.Rollouts(executor, PROMPTS, digits, **options), validation=None, prefetch=1
    )


def read(lines: list[Any]) -> data.Dataset:
    return data.prompts(save_lines(Path("a.jsonl"), lines))


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("policies_mistakes"))
def test_mistakes_are_told_in_a_line(call: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    messages.refused("policies_mistakes", call, globals())
