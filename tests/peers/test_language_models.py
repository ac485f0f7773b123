"""Losses of language models equal those of transformers, given `labels`, before and after a step."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

import graphopt  # noqa: E402
import passes  # noqa: E402

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 41}
GROUPED: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
DECODERS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **GROUPED, sliding_window=4, final_logit_softcapping=3.0),
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
# The implementation that torch.export takes: products of the weights that each token reads.
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
MIXTURES: dict[str, Any] = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **GROUPED, **EXPERTS, num_local_experts=4),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **GROUPED, **EXPERTS, num_experts=4, moe_intermediate_size=12, norm_topk_prob=True
    ),
    "phimoe": lambda: transformers.PhimoeConfig(
        **SIZES, **EXPERTS, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
    ),
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 41, (3, 7))
LABELS = np.where(RNG.random(IDS.shape) < 0.3, -100, IDS)


class Logits(torch.nn.Module):
    """Return a model's logits alone, as exports for inference do."""

    def __init__(self, model: Any, *inputs: str) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs
        self.options = {} if model.config.model_type == "bert" else {"use_cache": False}

    def forward(self, *tensors: Any) -> Any:
        return self.model(**dict(zip(self.inputs, tensors, strict=True)), **self.options).logits


def unequal(model: Any) -> Any:
    """Change the weights, as exporters merge equal ones, such as those of new normalizations."""
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn(x.shape))
    return model


def exported(model: Any, path: Path, *inputs: str, dynamo: bool = True) -> Path:
    """Export a model without a cache, by either exporter."""
    inputs = inputs or ("input_ids",)
    rows = torch.export.Dim("rows", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Logits(model, *inputs),
            tuple(torch.tensor(IDS) for _ in inputs),
            path,
            dynamo=dynamo,
            verbose=False,
            input_names=list(inputs),
            output_names=["logits"],
            dynamic_shapes=(tuple({0: rows} for _ in inputs),) if dynamo else None,
        )
    return path


def executor_of(path: Path, loss: passes.Loss, rate: float) -> graphopt.Executor:
    step = graphopt.compile(str(path), loss=loss, optimizer=passes.SGD(rate))
    return graphopt.Executor(step, native=False)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function that returns a new model by its name, and its file, which takes seconds to export."""

    @functools.cache
    def made(name: str) -> tuple[Any, Path]:
        torch.manual_seed(0)
        attention = "eager" if name == "gemma2" else "sdpa"
        model = transformers.AutoModelForCausalLM.from_config(DECODERS[name](), attn_implementation=attention).eval()
        return model, exported(unequal(model), tmp_path_factory.mktemp("decoder") / "model.onnx")

    return lambda name: (copy.deepcopy(made(name)[0]), made(name)[1])


@pytest.mark.parametrize("name", DECODERS)
def test_losses_are_those_of_transformers(name: str, decoder: Any) -> None:
    model, path = decoder(name)
    losses = [passes.CausalLanguageModel(labels=True, blocks=blocks) for blocks in (None, 2)]
    executors = [executor_of(path, loss, 0.02) for loss in losses]
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for _ in range(10):
        optimizer.zero_grad()
        expected = model(input_ids=torch.tensor(IDS), labels=torch.tensor(LABELS)).loss
        expected.backward()
        optimizer.step()
        for executor in executors:
            found = executor.step(input_ids=IDS, labels=LABELS)["loss"]
            assert found == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("qwen3 moe", "phimoe"))]
)
def test_exported_experts_train_as_in_pytorch_and_so_do_their_adapters(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = unequal(transformers.AutoModelForCausalLM.from_config(MIXTURES[name]()).eval())
    path, own = exported(model, tmp_path / "model.onnx"), copy.deepcopy(model)
    steps = {"loss": passes.CausalLanguageModel(labels=True), "optimizer": passes.SGD(0.02)}
    executor = graphopt.Executor(graphopt.compile(path, **steps), native=False)
    optimizer = torch.optim.SGD(own.parameters(), 0.02)
    for _ in range(10):
        optimizer.zero_grad()
        expected = own(input_ids=torch.tensor(IDS), labels=torch.tensor(LABELS)).loss
        expected.backward()
        optimizer.step()
        assert executor.step(input_ids=IDS, labels=LABELS)["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = graphopt.compile(path, **steps, adapter=passes.LoRA(rank=2))
    executor = graphopt.Executor(step, native=False)
    weights = {x.rpartition(".lora_")[0].removesuffix(".weight") for x in executor.parameters}
    assert {x.rpartition(".")[2] for x in weights} == {f"{x}_proj" for x in ("q", "k", "v", "o", "gate_up", "down")}
    for _ in range(5):
        executor.step(input_ids=IDS, labels=LABELS)
    model.save_pretrained(tmp_path / "hf")
    names, base = {"model.*": "*"}, str(tmp_path / "hf")
    graphopt.save_adapter(executor, tmp_path / "a", form="peft", names=names, base_name=base)
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    with torch.no_grad():
        adapted = opened(torch.tensor(IDS)).logits
    np.testing.assert_allclose(executor.predict(input_ids=IDS)["logits"], adapted.numpy(), atol=1e-5)
    again = graphopt.compile(path, **steps, adapter=passes.LoRA.load(tmp_path / "a", names=names))
    np.testing.assert_allclose(
        graphopt.Executor(again, native=False).predict(input_ids=IDS)["logits"], adapted.numpy(), atol=1e-5
    )


@pytest.mark.parametrize("by_labels", [False, True])
def test_perplexity_is_that_of_transformers_on_the_same_rows(by_labels: bool, tmp_path: Path) -> None:
    """Of rows of unequal lengths, in other batches."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(DECODERS["llama"](), attn_implementation="sdpa")
    model = unequal(model.eval())
    mask = (np.arange(7) < np.array([[7], [3], [5]])).astype(np.int64)
    labels = np.where(mask > 0, LABELS if by_labels else IDS, -100)
    path = exported(model, tmp_path / "model.onnx", "input_ids", "attention_mask")
    executor = executor_of(path, passes.CausalLanguageModel(labels=by_labels), 0.02)
    data = {"input_ids": IDS, "attention_mask": mask, **({"labels": labels} if by_labels else {})}
    with torch.no_grad():
        feeds = {"input_ids": IDS, "attention_mask": mask, "labels": labels}
        expected = model(**{name: torch.tensor(x) for name, x in feeds.items()}).loss.exp()
    found = graphopt.evaluate(executor, data, batch_size=2)
    assert found["perplexity"] == pytest.approx(float(expected), rel=1e-5)


SEGMENTS = np.array([[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_packed_rows_train_as_their_sequences(name: str, decoder: Any) -> None:
    model, path = decoder(name)
    loss = passes.CausalLanguageModel(packed=True, blocks=2)
    executor = executor_of(path, loss, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        terms, count = [], 0
        for row, segments in zip(IDS, SEGMENTS, strict=True):
            for segment in {*segments.tolist()} - {-1}:
                ids = torch.tensor(row[segments == segment][None])
                terms.append(model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1))
                count += ids.shape[1] - 1
        expected = torch.stack(terms).sum() / count
        expected.backward()
        optimizer.step()
        found = executor.step(input_ids=IDS, segments=SEGMENTS)["loss"]
        assert found == pytest.approx(float(expected.detach()), abs=1e-5)


def test_a_masked_language_model_trains_by_cross_entropy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=41,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    model = transformers.BertForMaskedLM(config).eval()
    path = exported(model, tmp_path / "model.onnx")
    losses = [passes.CrossEntropy(axis=-1, ignore_index=-100, blocks=blocks) for blocks in (None, 2)]
    executors = [executor_of(path, loss, 0.1) for loss in losses]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    masked = np.where(LABELS == -100, IDS, 0)
    for _ in range(5):
        optimizer.zero_grad()
        expected = model(input_ids=torch.tensor(masked), labels=torch.tensor(LABELS)).loss
        expected.backward()
        optimizer.step()
        for executor in executors:
            found = executor.step(input_ids=masked, target=LABELS)["loss"]
            assert found == pytest.approx(float(expected.detach()), abs=1e-5)


@pytest.mark.parametrize("shifted", [False, True])
def test_an_encoder_decoder_trains_on_its_labels(shifted: bool, tmp_path: Path) -> None:
    """The user shifts the labels, or feeds the decoder one more token and lets the loss shift."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        vocab_size=41,
        dropout_rate=0,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    path = exported(unequal(model), tmp_path / "model.onnx", "input_ids", "decoder_input_ids", dynamo=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    labels = IDS[:, ::-1].copy() if not shifted else IDS[:, :-1]
    start = np.zeros((3, 1), np.int64)
    loss: Any = passes.CrossEntropy(axis=-1, ignore_index=-100)
    feeds = {"decoder_input_ids": np.concatenate([start, labels[:, :-1]], 1), "target": labels}
    if shifted:
        loss = passes.CausalLanguageModel(tokens="decoder_input_ids", blocks=2)
        feeds = {"decoder_input_ids": np.concatenate([start, labels], 1)}
    executor = executor_of(path, loss, 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        expected = model(input_ids=torch.tensor(IDS), labels=torch.tensor(labels)).loss
        expected.backward()
        optimizer.step()
        found = executor.step(input_ids=IDS, **feeds)["loss"]
        assert found == pytest.approx(float(expected.detach()), abs=1e-5)
