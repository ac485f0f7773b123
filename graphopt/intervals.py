"""Check that the numeric options of a pass lie in their intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from graphopt.errors import GraphoptError

_KEY = "interval"


def within(
    interval: str,
    default: Any,
    *,
    whole: bool | None = None,
    kw_only: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field for a number in an interval, or for a sequence or mapping of such numbers.

    Args:
        interval: the interval, such as `[0, 1)` for 0 or more and less than 1. `inf]` includes infinity; `inf)` does
            not.
        default: a number, None, a default factory, or MISSING for none. The default itself is not checked.
        whole: require whole numbers; by default, if the default is a whole number.
        choices: words that may stand for numbers.
    """
    whole = isinstance(default, int) if whole is None else whole
    metadata = {_KEY: (interval, whole, choices)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata, kw_only=kw_only)
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


def check_intervals(options: Any, *, owner: str | None = None) -> None:
    """Raise an error unless the fields of a dataclass lie in their intervals.

    Args:
        owner: what the options belong to, for the message; by default, the dataclass.
    """
    owner = owner or type(options).__name__
    for field in dataclasses.fields(options):
        if _KEY in field.metadata:
            value = getattr(options, field.name)
            interval, whole, choices = field.metadata[_KEY]
            for number in () if value == field.default or value in choices else _numbers(value):
                if not _lies_in(number, interval) or (whole and number != int(number)):
                    kind = "a whole number" if whole else "a number"
                    raise GraphoptError(
                        f"{owner}({field.name}={value!r}): expected {kind} in {interval}, found {number!r}"
                    )


def _numbers(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def _lies_in(number: Any, interval: str) -> bool:
    if not isinstance(number, Real):
        return False
    try:
        number = float(number)
    except OverflowError:
        return False
    low, high = map(float, interval[1:-1].split(","))
    above = low <= number if interval[0] == "[" else low < number
    below = number <= high if interval[-1] == "]" else number < high
    return above and below
