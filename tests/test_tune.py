"""`graphopt tune`: what it proposes for files of PyTorch and folders, and what its runs train."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import PIL.Image
import pyarrow.csv
import pyarrow.parquet
import pytest
import skl2onnx
import soundfile
import torch
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import graphopt
from graphopt import cli, data
from graphopt.cli.tuning.command import propose
from graphopt.cli.tuning.images import share_right, tried
from graphopt.cli.tuning.notes import PIXELS
from graphopt.overrides import quoted

DIGITS = load_digits()
NAMES = ("five", "six", "seven")
LABELS = np.array([label for label in DIGITS.target if 5 <= label <= 7]) - 5
IMAGES = np.array([x for x, label in zip(DIGITS.images, DIGITS.target, strict=True) if 5 <= label <= 7])


def written(folder: Path, rows: slice) -> Path:
    """Write digits 5 to 7 as pictures of 24 x 16 pixels, darker than they are in the data set."""
    for i, (pixels, label) in enumerate(zip(IMAGES[rows], LABELS[rows], strict=True)):
        place = folder / NAMES[label]
        place.mkdir(parents=True, exist_ok=True)
        gray = PIL.Image.fromarray((pixels * 15.9).astype(np.uint8)).resize((24, 16))
        gray.convert("RGB").save(place / f"{i}.png")
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def network(form: str = "imagenet") -> torch.nn.Module:
    """Return a network that tells the digits 0 to 4 of 16 x 24 pixels, standardized in some form."""
    torch.manual_seed(0)
    gray = torch.tensor(DIGITS.images[DIGITS.target < 5][:400] * 15.9 / 255, dtype=torch.float32)[:, None]
    pixels = torch.nn.functional.interpolate(gray, (16, 24), mode="bilinear").expand(-1, 3, -1, -1)
    mean, scale = (torch.tensor(x, dtype=torch.float32).reshape(1, -1, 1, 1) for x in PIXELS[form])
    layers = [torch.nn.Conv2d(3, 12, 3, stride=2, padding=1), torch.nn.BatchNorm2d(12), torch.nn.ReLU6()]
    layers += [torch.nn.Conv2d(12, 64, 3, stride=2), torch.nn.ReLU6(), torch.nn.AdaptiveAvgPool2d(1)]
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(64, 5))
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    targets = torch.tensor(DIGITS.target[DIGITS.target < 5][:400])
    for _ in range(25):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net((pixels - mean) / scale), targets).backward()
        optimizer.step()
    return net.eval()


class LastChannel(torch.nn.Module):
    """Take images as Keras does, and return probabilities."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.permute(0, 3, 1, 2)).softmax(1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of model files and pictures."""
    folder = tmp_path_factory.mktemp("tuned")
    net, example = network(), torch.rand(1, 3, 16, 24)
    torch.onnx.export(net, (example,), folder / "fixed.onnx", dynamo=False)
    axes = {"x": {0: "batch", 2: "height", 3: "width"}}
    torch.onnx.export(net, (example,), folder / "open.onnx", dynamo=False, input_names=["x"], dynamic_axes=axes)
    torch.onnx.export(LastChannel(net), (example.permute(0, 2, 3, 1),), folder / "last.onnx", dynamo=False)
    (written(folder / "pictures", slice(0, 150)) / "six" / "Thumbs.db").write_bytes(b"no image")
    return folder


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the lines that were printed, by their topics, the first of each."""
    lines: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        topic, _, text = line.partition("  ")
        lines.setdefault(topic, text.strip())
    return lines


def tuned(*words: str | Path) -> None:
    assert cli.main(["tune", *map(str, words), "executor.native=false", "executor.threads=1"]) == 0


def final_accuracy(run: Path) -> float:
    """Return the held-out accuracy of the epoch whose weights a run has."""
    epoch = json.loads((run / "result.json").read_text())["epoch"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(next(record["accuracy"] for record in records if record["epoch"] == epoch))


def accuracy(model: Path, folder: Path, layout: str = "NCHW") -> float:
    """Return the share of pictures whose class a trained file tells, run as it is."""
    rows = data.images(str(folder), size=[16, 24], layout=layout)
    name = onnx.load(model).graph.input[0].name
    found = next(iter(graphopt.run(str(model), {name: rows.arrays["x"][:]}).values()))
    return float((found.argmax(axis=1) == rows.arrays["target"][:]).mean())


def test_a_fixed_file_and_a_folder_become_a_classifier_as_accurate_as_pytorch_s_head(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned(files / "fixed.onnx", files / "pictures", f"folder={tmp_path / 'run'}", "--pixels=imagenet")
    lines = said(capsys)
    assert lines["data"].endswith("150 images in 3 classes, five 50, seven 49, six 51")
    assert (
        lines["pixels"].startswith("imagenet: (x - [0.485,")
        and lines["pixels"].endswith("as --pixels says")
        and lines["batch"] == "the fixed batch of 1 is freed"
    )
    assert (tmp_path / "run" / "report.html").read_text().count("<figure") >= 12  # pictures, and not their features
    trained = tmp_path / "run" / "trained.onnx"
    note = {entry.key: entry.value for entry in onnx.load(trained).metadata_props}
    assert json.loads(note["labels"]) == sorted(NAMES) and note["Image.NominalPixelRange"] == "Normalized_0_1"

    others = written(tmp_path / "others", slice(150, 400))
    found = accuracy(trained, others)
    mean, scale = (torch.tensor(x).reshape(1, 3, 1, 1) for x in PIXELS["imagenet"])
    train, test = (data.images(str(place), size=[16, 24]).arrays for place in (files / "pictures", others))
    with torch.no_grad():
        features, held_out = (
            network().eval()[:-1]((torch.tensor(part["x"][:]) - mean) / scale) for part in (train, test)
        )
    scales = [x for x in onnx.load(trained).graph.initializer if x.name.endswith(".scale")]
    divisor = next(x for x in map(onnx.numpy_helper.to_array, scales) if x.size == 1)
    assert 0.9 < float(features.var(0).mean() ** 0.5) / divisor < 1.1  # fewer than 100 features
    head = torch.nn.Linear(64, 3)
    optimizer = torch.optim.AdamW(head.parameters(), 1e-2)
    rows, targets = (
        np.asarray(data.hold_out(150, 0.2, shuffle=True, seed=0)[0]),
        torch.tensor(train["target"][:]),
    )
    with torch.enable_grad():
        for _ in range(200):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(features[rows]), targets[rows]).backward()
            optimizer.step()
    expected = float((head(held_out).argmax(1).numpy() == test["target"][:]).mean())
    assert found > expected - 0.03 and expected > 0.75


def test_the_printed_recipe_repeats_the_run(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(
        files / "fixed.onnx",
        files / "pictures",
        f"folder={tmp_path / 'run'}",
        "fit.epochs=2",
        "--pixels",
        "unit",
    )
    lines = said(capsys)
    assert cli.main([*shlex.split(lines["again"])[1:], f"folder={tmp_path / 'again'}"]) == 0
    typed = [word for word in shlex.split(lines["recipe"])[1:] if not word.startswith("folder=")]
    assert cli.main([*typed, f"folder={tmp_path / 'typed'}"]) == 0
    first, *others = (graphopt.load(tmp_path / name / "trained.onnx") for name in ("run", "again", "typed"))
    for other in others:
        for name, value in first.graph.initializers.items():
            assert np.array_equal(value.const_value.numpy(), other.graph.initializers[name].const_value.numpy())


def test_deeper_layers_train_after_the_head_of_a_file_that_leaves_its_sizes_open(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "data.size=[16,24]",
        "fit.epochs=2",
        "--deeper",
        "--pixels=imagenet",
        "optimizer.learning_rate=0.02",
        "fit.checkpoint.best=accuracy",
    ]
    another = tmp_path / "run" / "another"  # run below, which is none of the two
    (another / ".hydra").mkdir(parents=True)
    (another / ".hydra" / "overrides.yaml").write_text("[]")
    (another / "config.yaml").write_text("run: train\nfit: {checkpoint: {best: accuracy}}")
    (another / "metrics.jsonl").write_text('{"epoch": 1, "seconds": 1, "validation_loss": 0, "accuracy": 1.5}\n')
    tuned(files / "open.onnx", files / "pictures", f"folder={tmp_path / 'run'}", *options)
    lines = said(capsys)
    assert lines["deeper"] == "4 weights of the last layers train, too, at a rate of 0.0002"
    best = max("run", "run/deeper", key=lambda place: final_accuracy(tmp_path / place))
    assert lines["best"].startswith(f"{tmp_path / best}/trained.onnx, by the accuracy of held-out rows: ")
    assert "estimated" in (tmp_path / "run" / "deeper" / "report.html").read_text()
    before, after = (graphopt.load(tmp_path / place / "trained.onnx") for place in ("run", "run/deeper"))
    changed = [
        name
        for name, value in before.graph.initializers.items()
        if not np.array_equal(value.const_value.numpy(), after.graph.initializers[name].const_value.numpy())
    ]
    assert set(changed) == {"3.bias", "3.weight", "7.bias", "7.weight"}


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_declared_channels_tell_the_layout(
    layout: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network of padded convolutions, as a ResNet, also runs on images that are 3 pixels high."""
    layers = [torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)]
    net: torch.nn.Module = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8, 5))
    example, axes = torch.rand(2, 3, 16, 24), {0: "batch", 2: "height", 3: "width"}
    if layout == "NHWC":
        net, example, axes = (
            LastChannel(net),
            example.permute(0, 2, 3, 1),
            {0: "batch", 1: "height", 2: "width"},
        )
    path, names = tmp_path / "padded.onnx", {"input_names": ["x"], "dynamic_axes": {"x": axes}}
    torch.onnx.export(net, (example,), path, dynamo=False, **names)
    options = ["data.size=[16,24]", "--pixels=unit", "fit.epochs=1", f"folder={tmp_path / 'run'}"]
    tuned(path, files / "pictures", *options)
    assert layout in said(capsys)["model"]


def test_images_of_keras_s_layout_and_probabilities(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned(files / "last.onnx", files / "pictures", f"folder={tmp_path / 'run'}", "fit.epochs=40")
    lines = said(capsys)
    assert "NHWC" in lines["model"] and "loss.from_logits=false" in lines["recipe"]
    assert accuracy(tmp_path / "run" / "trained.onnx", files / "pictures", "NHWC") > 0.85


NOTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "transformers": (
        "preprocessor_config.json",
        {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"height": 16, "width": 24}},
        r"^\(x - \[0.5,0.5,0.5\]\) / \[0.25,0.25,0.25\] of x from 0 to 1, as \S+/preprocessor_config.json says$",
    ),
    "not rescaled": (
        "preprocessor_config.json",
        {"image_mean": [127.5], "image_std": [51], "do_rescale": False},
        r"^\(x - \[0.5\]\) / \[0.2\] of x from 0 to 1, as \S+/preprocessor_config.json says$",
    ),
    "timm": (
        "config.json",
        {"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1], "input_size": [3, 16, 24]}},
        r"^\(x - \[0.1,0.2,0.3\]\) / \[1,1,1\] of x from 0 to 1, as \S+/config.json says$",
    ),
    "nothing of use": (
        "config.json",
        {"mean": ["a"], "std": 0, "id2label": 3},
        r"^\w+: \(x - .* of 120 images",
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_notes_beside_a_file_say_what_its_pixels_become(case: str, files: Path, tmp_path: Path) -> None:
    name, note, expected = NOTES[case]
    shutil.copy(files / "fixed.onnx", tmp_path)
    (tmp_path / name).write_text(json.dumps(note))
    assert re.search(expected, propose(tmp_path / "fixed.onnx", files / "pictures", {}).lines["pixels"])


@pytest.mark.parametrize("nodes", [("Mul", 1 / 255), ("Div", 127.5), ("Sub", 103.9), ("Mul", 1 / 16)])
def test_a_file_that_rescales_bytes_says_so(nodes: tuple[str, float], files: Path, tmp_path: Path) -> None:
    """A factor of 1 / 16 tells nothing, so that ranges are tried."""
    proto, (kind, number) = onnx.load(files / "fixed.onnx"), nodes
    x = proto.graph.input[0].name
    for node in proto.graph.node:
        node.input[:] = ["moved" if name == x else name for name in node.input]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(number, np.float32), "by"))
    first = [
        onnx.helper.make_node(kind, ["by", x] if kind == "Mul" else [x, "by"], ["scaled"]),
        onnx.helper.make_node("Sub", ["scaled", "by"], ["moved"]),
    ]
    later = [*proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend([*first, *later])
    onnx.save(proto, tmp_path / "own.onnx")
    line = propose(tmp_path / "own.onnx", files / "pictures", {}).lines["pixels"]
    assert (line == f"0 to 255, as {tmp_path / 'own.onnx'} says") == (number != 1 / 16)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(NOTES["not rescaled"][1]))
    line = propose(tmp_path / "own.onnx", files / "pictures", {}).lines["pixels"]
    assert line.endswith(f"as {tmp_path / 'preprocessor_config.json'} says")


LABEL_SETS = {
    "kept": (["one", "seven", "six", "five", "two"], "5 classes, as in the file"),
    "grown": (["six", "seven"], "3 classes, 2 of the file and 1 new"),
    "replaced": (["six", "cat"], "3 new classes in place of 2"),
}


@pytest.mark.parametrize("case", LABEL_SETS)
def test_classes_of_the_file_are_kept_if_they_match(case: str, files: Path, tmp_path: Path) -> None:
    labels, expected = LABEL_SETS[case]
    file = tmp_path / "model.onnx"
    graphopt.save(graphopt.models.cnn((3, 16, 24), len(labels)), file)
    (tmp_path / "config.json").write_text(json.dumps({"id2label": dict(enumerate(labels))}))
    proposed = propose(file, files / "pictures", {}, "unit")
    assert proposed.lines["head"] == expected
    wanted = {"kept": f"[{','.join(labels)}]", "grown": "[six,seven,five]", "replaced": None}
    assert proposed.value("data.labels") == wanted[case]
    assert proposed.value("adapter.grow") == (None if case == "replaced" else "true")


def test_train_and_val_are_used_and_test_is_left_alone(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part, rows in {"train": slice(0, 60), "val": slice(60, 90), "test": slice(90, 120)}.items():
        written(tmp_path / "split" / part, rows)
    tuned(
        files / "fixed.onnx",
        tmp_path / "split",
        f"folder={tmp_path / 'run'}",
        "fit.epochs=1",
        "--pixels=unit",
    )
    out = capsys.readouterr().out
    assert "images, 60 rows to train on, 30 held out" in out and "test is left alone" in out


class OfSamples(torch.nn.Module):
    """Take samples and how many there are in a second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv1d(1, 32, 16, stride=4), torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x * (rate == 8000)).relu().mean(2))


def test_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tones of three heights, for a network of samples and their rate."""
    rng = np.random.default_rng(0)
    for i in range(60):
        place = tmp_path / "tones" / ("high", "low", "middle")[i % 3]
        place.mkdir(parents=True, exist_ok=True)
        length = rng.integers(300, 500)
        wave = np.sin(np.arange(length) * (1.5, 0.2, 0.7)[i % 3] + rng.uniform(0, 6)) * rng.uniform(0.3, 0.9)
        soundfile.write(place / f"{i}.wav", wave, 8000)
    (tmp_path / "tones" / "low" / "notes.txt").write_text("not a recording")
    torch.manual_seed(0)
    file, example = tmp_path / "sound.onnx", (torch.rand(1, 1, 400), torch.tensor(8000))
    torch.onnx.export(OfSamples(), example, file, dynamo=False, input_names=["x", "rate"])
    words = [file, tmp_path / "tones", f"folder={tmp_path / 'run'}", "--deeper"]
    tuned(*words, "fit.epochs=20")
    lines = said(capsys)
    assert lines["samples"] == "'rate' is 8,000, the samples per second of the recordings"
    assert lines["deeper"] == "4 weights of all layers train, too, at a rate of 5e-05"
    assert lines["best"].startswith(f"{tmp_path / 'run/deeper'}/trained.onnx")
    assert lines["data"].endswith("60 recordings in 3 classes, high 20, low 20, middle 20")
    assert "data.samples=400 data.channel_axis=true" in lines["recipe"]
    rows = data.audio(str(tmp_path / "tones"), samples=400, channel_axis=True)
    (found,) = graphopt.run(str(tmp_path / "run" / "trained.onnx"), {"x": rows.arrays["x"][:]}).values()
    assert (found.argmax(axis=1) == rows.arrays["target"][:]).mean() > 0.9


def test_recordings_are_read_as_soundfile_reads_them(tmp_path: Path) -> None:
    rng, expected = np.random.default_rng(0), []
    for i, (length, channels) in enumerate([(50, 1), (80, 2), (20, 1)]):
        wave = rng.uniform(-1, 1, (length, channels))
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        soundfile.write(tmp_path / "ab"[i % 2] / f"{i}.flac", wave, 16000)
        heard = soundfile.read(tmp_path / "ab"[i % 2] / f"{i}.flac", always_2d=True)[0].mean(axis=1)
        expected.append(np.pad(heard[:60], (0, max(0, 60 - length))))
    found = data.audio(str(tmp_path), samples=60)
    assert np.allclose(found.arrays["x"][:], [expected[0], expected[2], expected[1]], atol=1e-6)
    soundfile.write(tmp_path / "a" / "9.wav", rng.uniform(-1, 1, 30), 8000)
    with pytest.raises(graphopt.GraphoptError, match=r"9\.wav: expected 16,000 samples per second, found 8,000"):
        data.audio(str(tmp_path))


def test_a_table_of_other_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2)).round(3)
    lines = [f"{a},{b},{('left', 'right')[int(a + b > 0)]}" for a, b in x]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,side", *lines]))
    net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    torch.onnx.export(
        net,
        (torch.rand(1, 2),),
        tmp_path / "t.onnx",
        dynamo=False,
        dynamic_axes={"x": {0: "n"}},
        input_names=["x"],
    )
    options = ["data.target=side", "optimizer.learning_rate=0.05", f"folder={tmp_path / 'run'}"]
    tuned(tmp_path / "t.onnx", tmp_path / "t.csv", *options)
    lines_said = said(capsys)
    assert lines_said["head"] == "2 new classes in place of 4"
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(record["accuracy"] for record in records) > 0.85


@pytest.mark.parametrize(
    ("classes", "target", "head"),
    [
        ([0, 1, 2], [0, 1, 2], "3 classes, as in the file"),
        ([4, 5, 7], [4, 5, 7], "3 classes, as in the file"),
        (["a", "b", "c"], ["a", "b", "c"], "3 classes, as in the file"),
        ([0, 1, 2], ["c", "a", "b"], "3 new classes in place of 0, 1, 2"),
        (["c", "a", "b"], [0, 1, 2], "3 new classes in place of a, b, c"),
    ],
    ids=["numbers", "other-numbers", "names", "names-for-numbers", "numbers-for-names"],
)
def test_a_classifier_of_scikit_learn_keeps_the_classes_that_it_knows(
    classes: list[object], target: list[object], head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file declares no sizes of probabilities, in dictionaries, which training reads as an array."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2)).astype(np.float32).round(3)
    y = np.digitize(x.sum(axis=1), [-0.5, 0.5])
    onx = skl2onnx.to_onnx(LogisticRegression().fit(x, np.array(classes)[y]), x[:1])
    (tmp_path / "t.onnx").write_bytes(onx.SerializeToString())
    rows = [f"{a},{b},{target[c]}" for (a, b), c in zip(x, y, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,target", *rows]))
    fitted = ["optimizer.learning_rate=0.3", "fit.epochs=20"] if "new" in head else ["fit.epochs=4"]
    tuned(tmp_path / "t.onnx", tmp_path / "t.csv", f"folder={tmp_path / 'run'}", *fitted)
    assert said(capsys)["head"] == head
    assert "from_logits: false" in (tmp_path / "run" / "config.yaml").read_text()
    assert final_accuracy(tmp_path / "run") > 0.8
    assert cli.main(["predict", str(tmp_path / "run"), str(tmp_path / "t.csv")]) == 0  # which has the target, too
    table = pyarrow.csv.read_csv(tmp_path / "t.csv")
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert cli.main(["predict", str(tmp_path / "run"), str(tmp_path / "t.parquet")]) == 0
    found = np.load(tmp_path / "run" / "predictions.npz")
    assert np.mean(found["label"].astype(str) == np.array(target)[y].astype(str)) > 0.8
    assert {*found} == {"label", "probabilities"} if "new" in head else "output_label" in {*found}


def test_probabilities_beside_each_other_are_no_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A network of scikit-learn with two classes puts 1 - p of a Sigmoid beside p."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    y = np.where(x.sum(axis=1) > 0, "yes", "no")
    onx = skl2onnx.to_onnx(MLPClassifier((4,), max_iter=20).fit(x, y), x[:1], options={"zipmap": False})
    (tmp_path / "t.onnx").write_bytes(onx.SerializeToString())
    (tmp_path / "t.csv").write_text(
        "\n".join(["a,b,target", *(f"{a},{b},{c}" for (a, b), c in zip(x, y, strict=True))])
    )
    tuned(tmp_path / "t.onnx", tmp_path / "t.csv", f"folder={tmp_path / 'run'}", "fit.epochs=1")
    assert "expects logits" not in capsys.readouterr().err
    assert "from_logits: false" in (tmp_path / "run" / "config.yaml").read_text()


BINARY = {  # classes of the file, of the table, what tune says, and the names that it proposes
    "numbers-for-names": (["no", "yes"], [0, 1], "2 classes by number, no, yes: data.labels=[...] names another order"),
    "capitals": (["no", "yes"], ["No", "Yes"], "2 classes, as in the file, written No, Yes"),
    "booleans": ([0, 1], [False, True], "2 classes, as in the file, written False, True"),
}


@pytest.mark.parametrize("case", BINARY)
def test_a_binary_classifier_of_scikit_learn_takes_no_other_head(case: str, tmp_path: Path) -> None:
    classes, target, head = BINARY[case]
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    onx = skl2onnx.to_onnx(LogisticRegression().fit(x, np.array(classes)[y]), x[:1])
    (tmp_path / "t.onnx").write_bytes(onx.SerializeToString())

    def table(names: list[Any]) -> Path:
        rows = [f"{a},{b},{names[c]}" for (a, b), c in zip(x, y, strict=True)]
        (tmp_path / "t.csv").write_text("\n".join(["a,b,target", *rows]))
        return tmp_path / "t.csv"

    proposed = propose(tmp_path / "t.onnx", table(target), {})
    assert proposed.lines["head"] == head and "adapter" not in proposed.fields
    with pytest.raises(graphopt.GraphoptError, match=r"takes no other head, found bad, good: data\.labels="):
        propose(tmp_path / "t.onnx", table(["bad", "good"]), {})
    said = {"data.labels": "[bad,good]"}
    assert (
        "in the order of data.labels: bad, good" in propose(tmp_path / "t.onnx", tmp_path / "t.csv", said).lines["head"]
    )


@pytest.mark.parametrize(
    ("targets", "said", "fields", "head"),
    [
        ([-1, 1, 4], {}, {"data.labels": "['-1','1','4']"}, "3 classes by number, -1, 1, 4: data.labels=[...] names"),
        ([1, 2, 3], {}, {"data.labels": "['1','2','3']"}, "3 classes by number, 1, 2, 3: data.labels=[...] names"),
        ([0, 1, 2], {"loss.output": '"v"'}, {"loss": "cross_entropy"}, "3 classes by number, 0, 1, 2"),
    ],
    ids=["negative", "from-one", "quoted-output"],
)
def test_classes_of_a_table_by_number(
    targets: list[object], said: dict[str, str], fields: dict[str, str], head: str, tmp_path: Path
) -> None:
    proposed = propose(two_outputs(tmp_path), rows_of(targets, tmp_path), {"loss.output": "u", **said})
    assert proposed.lines["head"].startswith(head)
    assert {name: proposed.fields.get(name) for name in fields} == fields


def test_the_order_of_classes_that_is_said_is_kept(tmp_path: Path) -> None:
    file, rows = two_outputs(tmp_path), rows_of(["c", "a", "a"], tmp_path)
    model = onnx.load(file)
    onnx.helper.set_model_props(model, {"labels": json.dumps(["a", "b", "c"])})
    onnx.save(model, file)
    proposed = propose(file, rows, {"loss.output": "u", "data.labels": "[c,a]"})
    assert proposed.lines["head"] == "2 new classes in place of 3" and "adapter.grow" not in proposed.fields


def test_amounts_are_no_classes(tmp_path: Path) -> None:
    file, rows = two_outputs(tmp_path), rows_of([1000, *range(30), 10**9], tmp_path)
    with pytest.raises(graphopt.GraphoptError, match="found 32 whole numbers: loss=mean_squared_error if they are"):
        propose(file, rows, {})
    assert propose(file, rows, {"loss": "mean_squared_error"}).fields["loss"] == "mean_squared_error"
    assert propose(file, rows_of(["inf", 1, 2], tmp_path), {}).fields["loss"] == "mean_squared_error"
    with pytest.raises(graphopt.GraphoptError, match="found 'w': name one of u, v"):
        propose(file, rows, {"loss.output": "w"})


def two_outputs(folder: Path) -> Path:
    """Return a file with outputs u and v of three numbers."""
    values = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", d])
        for n, d in (("x", 2), ("u", 3), ("v", 3))
    ]
    weights = [onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), name) for name in ("w0", "w1")]
    nodes = [onnx.helper.make_node("MatMul", ["x", w], [y]) for w, y in (("w0", "u"), ("w1", "v"))]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "t.onnx")
    return folder / "t.onnx"


def rows_of(targets: list[Any], folder: Path) -> Path:
    (folder / "t.csv").write_text("\n".join(["a,b,target", *(f"{i},1,{y}" for i, y in enumerate(targets * 2))]))
    return folder / "t.csv"


def test_whole_numbers_for_one_output_are_no_classes(tmp_path: Path) -> None:
    """The output has a number for each row, [n]."""
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)
        for name, dims in (("x", ["n", 2]), ("y", ["n"]))
    )
    w = onnx.numpy_helper.from_array(np.ones((2,), np.float32), "w")
    product = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([product], "g", [x], [y], [w])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "t.onnx",
    )
    (tmp_path / "t.csv").write_text("a,b,target\n1,2,3\n4,5,9\n2,2,4\n")
    assert propose(tmp_path / "t.onnx", tmp_path / "t.csv", {}).fields["loss"] == "mean_squared_error"


def test_the_fixed_batch_of_a_table_is_freed(tmp_path: Path) -> None:
    proto = ir.to_proto(graphopt.models.mlp((2,), 3))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    del proto.graph.value_info[:]
    onnx.save(proto, tmp_path / "one.onnx")
    np.savez(tmp_path / "rows.npz", x=np.eye(2, dtype=np.float32), target=[0, 2])
    proposed = propose(tmp_path / "one.onnx", tmp_path / "rows.npz", {})
    assert proposed.fields["pipeline.normalize.batch"] == "free"
    assert proposed.lines["batch"] == "the fixed batch of 1 is freed"


def test_the_inputs_of_a_pipeline_are_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """scikit-learn's file has an input for each column, of words or numbers."""
    pandas = pytest.importorskip("pandas")
    ages = np.arange(18, 78, dtype=np.float32)
    frame = pandas.DataFrame({"age": ages, "city": ["Bern", "Basel", "Chur"] * 20})
    frame["buys"] = np.where((ages > 40) & (frame.city != "Chur"), "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False)
    columns = ColumnTransformer([("age", StandardScaler(), ["age"]), ("city", OneHotEncoder(), ["city"])])
    pipeline = make_pipeline(columns, LogisticRegression()).fit(frame[["age", "city"]], frame.buys)
    file = skl2onnx.to_onnx(pipeline, frame[["age", "city"]][:1], options={"zipmap": False})
    (tmp_path / "t.onnx").write_bytes(file.SerializeToString())
    words = [f"folder={tmp_path / 'run'}", "fit.epochs=1", "data.target=buys"]
    tuned(tmp_path / "t.onnx", tmp_path / "t.csv", *words)
    lines = said(capsys)
    assert "data.features={age:[age],city:[city]}" in shlex.split(lines["recipe"])
    assert lines["head"] == "2 classes, as in the file"
    assert final_accuracy(tmp_path / "run") > 0.8


def test_of_several_outputs_a_head_takes_the_one_that_it_fits(files: Path) -> None:
    model = onnx.load(files / "open.onnx")
    (features,) = (node.input[0] for node in model.graph.node if node.output[0] == model.graph.output[0].name)
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info(features, onnx.TensorProto.FLOAT, None))
    onnx.save(model, files / "several.onnx")
    fields = propose(files / "several.onnx", files / "pictures", {}, "unit").fields
    assert fields["adapter.output"] == fields["loss.output"] == quoted(model.graph.output[1].name)


@pytest.mark.parametrize(("mistaken", "expected"), [(12, "unit"), (8, "unit"), (0, "bytes")])
def test_bytes_have_to_be_clearly_better(mistaken: int, expected: str) -> None:
    """Features tell all classes but those of some rows."""
    classes = np.arange(120) % 3
    features = {}
    for word, wrong in (("unit", 12), ("bytes", mistaken)):
        shown = np.where(np.arange(120) < wrong, (classes + 1) % 3, classes)
        features[word] = np.eye(3)[shown] * (255 if word == "bytes" else 1)
    assert tried(features, classes)[0] == expected


def test_share_right_is_scikit_learn_s_leave_one_out() -> None:
    rng = np.random.default_rng(1)
    features, classes = rng.normal(size=(40, 6)), rng.integers(0, 3, 40)
    centred = features - features.mean(axis=0)
    scaled = centred / np.sqrt(np.square(centred).sum() / 40)
    shares = []
    for ridge in (1e-3, 1e-2, 1e-1, 1.0):
        model = RidgeClassifier(alpha=ridge, fit_intercept=False)
        x = np.hstack([scaled, np.ones((40, 1))])
        shares.append(np.mean(cross_val_predict(model, x, classes, cv=LeaveOneOut()) == classes))
    assert share_right(features, classes) == pytest.approx(max(shares))
    assert share_right(1e-6 * features, classes) == share_right(features, classes)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no data": (["fixed.onnx"], "tune: expected FILE.onnx and a folder or a file of data"),
    "no model": (["pictures"], "tune: expected FILE.onnx and a folder or a file of data"),
    "nothing there": (["fixed.onnx", "nowhere"], "expected a folder or a file of data, found none"),
    "no such model": (["none.onnx", "pictures"], "none.onnx"),
    "another file": (["fixed.onnx", "a.doc"], "a.doc: expected a folder of images, a table or lines of text"),
    "no classes": (["fixed.onnx", "flat"], "expected a folder for each class, found none"),
    "form of pixels": (["fixed.onnx", "pictures", "--pixels=caffe"], "--pixels"),
    "without tune": (
        ["fixed.onnx", "--deeper"],
        "--deeper: expected graphopt tune FILE.onnx FOLDER",
    ),
    "layout": (["fixed.onnx", "pictures", "data.layout=NHWC"], "expected one form of images"),
    "of samples": (["sound.onnx", "pictures"], "expected one input of images, [N, C, H, W] or [N, H, W, C]"),
    "a size of words": (["open.onnx", "pictures", "data.size=large"], "data.size"),
    "one number": (["open.onnx", "pictures", "data.size=[16]"], "data.size: expected a height and a width"),
    "labels that do not exclude each other": (["many.onnx", "pictures"], "found a Sigmoid"),
    "two folders": (["fixed.onnx", "pictures", "flat"], "found"),
    "texts": (["fixed.onnx", "lines.jsonl"], "expected a model that reads tokens"),
    "another framework": (["net.pt", "pictures"], "net.pt: expected an ONNX model, found PyTorch's"),
    "of pictures": (["fixed.onnx", "tones"], "expected one input of samples, [N, samples] or [N, 1, samples]"),
    "samples of words": (["sound.onnx", "tones", "data.samples=lots"], "data.samples: expected a whole number"),
    "no rate": (["sound.onnx", "tones", "data.rate=0"], "data.rate: expected a whole number"),
    "a table of few values": (
        ["sound.onnx", "few.csv"],
        "such as data.target=kind (2 different values), data.target=b",
    ),
    "a table of many values": (
        ["sound.onnx", "many.csv"],
        "3 others: name the one to predict, such as data.target=c",
    ),
}


def of_labels() -> onnx.ModelProto:
    """Return a model that predicts each label by itself."""
    proto = ir.to_proto(graphopt.models.cnn((3, 16, 24), 4))
    proto.graph.node.append(onnx.helper.make_node("Sigmoid", ["y"], ["rate"]))
    proto.graph.output[0].name = "rate"
    return proto


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(
    case: str,
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, expected = MISTAKES[case]
    for name in ("fixed.onnx", "open.onnx", "pictures"):
        (tmp_path / name).symlink_to(files / name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat").mkdir()
    shutil.copy(next((files / "pictures" / "six").glob("*.png")), tmp_path / "flat")
    (tmp_path / "a.doc").write_bytes(b"")
    for name in ("high", "low"):
        (tmp_path / "tones" / name).mkdir(parents=True)
        soundfile.write(tmp_path / "tones" / name / "1.wav", np.zeros(400), 8000)
    (tmp_path / "lines.jsonl").write_text('{"text": "hi"}\n')
    Path("few.csv").write_text("a,b,kind\n1,2,no\n3,4,yes\n5,2,no\n7,4,yes\n")
    Path("many.csv").write_text("a,b,c\n1,2,3\n3,4,5\n5,6,7\n7,8,9\n")
    graphopt.save(graphopt.models.linear((400,), 2), "sound.onnx")
    onnx.save(of_labels(), "many.onnx")
    verb = [] if case == "without tune" else ["tune"]
    assert cli.main([*verb, *words]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and expected in lines[0]
    assert not (tmp_path / "runs").exists()
