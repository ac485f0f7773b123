"""Bound the size of a recipe, as text and with its references resolved: thirty lines can expand to gigabytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphopt.errors import GraphoptError, cause
from graphopt.files import check_plain, read_file

MOST_BYTES = 100_000  # that a recipe may have; graphopt's largest has 6,000
MOST_LEVELS = 50  # of a recipe's mappings and lists
MEASURING = -1  # the size of a field while it is measured
_MOST_PARTS = 100_000  # characters and values of a resolved recipe; graphopt's own has a few thousand

# A field, or a resolver's name and arguments, without characters that could hide another reference.
_REFERENCE = re.compile(r"""\$\{([^${}()\\"':]*)(:[^${}()\\"']*)?\}""")
ESCAPED = re.compile(r"(?<!\\)(\\\\)*\\\$\{")

Fields = Mapping[str, Any]  # a recipe, or a part of one
_Path = tuple[str | int, ...]


def read_config(path: Path) -> Any:
    """Return the content of a file of a run in YAML, which anyone may have written.

    Raises:
        GraphoptError: there is no such file, it is a link, or its text is refused.
    """
    try:
        text = read_file(path, MOST_BYTES)
        check_text(path, text)
        config = OmegaConf.create(text.decode())
        check_expansion(config)
        content = plain_of(config)
    except GraphoptError:
        raise
    except OSError as error:
        raise GraphoptError(f"{path}: expected the recipe of a run: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise GraphoptError(f"{path}: expected the recipe of a run: {cause(error)}") from error
    check_plain(content, str(path))
    return content


def plain_of(config: Container) -> Any:
    """Return a config as nested mappings and lists, whose references are not resolved."""
    return OmegaConf.to_container(config, resolve=False)


def flattened(node: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf of nested mappings and lists, including empty ones."""
    if isinstance(node, DictConfig | ListConfig):
        node = plain_of(node)
    items: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    if not items:
        yield path, node
    for key, value in items:
        yield from flattened(value, f"{path}.{key}" if path else str(key))


def check_text(file: str | PathLike[str], text: bytes) -> None:
    """Raise an error if a recipe is large or deep, or has YAML aliases: few lines can expand without end."""
    if len(text) > MOST_BYTES:
        raise GraphoptError(f"{file}: expected a recipe of at most {MOST_BYTES:,} bytes, found more")
    depth = 0
    try:
        for event in yaml.parse(text.decode()):
            if isinstance(event, yaml.AliasEvent):
                raise GraphoptError(f"{file}: expected a recipe without YAML aliases, found one")
            if isinstance(event, yaml.ScalarEvent) and not depth and event.value:
                raise GraphoptError(f"{file}: expected a mapping or a list, found {event.value[:80]!r}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_LEVELS:
                raise GraphoptError(f"{file}: expected mappings and lists of at most {MOST_LEVELS} levels, found more")
    except UnicodeDecodeError as error:
        raise GraphoptError(f"{file}: expected text in UTF-8, found byte {error.start:,}, which is not") from error
    except yaml.reader.ReaderError as error:
        raise GraphoptError(f"{file}: expected YAML, found the character {chr(error.character)!r}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f" in line {mark.line + 1}"
        raise GraphoptError(f"{file}: expected YAML, found{line} what is not: {error.problem}") from error


def check_expansion(config: DictConfig | ListConfig) -> None:
    """Raise an error if a config would be too large once its references are resolved."""
    _Measure(plain_of(config)).size(())


class _Measure:
    """Measure a config's fields, with everything that they refer to, in characters and values."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._sizes: dict[_Path, int] = {}

    def size(self, path: _Path) -> int:
        if path not in self._sizes:
            self._sizes[path] = MEASURING
            value = self._at(path)
            size = 1 + (len(value) if isinstance(value, str) else 0)
            for part in self._parts(path, value):
                size += self.size(part)
                if size > _MOST_PARTS:
                    raise _wrong_field(
                        path,
                        f"at most {_MOST_PARTS:,} characters and values once its references are resolved, found more",
                    )
            self._sizes[path] = size
        elif self._sizes[path] == MEASURING:
            raise _wrong_field(path, "a value that does not refer to itself, found one that does")
        return self._sizes[path]

    def _at(self, path: _Path) -> Any:
        node = self._root
        for key in path:
            node = node[key]
        return node

    def _parts(self, path: _Path, value: object) -> Iterator[_Path]:
        """Yield the paths of a value's members, or of the fields that its text refers to."""
        if isinstance(value, dict):
            yield from ((*path, key) for key in value)
        elif isinstance(value, list):
            yield from ((*path, i) for i in range(len(value)))
        elif isinstance(value, str) and value.count("${") > len(ESCAPED.findall(value)):
            yield from self._references(path, value)

    def _references(self, path: _Path, text: str) -> Iterator[_Path]:
        """Yield the paths that a text refers to, from the innermost reference to the outermost."""
        while reference := _REFERENCE.search(text):
            name, arguments = reference.groups()
            fields = [name] if arguments is None else arguments[1:].split(",")
            targets = [target for field in fields if (target := self._target(path, field.strip())) is not None]
            yield from targets
            plain = self._at(targets[0]) if arguments is None and targets else None
            is_part = "${" in text[: reference.start()]  # this reference is part of the name in another one
            if is_part and (isinstance(plain, dict | list | None) or "${" in str(plain)):
                break
            text = f"{text[: reference.start()]}{plain if is_part else ''}{text[reference.end() :]}"
        if "${" in text:
            raise _wrong_field(path, f"references such as ${{fit.seed}}, found {self._at(path)[:80]!r}")

    def _target(self, path: _Path, field: str) -> _Path | None:
        """Return the path of a field from its name, absolute as `a.b[0]` or relative as `..b`."""
        names = field.lstrip(".")
        ups = len(field) - len(names)
        if not field:
            return None
        target = path[: max(len(path) - ups, 0)] if ups else ()
        for name in re.findall(r"[^.\[\]]+", names):
            node = self._at(target)
            if isinstance(node, str):  # a reference to a parent of the field
                return target
            keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            key = next((key for key in keys if str(key) == name), None)
            if key is None:
                return None
            target = (*target, key)
        return target


def _wrong_field(path: _Path, expected: str) -> GraphoptError:
    return GraphoptError(f"{'.'.join(map(str, path)) or 'recipe'}: expected {expected}")
