"""Losses of embeddings and preferences equal sentence-transformers' and TRL's, over several steps."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

from builders import mlp, run  # noqa: E402
from language import save_lines  # noqa: E402

import graphopt  # noqa: E402
import passes  # noqa: E402

RNG = np.random.default_rng(0)
ROWS = {name: RNG.standard_normal((6, 4)) for name in ("", "positive", "negative", "negative_2", "other")}
SCORES = RNG.uniform(0, 1, 6)

Metric = losses.TripletDistanceMetric
OF_EMBEDDINGS: dict[str, tuple[passes.Loss, Any, tuple[str, ...]]] = {
    "ranking": (passes.InfoNCE(), losses.MultipleNegativesRankingLoss(None), ("", "positive")),
    "ranking of negatives": (
        passes.InfoNCE(0.1, negatives=1),
        losses.MultipleNegativesRankingLoss(None, scale=10.0),
        ("", "positive", "negative"),
    ),
    "symmetric ranking": (
        passes.InfoNCE(symmetric=True),
        losses.MultipleNegativesRankingLoss(
            None, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
        ("", "positive"),
    ),
    "triplet": (passes.Triplet(5.0), losses.TripletLoss(None), ("", "positive", "negative")),
    "triplet of cosines": (
        passes.Triplet(0.5, "cosine"),
        losses.TripletLoss(None, Metric.COSINE, 0.5),
        ("", "positive", "negative"),
    ),
    "similarity": (passes.CosineSimilarity(), losses.CosineSimilarityLoss(None), ("", "other")),
}


@pytest.mark.parametrize("name", OF_EMBEDDINGS)
def test_losses_of_embeddings_are_sentence_transformerss(name: str) -> None:
    loss, twin, rows = OF_EMBEDDINGS[name]
    proto = mlp(dtype=np.float64)
    step = graphopt.compile(proto, loss=loss, optimizer=passes.SGD(0.1))
    w = {x.name: torch.tensor(onnx.numpy_helper.to_array(x).copy()) for x in proto.graph.initializer}
    w = {key: x.requires_grad_() for key, x in w.items()}
    feeds = {f"x_{row}" if row else "x": ROWS[row] for row in rows}
    if name == "similarity":
        feeds["target"] = SCORES
    optimizer = torch.optim.SGD(w.values(), 0.1)
    for outputs in run(step, 10, feeds):
        hidden = [torch.tanh(torch.tensor(ROWS[row]) @ w["fc0.weight"].T + w["fc0.bias"]) for row in rows]
        embeddings = [h @ w["fc1.weight"].T + w["fc1.bias"] for h in hidden]
        expected = twin.double().compute_loss_from_embeddings(embeddings, torch.tensor(SCORES))
        assert outputs["loss"] == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for key, x in w.items():
        np.testing.assert_allclose(outputs[f"{key}.next"], x.detach().numpy(), rtol=1e-5, atol=1e-7)


WORDS = {**{f"w{i}": i for i in range(30)}, "[PAD]": 30, "[EOS]": 31, "[UNK]": 32}
EXAMPLES = [
    {"prompt": "w1 w2 w3 ", "chosen": "w4 w5", "rejected": "w6 w7 w8"},
    {"prompt": "w9 w2 ", "chosen": "w4 w5 w11", "rejected": "w6"},
    {"prompt": "w20 ", "chosen": "w21 w22 w23", "rejected": "w6 w2"},
]


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.fixture(scope="module")
def decoder() -> Any:
    torch.manual_seed(0)
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 33, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, **without, bos_token_id=31, eos_token_id=31)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.5, "loss_type": "hinge"},
        {"beta": 0.3, "loss_type": "ipo"},
        {"loss_type": "robust", "label_smoothing": 0.2},
    ],
    ids=lambda options: options.get("loss_type", "sigmoid"),
)
def test_dpo_is_trls(decoder: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model = copy.deepcopy(decoder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    arguments: dict[str, Any] = {"use_cpu": True, "report_to": [], "bf16": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=copy.deepcopy(model),
            args=trl.DPOConfig(
                output_dir=str(tmp_path), per_device_train_batch_size=3, **arguments, **options
            ),
            train_dataset=datasets.Dataset.from_list(EXAMPLES),
            processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
        )
        batch = next(iter(trainer.get_train_dataloader()))
        torch.onnx.export(
            Logits(model),
            (batch["input_ids"],),
            tmp_path / "model.onnx",
            dynamo=True,
            verbose=False,
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": {0: torch.export.Dim("rows", min=2, max=64)}},
        )
    feeds = {}
    for name in ("input_ids", "completion_mask"):
        feeds[name], feeds[f"{name}_rejected"] = (x.numpy() for x in batch[name].chunk(2))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    path = save_lines(tmp_path / "pairs.jsonl", EXAMPLES)
    rows = graphopt.data.text(path, tokenizer=str(tmp_path)).arrays
    for end in ("", "_rejected"):
        both = [
            (x[f"input_ids{end}"], np.asarray(x[f"completion_mask{end}"], np.int64)) for x in (rows, feeds)
        ]
        mine, theirs = ([tuple(t * m) for t, m in zip(*pair, strict=True)] for pair in both)
        assert sorted(mine) == sorted(theirs)
    step = graphopt.compile(tmp_path / "model.onnx", loss=passes.DPO(**options), optimizer=passes.SGD(0.1))
    executor, optimizer = graphopt.Executor(step), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = trainer.compute_loss(model, dict(batch))
        assert executor.step(feeds)["loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
