"""Propose what models of classes have in common: the folder to train on, the batch, and the head."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx_ir as ir

import passes
from graphopt.cli.tuning.proposal import Proposal
from graphopt.compiler import standard
from graphopt.data import Dataset
from graphopt.data.class_folders import parts_of_split
from graphopt.data.dataset import TARGET
from graphopt.errors import GraphoptError, some
from graphopt.graph.values import dims_of, dtype_of, is_floating, name_of
from graphopt.overrides import quoted
from graphopt.pipeline import Pipeline
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from passes.losses.classification import activation_behind
from passes.parts.features import cut_features

EPOCHS, PATIENCE = 100, 10  # of a head, whose epochs are short
DRAWN = 120  # rows whose features are computed beforehand
TOGETHER = 32  # rows in a batch of them


def training_folder(proposed: Proposal, data: Path) -> Path:
    """Return the folder to train on; of a split, propose the folder to validate on, and leave tests alone."""
    names = sorted(place.name for place in data.iterdir() if place.is_dir() and not place.name.startswith("."))
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


def freed(proposed: Proposal, model: ir.Model) -> ir.Model:
    """Propose to free a batch that inputs have fixed, if that is proved, or else batches of its size."""
    inputs = [x for x in model.graph.inputs if not x.is_initializer()]
    sizes = {dims_of(x)[0] for x in inputs if x.shape is not None and len(x.shape)}
    if len(sizes) != 1 or not isinstance(rows := sizes.pop(), int):
        return model
    try:
        open_model: ir.Model = passes.Normalize(batch="free")(model.clone()).model
    except GraphoptError as error:
        proposed.fields["fit.batch_size"] = str(rows)
        proposed.lines["batch"] = f"{rows}, as in the file: {error}"
        return model
    proposed.fields["pipeline.normalize.batch"] = "free"
    proposed.lines["batch"] = f"the fixed batch of {rows} is freed"
    return open_model


def describe(proposed: Proposal, root: Path, data: Dataset, what: str) -> list[str]:
    """Say how many rows each class of a folder has, and return the names of the classes."""
    labels = list(data.labels or ())
    counts = np.bincount(data.arrays[TARGET][:], minlength=len(labels))
    parts = [f"{name} {count}" for name, count in zip(labels, counts, strict=True)]
    proposed.lines["data"] = f"{root}: {len(data)} {what} in {len(labels)} classes, {some(parts, 10)}"
    return labels


def head_of(proposed: Proposal, model: ir.Model, labels: list[str], names: list[str]) -> Pipeline:
    """Propose to keep, to grow or to replace the head of a model; return the pipeline of its training graph.

    Args:
        labels: the classes of the data.
        names: those of the file, if it or its notes name them.

    Raises:
        GraphoptError: the model predicts each label by itself, so that its outputs are no classes.
    """
    output = first_output(proposed, model)
    size = dims_of(output)[-1] if output is not None and output.shape else None
    propose_logits(proposed, output)
    if isinstance(size, int) and len(names) != size:
        names = []  # of other outputs
    is_kept, is_grown = {*labels} <= {*names}, bool(names) and {*names} < {*labels}
    classes = [*names, *(label for label in labels if label not in names)] if is_kept or is_grown else labels
    if is_kept:
        told = f"{len(classes)} classes, as in the file"
    elif is_grown:
        told = f"{len(classes)} classes, {len(names)} of the file and {len(classes) - len(names)} new"
    else:
        known = some(names, 3) if len(names) == len(labels) else size or "those of the file"
        told = f"{len(classes)} new {'class' if len(classes) == 1 else 'classes'} in place of {known}"
    proposed.lines["head"] = told
    proposed.head(classes if is_kept or is_grown else None, grow=is_kept or is_grown)
    name = None if output is None else name_of(output)
    return standard(
        adapter=passes.Head(name, len(classes), grow=is_kept or is_grown),
        loss=passes.CrossEntropy(output=name, from_logits="loss.from_logits" not in proposed.fields),
        optimizer=passes.SGD(0.1),
    )


def propose_logits(proposed: Proposal, output: ir.Value | None) -> None:
    """Propose a loss of probabilities, if an output has them in place of logits.

    Raises:
        GraphoptError: the model predicts each label by itself, so that its outputs are no classes.
    """
    operator = "" if output is None or (node := output.producer()) is None else node.op_type
    if operator == "Sigmoid":
        raise GraphoptError(
            "tune: expected logits or probabilities of classes, found a Sigmoid, of labels that do not exclude "
            "each other: train the model by a recipe with loss=binary_cross_entropy"
        )
    if activation_behind(output):
        proposed.fields["loss.from_logits"] = "false"


def frozen_part(pipeline: Pipeline, model: ir.Model) -> ir.Model:
    """Return the part of a model before the head that a pipeline trains.

    The part ends before the head's input, if what is between them does not treat each row by itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run repeats them
        return cut_features(pipeline(model))[0]


def features_of_rows(frozen: ir.Model, x: np.ndarray) -> np.ndarray:
    (read,) = frozen.graph.inputs
    dims, dtype = dims_of(read), dtype_of(read).numpy()
    size = dims[0] if isinstance(dims[0], int) else TOGETHER
    session, found = Session(Device(), frozen), []
    for start in range(0, len(x), size):
        part = np.resize(x[start : start + size], (size, *x.shape[1:])).astype(dtype)
        flat = [y.reshape(size, -1) for y in session.compute_arrays({name_of(read): part}).values()]
        found.append(np.concatenate(flat, axis=1)[: len(x) - start])
    return np.concatenate(found)


def first_output(proposed: Proposal, model: ir.Model) -> ir.Value | None:
    """Return the floating-point output that is named, or of several the first that a head fits, which is proposed.

    Raises:
        GraphoptError: the model has no output of the name.
    """
    model = passes.Normalize()(model.clone()).model
    name = {**proposed.arguments("loss", ("output",)), **proposed.arguments("adapter", ("output",))}.get("output")
    known = [y for y in model.graph.outputs if is_floating(y)]
    outputs = [y for y in known if name in (None, y.name)]
    if known and not outputs:
        raise GraphoptError(
            f"tune: loss.output: expected an output of floating-point numbers, found {name!r}: name one of "
            f"{some([name_of(y) for y in known], 10)}"
        )
    if len(outputs) > 1:
        outputs.sort(key=lambda y: not _fits(model, name_of(y)))
        proposed.fields["loss.output"] = quoted(name_of(outputs[0]))
    return outputs[0] if outputs else None


def takes_head(model: ir.Model, output: ir.Value | None) -> bool:
    """Return whether a new head fits an output of a model."""
    return output is not None and _fits(passes.Normalize()(model.clone()).model, name_of(output))


def as_written(found: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """Return the classes of a file, in its order, as data write them; None if the data have others.

    >>> from graphopt.cli.tuning.classes import as_written
    >>> as_written(["No", "Yes"], ["no", "yes", "open"]), as_written(["True"], ["0", "1"]), as_written(["a"], ["b"])
    (['No', 'Yes', 'open'], ['0', 'True'], None)
    """
    for form in (str, lambda text: {"true": "1", "false": "0"}.get(text.casefold(), text.casefold())):
        written, known = {form(text): text for text in found}, [form(name) for name in names]
        if len(written) == len(found) and {*written} <= {*known} and len({*known}) == len(known):
            return [written.get(text, name) for text, name in zip(known, names, strict=True)]
    return None


def _fits(model: ir.Model, output: str) -> bool:
    with suppress(GraphoptError):
        passes.Head(output, 2)(model.clone())
        return True
    return False
