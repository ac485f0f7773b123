"""Preferences in files: tokens as the package tokenizers splits them, and the loss as PyTorch computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import pytest
import torch
from builders import model
from language import CHATS, END, save_lines, save_tokenizer
from torch.nn import functional as F  # noqa: N812

import graphopt
import passes
from graphopt import data
from graphopt.cli import main

tokenizers = pytest.importorskip("tokenizers")
TRIPLES = [
    ("Twinkle, twinkle", " little star", " high \N{SNOWMAN} like"),
    ("Up above", " the world so high", " what"),
    ("How I", " wonder", " like a diamond in the sky"),
]
LINES: list[dict[str, Any]] = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in TRIPLES]
ENDS = ("", "_rejected")
LM = """g (int64[N,S] x) => (float[N,S,320] logits) {
    e = Gather(words, x)  h = MatMul(e, hidden)  t = Tanh(h)  logits = MatMul(t, head) }"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def arrays_of(path: str, file: str, **options: Any) -> dict[str, np.ndarray]:
    found = data.text(path, tokenizer=file, **{"context": 64, **options})
    return {name: np.asarray(x) for name, x in found.arrays.items()}


def decoded(file: str, tokens: np.ndarray) -> str:
    return tokenizers.Tokenizer.from_file(file).decode(tokens.tolist(), skip_special_tokens=False)


def test_rows_have_the_prompt_with_each_completion(file: str, tmp_path: Path) -> None:
    found = data.text(save_lines(tmp_path / "a.jsonl", LINES), tokenizer=file)
    encode = tokenizers.Tokenizer.from_file(file).encode
    arrays = {name: np.asarray(x) for name, x in found.arrays.items()}
    assert arrays["input_ids"].shape == arrays["input_ids_rejected"].shape
    count = 0
    for i, (prompt, *both) in enumerate(TRIPLES):
        for end, completion in zip(ENDS, both, strict=True):
            whole = encode(prompt + completion + END).ids
            row, mask = arrays[f"input_ids{end}"][i], arrays[f"completion_mask{end}"][i]
            assert row[: len(whole)].tolist() == whole
            assert mask.nonzero()[0].tolist() == list(range(len(encode(prompt).ids), len(whole)))
            assert arrays[f"attention_mask{end}"][i].sum() == len(whole)
            count += len(whole)
    assert found.tokens == count


def test_a_prompt_may_be_what_both_begin_with(file: str, tmp_path: Path) -> None:
    expected = arrays_of(save_lines(tmp_path / "a.jsonl", LINES), file)
    whole = [{"chosen": x["prompt"] + x["chosen"], "rejected": x["prompt"] + x["rejected"]} for x in LINES]
    found = arrays_of(save_lines(tmp_path / "b.jsonl", whole), file)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.parametrize("form", ["prompt", "whole", "prompt in text"])
def test_chats_are_rendered_by_the_template(form: str, file: str, tmp_path: Path) -> None:
    other = [{"role": "assistant", "content": "No idea"}]
    lines = [{"prompt": chat[:-1], "chosen": chat[-1:], "rejected": other} for chat in CHATS]
    if form != "prompt":
        lines = [{"chosen": chat, "rejected": chat[:-1] + other, "messages": chat} for chat in CHATS]
    if form == "prompt in text":
        lines = [{"prompt": "What star?", **line} for line in lines]
    arrays = arrays_of(save_lines(tmp_path / "a.jsonl", lines), file, context=128)
    for i, chat in enumerate(CHATS):
        for end, last in zip(ENDS, (chat[-1], other[0]), strict=True):
            text = "".join(f"<|im_start|>{x['role']}\n{x['content']}<|im_end|>\n" for x in (*chat[:-1], last))
            row = arrays[f"input_ids{end}"][i]
            assert decoded(file, row[arrays[f"attention_mask{end}"][i]]) == text
            assert decoded(file, row[arrays[f"completion_mask{end}"][i]]) == last["content"] + "<|im_end|>\n"


def test_both_completions_of_an_example_stay_or_go(file: str, tmp_path: Path) -> None:
    lines = [*LINES, {"prompt": "so high " * 9, "chosen": "so", "rejected": "high"}]
    path = save_lines(tmp_path / "a.jsonl", lines)
    with (
        pytest.warns(UserWarning, match="1 of 4 examples have more than 16 tokens"),
        pytest.warns(UserWarning, match="1 of 4 examples have no token to learn"),
    ):
        arrays = arrays_of(path, file, context=16)
    assert {len(x) for x in arrays.values()} == {3}


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("preferences_mistakes"))
def test_wrong_lines_are_named(call: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def read(lines: list[Any]) -> data.Dataset:
        return data.text(save_lines(Path("a.jsonl"), lines), tokenizer=file)

    messages.refused("preferences_mistakes", call, {**globals(), "read": read})


def test_preferences_cannot_be_packed_and_belong_to_a_loss_of_pairs(file: str, tmp_path: Path) -> None:
    path = save_lines(tmp_path / "a.jsonl", LINES)
    with pytest.raises(graphopt.GraphoptError, match=r"packed: expected false for preferences, found true"):
        data.text(path, tokenizer=file, packed=True)
    loss = passes.CausalLanguageModel(labels=True)
    executor = graphopt.Executor(graphopt.compile(language_model(), loss=loss, optimizer=passes.SGD(0.1)))
    with pytest.warns(UserWarning, match=r"rejected completions are not read, .*: set loss=dpo"):
        graphopt.fit(executor, data.text(path, tokenizer=file), epochs=1, batch_size=3)
    executor = graphopt.Executor(graphopt.compile(language_model(), loss=passes.DPO(), optimizer=passes.SGD(0.1)))
    path = save_lines(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(
        graphopt.GraphoptError, match=r"\(of text: JSON lines with prompt, chosen and rejected\): rename"
    ):
        graphopt.fit(executor, data.text(path, tokenizer=file), epochs=1, batch_size=1)


def language_model() -> onnx.ModelProto:
    rng = np.random.default_rng(4)
    shapes = {"words": (320, 12), "hidden": (12, 16), "head": (16, 320)}
    return model(LM, **{name: rng.standard_normal(shape) / 3 for name, shape in shapes.items()})


def log_probability(proto: onnx.ModelProto, tokens: list[int], first: int) -> torch.Tensor:
    """Return PyTorch's log-probability of the tokens from one on."""
    w = {x.name: torch.tensor(onnx.numpy_helper.to_array(x).copy()) for x in proto.graph.initializer}
    logits = torch.tanh(w["words"][tokens] @ w["hidden"]) @ w["head"]
    log_p = logits[:-1].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
    return log_p[first - 1 :].sum()


@pytest.mark.slow
def test_a_command_trains_a_decoder_on_preferences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(save_tokenizer(tmp_path))
    save_lines(Path("a.jsonl"), LINES)
    graphopt.save(language_model(), "decoder.onnx")
    options = [
        "loss=dpo",
        "adapter=lora",
        "adapter.pattern=h*",
        "adapter.rank=2",
        "optimizer.learning_rate=0.02",
    ]
    options += ["fit.epochs=20", "fit.batch_size=3", "fit.validation=0", "folder=run"]
    assert main(["decoder.onnx", "data=text", "data.path=a.jsonl", *options, "quiet=true"]) == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < 0.5 * records[0]["loss"] and records[-1]["reward_accuracy"] == 1
    assert main(["evaluate", "folder=run", "rows=all", "quiet=true"]) == 0
    found = json.loads(Path("run/metrics.json").read_text())
    encode, trained = tokenizers.Tokenizer.from_file(file).encode, onnx.load("run/trained.onnx")
    ratios = [
        [
            log_probability(trained, tokens, start) - log_probability(language_model(), tokens, start)
            for completion in both
            for tokens, start in [(encode(prompt + completion + END).ids, len(encode(prompt).ids))]
        ]
        for prompt, *both in TRIPLES
    ]
    expected = -F.logsigmoid(torch.stack([0.1 * (chosen - rejected) for chosen, rejected in ratios])).mean()
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)
