"""Take the pictures of a run's page and of a comparison in the guide on runs, with Chromium.

Run it: python examples/draw_report.py. It writes pictures/report.png, and pictures/pages.png: both pages as they are on
three widths of screens, in both themes.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURES = Path(__file__).parent / "pictures"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
COMMANDS = {
    "digits/report.html": "fit.epochs=20 folder=digits",
    "sweep/compare.html": "-m model=mlp,linear optimizer.learning_rate=0.001,0.01 fit.epochs=5 folder=sweep",
}
WIDTH, HEIGHT, COLORS = 1240, 1990, 256
SCALES = {1240: 0.4, 800: 0.5, 390: 0.7}  # of the pages of a width
ROW, GAP = 800, 12  # pixels
SHEET = """<!doctype html><title>pages</title>
<style>
body {{ margin: 0; padding: {gap}px 0 0 {gap}px; background: gray; font-size: 0 }}
div {{ display: inline-block; overflow: hidden; margin: 0 {gap}px {gap}px 0 }}
iframe {{ border: 0; transform-origin: 0 0 }}
</style>
{views}"""
VIEW = """<div style="width: {shown}px; height: {row}px"><iframe src="{page}"
style="color-scheme: {theme}; width: {width}px; height: {height}px; transform: scale({scale})"></iframe></div>"""


def sheet() -> tuple[str, int, int]:
    """Return a page that shows each page in each theme and width, and its width and height."""
    shown = {width: round(width * scale) for width, scale in SCALES.items()}
    views = [
        VIEW.format(
            page=page,
            theme=theme,
            width=width,
            height=round(ROW / scale),
            scale=scale,
            shown=shown[width],
            row=ROW,
        )
        for page in COMMANDS
        for theme in ("light", "dark")
        for width, scale in SCALES.items()
    ]
    wide = 2 * sum(shown.values()) + (2 * len(SCALES) + 1) * GAP
    return SHEET.format(gap=GAP, views="".join(views)), wide, len(COMMANDS) * (ROW + GAP) + GAP


def main() -> dict[str, bytes]:
    """Return the pictures of the pages that the commands write in a new folder, by their names."""
    taken = {}
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS.values():
            arguments = [sys.executable, "-m", "graphopt", *command.split(), "quiet=true"]
            subprocess.run(arguments, cwd=folder, check=True, capture_output=True)
        text, wide, high = sheet()
        Path(folder, "pages.html").write_text(text)
        sizes = {
            "report.png": ("digits/report.html", WIDTH, HEIGHT),
            "pages.png": ("pages.html", wide, high),
        }
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        for name, (page, width, height) in sizes.items():
            picture = Path(folder, name)
            place = [f"--user-data-dir={folder}/own", f"--window-size={width},{height}"]
            command_line = [
                CHROMIUM,
                *options,
                *place,
                f"--screenshot={picture}",
                Path(folder, page).as_uri(),
            ]
            subprocess.run(command_line, check=True, capture_output=True, timeout=60)
            small = io.BytesIO()
            Image.open(picture).convert("RGB").quantize(COLORS).save(small, "PNG", optimize=True)
            taken[name] = small.getvalue()
    return taken


if __name__ == "__main__":
    for name, picture in main().items():
        (PICTURES / name).write_bytes(picture)
