"""Write pages of HTML that need no other file, and charts as SVG, with pygal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import pygal  # type: ignore[import-untyped]
from pygal.style import Style  # type: ignore[import-untyped]

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; max-width: 1280px; margin: 2em auto; padding: 0 1.5em }
h1 { font-size: 1.5em; margin-bottom: 0 } h2 { font-size: 1.15em; margin-top: 2em }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)); gap: 1em }
table { border-collapse: collapse; font-size: 14px } td, th { padding: .2em .8em; text-align: right }
figure { margin: 0 } .words td:last-child, .words th:last-child { text-align: left } table { margin-bottom: 1em }
th { border-bottom: 1px solid #adb5bd; font-weight: 600 } tr > :first-child { text-align: left }
pre { background: #f8f9fa; padding: 1em; overflow-x: auto; font-size: 12.5px; line-height: 1.45 }
.wide { overflow-x: auto } summary { cursor: pointer } svg { max-width: 100%; height: auto } p { color: #495057 }
"""
_MOST_LABELS = 10
_OF_CHARTS = Style(
    background="transparent",
    plot_background="transparent",
    colors=("#1971c2", "#e8590c", "#2f9e44", "#6741d9", "#c92a2a", "#0c8599", "#e67700", "#868e96"),
    font_family="system-ui, sans-serif",
    guide_stroke_color="#dee2e6",
    guide_stroke_dasharray="1,0",
    major_guide_stroke_color="#dee2e6",
    major_guide_stroke_dasharray="1,0",
    label_font_size=12,
    major_label_font_size=12,
    legend_font_size=13,
    title_font_size=15,
    opacity=".9",
)
_OPTIONS: dict[str, Any] = {
    "style": _OF_CHARTS,
    "js": (),  # pygal's script is on another server
    "width": 620,
    "height": 300,
    "disable_xml_declaration": True,
    "legend_at_bottom": True,
    "legend_at_bottom_columns": 2,
    "legend_box_size": 10,
    "truncate_legend": -1,
    "margin": 8,
}


def page(title: str, about: str, *sections: str) -> str:
    """Return a page with a title, a line about it, and sections."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_CSS}</style></head>\n'
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


def line_chart(
    title: str, x: Sequence[float], lines: Mapping[str, Sequence[float | None]], *, logarithmic: bool = False
) -> str:
    """Return a chart of lines as SVG.

    Args:
        x: the positions, which are equally spaced.
        lines: the heights of each line by its name; None or a number that is not finite leaves a gap.
        logarithmic: draw heights on a logarithmic scale, if all are positive.
    """
    drawn = [y for line in lines.values() for y in line if y is not None and math.isfinite(y)]
    logarithmic = logarithmic and bool(drawn) and min(drawn) > 0
    chart = pygal.Line(
        title=title,
        logarithmic=logarithmic,
        show_dots=len(x) == 1,
        show_minor_x_labels=False,
        show_legend=len(lines) > 1,
        truncate_label=-1,
        value_formatter=_short,
        stroke_style={"width": 1.8},
        **_OPTIONS,
    )
    every = max(1, math.ceil(len(x) / _MOST_LABELS))
    chart.x_labels = [f"{position:g}" for position in x]
    chart.x_labels_major = chart.x_labels[::every]
    if logarithmic:
        chart.y_labels = _ticks(min(drawn), max(drawn))
    for name, line in lines.items():
        chart.add(name, [y if y is not None and math.isfinite(y) else None for y in line])
    return _svg(chart)


def scatter_chart(title: str, points: Sequence[tuple[float, float]], x: str, y: str) -> str:
    """Return a chart of points as SVG; `x` and `y` name the axes."""
    chart = pygal.XY(
        title=title, stroke=False, dots_size=2, show_legend=False, x_title=x, y_title=y, **_OPTIONS
    )
    chart.x_value_formatter = chart.value_formatter = _short
    chart.add(title, [(float(a), float(b)) for a, b in points])
    return _svg(chart)


def _ticks(lowest: float, highest: float) -> list[float]:
    """Return numbers that enclose two heights: 1, 2 and 5 times powers of 10, or powers alone if that is too many."""
    low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    steps = (1, 2, 5) if high - low < 4 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    first = max(i for i, tick in enumerate(ticks) if tick <= lowest)
    last = min(i for i, tick in enumerate(ticks) if tick >= highest)
    return ticks[first : last + 1]


def _svg(chart: pygal.Graph) -> str:
    """Return a chart without the script that pygal adds for pages with its own scripts."""
    return re.sub("<script.*?</script>", "", chart.render(is_unicode=True), flags=re.DOTALL)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else ""
