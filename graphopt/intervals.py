"""Check that the numeric options of a pass lie in their intervals."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from graphopt.errors import GraphoptError

_KEY = "interval"


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


_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    str: "a word",
    os.PathLike: "a path",
    Mapping: "a mapping",
    tuple: "a sequence",
    type(None): "None",
}
_ALIKE: dict[Any, tuple[type, ...]] = {int: (np.integer,), bool: (np.bool_,), tuple: (list,)}


def check_types(options: Any, owner: str | None = None) -> None:
    """Raise an error unless fields of a dataclass that are declared as flags, words, paths or the like are such.

    Whole numbers with an interval are left to `check_intervals`, and fields of other types to their owner.

    Args:
        owner: what the options belong to, for the message; by default, the dataclass.
    """
    kind: Any = type(options)
    for name, (kinds, words) in _declared(kind).items():
        value = getattr(options, name)
        if not isinstance(value, kinds):
            raise GraphoptError(
                f"{owner or kind.__name__}({name}={value!r}): expected {words}, found {value!r}"
            )
        for x in value if isinstance(value, list | tuple) and name in _of_words(kind) else ():
            if not isinstance(x, str):
                raise GraphoptError(
                    f"{owner or kind.__name__}({name}={value!r}): expected words, found {x!r}"
                )


@functools.cache
def _declared(kind: Any) -> dict[str, tuple[tuple[type, ...], str]]:
    """Return the classes of the fields that `check_types` checks, and these classes in words."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # a type that is imported for annotations only
        return {}
    found = {}
    for field in dataclasses.fields(kind):
        parts = [_class_of(part) for part in _parts(hints[field.name])]
        is_number = _KEY in field.metadata and int in parts
        if field.init and not is_number and all(part in _WORDS for part in parts):
            alike = [other for part in parts for other in _ALIKE.get(part, ())]
            *words, last = dict.fromkeys(_WORDS[part] for part in parts)
            found[field.name] = (*parts, *alike), " or ".join([", ".join(words), last] if words else [last])
    return found


@functools.cache
def _of_words(kind: Any) -> set[str]:
    """Return the names of the fields whose sequences hold nothing but words."""
    found = set()
    for name, hint in typing.get_type_hints(kind).items():
        items = [typing.get_args(part) for part in _parts(hint) if typing.get_origin(part) in (list, tuple)]
        if items and all({*one} <= {str, ...} for one in items):
            found.add(name)
    return found


def _parts(hint: Any) -> Iterable[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [part for one in typing.get_args(hint) for part in _parts(one)] if is_union else [hint]


def _class_of(hint: Any) -> Any:
    """Return the class of a type: that of a list is a sequence's, and that of a choice of words, a word's."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        kinds = {type(word) for word in typing.get_args(hint)}
        return kinds.pop() if len(kinds) == 1 else None
    return {list: tuple, None: hint}.get(origin, origin)


def _numbers(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def _lies_in(number: Any, interval: str) -> bool:
    if not isinstance(number, Real) or isinstance(number, bool):
        return False
    try:
        number = float(number)
    except OverflowError:
        return False
    low, high = map(float, interval[1:-1].split(","))
    above = low <= number if interval[0] == "[" else low < number
    below = number <= high if interval[-1] == "]" else number < high
    return above and below
