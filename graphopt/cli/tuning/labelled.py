"""Propose which columns of a table are texts and classes, and how a model that reads tokens trains on them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.cli.tuning.classes import describe, head_of, propose_logits
from graphopt.cli.tuning.notes import Notes
from graphopt.cli.tuning.proposal import Proposal
from graphopt.data import labelled_text
from graphopt.data.dataset import TARGET
from graphopt.data.language.labelled import LABEL, TEXT
from graphopt.data.language.tokenizer import tokenizer_beside
from graphopt.data.tabular import is_numeral
from graphopt.errors import GraphoptError, some
from graphopt.graph.values import dims_of, dtype_of, is_floating
from graphopt.inspection.words import counted
from graphopt.overrides import list_text, quoted

# Of all weights: Devlin et al., BERT, 2019, appendix A.3.
RATE, TOGETHER, EPOCHS, PATIENCE = "5e-5", "16", 4, 2


def reads_texts(file: Path, model: ir.Model, said: Mapping[str, str]) -> bool:
    """Return whether a model reads tokens of a known tokenizer, and its output has a row for each text."""
    inputs = [x for x in model.graph.inputs if not x.is_initializer()]
    outputs = [y for y in model.graph.outputs if is_floating(y) and y.shape is not None]
    reads_tokens = all(
        dtype_of(x) in (ir.DataType.INT64, ir.DataType.INT32) and x.shape is not None and len(x.shape) == 2
        for x in inputs
    )
    has_tokenizer = "data.tokenizer" in said or tokenizer_beside(file) is not None
    return bool(inputs) and reads_tokens and has_tokenizer and bool(outputs) and len(dims_of(outputs[0])) <= 2


def of_labelled_text(
    proposed: Proposal, file: Path, model: ir.Model, data: Path, table: Mapping[str, np.ndarray]
) -> None:
    """Propose the recipe of a model of texts, all of whose weights train.

    Args:
        proposed: what gets the fields.
        file: where the model is.
        data: a table with a column of texts, and one of classes or numbers.
        table: its columns, as far as they can be read without the user's words.

    Raises:
        GraphoptError: the columns are not named, or the table has no such columns.
    """
    options = proposed.arguments("data", ("text", "pair", "target", "delimiter", "tokenizer"))
    target = options.pop("target", None) or next((name for name in (LABEL, TARGET) if name in table), LABEL)
    words = [
        name
        for name, cells in table.items()
        if name not in (target, options.get("pair")) and not all(is_numeral(str(x)) for x in cells)
    ]
    text = options.pop("text", None) or (words[0] if len(words) == 1 else TEXT)
    for option, name, known in (("text", text, words), ("target", target, [*table])):
        if table and name not in table:
            fitting = [f"data.{option}={quoted(x)}" for x in known if x not in (text, target)]
            fitting = fitting or [f"data.{option}=NAME"]
            raise GraphoptError(
                f"tune: {data}: expected a column {name!r}, found {some([*table], 20)}: name the one "
                f"{'of texts' if option == 'text' else 'to predict'}, such as {some(fitting, 3)}"
            )
    proposed.fields |= {"data": "labelled_text", "data.text": quoted(text), "data.target": quoted(target)}
    tokens = next(dims_of(x)[1] for x in model.graph.inputs if not x.is_initializer())
    if isinstance(tokens, int):
        proposed.fields |= {"data.context": str(tokens), "data.pad_to": "context"}
    tokenizer = options.setdefault("tokenizer", str(tokenizer_beside(file)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run repeats them
        context: dict[str, Any] = {"context": tokens, "pad_to": "context"} if isinstance(tokens, int) else {}
        rows = labelled_text(str(data), text=text, target=target, **context, **options)
    proposed.lines["model"] = f"{file}: reads tokens of {tokenizer}"
    if rows.labels is not None:
        labels = describe(proposed, data, rows, "texts")
        head_of(proposed, model, labels, Notes.of(file, model).labels or [])
        proposed.fields["loss"] = "cross_entropy"
    else:
        _of_numbers(proposed, file, model, data, np.asarray(rows.arrays[TARGET]))
    if "adapter" in proposed.fields:
        proposed.fields["parameters.unfreeze"] = list_text(["*"])
    for name in ("fit.cache_features", "adapter.standardize"):  # of frozen layers
        proposed.fields.pop(name, None)
    proposed.fields["optimizer.learning_rate"] = RATE
    proposed.fields.setdefault("fit.batch_size", TOGETHER)
    proposed.wait(EPOCHS, PATIENCE)


def _of_numbers(proposed: Proposal, file: Path, model: ir.Model, data: Path, targets: np.ndarray) -> None:
    """Propose the loss of class numbers or of other numbers, and a head if the file has other outputs."""
    output = next(y for y in model.graph.outputs if is_floating(y))
    dims, width = dims_of(output), targets.shape[1] if targets.ndim == 2 else 1
    found = dims[1] if len(dims) == 2 else 1
    if targets.ndim == 1 and targets.dtype.kind in "iub" and found != 1:
        proposed.fields["loss"] = "cross_entropy"
        labels = [str(number) for number in np.unique(targets)]
        proposed.lines["data"] = f"{data}: {len(targets)} texts in {len(labels)} classes"
        if isinstance(found, int) and {*labels} <= {*map(str, range(found))}:
            propose_logits(proposed, output)
            proposed.lines["head"] = f"{found} classes, by number, as in the file"
        else:
            proposed.fields["data.labels"] = list_text(labels)
            head_of(proposed, model, labels, Notes.of(file, model).labels or [])
        return
    proposed.fields["loss"] = "mean_squared_error"
    proposed.lines["data"] = f"{data}: {len(targets)} texts, numbers to predict"
    if width != found:
        proposed.lines["head"] = f"{counted(width, 'new output')} in place of {found}"
        proposed.head(None)
