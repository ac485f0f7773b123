"""Texts with classes are tokenized as transformers does, and classifiers of it train on them as in PyTorch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphopt
import passes
from graphopt import data

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

WORDS = [
    "the",
    "a",
    "film",
    "plot",
    "was",
    "is",
    "very",
    "not",
    "great",
    "good",
    "bad",
    "boring",
    "loved",
    "hated",
    "it",
    "i",
]
RNG = np.random.default_rng(0)
TEXTS = [" ".join(RNG.choice(WORDS, RNG.integers(1, 14))) for _ in range(24)]
ANSWERS = [" ".join(RNG.choice(WORDS, RNG.integers(1, 9))) for _ in range(24)]
LABELS = [("bad", "good", "so-so")[i] for i in RNG.integers(0, 3, 24)]
RATE, STEPS, ROWS = 1e-3, 5, 8


def tokenizer_of(kind: str, folder: Path) -> Any:
    """Train a tokenizer of BERT's or of RoBERTa's kind on the texts, and save it with its config."""
    names = ["<s>", "<pad>", "</s>", "<unk>"] if kind == "roberta" else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    if kind == "roberta":
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=names, show_progress=False)
        special = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), names, strict=True))
    else:
        made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
        made.normalizer = tokenizers.normalizers.BertNormalizer()
        made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=60, special_tokens=names, show_progress=False)
        special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), names, strict=True))
    made.train_from_iterator(TEXTS, trainer)
    processors = tokenizers.processors
    made.post_processor = (
        processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        if kind == "roberta"
        else processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    )
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    found.save_pretrained(folder)
    return found


def written(folder: Path) -> Path:
    file = folder / "reviews.csv"
    with open(file, "w", newline="") as rows:
        csv.writer(rows).writerows([("text", "answer", "label"), *zip(TEXTS, ANSWERS, LABELS, strict=True)])
    return file


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("pair", [None, "answer"])
@pytest.mark.parametrize("context", [128, 9])
@pytest.mark.filterwarnings("ignore:.*are cut off")
def test_tokens_are_those_of_transformers(kind: str, pair: str | None, context: int, tmp_path: Path) -> None:
    tokenizer, file = tokenizer_of(kind, tmp_path), written(tmp_path)
    found = data.labelled_text(str(file), pair=pair, tokenizer=str(tmp_path / "tokenizer.json"), context=context)
    texts = [TEXTS] if pair is None else [TEXTS, ANSWERS]
    expected = tokenizer(
        *texts,
        padding=True,
        truncation=True,
        max_length=context,
        return_token_type_ids=True,
        return_tensors="np",
    )
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        np.testing.assert_array_equal(np.asarray(found.arrays[name]), expected[name])
    assert [found.labels[i] for i in np.asarray(found.arrays["target"])] == LABELS  # type: ignore[index]


SMALL = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    **{"max_position_embeddings": 40, "num_labels": 3, "attn_implementation": "eager"},
}
OF_DISTILBERT = {
    **{"dim": 24, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 40},
    **{"num_labels": 3, "attn_implementation": "eager"},
}


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_classifiers_of_texts_train_as_in_pytorch(kind: str, tmp_path: Path) -> None:
    tokenizer, file = tokenizer_of(kind, tmp_path), written(tmp_path)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **(OF_DISTILBERT if kind == "distilbert" else SMALL),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    for x in model.parameters():  # equal vectors would be merged
        torch.nn.init.normal_(x, float(x.detach().mean()), 0.1)
    arrays = data.labelled_text(str(file), tokenizer=str(tmp_path)).arrays
    names = ["input_ids", "attention_mask"]
    rows = {name: torch.tensor(np.asarray(arrays[name]), dtype=torch.int64) for name in names}
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens", min=2, max=36)}
    torch.onnx.export(
        model,
        (),
        str(tmp_path / "model.onnx"),
        kwargs={name: x[:4] for name, x in rows.items()},
        dynamic_shapes={name: sizes for name in names},
        input_names=names,
        dynamo=True,
    )
    executor = graphopt.Executor(
        graphopt.compile(tmp_path / "model.onnx", loss=passes.CrossEntropy(), optimizer=passes.AdamW(RATE)),
        threads=1,
    )
    reviews = data.labelled_text(str(file), tokenizer=str(tmp_path))
    losses = graphopt.fit(executor, reviews, epochs=2, batch_size=ROWS, shuffle=False, validation=None)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    targets, expected = torch.tensor(np.asarray(arrays["target"])), []
    for _ in range(2):
        epoch = []
        for i in range(0, len(TEXTS), ROWS):
            inputs = {name: x[i : i + ROWS] for name, x in rows.items()}
            loss = torch.nn.functional.cross_entropy(model(**inputs).logits, targets[i : i + ROWS])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch.append(float(loss))
        expected.append(np.mean(epoch))
    np.testing.assert_allclose([record["loss"] for record in losses], expected, rtol=2e-6)
