"""Write pages of HTML that need no other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; max-width: 1280px; margin: 2em auto; padding: 0 1.5em }
h1 { font-size: 1.5em; margin-bottom: 0 } h2 { font-size: 1.15em; margin-top: 2em }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)); gap: 1em }
table { border-collapse: collapse; font-size: 14px } td, th { padding: .2em .8em; text-align: right }
figure { margin: 0 } .words td:last-child, .words th:last-child { text-align: left } table { margin-bottom: 1em }
th { border-bottom: 1px solid #adb5bd; font-weight: 600 } tr > :first-child { text-align: left }
pre { background: #f8f9fa; padding: 1em; overflow-x: auto; font-size: 12.5px; line-height: 1.45 }
.wide { overflow-x: auto } summary { cursor: pointer } svg { max-width: 100%; height: auto } p { color: #495057 }
"""


def page(title: str, about: str, *sections: str) -> str:
    """Return a page with a title, a line about it, and sections."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1><p>{escape(about)}</p>\n{''.join(sections)}</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return a section of a page."""
    return f"<section><h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def charts(figures: Iterable[str]) -> str:
    """Return charts side by side."""
    return f'<div class="charts">{"".join(f"<figure>{figure}</figure>" for figure in figures)}</div>\n'


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, words: bool = False) -> str:
    """Return a table whose first column is text, all others numbers; with `words`, the last one is text, too."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(x))}</td>" for x in row) + "</tr>\n" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="wide"><table{kind}><tr>{head}</tr>\n{body}</table></div>\n'


def shaded(corner: str, names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Return a square table of counts, each cell as dark as its share of its row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in (corner, *names))
    rows = []
    for name, row in zip(names, counts, strict=True):
        total = max(sum(row), 1)
        cells = "".join(
            f'<td style="background: rgba(25, 113, 194, {x / total:.3f})'
            f'{"; color: #fff" if x > 0.6 * total else ""}">{x}</td>'
            for x in row
        )
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>\n")
    return f'<div class="wide"><table><tr>{head}</tr>\n{"".join(rows)}</table></div>\n'


def details(title: str, lines: str) -> str:
    """Return preformatted text, which a click on its title shows."""
    return folded(title, f"<pre>{escape(lines)}</pre>\n")


def folded(title: str, part: str) -> str:
    """Return a part of a page, which a click on its title shows."""
    return f"<details><summary>{escape(title)}</summary>{part}</details>\n"
