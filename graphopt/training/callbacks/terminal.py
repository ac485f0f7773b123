"""Print lines that fit a terminal, and plain ones elsewhere."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_GLUE = "\N{NO-BREAK SPACE}"  # in a line that is yet to be broken
_ASKED = ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")  # variables that say what the output is
_NARROWEST = 20  # columns of a text beside its indent


def open_console(*, quiet: bool = False) -> Console:
    """Return the console of the process. A program such as mpiexec reads from a terminal without a size."""
    from rich.console import Console

    return Console(quiet=quiet, force_terminal=None if _is_asked() or _is_sized() else False)


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
