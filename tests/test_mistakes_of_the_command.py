"""Mistakes on the command line: each has one line that says what is wrong and what to do, and leaves nothing behind."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import graphopt
import passes
from graphopt import cli, data, models

pytestmark = pytest.mark.usefixtures("plain")

KNOWN = r"; known: accumulate, adapter, average, callbacks, .*trust$"
NPZ = "my.onnx data=npz data.path="
CSV = "linear.onnx loss=mean_squared_error data=csv data.path="
VERBS = "train, evaluate, predict, generate, compile, hosts, artifacts, report, check, compare"
WORD = f"expected {VERBS}, FILE.onnx or FIELD=VALUE, such as "
LOSSES = "binary_cross_entropy, causal_language_model, .*triplet"

# What a person types, and the whole line that answers it, as a regular expression.
REFUSED: list[tuple[str | list[str], str]] = [
    # names of other libraries, and almost the right names
    ("lr=0.1", f"unknown option 'lr', nearest: 'optimizer.learning_rate'{KNOWN}"),
    ("learning_rate=0.1", f"unknown option 'learning_rate', nearest: 'optimizer.learning_rate'{KNOWN}"),
    ("epochs=3", f"unknown option 'epochs', nearest: 'fit.epochs'{KNOWN}"),
    ("max_iter=3", f"unknown option 'max_iter', nearest: 'fit.epochs'{KNOWN}"),
    ("batch_size=8", f"unknown option 'batch_size', nearest: 'fit.batch_size'{KNOWN}"),
    ("random_state=8", f"unknown option 'random_state', nearest: 'fit.seed'{KNOWN}"),
    ("verbose=1", f"unknown option 'verbose', nearest: 'quiet'{KNOWN}"),
    ("patience=3", f"unknown option 'patience', nearest: 'callbacks.early_stopping'{KNOWN}"),
    ("gpu=true", f"unknown option 'gpu', nearest: 'executor.device'{KNOWN}"),
    ("workers=4", f"unknown option 'workers', nearest: 'launcher.workers'{KNOWN}"),
    ("dataset=npz", f"unknown option 'dataset', nearest: 'data'{KNOWN}"),
    ("optimzer=adam", f"unknown option 'optimzer', nearest: 'optimizer'{KNOWN}"),
    ("expermient=digits_cnn", f"unknown option 'expermient', nearest: 'experiment'{KNOWN}"),
    (
        "optimizer=adm",
        "unknown optimizer 'adm', nearest: 'adam'; known: adafactor, .*sgd",
    ),
    ("optimizer=SGD", "unknown optimizer 'SGD', nearest: 'sgd'; known: .*"),
    ("loss=mse", f"unknown loss 'mse', nearest: 'mean_squared_error'; known: {LOSSES}"),
    ("loss=crossentropy", f"unknown loss 'crossentropy', nearest: 'cross_entropy'; known: {LOSSES}"),
    (
        "loss=BCEWithLogitsLoss",
        f"unknown loss 'BCEWithLogitsLoss', nearest: 'binary_cross_entropy'; known: {LOSSES}",
    ),
    ("precision=fp16", "unknown precision 'fp16', nearest: 'float16'; known: bfloat16, float16, none"),
    ("clip=norm", "unknown clip 'norm', nearest: 'global_norm'; known: global_norm, none, value"),
    ("executor=gpu", "unknown executor 'gpu', nearest: 'cuda'; known: cpu, cuda, webgpu"),
    ("experiment=digit", "unknown experiment 'digit', nearest: 'digits_.*'; known: .*"),
    ("run=evalute", "unknown run 'evalute', nearest: 'evaluate'; known: .*"),
    ("rows=held", "unknown rows 'held', nearest: 'held_out'; known: all, held_out, trained"),
    ("optimizer.lr=0.1", "optimizer: unknown field 'lr', nearest: 'learning_rate'; known: beta1, .*"),
    (
        "optimizer.momentum=0.9",
        "optimizer: unknown field 'momentum'; known: .*: it is a field of optimizer=muon, rmsprop, sgd",
    ),
    ("fit.lr=0.1", "fit: unknown field 'lr', nearest: 'optimizer.learning_rate'; known: .*"),
    ("fit.epoch=3", "fit: unknown field 'epoch', nearest: 'epochs'; known: .*"),
    ("+fit.foo=3", "fit: unknown field 'foo'; known: .*"),
    ("+unknown=3", f"\\+unknown=3: unknown option 'unknown'{KNOWN}"),
    ("++unknown=3", f"\\+\\+unknown=3: unknown option 'unknown'{KNOWN}"),
    (
        "models.mlp.hiden=[3]",
        "models.mlp: unknown field 'hiden', nearest: 'hidden'; known: hidden, outputs, seed",
    ),
    ("fit.metrics=[acuracy]", "unknown metric 'acuracy', nearest: 'accuracy'; known: .*"),
    ("fit.metrics=r2", "metrics: r2: expected regression, found classification"),
    (
        "callbacks.early_stoping=true",
        "callbacks: unknown field 'early_stoping', nearest: 'early_stopping'; known: .*",
    ),
    ("+callbacks.early=3", "callbacks: unknown callback 'early', nearest: 'early_stopping'; known: .*"),
    ("executor.session_options.threads=3", "executor.session_options: unknown field 'threads'.*"),
    # words
    ("trian my.onnx", f"trian: {WORD}train: see graphopt --help"),
    ("evaluat my.onnx", f"evaluat: {WORD}evaluate: see graphopt --help"),
    ("cnn", f"cnn: {WORD}model=cnn: see graphopt --help"),
    ("adam", f"adam: {WORD}optimizer=adam: see graphopt --help"),
    ("train.npz", f"train.npz: {WORD}data=npz data.path=train.npz: see graphopt --help"),
    ("images", f"images: {WORD}data=images data.path=images: see graphopt --help"),
    ("my.onx", f"my.onx: {WORD}my.onnx: see graphopt --help"),
    ("fit.epochs:3", f"fit.epochs:3: {WORD}fit.epochs=3: see graphopt --help"),
    (
        "optimizer.learning_rate",
        f"optimizer.learning_rate: {WORD}optimizer.learning_rate=VALUE: see graphopt --help",
    ),
    ("model.pt", "model.pt: expected an ONNX model, found PyTorch's: export it with torch.onnx.export"),
    ("model=model.keras", "model.keras: expected an ONNX model, found TensorFlow's: export it with .*"),
    ("my.onnx linear.onnx", "linear.onnx: expected one model, found my.onnx, too: leave one out"),
    ("evaluate predict", "predict: expected one verb, found evaluate, too: leave one out"),
    ("fit.epochs = 3", "fit.epochs=3: expected FIELD=VALUE, found spaces around =: remove them"),
    ("fit.epochs= 3", "fit.epochs=3: expected FIELD=VALUE, found spaces around =: remove them"),
    (
        "fit.metrics=[accuracy, f1]",
        r"fit.metrics=\[accuracy,: expected its brackets to close, found a space: quote it, as in "
        r'"fit.metrics=\[accuracy, f1\]"',
    ),
    (
        "--epochs 3",
        "unrecognized arguments: --epochs: write fields as key=value, such as fit.epochs=value, .*--help.*",
    ),
    ("--hlep", "unrecognized arguments: --hlep: write fields as key=value, such as --help, and see .*"),
    ("--cfg jobs", "argument --cfg/-c: invalid choice: 'jobs' .*: see graphopt --help"),
    ("--cfg job --package fitt", "--package: unknown field 'fitt', nearest: 'fit'; known: .*"),
    # values
    (
        "optimizer.learning_rate=1e-3,",
        ".*: expected FIELD=VALUE, found what Hydra cannot read: write one = and no comma .*",
    ),
    ("fit.epochs==3", ".*: expected FIELD=VALUE, found what Hydra cannot read: write one = and no comma .*"),
    (
        "models.mlp.hidden=[3",
        ".*: expected FIELD=VALUE, found what Hydra cannot read: close its brackets, .*",
    ),
    ("=3", "=3: expected FIELD=VALUE, found no field"),
    (
        "optimizer=sgd,adam",
        "optimizer=sgd,adam: expected one value, found several: run each with -m, or write a list .*",
    ),
    ("sweep=optuna", "sweep=optuna: expected -m beside it, found none: graphopt -m sweep=optuna ..."),
    ("-m optimizer=sgd,adm", "unknown optimizer 'adm', nearest: 'adam'; known: .*"),
    (
        ["-m", "optimizer.learning_rate=interval(1e-4,1e-1)"],
        r"optimizer.learning_rate=interval\(1e-4,1e-1\): expected sweep=optuna beside it, which draws from intervals",
    ),
    (
        "-m sweep=slurm",
        ".*: expected the package hydra-submitit-launcher, which is not installed: pip install it",
    ),
    ("fit.seed=x", "fit.seed: expected int, found 'x'"),
    ("fit.seed=-1", r"fit\(seed=-1\): expected a whole number in \[0, inf\), found -1"),
    ("fit.epochs=two", "fit.epochs: expected int, found 'two'"),
    ("fit.epochs=0", r"fit\(epochs=0\): expected a whole number in \[1, inf\), found 0"),
    ("fit.shuffle=maybe", "fit.shuffle: expected true or false or 'consecutive', found 'maybe'"),
    (
        "fit.validation=20%",
        "fit.validation: expected a share of the rows, such as 0.2, found '20%': data=digits .*",
    ),
    (
        "fit.validation=2000",
        "validation: expected a share of the rows, at least 0 and less than 1, found 2000",
    ),
    ("fit=3", "fit: expected a mapping of fields, found 3"),
    (
        "fit.epochs=${fit.batch_sze}",
        r"\$\{fit.batch_sze\}: expected a field of the recipe, found none, nearest: .*",
    ),
    (
        "fit.checkpoint.every=10",
        "fit.checkpoint.every: expected '100 steps', '1 epoch', '5 min' or null, found 10.*",
    ),
    ("models.mlp.hidden=wide", "models.mlp.hidden: expected int or a list of int, found 'wide'"),
    ("optimizer.learning_rate=abc", "optimizer.learning_rate: expected float, found 'abc'"),
    ("optimizer.learning_rate=-1", r"AdamW\(learning_rate=-1\): expected a number in \[0, inf\), found -1"),
    ("callbacks.early_stopping=5", r".*found 5: write callbacks.early_stopping=\{patience: 5\}"),
    (
        "callbacks=[early_stopping]",
        r"callbacks=\[early_stopping\]: .*: set single fields, as in callbacks.FIELD=VALUE",
    ),
    ("executor.threads=0", "threads: expected 1 or more, or None for the runtime's choice, found 0"),
    ("executor.device=gpu", "device: expected 'cpu', 'cuda', 'cuda:N' or 'webgpu', found 'gpu'"),
    ("quiet=yes", "quiet: expected true or false, found 'yes'"),
    # groups
    ("~loss", f"~loss: expected an option of loss, {LOSSES}, found its removal"),
    (
        "~regularizer",
        "~regularizer: expected an option of .*, found its removal: regularizer=none leaves it out",
    ),
    ("~model", "~model: expected a recipe with model, found its removal: leave ~model out"),
    ("~fit.foo", "~fit.foo: expected a field of the recipe, found none"),
    ("loss=null", f"loss=null: expected an option of loss, {LOSSES}, found null"),
    (
        "clip=1.0",
        "clip=1.0: expected an option of clip, .*, found 1.0: its fields are set by clip.FIELD=VALUE",
    ),
    ("clip=false", "clip=false: expected an option of clip, .*, found false: clip=none leaves it out"),
    (
        "+optimizer=sgd",
        r"\+optimizer=sgd: expected it without \+, because the recipe has this group: optimizer=sgd",
    ),
    (
        "schedule.warmup=3",
        "schedule.warmup: expected an option of schedule beside it, found schedule=none: it is .*",
    ),
    ("loss=custom", "loss.function: expected a value, found none: set loss.function=..."),
    ("optimizer.groups=[{pattern:x}]", "optimizer.groups: expected a list of Group, each .*, found .*"),
    ("--config-dir own experiment=bad", ".*bad.yaml: expected YAML, found in line 2 what is not: .*"),
    (
        "--config-dir own experiment=nothing",
        "experiment=nothing: expected '# @package _global_' as the first line, .*",
    ),
    # models
    ("mlp.onnx", "model 'mlp.onnx': no such file, nearest: 'mlp'; built-in: linear, mlp, cnn, transformer"),
    ("model=mpl", "model 'mpl': no such file, nearest: 'mlp'; built-in: linear, mlp, cnn, transformer"),
    (
        "linaer.onnx",
        "model 'linaer.onnx': no such file, nearest: 'linear.onnx'; built-in: linear, mlp, cnn, transformer",
    ),
    ("model=", "model: expected a path, found an empty text"),
    (
        "step.onnx",
        "step.onnx: expected an inference model, found a training graph: name the model that it was made .*",
    ),
    (
        "predict step.onnx",
        "step.onnx: expected an inference model, found a training graph: .* or trained.onnx of its run",
    ),
    (
        "model=state.safetensors",
        "state.safetensors: expected an ONNX model, found weights without a graph: name the .*",
    ),
    ("zip.onnx", "zip.onnx: expected an ONNX model, found another file .*"),
    ("folder.onnx", "folder.onnx: expected an ONNX file, found a folder"),
    ("report missing.onnx", "model 'missing.onnx': no such file; built-in: .*"),
    (
        "parameters.pattern=nothing.*",
        "Parameters: pattern='nothing.*' matches no floating-point initializer; the .*",
    ),
    # data
    (
        "data=train.npz",
        "data=train.npz: expected a reader, found what it reads: data=npz data.path=train.npz",
    ),
    (
        "data.path=train.npz",
        "data: unknown field 'path'; known: images: to read a file, set data=npz data.path=train.npz",
    ),
    ("data=mnist", "unknown data 'mnist'; known: arrow, csv, .*"),
    ("data=npz", "data.path: expected a value, found none: set data.path=..."),
    (f"{NPZ}trian.npz", "trian.npz: no such file, nearest: 'train.npz'"),
    (
        f"{NPZ}floats.npz",
        "floats.npz: data 'target': expected int64, found float32: number the classes from 0, .*",
    ),
    (
        f"{NPZ}hot.npz",
        "hot.npz: data 'target': expected int64, found float32: number the classes, with argmax.*",
    ),
    (
        f"{NPZ}texts.npz",
        "texts.npz: data 'target': expected int64, found <U21: number the classes from 0, .*",
    ),
    (
        f"{NPZ}flat.npz",
        r"flat.npz: data 'x': expected rows of shape \[1, 8, 8\], found \[64\]: reshape each row.*",
    ),
    (
        f"{NPZ}nan.npz",
        "nan.npz: data 'x': expected finite numbers, found NaN in row 0; set allow_nan to train with it",
    ),
    (f"{NPZ}big.npz", "big.npz: data 'target': expected labels from 0 to 9, found .*"),
    (
        f"{NPZ}one.npz",
        "validation: expected a share that leaves rows .*, found 0.2 of 1 rows: 0 holds none out",
    ),
    (
        f"{NPZ}names.npz",
        "names.npz: data: expected arrays 'x', 'target', found .*: rename, add or remove arrays",
    ),
    (
        "loss=mean_squared_error my.onnx",
        r"data 'target': expected rows of shape \[10\], .*choose loss=cross_entropy",
    ),
    (
        "linear.onnx data=csv data.path=rows.csv",
        "rows.csv: .* for quantities, choose loss=mean_squared_error, .*",
    ),
    (
        f"{CSV}rows.csv data.target=price",
        "rows.csv: unknown column 'price'; known: a, b, target: name the column to predict, data.target=NAME, "
        "or leave it out, data.target=null",
    ),
    (
        "fit.metrics=3",
        "fit.metrics: expected str or a mapping or a function or a list of .* or null, found 3",
    ),
    (
        f"{CSV}rows.csv data.features=a",
        "data.features: expected a list of str or int or a mapping or null, found 'a'",
    ),
    ("data=images data.path=images/cat/0.png", "images/cat/0.png: expected a folder of images, found a file"),
    ("data=images data.path=train.npz", "train.npz: expected a folder of images, found a file"),
    # runs and folders
    (
        "evaluate",
        "evaluate: expected a trained model, found the built-in model mlp: train first, with graphopt, .*",
    ),
    ("predict", "predict: expected a trained model, found the built-in model mlp: .* or resume=RUN"),
    (
        "evaluate folder=nothere",
        "evaluate: expected the folder of a run with trained.onnx, found nothere without: .*",
    ),
    (
        "predict my.onnx predictions=out.xlsx",
        "predictions: expected the name of a file that ends in .npz, .csv, .*",
    ),
    ("compare folder=own", "own: expected a folder with runs, found none: give it with folder=..."),
    ("resume=nothere", "resume=nothere: expected a checkpoint or a run's folder with one, found none"),
    ("folder=", "folder: expected a path, found an empty text"),
    (
        "folder=train.npz",
        "train.npz: expected a folder to write to: File exists: choose another with folder=...",
    ),
    (
        "folder=train.npz/x",
        "train.npz/x: expected a folder to write to: Not a directory: choose another with .*",
    ),
]

WARNED = [
    (
        f"{NPZ}train.npz fit.batch_size=5000",
        "batch_size=5000: more than the 160 rows that train, .* such as 16",
    ),
    (
        "loss=mean_squared_error data=npz data.path=train.npz",
        r"data 'target': whole numbers from 0 to 9 train a regression: .* loss=cross_entropy \(passes.CrossEntropy\).*",
    ),
    (
        f"{NPZ}train.npz fit.checkpoint.best=acuracy",
        "checkpoint.best: unknown measure 'acuracy', nearest: 'accuracy'; .*",
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
        "one": {"x": x[:1], "target": target[:1]},
    }
    for name, changed in arrays.items():
        np.savez(here / f"{name}.npz", **{"x": x, "target": target, **changed})
    np.savez(here / "names.npz", images=x, target=target)
    rows = "".join(f"{i},{2 * i},{3 * i}\n" for i in range(40))
    (here / "rows.csv").write_text(f"a,b,target\n{rows}")
    graphopt.save(models.mlp((1, 8, 8), 10, hidden=[8]), here / "my.onnx")
    graphopt.save(models.linear((2,), 1), here / "linear.onnx")
    step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    graphopt.save(step, here / "step.onnx")
    graphopt.Executor(step).save(here / "state.safetensors")
    with zipfile.ZipFile(here / "zip.onnx", "w") as archive:
        archive.write(here / "my.onnx")
    for folder in ("folder.onnx", "images/cat", "images/dog", "own/experiment"):
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


def words(line: str | list[str]) -> list[str]:
    return line.split() if isinstance(line, str) else line


def test_the_table_is_long_enough() -> None:
    assert len(REFUSED) >= 80


@pytest.mark.parametrize(("line", "answer"), REFUSED, ids=[" ".join(words(line)) for line, _ in REFUSED])
def test_a_mistake_has_one_line_and_leaves_nothing(
    line: str | list[str], answer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = listed()
    assert cli.main(words(line)) == 1
    said = capfd.readouterr()
    assert said.err.count("\n") == 1
    assert re.fullmatch(f"graphopt: error: {answer}", said.err.rstrip("\n")), said.err
    assert listed() == before


@pytest.mark.parametrize(("line", "answer"), WARNED, ids=[line for line, _ in WARNED])
def test_what_hardly_anyone_means_has_a_warning_of_one_line(
    line: str, answer: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main([*line.split(), "fit.epochs=1", f"folder={tmp_path / 'out'}"]) == 0
    said = capfd.readouterr().err
    assert re.fullmatch(f"graphopt: warning: {answer}\n", said), said


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
