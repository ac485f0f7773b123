"""Each architecture of onnxruntime-genai's builder trains with adapters, goes to PEFT and back, or is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_decoders import IDS, OTHERS, built, greedy, network, og, torch, transformers, with_model  # noqa: F401

import graphopt
import passes
from graphopt.adapters.naming import Naming

peft = pytest.importorskip("peft")

# The model of each architecture of the builder's list, or why there is none.
REMOTE = "its code is not in transformers"
BESIDE = "the text of a model of images or sound, of which only the names are tried"
ARCHITECTURES = {
    **{"ChatGLMForConditionalGeneration": REMOTE, "ChatGLMModel": REMOTE, "InternLM2ForCausalLM": REMOTE},
    **{"Phi3SmallForCausalLM": REMOTE, "Phi3VForCausalLM": REMOTE, "Phi4MMForCausalLM": REMOTE},
    **{"VideoChatFlashQwenForCausalLM": REMOTE, "PhiMoEForCausalLM": "its experts need CUDA"},
    **{"Gemma3ForConditionalGeneration": BESIDE, "Gemma4ForConditionalGeneration": BESIDE},
    **{"Gemma4UnifiedForConditionalGeneration": BESIDE, "Lfm2VlForConditionalGeneration": BESIDE},
    **{"Lfm2AudioForConditionalGeneration": BESIDE, "Mistral3ForConditionalGeneration": BESIDE},
    **{"Qwen2_5_VLForConditionalGeneration": BESIDE, "Qwen3VLForConditionalGeneration": BESIDE},
    **{"Qwen3_5ForConditionalGeneration": BESIDE, "Qwen3_5MoeForConditionalGeneration": BESIDE},
    "WhisperForConditionalGeneration": "no model of text",
    "Ernie4_5ForCausalLM": "ernie",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite hybrid",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2 moe",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "NemotronForCausalLM": "nemotron",
    "OlmoForCausalLM": "olmo",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
# Where the builder's file computes something else than PyTorch: it takes OLMo's norms for those of Llama.
APART = {"olmo"}


def tuned(path: Path, adapter: Any, steps: int = 4) -> graphopt.Executor:
    step = graphopt.compile(path, adapter=adapter, loss=passes.CausalLanguageModel(), optimizer=passes.AdamW(0.02))
    executor = graphopt.Executor(step, threads=1)
    for _ in range(steps):
        executor.step(feeds(executor))
    return executor


def feeds(executor: graphopt.Executor) -> dict[str, np.ndarray]:
    positions = np.broadcast_to(np.arange(IDS.shape[1]), IDS.shape)
    return {"input_ids": IDS, **({"position_ids": positions} if "position_ids" in executor.inputs else {})}


def logits(executor: graphopt.Executor) -> np.ndarray:
    return np.asarray(executor.predict(feeds(executor))["logits"])


def by_peft(model: Any, folder: Path) -> np.ndarray:
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()(torch.tensor(IDS)).logits.numpy()


def test_the_builder_s_list_is_known() -> None:
    text = (Path(og.__file__).parent / "models" / "builder.py").read_text()
    assert {*re.findall(r'architectures\[0\] == "(\w+)"', text)} == {*ARCHITECTURES}


LORA = passes.LoRA(rank=3, alpha=6)
ROWS: list[tuple[str, tuple[str, ...], Any]] = [
    ("phi3", (), LORA),
    ("phi3", (), passes.LoRA("*qkv_proj*", rank=3, parts={"q": 64, "k": 32, "v": 32})),
    ("phi", (), LORA),
    ("phi3", ("fuse_qkv=false",), passes.LoRA(rank=3, dora=True)),
    ("phi3", (), passes.LoRA("*gate_proj*", rank=3, scaling="rank_stabilized")),
    ("llama", ("fuse_mlp_gate_up=true",), LORA),
    *((name, (), LORA) for name in ("llama", "gemma2", "gemma3", "mistral", "qwen3", "gpt-oss", "lfm2", *OTHERS)),
]


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "more", "adapter"), ROWS, ids=[f"{r[0]}-{i}" for i, r in enumerate(ROWS)])
def test_peft_and_genai_compute_what_the_executor_does(
    name: str,
    more: tuple[str, ...],
    adapter: Any,
    built: Callable[..., tuple[Path, Any]],  # noqa: F811
    tmp_path: Path,
) -> None:
    folder, model = built(name, "fp32", *more)
    path = folder / "model.onnx"
    executor = tuned(path, adapter)
    found = logits(executor)
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    with torch.no_grad():
        assert abs(model(torch.tensor(IDS)).logits.numpy() - found).max() > 0.01
    if name not in APART:
        np.testing.assert_allclose(by_peft(model, tmp_path / "a"), found, atol=2e-5, rtol=1e-4)
    again = tuned(path, passes.LoRA.load(tmp_path / "a"), steps=0)
    np.testing.assert_allclose(logits(again), found, atol=1e-5)
    merged = with_model(folder, executor.trained(into=path), tmp_path / "merged")
    slots = with_model(folder, executor.trained(into=path, adapters="slots"), tmp_path / "slots")
    graphopt.save_adapter(executor, tmp_path / "a.onnx_adapter")
    expected = greedy(merged)
    assert greedy(slots, tmp_path / "a.onnx_adapter") == expected
    assert greedy(slots) == greedy(folder)


FULL = [name for name in OTHERS if name not in APART]


@pytest.mark.slow
@pytest.mark.parametrize("name", [FULL[0], *(pytest.param(x, marks=pytest.mark.exhaustive) for x in FULL[1:])])
def test_full_training_is_that_of_pytorch(
    name: str,
    built: Callable[..., tuple[Path, Any]],  # noqa: F811
) -> None:
    folder, model = built(name)
    model, rate = copy.deepcopy(model), 1e-3
    step = graphopt.compile(
        folder / "model.onnx",
        parameters=passes.Parameters(freeze="*experts*.bias" if "moe" in name else None),  # the module has none
        loss=passes.CausalLanguageModel(),
        optimizer=passes.AdamW(rate, weight_decay=0.0),
    )
    executor = graphopt.Executor(step, threads=1)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    losses = []
    for _ in range(8):
        loss = model(torch.tensor(IDS), labels=torch.tensor(IDS)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((executor.step(feeds(executor))["loss"], loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), atol=1e-5)
    assert losses[-1][0] < losses[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [None, {"q": 64, "k": 32, "v": 32}], ids=["whole", "parts"])
def test_packed_4_bits_go_to_peft_and_back(
    parts: Any,
    built: Callable[..., tuple[Path, Any]],  # noqa: F811
    tmp_path: Path,
) -> None:
    folder, model = built("granite", "int4", "accuracy_level=0")
    path = folder / "model.onnx"
    pattern = "*qkv_proj*" if parts else None
    plain = tuned(path, passes.LoRA(pattern, rank=3), steps=0)
    executor = tuned(path, passes.LoRA(pattern, rank=3, parts=parts))
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    found = logits(executor)
    again = tuned(path, passes.LoRA.load(tmp_path / "a"), steps=0)
    np.testing.assert_allclose(logits(again), found, atol=1e-5)
    graphopt.save_adapter(executor, tmp_path / "a.onnx_adapter")
    beside = with_model(folder, executor.trained(into=path), tmp_path / "beside")
    slots = with_model(folder, executor.trained(into=path, adapters="slots"), tmp_path / "slots")
    assert greedy(slots, tmp_path / "a.onnx_adapter") == greedy(beside)
    change = by_peft(model, tmp_path / "a") - model(torch.tensor(IDS)).logits.detach().numpy()
    own = found - logits(plain)  # of the base in 4 bits
    assert np.corrcoef(change.ravel(), own.ravel())[0, 1] > 0.95 and abs(own).max() > 0.1


LAYER = [f"attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
OF_IMAGES = {
    "gemma3_vl_text": ("Gemma3", {"text_config": {**TEXT, "head_dim": 8}}),
    "mistral3_text": ("Mistral3", {"text_config": {"model_type": "mistral", **TEXT}}),
    "qwen2_5_vl_text": ("Qwen2_5_VL", {"text_config": TEXT}),
    "qwen3_vl_text": ("Qwen3VL", {"text_config": {**TEXT, "head_dim": 8}}),
    "lfm2_vl_text": (
        "Lfm2Vl",
        {"text_config": {"model_type": "lfm2", **TEXT, "layer_types": ["full_attention"]}},
    ),
}


@pytest.mark.parametrize("kind", OF_IMAGES)
def test_names_of_modules_beside_images_are_those_of_transformers(kind: str) -> None:
    name, options = OF_IMAGES[kind]
    config = getattr(transformers, f"{name}Config")(**options)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    known = {path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    naming = Naming(kind=kind, is_builders=True)
    weights = [f"model.layers.0.{x}.MatMul.weight_Q4" for x in LAYER] + ["lm_head.MatMul.weight"]
    paths = {naming.holder(path)[0] for weight in weights for path, _ in naming.modules_of(weight)}
    assert len(paths) == len(weights) and paths <= known


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", pytest.param("nemotron", marks=pytest.mark.exhaustive)])
def test_norms_of_one_more_do_not_decay_as_in_trainer(
    name: str,
    built: Callable[..., tuple[Path, Any]],  # noqa: F811
) -> None:
    folder, model = built(name)
    decayed = {*transformers.Trainer.get_decay_parameter_names(None, model)}
    left = {x for x, _ in model.named_parameters()} - decayed
    ends = []
    for decay in (0.0, 5.0):
        step = graphopt.compile(
            folder / "model.onnx",
            loss=passes.CausalLanguageModel(),
            optimizer=passes.AdamW(0.01, weight_decay=decay),
        )
        executor = graphopt.Executor(step, threads=1)
        executor.step(feeds(executor))
        ends.append({x: np.array(value) for x, value in executor.parameters.items()})
    same = {x for x, value in ends[0].items() if np.array_equal(value, ends[1][x])}
    norms = {x for x in ends[0] if x.endswith("layernorm.weight")}
    assert same == norms and len(norms) == sum(x.endswith("norm.weight") for x in left) > 0
