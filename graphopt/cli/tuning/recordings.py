"""Propose how a model reads recordings, and the head that learns their classes."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx_ir as ir

import passes
from graphopt.cli.tuning.classes import (
    EPOCHS,
    PATIENCE,
    describe,
    freed,
    head_of,
    training_folder,
)
from graphopt.cli.tuning.notes import Notes
from graphopt.cli.tuning.proposal import GIVE_ROWS, Proposal
from graphopt.data import audio
from graphopt.data.audio_folders import rate_of
from graphopt.errors import GraphoptError
from graphopt.graph.values import dims_of, is_floating, name_of
from graphopt.overrides import quoted


def of_recordings(proposed: Proposal, file: Path, model: ir.Model, data: Path) -> None:
    """Propose the recipe of a model of samples.

    Args:
        proposed: what gets the fields.
        file: where the model is.
        data: a folder with a folder of recordings for each class, or with such folders for training and validation.

    Raises:
        GraphoptError: the model takes something else, or the folder has no recordings.
    """
    root, notes = training_folder(proposed, data), Notes.of(file, model)
    inputs = [x for x in model.graph.inputs if not x.is_initializer()]
    scalars = [x for x in inputs if x.shape is not None and set(dims_of(x)) <= {1}]
    if len(inputs) == 2 and len(scalars) == 1:
        name, rate = name_of(scalars[0]), rate_of(str(root))
        inputs.remove(scalars[0])
        model = passes.Normalize(inputs={name: rate})(model.clone()).model
        proposed.fields |= {
            "pipeline.normalize.inputs": f"{{{quoted(name)}: {rate}}}",
            "data.rate": str(rate),
        }
        proposed.lines["samples"] = f"{name!r} is {rate:,}, the samples per second of the recordings"
    dims = dims_of(inputs[0]) if len(inputs) == 1 and inputs[0].shape is not None else ()
    has_channel = len(dims) == 3 and (dims[1] == 1 or not isinstance(dims[1], int))
    if len(inputs) != 1 or not is_floating(inputs[0]) or not (len(dims) == 2 or has_channel):
        found = ", ".join(f"{x.name!r} of shape {x.shape}" for x in inputs) or "none"
        raise GraphoptError(
            f"tune: {file}: expected one input of samples, [N, samples] or [N, 1, samples], found {found}: {GIVE_ROWS}"
        )
    model = freed(proposed, model)
    declared = dims[-1] if isinstance(dims[-1], int) else None
    options = {"samples": declared, **proposed.arguments("data", ("samples", "rate"))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run repeats them
        found_data = audio(str(root), **options, channel_axis=has_channel)
    length = found_data.arrays["x"].shape[-1]
    proposed.fields |= {"data.samples": str(length)} | ({"data.channel_axis": "true"} if has_channel else {})
    proposed.lines["model"] = f"{file}: {inputs[0].name!r} takes {length:,} samples"
    head_of(proposed, model, describe(proposed, root, found_data, "recordings"), notes.labels or [])
    proposed.wait(EPOCHS, PATIENCE)
