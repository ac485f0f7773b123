"""Choose which rows of a run's data `evaluate`, `calibrate` and `predict` read: all, held out, or trained on."""

from __future__ import annotations

import dataclasses
import filecmp
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.cli.composition.recipe import Recipe
from graphopt.cli.composition.record import RunRecord, mapping
from graphopt.data.dataset import Array, Dataset, LazyArray
from graphopt.data.loader import Rows
from graphopt.errors import GraphoptError
from graphopt.inspection.words import counted
from graphopt.moments import row_index

DECIDING = ("seed", "shuffle", "validation")  # the fields of `fit` that decide which rows are held out


def chosen_rows(recipe: Recipe, record: RunRecord | None) -> tuple[Dataset, str]:
    """Return the data that the recipe's field `rows` chooses, and its description.

    `rows=null` is `held_out` to evaluate or calibrate a run on its own data, and `all` otherwise.
    """
    wanted, data, run = recipe.fields.get("rows"), recipe.data, recipe.fields["run"]
    if run == "calibrate" and wanted == "trained":
        raise GraphoptError(
            "rows=trained: expected rows that did not train, which calibrate learns from, found others: leave rows out"
        )
    source = f"{recipe.choices['data']}, "
    if record is None or (other := _other_than(record, recipe)):
        if run == "calibrate" and wanted is None and record is not None and other in DECIDING:
            raise GraphoptError(
                f"calibrate: expected the run's own seed, shuffle and validation, found "
                f"fit.{other}={recipe.fields['fit'].get(other)}: leave it out, name other data, or rows=all"
            )
        if wanted in ("held_out", "trained"):
            raise GraphoptError(
                f"rows={wanted}: expected a run with its own data, seed, shuffle and validation, found others: leave "
                "rows out"
            )
        return data, f"{source}{counted(len(data), 'row')}"
    trained, held_out, elsewhere = _trained_and_held_out(recipe)
    if wanted == "held_out" and held_out is None:
        raise GraphoptError(
            f"rows=held_out: expected a run that held rows out, found one that trained on all {len(data):,}: leave "
            "rows out"
        )
    if run == "calibrate" and wanted is None and held_out is None:
        raise GraphoptError(
            f"calibrate: expected a run that held rows out, found one that trained on all {len(data):,}: name other "
            "data, or rows=all"
        )
    if held_out is not None and (wanted == "held_out" or (wanted is None and run in ("calibrate", "evaluate"))):
        return held_out, f"{elsewhere or source}{len(held_out):,} rows held out by the run"
    if wanted == "trained":
        return trained, f"{source}{len(trained):,} rows that the run trained on"
    count = "all" if len(trained) == len(data) else f"{len(trained):,}"
    return data, f"{source}{len(data):,} rows, of which the run trained on {count}"


def _other_than(record: RunRecord, recipe: Recipe) -> str:
    """Return `data` if the recipe has other data than the run, a field of DECIDING that it has changed, or nothing."""
    then, now = record.resolved.get("fit"), recipe.fields["fit"]
    if not isinstance(then, dict) or not _is_same(record, recipe.fields["data"]):
        return "data"
    return next((name for name in DECIDING if then.get(name) != now.get(name)), "")


def _is_same(record: RunRecord, now: Mapping[str, Any]) -> bool:
    """Return whether a recipe has the data of a run, also if the same files lie under another path."""
    then = mapping(record.resolved.get("data"))
    if {**then, "path": None} != {**now, "path": None} or ("path" in then) != ("path" in now):
        return False
    if then.get("path") == now.get("path"):
        return True
    try:
        return _has_same_files(Path(record.started_in, str(then["path"])), Path(str(now["path"])))
    except OSError:  # a file is missing, or links make a circle
        return False


def _has_same_files(one: Path, other: Path) -> bool:
    """Return whether two files, or all files of two folders, are equal. The first difference ends the walk."""
    if one.samefile(other):
        return True
    if one.is_dir() and other.is_dir():
        names = [sorted(os.listdir(place)) for place in (one, other)]
        return names[0] == names[1] and all(_has_same_files(one / name, other / name) for name in names[0])
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _trained_and_held_out(recipe: Recipe) -> tuple[Dataset, Dataset | None, str]:
    """Return the rows that trained, those held out, if there are any, and the file that has these, if one does."""
    data, other = recipe.data, recipe.fit["validation"]
    if isinstance(other, Dataset):
        return data, other, f"{recipe.fields['fit']['validation']}, "
    trained, held_out = recipe.split(len(data))
    return selected(data, trained), selected(data, held_out) if len(held_out) else None, ""


def selected(data: Dataset, rows: Rows) -> Dataset:
    """Return some rows of a data set, which are read when they are needed if all are."""
    arrays = {
        name: _SomeRows(x, rows) if isinstance(x, np.memmap | LazyArray) else x[row_index(rows)]
        for name, x in data.arrays.items()
    }
    table = {name: cells[row_index(rows)] for name, cells in data.table.items()}
    return dataclasses.replace(data, arrays=arrays, table=table)


class _SomeRows(LazyArray):
    """Stand for some rows of an array that is read when it is needed."""

    def __init__(self, array: Array, rows: Rows) -> None:
        super().__init__((len(rows), *array.shape[1:]), array.dtype)
        self._array, self._rows = array, np.asarray(rows)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self._array[self._rows[rows]])
