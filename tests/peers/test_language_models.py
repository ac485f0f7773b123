"""Losses of language models equal those of transformers, given `labels`, before and after a step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

import graphopt  # noqa: E402
import passes  # noqa: E402

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 41}
GROUPED: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
DECODERS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, **GROUPED, sliding_window=4, final_logit_softcapping=3.0
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=41,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 41, (3, 7))
LABELS = np.where(RNG.random(IDS.shape) < 0.3, -100, IDS)


class Logits(torch.nn.Module):
    """Return a model's logits alone, as exports for inference do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids=input_ids, use_cache=False).logits


def exported(model: Any, path: Path) -> Path:
    """Export a decoder without a cache, with any number of rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Logits(model),
            (torch.tensor(IDS),),
            path,
            dynamo=True,
            verbose=False,
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": {0: torch.export.Dim("rows", min=2, max=64)}},
        )
    return path


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("name", DECODERS)
def test_losses_are_those_of_transformers(name: str, blocks: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        DECODERS[name](), attn_implementation="eager" if name == "gemma2" else "sdpa"
    ).eval()
    path = exported(model, tmp_path / "model.onnx")
    loss = passes.CausalLanguageModel(labels=True, blocks=blocks)
    step = graphopt.compile(str(path), loss=loss, optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, native=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        optimizer.zero_grad()
        expected = model(input_ids=torch.tensor(IDS), labels=torch.tensor(LABELS)).loss
        expected.backward()
        optimizer.step()
        found = executor.step(input_ids=IDS, labels=LABELS)["loss"]
        assert found == pytest.approx(float(expected.detach()), abs=1e-5)
