"""Draw the results of run.py: cost against batch size, width and depth, and compile time against nodes.

Run it: python pictures.py RESULTS.json FOLDER
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

_CLOSE = 1.9  # times a number: labels of numbers that are closer would collide
AXES = {
    "batch": "batch size (64-256-256-10)",
    "width": "width (2 hidden layers, batch 32)",
    "depth": "hidden layers (of 64, batch 32)",
}
LOOKS = {
    "graphopt": ("graphopt", "o-"),
    "graphopt-run": ("graphopt, run", "o--"),
    "torch": ("PyTorch", "s-"),
    "torch-compile": ("torch.compile", "s--"),
    "jax": ("JAX", "^-"),
    "onnxruntime-training": ("onnxruntime-training", "d-"),
}


def sizes(workload: str) -> dict[str, int]:
    """Return the batch size, width and depth of a perceptron from its name."""
    numbers = workload.removeprefix("mlp-").split("x")
    return dict(zip(AXES, map(int, numbers), strict=True))


def curves(
    results: Sequence[dict[str, Any]], workloads: Sequence[str], of: str
) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Return the results of each peer by the size that varies."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for result in results:
        if result["workload"] in workloads and result["rounds"] and not result["error"]:
            found.setdefault(result["peer"], []).append((sizes(result["workload"])[of], result))
    return {peer: sorted(points, key=lambda point: point[0]) for peer, points in found.items()}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a picture of four panels."""
    plt.rcParams["svg.hashsalt"] = "graphopt"  # equal numbers make equal files
    figure, panels = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    *costs, compiling = panels.flat
    for axes, (of, label) in zip(costs, AXES.items(), strict=True):
        for peer, points in curves(record["scaling"], record["swept"][of], of).items():
            name, look = LOOKS[peer]
            axes.loglog(
                *zip(*((x, statistics.median(result["rounds"])) for x, result in points), strict=True),
                look,
                label=name,
            )
        axes.set(xlabel=label, ylabel="microseconds a step")
    for peer, points in curves(record["scaling"], record["swept"]["depth"], "depth").items():
        name, look = LOOKS[peer]
        nodes = [(2 * depth + 1, result["compile"]) for depth, result in points]
        compiling.loglog(*zip(*nodes, strict=True), look, label=name)
    compiling.set(xlabel="nodes of the model", ylabel="seconds to the end of the first step")
    costs[0].legend()
    for axes in panels.flat:
        ticks = sorted({x for line in axes.lines for x in line.get_xdata()})
        following = [*ticks[1:], math.inf]
        texts = [f"{x:.0f}" if after > _CLOSE * x else "" for x, after in zip(ticks, following, strict=True)]
        axes.set_xticks(ticks, texts)
        axes.xaxis.set_minor_locator(NullLocator())
    figure.suptitle(f"MLP, SGD, 1 thread, {record['machine']}", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]) / "scaling.svg")
