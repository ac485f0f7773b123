"""Train a training graph by graphopt's own executor on WebGPU, and print the losses: python executor.py FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))

from adapter import software_adapter


def main(folder: str) -> None:
    """Print the losses of the batches in a folder, as the last line."""
    if reason := software_adapter():
        raise SystemExit(reason)
    import graphopt

    executor = graphopt.Executor(Path(folder) / "step.onnx", device="webgpu", report=["loss"])
    with np.load(Path(folder) / "batches.npz") as batches:
        rows = [dict(zip(batches, row, strict=True)) for row in zip(*batches.values(), strict=True)]
    print("\n" + json.dumps([executor.step(batch)["loss"] for batch in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
