"""Write pages of HTML that load no other file; their script shows numbers below the pointer, and sorts tables."""

from __future__ import annotations

import base64
import functools
import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import repeat
from pathlib import Path

import numpy as np

from graphopt.inspection.words import percent

_DARKEST = 0.6  # opacity of a cell, on which its number can be read in both themes
_LONGEST = 4  # characters of names that stand over narrow columns
_PICTURE = 64  # pixels of the longest side of a picture


def page(title: str, about: str, *sections: str) -> str:
    """Return a page with a title, a line about it, and sections. It may load nothing and run its own script alone."""
    style, script, digest = _own()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><header><h1>{escape(title)}</h1><p>{escape(about)}</p></header>\n<main>\n{''.join(sections)}</main>\n"
        f'<script type="module">{script}</script></body></html>\n'
    )


@functools.cache
def _own() -> tuple[str, str, str]:
    """Return the style of pages, their script, and the script's digest."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return style, script, base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def section(title: str, *parts: str, half: bool = False) -> str:
    """Return a section of a page; two halves stand side by side, if the page is wide enough."""
    kind = ' class="half"' if half else ""
    return f"<section{kind}><h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def note(text: str) -> str:
    """Return a remark."""
    return f'<p class="note">{escape(text)}</p>\n'


def charts(figures: Iterable[str]) -> str:
    """Return charts side by side."""
    return f'<div class="charts">{"".join(figures)}</div>\n'


def figures(numbers: Iterable[tuple[str, str, str]]) -> str:
    """Return large numbers: the name, the text, and the color's class or nothing of each."""
    parts = (
        f'<div class="{color}"><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>' for name, text, color in numbers
    )
    return f'<dl class="large">{"".join(parts)}</dl>\n'


def facts(rows: Mapping[str, str]) -> str:
    """Return names and what is known about each."""
    parts = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in rows.items())
    return f'<dl class="facts">{"".join(parts)}</dl>\n'


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    words: bool = False,
    texts: int = 1,
    marks: Mapping[int, str] | None = None,
    links: Mapping[int, str] | None = None,
    keys: Sequence[Sequence[float | str]] | None = None,
) -> str:
    """Return a table.

    Args:
        words: the last column is text.
        texts: the number of columns that are text, from the first on; all others are numbers.
        marks: words beside the first cell of rows, by the number of the row; `best` marks the whole row.
        links: addresses that first cells lead to, by the number of the row.
        keys: by what a click on the head of a column sorts the rows: one for each cell. None: the rows stay in order.
    """
    head = "".join(f'<th scope="col"{_left(i, texts)}>{escape(name)}</th>' for i, name in enumerate(header))
    body = []
    for number, row in enumerate(rows):
        first, *others = (escape(str(x)) for x in row)
        link, mark = (links or {}).get(number), (marks or {}).get(number)
        first = f'<a href="{escape(link)}">{first}</a>' if link else first
        first += f' <span class="mark">{escape(mark)}</span>' if mark else ""
        keyed: Iterable[str] = [f' data-key="{escape(str(key))}"' for key in keys[number]] if keys else repeat("")
        cells = "".join(
            f"<td{_left(i, texts)}{key}>{cell}</td>"
            for i, (cell, key) in enumerate(zip([first, *others], keyed, strict=False))
        )
        kind = ' class="best"' if mark == "best" else ""
        body.append(f"<tr{kind}>{cells}</tr>\n")
    kind = (' class="words"' if words else "") + (" data-sorted" if keys else "")
    top = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return _wide(f"<table{kind}>{top}<tbody>\n{''.join(body)}</tbody></table>")


def confusion(corner: str, names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Return a square table of counts, right ones on its diagonal, each cell as dark as its share of its row."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in (corner, *names, "right"))
    rows = []
    for i, (name, row) in enumerate(zip(names, counts, strict=True)):
        total = max(sum(row), 1)
        cells = "".join(_cell(x, x / total, is_right=i == j) for j, x in enumerate(row))
        right = percent(row[i] / total) if any(row) else ""
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}<td class="share">{right}</td></tr>\n')
    upright = ' class="upright"' if max(map(len, names), default=0) > _LONGEST else ""
    return _wide(
        f'<table class="counts"><thead><tr{upright}>{head}</tr></thead><tbody>\n{"".join(rows)}</tbody></table>'
    )


def pictures(examples: Iterable[tuple[np.ndarray, str, Sequence[str]]], longest: int = _PICTURE) -> str:
    """Return pictures with a title and remarks each; see `picture` for the numbers."""
    large = " large" if longest > _PICTURE else ""
    parts = (
        f'<figure><img src="{picture(pixels, longest)}" alt=""><figcaption><b>{escape(title)}</b>'
        f"{''.join(f'<span>{escape(remark)}</span>' for remark in remarks)}</figcaption></figure>"
        for pixels, title, remarks in examples
    )
    return f'<div class="pictures{large}">{"".join(parts)}</div>\n'


def picture(pixels: np.ndarray, longest: int = _PICTURE) -> str:
    """Return the address of a small PNG that contains the picture itself.

    Args:
        pixels: numbers from 0 to 1 in [height, width, 1 or 3]; large pictures become smaller.
        longest: the most pixels of a side.
    """
    every = -(-max(pixels.shape[:2]) // longest)
    height, width = (max(side // every, 1) for side in pixels.shape[:2])
    parts = pixels[: height * every, : width * every].reshape(
        height, -1, width, min(every, pixels.shape[1]), pixels.shape[2]
    )
    small = np.round(255 * np.clip(parts.mean(axis=(1, 3)), 0, 1)).astype(np.uint8)
    lines = np.insert(small.reshape(height, -1), 0, 0, axis=1).tobytes()  # 0: pixels as they are
    kind = {1: 0, 3: 2}[small.shape[2]]
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    )
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def bars(rows: Iterable[tuple[str, str, float]]) -> str:
    """Return a table of names and texts, with a bar each, from -1 to 1."""
    parts = (
        f'<tr><td>{escape(name)}</td><td>{escape(text)}</td><td class="bar {"less" if x < 0 else "more"}" '
        f'style="--from:{min(50, 50 + 50 * x):.1f}%;--to:{max(50, 50 + 50 * x):.1f}%"></td></tr>\n'
        for name, text, x in rows
    )
    return _wide(f"<table><tbody>\n{''.join(parts)}</tbody></table>")


def marked_words(words: Iterable[tuple[str, float]]) -> str:
    """Return a text whose words have colors, as strong as a number from -1 to 1."""
    parts = (
        f'<span class="{"less" if x < 0 else "more"}" style="--share:{_DARKEST * abs(x):.2f}">{escape(word)}</span>'
        for word, x in words
    )
    return f'<p class="words">{" ".join(parts)}</p>\n'


def details(title: str, lines: str) -> str:
    """Return preformatted text, which a click on its title shows."""
    return folded(title, f"<pre>{escape(lines)}</pre>\n")


def folded(title: str, part: str) -> str:
    """Return a part of a page, which a click on its title shows."""
    return f"<details><summary>{escape(title)}</summary>{part}</details>\n"


def _left(column: int, texts: int) -> str:
    return ' class="text"' if 0 < column < texts else ""


def _wide(part: str) -> str:
    """Return a part that scrolls, also by keys, if it is wider than the page."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="table">{part}</div>\n'


def _cell(count: int, share: float, *, is_right: bool) -> str:
    depth = _DARKEST * (share if is_right else share**0.5)
    kinds = ["right"] * is_right + ["zero"] * (not count)
    return f'<td class="{" ".join(kinds)}" style="--share:{depth:.2f}">{count}</td>'
