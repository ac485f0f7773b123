"""Draw charts as SVG, with pygal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pygal  # type: ignore[import-untyped]
from pygal.style import Style  # type: ignore[import-untyped]

_MOST_LABELS = 10
_STYLE = Style(
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
    "style": _STYLE,
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


def line_chart(
    title: str, x: Sequence[float], lines: Mapping[str, Sequence[float | None]], *, logarithmic: bool = False
) -> str:
    """Return a chart of lines as SVG.

    Args:
        x: the positions, which are equally spaced.
        lines: the heights of each line by its name; None or a number that is not finite leaves a gap.
        logarithmic: draw heights on a logarithmic scale, if all are positive.
    """
    heights = {name: [_finite(y) for y in line] for name, line in lines.items()}
    drawn = [y for line in heights.values() for y in line if y is not None]
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
    for name, line in heights.items():
        chart.add(name, line)
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


def _finite(y: float | None) -> float | None:
    return y if y is not None and math.isfinite(y) else None
