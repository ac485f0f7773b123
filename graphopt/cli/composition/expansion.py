"""Bound the size of a recipe before its references are resolved: thirty lines can expand to gigabytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from graphopt.errors import GraphoptError

MEASURING = -1
MOST = 100_000  # characters and values of a resolved recipe; graphopt's own has a few thousand

# A field, or a resolver's name and arguments, without characters that could hide another reference.
REFERENCE = re.compile(r"""\$\{([^${}()\\"':]*)(:[^${}()\\"']*)?\}""")
ESCAPED = re.compile(r"(?<!\\)(\\\\)*\\\$\{")

Path = tuple[Any, ...]


def check_expansion(config: DictConfig) -> None:
    """Raise an error if a config would be too large once its references are resolved."""
    _Measure(OmegaConf.to_container(config, resolve=False)).size(())


class _Measure:
    """Measure a config's fields, with everything that they refer to, in characters and values."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._sizes: dict[Path, int] = {}

    def size(self, path: Path) -> int:
        if path not in self._sizes:
            self._sizes[path] = MEASURING
            value = self._at(path)
            size = 1 + (len(value) if isinstance(value, str) else 0)
            for part in self._parts(path, value):
                size += self.size(part)
                if size > MOST:
                    raise _wrong(
                        path,
                        f"at most {MOST:,} characters and values once its references are resolved, found more",
                    )
            self._sizes[path] = size
        elif self._sizes[path] == MEASURING:
            raise _wrong(path, "a value that does not refer to itself, found one that does")
        return self._sizes[path]

    def _at(self, path: Path) -> Any:
        node = self._root
        for key in path:
            node = node[key]
        return node

    def _parts(self, path: Path, value: Any) -> Iterator[Path]:
        """Yield the paths of a value's members, or of the fields that its text refers to."""
        if isinstance(value, dict):
            yield from ((*path, key) for key in value)
        elif isinstance(value, list):
            yield from ((*path, i) for i in range(len(value)))
        elif isinstance(value, str) and value.count("${") > len(ESCAPED.findall(value)):
            yield from self._references(path, value)

    def _references(self, path: Path, text: str) -> Iterator[Path]:
        """Yield the paths that a text refers to, from the innermost reference to the outermost."""
        while found := REFERENCE.search(text):
            name, arguments = found.groups()
            fields = [name] if arguments is None else arguments[1:].split(",")
            targets = [
                target for field in fields if (target := self._target(path, field.strip())) is not None
            ]
            yield from targets
            plain = self._at(targets[0]) if arguments is None and targets else None
            is_part = "${" in text[: found.start()]  # this reference is part of the name in another one
            if is_part and (isinstance(plain, dict | list | None) or "${" in str(plain)):
                break
            text = f"{text[: found.start()]}{plain if is_part else ''}{text[found.end() :]}"
        if "${" in text:
            raise _wrong(path, f"references such as ${{fit.seed}}, found {self._at(path)[:80]!r}")

    def _target(self, path: Path, field: str) -> Path | None:
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


def _wrong(path: Path, expected: str) -> GraphoptError:
    return GraphoptError(f"{'.'.join(map(str, path)) or 'recipe'}: expected {expected}")
