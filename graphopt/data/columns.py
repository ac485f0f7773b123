"""Describe how a column of numbers, categories or dates becomes features, in NumPy and as nodes of a model."""

from __future__ import annotations

import datetime
import re
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
import onnx_ir as ir

from graphopt.arguments import Checked
from graphopt.errors import GraphoptError, unknown
from graphopt.graph.emitter import Emitter
from graphopt.moments import mean_and_scale

MACHINE_LEARNING = "ai.onnx.ml"  # the domain of LabelEncoder
LONGEST_CELL = 1_000  # characters of a number or a category
_MOST_CATEGORIES = 10_000  # whatever a description allows
MISSING = frozenset(("", "na", "n/a", "nan", "nat", "<na>", "#n/a", "null", "none", "?"))  # numbers and dates
_EPOCH = datetime.date(1970, 1, 1).toordinal()
_FIRST, _LAST = (day.toordinal() - _EPOCH for day in (datetime.date.min, datetime.date.max))
_PARTS = ("days", "year", "month", "day", "weekday")
_LARGEST = float(np.finfo(np.float32).max)
# Of thousands, as regular expressions
SEPARATORS = {",": ",", ".": ".", "space": r"\s", "apostrophe": "['\u2019]"}
_T = TypeVar("_T", bound="Column")


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _most_frequent(numbers: np.ndarray) -> float:
    different, counts = np.unique(numbers, return_counts=True)
    return float(different[np.argmax(counts)])


_IMPUTED: dict[str, Callable[[np.ndarray], object]] = {
    "mean": np.mean,
    "median": np.median,
    "most_frequent": _most_frequent,
}
_Check = tuple[str, Callable[[Any], bool]]
# What fields expect, and what tells whether a value is right.
_COUNT: _Check = ("a number of rows", lambda x: _is_whole_number(x) and x >= 0)
_FINITE: _Check = ("a finite number", _is_finite_number)
_DIFFERENT: _Check = ("a list of different values", lambda x: x is None or _is_list(x))
_EACH_PART: _Check = ("numbers of each part", lambda x: _is_list(x) and all(map(_is_finite_number, x)))


def _option(default: object, expected: str, is_right: Callable[[Any], bool], **of_field: Any) -> Any:
    """Declare a field whose value is checked."""
    return field(default=default, metadata={"expected": expected, "is_right": is_right}, **of_field)


def _learnt(default: object, expected: str, is_right: Callable[[Any], bool]) -> Any:
    """Declare a field that `learn` sets, and that a description cannot set."""
    return _option(default, expected, is_right, repr=False, kw_only=True)


@dataclass(frozen=True)
class Column(Checked):
    """Describe how one column becomes features: the base class of `Number`, `Category` and `Date`.

    `learn` returns a copy that knows the numbers of training rows. `encode` then computes features in NumPy, and `emit`
    the same in nodes.

    >>> graphopt.data.Number().learn(numpy.array([1.0, 3.0])).encode(numpy.array([2.0, 3.0])).tolist()
    [[0.0], [1.0]]
    """

    rows: int = _learnt(0, *_COUNT)  # that it has learnt from
    missing: int = _learnt(0, *_COUNT)  # of these rows
    kind: ClassVar[str]
    note: ClassVar[str]  # what the model's input expects
    dtype: ClassVar[ir.DataType] = ir.DataType.FLOAT  # of the model's input

    def __post_init__(self) -> None:
        for x in fields(self):
            value = getattr(self, x.name)
            if not x.metadata["is_right"](value):
                _refuse_option(self, x.name, x.metadata["expected"], value)
            if isinstance(value, list):
                object.__setattr__(self, x.name, tuple(value))

    @abstractmethod
    def read(self, values: np.ndarray) -> np.ndarray:
        """Return cells as numbers, days or texts."""

    def learn(self: _T, values: np.ndarray) -> _T:
        """Return the column with the fields that it learns from the cells of training rows, as `read` returns them."""
        missing = values == "" if values.dtype == object else np.isnan(values)
        learnt = self._learn(values, values[~missing])
        return replace(self, rows=len(values), missing=int(missing.sum()), **learnt)

    @abstractmethod
    def _learn(self, values: np.ndarray, there: np.ndarray) -> dict[str, object]:
        """Return the fields that come from cells; `there` are those that are not missing."""

    @abstractmethod
    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return features [rows, features] of cells, as `read` returns them, in float64."""

    @abstractmethod
    def emit(self, op: Emitter, x: ir.Value) -> ir.Value:
        """Emit nodes from an input [rows, 1] to features [rows, features] in float64."""

    @abstractmethod
    def names(self, column: str) -> list[str]:
        """Return the names of the features."""

    @abstractmethod
    def summary(self) -> str:
        """Return the encoding of the column, in words."""

    @property
    def warning(self) -> str | None:
        """Return why the column trains badly, or None."""
        return None

    def as_fields(self) -> dict[str, object]:
        """Return the kind and the fields, which `column_of` reads."""
        return {"kind": self.kind, **{x.name: getattr(self, x.name) for x in fields(self)}}

    def _of_missing(self, text: str) -> str:
        """Return the treatment of missing values, for `summary`."""
        return f", {self.missing:,} missing {text}" if self.missing else ""


@dataclass(frozen=True)
class Number(Column):
    """Fill in missing numbers, and scale.

    Args:
        impute: what a missing number becomes: the `mean`, the `median` or the `most_frequent` number of the training
            rows, as in scikit-learn's SimpleImputer, or a number. With None, a missing number is an error.
        scale: `standard` for mean 0 and standard deviation 1, `minmax` for 0 to 1, as in scikit-learn's
            StandardScaler and MinMaxScaler, or None. A constant column is divided by 1.
        add_indicator: add a feature that is 1 where a number is missing.
        decimal: the character between the whole part and the fraction of a number that is text: `.` or `,`.
        thousands: the character between thousands of a number that is text: `,`, `.`, `space` or `apostrophe`. A text
            without them is a number, too, but one with a group of other than three digits is an error.
        unit: what each text has before or after its number, such as `%` or `$`: `5%` is 5.

    >>> column = graphopt.data.Number(impute="median").learn(numpy.array([1.0, 3.0, numpy.nan]))
    >>> column.encode(numpy.array([3.0, numpy.nan])).round(3).tolist()
    [[1.225], [0.0]]
    """

    impute: Literal["mean", "median", "most_frequent"] | float | None = _option(
        "mean",
        f"{', '.join(_IMPUTED)}, a number or null",
        lambda x: x is None or x in (*_IMPUTED,) or _is_finite_number(x),
    )
    scale: Literal["standard", "minmax"] | None = _option(
        "standard", "standard, minmax or null", lambda x: x in ("standard", "minmax", None)
    )
    add_indicator: bool = _option(False, "true or false", lambda x: isinstance(x, bool))
    decimal: Literal[".", ","] = _option(".", "'.' or ','", lambda x: x in (".", ","))
    thousands: str | None = _option(
        None, "',', '.', space, apostrophe or null", lambda x: x is None or x in (*SEPARATORS,)
    )
    unit: str | None = _option(
        None,
        "a text without digits such as '%', or null",
        lambda x: x is None or (isinstance(x, str) and bool(x.strip()) and not re.search(r"\d", x)),
    )
    fill: float = _learnt(0.0, *_FINITE)
    offset: float = _learnt(0.0, *_FINITE)
    divisor: float = _learnt(1.0, "a positive number", lambda x: _is_finite_number(x) and x > 0)
    kind = "number"
    note = "a number; NaN for a missing value"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thousands == self.decimal:
            _refuse_option(self, "thousands", "another character than decimal", self.thousands)

    def read(self, values: np.ndarray) -> np.ndarray:
        if values.dtype.kind in "biuf":
            numbers = values.astype(np.float64)
        else:
            is_plain = (self.decimal, self.thousands, self.unit) == (".", None, None)
            parse = parsed_number if is_plain else self.parsed
            numbers = _parsed_cells(values, parse, self._expected)
        wrong = np.flatnonzero(np.abs(numbers) > _LARGEST)  # also infinities
        if wrong.size:
            raise GraphoptError(f"row {wrong[0]}: expected a number in float32, found {values[wrong[0]]}")
        return numbers

    def parsed(self, value: object) -> float:
        """Return the number in a cell that is written with the separators and the unit of the column."""
        if not isinstance(value, str) or value.lower() in MISSING:
            return parsed_number(value)
        text = value.strip()
        if self.unit is not None:
            sign, rest = (text[:1], text[1:].strip()) if text[:1] in "+-" else ("", text)
            if rest.startswith(self.unit):
                text = sign + rest.removeprefix(self.unit).strip()
            elif rest.endswith(self.unit):
                text = sign + rest.removesuffix(self.unit).strip()
            else:
                raise ValueError
        if self.thousands is not None:
            mark, point = SEPARATORS[self.thousands], re.escape(self.decimal)
            mark = mark if mark.startswith(("[", "\\")) else re.escape(mark)
            if re.fullmatch(rf"[+-]?([1-9]\d{{0,2}}({mark}\d{{3}})+|\d+)({point}\d*)?", text) is None:
                raise ValueError
            text = re.sub(mark, "", text)
        elif self.decimal == ",":
            text = text.replace(".", " ")  # which no number has
        return parsed_number(text.replace(self.decimal, "."))

    @property
    def _expected(self) -> str:
        """Return what a cell should be, in words."""
        return "a number" if self.unit is None else f"a number with {self.unit!r}"

    def described(self) -> str:
        """Return the description that reads such cells, as a recipe and Python write it."""
        given = {"decimal": self.decimal, "thousands": self.thousands, "unit": self.unit}
        default = {x.name: x.default for x in fields(self)}
        options = [f"{name}: '{value}'" for name, value in given.items() if value != default[name]]
        return f"{{{', '.join(['kind: number', *options])}}}"

    def _learn(self, values: np.ndarray, there: np.ndarray) -> dict[str, object]:
        _check_some("numbers", there)
        fill: Any = _IMPUTED[self.impute](there) if isinstance(self.impute, str) else self.impute
        filled = self._filled(values, fill)
        offset, divisor = 0.0, 1.0
        if self.scale == "standard":
            (offset,), (divisor,) = mean_and_scale(filled)
        elif self.scale == "minmax":
            offset, divisor = filled.min(), np.ptp(filled)
            divisor = divisor if divisor >= 10 * np.finfo(np.float64).eps else 1.0
        return {"fill": float(fill or 0.0), "offset": float(offset), "divisor": float(divisor)}

    def encode(self, values: np.ndarray) -> np.ndarray:
        fill = None if self.impute is None else self.fill
        filled = self._filled(values.astype(np.float32).astype(np.float64), fill)
        features = [(filled - self.offset) / self.divisor]
        return np.stack([*features, np.isnan(values)] if self.add_indicator else features, axis=1)

    def emit(self, op: Emitter, x: ir.Value) -> ir.Value:
        missing, number = op.IsNaN(x), op.Cast(x, to=ir.DataType.DOUBLE)
        filled = number if self.impute is None else op.Where(missing, self.fill, number)
        scaled = (filled - self.offset) / self.divisor
        if not self.add_indicator:
            return scaled
        return op.Concat(scaled, op.Cast(missing, to=ir.DataType.DOUBLE), axis=1)

    @property
    def warning(self) -> str | None:
        if self.divisor == 1 or self.divisor >= np.spacing(np.float32(abs(self.offset))):
            return None
        return (
            f"float32 cannot tell numbers apart near {self.offset:g} that differ by {self.divisor:g}: subtract a "
            "constant from the data"
        )

    def names(self, column: str) -> list[str]:
        return [column, f"{column} is missing"] if self.add_indicator else [column]

    def summary(self) -> str:
        how = f"the {self.impute.replace('_', ' ')} " if isinstance(self.impute, str) else ""
        return f"number{self._of_missing(f'filled with {how}{self.fill:.4g}')}"

    @staticmethod
    def _filled(values: np.ndarray, fill: float | None) -> np.ndarray:
        missing = np.isnan(values)
        if fill is None and missing.any():
            raise GraphoptError(f"row {np.argmax(missing)}: expected a number, found none: fill it in with impute")
        return values if fill is None else np.where(missing, fill, values)


@dataclass(frozen=True)
class Category(Column):
    """Encode a column that has few different values, such as words.

    Values are compared as text: the number 3.0 is `3`. Text is compared exactly, upper and lower case, too.

    Args:
        encode_as: `one_hot` for a feature per category, all of which are 0 for a value that no training row has, or
            `ordinal` for the number of the category, and -1 for such a value, as in scikit-learn's OneHotEncoder and
            OrdinalEncoder.
        impute: what a missing value becomes: the `most_frequent` category of the training rows, or another text. With
            None, a missing value is a category of its own, the last, if a training row has one.
        categories: the categories in order; by default, the values of the training rows: numbers by size, and then
            texts.
        most: the largest number of categories; more are an error.

    >>> column = graphopt.data.Category().learn(numpy.array(["Bern", "Oslo", "Bern"], object))
    >>> column.encode(numpy.array(["Oslo", "Rome"], object)).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """

    encode_as: Literal["one_hot", "ordinal"] = _option(
        "one_hot", "one_hot or ordinal", lambda x: x in ("one_hot", "ordinal")
    )
    impute: str | None = _option(None, "most_frequent, a text or null", lambda x: isinstance(x, str | None) and x != "")
    categories: Sequence[str] | None = _option(None, *_DIFFERENT)
    most: int = _option(
        1_000,
        f"a number from 1 to {_MOST_CATEGORIES:,}",
        lambda x: _is_whole_number(x) and 1 <= x <= _MOST_CATEGORIES,
    )
    known: tuple[str, ...] = _learnt((), _DIFFERENT[0], _is_list)
    fill: str = _learnt("", "a text", lambda x: isinstance(x, str))
    kind = "category"
    note = "text; empty for a missing value"
    dtype = ir.DataType.STRING

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("categories", "known"):
            texts = tuple(map(cell_text, getattr(self, name) or ()))
            if len({*texts}) < len(texts):
                _refuse_option(self, name, _DIFFERENT[0], texts)
            _check_texts(texts, self.most)
            if texts:
                object.__setattr__(self, name, texts)

    def read(self, values: np.ndarray) -> np.ndarray:
        if values.dtype.kind in "biuf":  # few different ones
            different, places = np.unique(values, return_inverse=True)
            return self.read(different.astype(object))[places.reshape(-1)]
        return np.array(["" if is_missing(value) else cell_text(value) for value in values], object)

    def _learn(self, values: np.ndarray, there: np.ndarray) -> dict[str, object]:
        fill = self.impute or ""
        if self.impute == "most_frequent":
            _check_some("values", there)
            counts = Counter(there.tolist())
            fill = min(counts, key=lambda text: (-counts[text], _category_order(text)))
        different = {text or fill for text in values.tolist()}
        return {"known": self.categories or tuple(sorted(different, key=_category_order)), "fill": fill}

    def encode(self, values: np.ndarray) -> np.ndarray:
        numbers = self._numbers
        codes = np.array([numbers.get(text, -1) for text in values.tolist()], np.int64)[:, None]
        features = codes if self.encode_as == "ordinal" else codes == np.arange(len(self.known))
        return features.astype(np.float64)

    def emit(self, op: Emitter, x: ir.Value) -> ir.Value:
        numbers = self._numbers
        codes = op.LabelEncoder(
            x,
            keys_strings=[*numbers],
            values_int64s=[*numbers.values()],
            default_int64=-1,
            _domain=MACHINE_LEARNING,
        )
        if self.encode_as == "one_hot":
            codes = op.Equal(codes, op.constant(np.arange(len(self.known))))
        return op.Cast(codes, to=ir.DataType.DOUBLE)

    def names(self, column: str) -> list[str]:
        ordinal = self.encode_as == "ordinal"
        return [column] if ordinal else [f"{column}={category or 'missing'}" for category in self.known]

    def summary(self) -> str:
        missing = self._of_missing(f"filled with {self.fill!r}" if self.fill else "are one")
        return f"{self.encode_as.replace('_', '-')} of {len(self.known)}{missing}"

    @property
    def _numbers(self) -> dict[str, int]:
        """Return the number of each text that the training rows have."""
        numbers = {category: i for i, category in enumerate(self.known)}
        return {"": numbers[self.fill], **numbers} if self.fill in numbers else numbers


@dataclass(frozen=True)
class Date(Column):
    """Turn dates into numbers of mean 0 and standard deviation 1. A missing date becomes the mean date.

    Dates are texts such as 2026-11-26, dates of Python, or `datetime64`. The time of the day is ignored. The model's
    input is the number of days since 1970-01-01, and NaN for a missing date, because the nodes of ONNX that cut text
    need opset 20.

    Args:
        parts: the features: `days` since 1970-01-01, `year`, `month`, `day` of the month, or `weekday`, 0 for Monday.
        format: the form of texts, such as `%d.%m.%Y`, in the codes of Python's `strptime`; by default, ISO 8601.

    >>> column = graphopt.data.Date(["days"])
    >>> days = column.read(numpy.array(["1970-01-01", "1970-01-03"], object))
    >>> days.tolist(), column.learn(days).encode(days).tolist()
    ([0.0, 2.0], [[-1.0], [1.0]])
    """

    parts: Sequence[str] = _option(
        ("days", "month", "weekday"),
        f"a list of {', '.join(_PARTS)}",
        lambda x: _is_list(x) and all(part in _PARTS for part in x) and 0 < len(x) == len({*x}),
    )
    format: str | None = _option(None, "a text such as %d.%m.%Y, or null", lambda x: isinstance(x, str | None))
    fill: float = _learnt(0.0, "a number of days", lambda x: _is_finite_number(x) and _FIRST <= x <= _LAST)
    offsets: tuple[float, ...] = _learnt((), *_EACH_PART)
    divisors: tuple[float, ...] = _learnt((), *_EACH_PART)
    kind = "date"
    note = "days since 1970-01-01; NaN for a missing date"

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.parts) if self.rows else 0
        for name, least in (("offsets", -np.inf), ("divisors", 0)):
            numbers = getattr(self, name)
            if len(numbers) != count or min(numbers, default=1) <= least:
                _refuse_option(self, name, _EACH_PART[0], numbers)

    def read(self, values: np.ndarray) -> np.ndarray:
        if values.dtype.kind != "M":
            expected = "a date such as 2026-11-26" if self.format is None else f"a date in the form {self.format!r}"
            return _parsed_cells(values, self.day, expected)
        days = values.astype("datetime64[D]")
        numbers = np.where(np.isnat(days), np.nan, days.astype(np.int64))
        wrong = np.flatnonzero((numbers < _FIRST) | (numbers > _LAST))
        if wrong.size:
            raise GraphoptError(f"row {wrong[0]}: expected a year from 1 to 9999, found {values[wrong[0]]}")
        return numbers

    def day(self, value: object) -> float:
        """Return the days since 1970-01-01 of a cell, NaN for a missing one."""
        text = str(value)
        if value is None or text.lower() in MISSING:
            return np.nan
        if self.format is not None and isinstance(value, str):
            return datetime.datetime.strptime(text, self.format).toordinal() - _EPOCH
        if text[10:11] not in ("", "T", " "):
            raise ValueError
        return datetime.date.fromisoformat(text[:10]).toordinal() - _EPOCH

    def _learn(self, values: np.ndarray, there: np.ndarray) -> dict[str, object]:
        _check_some("dates", there)
        fill = float(np.rint(there.mean()))
        offsets, divisors = mean_and_scale(self._split(values, fill))
        return {"fill": fill, "offsets": offsets.tolist(), "divisors": divisors.tolist()}

    def described(self) -> str:
        """Return the description that reads such cells."""
        return "{kind: date}" if self.format is None else f"{{kind: date, format: '{self.format}'}}"

    def _split(self, values: np.ndarray, fill: float) -> np.ndarray:
        days = np.where(np.isnan(values), fill, values).astype(np.int64).astype("datetime64[D]")
        months, years = days.astype("datetime64[M]"), days.astype("datetime64[Y]")
        parts = {
            "days": days.astype(np.int64),
            "year": years.astype(np.int64) + 1970,
            "month": (months - years).astype(np.int64) + 1,
            "day": (days - months).astype(np.int64) + 1,
            "weekday": (days.astype(np.int64) + 3) % 7,
        }
        return np.stack([parts[part] for part in self.parts], axis=1).astype(np.float64)

    def encode(self, values: np.ndarray) -> np.ndarray:
        return (self._split(values, self.fill) - self.offsets) / self.divisors

    def emit(self, op: Emitter, x: ir.Value) -> ir.Value:
        """Emit `civil_from_days` of H. Hinnant, "chrono-compatible low-level date algorithms"."""
        days = op.Cast(op.Where(op.IsNaN(x), self.fill, x), to=ir.DataType.INT64)
        shifted = days + 719468  # days since 0000-03-01
        era = shifted / 146097
        day = shifted - era * 146097  # of an era of 400 years
        year = (day - day / 1460 + day / 36524 - day / 146096) / 365  # of an era
        day_of_year = day - (365 * year + year / 4 - year / 100)  # from March on
        month = (5 * day_of_year + 2) / 153
        # January, February
        next_year = op.Cast(op.Greater(month, op.constant(9, month)), to=ir.DataType.INT64)
        parts = {
            "days": days,
            "year": year + era * 400 + next_year,
            "month": month + 3 - 12 * next_year,
            "day": day_of_year - (153 * month + 2) / 5 + 1,
            "weekday": shifted + 2 - (shifted + 2) / 7 * 7,
        }
        chosen = op.Concat(*(op.Cast(parts[part], to=ir.DataType.DOUBLE) for part in self.parts), axis=1)
        return (chosen - np.array(self.offsets)) / np.array(self.divisors)

    def names(self, column: str) -> list[str]:
        return [f"{column}.{part}" for part in self.parts]

    def summary(self) -> str:
        day = datetime.date.fromordinal(int(self.fill) + _EPOCH)
        return f"date as {', '.join(self.parts)}{self._of_missing(f'filled with the mean {day}')}"


KINDS: dict[str, type[Column]] = {"category": Category, "date": Date, "number": Number}


def column_of(description: object, *, has_learnt: bool = False) -> Column:
    """Return the column of a description: the name of a kind, or a mapping of the kind and its fields.

    Args:
        description: the description; a column is returned as it is.
        has_learnt: accept the fields that `learn` sets, as `Column.as_fields` returns them.

    Raises:
        GraphoptError: the kind or a field is unknown, or a field has a wrong value.
    """
    if isinstance(description, Column):
        return description
    given = {"kind": description} if isinstance(description, str) else description
    if not isinstance(given, Mapping) or "kind" not in given:
        raise GraphoptError(
            f"expected {', '.join(KINDS)}, auto, or {{kind: ..., FIELD: VALUE, ...}}, found {description!r}"
        )
    kind = KINDS.get(str(given["kind"]))
    if kind is None:
        raise GraphoptError(unknown("kind", str(given["kind"]), [*KINDS, "auto"]))
    options = {str(name): value for name, value in given.items() if name != "kind"}
    known = [x.name for x in fields(kind) if x.repr or has_learnt]
    for name in options:
        if name not in known:
            raise GraphoptError(unknown("field", name, known))
    return kind(**options)


def is_missing(value: object) -> bool:
    """Return whether a cell is empty: None, NaN, NaT, pandas' NA, or a text without characters."""
    if isinstance(value, str):
        return not value
    return value is None or str(value) in ("nan", "NaN", "NaT", "<NA>")


def suits(parse: Callable[[str], object], text: str) -> bool:
    """Return whether a function can read a text."""
    try:
        parse(text)
    except (ValueError, OverflowError):
        return False
    return True


def _parsed_cells(values: np.ndarray, parse: Callable[[object], float], expected: str) -> np.ndarray:
    """Return cells as numbers, or raise an error that names the first row that is none."""
    numbers = np.empty(len(values))
    for i, value in enumerate(values.tolist() if values.dtype != object else values):
        try:
            numbers[i] = parse(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise GraphoptError(f"row {i}: expected {expected}, found {str(value)!r}") from error
    return numbers


def parsed_number(value: object) -> float:
    if value is None:
        return np.nan
    if isinstance(value, int | float):
        return float(value)
    text = str(value)
    if len(text) > LONGEST_CELL or "_" in text:  # which Python skips
        raise ValueError
    return np.nan if text.lower() in MISSING else float(text)


def cell_text(value: Any) -> str:
    """Return a value as the text of a category: a whole number without a point."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes) or np.ndim(value):
        raise GraphoptError(f"expected text or numbers, found {type(value).__name__}")
    whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if whole else str(value)


def _category_order(text: str) -> tuple[object, ...]:
    """Order numbers by size, then texts, then the missing value."""
    if suits(parsed_number, text) and text.lower() not in MISSING:
        return 0, float(text), text
    return (1, text) if text else (2, text)


def _check_texts(categories: Sequence[str], most: int) -> None:
    if len(categories) > most:
        raise GraphoptError(
            f"expected at most {most:,} categories, found {len(categories):,}: raise most, or leave it out"
        )
    for text in categories:
        if len(text) > LONGEST_CELL or "\0" in text or not suits(str.encode, text):
            raise GraphoptError(
                f"expected categories of at most {LONGEST_CELL:,} characters of Unicode without NUL, found "
                f"{text[:40]!r} of {len(text):,}: leave the column out"
            )


def _check_some(what: str, values: np.ndarray) -> None:
    if not len(values):
        raise GraphoptError(f"expected {what}, found none in the rows to learn from: leave the column out")


def _refuse_option(column: Column, name: str, expected: str, found: object) -> NoReturn:
    raise GraphoptError(f"{type(column).__name__}({name}=...): expected {expected}, found {found!r}")
