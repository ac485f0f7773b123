"""Teach a pretrained network a class without a label, without a framework: magika learns to recognize type stubs.

The package magika contains an ONNX file that classifies files as one of 214 types by their bytes. It classifies stubs
(.pyi) as Python. This program freezes all layers except the last, and trains that on the files of installed packages.

Run it: pip install magika, then python examples/fine_tune_file_types.py
"""

from __future__ import annotations

import importlib.util
import json
import sysconfig
from pathlib import Path

import numpy as np

import graphopt
import passes

HEAD = ["*/Dense_1/*", "*/Const_24:0"]  # the bias and the matrix of the last layer
STUB = "3gp"  # the label for stubs: a type of which Python's packages contain no files


def features(path: Path, ends: int = 1024, padding: int = 256) -> np.ndarray:
    """Return the first and the last bytes of a file, magika's features."""
    content = np.frombuffer(path.read_bytes().strip(), np.uint8)
    row = np.full(2 * ends, padding, np.int32)
    row[: len(content[:ends])] = content[:ends]
    row[2 * ends - len(content[-ends:]) :] = content[-ends:]
    return row


def files(suffix: str, count: int, random: np.random.Generator) -> list[Path]:
    """Return some files of the installed packages that are not almost empty."""
    found = [path for path in Path(sysconfig.get_path("purelib")).rglob(f"*{suffix}") if path.stat().st_size > 200]
    return [Path(path) for path in random.choice(sorted(map(str, found)), min(count, len(found)), replace=False)]


def main() -> dict[str, tuple[float, float]]:
    """Return the accuracy on held-out files of each kind before and after training."""
    spec = importlib.util.find_spec("magika")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "models/standard_v3_3"
    labels = json.loads((folder / "config.min.json").read_text())["target_labels_space"]
    random = np.random.default_rng(0)
    kinds = {".py": labels.index("python"), ".pyi": labels.index(STUB)}
    paths = {suffix: files(suffix, 120, random) for suffix in kinds}
    x = np.stack([features(path) for suffix in kinds for path in paths[suffix]])
    y = np.array([label for suffix, label in kinds.items() for _ in paths[suffix]])
    order = random.permutation(len(x))
    held_out, rows = order[: len(x) // 4], order[len(x) // 4 :]

    step = graphopt.compile(
        folder / "model.onnx",
        parameters=passes.Parameters(HEAD),
        loss=passes.CrossEntropy(from_logits=False),
        optimizer=passes.AdamW(learning_rate=3e-3),
    )
    executor = graphopt.Executor(step, report=["loss"])

    def accuracies() -> dict[str, float]:
        chosen = executor.predict(bytes=x[held_out])["target_label"].argmax(axis=1)
        right, kind = chosen == y[held_out], y[held_out]
        return {suffix: float(np.mean(right[kind == label])) for suffix, label in kinds.items()}

    before = accuracies()
    for epoch in range(10):
        shuffled = random.permutation(rows)
        losses = [executor.step(bytes=x[batch], target=y[batch])["loss"] for batch in np.array_split(shuffled, 6)]
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
    after = accuracies()
    for suffix in kinds:
        print(f"accuracy on held-out {suffix} files: {before[suffix]:.3f} before, {after[suffix]:.3f} after")
    return {suffix: (before[suffix], after[suffix]) for suffix in kinds}


if __name__ == "__main__":
    main()
