"""Take the picture of a run's page in the guide on reports, with Chromium.

Run it: python examples/draw_report.py. It writes pictures/report.png.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).parent / "pictures" / "report.png"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
COMMAND = "graphopt fit.epochs=20 folder=digits"
WIDTH, HEIGHT, COLORS = 1240, 1990, 128


def main() -> bytes:
    """Return a picture of the page that the command writes in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", *COMMAND.split()], cwd=folder, check=True, capture_output=True)
        page, picture = Path(folder, "digits", "report.html"), Path(folder, "report.png")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/own",
        ]
        taken = [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run([CHROMIUM, *options, *taken], check=True, capture_output=True, timeout=60)
        small = io.BytesIO()
        Image.open(picture).convert("RGB").quantize(COLORS).save(small, "PNG", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    PICTURE.write_bytes(main())
