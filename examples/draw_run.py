"""Draw what a run of the command prints, as the picture at the top of the README.

Run it: python examples/draw_run.py. It writes pictures/run.svg.
"""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "run.svg"
COMMAND = "graphopt fit.epochs=5"
WIDTH, HEIGHT, SIZE = 8.43, 20, 14  # of a character, of a line, and of the font, in pixels
STYLE = f"font: {SIZE}px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
COMMAND_COLOR, COLOR, BACKGROUND = "#7ee787", "#e6edf3", "#161b22"


def main() -> list[str]:
    """Return the command, and the lines that it prints in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *COMMAND.split(), "folder=digits"]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return [f"$ {COMMAND}", *done.stdout.splitlines()]


def drawn(lines: list[str]) -> str:
    """Return lines of a terminal as a picture, whose font is one of the reader's machine."""
    width, height = round(WIDTH * max(map(len, lines))) + 32, HEIGHT * len(lines) + 28
    texts = [
        f'<text x="16" y="{30 + HEIGHT * i}" fill="{COLOR if i else COMMAND_COLOR}">{_text(line)}</text>'
        for i, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{STYLE}">',
            f"<title>What {COMMAND} prints</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
            *texts,
            "</svg>\n",
        ]
    )


def _text(line: str) -> str:
    return html.escape(line).replace(" ", "\N{NO-BREAK SPACE}")  # browsers join other spaces


if __name__ == "__main__":
    PICTURE.write_text(drawn(main()))
