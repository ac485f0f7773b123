"""Read texts, or pairs of texts, each with a class or a number, for models that classify or score them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.data.columnar import parquet
from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.files import csv
from graphopt.data.language.documents import is_lines, read_objects
from graphopt.data.language.rows import ATTENTION, MOST_TOKENS, PADDED_TO, TOKENS
from graphopt.data.language.tokenizer import FILE, Tokenizer, vocabulary_of
from graphopt.data.tabular import of_columns, read_as_input
from graphopt.errors import GraphoptError, kind_of, naming, unknown
from graphopt.files import ReadName

TEXT, LABEL = "text", "label"  # what the columns are called by default
TYPES = "token_type_ids"  # 0 for tokens of the first text of a pair, 1 for those of the second one
_CSV = (".csv", ".tsv", ".txt")


@checked()
def labelled_text(
    path: ReadName,
    *,
    text: str = TEXT,
    pair: str | None = None,
    target: str | None = LABEL,
    labels: Sequence[str | int | float | bool] | None = None,
    tokenizer: ReadName | Tokenizer | None = None,
    context: int = 128,
    pad_to: Literal["longest", "context"] = "longest",
    delimiter: str = ",",
) -> Dataset:
    """Return rows of tokens, each with the class or the number of its text, for models such as BERT.

    The file is a table with a column of texts: text (.csv, .tsv, .txt), JSON lines (.jsonl, .ndjson, .json), or else
    Parquet or Arrow. The arrays are `input_ids`, `attention_mask`, 1 for tokens and 0 for padding, and
    `token_type_ids`, 0 and, for the second text of a pair, 1. A graph that has the last two as inputs reads them. Rows
    are padded on the right; the tokenizer cuts off texts of more than `context` tokens, the longer
    text of a pair first, and adds the tokens that the model expects around them.

    Args:
        path: the file.
        text: the column of texts.
        pair: the column of the second text of each row, such as the answer to a question; None for single texts.
        target: the column to predict: classes, or numbers; None if the file has none, for predictions.
        labels: the classes in order; by default, the different texts of the target in sorted order.
        tokenizer: a file tokenizer.json or its folder, read by the package `tokenizers`; by default, the file that lies
            beside the model in the command.
        context: the largest number of tokens of a row.
        pad_to: fill rows up to the longest one, or to `context`, for a model of a fixed length.
        delimiter: the character between two columns of a text file; `\\t` is a tab.

    Raises:
        GraphoptError: a file or a column is missing, a row has no text, there is no tokenizer, or a package is not
            installed.

    >>> import pathlib, tokenizers
    >>> words = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3, "very": 4}
    >>> made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    >>> made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    >>> made.save("tokenizer.json")
    >>> _ = pathlib.Path("tokenizer_config.json").write_text('{"pad_token": "[PAD]"}')
    >>> _ = pathlib.Path("reviews.csv").write_text("text,label\\nvery good,yes\\nbad,no\\n")
    >>> reviews = graphopt.data.labelled_text("reviews.csv", tokenizer="tokenizer.json")
    >>> reviews.arrays["input_ids"].tolist(), reviews.arrays["target"].tolist(), reviews.labels
    ([[4, 2], [3, 0]], [1, 0], ('no', 'yes'))
    """
    if pad_to not in PADDED_TO:
        raise GraphoptError(f"data.pad_to: {unknown('length', str(pad_to), PADDED_TO)}")
    if context < 1:
        raise GraphoptError(f"data.context: expected 1 token or more, found {context}")
    vocabulary = None if tokenizer is None else vocabulary_of(tokenizer)
    if not isinstance(vocabulary, Tokenizer):
        raise GraphoptError(
            f"data: expected a tokenizer for texts, found none: set data.tokenizer={FILE}, or put it beside the model"
        )
    features = {name: [name] for name in (text, *(() if pair is None else (pair,)))}
    if is_lines(path):
        columns = columns_of_lines(path)
        table = of_columns(path, [*columns], lambda _: columns, target, features, labels=labels)
    elif Path(path).suffix.lower() in _CSV:
        table = csv(path, target=target, features=features, labels=labels, delimiter=delimiter)
    else:
        table = parquet(path, target=target, features=features, labels=labels)
    texts = [_texts_of(table, name) for name in features]
    arrays = _padded(vocabulary, texts, context, path, filled=pad_to == "context")
    tokens = int(np.count_nonzero(arrays[ATTENTION]))
    if target is not None:
        arrays[TARGET] = np.asarray(table.arrays[TARGET])
    unread = f"padding is read as text, because the graph has no input {ATTENTION!r}: export the model with it"
    return Dataset(
        arrays,
        features=TOKENS,
        classes=table.classes,
        labels=table.labels,
        source=path,
        spare=[ATTENTION, TYPES],
        marks=[] if arrays[ATTENTION].all() else [((ATTENTION,), unread)],
        tokens=tokens,
    )


def columns_of_lines(path: str) -> dict[str, list[object]]:
    """Return the fields of the objects in JSON lines, each of which has those of the first."""
    columns: dict[str, list[object]] = {}
    for number, item in read_objects(Path(path)):
        with naming(f"{path}: line {number}"):
            if not columns:
                columns = {name: [] for name in item}
            for name, column in columns.items():
                if name not in item:
                    raise GraphoptError(f"expected the fields of the lines before, found none of {name!r}")
                if not isinstance(item[name], str | int | float | None):
                    raise GraphoptError(f"{name}: expected text or a number, found {kind_of(item[name])}")
                column.append(item[name])
    if not columns:
        raise GraphoptError(f"{path}: expected an object per line, found an empty file")
    return columns


def _texts_of(table: Dataset, name: str) -> list[str]:
    """Return the texts of a column, none of which is empty."""
    texts: list[str] = np.asarray(read_as_input(table, name, ir.DataType.STRING))[:, 0].tolist()
    for i, text in enumerate(texts):
        if not text.strip():
            raise GraphoptError(f"{table.source}: column {name!r}, row {i}: expected a text, found none")
    return texts


def _padded(
    vocabulary: Tokenizer, texts: Sequence[Sequence[str]], context: int, source: str, *, filled: bool
) -> dict[str, np.ndarray]:
    """Return the tokens of texts or of pairs, filled up on the right, and the arrays that models read beside them."""
    rows, cut = [], 0
    for tokens, types, is_cut in vocabulary.encoded_rows(texts, context):
        rows.append((tokens, types))
        cut += is_cut
    width = context if filled else max(len(tokens) for tokens, _ in rows)
    if len(rows) * width > MOST_TOKENS:
        raise GraphoptError(
            f"{source}: expected at most {MOST_TOKENS:,} tokens in all rows, found more: lower data.context"
        )
    if empty := [i for i, (tokens, _) in enumerate(rows) if not len(tokens)]:
        raise GraphoptError(f"{source}: row {empty[0]}: expected a text with a token, found none: leave out the row")
    if vocabulary.pad is None and any(len(tokens) < width for tokens, _ in rows):
        raise GraphoptError(
            f"{vocabulary.path}: expected a pad token for rows of several lengths, found none: name pad_token in "
            "tokenizer_config.json beside it"
        )
    if cut:
        warnings.warn(
            f"{source}: {cut:,} of {len(rows):,} texts have more than {context:,} tokens and are cut off: raise "
            "data.context to keep them",
            stacklevel=3,
        )
    found = np.full((len(rows), width), vocabulary.pad or 0, np.int32)
    kinds, mask = np.zeros_like(found), np.zeros_like(found, np.bool_)
    for i, (tokens, types) in enumerate(rows):
        found[i, : len(tokens)], kinds[i, : len(tokens)], mask[i, : len(tokens)] = tokens, types, True
    return {TOKENS: found, ATTENTION: mask, TYPES: kinds}
