"""Show explanations of rows as a page: heat over pictures, bars beside features, colors behind tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphopt.cli.check import says
from graphopt.cli.composition.recipe import Recipe
from graphopt.cli.rows import chosen_rows
from graphopt.data import Batches
from graphopt.data.dataset import Dataset
from graphopt.data.language.tokenizer import Vocabulary, vocabulary_of
from graphopt.files import write
from graphopt.graph.classified import labels_in
from graphopt.graph.metadata import ADDITIVE
from graphopt.graph.values import name_of
from graphopt.inspection import html
from graphopt.inspection.words import readable
from graphopt.runtime.session import Session
from graphopt.training.callbacks.predictions import image_of
from graphopt.training.evaluation import by_batches

_PAGE = "explanation.html"
_MOST_ROWS, _MOST_BARS, _LONGEST = 12, 12, 256  # of a page, of a row, pixels of a picture
_MORE, _LESS = ([217, 72, 15], [24, 100, 171])  # red, green, blue, as in page.css
_STRONGEST = 0.8  # share of the color in a picture


def shows_rows(recipe: Recipe) -> bool:
    """Return whether the command names rows to explain."""
    return says(recipe, "data") or recipe.command_line.record is not None


def write_explanations(recipe: Recipe, model: ir.Model, folder: Path) -> str:
    """Write a page about the first of the chosen rows, and return its name.

    Args:
        model: the model with an explanation as its last output.
    """
    data, described = chosen_rows(recipe, recipe.command_line.record)
    count, own = min(len(data), _MOST_ROWS), data.inputs()
    inputs = {name_of(x): x for x in model.graph.inputs if not x.is_initializer()}
    arrays = {name: np.asarray(x[:count]) for name, x in data.arrays.items() if name in own or name in inputs}
    chosen = {"class": np.full(count, -1)} if "class" in inputs else {}
    table = {name: cells[:count] for name, cells in data.table.items()}
    first = replace(data, arrays={**arrays, **chosen}, table=table)
    batches = Batches(first, inputs, allow_nan=recipe.fields["fit"]["allow_nan"])
    outputs = by_batches(Session(recipe.device, model).compute_arrays, batches, count)
    *_, added = model.graph.outputs
    found, feeds = outputs.pop(name_of(added)), batches.take(np.arange(count))
    changed = feeds.get(name_of(added).rpartition(".")[0])
    if changed is not None:  # by an attack
        found = found - changed
    labels = recipe.data.labels or labels_in(model)
    titles = [f"row {i}: {_predicted([y[i] for y in outputs.values()], labels)}" for i in range(count)]
    words = vocabulary_of(recipe.tokenizer) if recipe.tokenizer else None
    about = f"{recipe.fields['model']}, {'' if count == len(data) else f'the first {count} of '}{described}. "
    about += "Orange speaks for what is predicted, and blue against it, where the explanation has signs."
    sections = _sections(first, feeds, found.astype(np.float64), titles, words, ADDITIVE.is_set(added))
    title = f"What predictions depend on: {recipe.choices['explain'].replace('_', ' ')}"
    write(folder / _PAGE, html.page(title, about, *sections))
    return _PAGE


def _predicted(scores: Sequence[np.ndarray], labels: Sequence[str] | None) -> str:
    """Return the class of the first scores of a row, or their number."""
    y = next(y for y in scores if y.dtype.kind == "f")
    if y.size == 1:
        return readable(float(y.item()))
    best = int(y.argmax())
    return str(labels[best]) if labels is not None and len(labels) == y.size else f"class {best}"


def _sections(
    data: Dataset,
    feeds: Mapping[str, np.ndarray],
    found: np.ndarray,
    titles: Sequence[str],
    words: Vocabulary | None,
    is_additive: bool,
) -> list[str]:
    images = [image_of({name: x[i] for name, x in feeds.items()}) for i in range(len(titles))]
    maps = _maps(found, is_additive)
    if maps is not None and all(image is not None for image in images):
        drawn = [(_heated(x, y), title, ()) for x, y, title in zip(images, maps, titles, strict=True)]
        return [html.section("Where it looked", html.pictures(drawn, _LONGEST))]
    tokens = [x for x in feeds.values() if x.dtype.kind in "iu" and x.ndim == 2 and x.shape == found.shape[:2]]
    if tokens and words is not None:
        shares = _scaled(found if found.ndim == 2 else _reduced(found, 2, is_additive))
        masks = feeds.get("attention_mask", np.ones_like(tokens[0]))
        texts = [
            [(words.decode([int(token)]), float(x)) for token, x, is_text in zip(*row, strict=True) if is_text]
            for row in zip(tokens[0], shares, masks, strict=True)
        ]
        return [html.section(title, html.marked_words(text)) for title, text in zip(titles, texts, strict=True)]
    flat = found.reshape(len(found), -1)
    values = next((x.reshape(flat.shape) for x in feeds.values() if x.size == flat.size), None)
    named = [] if data.names is None else [*data.names]
    names = named if len(named) == flat.shape[1] else [*map(str, range(flat.shape[1]))]
    sections = []
    for i, (title, own) in enumerate(zip(titles, _scaled(flat), strict=True)):
        ranked = np.argsort(-abs(own), kind="stable")[:_MOST_BARS]
        rows = [(names[j], "" if values is None else readable(float(values[i, j])), float(own[j])) for j in ranked]
        sections.append(html.section(title, html.bars(rows), half=True))
    return sections


def _maps(found: np.ndarray, is_additive: bool) -> np.ndarray | None:
    """Return explanations as maps [N, height, width]; None if they have no such form."""
    if found.ndim == 4:
        found = _reduced(found, 1 if found.shape[1] in (1, 3) else 3, is_additive)
    elif found.ndim == 2 and (side := math.isqrt(found.shape[1])) > 1 and found.shape[1] - side**2 <= 1:
        found = found[:, -(side**2) :].reshape(-1, side, side)  # of tokens, of which the first may be no place
    return _scaled(found) if found.ndim == 3 else None


def _reduced(found: np.ndarray, axis: int, is_additive: bool) -> np.ndarray:
    """Return one number for all channels of a place: their sum if it has a meaning, otherwise their norm."""
    reduced: np.ndarray = found.sum(axis) if is_additive else np.sqrt((found**2).sum(axis))
    return reduced


def _scaled(found: np.ndarray) -> np.ndarray:
    """Scale the explanation of each row to -1 to 1."""
    largest = abs(found).max(axis=tuple(range(1, found.ndim)), keepdims=True)
    scaled: np.ndarray = found / np.where(largest > 0, largest, 1)
    return scaled


def _heated(image: np.ndarray | None, heat: np.ndarray) -> np.ndarray:
    """Return a picture in grey, colored by a map from -1 to 1."""
    assert image is not None
    grey = image.mean(axis=2, keepdims=True)
    grey = (grey - grey.min()) / (float(np.ptp(grey)) or 1.0)
    rows, columns = (np.arange(n) * m // n for n, m in zip(image.shape, heat.shape, strict=False))
    heat = heat[rows][:, columns, None]
    strength = _STRONGEST * abs(heat)
    colored: np.ndarray = grey * (1 - strength) + strength * np.where(heat < 0, _LESS, _MORE) / 255
    return colored
