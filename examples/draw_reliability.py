"""Draw the reliability of a network before and after calibration, for the guide.

Run it: python examples/draw_reliability.py. It trains a network of digits, and writes pictures/reliability.svg, in the
colors of the reader's theme.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import graphopt
import passes
from graphopt import data, models

STYLE = """
text { font: 12px sans-serif; fill: #1f2328 } .axis { stroke: #8b949e; fill: none } circle { fill: #0969da }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } circle { fill: #58a6ff } }
"""
SIDE, BINS = 200, 10


def panel(left: int, title: str, p: np.ndarray, target: np.ndarray) -> str:
    """Return the share that is right against the mean confidence of each bin; areas are numbers of rows."""
    most, right = p.max(1), p.argmax(1) == target
    place = np.minimum((most * BINS).astype(int), BINS - 1)
    marks = ""
    for rows in (place == i for i in range(BINS)):
        if rows.any():
            x, y, size = (
                most[rows].mean() * SIDE,
                (1 - right[rows].mean()) * SIDE,
                2 + 10 * rows.mean() ** 0.5,
            )
            marks += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    words = f"{title}: {most.mean():.1%} sure, {right.mean():.1%} right"
    return (
        f'<g transform="translate({left} 40)"><text y="-12">{words}</text>'
        f'<path class="axis" d="M0 0V{SIDE}H{SIDE}M0 {SIDE}L{SIDE} 0"/>{marks}'
        f'<text y="{SIDE + 18}">confidence, 0 to 1; up: share right</text></g>'
    )


def main() -> str:
    """Return the picture."""
    digits = data.digits().arrays
    noise = np.random.default_rng(0).normal(0, 0.35 * digits["x"].max(), digits["x"].shape)
    noisy = {**digits, "x": digits["x"] + noise.astype(np.float32)}
    parts = slice(600), slice(600, 1200), slice(1200, None)
    train, held_out, test = ({name: x[part] for name, x in noisy.items()} for part in parts)
    step = graphopt.compile(models.mlp((1, 8, 8), 10), loss=passes.CrossEntropy(), optimizer=passes.AdamW(3e-3))
    executor = graphopt.Executor(step)
    graphopt.fit(executor, train, epochs=40, validation=None, verbose=False)
    network = executor.trained()
    panels = []
    for left, title, calibration in (
        (20, "before", passes.Temperature(log_temperature=0.0)),
        (320, "after", passes.Temperature()),
    ):
        sure = graphopt.calibrate(network, held_out, calibration, passes.PredictionSet(0.1))
        panels.append(panel(left, title, graphopt.run(sure, {"x": test["x"]})["probability"], test["target"]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 {SIDE + 70}" width="600"><style>{STYLE}</style>'
        f"{''.join(panels)}</svg>\n"
    )


if __name__ == "__main__":
    path = Path(__file__).parent / "pictures" / "reliability.svg"
    path.write_text(main())
    print(path)
