"""Make a data set of the columns of a table: features, a target and sample weights."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.data.columns import LONGEST_CELL, Category, Column, cell_text, is_missing, suits
from graphopt.data.dataset import FEATURES, TARGET, WEIGHT, Array, Dataset
from graphopt.data.kinds import Unread, check_points, is_code, written_as
from graphopt.data.tables import Columns, cells, check_description, columns_of, named_in
from graphopt.errors import GraphoptError, naming, some, unknown
from graphopt.overrides import in_shell, list_text

IN_MEMORY = "data"  # the path of a table that is no file
ANY = "[...]"  # a list to be written
_MOST_CLASSES = 1_000  # of a text column
_FEW_CLASSES = 20  # of a text column, whatever the number of rows

_Cells = Sequence[object] | np.ndarray  # of a column
_Names = str | int | Sequence[str | int] | None


def of_columns(
    path: str,
    names: Sequence[str],
    read: Callable[[list[str]], Mapping[str, _Cells]],
    target: _Names,
    features: _Names | Mapping[str, Any] = None,
    sample_weight: str | int | None = None,
    labels: Sequence[str | int | float | bool] | None = None,
    columns: Columns | Mapping[str, Any] | str | None = None,
    *,
    are_places: bool = False,
) -> Dataset:
    """Return a data set of a table, of which `read` returns those of the named columns that are used.

    Errors name the path, `are_places` says that names only count the columns, and `csv` explains the other arguments.
    """
    refuse_twice(path, "column", names)
    targets, weights = _as_names(target), _as_names(sample_weight)
    others = [name for name in names if name not in (*targets, *weights)]
    if columns is not None and isinstance(features, Mapping):
        raise GraphoptError(f"{path}: expected one input of columns, found features of {', '.join(features)}")
    wanted = {} if columns is None else check_description(columns)
    if features is None and "" in others:
        warnings.warn(
            f"{path}: a column without a name is a feature: pandas writes an index so, without to_csv(index=False); "
            f"{option(path, 'features', ANY)} names the features",
            stacklevel=2,
        )
    if features is None:
        features = others if columns is None else named_in(wanted, others)
    only = None if isinstance(features, Mapping) else FEATURES
    by_input = features if isinstance(features, Mapping) else {FEATURES: features}
    inputs = {name: _as_names(x) for name, x in by_input.items()}
    read_from = {*itertools.chain(*inputs.values())}
    used = dict.fromkeys(itertools.chain(targets, weights, *inputs.values()))
    _check_known(path, used, names, targets, read_from, wanted)
    if target is not None and (not targets or (labels is not None and len(targets) > 1)):
        expected = "a target column" if labels is None else "one target column, whose classes are named"
        raise GraphoptError(f"{path}: expected {expected}, found {', '.join(targets) or 'none'}")
    found = read([name for name in names if name in used])
    if not all(map(len, found.values())):
        raise GraphoptError(f"{path}: expected rows, found none")
    arrays, classes = {}, None if labels is None else tuple(map(cell_text, labels))
    read_as: dict[str, Sequence[str]] = {}
    if columns is None and only:
        arrays = {name: _stack(path, found, those) for name, those in inputs.items()}
    elif columns is None:
        arrays = {name: _texts_or_numbers(path, found, those) for name, those in inputs.items()}
        read_as = {
            name: those
            for name, those in inputs.items()
            if all(getattr(found[column], "ndim", 1) == 1 for column in those)
        }
    if targets:
        arrays[TARGET], classes = _target(path, found, targets, classes)
    if weights:
        arrays[WEIGHT] = _vector(_stack(path, found, weights))
    count = None if classes is None else len(classes)
    if columns is None:
        known = inputs[FEATURES] if only and arrays[only].shape[1:] == (len(inputs[only]),) else None
        table = {name: cells(name, found[name]) for those in read_as.values() for name in those}
        return Dataset(arrays, only, count, classes, None, table, known, path, cells_of=read_as, are_places=are_places)
    with naming(path):
        table = {name: cells(name, found[name]) for name in inputs[FEATURES]}
        kinds = columns_of(wanted, table)
    dataset = Dataset(arrays, None, count, classes, kinds, table, source=path)
    return dataset.encoded(kinds) if kinds.has_learnt else dataset


def read_as_input(data: Dataset, name: str, dtype: ir.DataType) -> Array:
    """Return an array of a data set as a model's input of a type reads its cells: as strings, or as numbers.

    Raises:
        GraphoptError: a cell is not what the input reads.
    """
    array, names = data.arrays[name], data.cells_of.get(name)
    if names is None or (array.dtype == object) == (dtype is ir.DataType.STRING):
        return array
    if dtype is ir.DataType.STRING:
        return np.column_stack([_texts(data.source, name, data.table[name]) for name in names])
    return _stack(data.source, data.table, names)


def refuse_twice(path: str, kind: str, names: Iterable[str]) -> None:
    """Raise an error if a name comes twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise GraphoptError(f"{path}: expected one {kind} {name!r}, found {count}")


def is_numeral(text: str) -> bool:
    """Return whether a text is a number of not too many digits."""
    return len(text) <= LONGEST_CELL and suits(float, text)


def option(path: str, name: str, value: str | Sequence[str], most: int = 20) -> str:
    """Return how a file's option is set on the command line, or an argument of `graphopt.data.table`.

    Args:
        most: the number of texts of a list that are shown.
    """
    if isinstance(value, str):
        in_python = {"null": "None", ANY: ANY}.get(value, repr(value))
        return f"graphopt.data.table(..., {name}={in_python})" if path == IN_MEMORY else f"data.{name}={value}"
    shown, more = [*value[:most]], f" and {len(value) - most} more" if len(value) > most else ""
    if path == IN_MEMORY:
        return f"graphopt.data.table(..., {name}={shown!r}){more}"
    return in_shell([f"data.{name}={list_text(shown)}"]) + more


def _check_known(
    path: str,
    used: Iterable[str],
    names: Sequence[str],
    targets: Sequence[str],
    features: Iterable[str],
    wanted: Mapping[str, object],
) -> None:
    """Raise an error if a column is missing, or is both a feature and predicted."""
    known = {*names}
    for name in used:
        column = wanted.get(name)
        if name in targets and column is not None:
            raise GraphoptError(
                f"{path}: column {name!r}: expected a feature, found the column to predict: leave it out of columns"
            )
        if name not in known and isinstance(column, Column) and column.rows:
            raise GraphoptError(f"{path}: expected a column {name!r}, which the model takes, found {some(names, 20)}")
        if name not in known:
            target, none = option(path, "target", "NAME"), option(path, "target", "null")
            mend = f": name the column to predict, {target}, or leave it out, {none}" if name in targets else ""
            if name in features and not wanted:
                mend = f": {option(path, 'features', ANY)} names the features; a trained model reads those that trained"
            raise GraphoptError(f"{path}: {unknown('column', name, names)}{mend}")


def _as_names(names: _Names) -> list[str]:
    if names is None:
        return []
    return [str(names)] if isinstance(names, str | int) else [str(name) for name in names]


def _stack(path: str, columns: Mapping[str, _Cells], names: Sequence[str], mend: str = "") -> np.ndarray:
    if not names:
        raise GraphoptError(f"{path}: expected feature columns, found none")
    arrays = [_numeric_column(path, name, columns[name], mend) for name in names]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    if any(array.ndim > 2 for array in arrays):
        shapes = ", ".join(f"{name!r} {list(array.shape[1:])}" for name, array in zip(names, arrays, strict=True))
        raise GraphoptError(
            f"{path}: expected columns of cells or lists to join, found {shapes}: name one column per input in "
            "data.features"
        )
    return np.column_stack(arrays)


def _texts_or_numbers(path: str, columns: Mapping[str, _Cells], names: Sequence[str]) -> np.ndarray:
    """Return columns for one of several inputs: as strings if a cell is no number, until an input's type is known."""
    if any(_is_text_column(columns[name]) for name in names):
        return np.column_stack([_texts(path, name, cells(name, columns[name])) for name in names])
    return _stack(path, columns, names)


def _texts(path: str, name: str, values: np.ndarray) -> np.ndarray:
    """Return cells as strings, empty for a missing one."""
    if values.dtype.kind == "f":
        odd = values[np.isfinite(values) & (values != np.trunc(values))]
        if odd.size:
            raise GraphoptError(
                f"{path}: column {name!r}: expected strings, which the input reads, or whole numbers, found {odd[0]}: "
                "write the column as strings"
            )
    return Category().read(values)


def _is_text_column(column: _Cells) -> bool:
    if isinstance(column, np.ndarray) and (column.dtype.kind in "iufbmM" or column.ndim > 1):
        return False
    return any(isinstance(x, str) and x and (is_code(x) or not is_numeral(x)) for x in column)


def _vector(stacked: np.ndarray) -> np.ndarray:
    return stacked[:, 0] if stacked.shape[1:] == (1,) else stacked


def _target(
    path: str, columns: Mapping[str, _Cells], names: Sequence[str], labels: tuple[str, ...] | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return the target, the numbers of classes if it is text, and the names of these classes."""
    column = columns[names[0]]
    is_numeric = isinstance(column, np.ndarray) and (column.dtype.kind in "iufb" or column.ndim > 1)
    if labels is not None or (len(names) == 1 and not is_numeric):
        texts = Category().read(cells(names[0], column)).tolist()
        labels = _text_classes(path, names[0], texts) if labels is None else labels
        if labels is not None:
            return _class_numbers(path, names[0], texts, labels), labels
    for name in names:
        column = columns[name]
        if isinstance(column, np.ndarray) and column.dtype.kind in "iub":
            continue
        missing = [i for i, value in enumerate(column) if np.ndim(value) == 0 and is_missing(value)]
        if missing:
            place, count = f"column {name!r}, row {missing[0]}", f"{len(missing):,} of {len(column):,} rows"
            raise GraphoptError(
                f"{path}: {place}: expected a value to predict, found none, as in {count}: leave "
                f"them out, or the column, {option(path, 'target', 'null')}"
            )
    return _vector(_stack(path, columns, names, "name one column of classes as the target")), None


def _text_classes(path: str, name: str, texts: list[str]) -> tuple[str, ...] | None:
    """Return the different texts of a target in order, or None if it has only numbers."""
    different = [text for text in dict.fromkeys(texts) if text]
    are_codes = any(map(is_code, different)) and all(map(is_numeral, different))
    words = [text for text in different if are_codes or not is_numeral(text)]
    if not words:
        return None
    odd = next((text for text in texts if not text or not (are_codes or not is_numeral(text))), None)
    if odd is not None:
        expected, found = ("a number", words[0]) if odd else ("a class", "")
        raise GraphoptError(
            f"{path}: column {name!r}, row {texts.index(found)}: expected {expected}, found {found!r}: mend it, leave "
            f"out the row, or name the classes, {option(path, 'labels', words)}"
        )
    if not are_codes and written_as(words):
        raise GraphoptError(
            f"{path}: column {name!r}: expected plain numbers, or names of classes, found {words[0]!r}: write numbers "
            f"such as 1500.5 into the column, or name the classes, {option(path, 'labels', words, 3)}"
        )
    if len(words) > min(_MOST_CLASSES, max(_FEW_CLASSES, len(texts) // 2)):
        raise GraphoptError(
            f"{path}: column {name!r}: expected numbers or at most {_MOST_CLASSES:,} classes, found "
            f"{len(words):,} different texts in {len(texts):,} rows, such as {words[0]!r}"
        )
    return tuple(sorted(words))


def _numeric_column(path: str, name: str, column: _Cells, mend: str = "") -> np.ndarray:
    """Return a column as int64 if all numbers are whole, otherwise as float64."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "iufb":
        return column
    texts = ["nan" if is_missing(value) else str(value) for value in column]
    if code := next(filter(is_code, texts), None):
        warnings.warn(
            f"{path}: column {name!r}: {code!r} is read as the number {int(code)}: {option(path, 'columns', 'auto')} "
            "makes categories of such codes",
            stacklevel=2,
        )
    try:
        check_points([*dict.fromkeys(text for text in texts if text != "nan")], name)
    except Unread as error:
        mend = f"columns={{*: auto, {name}: {' or '.join(error.ways)}}} reads it"
        raise GraphoptError(f"{path}: column {name!r}: {error}: {mend}") from error
    for dtype in (np.int64, np.float64) if max(map(len, texts), default=0) <= LONGEST_CELL else ():
        try:
            return np.array(texts, dtype)
        except (ValueError, OverflowError):  # also for whole numbers beyond int64
            continue
    row, text = next((i, text) for i, text in enumerate(texts) if not is_numeral(text))
    mend = mend or f"{option(path, 'columns', 'auto')} makes features of text and dates"
    if ways := written_as([*dict.fromkeys(text for text in texts if text != "nan")], any_unit=True):
        mend = f"columns={{*: auto, {name}: {' or '.join(ways)}}} reads it"
    raise GraphoptError(f"{path}: column {name!r}, row {row}: expected a number, found {text!r}: {mend}")


def _class_numbers(path: str, name: str, texts: list[str], labels: Sequence[str]) -> np.ndarray:
    refuse_twice(path, "label", labels)
    places = {label: i for i, label in enumerate(labels)}
    for i, text in enumerate(texts):
        if text not in places:
            raise GraphoptError(
                f"{path}: column {name!r}, row {i}: expected a label of {', '.join(places)}, found {text!r}"
            )
    return np.array([places[text] for text in texts], np.int64)
