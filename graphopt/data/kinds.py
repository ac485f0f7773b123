"""Find the kind of column that suits cells, and the options that read texts written in another way."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from graphopt.data.columns import (
    LONGEST_CELL,
    MISSING,
    SEPARATORS,
    Category,
    Column,
    Date,
    Number,
    parsed_number,
    suits,
)
from graphopt.errors import GraphoptError

_CODE = re.compile(r"[+-]?0\d+")  # a number that would lose its zeros
_FEW_VALUES = 20  # different ones, whatever the number of rows
_AFFIX = r"[^\d\s.,'\u2019+-]+"
_WITH_UNIT = re.compile(rf"[+-]?\s*({_AFFIX})?\s*[+-]?\d[\d\s.,'\u2019]*?\s*({_AFFIX})?")
_CURRENCIES = (
    *("USD", "EUR", "GBP", "CHF", "JPY", "CNY", "INR", "CAD", "AUD"),
    *("NZD", "SEK", "NOK", "DKK", "PLN", "CZK", "BRL", "MXN", "ZAR"),
)
_POINTED = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})?")  # below 1,000, or of thousands with a point
_DATES = (
    *(
        form.replace("/", separator)
        for form in ("%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d/%b/%Y", "%d/%m/%y", "%m/%d/%y")
        for separator in "/.-"
    ),
    *("%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y"),
)
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")  # which may follow a date


class Unread(GraphoptError):
    """Report texts that options of a column read; `ways` are the descriptions of such columns."""

    def __init__(self, message: str, ways: Sequence[str]) -> None:
        super().__init__(message)
        self.ways = ways


def inferred(values: np.ndarray, name: str) -> Column:
    """Return the kind of column that suits cells: numbers, dates, or few different values.

    Args:
        name: the name of the column, for a warning.

    Raises:
        Unread: options of a column read them.
        GraphoptError: no kind suits them.
    """
    if values.dtype.kind in "iuf":
        return Number()
    if values.dtype.kind == "M":
        return Date()
    cells = Category().read(values).tolist()
    different = Counter(cells)
    missing = different.pop("", 0)
    if not different:
        raise GraphoptError("expected values, found none")
    texts = [text for text in different if text.lower() not in MISSING]
    numbers = {text for text in texts if suits(parsed_number, text)}
    is_boolean = not {*texts} - {"True", "False", "true", "false"}
    are_codes = any(map(is_code, texts))
    if texts and len(numbers) == len(texts) and not is_boolean and not are_codes:
        if values.dtype == object and all(isinstance(x, str) for x in values.tolist()):
            check_points(texts, name)
        return Number()
    if texts and all(suits(Date().day, text) for text in texts):
        return Date()
    column, count = Category(), len(values) - missing
    are_many = len(different) > max(_FEW_VALUES, min(column.most, count // 2))
    if ways := written_as(texts, any_unit=are_many):
        plain = "dates such as 2026-11-26" if "date" in ways[0] else "plain numbers"
        raise Unread(f"expected {plain}, found {texts[0]!r}", ways)
    if 2 * len(numbers) > len(texts) > _FEW_VALUES and not are_codes:
        odd = next(text for text in texts if text not in numbers)
        raise GraphoptError(f"row {cells.index(odd)}: expected a number, as in most rows, found {odd!r}: mend it")
    if are_many:
        raise GraphoptError(f"expected few different values, found {len(different):,} in {count:,} rows")
    return column


def is_code(text: str) -> bool:
    """Return whether a text would lose zeros as a number, as a zip code or an article number does."""
    return _CODE.fullmatch(text) is not None


def written_as(texts: Sequence[str], *, any_unit: bool = False) -> list[str]:
    """Return the descriptions of columns that read all of these texts, which are no plain numbers and ISO dates.

    Each has been tried on all texts. Two of them read different values.

    Args:
        texts: the texts, without missing ones.
        any_unit: also propose units after a number that are neither a percent sign nor a currency.
    """
    if any(map(is_code, texts)) or all(suits(parsed_number, text) for text in texts):
        return []
    ways: dict[tuple[float, ...], str] = {}
    candidates: list[Number | Date] = [*_numbers(texts[0], any_unit), *_dates(texts[0])]
    for column in candidates:
        parse = column.parsed if isinstance(column, Number) else column.day
        if all(suits(parse, text) for text in texts):
            ways.setdefault(tuple(map(parse, texts)), column.described())
    return [*ways.values()]


def remedy(values: np.ndarray, expected: str) -> str:
    """Return how texts are read that a column refuses, as the end of its error, or nothing if no option reads them.

    Args:
        expected: the kind of the column: `number` or `date`.
    """
    texts = {x for x in values.tolist() if isinstance(x, str) and x.lower() not in MISSING}
    ways = [way for way in written_as(sorted(texts), any_unit=True) if way.startswith(f"{{kind: {expected}")]
    return f": it is {' or '.join(ways)}" if ways else ""


def _numbers(text: str, any_unit: bool) -> Iterator[Number]:
    """Yield columns of numbers that may read a text."""
    found = _WITH_UNIT.fullmatch(text)
    units = [] if found is None or len(text) > LONGEST_CELL else [unit for unit in found.groups() if unit]
    is_after = any_unit and found is not None and not found[1]  # a name such as A12 is no number
    known = len(units) < 2 and (is_after or all(map(_is_known_unit, units)))
    for decimal in ".," if found is not None and known else "":
        for thousands in (None, *(mark for mark in SEPARATORS if mark != decimal)):
            yield Number(decimal=decimal, thousands=thousands, unit=units[0] if units else None)  # type: ignore[arg-type]


def _is_known_unit(unit: str) -> bool:
    return unit in _CURRENCIES or all(x in "%\u2030" or unicodedata.category(x) == "Sc" for x in unit)


def _dates(text: str) -> Iterator[Date]:
    """Yield columns of dates that may read a text."""
    if len(text) <= max(map(len, _DATES)) + max(map(len, _TIMES)) + len("September"):
        for date in _DATES:
            for time in _TIMES:
                if suits((column := Date(format=date + time)).day, text):
                    yield column


def check_points(texts: Collection[str], name: str) -> None:
    """Raise an error if points in texts may group thousands: whole numbers below 1,000 beside numbers such as 1.500.

    Warn if all numbers are such as 1.500.

    Raises:
        Unread: there are both.
    """
    pointed = [text for text in texts if "." in text]
    if not pointed or not all(map(_POINTED.fullmatch, texts)):
        return
    way = Number(decimal=",", thousands=".").described()
    if len(pointed) < len(texts):
        raise Unread(
            f"expected points that begin fractions, or that group thousands, found {pointed[0]!r} beside whole numbers",
            ["number", way],
        )
    if len(pointed) >= _FEW_VALUES:
        warnings.warn(
            f"column {name!r}: {pointed[0]!r} is read as {float(pointed[0]):g}: if points group thousands, "
            f"columns={{*: auto, {name}: {way}}}",
            stacklevel=2,
        )
