"""Run `graphopt tune`: propose a recipe for a model file and data, print it, and train by it."""

from __future__ import annotations

import glob
import inspect
import os
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import numpy as np
import onnx_ir as ir
from rich.console import Console

import passes
from graphopt import data as readers
from graphopt.adapters.targets import targets_in
from graphopt.cli.comparison import finals
from graphopt.cli.composition.recipe import check_format
from graphopt.cli.messages import say
from graphopt.cli.run_folder import MODEL, REPORT
from graphopt.cli.tuning.classes import as_written, first_output, freed, head_of, propose_logits, takes_head
from graphopt.cli.tuning.images import of_images
from graphopt.cli.tuning.labelled import of_labelled_text, reads_texts
from graphopt.cli.tuning.notes import Notes
from graphopt.cli.tuning.proposal import HEAD_RATE, Proposal, read
from graphopt.cli.tuning.recordings import of_recordings
from graphopt.cli.words import TUNE, field_of, names_model, reader_of
from graphopt.data.dataset import TARGET
from graphopt.data.files import csv_columns
from graphopt.data.language.documents import is_lines
from graphopt.data.language.labelled import columns_of_lines
from graphopt.data.tables import cells
from graphopt.errors import GraphoptError, some
from graphopt.files import json_of
from graphopt.graph.loading import load
from graphopt.graph.model_folders import model_in
from graphopt.graph.values import dims_of, is_floating, name_of
from graphopt.graph.weight_kinds import EMBEDDING
from graphopt.inspection.words import label_of, measure_text
from graphopt.overrides import in_shell, list_text, quoted
from graphopt.training.callbacks.terminal import is_watched, open_console

DEEPER = "deeper"  # the folder of the second run, in that of the first
_SHARE = 0.01  # of the head's rate, for the last layers
LAST = 0.25  # of the layers
MOST_LINE = 2**20  # bytes of a line of text
_TABLES = ("csv", "parquet", "arrow", "text")  # readers of files that may have columns of texts and classes
_MOST_CLASSES = 20  # of a column that is proposed as the target


def tune(
    words: Sequence[str],
    main: Callable[[Sequence[str]], int],
    *,
    pixels: str | None = None,
    deeper: bool = False,
) -> None:
    """Train the model that words of the command line name on the data that they name, by a proposed recipe.

    Args:
        words: FILE.onnx, a folder or a file of data, and fields of the recipe.
        main: what runs the command in this process.
        pixels: the name of what the pixels become, if the user has said it.
        deeper: then train the last layers, too.

    Raises:
        GraphoptError: the words name no model or no data, or nothing can be proposed for them.
        SystemExit: a run has ended with an error, which is printed.
    """
    plain = [word for word in words if "=" not in word and word != TUNE]
    for word in plain:
        check_format(word)
    said = dict(field_of(word, ()).split("=", 1) for word in words if "=" in word)
    models, others = ([word for word in plain if names_model(word) == is_model] for is_model in (True, False))
    if not models or len(others) != 1:
        raise GraphoptError(
            f"{TUNE}: expected FILE.onnx and a folder or a file of data, as in graphopt {TUNE} my.onnx photos, found "
            f"{' '.join(plain) or 'neither'}"
        )
    console = open_console(quiet=said.get("quiet") == "true")
    place = Path(models[0])
    proposed = propose(model_in(place) if place.is_dir() else place, Path(others[0]), said, pixels)
    if deeper and proposed.fields["data"] in ("text", "labelled_text"):
        raise GraphoptError(f"{TUNE}: expected no --deeper, found it: all layers of a model of texts train")
    folder = _run(console, proposed, main)
    if deeper:
        head = folder
        _run(console, _deeper(head, proposed), main)
        folder = _better(console, head)
    say(console, "again", in_shell(["graphopt", f"recipe={quoted(str(folder))}"]))
    if is_watched() and not console.quiet:
        _open(folder / REPORT)


def propose(model: Path, data: Path, said: dict[str, str], pixels: str | None = None) -> Proposal:
    """Propose a recipe for a model file and data.

    Raises:
        GraphoptError: there is no such data, or the model and the data leave something open that trying does not tell.
    """
    loaded = load(model)
    if not data.exists():
        raise GraphoptError(f"{TUNE}: {data}: expected a folder or a file of data, found none")
    kind = said.get("data") or reader_of(str(data))
    if not kind:
        raise GraphoptError(
            f"{TUNE}: {data}: expected a folder of images, a table or lines of text, found another file: name its "
            "reader with data=..."
        )
    folder = datetime.now().strftime("runs/%Y-%m-%d/%H-%M-%S-%f")
    fields = {"model": quoted(str(model)), "data": kind, "data.path": quoted(str(data)), "folder": folder}
    proposed = Proposal(said, fields)
    if kind not in ("images", "audio"):  # which tell the form of rows first
        loaded = freed(proposed, loaded)
    if kind == "images":
        of_images(proposed, model, loaded, data, pixels)
    elif kind == "audio":
        of_recordings(proposed, model, loaded, data)
    elif kind in _TABLES and reads_texts(model, loaded, said):
        of_labelled_text(proposed, model, loaded, data, _columns_in(proposed, data))
    elif kind == "text":
        _of_text(proposed, loaded, data)
    else:
        _of_table(proposed, model, loaded, data)
    return proposed


def _columns_in(proposed: Proposal, data: Path) -> Mapping[str, np.ndarray]:
    """Return the columns of a table, or none if reading it needs more of the user's words, which its reader tells."""
    kind = proposed.fields["data"]
    table: Mapping[str, object] = {}
    with suppress(GraphoptError):
        if is_lines(str(data)):
            table = columns_of_lines(str(data))
        elif kind == "csv":
            table = csv_columns(str(data), **proposed.arguments("data", ("delimiter",)))[1]
        else:
            options = {"columns": "auto", **proposed.arguments("data", ("columns",))}
            table = getattr(readers, kind)(str(data), target=None, **options).table
    return {name: cells(name, column) for name, column in table.items()}


def _of_table(proposed: Proposal, file: Path, model: ir.Model, data: Path) -> None:
    """Propose the loss of a table's target, the columns of inputs, and a head if the model has other classes."""
    said, kind = proposed.said, proposed.fields["data"]
    target = proposed.arguments("data", ("target",)).get("target", TARGET)
    read, is_table = getattr(readers, kind), kind not in ("npy", "npz")
    named = {"columns", "delimiter", "features", "labels"} & {*inspect.signature(read).parameters}
    options = proposed.arguments("data", sorted(named))
    if is_table:
        table = _columns_in(proposed, data)
        if "data.target" not in said:
            _check_target(data, table)
        inputs = [name_of(x) for x in model.graph.inputs if not x.is_initializer()]
        if len(inputs) > 1 and {*inputs} <= {*table} and not {"columns", "features"} & {*options}:
            options["features"] = {name: [name] for name in inputs}
            texts = ",".join(f"{quoted(name)}:[{quoted(name)}]" for name in inputs)
            proposed.fields["data.features"] = f"{{{texts}}}"
        options["target"] = target
    rows = read(str(data), **options)
    if TARGET not in rows.arrays:
        raise GraphoptError(f"{TUNE}: {data}: expected an array {TARGET!r}, found {', '.join(rows.arrays)}")
    targets, output = rows.arrays[TARGET][:], first_output(proposed, model)
    dims = None if output is None or output.shape is None else dims_of(output)
    width = None if dims is None else dims[-1] if len(dims) > 1 else 1
    is_whole = targets.ndim == 1 and bool(np.all(np.isfinite(targets) & (targets == np.round(targets))))
    is_classes = rows.labels is not None or (is_whole and width not in (1, None))
    values = np.unique(targets).astype(int) if is_classes and rows.labels is None else np.arange(0)
    most = max(len(values), width if isinstance(width, int) else 0)
    is_amount = len(values) > _MOST_CLASSES and (values[0] < 0 or values[-1] >= most)
    if is_amount and "loss" not in said:
        raise GraphoptError(
            f"{TUNE}: {data}: expected at most {_MOST_CLASSES} classes, found {len(values):,} whole numbers: "
            "loss=mean_squared_error if they are amounts, loss=cross_entropy if they are classes"
        )
    is_classes &= not is_amount or said["loss"] == "cross_entropy"
    proposed.fields["loss"] = "cross_entropy" if is_classes else "mean_squared_error"
    proposed.lines["data"] = f"{data}: {len(rows)} rows, target {target!r}"
    if is_classes:
        found = list(rows.labels or map(str, values))
        is_counted = rows.labels is None and values[0] >= 0 and values[-1] < most
        labels = _by_number(values[-1] + 1) if is_counted else found
        if rows.labels is None and not is_counted:
            proposed.fields["data.labels"] = list_text(labels)
        names = Notes.of(file, model).labels or []
        if isinstance(width, int) and len(names) != width:
            names = []  # of other outputs
        _of_classes(proposed, model, output, data, found, labels, names, width)
        if not is_table:  # whose classes are numbers
            proposed.fields.pop("data.labels", None)
    proposed.wait(epochs=100, patience=10)


def _by_number(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def _of_classes(
    proposed: Proposal,
    model: ir.Model,
    output: ir.Value | None,
    data: Path,
    found: list[str],
    labels: list[str],
    names: list[str],
    width: object,
) -> None:
    """Propose to keep the classes of a file, or a head.

    Args:
        found: the classes in the target of a table.
        labels: these, and the numbers from 0 on between them.
        names: the classes of the file, if it names them.
        width: the last dimension of its output.
    """
    is_said, size = "data.labels" in proposed.said, len(names) or width
    known = None if is_said else as_written(found, names)
    if known is not None:
        written = "" if known == names else f", written {some(known, 10)}"
        proposed.lines["head"] = f"{len(names)} classes, as in the file{written}"
        if known not in (labels, _by_number(len(known))):
            proposed.fields["data.labels"] = list_text(known)
    elif is_said and len(labels) == size:
        proposed.lines["head"] = f"{size} classes, in the order of data.labels: {some(labels, 10)}"
    elif not names and len(labels) == size:
        proposed.lines["head"] = f"{size} classes by number, {some(labels, 10)}: data.labels=[...] names another order"
    elif takes_head(model, output):
        head_of(proposed, model, labels, [] if is_said and labels[: len(names)] != names else names)
        return
    elif labels == _by_number(len(names)):
        proposed.lines["head"] = f"{size} classes by number, {some(names, 10)}: data.labels=[...] names another order"
    else:
        raise GraphoptError(
            f"{TUNE}: {data}: expected the classes of the file, {some(names, 10) or size}, which takes no other head, "
            f"found {some(labels, 10)}: data.labels=[...] names yours in the order of the file's"
        )
    propose_logits(proposed, output)


def _check_target(file: Path, table: Mapping[str, np.ndarray]) -> None:
    """Raise an error if a table has no column `target`, which proposes those of few different values, or the last."""
    names = list(table)
    if TARGET in names or not names:
        return
    counts = {name: len({*map(str, table[name])}) for name in names}
    most = min(_MOST_CLASSES, len(table[names[0]]) // 2)
    few = [name for name in reversed(names) if 1 < counts[name] <= most]
    texts = [f"data.target={quoted(name)} ({counts[name]} different values)" for name in few or names[-1:]]
    raise GraphoptError(
        f"{TUNE}: {file}: expected a column {TARGET!r}, found {len(names)} others: name the one to predict, such as "
        f"{some(texts, 3)}"
    )


def _of_text(proposed: Proposal, model: ir.Model, data: Path) -> None:
    """Propose a LoRA of a language model; of prompts and chats, the answers count."""
    if all(is_floating(x) for x in model.graph.inputs if not x.is_initializer()):
        raise GraphoptError(
            f"{TUNE}: {data}: expected a model that reads tokens, found one that reads numbers: name a table, pictures "
            "or recordings"
        )
    with data.open("rb") as lines:
        first = {} if data.suffix == ".txt" else json_of(lines.readline(MOST_LINE), str(data))
    is_answered = isinstance(first, dict) and bool({"prompt", "messages"} & first.keys())
    proposed.fields |= {"loss": "causal_language_model", "adapter": "lora", "optimizer.learning_rate": "2e-4"}
    proposed.fields |= {"data.context": "256", "fit.epochs": "3"}
    proposed.fields.setdefault("fit.batch_size", "8")
    if is_answered:
        proposed.fields |= {"data.completion_only": "true", "loss.labels": "true"}
    proposed.lines["data"] = f"{data}: {'the answers count' if is_answered else 'each token counts'}"


def _run(console: Console, proposed: Proposal, main: Callable[[Sequence[str]], int]) -> Path:
    """Print a proposal, run it, and return the folder of the run."""
    for topic, text in proposed.lines.items():
        say(console, topic, text)
    say(console, "recipe", in_shell(["graphopt", *proposed.overrides]))
    if code := main(proposed.overrides):
        raise SystemExit(code)
    return Path(str(read(f"folder={proposed.value('folder')}")))


def _deeper(head: Path, proposed: Proposal) -> Proposal:
    """Propose to train the last layers of a model whose head has been trained."""
    names, is_all = _last_layers(load(head / MODEL))
    of_head = ("adapter", "standardize", "pipeline")  # trained.onnx has them
    said, fields = (
        {name: text for name, text in given.items() if not name.startswith(of_head)}
        for given in (proposed.said, proposed.fields)
    )
    rate = f"{_SHARE * float(proposed.value('optimizer.learning_rate') or HEAD_RATE):.3g}"
    own = {
        "model": quoted(str(head / MODEL)),
        "folder": quoted(str(head / DEEPER)),
        "optimizer.learning_rate": rate,
    }
    again = Proposal({**said, **own}, fields)
    again.fields["parameters.pattern"] = list_text([glob.escape(name) for name in names])
    again.fields.pop("fit.cache_features", None)
    if not is_all:
        again.cache()
    again.wait(epochs=30, patience=3)
    layers = "all layers" if is_all else "the last layers"
    again.lines["deeper"] = f"{len(names)} weights of {layers} train, too, at a rate of {rate}"
    return again


def _last_layers(model: ir.Model) -> tuple[list[str], bool]:
    """Return the weights and the biases of the last products and convolutions, in order, and whether these are all."""
    normal = passes.Normalize()(model).model
    layers = [target for target in targets_in(normal) if target.kind != EMBEDDING and not target.is_weight_itself]
    last = layers[-max(2, round(len(layers) * LAST)) :]  # the head, and at least a layer before it
    names = [name_of(x) for target in last for x in (target.source.weight, target.bias) if x is not None]
    return [name for name in dict.fromkeys(names) if name in normal.graph.initializers], len(last) == len(layers)


def _better(console: Console, head: Path) -> Path:
    """Print which of both runs has the best measure with the weights of its file, and return its folder."""
    measure, values = finals(head, head / DEEPER)
    best = next(iter(values), head)
    texts = ", ".join(f"{folder} {measure_text(measure, value)}" for folder, value in sorted(values.items()))
    rows = "" if measure == "loss" else " of held-out rows"
    say(console, "best", f"{best / MODEL}, by the {label_of(measure)}{rows}: {texts}")
    return best


def _open(page: Path) -> None:
    """Open a page in the browser, if this is a desktop."""
    if sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        webbrowser.open(page.absolute().as_uri())
