"""`graphopt explain` with data: heat over pictures, bars beside features, colors behind tokens."""

from __future__ import annotations

import io
import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from builders import linear, model
from PIL import Image
from test_labelled_text import folder

import graphopt
from graphopt import cli, data, models

__all__ = ["folder"]  # a fixture


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def explained(*words: str) -> str:
    assert cli.main(["explain", "my.onnx", *words, "folder=out"]) == 0
    return Path("out/explanation.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "is_signed"),
    [
        (["explain=gradcam"], False),
        (["explain=integrated_gradients", "explain.steps=8"], True),
        (["explain=fgsm"], False),
    ],
    ids=["gradcam", "integrated_gradients", "fgsm"],
)
def test_the_heat_of_an_explanation_lies_over_its_picture(words: list[str], is_signed: bool) -> None:
    graphopt.save(models.cnn((1, 8, 8), 10), "my.onnx")
    text = explained(*words, "data=digits")
    shown = [Image.open(io.BytesIO(b64decode(x))) for x in re.findall(r"image/png;base64,([^\"]+)", text)]
    assert len(shown) == 12 and {image.size for image in shown} == {(8, 8)}
    rows = data.digits().arrays["x"][:12]
    labels = data.digits().arrays["target"][:12]
    found = graphopt.run(
        "out/explained.onnx",
        {
            "x": rows,
            "target" if "fgsm" in words[0] else "class": labels if "fgsm" in words[0] else np.full(12, -1),
        },
    )
    heat = found["x.adversarial"] - rows if "fgsm" in words[0] else found["y.explanation"]
    heat = heat[:, 0] / abs(heat).max((1, 2, 3))[:, None, None]
    heat = heat if is_signed else abs(heat)
    colors = np.stack([np.asarray(image, np.float64) for image in shown]) / 255
    grey = rows[:, 0] / rows.max((1, 2, 3))[:, None, None]
    target = np.where(heat[..., None] < 0, [24, 100, 171], [217, 72, 15]) / 255
    strength = 0.8 * abs(heat[..., None])
    np.testing.assert_allclose(colors, grey[..., None] * (1 - strength) + strength * target, atol=0.5 / 255 + 1e-6)
    best = found["y"].argmax(1)
    assert [f"row {i}: class {k}" for i, k in enumerate(best)] == re.findall(r"<b>(row.*?)</b>", text)


def test_features_have_bars_and_names() -> None:
    Path("rows.csv").write_text("tall,wide,target\n1,2,3\n-1,0.5,1\n")
    weights = np.array([[2.0], [-4.0]])
    graphopt.save(model("g (float[N,2] x) => (float[N,1] y) { y = MatMul(x, w) }", w=weights), "my.onnx")
    text = explained("explain=integrated_gradients", "data=csv", "data.path=rows.csv")
    bars = re.findall(r"<td>(\w+)</td><td>(.*?)</td><td class=\"bar (\w+)\" style=\"--from:(.*?)%;--to:(.*?)%", text)
    assert bars == [
        ("wide", "2", "less", "0.0", "50.0"),
        ("tall", "1", "more", "50.0", "62.5"),
        ("tall", "-1", "less", "0.0", "50.0"),
        ("wide", "0.5", "less", "0.0", "50.0"),
    ]


def test_tokens_have_colors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", str(folder), "explain=integrated_gradients", "data=labelled_text", "folder=out"]
    words.append(f"data.path={folder / 'reviews.csv'}")
    assert cli.main(words) == 1
    assert "found none: take the embedding's output 'embedding'" in capsys.readouterr().err
    assert cli.main([*words, "explain.input=embedding"]) == 0
    text = Path("out/explanation.html").read_text(encoding="utf-8")
    reviews = [line.partition(",")[0] for line in (folder / "reviews.csv").read_text().splitlines()[1:13]]
    rows = [
        re.findall(r'<span class="(\w+)" style="--share:([\d.]+)">(.*?)</span>', part)
        for part in re.findall(r'<p class="words">(.*?)</p>', text)
    ]
    assert [[word for *_, word in row] for row in rows] == [review.split() for review in reviews]
    assert all(max(float(share) for _, share, _ in row) == 0.6 for row in rows)


def test_without_data_the_file_is_alone() -> None:
    graphopt.save(linear(), "my.onnx")
    assert cli.main(["explain", "my.onnx", "folder=out"]) == 0
    assert not Path("out/explanation.html").exists()


def test_tokens_of_patches_are_a_grid() -> None:
    from graphopt.cli.explanation import _maps

    assert _maps(np.arange(10.0)[None], False).tolist() == (np.arange(1, 10).reshape(1, 3, 3) / 9).tolist()  # type: ignore[union-attr]
    assert _maps(np.ones((1, 7)), False) is None
