"""Write arrays of rows to files: npz, csv or parquet."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.data.files import imported
from graphopt.errors import GraphoptError
from graphopt.files import replacing

ENDINGS = (".npz", ".csv", ".parquet")


def check_ending(field: str, name: str) -> None:
    """Raise an error unless a file's name has an ending that `write_rows` knows, and no folder.

    Args:
        field: the option that has the name.
    """
    if Path(name).suffix not in ENDINGS or Path(name).name != name:
        raise GraphoptError(
            f"{field}: expected the name of a file that ends in {', '.join(ENDINGS)}, without a folder, found {name!r}"
        )
    if name.endswith(".parquet"):
        imported(f"{field}={name}", "pyarrow")


def write_rows(
    path: Path, arrays: Mapping[str, np.ndarray], columns: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Write arrays with the same number of rows to a file, by its ending.

    A table has a column for each array, or several, NAME_0, NAME_1, ..., if a row of the array has several numbers.

    Args:
        path: a file that ends in .npz, .csv or .parquet.
        arrays: the arrays by name.
        columns: other ends of the names of an array's columns.
    """
    arrays = {name: array.astype(str) if array.dtype == object else array for name, array in arrays.items()}
    if path.suffix == ".npz":
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        return
    table = dict(_columns(arrays, columns or {}))
    with replacing(path) as temporary:
        if path.suffix == ".parquet":
            table_of = imported(str(path), "pyarrow").table
            imported(str(path), "pyarrow.parquet").write_table(table_of(table), temporary)
        else:
            with open(temporary, "w", newline="", encoding="utf-8") as text:
                writer = csv.writer(text)
                writer.writerow(table)
                writer.writerows(zip(*(column.astype(str) for column in table.values()), strict=True))


def _columns(arrays: Mapping[str, np.ndarray], columns: Mapping[str, Sequence[str]]) -> Any:
    """Yield the name and the numbers of each column."""
    for name, array in arrays.items():
        if array.ndim == 1:
            yield name, array
            continue
        flat = array.reshape(len(array), -1)
        ends = columns.get(name, range(flat.shape[1]))
        yield from ((f"{name}_{end}", np.ascontiguousarray(flat[:, i])) for i, end in enumerate(ends))
