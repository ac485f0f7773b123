"""The page of `examples/hosts/language` trains a decoder in 4 bits in Chromium; genai and PEFT open what it gives."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_decoders import built, dequantized, og, tokenizers, torch  # noqa: F401
from test_hosts_javascript import CHROMIUM, EXAMPLES, TESTS, javascript

import graphopt
import passes

peft = pytest.importorskip("peft")

LINES = ["the cat is called mew", "the key is behind the clock", "tea is at four"]
STEPS, RATE, WRITTEN = 60, 10**-2.7, 24  # of the page
BEGINNING, END = "the cat is", 2

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None
    or not (TESTS / "node_modules" / "@huggingface").exists()
    or not Path(CHROMIUM).exists(),
    reason="needs Node, Chromium and `npm install --prefix examples/hosts/javascript/test`",
)


@pytest.fixture(scope="module")
def decoder(built: Any, tmp_path_factory: Any) -> Any:  # noqa: F811
    """Return the folder of a decoder in 4 bits with a tokenizer of the lines, and PyTorch's model with its numbers."""
    source, model = built("llama", "int4", "accuracy_level=0", "block_size=16")
    folder = tmp_path_factory.mktemp("decoder") / "tiny"
    shutil.copytree(source, folder)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]  # 2 ends a text, as in SMALL
    made.train_from_iterator(LINES, tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=special))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder, dequantized(str(folder / "model.onnx"), model), made


@pytest.fixture(scope="module")
def site(decoder: Any, tmp_path_factory: Any) -> Path:
    spec = importlib.util.spec_from_file_location("export", EXAMPLES / "language" / "export.py")
    assert spec is not None and spec.loader is not None
    export = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(export)
    site: Path = tmp_path_factory.mktemp("page") / "site"
    export.main(decoder[0], site)
    return site


def trained(folder: Path, tokenizer: Any) -> tuple[graphopt.Executor, list[float]]:
    """Train in Python as the page does, and return the losses."""
    rows = [[*tokenizer.encode(line).ids, END] for line in LINES]
    width = max(map(len, rows))
    batch = {
        "input_ids": np.array([[*row, *[END] * (width - len(row))] for row in rows]),
        "labels": np.array([[*row, *[-100] * (width - len(row))] for row in rows]),
    }
    step = graphopt.compile(
        folder / "model.onnx",
        adapter=passes.LoRA(rank=8, alpha=16),
        loss=passes.CausalLanguageModel(labels=True),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(RATE, weight_decay=0.0),
    )
    executor = graphopt.Executor(step, threads=1, native=False)
    return executor, [float(executor.step(batch)["loss"]) for _ in range(STEPS)]


def continued(executor: graphopt.Executor, tokenizer: Any) -> str:
    """Return the likeliest continuation of the beginning of a line."""
    ids = tokenizer.encode(BEGINNING).ids
    for _ in range(WRITTEN):
        ids.append(int(executor.predict(input_ids=np.array([ids]))["logits"][0, -1].argmax()))
        if ids[-1] == END:
            break
    return str(tokenizer.decode(ids))


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["wasm", pytest.param("webgpu", marks=pytest.mark.exhaustive)])
def test_what_the_page_gives_computes_what_python_trains(
    provider: str, decoder: Any, site: Path, tmp_path: Path
) -> None:
    folder, model, tokenizer = decoder
    found = javascript("in_language_page.js", site, tmp_path, provider, "\n".join(LINES))
    assert found["errors"] == []
    assert found["refused"].startswith("lines: expected one or more, found none")
    executor, losses = trained(folder, tokenizer)
    assert found["steps"] == str(STEPS)
    np.testing.assert_allclose(float(found["loss"]), losses[-1], atol=2e-3)
    assert losses[-1] < losses[0] - 0.5
    assert found["now"] == found["again"] == continued(executor, tokenizer)
    assert found["before"] == found["reset"] != found["now"]
    assert found["downloads"] == ["adapter.onnx_adapter", "adapter_config.json", "adapter_model.safetensors"]

    ids = np.array([tokenizer.encode(LINES[1]).ids])
    expected = executor.predict(input_ids=ids)["logits"]
    base = model(torch.tensor(ids)).logits.detach().numpy()
    assert abs(expected - base).max() > 0.3
    with torch.no_grad():
        adapted = (
            peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()(torch.tensor(ids)).logits.numpy()
        )
    np.testing.assert_allclose(adapted, expected, atol=5e-3)
    served = og.Model(str(site.with_name("with_slots")))
    adapters, generator = og.Adapters(served), og.Generator(served, og.GeneratorParams(served))
    adapters.load(str(tmp_path / "adapter.onnx_adapter"), "own")
    generator.set_active_adapter(adapters, "own")
    generator.append_tokens(ids.astype(np.int32))
    last = np.asarray(generator.get_logits()).reshape(-1)
    np.testing.assert_allclose(last, expected[0, -1], atol=5e-3)
