"""Continuations of texts: with caches and without, of rows of fixed length, of adapters, drawn as the options say."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from language import CHATML, END, RHYME, save_tokenizer
from onnx.parser import parse_model

import graphopt
import graphopt.models
import passes
from graphopt.cli import main
from graphopt.data import Characters
from graphopt.generation.sampling import Sampling

pytest.importorskip("tokenizers")
VERSION = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
TOKENS, WIDTH, HEADS, SHARED = 24, 64, 4, 2
HEAD = WIDTH // HEADS
CACHED = f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (int64[B,S] input_ids, int64[B,T] attention_mask, float[B,{SHARED},P,{HEAD}] past_key_values_0_key,
   float[B,{SHARED},P,{HEAD}] past_key_values_0_value) =>
  (float[B,S,{TOKENS}] logits, float[B,{SHARED},T,{HEAD}] present_0_key, float[B,{SHARED},T,{HEAD}] present_0_value)
  <int64[1] one = {{1}}, int64[1] last = {{-1}}, int64 axis = {{1}}> {{
  x = Gather(embedding, input_ids)
  q = MatMul(x, wq)
  k = MatMul(x, wk)
  v = MatMul(x, wv)
  count = ReduceSum(attention_mask, one)
  less = Sub(count, one)
  flat = Reshape(less, last)
  lengths = Cast<to=6>(flat)
  shape = Shape(attention_mask)
  width = Gather(shape, axis)
  total = Cast<to=6>(width)
  y, present_0_key, present_0_value = com.microsoft.GroupQueryAttention
    <num_heads={HEADS}, kv_num_heads={SHARED}, do_rotary=1>
    (q, k, v, past_key_values_0_key, past_key_values_0_value, lengths, total, cos, sin)
  z = Add(x, y)
  logits = MatMul(z, head)
}}"""


def weights() -> dict[str, np.ndarray]:
    random, frequencies = np.random.default_rng(0), 1 / 100 ** (np.arange(HEAD // 2) * 2 / HEAD)
    angles = np.arange(64)[:, None] * frequencies
    shapes = {"embedding": (TOKENS, WIDTH), "wq": (WIDTH, WIDTH), "head": (WIDTH, TOKENS)}
    shapes |= dict.fromkeys(("wk", "wv"), (WIDTH, SHARED * HEAD))
    drawn = {name: random.normal(0, 0.3, shape) for name, shape in shapes.items()}
    return {name: x.astype(np.float32) for name, x in {**drawn, "cos": np.cos(angles), "sin": np.sin(angles)}.items()}


def with_weights(text: str, **changes: np.ndarray) -> onnx.ModelProto:
    model = parse_model(text)
    for name, array in {**weights(), **changes}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def prefill(text: list[int], **changes: np.ndarray) -> np.ndarray:
    """Return the logits of the last token by NumPy: attention of heads that share keys, with rotation by halves."""
    w = {**weights(), **changes}
    x = w["embedding"][text]
    angles = np.tile(w["cos"][: len(text)], 2), np.tile(w["sin"][: len(text)], 2)

    def rotated(y: np.ndarray) -> np.ndarray:
        half = np.concatenate([-y[:, HEAD // 2 :], y[:, : HEAD // 2]], axis=1)
        return y * angles[0] + half * angles[1]

    heads = []
    for i in range(HEADS):
        own, other = slice(i * HEAD, (i + 1) * HEAD), slice(i // 2 * HEAD, (i // 2 + 1) * HEAD)
        scores = rotated((x @ w["wq"])[:, own]) @ rotated((x @ w["wk"])[:, other]).T / HEAD**0.5
        scores[np.triu_indices(len(text), 1)] = -np.inf
        rates = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(rates / rates.sum(axis=1, keepdims=True) @ (x @ w["wv"])[:, other])
    return (x + np.concatenate(heads, axis=1))[-1] @ w["head"]


def greedy(logits: Callable[[list[int]], np.ndarray], start: list[int], count: int) -> list[int]:
    text = list(start)
    for _ in range(count):
        text.append(int(logits(text).argmax()))
    return text[len(start) :]


def tokens_of(model: Any, start: list[int], count: int = 20, **options: Any) -> list[int]:
    writer = graphopt.TextGenerator(model, Characters(), **options)
    return list(writer.tokens(start, max_tokens=count))


def test_a_cache_gives_what_the_whole_text_gives() -> None:
    expected = greedy(prefill, [3, 1, 4], 20)
    assert len(set(expected)) > 3
    model = with_weights(CACHED)
    assert tokens_of(model, [3, 1, 4]) == expected
    fixed = with_weights(CACHED.replace("[B,S]", "[1,1]").replace("[B,", "[1,").replace(",S,", ",1,"))
    assert tokens_of(fixed, [3, 1, 4]) == expected
    undeclared = with_weights(CACHED.replace(f"P,{HEAD}]", "P,H]").replace(f"T,{HEAD}]", "T,H]"))
    with pytest.raises(graphopt.GraphoptError, match="expected a static size of each head"):
        tokens_of(undeclared, [3])  # nothing declares the shape of the query
    undeclared.graph.value_info.append(onnx.helper.make_tensor_value_info("q", 1, ["B", "S", WIDTH]))
    assert tokens_of(undeclared, [3, 1, 4]) == expected
    other = CACHED.replace("past_key_values_0_key", "k0").replace("past_key_values_0_value", "v0")
    renamed = with_weights(other.replace("present_0_key", "k0_next").replace("present_0_value", "v0_next"))
    assert tokens_of(renamed, [3, 1, 4]) == expected


@pytest.mark.skipif(VERSION < (1, 23), reason="older runtimes have no kernel of Attention-23")
def test_caches_of_onnx_s_own_attention() -> None:
    text = f"""<ir_version: 11, opset_import: ["" : 23]>
    g (int64[B,S] input_ids, float[B,{SHARED},P,{HEAD}] past_key, float[B,{SHARED},P,{HEAD}] past_value) =>
      (float[B,S,{TOKENS}] y, float[B,{SHARED},T,{HEAD}] present_key, float[B,{SHARED},T,{HEAD}] present_value)
      {{
      x = Gather(embedding, input_ids)
      q = MatMul(x, wq)
      k = MatMul(x, wk)
      v = MatMul(x, wv)
      a, present_key, present_value = Attention<q_num_heads={HEADS}, kv_num_heads={SHARED}, is_causal=1>
        (q, k, v, , past_key, past_value)
      z = Add(x, a)
      y = MatMul(z, head)
    }}"""
    still = {"cos": np.ones((64, HEAD // 2), np.float32), "sin": np.zeros((64, HEAD // 2), np.float32)}
    model = with_weights(text)
    for name in still:
        model.graph.initializer.remove(next(x for x in model.graph.initializer if x.name == name))
    assert tokens_of(model, [3, 1, 4], 8) == greedy(lambda x: prefill(x, **still), [3, 1, 4], 8)


def test_models_without_a_cache_and_executors() -> None:
    model = graphopt.models.transformer((8,), 100, width=16, layers=1, seed=3)
    (weight,) = (x for x in model.graph.initializers.values() if x.name == "head.weight")
    weight.const_value = graphopt.load(model).graph.initializers["head.weight"].const_value

    def logits(text: list[int]) -> np.ndarray:
        seen = text[-8:]
        row = np.array([seen + [99] * (8 - len(seen))])  # what follows does not matter
        return graphopt.run(model, {"x": row})["y"][0, len(seen) - 1]

    expected = greedy(logits, [5, 6], 15)
    assert tokens_of(model, [5, 6], 15) == expected
    loss, optimizer = passes.CrossEntropy(axis=-1), passes.SGD(0.1)
    executor = graphopt.Executor(graphopt.compile(model, loss=loss, optimizer=optimizer))
    assert tokens_of(executor, [5, 6], 15) == expected
    with pytest.raises(graphopt.GraphoptError, match="expected a model's file beside it, found an executor"):
        graphopt.generate(executor, "a", tokenizer="characters", adapter="a.onnx_adapter")
    assert graphopt.generate(model, "56", tokenizer="characters", max_tokens=15) == Characters().decode(expected)


@pytest.mark.skipif(VERSION < (1, 20), reason="older runtimes have no adapters")
def test_adapters_of_onnx_runtime(tmp_path: Path) -> None:
    text = CACHED.replace(
        "int64[B,T] attention_mask,", f"int64[B,T] attention_mask, float[{WIDTH},r] a, float[r,{TOKENS}] b,"
    )
    text = text.replace(
        "logits = MatMul(z, head)",
        "plain = MatMul(z, head)\n  m = MatMul(z, a)\n  n = MatMul(m, b)\n  logits = Add(plain, n)",
    )
    empty = {"a": np.zeros((WIDTH, 0), np.float32), "b": np.zeros((0, TOKENS), np.float32)}
    model = with_weights(text, **empty)
    graphopt.save(model, tmp_path / "slots.onnx")
    random = np.random.default_rng(1)
    drawn = {"a": random.normal(0, 0.3, (WIDTH, 2)), "b": random.normal(0, 0.3, (2, TOKENS))}
    drawn = {name: x.astype(np.float32) for name, x in drawn.items()}
    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(1)
    form.set_model_version(1)
    form.set_parameters({k: onnxruntime.OrtValue.ortvalue_from_numpy(x) for k, x in drawn.items()})
    form.export_adapter(str(tmp_path / "a.onnx_adapter"))
    head = weights()["head"] + drawn["a"] @ drawn["b"]
    expected = greedy(lambda x: prefill(x, head=head), [3, 1, 4], 20)
    path = str(tmp_path / "slots.onnx")
    assert tokens_of(path, [3, 1, 4]) == greedy(prefill, [3, 1, 4], 20) != expected
    assert tokens_of(path, [3, 1, 4], adapter=tmp_path / "a.onnx_adapter") == expected
    with pytest.raises(graphopt.GraphoptError, match="expected an adapter, a file such as"):
        tokens_of(path, [3], adapter=tmp_path / "b.onnx_adapter")


@pytest.mark.skipif(VERSION < (1, 20), reason="older runtimes have no adapters")
def test_adapters_that_graphopt_has_trained(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    graphopt.save(graphopt.models.transformer((8,), 100, width=16, layers=1), path)
    adapter, loss = passes.LoRA(rank=2), passes.CausalLanguageModel()
    executor = graphopt.Executor(graphopt.compile(path, adapter=adapter, loss=loss, optimizer=passes.AdamW(0.1)))
    for _ in range(5):
        executor.step(x=np.arange(16).reshape(2, 8))
    expected = tokens_of(executor, [1, 2])
    assert tokens_of(path, [1, 2]) != expected
    graphopt.save(executor.trained(into=path, adapters="slots"), tmp_path / "slots.onnx")
    graphopt.save_adapter(executor, tmp_path / "a.onnx_adapter")
    graphopt.save_adapter(executor, tmp_path / "peft", form="peft")
    assert tokens_of(tmp_path / "slots.onnx", [1, 2]) == tokens_of(path, [1, 2])
    for model, saved in (("slots", "a.onnx_adapter"), ("model", "a.onnx_adapter"), ("model", "peft")):
        assert tokens_of(tmp_path / f"{model}.onnx", [1, 2], adapter=tmp_path / saved) == expected


def test_the_end_of_a_text_ends_it(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, CHATML, size=300)
    size = graphopt.data.Tokenizer(tmp_path).size
    rows = np.zeros((size, size), np.float32)
    following = graphopt.data.Tokenizer(tmp_path).encode("So high" + END)
    for before, after in zip([1, *following], following, strict=False):
        rows[before, after] = 1
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (int64[B,S] input_ids) => (float[B,S,{size}] logits) {{ logits = Gather(rows, input_ids) }}"""
    model = parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rows, "rows"))
    graphopt.save(model, tmp_path / "model.onnx")
    assert graphopt.generate(tmp_path / "model.onnx", "<|im_start|>") == "So high"
    writer = graphopt.TextGenerator(str(tmp_path / "model.onnx"))
    assert list(writer.stream([1], max_tokens=2)) == [*writer.vocabulary.decode(following[:2])][:2]
    chat = writer.encoded([{"role": "user", "content": "What?"}])
    assert writer.vocabulary.encode("<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n") == chat
    assert writer.encoded(None) == [0]
    for prompt, message in (
        ([size], f"expected tokens from 0 to {size - 1}, found {size}"),
        ([{"content": "a"}], "prompt: expected objects such as"),
        ([], None),
    ):
        if message is not None:
            with pytest.raises(graphopt.GraphoptError, match=message):
                writer.generate(prompt)
    with pytest.raises(graphopt.GraphoptError, match="the tokenizer has no token that starts one"):
        graphopt.generate(graphopt.models.transformer((8,), 100), tokenizer="characters")


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    logits = np.random.default_rng(0).normal(0, 2, 8)
    for options in ({}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 0.5, "top_k": 5, "top_p": 0.9}):
        chosen = Sampling(**{"temperature": 1.0, **options})
        rates, random = chosen.probabilities(logits), np.random.default_rng(1)
        counts = np.bincount([chosen.choose(logits, random) for _ in range(4_000)], minlength=8)
        assert (counts[rates == 0] == 0).all()
        assert np.abs(counts / 4_000 - rates).max() < 0.03
    assert Sampling(temperature=1.0, top_k=2).probabilities(np.array([1.0, 1.0, 1.0, 0.0])).tolist()[3] == 0
    assert Sampling().choose(logits, random) == logits.argmax()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, r"generate\(temperature=-1\): expected a number in \[0, inf\)"),
        ({"temperature": float("nan")}, "expected a number"),
        ({"top_p": 0}, r"expected a number in \(0, 1\]"),
        ({"top_k": 0}, r"expected a whole number in \[1, inf\)"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_token": 1}, "unknown argument 'max_token', nearest: 'max_tokens'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(graphopt.GraphoptError, match=message):
        graphopt.generate(graphopt.models.transformer((8,), 100), "a", tokenizer="characters", **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }",
            "expected an output that replaces it|an input of tokens",
        ),
        ("g (int64[N,S] a, int64[N,S] b) => (int64[N,S] y) { y = Add(a, b) }", "expected an input of tokens"),
        ("g (int64[N,S] a) => (int64[N,S] y) { y = Abs(a) }", "expected an output of logits"),
        (
            "g (int64[N,S] a) => (float[N] y) { b = Cast<to=1>(a)\n y = ReduceSum<keepdims=0>(b) }",
            "expected logits of shape",
        ),
    ],
)
def test_models_that_are_no_language_models(text: str, message: str) -> None:
    with pytest.raises(graphopt.GraphoptError, match=message):
        tokens_of(parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}'), [1])
    with pytest.raises(graphopt.GraphoptError, match=r"expected tokenizer\.json, found none"):
        graphopt.generate(graphopt.models.transformer((8,), 100), "a")


@pytest.mark.slow
def test_the_command_continues_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rhyme.txt").write_text(RHYME * 60)
    train = ["data=text", "data.path=rhyme.txt", "data.context=32", "model=transformer", "folder=run"]
    train += [
        "loss=cross_entropy",
        "loss.axis=-1",
        "optimizer.learning_rate=0.003",
        "fit.epochs=20",
        "fit.batch_size=8",
    ]
    assert main([*train, "fit.checkpoint=null", "quiet=true"]) == 0
    before = {path for path in Path(".").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["generate", "folder=run", "prompt=Up above", "generate.max_tokens=20"]) == 0
    out = capsys.readouterr().out
    assert "Up above the world so high" in out and "written   20 tokens in" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("Twinkle, twinkle"))
    assert main(["generate", "model=run/trained.onnx", "generate.tokenizer=characters", "prompt=-", "quiet=true"]) == 0
    assert "How I wonder what you are!" in capsys.readouterr().out
    assert before == {path for path in Path(".").rglob("*") if path.is_file()}
    for arguments, message in (
        (
            ["generate", "model=run/trained.onnx", "prompt=a"],
            "expected tokenizer.json beside run/trained.onnx",
        ),
        (["generate", "prompt=a"], "expected a trained model, found the built-in model mlp"),
        (
            ["generate", "folder=run", "prompt=a", "generate.top_p=2"],
            "generate(top_p=2): expected a number in (0, 1]",
        ),
        (["generate", "folder=run", "temperature=1"], "nearest: 'generate.temperature'"),
        (["generate", "folder=run", "generate.chat=true"], "expected text for a tokenizer of characters"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err


def test_prompts_need_no_quotes_of_hydra_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    graphopt.save(graphopt.models.transformer((8,), 100, width=8, layers=1), "model.onnx")
    for prompt in ("Hello, 'you' (there", 'a "b", c\\', "${x} [y", "x=1, y: {2"):
        command = ["generate", "model.onnx", "generate.tokenizer=characters", "generate.max_tokens=1"]
        assert main([*command, f"prompt={prompt}"]) == 0
        assert f"\n{prompt}" in capsys.readouterr().out
