"""Every example runs, and does what it says."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def linear_regression(result):
    assert result["coefficients"] < 1e-3
    assert result["intercept"] < 1e-3
    assert result["after"] < 1e-6 < result["before"]


def scikit_learn_mlp(result):
    for before, after in result.values():
        assert after > before
    assert result["accuracy"][1] > 0.95


def custom_loss_and_optimizer(result):
    assert result[-1] < result[0] / 3


def cnn_digits(result):
    assert result > 0.95


def text_transformer(result):
    assert result[-1] < result[0] < np.log(100)


def fine_tune_file_types(result):
    assert result[".pyi"][0] < 0.1
    assert min(after for _, after in result.values()) > 0.8


def fine_tune_language_model(result):
    assert result["after"].startswith("\nHumpty Dumpty")  # the whole example writes the whole rhyme
    assert "Humpty" not in result["before"]


def by_hand(result):
    np.testing.assert_allclose(result["by hand"], result["fused"], rtol=1e-5)
    assert result["fused"][-1] < result["fused"][0] / 3


def torch_layer(result):
    for other in ("PyTorch alone", "one training graph"):
        np.testing.assert_allclose(result["with ONNX"], result[other], rtol=1e-5)
    assert result["with ONNX"][-1] < result["with ONNX"][0] - 0.3
    assert result["apart"] < 1e-3


def trainer_regression(result):
    assert result["synthetic"]["after"] > 0.99 > result["synthetic"]["before"]
    for r2 in result.values():
        assert r2["after"] > max(r2["before"], r2["scikit-learn"] - 0.05)


def trainer_classifier(result):
    for accuracy in result.values():
        assert accuracy["after"] > max(accuracy["before"], accuracy["scikit-learn"] - 0.05)


def plot_graphs(result):
    assert result["svg"].lstrip().startswith("<?xml")
    assert all("its training graph" in text and "learning_rate" in text for text in result.values())


def on_device(result):
    assert result["difference"] < 1e-4
    assert result["accuracy"] > 0.95


def draw_report(result):
    """The guide's pictures are of the pages' size; their numbers differ from run to run."""
    from PIL import Image  # of an extra

    for name, picture in result.items():
        kept = Path(__file__).parents[1] / "examples/pictures" / name
        assert Image.open(kept).size == Image.open(io.BytesIO(picture)).size
        assert len(picture) < 300_000


def draw_quantization(result):
    """The kept picture is that of the page's tables."""
    assert result == (Path(__file__).parents[1] / "examples/pictures/quantization.svg").read_text()


def draw_reliability(result):
    before, after = (float(x) for x in re.findall(r"([\d.]+)% sure", result))
    right = float(re.search(r"([\d.]+)% right", result)[1])
    assert abs(after - right) < abs(before - right)


def draw_membership(result):
    plain, private = (float(x) for x in re.findall(r"area ([\d.]+)", result))
    assert plain > private + 0.1 > 0.5


NEEDS = {
    "draw_membership": "dp_accounting",
    "fine_tune_file_types": "magika",
    "on_device": "onnxruntime.training",
}


SHORTER = {"fine_tune_language_model": {"rows": 96, "epochs": 1, "lessons": 50}}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_example(path, monkeypatch):
    needed = NEEDS.get(path.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"the package {needed} is not installed: see the extras of pyproject.toml")
    if path.stem == "draw_report" and not Path(os.environ.get("CHROMIUM", "/usr/bin/chromium")).exists():
        pytest.skip("needs Chromium")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    globals()[path.stem](module.main(**SHORTER.get(path.stem, {})))
