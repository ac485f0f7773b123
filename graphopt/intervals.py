"""Declare the intervals of numeric options, which are checked when a pass is created."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import Any

KEY = "interval"  # in the metadata of a field


@dataclasses.dataclass(frozen=True)
class Interval:
    """Describe the numbers that a field accepts, alone or in a sequence or a mapping; see `within`."""

    text: str
    whole: bool
    choices: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        return f"a {'whole ' * self.whole}number in {self.text}"

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the least and the largest number, of which the text says whether they are included."""
        low, high = map(float, self.text[1:-1].split(","))
        return low, high

    def outside(self, value: object) -> list[object]:
        """Return what of a value lies outside."""
        items = [*value.values()] if isinstance(value, Mapping) else value
        items = items if isinstance(items, list | tuple) else [items]
        return [] if value in self.choices else [x for x in items if not self._contains(x)]

    def _contains(self, number: object) -> bool:
        if not isinstance(number, Real) or isinstance(number, bool):
            return False
        try:
            x = float(number)
        except OverflowError:
            return False
        low, high = self.bounds
        above = low <= x if self.text[0] == "[" else low < x
        below = x <= high if self.text[-1] == "]" else x < high
        return above and below and (not self.whole or x.is_integer())


def within(
    interval: str,
    default: Any,
    *,
    whole: bool | None = None,
    kw_only: bool = False,
    choices: tuple[str | None, ...] = (),
) -> Any:
    """Return a dataclass field for a number in an interval, or for a sequence or mapping of such numbers.

    Args:
        interval: the interval, such as `[0, 1)` for 0 or more and less than 1. `inf]` includes infinity; `inf)` does
            not.
        default: a number, None, a default factory, or MISSING for none. The default itself is not checked.
        whole: require whole numbers; by default, if the default is a whole number.
        choices: words, or None, that may stand for numbers.
    """
    whole = isinstance(default, int) if whole is None else whole
    metadata = {KEY: Interval(interval, whole, choices)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata, kw_only=kw_only)
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)
