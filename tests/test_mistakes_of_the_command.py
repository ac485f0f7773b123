"""Mistakes on the command line: each has one line that says what is wrong and what to do, and leaves nothing behind.

The commands and the lines are in `tests/listings/mistakes_of_the_command.txt`.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import messages
import numpy as np
import pytest
from PIL import Image

import graphopt
import passes
from graphopt import cli, data, models
from graphopt.cli.tuning.proposal import read
from graphopt.cli.words import field_of

pytestmark = pytest.mark.usefixtures("plain")

LISTING = "mistakes_of_the_command"
NPZ = "my.onnx data=npz data.path="

WARNED = [
    (
        f"{NPZ}train.npz fit.batch_size=5000000000000",
        "batch_size=5000000000000: more than the 160 rows that train, .* such as 16",
    ),
    (
        "loss=mean_squared_error data=npz data.path=train.npz",
        r"data 'target': whole numbers from 0 to 9 train a regression: .* loss=cross_entropy \(passes.CrossEntropy\).*",
    ),
    (
        f"{NPZ}train.npz fit.checkpoint.best=acuracy",
        "checkpoint.best: unknown measure 'acuracy', nearest: 'accuracy'; .*",
    ),
    (
        "model=mlp loss=mean_squared_error data=csv data.path=index.csv",
        r"index.csv: a column without a name is a feature: pandas writes an index so, .*; data.features=\[...\] .*",
    ),
    (
        f"{NPZ}train.npz callbacks.early_stopping={{monitor:validation_loss,mode:max}}",
        r"EarlyStopping\(monitor='validation_loss', mode='max'\): a smaller value is better, .*: leave mode out",
    ),
    (
        f"{NPZ}train.npz callbacks.early_stopping={{monitor:accuracy,mode:min}}",
        r"EarlyStopping\(monitor='accuracy', mode='min'\): a larger value is better, .*: leave mode out",
    ),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models and data, most of which are wrong."""
    here = tmp_path_factory.mktemp("mistakes")
    (here / "model.keras").write_bytes(b"")
    digits = data.digits().arrays
    x, target = np.asarray(digits["x"][:200]), np.asarray(digits["target"][:200])
    arrays = {
        "train": {},
        "floats": {"target": target.astype(np.float32)},
        "hot": {"target": np.eye(10, dtype=np.float32)[target]},
        "texts": {"target": target.astype(str)},
        "flat": {"x": x.reshape(200, 64)},
        "nan": {"x": np.where(x > 0.5, np.nan, x)},
        "big": {"target": target + 5},
        "gap": {"target": np.where(target == 1, 0, target)},
        "huge": {"x": np.where(x > 0.5, 1e300, np.float64(x))},
        "one": {"x": x[:1], "target": target[:1]},
        "zero": {"x": x[:0], "target": target[:0]},
        "uneven": {"target": target[:-5]},
    }
    for name, changed in arrays.items():
        np.savez(here / f"{name}.npz", **{"x": x, "target": target, **changed})
    np.savez(here / "names.npz", images=x, target=target)
    rows = "".join(f"{i},{2 * i},{3 * i}\n" for i in range(40))
    texts = {
        "rows.csv": f"a,b,target\n{rows}",
        "half.csv": f"a,b,target\n{rows}41,8",
        "twice.csv": f"a,a,target\n{rows}",
        "header.csv": "a,b,target\n",
        "empty.csv": "",
        "book.xlsx": "PK\x03\x04",
        "bad.parquet": "PAR1",
        "index.csv": f",a,b,target\n{''.join(f'{i},{line}' for i, line in enumerate(rows.splitlines(keepends=True)))}",
        "pointer.csv": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "pointer.onnx": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "page.onnx": "<!DOCTYPE html><title>Not found</title>",
        "page.npz": "<html>",
        "lines.jsonl": '{"text": "a b"}\n{"text": \n',
    }
    for name, text in texts.items():
        (here / name).write_text(text)
    np.save(here / "array.npy", x)
    (here / "dangling.onnx").symlink_to("nowhere.onnx")
    graphopt.save(models.mlp((1, 8, 8), 10, hidden=[8]), here / "my.onnx")
    graphopt.save(models.linear((2,), 1), here / "linear.onnx")
    step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    graphopt.save(step, here / "step.onnx")
    graphopt.Executor(step).save(here / "state.safetensors")
    (here / "half.onnx").write_bytes((here / "my.onnx").read_bytes()[:200])
    (here / "run/checkpoints/step-1").mkdir(parents=True)
    (here / "run/config.yaml").write_text("{}\n")
    (here / "run/trained.onnx").write_bytes((here / "my.onnx").read_bytes())
    (here / "served").mkdir()
    (here / "served/my.onnx").write_bytes((here / "my.onnx").read_bytes())
    with zipfile.ZipFile(here / "zip.onnx", "w") as archive:
        archive.write(here / "my.onnx")
    for folder in (
        "folder.onnx",
        "images/cat",
        "images/dog",
        "own/experiment",
        "notes",
        "onekind/cat",
        "two/a",
        "two/b",
    ):
        (here / folder).mkdir(parents=True)
    for kind in ("cat", "dog"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(here / "images" / kind / "0.png")
    (here / "own/experiment/bad.yaml").write_text("fit: {epochs: [\n")
    (here / "own/experiment/nothing.yaml").write_text("fit: {epochs: 1}\n")
    return here


@pytest.fixture(autouse=True)
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def listed() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


@pytest.mark.parametrize("call", messages.calls(LISTING))
def test_a_mistake_has_one_line_and_leaves_nothing(call: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = listed()
    assert cli.main(call.split()[1:]) == 1
    said = capfd.readouterr().err
    assert said.startswith("graphopt: error: ") and said.count("\n") == 1, said
    messages.check(LISTING, call, said.removeprefix("graphopt: error: ").rstrip("\n"))
    assert listed() == before


@pytest.mark.parametrize(("line", "answer"), WARNED, ids=[line for line, _ in WARNED])
def test_what_hardly_anyone_means_has_a_warning_of_one_line(
    line: str, answer: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main([*line.split(), "fit.epochs=1", f"folder={tmp_path / 'out'}"]) == 0
    said = capfd.readouterr().err
    assert re.fullmatch(f"graphopt: warning: {answer}\n", said), said


@pytest.mark.parametrize("name", ["Übung/мои данные.npz", "a&b #1!.npz", "it's.npz"])
def test_names_of_files_may_have_any_letters(name: str, tmp_path: Path) -> None:
    """Hydra's grammar has ASCII alone; a quote is quoted, as the error says."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(Path("train.npz").read_bytes())
    value = f'"{file}"' if "'" in name else str(file)
    given = ["my.onnx", "data=npz", f"data.path={value}", "fit.epochs=1"]
    assert cli.main([*given, f"folder={tmp_path / 'ö'}"]) == 0
    assert cli.main(["evaluate", f"folder={tmp_path / 'ö'}"]) == 0


@pytest.mark.parametrize("path", ["C:/Jörg/мои данные.csv", r"C:\Jörg\x.csv", "Jörg:2.csv"])
def test_paths_of_windows_may_have_any_letters(path: str) -> None:
    assert read(field_of(f"data.path={path}", ())) == path


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ([], np.arange(200) * 3),
        ([], np.random.default_rng(0).poisson(3, 200)),
        ([], np.random.default_rng(0).normal(size=200).astype(np.float32)),
        (["fit.batch_size=32"], np.arange(200) * 0.5),
    ],
)
def test_numbers_of_a_regression_are_not_warned_of(
    options: list[str], target: np.ndarray, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.savez(tmp_path / "numbers.npz", x=np.ones((200, 2), np.float32), target=target)
    given = ["linear.onnx", "loss=mean_squared_error", "data=npz", f"data.path={tmp_path / 'numbers.npz'}"]
    assert cli.main([*given, *options, "fit.epochs=1", f"folder={tmp_path / 'out'}"]) == 0
    assert capfd.readouterr().err == ""
