"""Define the error that graphopt raises for everything that a user can correct."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST = 2_000  # characters of a message
LONGEST_WORD = 200  # characters of a word, or of a text in quotes
LONG = re.compile(rf"(?<=')[^']{{{LONGEST_WORD},}}(?=')|[^\s']{{{LONGEST_WORD},}}")
CUT = "..."


class GraphoptError(ValueError):
    """Report a mistake that you can correct, in one line: the thing, what was expected and found, what to do.

    Unprintable characters, for example in file names, are escaped. Long names and values are cut in the middle.

    >>> try:
    ...     graphopt.load("missing.onnx")
    ... except graphopt.GraphoptError as error:
    ...     print("missing.onnx" in str(error))
    True
    """

    def __init__(self, message: str) -> None:
        text = shortened(message)
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


@dataclass(frozen=True)
class BlockingOperator:
    """Describe an operator without a gradient: its nodes, the parameters that they block, and the reason if known."""

    domain: str
    op_type: str
    nodes: tuple[str, ...]
    blocks: tuple[str, ...]
    reason: str | None = None

    @property
    def operator(self) -> str:
        """Return the operator's name with its domain."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    def __str__(self) -> str:
        blocks = f"; blocks {_quoted(self.blocks)}" if self.blocks else ""
        reason = f"; {self.reason}" if self.reason else ""
        return f"{self.operator} (nodes {_quoted(self.nodes)}{blocks}{reason})"


class NoGradient(GraphoptError):
    """Report operators between the parameters and the objective that have no gradient."""

    def __init__(self, operators: Sequence[BlockingOperator], remedy: str = "register rules") -> None:
        self.operators = operators
        super().__init__(
            f"no gradient rule for {'; '.join(map(str, operators))}: {remedy} or freeze the parameters that they block"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def shortened(message: str) -> str:
    """Return a message in which each long word or quoted text, and then the whole, is cut in the middle.

    >>> len(shortened("unknown field '" + 10**5 * "a" + "': remove it"))
    227
    """
    if len(message) <= LONGEST_WORD:
        return message
    text = LONG.sub(lambda match: _cut(match[0], LONGEST_WORD), message)
    return _cut(text, LONGEST)


def _cut(text: str, most: int) -> str:
    """Return the start and the end of a text that is longer than `most` characters."""
    rest = most - len(CUT)
    return text if len(text) <= most else f"{text[: rest - rest // 2]}{CUT}{text[-(rest // 2) :]}"


def line(error: BaseException) -> str:
    """Return a library's error message as one line."""
    return " ".join(str(error).split())


def root(error: BaseException) -> BaseException:
    """Return the first error in the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def cause(error: BaseException) -> str:
    """Return the message of the first error in the chain of causes as one line."""
    return line(root(error))


def unknown(kind: str, name: str, names: Iterable[object]) -> str:
    """Return an error message for an unknown `name` that lists the known `names`."""
    return f"unknown {kind} {name!r}; known: {', '.join(sorted(map(str, names))) or 'none'}"


def some(texts: Sequence[str], most: int = 3) -> str:
    """Return the first of several texts, and the number of the others."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
