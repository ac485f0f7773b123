"""Show rows of texts as a table, in a terminal and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import ClassVar


class ShownTable(ABC):
    """Show itself as a table. A subclass implements `rows_shown`."""

    words: ClassVar[Collection[int]] = ()  # columns that are aligned to the left
    notes: Sequence[str] = ()  # lines below the table

    @abstractmethod
    def rows_shown(self) -> Iterable[Sequence[str]]:
        """Return the heads and the rows; none without columns."""

    def __repr__(self) -> str:
        rows = list(self.rows_shown())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = [str.ljust if i in self.words else str.rjust for i in range(len(widths))]
        lines = ("  ".join(f(x, n) for f, x, n in zip(aligned, row, widths, strict=True)) for row in rows)
        return "\n".join([*(line.rstrip() for line in lines), *self.notes])

    def _repr_html_(self) -> str:
        rows = []
        for number, row in enumerate(self.rows_shown()):
            tag, sides = (
                "td" if number else "th",
                ["left" if i in self.words else "right" for i in range(len(row))],
            )
            cells = zip(sides, map(escape, row), strict=True)
            rows.append("".join(f"<{tag} style='text-align:{side}'>{text}</{tag}>" for side, text in cells))
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table>{body}</table>{''.join(f'<div>{escape(note)}</div>' for note in self.notes)}"
