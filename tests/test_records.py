"""A run's folder knows its recipe: evaluate, predict and resume need nothing else, and say what is changed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet
import pytest
import yaml
from builders import mlp
from hydra.types import RunMode

from graphopt import cli
from graphopt.cli.composition.expansion import plain_of
from graphopt.cli.composition.hydra_config import CommandLine, base_recipe, composing
from graphopt.cli.composition.record import RunRecord
from graphopt.errors import GraphoptError

pytestmark = pytest.mark.usefixtures("plain")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 4)).astype(np.float32)
LABELS = (X @ RNG.standard_normal((4, 3))).argmax(axis=1)
MINE = ["my.onnx", "data=npz", "data.path=train.npz", "fit.batch_size=16", "executor.threads=1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model, data and a cache of its own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    onnx.save(mlp((4, 8, 3)), "my.onnx")
    np.savez("train.npz", x=X, target=LABELS)
    np.savez("new.npz", x=X[:7], target=LABELS[:7])


def run(*arguments: str, folder: str = "run") -> None:
    assert cli.main([*MINE, "fit.epochs=2", f"folder={folder}", *arguments]) == 0


def metrics(folder: str = "run") -> dict[str, Any]:
    return json.loads(Path(folder, "metrics.json").read_text())


def epochs(folder: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


RESTORES = "callbacks.early_stopping={monitor: loss, mode: max, patience: 9, restore_best: true}"


@pytest.mark.parametrize("options", [[], ["regularizer=l2"], [RESTORES], ["fit.validation=new.npz"]])
@pytest.mark.parametrize("source", ["folder=run", "resume=run"])
@pytest.mark.sample(5)
def test_evaluate_gives_what_the_run_s_own_validation_gave(
    options: list[str], source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*options)
    assert cli.main(["evaluate", source]) == 0
    said = capsys.readouterr().out
    restores = bool(options) and options[0] == RESTORES and source == "folder=run"
    record, found = epochs()[0 if restores else -1], metrics()
    loss = "data_loss" if "data_loss" in found else "loss"
    assert (found[loss], found["accuracy"]) == (record["validation_loss"], record["accuracy"])
    file, rows = ("new.npz", 7) if "fit.validation=new.npz" in options else ("npz", 12)
    assert found["rows"] == rows
    assert "recipe    run\n" in said and f"data      {file}, {rows} rows held out by the run\n" in said


ROWS = {
    "rows=all": (60, "npz, 60 rows, of which the run trained on 48"),
    "rows=trained": (48, "npz, 48 rows that the run trained on"),
    "data.path=new.npz": (7, "npz, 7 rows"),
    "fit.seed=1": (60, "npz, 60 rows"),
    "fit.shuffle=false": (60, "npz, 60 rows"),
    " ".join([*MINE[1:], "rows=held_out"]): (12, "npz, 12 rows held out by the run"),
}


def test_the_rows_that_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    for options, (rows, said) in ROWS.items():
        assert cli.main(["evaluate", "folder=run", *options.split()]) == 0
        assert metrics()["rows"] == rows
        assert f"data      {said}\n" in capsys.readouterr().out


def test_predict_reads_all_rows_or_those_that_are_asked_for() -> None:
    run()
    assert cli.main(["predict", "folder=run"]) == 0
    everything = np.load("run/predictions.npz")["y"]
    assert cli.main(["predict", "folder=run", "rows=held_out"]) == 0
    held_out = np.load("run/predictions.npz")["y"]
    assert len(everything) == 60 and len(held_out) == 12
    chosen = np.sort(np.random.default_rng(0).permutation(60)[:12])
    np.testing.assert_array_equal(held_out, everything[chosen])


def test_predict_of_a_file_reads_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A run with earlier rows has no field `target`, and its earlier rows would be predicted, too."""
    run("data=replay", "data.replay=new.npz")
    np.savetxt(name := "new ${X}.csv", X[:5], "%.6f", ",", header="a,b,c,d", comments="")
    assert cli.main(["predict", "run", name]) == 0
    found = np.load("run/predictions.npz")["y"]
    assert cli.main(["predict", "run", "new.npz"]) == 0
    np.testing.assert_allclose(found, np.load("run/predictions.npz")["y"][:5], rtol=1e-3, atol=1e-4)
    shutil.copy("my.onnx", "other.onnx")
    for model in ("other.onnx", "none.onnx"):
        capsys.readouterr()
        assert cli.main(["predict", "run", model]) == 1
        assert "data" not in capsys.readouterr().err


@pytest.mark.parametrize("header", ["true", "false"])
def test_predict_of_a_table_by_the_names_of_its_columns(header: str) -> None:
    """Without names, the column 0 of new rows is a feature, though that of the run was its target."""
    names = "0,a,b,c,d" if header == "true" else ""
    np.savetxt("train.csv", np.column_stack([LABELS, X]), ["%d", *["%.4f"] * 4], ",", header=names, comments="")
    table = ["data=csv", "data.path=train.csv", f"data.header={header}", "data.target='0'", "loss=cross_entropy"]
    run(*table)
    np.savetxt("new.csv", X[:9], "%.4f", ",", header=names[2:], comments="")
    assert cli.main(["predict", "run", "new.csv"]) == 0
    assert len(np.load("run/predictions.npz")["y"]) == 9


def test_a_run_that_held_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    run("fit.validation=null")
    assert cli.main(["evaluate", "folder=run"]) == 0
    assert "npz, 60 rows, of which the run trained on all\n" in capsys.readouterr().out
    assert cli.main(["evaluate", "folder=run", "rows=held_out"]) == 1
    assert "expected a run that held rows out, found one that trained on all 60" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["", "/checkpoints", "/checkpoints/step-00000006"])
def test_resume_needs_no_options(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(
        "optimizer=sgd",
        "optimizer.momentum=0.9",
        "~pipeline.simplify",
        "+callbacks.csv=log.csv",
        "schedule=cosine",
    )
    assert cli.main([f"resume=run{ending}", "fit.epochs=3", "schedule.steps=6"]) == 0
    said = capsys.readouterr().out
    assert "recipe    run, with fit.epochs=3 in place of fit.epochs=2\n" in said
    assert len(epochs()) == 3 and not Path("runs").exists()
    overrides = yaml.safe_load(Path("run/.hydra/overrides.yaml").read_text())
    assert "optimizer=sgd" in overrides and overrides[-2:] == ["fit.epochs=3", "schedule.steps=6"]
    assert cli.main(["resume=run"]) == 0
    said = capsys.readouterr().out
    assert "complete  nothing to train: the run has its 3 epochs" in said and "trained  " not in said
    assert cli.main(["evaluate", "folder=run", "optimizer=sgd", "~pipeline.simplify", "+callbacks.csv=log.csv"]) == 0
    assert "recipe    run\n" in capsys.readouterr().out


def test_what_cannot_continue_names_the_fields_and_changes_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run()
    kept = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file() and path.suffix != ".log"}
    for option in ("optimizer=adam", "optimizer=sgd", "loss.label_smoothing=0.1", "clip=value"):
        capfd.readouterr()
        assert cli.main(["resume=run", option, "fit.epochs=3"]) == 1
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and f"this command has {option} in place of " in said
        assert "expected the checkpoint of this training graph" in said
        assert all(path.read_bytes() == content for path, content in kept.items())


def test_a_recipe_of_one_s_own_is_known_without_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own/experiment").mkdir(parents=True)
    Path("own/optimizer").mkdir()
    Path("own/optimizer/mine.yaml").write_text("_target_: passes.SGD\nlearning_rate: 0.05\n")
    Path("own/experiment/mine.yaml").write_text("# @package _global_\ndefaults: [override /optimizer: mine]\n")
    run("--config-dir", "own", "experiment=mine")
    shutil.rmtree("own")
    assert cli.main(["resume=run", "fit.epochs=3"]) == 0
    assert cli.main(["evaluate", "folder=run"]) == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["optimizer"]["learning_rate"] == 0.05
    assert cli.main(["evaluate", "folder=run", "experiment=digits_cnn"]) == 1
    assert "found a whole recipe: name groups and fields" in capsys.readouterr().err


def test_a_whole_recipe_does_not_replace_that_of_a_run() -> None:
    record = RunRecord(Path("run"), {"experiment": None, "fit": {"epochs": 3}}, {}, {"experiment": "none"}, is_own=True)
    line = ("experiment=digits_cnn",)
    refused = pytest.raises(GraphoptError, match="found a whole recipe: name groups and fields")
    with composing(CommandLine(line, arguments=line, record=record)) as hydra, refused:
        hydra.config_loader.load_configuration("graphopt", list(line), RunMode.RUN)


@pytest.mark.slow
def test_a_job_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", *MINE, "fit.epochs=1", "folder=sweep", "optimizer=sgd,adamw"]) == 0
    assert cli.main(["resume=sweep/0", "fit.epochs=2"]) == 0
    assert cli.main(["evaluate", "folder=sweep/0"]) == 0
    assert "recipe    sweep/0\n" in capsys.readouterr().out
    assert metrics("sweep/0")["accuracy"] == epochs("sweep/0")[-1]["accuracy"]


def test_a_run_of_an_older_version_has_its_resolved_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    run("optimizer=sgd", "regularizer=l2")
    shutil.rmtree("run/.hydra")
    assert cli.main(["evaluate", "folder=run"]) == 0
    assert metrics()["rows"] == 12
    assert cli.main(["resume=run", "fit.epochs=3"]) == 0
    assert len(epochs()) == 3
    assert cli.main(["resume=run", "fit.epochs=4", "optimizer.learning_rate=0.5"]) == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["pipeline"]["optimizer"]["learning_rate"] == 0.5


def test_a_file_elsewhere_needs_no_word_in_one_s_own_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever changes a run's recipe cannot sign it."""
    shutil.move("train.npz", tmp_path / "data.npz")
    run(f"data.path={tmp_path / 'data.npz'}")
    assert cli.main(["evaluate", "folder=run"]) == 0
    assert cli.main(["resume=run", "fit.epochs=3"]) == 0
    assert cli.main(["evaluate", "folder=run"]) == 0
    config = Path("run/.hydra/config.yaml")
    config.write_text(config.read_text().replace("label_smoothing: 0.0", "label_smoothing: 0.1"))
    assert cli.main(["evaluate", "folder=run"]) == 1
    assert f"to allow it, say data.path={tmp_path / 'data.npz'} on the command line" in capsys.readouterr().err
    assert cli.main(["evaluate", "folder=run", f"data.path={tmp_path / 'data.npz'}"]) == 0


def test_trusted_code_of_one_s_own_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_losses.py").write_text("def absolute(op, p, t):\n    return op.Abs(p - t)\n")
    monkeypatch.syspath_prepend(Path.cwd())
    np.savez("train.npz", x=X, target=X[:, :3])
    run("loss=custom", "loss.function=own_losses:absolute", "trust=[own_losses]")
    assert cli.main(["resume=run", "fit.epochs=3"]) == 0
    Path("run/.hydra/signature.json").unlink()
    assert cli.main(["resume=run", "fit.epochs=4"]) == 1
    assert "trust=[own_losses] on the command line" in capsys.readouterr().err
    assert cli.main(["resume=run", "fit.epochs=4", "trust=[own_losses]"]) == 0


def test_from_another_folder_a_missing_file_says_where_the_run_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    work = Path.cwd()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert cli.main(["evaluate", "folder=../run"]) == 1
    said = capsys.readouterr().err
    assert said.endswith(
        f"train.npz: no such file: the run was started in {work}: start this there, too, or name the file\n"
    )


def test_a_launcher_is_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    hydra = Path("run/.hydra/hydra.yaml")
    hydra.write_text(hydra.read_text().replace("launcher: none", "launcher: local", 1))
    assert cli.main(["resume=run", "fit.epochs=3"]) == 0
    assert "; without launcher=local, which starts workers if you name it again" in capsys.readouterr().out


def test_files_of_a_run_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    for verb in ("compile", "hosts", "report"):
        assert cli.main([verb, *MINE, "folder=run"]) == 1
        assert "run: expected a folder without a run, found one" in capsys.readouterr().err


def test_a_run_takes_fields_that_have_been_added_since() -> None:
    assert cli.main([*MINE, "fit.epochs=1", "folder=run"]) == 0
    composed = Path("run/.hydra/config.yaml")
    lines = composed.read_text().splitlines(keepends=True)
    others = [line for line in lines if not line.startswith("  export:")]
    assert len(others) == len(lines) - 1
    composed.write_text("".join(others))
    assert cli.main(["evaluate", "folder=run"]) == 0
    assert cli.main(["resume=run", "fit.epochs=2"]) == 0


def test_a_table_of_another_kind_is_read_by_the_fields_of_the_run() -> None:
    """Also where names are numbers, as pandas writes them."""
    columns = {"id": np.arange(60), **{str(i): X[:, i] for i in range(3)}, "3": LABELS, "w": np.ones(60)}
    pyarrow.parquet.write_table(pyarrow.table(columns), "new.parquet")
    np.savetxt("new.csv", np.column_stack([*columns.values()]), "%g", ",", header=",".join(columns), comments="")
    fields = ["data.target=3", "data.features=[1,0,2]", "data.sample_weight=w", "data.labels=[0,1,2]"]
    table = ["model=mlp", "data=csv", "data.path=new.csv", *fields, "loss=cross_entropy", "loss.sample_weight=true"]
    assert cli.main([*table, "fit.epochs=1", "folder=run"]) == 0
    found = []
    for file in ("new.csv", "new.parquet"):
        assert cli.main(["predict", "run", file]) == 0
        found.append(np.load("run/predictions.npz")["y"])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)


def test_an_empty_target_is_told_by_its_column(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{a},{b},{int(a > 0)}\n" for a, b in X[:, :2].tolist())
    Path("a.csv").write_text(f"a,b,target\n{rows}")
    Path("blank.csv").write_text("a,b,target\n1,2,\n")
    assert cli.main(["model=mlp", "data=csv", "data.path=a.csv", "fit.epochs=1", "folder=run"]) == 0
    assert cli.main(["predict", "run", "blank.csv"]) == 1
    assert "column 'target', row 0: expected a value to predict, found none" in capsys.readouterr().err


def test_labels_of_a_binary_loss_are_predicted_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{a},{b},{'yes' if a > 0 else 'no'}\n" for a, b in X[:, :2].tolist())
    Path("train.csv").write_text(f"a,b,target\n{rows}")
    Path("new.csv").write_text("a,b\n" + "".join(f"{a},{b}\n" for a, b in X[:9, :2].tolist()))
    table = [
        "model=mlp",
        "data=csv",
        "data.path=train.csv",
        "data.labels=[no,yes]",
        "loss=binary_cross_entropy",
    ]
    assert cli.main([*table, "fit.epochs=3", "folder=named"]) == 0
    assert cli.main(["predict", "folder=named", "data.path=new.csv"]) == 1
    said = capsys.readouterr().err
    assert "unknown column 'target'; known: a, b: name the column to predict, data.target=NAME" in said
    assert "or leave it out, data.target=null" in said
    for source in ("folder=named", "resume=named"):
        given = ["data.path=new.csv", "data.target=null", "predictions=predictions.csv"]
        assert cli.main(["predict", source, *given]) == 0
        header, *lines = Path("named/predictions.csv").read_text().splitlines()
        assert header == "y_0,label,probabilities_no,probabilities_yes" and len(lines) == 9
        for y, label, no, yes in (line.split(",") for line in lines):
            assert (float(y) > 0) == (label == "yes") == (float(yes) > float(no))
            assert float(yes) == pytest.approx(1 / (1 + math.exp(-float(y))), rel=1e-4, abs=1e-6)


def test_a_run_without_a_trained_model_is_taken_by_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    Path("run/trained.onnx").unlink()
    assert cli.main(["evaluate", "folder=run", "model=mlp"]) == 1
    assert "found run with checkpoints alone: take the newest, resume=run\n" in capsys.readouterr().err
    assert cli.main(["evaluate", "run"]) == 1
    assert "found run with checkpoints alone: take the newest, resume=run\n" in capsys.readouterr().err


def test_a_folder_behind_a_verb_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    Path("run").rename("a run, $mine")
    for verb in ("evaluate", "predict", "compare"):
        assert cli.main([verb, "a run, $mine"]) == 0
    assert Path("a run, $mine/metrics.json").is_file() and Path("a run, $mine/predictions.npz").is_file()
    capsys.readouterr()
    assert cli.main(["evaluate", "runs"]) == 1
    assert capsys.readouterr().err == (
        "graphopt: error: runs: expected the folder of a run or FIELD=VALUE, found no such folder\n"
    )


def test_a_sweep_is_no_run_but_holds_some(capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("0", "1"):
        Path(f"sweep/{run}").mkdir(parents=True)
        Path(f"sweep/{run}/trained.onnx").touch()
    assert cli.main(["evaluate", "folder=sweep"]) == 1
    assert "found sweep, which holds runs: name one of them, such as evaluate sweep/0" in capsys.readouterr().err


def test_what_a_sweep_changes_of_a_run_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*MINE, "fit.epochs=1", "folder=one", "quiet=true"]) == 0
    assert cli.main(["-m", "resume=one", "fit.epochs=1,2"]) == 0
    said = capsys.readouterr().out
    assert "recipe    one, with fit.epochs=1,2 in place of fit.epochs=1\n" in said and "Sweep" not in said


@pytest.mark.parametrize("field", ["folder", "resume"])
def test_a_sweep_has_one_folder(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", "evaluate", f"{field}=a,b"]) == 1
    assert f"{field}=a,b: expected one folder, found several: run the command" in capsys.readouterr().err
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("line", "optimizer", "epochs"),
    [
        ([], {"_target_": "passes.SGD", "learning_rate": 0.5}, 3),
        (["optimizer=sgd"], {"_target_": "passes.SGD", "learning_rate": 0.5}, 3),
        (["experiment=mine", "fit.epochs=5"], {"_target_": "passes.SGD", "learning_rate": 0.5}, 5),
        (["optimizer=adamw"], {"_target_": "passes.AdamW"}, 3),
    ],
)
def test_fields_of_a_run_replace_ours_and_what_it_lacks_is_ours(
    line: list[str], optimizer: dict[str, Any], epochs: int
) -> None:
    fields = {"optimizer": {"_target_": "passes.SGD", "learning_rate": 0.5}, "adapter": None, "fit": {"epochs": 3}}
    choices = {"optimizer": "sgd", "adapter": "none", "experiment": "mine", "loss": "../no name"}
    record = RunRecord(Path("run"), {**fields, "defaults": ["/no_recipe"]}, {}, choices, is_own=True)
    with composing(CommandLine(tuple(line), arguments=tuple(line), record=record)) as hydra:
        found = plain_of(hydra.config_loader.load_configuration("graphopt", line, RunMode.RUN))
    assert {name: found["optimizer"][name] for name in optimizer} == optimizer
    assert ("beta1" in found["optimizer"]) == (line == ["optimizer=adamw"])
    assert found["fit"] == {**base_recipe()["fit"], "epochs": epochs} and found["adapter"] is None
    assert found["loss"]["_target_"] == "passes.CrossEntropy" and "defaults" not in found


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_plain_columns_are_read_by_name(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by their places: files of new rows have other orders, and further columns."""
    columns = {name: X[:, i] for i, name in enumerate("abcd")}

    def write(path: str, names: str, **others: Any) -> None:
        table = {**{name: columns[name] for name in names}, **others}
        if ending == "parquet":
            pyarrow.parquet.write_table(pyarrow.table(table), path)
        else:
            np.savetxt(path, np.column_stack([*table.values()]), "%g", ",", header=",".join(table), comments="")

    write(train := f"train.{ending}", "abcd", target=LABELS)
    write(new := f"new.{ending}", "dcba", row=np.arange(60))
    write(short := f"short.{ending}", "abd")
    run(f"data={ending}", f"data.path={train}", "loss=cross_entropy", "model=mlp")
    found = {}
    for source, of in {train: "run", new: "run", "of the file": "run/trained.onnx"}.items():
        named = (
            ["folder=run", f"data.path={source}"]
            if of == "run"
            else [of, f"data={ending}", f"data.path={new}", "folder=own"]
        )
        assert cli.main(["predict", *named, *["data.target=null"] * (source != train)]) == 0
        found[source] = np.load("own/predictions.npz" if of != "run" else "run/predictions.npz")["y"]
    np.testing.assert_allclose(found[new], found[train], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found["of the file"], found[new])
    assert cli.main(["predict", "run", short]) == 1
    said = capsys.readouterr().err
    assert f"{short}: unknown column 'c'; known: a, b, d: data.features=[...] names the features" in said
    assert cli.main(["resume=run", "fit.epochs=2"]) == 0


def test_held_out_files_are_read_by_name_from_the_first_training(capsys: pytest.CaptureFixture[str]) -> None:
    """And a run does not go on with columns in another order."""
    table = {**{name: X[:, i] for i, name in enumerate("abcd")}, "target": LABELS}

    def write(path: str, names: Sequence[str]) -> None:
        rows = np.column_stack([table[name] for name in names])
        np.savetxt(path, rows, "%g", ",", header=",".join(names), comments="")

    write("train.csv", [*table])
    write("other.csv", [*table][::-1])
    losses = {}
    for path in ("train.csv", "other.csv"):
        options = ["loss=cross_entropy", "model=mlp", f"fit.validation={path}"]
        run("data=csv", "data.path=train.csv", *options, folder=path[:-4])
        losses[path] = [record["validation_loss"] for record in epochs(path[:-4])]
    np.testing.assert_allclose(losses["other.csv"], losses["train.csv"], rtol=1e-6)
    shutil.copy("other.csv", "train.csv")
    capsys.readouterr()
    assert cli.main(["resume=train", "fit.epochs=3"]) == 1
    said = capsys.readouterr().err
    assert "expected columns ['d', 'c', 'b', 'a'] as in this run, found columns ['a', 'b', 'c', 'd']: " in said
