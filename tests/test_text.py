"""Rows of text: tokenizers' own tokens, what counts in them, packing, and files that nobody should trust."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import messages
import numpy as np
import pytest
from language import CHATML, CHATS, END, MARKED, RHYME, save_lines, save_tokenizer

import graphopt
import graphopt.models
import passes
from graphopt import data
from graphopt.data.language import chats

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def tokens_of(file: str, text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(file).encode(text).ids


def decoded(file: str, tokens: np.ndarray) -> str:
    return tokenizers.Tokenizer.from_file(file).decode(tokens.tolist(), skip_special_tokens=False)


def test_documents_are_joined_and_cut_into_rows(file: str, tmp_path: Path) -> None:
    texts = [RHYME, "So high \N{SNOWMAN}\n", ""]
    end = tokens_of(file, END)
    whole = [token for text in texts for token in (*tokens_of(file, text), *end)]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    lines = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    for path in (str(tmp_path / "texts"), lines):
        arrays = data.text(path, tokenizer=file, context=8).arrays
        assert np.asarray(arrays["input_ids"]).ravel().tolist() == whole[: len(whole) // 8 * 8]
        assert np.asarray(arrays["target"]).ravel()[:-1].tolist() == whole[1 : len(whole) // 8 * 8]
        assert np.asarray(arrays["completion_mask"]).all() and np.asarray(arrays["attention_mask"]).all()
    with pytest.raises(graphopt.GraphoptError, match=f"expected 999 tokens or more, a row, found {len(whole)}: reduce"):
        data.text(lines, tokenizer=file, context=999)


def test_only_completions_count(file: str, tmp_path: Path) -> None:
    pairs = [("Twinkle, twinkle", " little star"), ("Up above", " the world so high \N{SNOWMAN}")]
    path = save_lines(tmp_path / "pairs.jsonl", [{"prompt": p, "completion": c} for p, c in pairs])
    for completion_only in (False, True):
        found = data.text(path, tokenizer=file, context=64, completion_only=completion_only)
        arrays = {name: np.asarray(x) for name, x in found.arrays.items()}
        for i, (prompt, completion) in enumerate(pairs):
            whole = [*tokens_of(file, prompt + completion), *tokens_of(file, END)]
            row, mask, labels = (arrays[name][i] for name in ("input_ids", "completion_mask", "labels"))
            assert row[: len(whole)].tolist() == whole
            assert decoded(file, row[mask]) == ("" if completion_only else prompt) + completion + END
            assert (labels[mask] == row[mask]).all() and (labels[~mask] == -100).all()
            assert (arrays["target"][i][:-1] == labels[1:]).all() and arrays["target"][i][-1] == -100
            assert arrays["attention_mask"][i].sum() == len(whole) == (arrays["segments"][i] == 0).sum()
            assert arrays["position_ids"][i][: len(whole)].tolist() == list(range(len(whole)))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
def test_only_answers_of_chats_count(template: str, tmp_path: Path) -> None:
    file = str(save_tokenizer(tmp_path, template))
    path = save_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    found = data.text(path, tokenizer=file, context=128, completion_only=True)
    rest = "" if template == MARKED else "\n"
    for chat, row, mask in zip(
        CHATS, *(np.asarray(found.arrays[x]) for x in ("input_ids", "completion_mask")), strict=True
    ):
        answers = [x["content"] + "<|im_end|>" + rest for x in chat if x["role"] == "assistant"]
        assert decoded(file, row[mask]) == "".join(answers)
    whole = decoded(file, np.asarray(found.arrays["input_ids"])[0])
    assert whole.startswith("<|im_start|>user\nWhat star?<|im_end|>\n<|im_start|>assistant\nA little one.<|im_end|>\n")


def test_a_chat_may_be_a_prompt_and_its_completion(file: str, tmp_path: Path) -> None:
    path = save_lines(tmp_path / "a.jsonl", [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS])
    found = data.text(path, tokenizer=file, context=128, completion_only=True)
    for chat, row, mask in zip(
        CHATS, *(np.asarray(found.arrays[x]) for x in ("input_ids", "completion_mask")), strict=True
    ):
        assert decoded(file, row[mask]) == chat[-1]["content"] + "<|im_end|>\n"


def test_a_template_of_one_s_own(file: str, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for x in messages %}[{{ x.role }}] {{ x.content }}\n{% endfor %}")
    path = save_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    arrays = data.text(path, tokenizer=file, context=128, chat_template=str(own)).arrays
    row = np.asarray(arrays["input_ids"])[0]
    assert decoded(file, row) == "[user] What star?\n[assistant] A little one.\n"
    own.write_text("{{ messages | map(attribute='content') | reverse | join }}")
    with pytest.raises(graphopt.GraphoptError, match=r"line 1: expected a template that renders .* mark answers"):
        data.text(path, tokenizer=file, context=128, chat_template=str(own), completion_only=True)


def test_packed_rows_hold_every_text_once(file: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abc def"), random.integers(1, 60))) for _ in range(50)]
    path = save_lines(tmp_path / "a.jsonl", [{"prompt": text[:1], "completion": text[1:]} for text in texts])
    with pytest.warns(UserWarning, match="of 50 examples have more than 32 tokens"):
        found = {k: np.asarray(x) for k, x in data.text(path, tokenizer=file, context=32, packed=True).arrays.items()}
    expected = sorted([*tokens_of(file, text), *tokens_of(file, END)][:32] for text in texts)
    packed = []
    for tokens, segments, places, targets in zip(
        *(found[name] for name in ("input_ids", "segments", "position_ids", "target")), strict=True
    ):
        assert (np.diff(segments[segments >= 0]) >= 0).all()
        for segment in range(segments.max() + 1):
            inside = segments == segment
            packed.append(tokens[inside].tolist())
            assert places[inside].tolist() == list(range(inside.sum()))
            assert targets[inside].tolist() == [*packed[-1][1:], -100]
    assert sorted(packed) == expected
    full = sum(map(len, expected)) / 32
    assert len(found["segments"]) <= 1.1 * full + 1
    documents = save_lines(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    whole = data.text(documents, tokenizer=file, context=32, packed=True).arrays
    assert np.count_nonzero(np.asarray(whole["segments"]) >= 0) == sum(len(tokens_of(file, text)) + 1 for text in texts)


def test_what_is_cut_off_is_told(file: str, tmp_path: Path) -> None:
    long = {"prompt": RHYME, "completion": " yes"}
    path = save_lines(tmp_path / "a.jsonl", [{"prompt": "Up", "completion": " above"}, long])
    total = len(tokens_of(file, RHYME + " yes")) + 1
    with pytest.warns(UserWarning, match="tokens are cut off|no token to learn") as found:
        rows = data.text(path, tokenizer=file, context=20, completion_only=True)
    texts = [str(warning.message) for warning in found]
    assert (
        f"1 of 2 examples have more than 20 tokens: {total - 20} of " in texts[0] and "raise data.context" in texts[0]
    )
    assert "1 of 2 examples have no token to learn and are left out" in texts[1]
    assert len(rows) == 1
    with (
        pytest.warns(UserWarning, match="have no token to learn"),
        pytest.raises(graphopt.GraphoptError, match="expected examples with tokens to learn, found none"),
    ):
        data.text(save_lines(tmp_path / "b.jsonl", [long]), tokenizer=file, context=20, completion_only=True)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("text_mistakes"))
def test_wrong_lines_are_named(call: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def read(content: str) -> data.Dataset:
        Path("a.jsonl").write_text(content)
        return data.text("a.jsonl", tokenizer=file, context=4)

    messages.refused("text_mistakes", call, {"read": read})


def test_a_mark_of_the_byte_order_is_no_text(file: str, tmp_path: Path) -> None:
    line = b'{"text": "a b a b"}'
    (tmp_path / "a.jsonl").write_bytes(line)
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + line)
    one, other = (data.text(str(tmp_path / name), tokenizer=file, context=2) for name in ("a.jsonl", "b.jsonl"))
    assert np.array_equal(one.arrays["input_ids"], other.arrays["input_ids"])


def test_a_line_that_is_no_text_is_an_error(file: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(graphopt.GraphoptError, match=r"a\.jsonl: expected JSON lines in UTF-8"):
        data.text(str(tmp_path / "a.jsonl"), tokenizer=file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(graphopt.GraphoptError, match=r"expected files that end in \.txt"):
        data.text(str(tmp_path / "empty"), tokenizer=file)
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(graphopt.GraphoptError, match="expected JSON lines of prompts and completions, or of chats"):
        data.text(str(tmp_path / "a.txt"), tokenizer=file, completion_only=True)
    for options in ({"completion_only": True}, {"packed": True}):
        with pytest.raises(graphopt.GraphoptError, match="expected a tokenizer"):
            data.text(str(tmp_path / "a.txt"), **options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system messages') }}",
            "line 1: expected a chat that .* renders: no system messages",
        ),
        ("{% for x in %}", "line 1: expected a chat that .* renders: .*line 1"),
        ("{{ messages.__class__.__mro__ }}", "unsafe|has no attribute|undefined"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe|undefined"),
        ("{% set ns = namespace(__class__=1) %}", "starts with _"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_templates_reach_nothing(template: str, message: str, tmp_path: Path) -> None:
    file = str(save_tokenizer(tmp_path, template))
    path = save_lines(tmp_path / "a.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(graphopt.GraphoptError, match=message):
        data.text(path, tokenizer=file)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limits of memory")
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 11 }}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ '%099999999999d' % 1 }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ],
    ids=["loop", "memory", "doubling", "format", "recursion"],
)
def test_templates_have_limits(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "_SECONDS", 1)
    monkeypatch.setattr(chats, "_MEGABYTES", 256)
    file = str(save_tokenizer(tmp_path, template))
    path = save_lines(tmp_path / "a.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(graphopt.GraphoptError, match=r"needs more|more memory|recursion|too many|digits|too big|long"):
        data.text(path, tokenizer=file)


@pytest.mark.parametrize("content", ["", "{}", "[]", "\xff", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_wrong_tokenizers_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(graphopt.GraphoptError, match=r"tokenizer\.json: expected a tokenizer"):
        data.Tokenizer(tmp_path)
    with pytest.raises(graphopt.GraphoptError, match="no such file"):
        data.Tokenizer(tmp_path / "missing.json")
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(
        graphopt.GraphoptError, match=r"tokenizer_config\.json: expected an object in JSON, found a list"
    ):
        data.Tokenizer(tmp_path)


def test_padding_and_truncation_of_a_tokenizer_are_left_out(file: str, tmp_path: Path) -> None:
    other = tokenizers.Tokenizer.from_file(file)
    other.enable_truncation(4)
    other.enable_padding(length=64)
    other.save(str(tmp_path / "tokenizer.json"))
    assert data.Tokenizer(tmp_path).encode(RHYME) == tokens_of(file, RHYME)


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None, eos_token={"content": END, "special": True})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    found = data.Tokenizer(tmp_path)
    assert (found.end, found.ends, found.template) == (0, {0, 1, 2}, None)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"eos_token_id": 2}}))
    found = data.Tokenizer(tmp_path)
    assert (found.end, found.ends, found.special) == (2, {2}, {})
    path = save_lines(tmp_path / "a.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(graphopt.GraphoptError, match=r"expected a template of chats, chat_template\.jinja beside it"):
        data.text(path, tokenizer=str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert data.Tokenizer(tmp_path).template == "{{ messages[0].content }}"


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named(package: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = save_lines(tmp_path / "a.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(
        graphopt.GraphoptError, match=rf"the package {package}, found none: pip install 'graphopt\[text\]'"
    ):
        data.text(path, tokenizer=file)


def trained(found: data.Dataset, **options: Any) -> list[dict[str, Any]]:
    model = graphopt.models.transformer((found.arrays["input_ids"].shape[1],), found.classes, width=16, layers=1)
    loss = passes.CausalLanguageModel(**options)
    executor = graphopt.Executor(graphopt.compile(model, loss=loss, optimizer=passes.AdamW(1e-2)))
    return graphopt.fit(executor, found, epochs=2, batch_size=4, metrics=["perplexity"])


def test_a_loss_that_counts_padding_is_told(file: str, tmp_path: Path) -> None:
    pairs = [{"prompt": "Up", "completion": " above" * i} for i in range(1, 11)]
    found = data.text(save_lines(tmp_path / "a.jsonl", pairs), tokenizer=file)
    with pytest.warns(
        UserWarning, match="the loss counts padding, because the graph has no input 'labels': set labels"
    ):
        trained(found)
    records = trained(found, labels=True)
    rows = np.count_nonzero(np.asarray(found.arrays["segments"]) >= 0) / len(found)
    assert records[-1]["tokens_per_second"] == pytest.approx(rows * records[-1]["samples_per_second"])
    assert "tokens_per_second" not in repr(records) and records[-1]["perplexity"] < found.classes


def test_rows_of_a_fixed_length(file: str, tmp_path: Path) -> None:
    path = save_lines(tmp_path / "a.jsonl", [{"prompt": "Up", "completion": " above"}] * 4)
    model = graphopt.models.transformer((16,), 320, width=16, layers=1)
    step = graphopt.compile(model, loss=passes.CausalLanguageModel(labels=True), optimizer=passes.SGD())
    with pytest.raises(graphopt.GraphoptError, match="set context=16 and pad_to=context of the data"):
        graphopt.fit(graphopt.Executor(step), data.text(path, tokenizer=file), epochs=1)
    rows = data.text(path, tokenizer=file, context=16, pad_to="context")
    assert graphopt.fit(graphopt.Executor(step), rows, epochs=1)[0]["loss"] > 0
    with pytest.raises(graphopt.GraphoptError, match=r"data\.pad_to: unknown length 'max_length'; known"):
        data.text(path, tokenizer=file, pad_to="max_length")
