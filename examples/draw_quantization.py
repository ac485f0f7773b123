"""Draw accuracy against bytes of networks in floats, in integers and with fewer channels, for the guide.

Run it: python examples/draw_quantization.py. It reads the tables that benchmarks/quantization.py wrote, and writes
pictures/quantization.svg, in the colors of the reader's theme.
"""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

EXAMPLES = Path(__file__).parent
SERIES = {  # the class of a mark, what the legend says, and the rows of the table with their labels
    "float": ("floats", {"floats, trained on": "32"}),
    "ptq": (
        "rounded after training (quantize_static)",
        {"int8, quantize_static": "8", "int4 weights, int8 activations, quantize_static": "4"},
    ),
    "qat": (
        "trained for its form",
        {
            "int8, graphopt, trained for it": "8",
            "int4 weights, int8 activations, graphopt, trained for it": "4",
        },
    ),
    "pruned": (
        "half of the channels",
        {
            "half of the channels, graphopt": "32",
            "half of the channels, int8, graphopt, trained for it": "8",
        },
    ),
}
STYLE = """
text { font: 12px sans-serif; fill: #1f2328 } .title { font-weight: bold } .small { font-size: 11px; fill: #59636e }
.axis { stroke: #d1d9e0 } .bar { stroke-width: 1.5; opacity: 0.4 } circle { stroke-width: 1.5 }
.float { fill: #59636e; stroke: #59636e } .ptq { fill: none; stroke: #bc4c00 }
.qat { fill: #0969da; stroke: #0969da } .pruned { fill: #1a7f37; stroke: #1a7f37 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .axis { stroke: #3d444d }
.float { fill: #9198a1; stroke: #9198a1 } .ptq { stroke: #f0883e }
.qat { fill: #58a6ff; stroke: #58a6ff } .pruned { fill: #3fb950; stroke: #3fb950 } }
"""
WIDTH, HEIGHT, LEFT, TOP = 270, 190, 42, 30  # of a panel, and its margins
COLUMNS, LEGEND = 3, 34
Point = tuple[str, str, float, float, float]  # class, label, KB, accuracy and its deviation


def points(table: str) -> list[Point]:
    """Return the marks of a network."""
    rows = {}
    for line in table.splitlines():
        if found := re.match(r"\| (.+?) \| ([\d.]+) ± ([\d.]+) \| [^|]+ \| ([\d.]+) \|", line):
            rows[found[1]] = tuple(map(float, found.groups()[1:]))
    return [
        (kind, label, rows[name][2], *rows[name][:2])
        for kind, (_, names) in SERIES.items()
        for name, label in names.items()
        if name in rows
    ]


def panel(title: str, marks: list[Point], x0: float, y0: float) -> str:
    """Return the drawing of a network: accuracy in percent upwards, KB to the right on a logarithmic scale."""
    sizes = [mark[2] for mark in marks]
    low, high = min(y - bar for *_, y, bar in marks), max(y + bar for *_, y, bar in marks)
    step = next(step for step in (0.5, 1, 2, 5, 10, 20) if (high - low) / step <= 5)
    low, high = step * math.floor(low / step), step * math.ceil(high / step)
    left, right = math.log(min(sizes) / 1.3), math.log(max(sizes) * 1.3)
    wide, tall = WIDTH - LEFT - 14, HEIGHT - TOP - 34

    def at(size: float) -> float:
        return x0 + LEFT + wide * (math.log(size) - left) / (right - left)

    def up(accuracy: float) -> float:
        return y0 + TOP + tall * (high - accuracy) / (high - low)

    parts = [f'<text class="title" x="{x0 + LEFT}" y="{y0 + 18}">{html.escape(title)}</text>']
    for i in range(round((high - low) / step) + 1):
        y = up(low + i * step)
        parts.append(f'<line class="axis" x1="{x0 + LEFT}" x2="{x0 + LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="small" text-anchor="end" x="{x0 + LEFT - 6}" y="{y + 4:.1f}">{low + i * step:g}</text>'
        )
    for size in (2**i for i in range(12)):
        if left <= math.log(size) <= right:
            parts.append(
                f'<text class="small" text-anchor="middle" x="{at(size):.1f}" y="{y0 + HEIGHT - 16}">{size}</text>'
            )
    for kind, label, size, y, bar in marks:
        x = at(size)
        parts.append(
            f'<line class="bar {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{up(y - bar):.1f}" y2="{up(y + bar):.1f}"/>'
            f'<circle class="{kind}" cx="{x:.1f}" cy="{up(y):.1f}" r="4.5"/>'
            f'<text class="small" x="{x + 7:.1f}" y="{up(y) - 5:.1f}">{label}</text>'
        )
    return "\n".join(parts)


def main() -> str:
    """Return the picture."""
    page = (EXAMPLES / "benchmarks/RESULTS_QUANTIZATION.md").read_text()
    tables = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    networks = {title: marks for title, table in tables.items() if (marks := points(table))}
    width, height = COLUMNS * WIDTH, LEGEND + math.ceil(len(networks) / COLUMNS) * HEIGHT + 8
    parts, x = [], float(LEFT)
    for kind, (text, _) in SERIES.items():
        parts.append(f'<circle class="{kind}" cx="{x}" cy="16" r="4.5"/><text x="{x + 10}" y="20">{text}</text>')
        x += 44 + 5.5 * len(text)
    for i, (title, marks) in enumerate(networks.items()):
        parts.append(panel(title, marks, WIDTH * (i % COLUMNS), LEGEND + HEIGHT * (i // COLUMNS)))
    parts.append(
        f'<text class="small" text-anchor="middle" x="{width / 2}" y="{height - 4}">accuracy in percent, by KB '
        "of the file; the numbers at the marks are bits of a weight, the bars standard deviations over seeds</text>"
    )
    shape = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    path = EXAMPLES / "pictures" / "quantization.svg"
    path.write_text(main())
    print(path)
