"""Draw charts for pages: lines and points in SVG, all words in HTML.

The picture stretches to the page, while words and widths of lines keep their size: they can be read on a phone and on
paper, in both themes. Chart libraries either draw with a script alone, weigh megabytes, or scale their words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from graphopt.inspection.words import readable

COLORS = 8  # of lines, in page.css
MOST_POINTS = 400  # of a line
PERCENT = " %"  # the unit of shares, which lie between 0 and 100
_SIDE = 1000  # of the picture, which the page stretches
_MOST_TICKS = 6
_LARGEST = 1e300
_LEAST_RANGE = 1e-9  # of numbers, relative to the largest: less is drawn as one height
_NEEDS_LOGARITHM = 50.0  # the ratio of two heights that a linear axis does not show
_FROM_ZERO = 0.4  # an axis starts at 0 if the least height is below this share of the largest

Line = Sequence[float | None]


@dataclass(frozen=True)
class _Axis:
    """Place numbers on an axis from 0 to `_SIDE`."""

    low: float
    high: float
    ticks: Sequence[float]
    is_logarithmic: bool = False

    @classmethod
    def around(cls, values: Sequence[float], *, may_be_logarithmic: bool, unit: str = "") -> _Axis:
        """Return an axis whose first and last ticks enclose the numbers."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if unit == PERCENT and _is_point(low, high) and 0 <= low <= 100:
            low, high = 0.0, 100.0
        if may_be_logarithmic and low > 0 and high / low >= _NEEDS_LOGARITHM:
            low = max(tick for tick in _decades(low, low) if tick <= low * (1 + 1e-9))
            high = min(tick for tick in _decades(high, high) if tick >= high * (1 - 1e-9))
            return cls(low, high, _powers(low, high), is_logarithmic=True)
        if _is_point(low, high):
            low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
        if 0 <= low < _FROM_ZERO * high:
            low = 0.0
        step = _step(low, high)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls(first * step, last * step, [i * step for i in range(first, last + 1)])

    @classmethod
    def along(cls, values: Sequence[float], *, is_logarithmic: bool, is_whole: bool = False) -> _Axis:
        """Return an axis from the least number to the largest."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if _is_point(low, high):
            margin = max(1.0, abs(low))
            return cls(low - margin, low + margin, [low])
        if is_logarithmic and low > 0:
            return cls(low, high, _powers(low, high), is_logarithmic=True)
        step = max(_step(low, high), 1 if is_whole else 0)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, [i * step for i in range(first, last + 1)])

    def place(self, value: float) -> float:
        scale = math.log if self.is_logarithmic else float
        low, high = scale(self.low), scale(self.high)
        return round(_SIDE * (scale(value) - low) / (high - low), 1)

    def texts(self) -> list[str]:
        """Return the ticks, all with as many decimals as their distance has."""
        if self.is_logarithmic or len(self.ticks) < 2:
            return [readable(tick) for tick in self.ticks]
        decimals = -math.floor(math.log10(self.ticks[1] - self.ticks[0]) + 1e-9)
        if decimals > 5:
            return [readable(tick) for tick in self.ticks]
        return [f"{tick:,.{max(0, decimals)}f}" for tick in self.ticks]


def line_chart(
    title: str,
    x: Sequence[float],
    lines: Mapping[str, Line],
    *,
    along: str = "epoch",
    logarithmic: bool = False,
    logarithmic_x: bool = False,
    unit: str = "",
    faint: str | None = None,
    mark: tuple[float, str] | None = None,
) -> str:
    """Return a chart of lines.

    Args:
        x: the positions, in rising order.
        lines: the heights of each line by its name; None or a number that is not finite leaves a gap.
        along: what the positions are.
        logarithmic: draw heights on a logarithmic scale if their range needs one and all are positive.
        logarithmic_x: draw positions on a logarithmic scale.
        unit: what follows each height, such as `PERCENT`.
        faint: the name of a line that is drawn faintly, behind the others.
        mark: a position to point at, and what to say there.
    """
    every = max(1, math.ceil(len(x) / MOST_POINTS))
    kept = sorted({*range(0, len(x), every), *([len(x) - 1] if len(x) else [])})
    known = {name: [_finite(line[i]) for i in kept] for name, line in lines.items()}
    positions = [float(x[i]) for i in kept]
    heights = [y for name in known for y in _typical(known[name], is_faint=name == faint)]
    is_whole = all(position.is_integer() for position in positions)
    across = _Axis.along(positions, is_logarithmic=logarithmic_x, is_whole=is_whole)
    up = _Axis.around(heights, may_be_logarithmic=logarithmic, unit=unit)
    colors = {name: i % COLORS + 1 for i, name in enumerate(name for name in known if name != faint)}
    colors |= {} if faint is None else {faint: 1}
    looks = {name: f"c{color}{' faint' if name == faint else ''}" for name, color in colors.items()}
    behind = sorted(known, key=lambda name: name != faint)
    parts = [f"by {along}"]
    parts += ["logarithmic axis"] if up.is_logarithmic else []
    parts += ["no finite value"] if not heights else []
    said = "; ".join(_described(name, line, unit) for name, line in known.items())
    return _figure(
        across,
        up,
        (title, ", ".join(parts), f"{title} {parts[0]}. {said}"),
        "".join(_drawn(positions, known[name], across, up, looks[name]) for name in behind),
        unit=unit,
        legend=_legend({name: looks[name] for name in known}) if len(known) > 1 else "",
        data={
            "along": along,
            "unit": unit,
            "x": positions,
            "at": [round(across.place(position) / _SIDE, 4) for position in positions],
            "lines": [
                [name, colors[name], [None if y is None else float(f"{y:.5g}") for y in line]]
                for name, line in known.items()
            ],
            **{"low": up.low, "high": up.high, "log": up.is_logarithmic},
        },
        mark=mark,
    )


def scatter_chart(
    title: str, points: Sequence[tuple[float, float]], x: str, y: str, *, through: str | None = None
) -> str:
    """Return a chart of points.

    Args:
        x, y: what the axes are.
        through: draw the line `y = x` or `y = 0`, on which perfect points are.
    """
    known = ((_finite(a), _finite(b)) for a, b in points)
    points = [(a, b) for a, b in known if a is not None and b is not None]
    wide, high = [a for a, _ in points], [b for _, b in points]
    if through == "y = x":  # on axes of one range, in which the whole line is
        wide = high = wide + high
    elif through == "y = 0":
        high = [*high, 0.0]
    across, up = (_Axis.around(values, may_be_logarithmic=False) for values in (wide, high))
    ideal = ""
    if through == "y = x":
        ideal = f'<path class="ideal" d="M0 {_SIDE}L{_SIDE} 0"/>'
    elif through == "y = 0":
        ideal = f'<path class="ideal" d="M0 {_SIDE - up.place(0):g}H{_SIDE}"/>'
    dots = "".join(f"M{_pair((across.place(a), _SIDE - up.place(b)))}h.1" for a, b in points)
    about = f"{y} against {x}"
    return _figure(
        across,
        up,
        (
            title,
            f"{about}; the line is {through}" if through else about,
            f"{title}: {len(points)} points, {about}",
        ),
        f'{ideal}<path class="dots c1" d="{dots}"/>',
    )


def _figure(
    across: _Axis,
    up: _Axis,
    words: tuple[str, str, str],
    drawn: str,
    *,
    unit: str = "",
    legend: str = "",
    data: Mapping[str, object] | None = None,
    mark: tuple[float, str] | None = None,
) -> str:
    """Return the axes with what is drawn between them; `words` are the title, a remark and a description."""
    title, about, described = words
    heights = [f"{text}{unit}" for text in up.texts()]
    grid = "".join(f"M0 {_SIDE - up.place(tick):g}H{_SIDE}" for tick in up.ticks)
    ticks = [
        f'<span class="y" style="bottom:{up.place(tick) * 100 / _SIDE:g}%">{escape(text)}</span>'
        for tick, text in zip(up.ticks, heights, strict=True)
    ]
    ticks += [
        f'<span class="x" style="left:{across.place(tick) * 100 / _SIDE:g}%">{escape(text)}</span>'
        for tick, text in zip(across.ticks, across.texts(), strict=True)
    ]
    if mark is not None:
        place = across.place(mark[0])
        drawn = f'<path class="mark" d="M{place:g} 0V{_SIDE}"/>{drawn}'
        side = "right" if place > _SIDE / 2 else "left"
        where = (_SIDE - place if side == "right" else place) * 100 / _SIDE
        ticks.append(f'<span class="said" style="{side}:{where:g}%">{escape(mark[1])}</span>')
    gutter = max(map(len, heights), default=1)
    chart = escape(json.dumps(data, separators=(",", ":")))
    text = "" if data is None else f" data-chart='{chart}' tabindex=\"0\""
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b> <span>{escape(about)}</span></figcaption>{legend}'
        f'<div class="plot" role="img" aria-label="{escape(described)}" style="--gutter:{gutter}ch"{text}>'
        f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="grid" d="{grid}"/>{drawn}</svg>{"".join(ticks)}</div></figure>\n'
    )


def _legend(classes: Mapping[str, str]) -> str:
    items = "".join(f'<li class="{name}">{escape(text)}</li>' for text, name in classes.items())
    return f'<ul class="legend">{items}</ul>'


def _drawn(x: Sequence[float], line: Line, across: _Axis, up: _Axis, look: str) -> str:
    """Return the segments of a line, and its points without neighbors as dots."""
    parts: list[list[str]] = [[]]
    for position, y in zip(x, line, strict=True):
        if y is None or (up.is_logarithmic and y <= 0):
            parts.append([])
        else:
            height = up.place(min(max(y, up.low), up.high))
            parts[-1].append(_pair((across.place(position), _SIDE - height)))
    segments = "".join(f"M{'L'.join(part)}" for part in parts if len(part) > 1)
    alone = "".join(f"M{part[0]}h.1" for part in parts if len(part) == 1)
    dots = f'<path class="dots {look}" d="{alone}"/>' if alone else ""
    return f'<path class="line {look}" d="{segments}"/>{dots}'


def _pair(point: tuple[float, float]) -> str:
    return f"{point[0]:.5g} {point[1]:.5g}"


def _described(name: str, line: Line, unit: str) -> str:
    """Return a description of a line in words."""
    known = [y for y in line if y is not None]
    if not known:
        return f"{name}: no finite value"
    ends = f"from {readable(known[0])}{unit} to {readable(known[-1])}{unit}"
    return f"{name}: {ends}, least {readable(min(known))}{unit}, largest {readable(max(known))}{unit}"


def _typical(line: Line, *, is_faint: bool) -> list[float]:
    """Return the heights that an axis must have: of a faint line, all but a tenth at each end."""
    known = sorted(y for y in line if y is not None)
    cut = len(known) // 10 if is_faint else 0
    return known[cut : len(known) - cut]


def _is_point(low: float, high: float) -> bool:
    return high - low <= _LEAST_RANGE * max(abs(low), abs(high))


def _finite(value: float | None) -> float | None:
    """Return a number that can be drawn."""
    if value is None or math.isnan(value) or abs(value) > _LARGEST:
        return None
    return float(value) if abs(value) > 1 / _LARGEST else 0.0


def _step(low: float, high: float) -> float:
    """Return the distance of ticks: 1, 2 or 5 times a power of 10."""
    least = (high - low) / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _decades(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of 10, from below a number to above another."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in (1, 2, 5)]


def _powers(low: float, high: float) -> list[float]:
    """Return the ticks of a logarithmic axis: 1, 2 and 5 times powers of 10, or so many powers alone as have room."""
    inside = [tick for tick in _decades(low, high) if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    powers = [tick for tick in inside if round(math.log10(tick), 6).is_integer()]
    every = math.ceil(len(powers) / _MOST_TICKS)
    return inside if len(inside) <= _MOST_TICKS + 1 else powers[::every]
