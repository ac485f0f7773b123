"""Text beside the libraries that define it: templates, masks and continuations of transformers, TRL and genai."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from language import CHATML, CHATS, MARKED, RHYME, save_lines, save_tokenizer  # noqa: E402

import graphopt  # noqa: E402
from graphopt import data  # noqa: E402
from graphopt.generation.sampling import Sampling  # noqa: E402

SYSTEM = """{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|im_start|>system\\n\\n" + system + "\\nTools: " + (tools | tojson if tools else 'none') + "<|im_end|>" }}
{%- for message in messages %}
    {%- if loop.index0 is divisibleby 9 and loop.first and false %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' -}}
    {%- if message.tool_calls is defined %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
JINJA = """{% for m in messages %}{% set role = {'user': 'U', 'assistant': 'A', 'system': 'S'}[m.role] %}
{{ role }}: {{ m.content | replace('high', "low & <b>") | upper }}
{%- if not loop.last %}

{% endif %}{% endfor %}{{ "A:" if add_generation_prompt else eos_token }}"""


@pytest.mark.parametrize("template", [CHATML, MARKED, SYSTEM, JINJA], ids=["chatml", "marked", "system", "jinja"])
def test_chats_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    file = save_tokenizer(tmp_path, template, bos_token="<|im_start|>")
    tools = [{"type": "function", "function": {"name": "look", "description": "Look \N{SNOWMAN} up"}}]
    lines = [{"messages": chat, "tools": tools} for chat in CHATS]
    lines[0]["messages"] = [{**lines[0]["messages"][0], "tool_calls": None}, *lines[0]["messages"][1:]]
    rows = data.text(save_lines(tmp_path / "a.jsonl", lines), tokenizer=str(file), context=1024).arrays
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    writer = graphopt.TextGenerator(counting(reference), str(file))
    for i, chat in enumerate(CHATS):
        expected = reference.apply_chat_template(chat, tools=tools, return_dict=False)
        inside = np.asarray(rows["segments"])[i] == 0
        assert np.asarray(rows["input_ids"])[i][inside].tolist() == expected
        begun = reference.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        assert writer.encoded(chat[:-1]) == begun


def counting(tokenizer: Any) -> Any:
    """Return a model whose next token is the number after the last one."""
    import onnx

    size = len(tokenizer)
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (int64[B,S] x) => (float[B,S,{size}] y) {{ y = Gather(w, x) }}"""
    model = onnx.parser.parse_model(text)
    array = np.roll(np.eye(size, dtype=np.float32), 1, axis=1)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    return model


def test_marked_answers_are_those_of_transformers(tmp_path: Path) -> None:
    file = save_tokenizer(tmp_path, MARKED)
    path = save_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in CHATS])
    rows = data.text(path, tokenizer=str(file), context=256, completion_only=True).arrays
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for i, chat in enumerate(CHATS):
        expected = reference.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        inside = np.asarray(rows["segments"])[i] == 0
        assert np.asarray(rows["completion_mask"])[i][inside].astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("completion_only", [True, False])
def test_labels_are_those_of_trl(kind: str, completion_only: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    file = save_tokenizer(tmp_path, CHATML, pad_token="<|endoftext|>")
    pairs = [
        ("Twinkle, twinkle", " little star"),
        ("Up above the world", " so high \N{SNOWMAN}"),
        ("How I", " wonder"),
    ]
    lines: list[dict[str, Any]] = [{"prompt": p, "completion": c} for p, c in pairs]
    if kind == "chat":
        lines = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
    path = save_lines(tmp_path / "a.jsonl", lines)
    found = data.text(path, tokenizer=str(file), context=40, completion_only=completion_only).arrays
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    config = transformers.GPT2Config(vocab_size=len(reference), n_embd=8, n_layer=1, n_head=1, n_positions=64)
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "out"),
        max_length=40,
        completion_only_loss=completion_only,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    trainer = trl.SFTTrainer(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=datasets.Dataset.from_list(lines),
        processing_class=reference,
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    width = batch["input_ids"].shape[1]
    inside = batch["attention_mask"].numpy().astype(bool)
    mine = {name: np.asarray(found[name]) for name in ("input_ids", "labels", "attention_mask")}
    assert mine["input_ids"].shape[1] == width and (mine["attention_mask"] == inside).all()
    assert (mine["input_ids"][inside] == batch["input_ids"].numpy()[inside]).all()
    assert (mine["labels"] == batch["labels"].numpy()).all()


def test_probabilities_are_those_of_transformers_warpers() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        logits = random.normal(0, random.uniform(0.5, 5), 50)
        temperature, top_k, top_p = (
            random.uniform(0.1, 2),
            int(random.integers(1, 60)),
            random.uniform(0.05, 1),
        )
        scores = torch.tensor(logits)[None]
        for warper in (
            transformers.TemperatureLogitsWarper(temperature),
            transformers.TopKLogitsWarper(min(top_k, 50)),
            transformers.TopPLogitsWarper(top_p),
        ):
            scores = warper(None, scores)
        expected = scores.softmax(-1)[0].numpy()
        found = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(logits)
        assert np.allclose(found, expected, atol=1e-12)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a tiny Llama, and its file by onnxruntime-genai's builder."""
    pytest.importorskip("onnxruntime_genai")
    folder = tmp_path_factory.mktemp("llama")
    save_tokenizer(folder, CHATML)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=0,
            bos_token_id=0,
            initializer_range=0.3,
        )
    ).eval()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}  # tests have `builders`, too
    command = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        str(folder),
        "-o",
        str(folder / "onnx"),
    ]
    command += ["-p", "fp32", "-e", "cpu", "-c", str(folder / "cache")]
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=folder)
    return model, folder / "onnx"


def test_greedy_tokens_are_those_of_transformers_and_genai(built: tuple[Any, Path]) -> None:
    import onnxruntime_genai as genai

    model, folder = built
    writer = graphopt.TextGenerator(folder / "model.onnx")
    for text in ("Twinkle, twinkle", "Up above \N{SNOWMAN}"):
        start = writer.encoded(text)
        whole = model.generate(torch.tensor([start]), do_sample=False, max_new_tokens=40, pad_token_id=0)[0].tolist()
        expected = [token for token in whole[len(start) :] if token != 0]
        assert len(set(expected)) > 5
        assert list(writer.tokens(start, max_tokens=40)) == expected
        parameters = genai.GeneratorParams(loaded := genai.Model(str(folder)))
        parameters.set_search_options(max_length=len(start) + 40, do_sample=False)
        generator = genai.Generator(loaded, parameters)
        generator.append_tokens(np.array(start, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        assert [token for token in generator.get_sequence(0)[len(start) :].tolist() if token != 0] == expected


def test_a_trained_file_continues_as_its_weights_do_in_transformers(built: tuple[Any, Path], tmp_path: Path) -> None:
    import passes

    _, folder = built
    path = save_lines(tmp_path / "a.jsonl", [{"prompt": "Twinkle,", "completion": RHYME[8:40]}] * 16)
    rows = data.text(path, tokenizer=str(folder), context=64, completion_only=True)
    loss = passes.CausalLanguageModel(labels=True)
    step = graphopt.compile(folder / "model.onnx", loss=loss, optimizer=passes.AdamW(3e-3))
    executor = graphopt.Executor(step)
    before = graphopt.generate(executor, "Twinkle,", tokenizer=folder, max_tokens=20)
    assert before == graphopt.generate(folder / "model.onnx", "Twinkle,", max_tokens=20)
    records = graphopt.fit(executor, rows, epochs=12, batch_size=8, validation=None)
    assert records[-1]["loss"] < 0.1
    assert graphopt.generate(executor, "Twinkle,", tokenizer=folder) == RHYME[8:40]
    assert json.loads((folder / "genai_config.json").read_text())["model"]["eos_token_id"] == 0


def test_packed_rows_have_the_loss_of_separate_rows(built: tuple[Any, Path], tmp_path: Path) -> None:
    import passes

    _, folder = built
    pairs = [{"prompt": RHYME[:i], "completion": RHYME[i : 3 * i]} for i in range(3, 30, 2)]
    path = save_lines(tmp_path / "a.jsonl", pairs)
    options: dict[str, Any] = {"tokenizer": str(folder), "context": 96, "completion_only": True}
    losses = []
    for packed in (False, True):
        rows = data.text(path, packed=packed, **options)
        loss = passes.CausalLanguageModel(completion_only=True, packed=packed)
        executor = graphopt.Executor(graphopt.compile(folder / "model.onnx", loss=loss, optimizer=passes.SGD()))
        losses.append(graphopt.evaluate(executor, rows, batch_size=100)["loss"])
    assert len(rows) < len(pairs) / 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
