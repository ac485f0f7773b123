"""Write what the app trains, to app/src/main/assets: a head, and an adapter, of a classifier of pictures.

python examples/hosts/android/export.py                                        # of a small network, trained on digits
python examples/hosts/android/export.py classifier.onnx fc.weight fc.bias      # of yours, whose head has these weights
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import graphopt
import graphopt.models
import passes
from graphopt.data import digits

ASSETS = Path(__file__).parent / "app" / "src" / "main" / "assets"


def main(
    assets: Path = ASSETS, model: str | None = None, head: Sequence[str] = ("layers.9.*",), epochs: int = 4
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        classifier = model or pretrained(Path(folder), epochs)
        steps = {"loss": passes.CrossEntropy(), "clip": passes.ClipGlobalNorm(1.0)}
        network = passes.Parameters(tuple(head))
        parts = {"head": {"parameters": network}, "adapter": {"adapter": passes.LoRA(rank=4)}}
        for name, part in parts.items():
            step = graphopt.compile(classifier, optimizer=passes.AdamW(learning_rate=2e-3), **steps, **part)
            graphopt.export_hosts(step, assets / name)
    print(f"{assets}: {sum(path.stat().st_size for path in assets.rglob('*') if path.is_file()) / 1e6:.1f} MB")


def pretrained(folder: Path, epochs: int) -> str:
    """Train a network on the digits 0 to 7, and return its file."""
    rows = digits().arrays
    known = rows["target"] < 8
    step = graphopt.compile(
        graphopt.models.cnn((1, 8, 8), 10), loss=passes.CrossEntropy(), optimizer=passes.AdamW(learning_rate=2e-3)
    )
    executor = graphopt.Executor(step)
    graphopt.fit(executor, {name: x[known] for name, x in rows.items()}, epochs=epochs)
    graphopt.save(executor.trained(), folder / "pretrained.onnx")
    return str(folder / "pretrained.onnx")


if __name__ == "__main__":
    main(model=sys.argv[1] if len(sys.argv) > 1 else None, head=sys.argv[2:] or ("layers.9.*",))
