"""The error that graphopt raises for anything a user can mend."""

from collections.abc import Iterable


class GraphoptError(ValueError):
    """One line: the thing, what was expected, what was found, what to do."""


def known(kind: str, name: str, names: Iterable[object]) -> str:
    """Return the line that refuses `name` and lists the `names` that exist."""
    return f"unknown {kind} {name!r}; known: {', '.join(sorted(map(str, names))) or 'none'}"
