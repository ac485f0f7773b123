"""Propose how a model reads images, what their pixels become, and the head that learns their classes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphopt.cli.tuning.classes import (
    DRAWN,
    EPOCHS,
    PATIENCE,
    describe,
    features_of_rows,
    freed,
    frozen_part,
    head_of,
    training_folder,
)
from graphopt.cli.tuning.notes import PIXELS, Notes
from graphopt.cli.tuning.proposal import GIVE_ROWS, Proposal
from graphopt.data import Dataset, images
from graphopt.data.dataset import TARGET
from graphopt.errors import GraphoptError
from graphopt.files import json_of
from graphopt.graph.values import dims_of, dtype_of, is_floating, name_of
from graphopt.inspection.words import counted
from graphopt.runtime.executor import run

OPEN_SIZE = (224, 224)  # pixels, if neither the file nor its notes say any
_MOST_NUMBERS = 2**28  # of these images
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # beside features whose mean square is 1
_CHANNELS: dict[Literal["NCHW", "NHWC"], int] = {"NCHW": 1, "NHWC": 3}  # the axis in each layout


@dataclass(frozen=True)
class _Form:
    """Describe arrays of images."""

    layout: Literal["NCHW", "NHWC"]
    channels: int
    size: tuple[int, int]

    def __str__(self) -> str:
        return f"data.layout={self.layout} data.channels={self.channels}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self.size) if self.layout == "NCHW" else (*self.size, self.channels)

    def of_channels(self, numbers: list[float]) -> np.ndarray:
        """Return numbers of channels, or one for all, in a shape that broadcasts over batches."""
        return np.reshape(numbers, [-1 if axis == _CHANNELS[self.layout] else 1 for axis in range(4)])


def of_images(proposed: Proposal, file: Path, model: ir.Model, data: Path, pixels: str | None) -> None:
    """Propose the recipe of a model of images.

    Args:
        proposed: what gets the fields.
        file: where the model is.
        data: a folder with a folder of images for each class, or with such folders for training and validation.
        pixels: one of `PIXELS`, if the user knows.

    Raises:
        GraphoptError: the model takes something else, the folder has no images, or trying does not tell the form.
    """
    root = training_folder(proposed, data)
    notes, x = Notes.of(file, model), _input(file, model)
    model = freed(proposed, model)
    (x,) = (y for y in model.graph.inputs if y.name == x.name)
    form = _form(proposed, file, model, x, notes)
    height, width = form.size
    proposed.fields |= {"data.size": f"[{height},{width}]", "data.channels": str(form.channels)}
    proposed.fields["data.layout"] = form.layout
    if proposed.said.get("augment") == "images":
        proposed.fields["augment.layout"] = form.layout
    is_scaled = is_floating(x)
    if not is_scaled:
        proposed.fields["data.scale"] = "false"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run repeats them
        found = images(str(root), size=form.size, channels=form.channels, layout=form.layout, scale=is_scaled)
    proposed.lines["model"] = (
        f"{file}: {x.name!r} takes {height} x {width} pixels of {counted(form.channels, 'channel')}, {form.layout}"
    )
    labels = describe(proposed, root, found, "images")
    head = head_of(proposed, model, labels, notes.labels or [])
    if is_scaled and "standardize" not in proposed.said:
        _pixels(proposed, partial(frozen_part, head, model), form, found, notes, pixels)
    proposed.wait(EPOCHS, PATIENCE)


def _input(file: Path, model: ir.Model) -> ir.Value:
    inputs = [x for x in model.graph.inputs if not x.is_initializer()]
    if len(inputs) != 1 or inputs[0].shape is None or len(inputs[0].shape) != 4:
        found = ", ".join(f"{x.name!r} of shape {x.shape}" for x in inputs) or "none"
        raise GraphoptError(
            f"tune: {file}: expected one input of images, [N, C, H, W] or [N, H, W, C], found {found}: {GIVE_ROWS}"
        )
    return inputs[0]


def _form(proposed: Proposal, file: Path, model: ir.Model, x: ir.Value, notes: Notes) -> _Form:
    """Return the form of images that a model declares, or the only one that it runs on.

    A file that declares its channels, [N, 3, H, W], also runs on images that are 3 pixels high: its layout is declared.
    """
    possible, dims = list(_forms(proposed, x, notes)), dims_of(x)
    forms = [form for form in possible if isinstance(dims[_CHANNELS[form.layout]], int)] or possible
    runs = forms if len(forms) == 1 else [form for form in forms if _runs(model, x, form)]
    if len(runs) != 1:
        found = f"that {len(runs)} run: say {' or '.join(map(str, runs))}" if runs else "that none runs"
        raise GraphoptError(
            f"tune: {file}: expected one form of images, NCHW or NHWC, of 3 channels or 1, for input {x.name!r} of "
            f"shape {x.shape}, found {found}"
        )
    return runs[0]


def _forms(proposed: Proposal, x: ir.Value, notes: Notes) -> Iterator[_Form]:
    """Yield the forms of images that the shape of an input leaves open."""
    said, dims, size = proposed.said, dims_of(x), notes.size or OPEN_SIZE
    if "data.size" in said:
        size = json_of(said["data.size"], "data.size")
        if not (isinstance(size, list) and len(size) == 2 and all(isinstance(own, int) for own in size)):
            raise GraphoptError(
                f"data.size: expected a height and a width, such as [224,224], found {said['data.size']}"
            )
    for layout, axis in _CHANNELS.items():
        declared = [size for i, size in enumerate(dims) if i not in (0, axis)]
        height, width = (
            own if isinstance(own, int) else int(open_one) for own, open_one in zip(declared, size, strict=True)
        )
        for channels in (3, 1):
            fits = dims[axis] == channels or not isinstance(dims[axis], int)
            is_said = said.get("data.layout", layout) == layout
            if fits and is_said and said.get("data.channels", str(channels)) == str(channels):
                yield _Form(layout, channels, (height, width))


def _runs(model: ir.Model, x: ir.Value, form: _Form) -> bool:
    """Return whether the runtime runs a model on images of a form."""
    rows = dims_of(x)[0]
    if math.prod(form.shape) > _MOST_NUMBERS:
        return False
    with suppress(GraphoptError):
        run(
            model,
            {name_of(x): np.zeros((rows if isinstance(rows, int) else 1, *form.shape), dtype_of(x).numpy())},
        )
        return True
    return False


def _pixels(
    proposed: Proposal,
    frozen: Callable[[], ir.Model],
    form: _Form,
    rows: Dataset,
    notes: Notes,
    said: str | None,
) -> None:
    """Propose what standardizes pixels: as is said, or noted, or with which features tell the classes best."""
    if said is not None:
        moments, word, why = PIXELS[said], said, "as --pixels says"
    elif notes.moments is not None:
        moments, source = notes.moments
        word, why = "", f"as {source} says"
    else:
        count = min(DRAWN, max(2, _MOST_NUMBERS // math.prod(form.shape)), len(rows))
        drawn = np.sort(np.random.default_rng(0).permutation(len(rows))[:count])
        pixels, part = rows.arrays["x"][drawn], frozen()
        features = {
            word: features_of_rows(part, (pixels - form.of_channels(mean)) / form.of_channels(scale))
            for word, (mean, scale) in PIXELS.items()
            if form.channels % len(mean) == 0
        }
        word, why = tried(features, rows.arrays[TARGET][drawn])
        moments = PIXELS[word]
    mean, scale = moments
    is_unit = moments == PIXELS["unit"]
    formula = "x" if is_unit else f"(x - {_shown(mean)}) / {_shown(scale)} of x"
    becomes = "0 to 255" if moments == PIXELS["bytes"] else f"{formula} from 0 to 1"
    proposed.lines["pixels"] = f"{word and word + ': '}{becomes}, {why}"
    if not is_unit:
        proposed.fields |= {
            "standardize": "inputs",
            "standardize.mean": _shown(mean),
            "standardize.scale": _shown(scale),
        }
        if form.layout == "NHWC":
            proposed.fields["standardize.axis"] = "-1"


def _shown(numbers: list[float]) -> str:
    return f"[{','.join(f'{x:.9g}' for x in numbers)}]"


def tried(features: Mapping[str, np.ndarray], classes: np.ndarray) -> tuple[str, str]:
    """Return with which features a linear classifier tells most classes, and the shares in words.

    A network of ReLUs computes nearly the same features of bytes and of pixels from 0 to 1 up to their scale. Bytes
    therefore have to be better by two standard deviations.
    """
    shares, count = {word: share_right(x, classes) for word, x in features.items()}, len(classes)
    noise = {word: math.sqrt(max(x * (1 - x), 1 / count) / count) for word, x in shares.items()}
    best = max(shares, key=lambda word: shares[word] - (2 * noise[word] if word == "bytes" else 0))
    others = {word: share for word, share in shares.items() if word != best}
    is_unsure = shares[best] - max(others.values()) < noise[best]
    unsure = ": close, so say --pixels=WORD if you know" if is_unsure else ""
    texts = ", ".join(f"{word} {share:.0%}" for word, share in others.items())
    return best, (
        f"with which a linear classifier of its features is right on {shares[best]:.0%} of {count} images ({texts})"
        f"{unsure}"
    )


def share_right(features: np.ndarray, classes: np.ndarray) -> float:
    """Return the share of rows whose class a ridge regression on all other rows predicts, with the best of some ridges.

    With the products K of centred features, whatever their unit, G = K + ridge I, and targets Y of 1 and -1, the
    prediction of a row that is left out is y - (G^-1 Y) / diag(G^-1) (Rifkin and Lippert, "Notes on regularized least
    squares", 2007).

    >>> from graphopt.cli.tuning.images import share_right
    >>> share_right(numpy.array([[0.0, 1.0], [0.1, 0.9], [1.0, 0.0], [0.9, 0.2]]), numpy.array([0, 0, 1, 1]))
    1.0
    """
    known = np.unique(classes)
    centred = np.nan_to_num(features.astype(np.float64) - features.mean(axis=0, dtype=np.float64))
    products = centred @ centred.T
    products = products / max(np.trace(products) / len(products), 1e-30) + 1.0  # with a constant feature
    targets, shares = np.where(classes[:, None] == known, 1.0, -1.0), []
    for ridge in RIDGES:
        inverse = np.linalg.inv(products + ridge * np.eye(len(products)))
        left_out = targets - (inverse @ targets) / np.diag(inverse)[:, None]
        shares.append(float((known[left_out.argmax(axis=1)] == classes).mean()))
    return max(shares)
