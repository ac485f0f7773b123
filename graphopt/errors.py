"""The error that graphopt raises for anything a user can mend."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class GraphoptError(ValueError):
    """Report what a user can correct, in one line: the thing, what was expected, what was found, what to do.

    Characters of file names that no terminal shows are escaped.

    >>> try:
    ...     graphopt.load("missing.onnx")
    ... except graphopt.GraphoptError as error:
    ...     print("missing.onnx" in str(error))
    True
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


@dataclass(frozen=True)
class Lacking:
    """An operator without a gradient: its nodes, the parameters that they block, and why it has none, where known."""

    domain: str
    op_type: str
    nodes: tuple[str, ...]
    blocks: tuple[str, ...]
    reason: str | None = None

    @property
    def operator(self) -> str:
        """The operator's name, with its domain."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    def __str__(self) -> str:
        blocks = f"; blocks {_quoted(self.blocks)}" if self.blocks else ""
        reason = f"; {self.reason}" if self.reason else ""
        return f"{self.operator} (nodes {_quoted(self.nodes)}{blocks}{reason})"


class NoGradient(GraphoptError):
    """Operators on the way from the parameters to the objective have no gradient."""

    def __init__(self, lacking: Sequence[Lacking], remedy: str = "register rules") -> None:
        self.lacking = lacking
        super().__init__(
            f"no gradient rule for {'; '.join(map(str, lacking))}: {remedy} or freeze the parameters that they block"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def line(error: BaseException) -> str:
    """Return an error of a library as one line."""
    return " ".join(str(error).split())


def root(error: BaseException) -> BaseException:
    """Return what an error was caused by, first of all."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def cause(error: BaseException) -> str:
    """Return what an error of a library was caused by, first of all, as one line."""
    return line(root(error))


def unknown(kind: str, name: str, names: Iterable[object]) -> str:
    """Return the line that refuses `name` and lists the `names` that exist."""
    return f"unknown {kind} {name!r}; known: {', '.join(sorted(map(str, names))) or 'none'}"
