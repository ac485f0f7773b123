"""Propose what models of classes have in common: the folder to train on, the batch, and the head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

import passes
from graphopt.cli.tuning.proposal import Proposal, quoted
from graphopt.compiler import standard
from graphopt.data import Dataset
from graphopt.data.class_folders import parts_of_split
from graphopt.data.dataset import TARGET
from graphopt.errors import GraphoptError, some
from graphopt.graph.values import dims_of, is_floating
from graphopt.pipeline import Pipeline

EPOCHS, PATIENCE = 100, 10  # of a head, whose epochs are short


def training_folder(proposed: Proposal, data: Path) -> Path:
    """Return the folder to train on; of a split, propose the folder to validate on, and leave tests alone."""
    names = sorted(
        place.name for place in data.iterdir() if place.is_dir() and not place.name.startswith(".")
    )
    parts = parts_of_split(names)
    if not parts:
        return data
    root, held_out = data / parts[0], data / parts[1]
    proposed.fields["data.path"] = quoted(str(root))
    if not parts[1].lower().startswith("test"):
        proposed.fields["fit.validation"] = quoted(str(held_out))
        proposed.lines["held out"] = str(held_out)
    for name in names:
        if name.lower().startswith("test"):
            proposed.lines["tests"] = f"{data / name} is left alone: graphopt evaluate measures it"
    return root


def freed(proposed: Proposal, model: ir.Model, rows: int) -> ir.Model:
    """Propose to free a fixed batch, if that is proved, or else batches of its size; return the model so."""
    try:
        open_model: ir.Model = passes.Normalize(batch="free")(model.clone()).model
    except GraphoptError as error:
        proposed.fields["fit.batch_size"] = str(rows)
        proposed.lines["batch"] = f"{rows}, as in the file: {error}"
        return model
    proposed.fields["pipeline.normalize.batch"] = "free"
    return open_model


def of_batch(proposed: Proposal, rows: object) -> str:
    """Return the end of a line about a model: whether its fixed batch is freed."""
    return (
        f"; its batches of {rows} get any size"
        if proposed.value("pipeline.normalize.batch") == "free"
        else ""
    )


def describe(proposed: Proposal, root: Path, data: Dataset, what: str) -> list[str]:
    """Say how many rows each class of a folder has, and return the names of the classes."""
    labels = list(data.labels or ())
    counts = np.bincount(data.arrays[TARGET][:], minlength=len(labels))
    parts = [f"{name} {count}" for name, count in zip(labels, counts, strict=True)]
    proposed.lines["data"] = f"{root}: {len(data)} {what} in {len(labels)} classes, {some(parts, 10)}"
    return labels


def head_of(proposed: Proposal, model: ir.Model, labels: list[str], names: list[str]) -> Pipeline:
    """Propose to keep, to grow or to replace the head of a model; return the pipeline of its training graph."""
    is_kept, is_grown = {*labels} <= {*names}, bool(names) and {*names} < {*labels}
    classes = [*names, *(label for label in labels if label not in names)] if is_kept or is_grown else labels
    (output,) = [y for y in model.graph.outputs if is_floating(y)][:1] or (None,)
    old = dims_of(output)[-1] if output is not None and output.shape else "those of the file"
    what = (
        "new ones" if not is_grown else f"{len(names)} of the file, and {len(classes) - len(names)} new ones"
    )
    proposed.lines["head"] = (
        f"{len(classes)} classes, {'as in the file' if is_kept else f'{what}, in place of {old}'}"
    )
    proposed.head(classes if is_kept or is_grown else None, grow=is_kept or is_grown)
    from_logits = output is None or (node := output.producer()) is None or node.op_type != "Softmax"
    if not from_logits:
        proposed.fields["loss.from_logits"] = "false"
    return standard(
        adapter=passes.Head(classes=len(classes), grow=is_kept or is_grown),
        loss=passes.CrossEntropy(from_logits=from_logits),
        optimizer=passes.SGD(0.1),
    )
