"""Print lines that fit a terminal, and plain ones elsewhere."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from graphopt.errors import escaped

if TYPE_CHECKING:
    from rich.console import Console

_GLUE = "\N{NO-BREAK SPACE}"  # in a line that is yet to be broken
_ASKED = ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")  # variables that say what the output is
_NARROWEST = 20  # columns of a text beside its indent


def open_console(*, quiet: bool = False, width: int | None = None) -> Console:
    """Return a console of the process, which escapes control characters of texts.

    A program such as mpiexec reads from a terminal without a size.

    Args:
        quiet: print nothing.
        width: the columns of a line; None for those of the terminal.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        def render(self, *what: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*what, **options):
                yield segment if segment.control else segment._replace(text=escaped(segment.text, keep="\n"))

    return Plain(quiet=quiet, width=width, force_terminal=None if _is_asked() or _is_sized() else False)


def is_watched() -> bool:
    """Return whether the output is a terminal, other than that of a worker of mpiexec, or a notebook."""
    return (sys.stdout.isatty() and _is_sized()) or "ipykernel" in sys.modules


def glued(text: str) -> str:
    """Return text that `broken` keeps in one line."""
    return text.replace(" ", _GLUE)


def broken(text: str, width: int, indent: int) -> str:
    """Break a line between words; the lines after the first one are indented."""
    if len(text) > width:
        lines = textwrap.wrap(
            text,
            width,
            subsequent_indent=" " * min(indent, max(0, width - _NARROWEST)),
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = "\n".join(line.rstrip() for line in lines)
    return text.replace(_GLUE, " ")


def print_line(console: Console, text: str, indent: int = 2, *, style: str | None = None) -> None:
    """Print a line, broken between words if a terminal is narrower."""
    text = escaped(text, keep=_GLUE)
    text = broken(text, console.width, indent) if console.is_terminal else text.replace(_GLUE, " ")
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def _is_asked() -> bool:
    """Return whether the environment says what the output is."""
    return any(name in os.environ for name in _ASKED)


def _is_sized() -> bool:
    """Return whether the output is a terminal with a size, or none at all."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):
        return True
