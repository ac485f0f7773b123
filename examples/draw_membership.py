"""Draw how well an attacker tells the rows that trained a network from others, for the guide.

Run it: python examples/draw_membership.py. It trains a network of digits on few rows, a third of which have wrong
labels, with and without privacy, and writes pictures/membership.svg. The attacker knows the loss of each row, and takes
those below a threshold for rows that trained (Yeom et al. 2018, arXiv:1709.01604). Each point is a threshold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import graphopt
import passes
from graphopt import data, models

STYLE = """
text { font: 12px sans-serif; fill: #1f2328 } .axis { stroke: #8b949e; fill: none }
.curve { stroke: #0969da; stroke-width: 2; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .curve { stroke: #58a6ff } }
"""
SIDE, ROWS, EPOCHS, BATCH = 200, 600, 60, 100


def losses(private: bool, rows: dict[str, np.ndarray]) -> np.ndarray:
    """Return the loss of each row after training on the first of them."""
    parts: dict[str, Any] = {"optimizer": passes.AdamW(3e-3)}
    if private:
        multiplier = graphopt.privacy.multiplier_for(8.0, ROWS, BATCH, EPOCHS * ROWS // BATCH, 1e-4)
        parts = {
            "gradient": passes.PrivateGradient(1.0),
            "clip": passes.GaussianNoise(multiplier),
            "optimizer": passes.SGD(0.5),
        }
    executor = graphopt.Executor(graphopt.compile(models.mlp((1, 8, 8), 10), loss=passes.CrossEntropy(), **parts))
    train = {name: x[:ROWS] for name, x in rows.items()}
    how = {"sampling": "poisson"} if private else {}
    graphopt.fit(executor, train, epochs=EPOCHS, batch_size=BATCH, validation=None, verbose=False, **how)
    y = graphopt.run(executor.trained(), {"x": rows["x"]})["y"].astype(np.float64)
    y -= y.max(1, keepdims=True)
    return np.log(np.exp(y).sum(1)) - y[np.arange(len(y)), rows["target"]]


def panel(left: int, title: str, found: np.ndarray) -> str:
    """Return the share of found rows that trained against the share of others that are taken for such."""
    order = np.argsort(found, kind="stable")
    seen = np.concatenate([[0], np.cumsum(order < ROWS) / ROWS])
    taken = np.concatenate([[0], np.cumsum(order >= ROWS) / (len(found) - ROWS)])
    area = float((np.diff(taken) * (seen[1:] + seen[:-1]) / 2).sum())
    points = " ".join(f"{x * SIDE:.1f},{(1 - y) * SIDE:.1f}" for x, y in zip(taken[::10], seen[::10], strict=True))
    return (
        f'<g transform="translate({left} 40)"><text y="-12">{title}: area {area:.2f}</text>'
        f'<path class="axis" d="M0 0V{SIDE}H{SIDE}M0 {SIDE}L{SIDE} 0"/><polyline class="curve" points="{points}"/>'
        f'<text y="{SIDE + 18}">others taken for trained; up: trained rows found</text></g>'
    )


def main() -> str:
    """Return the picture."""
    digits, random = data.digits().arrays, np.random.default_rng(0)
    wrong = random.random(len(digits["x"])) < 1 / 3
    labels = np.where(wrong, random.integers(0, 10, len(wrong)), digits["target"])
    rows = {"x": digits["x"], "target": labels.astype(digits["target"].dtype)}
    panels = panel(20, "plain", losses(False, rows)), panel(340, "epsilon 8", losses(True, rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {SIDE + 70}" width="640"><style>{STYLE}</style>'
        f"{''.join(panels)}</svg>\n"
    )


if __name__ == "__main__":
    path = Path(__file__).parent / "pictures" / "membership.svg"
    path.write_text(main())
    print(path)
