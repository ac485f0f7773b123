"""Check values by annotations: options in Python, the fields of recipes in YAML, and those of notes in JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from graphopt.errors import GraphoptError
from graphopt.intervals import KEY

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PLAIN = (bool, int, float, str, type(None))
_UNRESOLVED = (AttributeError, NameError, TypeError)
_UNIONS = (typing.Union, types.UnionType)
_WORDS: dict[object, str] = {
    bool: "True or False",
    int: "a whole number",
    str: "a word",
    os.PathLike: "a path",
    Mapping: "a mapping",
    tuple: "a sequence",
    type(None): "None",
}
_ALIKE: dict[object, tuple[type, ...]] = {int: (np.integer,), bool: (np.bool_,), tuple: (list,)}


def hints(target: Any, *, include_extras: bool = False) -> dict[str, object]:
    """Return the types of the fields of a dataclass, or of the arguments of a class or a function.

    Leave out those of a dataclass that do not resolve; of others, return none then.
    """
    if dataclasses.is_dataclass(options := getattr(target, "Options", None)):
        target = options
    is_plain_class = inspect.isclass(target) and not dataclasses.is_dataclass(target)
    try:
        return typing.get_type_hints(target.__init__ if is_plain_class else target, None, None, include_extras)
    except _UNRESOLVED:  # types that are imported for annotations only, or a user's
        found: dict[str, object] = {}
    for base in reversed(target.__mro__) if inspect.isclass(target) and not is_plain_class else ():
        for name, hint in inspect.get_annotations(base).items():
            found.pop(name, None)
            field, names = type(name, (), {"__annotations__": {name: hint}}), vars(sys.modules[base.__module__])
            with contextlib.suppress(*_UNRESOLVED):
                found |= typing.get_type_hints(field, names, None, include_extras)
    return found


def alternatives(hint: object) -> list[object]:
    """Return the types of a union, also of one in a union; of another type, the type; without what annotates them."""
    if typing.get_origin(hint) is Annotated:
        return alternatives(typing.get_args(hint)[0])
    is_union = typing.get_origin(hint) in _UNIONS
    return [part for one in typing.get_args(hint) for part in alternatives(one)] if is_union else [hint]


def read_value(value: object, hint: object, other: Callable[[Any, Any], object]) -> Any:
    """Return a value of YAML or JSON as its type has it: a list becomes a tuple.

    Args:
        other: returns the value of a type that YAML and JSON do not have, or raises one of these errors.

    Raises:
        TypeError: the value has another type.
        ValueError: the value has another form.
    """
    if hint is Any or type(value) is hint or (hint, type(value)) == (float, int):
        return value
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return read_value(value, parts[0], other)
    if origin in _UNIONS:
        for part in parts:
            with contextlib.suppress(TypeError, ValueError):
                return read_value(value, part, other)
        raise TypeError
    kind = origin if inspect.isclass(origin) else object
    if origin is Literal and any(value == word and type(value) is type(word) for word in parts):
        return value
    if issubclass(kind, Mapping) and isinstance(value, Mapping):
        return {parts[0](key): read_value(item, parts[1], other) for key, item in value.items()}
    if issubclass(kind, Sequence) and isinstance(value, list):
        kinds = [*parts] if kind is tuple and parts[-1] is not ... else [parts[0]] * len(value)
        return tuple(read_value(item, part, other) for item, part in zip(value, kinds, strict=True))
    if hint in _PLAIN or origin is Literal or issubclass(kind, Mapping | Sequence):
        raise TypeError
    return other(value, hint)


def check_options(options: Any, owner: str | None = None) -> None:
    """Raise an error unless numbers lie in their intervals, words are among the choices, and others have their types.

    Fields of other types are left to their owner.

    Args:
        owner: what the options belong to, for the message; by default, the dataclass.
    """
    check_intervals(options, owner)
    kind: Any = type(options)
    for name, (kinds, words, are_words, choices) in _declared(kind).items():
        value = getattr(options, name)
        if choices and value not in choices:
            raise _wrong(options, owner, name, _either([*map(repr, choices)]), value)
        if not isinstance(value, kinds):
            raise _wrong(options, owner, name, words, value)
        for x in value if are_words and isinstance(value, list | tuple) else ():
            if not isinstance(x, str):
                raise _wrong(options, owner, name, "words", x)


def check_intervals(options: DataclassInstance, owner: str | None = None) -> None:
    """Raise an error unless the fields of a dataclass lie in their intervals; see `check_options`."""
    for field in dataclasses.fields(options):
        if KEY in field.metadata and (value := getattr(options, field.name)) != field.default:
            for number in field.metadata[KEY].outside(value)[:1]:
                raise _wrong(options, owner, field.name, field.metadata[KEY], number)


def _wrong(options: object, owner: str | None, name: str, expected: object, found: object) -> GraphoptError:
    place = f"{owner or type(options).__name__}({name}={getattr(options, name)!r})"
    return GraphoptError(f"{place}: expected {expected}, found {found!r}")


@functools.cache
def _declared(kind: Any) -> dict[str, tuple[tuple[type, ...], str, bool, list[object]]]:
    """Return the fields that are checked: their classes, these in words, whether sequences hold words, and choices."""
    found, known = {}, hints(kind)
    for field in dataclasses.fields(kind):
        parts = alternatives(known.get(field.name, Any))
        classes = [_class_of(part) for part in parts]
        is_number = KEY in field.metadata and int in classes
        if field.init and not is_number and all(part in _WORDS for part in classes):
            alike = [other for part in classes for other in _ALIKE.get(part, ())]
            items = [typing.get_args(part) for part in parts if typing.get_origin(part) in (list, tuple)]
            are_words = bool(items) and all({*one} <= {str, ...} for one in items)
            choices = [word for part in parts for word in typing.get_args(part) if typing.get_origin(part) is Literal]
            choices += [None] if choices and type(None) in classes else []
            are_choices = all(typing.get_origin(part) is Literal or part is type(None) for part in parts)
            text = _either([*dict.fromkeys(_WORDS[part] for part in classes)])
            found[field.name] = (*classes, *alike), text, are_words, choices if are_choices else []
    return found


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _class_of(hint: object) -> Any:
    """Return the class of a type: that of a list is a sequence's, and that of a choice of words, a word's."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        kinds = {type(word) for word in typing.get_args(hint)}
        return kinds.pop() if len(kinds) == 1 else None
    return {list: tuple, None: hint}.get(origin, origin)
