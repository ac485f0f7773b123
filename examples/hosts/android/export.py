"""Write what the app trains, to app/src/main/assets: a head, and an adapter with one, of a classifier of pictures.

python examples/hosts/android/export.py                     # of a small network, trained on digits
python examples/hosts/android/export.py classifier.onnx     # of yours
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import graphopt
import graphopt.models
import passes
from graphopt.data import digits

ASSETS = Path(__file__).parent / "app" / "src" / "main" / "assets"
CLASSES = 10  # that a phone can name


def main(assets: Path = ASSETS, model: str | None = None, epochs: int = 4) -> None:
    head = passes.Head(classes=CLASSES)
    with tempfile.TemporaryDirectory() as folder:
        for name, adapters in {"head": [head], "adapter": [head, passes.LoRA(rank=4)]}.items():
            step = graphopt.compile(
                model or pretrained(Path(folder), epochs),
                adapter=adapters,
                loss=passes.CrossEntropy(),
                clip=passes.ClipGlobalNorm(1.0),
                optimizer=passes.AdamW(learning_rate=2e-3),
            )
            graphopt.export_hosts(step, assets / name)
    print(f"{assets}: {sum(path.stat().st_size for path in assets.rglob('*') if path.is_file()) / 1e6:.1f} MB")


def pretrained(folder: Path, epochs: int) -> Path:
    """Train a network on the digits 0 to 7, once, and return its file."""
    path, rows = folder / "pretrained.onnx", digits().arrays
    if not path.exists():
        known = rows["target"] < 8
        step = graphopt.compile(
            graphopt.models.cnn((1, 8, 8), 10), loss=passes.CrossEntropy(), optimizer=passes.AdamW(learning_rate=2e-3)
        )
        executor = graphopt.Executor(step)
        graphopt.fit(executor, {name: x[known] for name, x in rows.items()}, epochs=epochs)
        graphopt.save(executor.trained(), path)
    return path


if __name__ == "__main__":
    main(model=sys.argv[1] if len(sys.argv) > 1 else None)
