"""`data.labelled_text` and `graphopt tune` of a model of texts: forms of files, what is proposed, and mistakes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tokenizers
import torch

import graphopt
from graphopt import cli, data
from graphopt.graph.classified import labels_in

GOOD, BAD = ("great", "lovely", "superb"), ("awful", "boring", "dull")
WORDS = ["[PAD]", "[UNK]", "the", "film", "was", *GOOD, *BAD]


class Mean(torch.nn.Module):
    """Score a text by the mean of its words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(len(WORDS), 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.classifier = torch.nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask[..., None].float()
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return self.classifier(torch.relu(self.hidden(mean)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with its tokenizer and its config, and 80 reviews as tables of several forms."""
    place = tmp_path_factory.mktemp("model")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    (place / "config.json").write_text(json.dumps({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}))
    torch.manual_seed(0)
    rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens", min=2)
    torch.onnx.export(
        Mean().eval(),
        (torch.tensor([[2, 3, 4, 5]] * 2), torch.ones(2, 4, dtype=torch.int64)),
        str(place / "model.onnx"),
        dynamic_shapes=({0: rows, 1: tokens},) * 2,
        input_names=["input_ids", "attention_mask"],
        dynamo=True,
        verbose=False,
    )
    draw, reviews = random.Random(0), []
    for _ in range(80):
        is_good = draw.random() < 0.5
        texts = [
            f"the film was {draw.choice(GOOD if is_good else BAD)}",
            draw.choice(GOOD if is_good else BAD),
        ]
        reviews.append((texts[draw.random() < 0.3], "good" if is_good else "bad"))
    (place / "reviews.csv").write_text("text,label\n" + "".join(f"{x},{y}\n" for x, y in reviews))
    (place / "reviews.tsv").write_text("text\tlabel\n" + "".join(f"{x}\t{y}\n" for x, y in reviews))
    lines = [json.dumps({"text": x, "label": y}) for x, y in reviews]
    (place / "reviews.jsonl").write_text("\n".join(lines))
    (place / "stars.csv").write_text("review,stars\n" + "".join(f"{x},{5 if y == 'good' else 1}\n" for x, y in reviews))
    return place


def test_forms_of_files_have_the_same_rows(folder: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = [json.loads(line) for line in (folder / "reviews.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "reviews.parquet")
    files = [folder / "reviews.csv", folder / "reviews.jsonl", tmp_path / "reviews.parquet"]
    found = [data.labelled_text(str(file), tokenizer=str(folder)) for file in files]
    found.append(data.labelled_text(str(folder / "reviews.tsv"), tokenizer=str(folder), delimiter="\\t"))
    for other in found[1:]:
        assert other.labels == found[0].labels == ("bad", "good")
        for name, array in found[0].arrays.items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(other.arrays[name]))
    assert found[0].arrays["input_ids"].shape == (80, 4)
    assert not np.asarray(found[0].arrays["input_ids"])[~np.asarray(found[0].arrays["attention_mask"])].any()


def test_tune_trains_all_weights_of_a_model_of_texts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", str(folder), str(folder / "reviews.csv"), "folder=tuned"]
    assert cli.main([*words, "optimizer.learning_rate=0.03", "fit.epochs=6"]) == 0
    lines = capsys.readouterr().out
    assert "80 texts in 2 classes, bad " in lines
    assert "2 new classes in place of LABEL_0, LABEL_1" in lines
    assert "accuracy 1.0000" in lines.splitlines()[-3]
    Path("new.csv").write_text("text\nlovely\nthe film was dull\n")
    new = ["data.path=new.csv", "data.target=null", "predictions=new_labels.csv"]
    assert cli.main(["predict", "tuned", *new]) == 0
    header, *rows = next(Path().rglob("new_labels.csv")).read_text().splitlines()
    place = header.split(",").index("label")
    assert [row.split(",")[place] for row in rows] == ["good", "bad"]
    assert cli.main(["export", "tuned"]) == 0
    config = json.loads(Path("tuned/merged/config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"} and config["label2id"] == {"bad": 0, "good": 1}
    assert labels_in(ir.load("tuned/merged/model.onnx")) == ["bad", "good"]


def test_numbers_that_are_not_counted_from_0_are_names_of_classes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", str(folder / "model.onnx"), str(folder / "stars.csv"), "data.target=stars"]
    assert cli.main([*words, "fit.epochs=1", "folder=stars"]) == 0
    lines = capsys.readouterr().out
    assert "80 texts in 2 classes" in lines and "data.text=review" in lines
    assert labels_in(ir.load("stars/trained.onnx")) == ["1", "5"]


def test_names_of_other_outputs_leave_an_exported_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = (folder / "reviews.csv").read_text().splitlines()[1:]
    scores = [f"{line.split(',')[0]},{0.25 if line.endswith('good') else 0.75}" for line in lines]
    Path("scores.csv").write_text("\n".join(["text,label", *scores]))
    assert cli.main(["tune", str(folder), "scores.csv", "fit.epochs=1", "folder=scored"]) == 0
    assert cli.main(["export", "scored"]) == 0
    assert "id2label" not in json.loads(Path("scored/merged/config.json").read_text())


@pytest.mark.parametrize(
    ("lines", "arguments", "expected"),
    [
        ("text,label\n,a\n", {}, "column 'text', row 0: expected a text, found none"),
        ("text,label\nfilm,a\n", {"pair": "other"}, "unknown column 'other'"),
        ("text,class\nfilm,a\n", {}, "unknown column 'label'"),
        ("text,label\nfilm,a\n", {"context": 0}, "data.context: expected 1 token or more, found 0"),
        ("text,label\nfilm,a\n", {"tokenizer": None}, "expected a tokenizer for texts, found none"),
        ("text,label\nfilm,a\n", {"labels": ["b"]}, "expected a label of b, found 'a'"),
    ],
)
def test_a_mistake_is_one_line(
    lines: str, arguments: dict[str, object], expected: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "texts.csv"
    file.write_text(lines)
    with pytest.raises(graphopt.GraphoptError, match=expected) as caught:
        data.labelled_text(str(file), **{"tokenizer": str(folder), **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "film"}', "line 2: expected the fields of the lines before, found none of 'label'"),
        ('{"text": ["film"], "label": 1}', "line 2: text: expected text or a number, found a list"),
    ],
)
def test_a_mistake_in_json_lines_is_one_line(line: str, expected: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "film", "label": 0}\n' + line)
    with pytest.raises(graphopt.GraphoptError, match=expected):
        data.labelled_text(str(file), tokenizer=str(folder))


def test_rows_of_several_lengths_need_a_pad_token(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(graphopt.GraphoptError, match="expected a pad token for rows of several lengths"):
        data.labelled_text(str(folder / "reviews.csv"), tokenizer=str(tmp_path))
    (tmp_path / "config.json").write_text('{"pad_token_id": 3}')
    found = data.labelled_text(str(folder / "reviews.csv"), tokenizer=str(tmp_path), context=9, pad_to="context")
    padding = np.asarray(found.arrays["input_ids"])[~np.asarray(found.arrays["attention_mask"])]
    assert found.arrays["input_ids"].shape == (80, 9) and set(padding) == {3}


def test_long_texts_are_cut_off_and_told(folder: Path) -> None:
    with pytest.warns(UserWarning, match="texts have more than 2 tokens and are cut off: raise data.context"):
        found = data.labelled_text(str(folder / "reviews.csv"), tokenizer=str(folder), context=2)
    assert found.arrays["input_ids"].shape == (80, 2)


def test_a_graph_without_a_mask_is_warned_of_padding(folder: Path) -> None:
    found = data.labelled_text(str(folder / "reviews.csv"), tokenizer=str(folder))
    ((names, text),) = found.marks
    assert names == ("attention_mask",) and "padding is read as text" in text
