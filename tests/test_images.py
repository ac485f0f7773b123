"""Folders of images: what is read, as whom, what is refused, and training on them."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import messages
import numpy as np
import PIL.Image
import pytest
from sklearn.datasets import load_sample_images

import graphopt
import passes
from graphopt import cli, data, models
from graphopt.data import Batches
from graphopt.errors import GraphoptError

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (9, 7, 3), np.uint8)
GRAY = RNG.integers(0, 256, (9, 7), np.uint8)


def save(path: Path, pixels: np.ndarray, mode: str | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = PIL.Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two classes of three images each."""
    for i, name in enumerate(["dog", "cat"] * 3):
        save(tmp_path / "images" / name / f"{i}.png", RNG.integers(0, 256, (6, 5, 3), np.uint8))
    return tmp_path / "images"


def pixels(path: Path, mode: str = "RGB", size: tuple[int, int] | None = None, resample: int = 2) -> np.ndarray:
    """Return what Pillow reads, as float32 [C, H, W] from 0 to 1."""
    image = PIL.Image.open(path).convert(mode)
    found = np.asarray(image if size is None else image.resize(size[::-1], resample), np.float32) / np.float32(255)
    return np.moveaxis(found, 2, 0) if found.ndim == 3 else found[None]


def test_classes_are_folders_in_the_order_of_their_names(folder: Path) -> None:
    found = data.images(str(folder))
    files = sorted((folder / "cat").iterdir()) + sorted((folder / "dog").iterdir())
    assert (np.asarray(found.arrays["x"]) == np.stack([pixels(file) for file in files])).all()
    assert found.arrays["x"].dtype == np.float32
    assert found.arrays["target"].tolist() == [0, 0, 0, 1, 1, 1]
    assert (found.classes, found.labels, len(found)) == (2, ("cat", "dog"), 6)


def test_images_are_read_when_a_batch_needs_them(folder: Path) -> None:
    model = graphopt.compile(models.cnn((3, 6, 5), 2), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    batches = Batches(data.images(str(folder)), graphopt.Executor(model).inputs)
    (folder / "cat" / "3.png").unlink()
    assert batches.is_lazy
    assert batches.take(np.array([5, 0]))["target"].tolist() == [1, 0]
    with pytest.raises(GraphoptError, match=r"cat/3\.png: no such file"):
        batches.take(range(2))


def test_hidden_files_are_skipped_and_folders_may_be_deep(folder: Path) -> None:
    (folder / "cat" / ".DS_Store").write_bytes(b"x")
    (folder / ".git").mkdir()
    (folder / "readme.txt").write_text("beside the classes")
    (folder / "dog" / ".cache").mkdir()
    (folder / "dog" / ".cache" / "x").write_bytes(b"x")
    save(folder / "cat" / "more" / "1.jpg", RNG.integers(0, 256, (6, 5, 3), np.uint8))
    found = data.images(str(folder))
    assert found.arrays["target"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (np.asarray(found.arrays["x"])[3] == pixels(folder / "cat" / "more" / "1.jpg")).all()


def test_files_that_are_not_images_are_skipped_with_one_warning(folder: Path) -> None:
    for name in ("Thumbs.db", "desktop.ini", "notes.txt", "labels.csv", "web page.jpg"):
        (folder / "cat" / name).write_text("no image")
    (folder / "cat" / "empty.png").touch()
    (folder / "cat" / "vectors.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.warns(
        UserWarning, match=r"images: skipped files that are not images: .*Thumbs\.db, .* and 4 more$"
    ) as told:
        found = data.images(str(folder))
    assert len(told) == 1
    assert found.arrays["target"].tolist() == [0, 0, 0, 1, 1, 1]
    assert (np.asarray(found.arrays["x"])[0] == pixels(folder / "cat" / "1.png")).all()
    for name in ("web page.jpg", "empty.png", "vectors.jpg"):
        with pytest.raises(
            GraphoptError, match=r"\.(jpg|png): expected an image, as its name says, found another file"
        ):
            data.images(str(folder), target=None)  # the rows of predictions would shift
        (folder / "cat" / name).unlink()
    with pytest.warns(UserWarning, match="skipped"):
        assert data.images(str(folder), target=None).arrays["x"].shape[0] == 6
    with pytest.raises(GraphoptError, match=r"notes\.txt: expected images, found another file$"):
        data.images(str(folder / "cat" / "notes.txt"), target=None)
    (folder / "bird").mkdir()
    (folder / "bird" / "Thumbs.db").write_text("no image")
    with pytest.raises(GraphoptError, match=r"expected images in each folder, found only .*bird/Thumbs\.db"):
        data.images(str(folder))


@pytest.mark.parametrize(
    ("pixel_range", "mend"),
    [("Normalized_0_1", "resize the pictures, data.size=[8,8]"), (None, "reshape each row, which has as many numbers")],
)
def test_only_pictures_are_to_be_resized(pixel_range: str | None, mend: str) -> None:
    """Signals have no option `data.size`."""
    step = graphopt.compile(models.linear((1, 8, 8), 2), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    arrays = {"x": np.zeros((3, 1, 64, 1), np.float32), "target": np.zeros(3, np.int64)}
    rows = data.Dataset(arrays, "x", 2, pixel_range=pixel_range)
    with pytest.raises(GraphoptError) as error:
        graphopt.fit(graphopt.Executor(step), rows, epochs=1)
    assert str(error.value).endswith(mend)


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_of_keras_models_have_their_channels_last(folder: Path, channels: Any) -> None:
    first, last = (
        data.images(str(folder), layout=layout, size=[7, 9], channels=channels) for layout in ("NCHW", "NHWC")
    )
    assert last.arrays["x"].shape == (6, 7, 9, channels)
    assert (np.asarray(last.arrays["x"]) == np.moveaxis(np.asarray(first.arrays["x"]), 1, -1)).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("resample", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_sample_photographs_are_resized_as_by_pillow(tmp_path: Path, resample: Any, channels: int) -> None:
    for name in load_sample_images().filenames:
        target = tmp_path / Path(name).stem / Path(name).name
        target.parent.mkdir()
        shutil.copy(name, target)
    found = data.images(str(tmp_path), size=[40, 30], resample=resample, channels=channels)
    assert found.labels == ("china", "flower")
    method = getattr(PIL.Image.Resampling, resample.upper())
    for row, name in zip(np.asarray(found.arrays["x"]), ("china", "flower"), strict=True):
        path = tmp_path / name / f"{name}.jpg"
        assert (row == pixels(path, {1: "L", 3: "RGB"}[channels], (40, 30), method)).all()
    whole = data.images(str(tmp_path))
    assert (whole.arrays["x"][1:2][0] == load_sample_images().images[1].transpose(2, 0, 1) / np.float32(255)).all()


@pytest.mark.parametrize(
    ("name", "array", "mode", "options", "expected"),
    [
        ("a.png", COLOURS, None, {}, COLOURS),
        ("a.bmp", COLOURS, None, {}, COLOURS),
        ("a.tiff", COLOURS, None, {"compression": "tiff_lzw"}, COLOURS),
        ("a.webp", COLOURS, None, {"lossless": True}, COLOURS),
        ("a.ppm", COLOURS, None, {}, COLOURS),
        ("gray.png", GRAY, None, {}, GRAY[..., None]),
        ("palette.png", GRAY // 16 * 16, "P", {}, (GRAY // 16 * 16)[..., None]),
        ("seen_through.png", GRAY // 16 * 16, "P", {"transparency": bytes(range(256))}, (GRAY // 16 * 16)[..., None]),
        ("palette.gif", GRAY // 16 * 16, "P", {}, (GRAY // 16 * 16)[..., None]),
        ("black_and_white.png", GRAY, "1", {}, None),
        ("alpha.png", np.dstack([COLOURS, GRAY]), None, {}, COLOURS),  # the colours stay, however transparent
        ("gray_and_alpha.png", np.dstack([GRAY, GRAY]), None, {}, GRAY[..., None]),
        ("deep.png", GRAY.astype(np.uint16) * 256 + 99, None, {}, GRAY[..., None]),
        ("deep.tiff", GRAY.astype(np.uint16) * 256 + 99, None, {}, GRAY[..., None]),
        ("print.jpg", COLOURS, "CMYK", {}, None),
        ("photo.jpg", COLOURS, None, {"quality": 30}, None),
        ("name_without_ending", COLOURS, None, {"format": "PNG"}, COLOURS),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error", "ignore::ImportWarning")
def test_modes(
    tmp_path: Path, name: str, array: np.ndarray, mode: str | None, options: dict[str, Any], expected: Any
) -> None:
    path = save(tmp_path / name, array, mode, **options)
    found = data.images(str(tmp_path), target=None, scale=False)
    assert set(found.arrays) == {"x"}
    x = np.asarray(found.arrays["x"])
    assert (x.shape, x.dtype) == ((1, 3, 9, 7), np.uint8)
    if expected is None:
        expected = np.asarray(PIL.Image.open(path).convert("RGB"))
    assert (x[0] == np.moveaxis(np.broadcast_to(expected, (9, 7, 3)), 2, 0)).all()


def test_the_orientation_in_exif_data_does_not_turn_an_image(tmp_path: Path) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees
    save(tmp_path / "turned.png", COLOURS, exif=exif)
    assert (
        np.asarray(data.images(str(tmp_path), target=None, scale=False).arrays["x"])[0] == np.moveaxis(COLOURS, 2, 0)
    ).all()


def test_classes_by_name(folder: Path) -> None:
    shutil.rmtree(folder / "cat")
    found = data.images(str(folder), labels=["wolf", "dog", "cat"])
    assert found.arrays["target"].tolist() == [1, 1, 1]
    assert found.classes == 3
    with pytest.raises(GraphoptError, match=r"dog: expected a folder of wolf, cat: add it to data.labels, or remove"):
        data.images(str(folder), labels=["wolf", "cat"])


def changed(folder: Path, change: Any, options: dict[str, Any]) -> Any:
    change(folder)
    return np.asarray(data.images(str(folder), **options).arrays["x"])


def test_paths_that_are_no_folders(folder: Path) -> None:
    with pytest.raises(GraphoptError, match="expected a folder of images, found none"):
        data.images(str(folder / "none"))
    with pytest.raises(GraphoptError, match=r"1\.png: expected a folder of images, found a file"):
        data.images(str(folder / "cat" / "1.png"))
    (folder / "nothing").mkdir()
    with pytest.raises(GraphoptError, match="nothing: expected images, found an empty folder"):
        data.images(str(folder / "nothing"), target=None)


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_images_are_errors_of_one_line(tmp_path: Path, kind: str) -> None:
    draw, file, path = random.Random(0), io.BytesIO(), tmp_path / "x"
    PIL.Image.fromarray(COLOURS).save(file, kind)
    content, found = file.getvalue(), []
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(draw.choice([0, 1, 3])):
            damaged[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(damaged[: draw.choice([None, draw.randrange(len(content))])])
        with contextlib.suppress(GraphoptError), catching(found):
            np.asarray(data.images(str(tmp_path), target=None, size=[4, 4]).arrays["x"])
    assert found
    assert all(one.startswith((str(path), f"{tmp_path}: expected images")) and "\n" not in one for one in found)


@contextlib.contextmanager
def catching(found: list[str]) -> Iterator[None]:
    """Note the text of an error, and pass it on."""
    try:
        yield
    except GraphoptError as error:
        found.append(str(error))
        raise


@pytest.mark.slow
def test_training_on_images_gives_the_bits_of_training_on_arrays(tmp_path: Path) -> None:
    for i in range(40):
        bright = RNG.integers(0, 256, (8, 8), np.uint8) // 2 + (i % 2) * 120
        save(tmp_path / ["dark", "light"][i % 2] / f"{i:02}.png", bright.astype(np.uint8))
    found = data.images(str(tmp_path), channels=1)
    arrays = {"x": np.asarray(found.arrays["x"]), "target": found.arrays["target"]}
    step = graphopt.compile(models.cnn((1, 8, 8), 2), loss=passes.CrossEntropy(), optimizer=passes.Adam(0.01))
    one, other = graphopt.Executor(step, threads=1), graphopt.Executor(step, threads=1)
    records = graphopt.fit(one, found, epochs=3, batch_size=8)
    graphopt.fit(other, arrays, epochs=3, batch_size=8)
    assert all((one.state[name] == other.state[name]).all() for name in one.state)
    assert records[-1]["accuracy"] > 0.9


@pytest.mark.slow
def test_the_command_trains_evaluates_and_predicts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    common = ["data=images", "data.size=[8,8]", "folder=out", "executor.threads=1"]
    assert cli.main(["model=cnn", "data.path=images", "fit.epochs=2", "fit.validation=null", *common]) == 0
    assert cli.main(["evaluate", "data.path=images", *common]) == 0
    assert cli.main(["predict", "data.path=images/dog", "data.target=null", "predictions=p.csv", *common]) == 0
    rows = (folder.parent / "out" / "p.csv").read_text().splitlines()
    assert len(rows) == 4
    place = rows[0].split(",").index("label")
    assert all(row.split(",")[place] in ("cat", "dog") for row in rows[1:])
    capsys.readouterr()
    first = min((folder / "dog").iterdir())
    assert cli.main(["predict", "out", f"images/dog/{first.name}", "predictions=p.csv"]) == 0
    row = (folder.parent / "out" / "p.csv").read_text().splitlines()[1]
    assert row == rows[1] and f"label     {row.split(',')[place]}\n" in capsys.readouterr().out
    assert cli.main(["predict", "out", "none.png"]) == 1
    assert "none.png: expected a folder of images, found none" in capsys.readouterr().err
    (folder / "cat" / "half.png").write_bytes((folder / "cat" / "1.png").read_bytes()[:-30])
    assert cli.main(["model=cnn", "data.path=images", "data=images", "folder=other"]) == 1
    assert "images/cat/half.png: expected a whole image" in capsys.readouterr().err


@pytest.mark.slow
def test_a_recipe_reads_no_image_beyond_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    shutil.copytree(folder, work / "images")
    (work / "recipes" / "experiment").mkdir(parents=True)
    recipe = "# @package _global_\ndefaults:\n  - override /data: images\nmodel: cnn\ndata: {path: images}\n"
    (work / "recipes" / "experiment" / "mine.yaml").write_text(recipe)
    monkeypatch.chdir(work)
    run = ["--config-dir", "recipes", "experiment=mine", "fit.epochs=1", "executor.threads=1"]
    assert cli.main([*run, "folder=one"]) == 0
    (work / "images" / "cat" / "deep").mkdir()
    os.symlink(folder / "dog" / "0.png", work / "images" / "cat" / "deep" / "link.png")
    assert cli.main([*run, "folder=two"]) == 1
    assert "data.path: expected a file below the working directory" in capsys.readouterr().err


@pytest.mark.parametrize("size", [None, [8, 8]])
@pytest.mark.slow
def test_an_image_that_expands_too_far_is_refused_before_it_is_decoded(tmp_path: Path, size: Any) -> None:
    for name in ("cat", "dog"):
        save(tmp_path / name / "0.png", np.zeros((9_000, 9_000), np.uint8))
    with pytest.raises(GraphoptError, match=r"at most 100 times the file of .* set data\.expansion=\d+"):
        data.images(str(tmp_path), size=size, channels=1)
    assert len(data.images(str(tmp_path), size=size, channels=1, expansion=10**6)) == 2


@pytest.mark.parametrize("size", [[10**6, 10**6], [2**27, 1], 10, "10", [10]])
def test_a_size_of_too_many_or_no_two_numbers_is_refused(folder: Path, size: Any) -> None:
    with pytest.raises(GraphoptError, match=r"data\.size: expected a height and a width"):
        data.images(str(folder), size=size)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("images_mistakes"))
def test_mistakes_are_told_in_a_line(call: str, folder: Any) -> None:
    messages.refused("images_mistakes", call, {**globals(), "folder": folder})
