"""Read data sets from files, and write arrays of rows."""

from __future__ import annotations

import contextlib
import csv as csv_files
import importlib
import lzma
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from graphopt.arguments import checked
from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.tables import Columns
from graphopt.data.tabular import is_numeral, of_columns, refuse_twice
from graphopt.errors import GraphoptError, line, some
from graphopt.files import SAVED_AS_CSV, ZIP, ReadName, check_file, foreign_content, replacing

__all__ = ["csv", "npy", "npz"]

# The reader of a file by the end of its name: recipes and the command's messages know what stands here.
ENDINGS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".npy": "npy", ".npz": "npz"}
EXPANSION = 100  # bytes of data for each byte of a compressed file
_UNSUSPICIOUS = 2**30  # bytes of data that a file of any size may expand to

# Exceptions of NumPy and the decompressors for damaged or malicious files.
_BROKEN = (
    *(EOFError, MemoryError, OverflowError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(lzma.LZMAError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
_DELIMITERS = ";\t|,"
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")  # with which a cell begins that a spreadsheet computes
_WRITTEN = (".npz", ".csv", ".parquet")
_SPREADSHEETS = {
    ".xlsx": "an Excel workbook",
    ".xlsm": "an Excel workbook",
    ".ods": "a sheet of OpenDocument",
}


@checked()
def npz(path: ReadName, *, expansion: int = EXPANSION) -> Dataset:
    """Read the arrays of a NumPy archive: the model's inputs by name, and `target`.

    Args:
        path: the archive, whose arrays have the names of the inputs.
        expansion: the maximum ratio of the arrays' size to the file's size; arrays of up to 1 GiB are always
            accepted.

    Raises:
        GraphoptError: the file is missing, is not a NumPy archive of plain arrays, or expands too far.
    """
    archive = _loaded_array(Path(path), "a NumPy archive (.npz)")
    if isinstance(archive, np.ndarray):
        raise GraphoptError(f"{path}: expected a NumPy archive (.npz), found one array: use data=npy")
    with archive, reading(path, "arrays of numbers"):
        check_ratio(path, sum(member.file_size for member in archive.zip.infolist()), expansion)
        refuse_twice(path, "array", archive.files)
        arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise GraphoptError(f"{path}: expected arrays of numbers, found {name!r}, which is not an array")
    return Dataset(arrays)


@checked()
def npy(path: ReadName) -> Dataset:
    """Memory-map the arrays of a folder of `NAME.npy` files, so that each batch reads only its own rows.

    Args:
        path: a folder with a file NAME.npy for each input, and target.npy.

    Raises:
        GraphoptError: the folder is missing or has no such files, or a file is not an array of numbers.
    """
    files = sorted(Path(path).glob("*.npy"))
    if not files:
        raise GraphoptError(f"{path}: expected a folder with a file NAME.npy per input, found none")
    return Dataset({file.stem: _loaded_array(file, "a NumPy array (.npy)", "r") for file in files})


@checked()
def csv(
    path: ReadName,
    *,
    target: str | int | Sequence[str | int] | None = TARGET,
    features: Sequence[str | int] | Mapping[str, Any] | None = None,
    sample_weight: str | int | None = None,
    labels: Sequence[str | int | float | bool] | None = None,
    columns: Columns | Mapping[str, Any] | str | None = None,
    delimiter: str = ",",
    header: bool = True,
) -> Dataset:
    """Read columns of a text file.

    Args:
        path: the file.
        target: the column or columns to predict; None if the file has none, for predictions.
        features: the columns to predict from, all others by default; or a mapping from the model's inputs to columns.
            An input of strings reads cells of such a mapping as they are written, numbers and codes such as 007, too:
            whole numbers without a point, and empty strings where none is.
        sample_weight: the column of sample weights.
        labels: the classes in order; by default, the values of a target column of text in sorted order. They also make
            classes of a column of numbers: [0, 1].
        columns: what makes features of text, dates and missing values. `auto` describes each column by its values.
            A mapping from names to kinds, as of `graphopt.data.Columns`, describes some: `auto` stands for the kind
            that suits a column, None leaves it out, and `*` stands for all columns that are not named. These learn
            from training rows, by `Dataset.learn`; `Columns` that have learnt need not. With None, features are
            numbers.
        delimiter: the character between two columns; `\\t` is a tab.
        header: read the names of columns from the first line; otherwise the names are 0, 1, ..., and a trained model
            reads columns by their places, not by their names.

    Raises:
        GraphoptError: the file or a column is missing, or a field is not a number. Empty fields are NaN.

    >>> import pathlib
    >>> _ = pathlib.Path("people.csv").write_text("age,city,bought\\n20,Bern,no\\n,Oslo,yes\\n40,Bern,no\\n")
    >>> people = graphopt.data.csv("people.csv", target="bought", columns="auto").learn()
    >>> people.names, people.labels, people.arrays["x"].shape
    (['age', 'city=Bern', 'city=Oslo'], ('no', 'yes'), (3, 3))
    """
    names, texts = csv_columns(path, target=target, delimiter=delimiter, header=header)
    of_file = path, names, lambda _: texts
    return of_columns(*of_file, target, features, sample_weight, labels, columns, are_places=not header)


def csv_columns(
    path: str, *, target: object = None, delimiter: str = ",", header: bool = True
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the columns of a text file, of which one may come twice, and their cells.

    `csv` explains the arguments.
    """
    delimiter = "\t" if delimiter == r"\t" else delimiter
    if len(delimiter) != 1 or delimiter in '\r\n"\0':
        raise GraphoptError(f"data.delimiter: expected one character that separates columns, found {delimiter!r}")
    ending = Path(path).suffix.lower()
    if (kind := _SPREADSHEETS.get(ending)) is not None and Path(path).is_file():
        raise GraphoptError(f"{path}: expected a text file of columns, found {kind} ({ending}): {SAVED_AS_CSV}")
    expected = "a text file of columns in UTF-8"
    with (
        reading(path, expected, csv_files.Error),
        open(path, newline="", encoding="utf-8-sig") as file,
    ):
        rows = [row for row in csv_files.reader(file, delimiter=delimiter) if row]
        if other := _other_format(path, expected, is_text=True):
            raise GraphoptError(f"{path}: expected {expected}{other}")
    if not rows:
        raise GraphoptError(f"{path}: expected rows, found an empty file")
    names = [name.strip() for name in rows[0]] if header else [str(i) for i in range(len(rows[0]))]
    _check_form(path, rows[0], delimiter, header and str(target) not in names)
    rows = rows[header:]
    for i, row in enumerate(rows):
        if len(row) != len(names):
            raise GraphoptError(f"{path}: row {i}: expected {len(names)} columns, found {len(row)}")
    return names, {name: [row[i].strip() for row in rows] for i, name in enumerate(names)}


def _check_form(path: str, first: Sequence[str], delimiter: str, lacks_target: bool) -> None:
    """Raise an error if a file has another delimiter, or no names of columns where they are expected."""
    others = [other for other in _DELIMITERS if other != delimiter and other in first[0]]
    if len(first) == 1 and others:
        other = max(others, key=first[0].count)
        raise GraphoptError(
            f'{path}: expected columns separated by {delimiter!r}, found one, {first[0]!r}: "data.delimiter={other!r}"'
        )
    if lacks_target and all(map(is_numeral, first)):
        raise GraphoptError(
            f"{path}: expected the names of {len(first)} columns in the first row, found numbers, {some(first)}: "
            "data.header=false names the columns 0, 1, ..."
        )


def imported(what: str, module: str, package: str = "", *, extra: str = "") -> ModuleType:
    """Return a module that an option needs, or raise an error that says how to install its package.

    Args:
        extra: the extra of graphopt that has the package and others that the option needs.
    """
    package = package or module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except Exception as error:
        install = f"'graphopt[{extra}]'" if extra else package.lower()
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
        found = "none" if is_missing else f"one whose import fails ({type(error).__name__}: {line(error)})"
        mend = f"pip install {install}" if is_missing else f"reinstall it, pip install --force-reinstall {install}"
        raise GraphoptError(f"{what}: expected the package {package}, found {found}: {mend}") from error


@contextlib.contextmanager
def reading(path: str | Path, expected: str, *errors: type[Exception]) -> Iterator[None]:
    """Check that a file is regular, and raise what a library raises for a damaged one as its error, in a `with` block.

    `errors` are exceptions of the library, in addition to those of NumPy and Python.
    """
    broken: tuple[type[Exception], ...] = (OSError, *_BROKEN, *errors)
    try:
        check_file(path)
        yield
    except GraphoptError:
        raise
    except broken as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the library
            raise GraphoptError(f"{path}: {reason(error)}") from error
        problem = "more than fits into memory" if isinstance(error, MemoryError) else line(error)
        if isinstance(error, UnicodeDecodeError):
            problem = f"{problem}: save it as UTF-8"
        if other := _other_format(path, expected):
            expected = expected.partition(", found")[0]
        raise GraphoptError(f"{path}: expected {expected}{other or f': {problem}'}") from error


def _other_format(path: str | Path, expected: str, *, is_text: bool = False) -> str:
    """Return what a file is that is not of the expected format, and what to do, or nothing."""
    found, ending = foreign_content(path, is_text=is_text), Path(path).suffix.lower()
    if found is not None and found[0] == ZIP:
        kind = _SPREADSHEETS.get(ending)
        found = None if ending == ".npz" else found if kind is None else (f"{kind} ({ending})", SAVED_AS_CSV)
    return f", found {found[0]}: {found[1]}" if found and found[0] not in expected else ""


def reason(error: OSError) -> str:
    """Return the reason why a file cannot be read."""
    return "no such file" if isinstance(error, FileNotFoundError) else error.strerror or line(error)


def _loaded_array(path: Path, kind: str, mmap_mode: Literal["r"] | None = None) -> Any:
    with reading(path, f"{kind} of numbers, found another file"):
        try:
            return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
        except ValueError as error:
            if "pickle" in str(error):  # what NumPy takes any other file for
                raise ValueError("write it by numpy.savez or numpy.save, from arrays of numbers") from error
            raise


def check_ratio(path: str | Path, size: int, expansion: int, *, unsuspicious: int | None = None) -> None:
    """Raise an error if a file expands to `size` bytes, more than its own size times `expansion`.

    A file of any size may expand to `unsuspicious` bytes, by default 1 GiB.
    """
    file_size = max(1, Path(path).stat().st_size)
    if size > max(_UNSUSPICIOUS if unsuspicious is None else unsuspicious, expansion * file_size):
        raise GraphoptError(
            f"{path}: expected data of at most {expansion} times the file of {file_size:,} bytes, found {size:,}: "
            f"set data.expansion={-(-size // file_size)} to read it"
        )


def check_ending(field: str, name: str) -> None:
    """Raise an error unless the file's name in an option has an ending that `write_rows` knows, and no folder."""
    if Path(name).suffix not in _WRITTEN or Path(name).name != name:
        raise GraphoptError(
            f"{field}: expected the name of a file that ends in {', '.join(_WRITTEN)}, without a folder, found {name!r}"
        )
    if name.endswith(".parquet"):
        imported(f"{field}={name}", "pyarrow")


def write_rows(path: Path, arrays: Mapping[str, np.ndarray], columns: Mapping[str, Sequence[str]]) -> None:
    """Write arrays with the same number of rows to a file that ends in .npz, .csv or .parquet.

    A table has a column for each array, or several, NAME_0, NAME_1, ..., if a row of the array has several numbers.
    `columns` has other ends of the names of an array's columns. In .csv, texts that spreadsheets take for formulas
    begin with an apostrophe.
    """
    arrays = {name: array.astype(str) if array.dtype == object else array for name, array in arrays.items()}
    table: dict[str, np.ndarray] = {}
    with replacing(path) as temporary:
        if path.suffix == ".npz":
            np.savez(temporary, **arrays)  # type: ignore[arg-type]
            return
        for name, array in arrays.items():
            flat = array.reshape(len(array), -1)
            ends = columns.get(name, range(flat.shape[1]))
            names = [name] if array.ndim == 1 else [f"{name}_{end}" for end in ends]
            table |= zip(names, map(np.ascontiguousarray, flat.T), strict=True)
        if path.suffix == ".parquet":
            table_of = imported(str(path), "pyarrow").table
            imported(str(path), "pyarrow.parquet").write_table(table_of(table), temporary)
            return
        with open(temporary, "w", newline="", encoding="utf-8") as text:
            writer = csv_files.writer(text)
            writer.writerow(map(_spreadsheet_cell, table))
            columns_of_text = (
                [*map(_spreadsheet_cell, x)] if x.dtype.kind == "U" else x.astype(str) for x in table.values()
            )
            writer.writerows(zip(*columns_of_text, strict=True))


def _spreadsheet_cell(text: str) -> str:
    """Return text that a spreadsheet does not run as a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text
