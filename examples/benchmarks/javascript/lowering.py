"""Write graphs as they are and as hosts get them, for lowering.js: python examples/benchmarks/javascript/lowering.py"""

from __future__ import annotations

import json
from pathlib import Path

import graphopt
import passes
from graphopt import models
from graphopt.graph.storage import whole
from graphopt.targets.target import target_of

BUILD = Path(__file__).parent / "build" / "lowering"
MODELS = {
    "MLP": (models.mlp((784,), 10), passes.CrossEntropy(), 64),
    "CNN": (models.cnn((1, 28, 28), 10), passes.CrossEntropy(), 32),
    "transformer": (
        models.transformer((32,), 64, width=64, heads=4, layers=2),
        passes.CrossEntropy(axis=-1),
        16,
    ),
}


def main() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    for name, (model, loss, rows) in MODELS.items():
        step = graphopt.compile(model, loss=loss, optimizer=passes.AdamW())
        for target in ("plain", "portable"):
            (BUILD / f"{name}.{target}.onnx").write_bytes(whole(target_of(target).lower(step)))
        feeds = {
            x.name: [x.dtype.name.lower(), [n if isinstance(n, int) else rows for n in x.shape]]
            for x in step.graph.inputs
        }
        (BUILD / f"{name}.json").write_text(json.dumps(feeds))


if __name__ == "__main__":
    main()
