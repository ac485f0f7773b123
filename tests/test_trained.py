"""`run=evaluate` and `run=predict`: they equal what onnx's reference evaluator and scikit-learn compute."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet
import pytest
import safetensors.numpy
import sklearn.metrics as sk
import yaml
from builders import mlp
from onnx.reference import ReferenceEvaluator

from graphopt import cli
from graphopt.testing import strict

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 4)).astype(np.float32)
LABELS = (X @ RNG.standard_normal((4, 3))).argmax(axis=1)
NPZ = ("data=npz", "data.path=train.npz")
QUICK = ("fit.epochs=3", "executor.threads=1", "fit.batch_size=16")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in the folder `run` of a folder, and return it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        onnx.save(mlp((4, 8, 3)), "my.onnx")
        np.savez("train.npz", x=X, target=LABELS)
        assert cli.main(["my.onnx", *NPZ, *QUICK, "folder=run"]) == 0
    return folder


@pytest.fixture(autouse=True)
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a copy of the folder with the run."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def expected(model: str = "run/trained.onnx") -> np.ndarray:
    return ReferenceEvaluator(onnx.load(model)).run(None, {"x": X})[0]


def read(name: str) -> dict[str, Any]:
    return json.loads(Path(name).read_text())


@pytest.mark.parametrize("source", ["folder=run", "resume=run", "model=run/trained.onnx"])
@pytest.mark.slow
def test_evaluate_writes_and_prints_metrics(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    folder = "out" if source.startswith("model") else "run"
    given = [source, *(["folder=out"] if folder == "out" else [])]
    chosen = "fit.metrics=[accuracy,f1,confusion_matrix]"
    with strict(False):  # it lowers anew, and logs that
        assert cli.main(["evaluate", *given, *NPZ, "executor.threads=1", "rows=all", chosen]) == 0
    found, predicted = read(f"{folder}/metrics.json"), expected().argmax(axis=1)
    assert found["rows"] == 60
    assert found["accuracy"] == sk.accuracy_score(LABELS, predicted)
    assert found["f1"] == pytest.approx(sk.f1_score(LABELS, predicted, average="macro"))
    assert found["confusion_matrix"] == sk.confusion_matrix(LABELS, predicted).tolist()
    log_p = expected() - np.log(np.exp(expected()).sum(1, keepdims=True))
    assert found["loss"] == pytest.approx(-log_p[range(60), LABELS].mean(), rel=1e-5)
    said = capsys.readouterr().out
    assert f"{found['f1']:.6g}" in said and "target \\ predicted" in said
    assert [path for path, content in before.items() if path.read_bytes() != content] == []
    assert not Path("runs").exists() or not any(path.is_file() for path in Path("runs").rglob("*"))


@pytest.mark.slow
def test_evaluate_on_other_rows_and_with_a_checkpoint_by_name() -> None:
    np.savez("test.npz", x=X[:7], target=LABELS[:7])
    checkpoint = next(Path("run/checkpoints").glob("step-*"))
    assert cli.main(["evaluate", f"resume={checkpoint}", "data=npz", "data.path=test.npz"]) == 0
    assert read("run/metrics.json")["accuracy"] == np.mean(expected()[:7].argmax(1) == LABELS[:7])
    assert cli.main(["evaluate", "my.onnx", *NPZ, *QUICK, "folder=run", "resume=true"]) == 0
    assert read("run/metrics.json")["rows"] == 12


@pytest.mark.parametrize("source", ["folder=run", "resume=run", "model=run/trained.onnx"])
@pytest.mark.parametrize("ending", ["npz", "csv", "parquet"])
@pytest.mark.slow
def test_predict_writes_the_outputs(source: str, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = "out" if source.startswith("model") else "run"
    given = [source, *(["folder=out"] if folder == "out" else [])]
    assert cli.main(["predict", *given, *NPZ, f"predictions=p.{ending}"]) == 0
    path = f"{folder}/p.{ending}"
    assert path in capsys.readouterr().out
    if ending == "npz":
        with np.load(path) as archive:
            found = archive["y"]
    elif ending == "csv":
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        found = np.array([[float(row[f"y_{i}"]) for i in range(3)] for row in rows], np.float32)
    else:
        table = pyarrow.parquet.read_table(path)
        found = np.stack([table[f"y_{i}"].to_numpy() for i in range(3)], axis=1)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_model_with_a_fixed_batch() -> None:
    model = onnx.load("run/trained.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 16
    onnx.save(model, "fixed.onnx")
    assert cli.main(["predict", "fixed.onnx", *NPZ, "folder=out"]) == 0
    with np.load("out/predictions.npz") as archive:
        np.testing.assert_allclose(archive["y"], expected(), rtol=1e-5, atol=1e-6)


REFUSED = {
    "folder=run data=diabetes": "data 'x': expected rows of shape [4], found [10]",
    "folder=other data=npz data.path=train.npz": "which lacks the parameter 'fc0.weight'",
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.slow
def test_errors_are_one_line(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    os.makedirs("other")
    Path("other/step.onnx").write_bytes(Path("run/step.onnx").read_bytes())
    renamed = onnx.load("run/trained.onnx")
    (weight,) = (x for x in renamed.graph.initializer if x.name == "fc0.weight")
    weight.name = renamed.graph.node[0].input[1] = "w"
    onnx.save(renamed, "other/trained.onnx")
    capfd.readouterr()
    assert cli.main(["evaluate", *case.split()]) == 1
    said = capfd.readouterr().err
    assert REFUSED[case] in said
    assert said.count("\n") == 1
    assert "metrics.json" not in os.listdir("run")


@pytest.mark.slow
def test_a_run_s_recipe_is_not_overwritten() -> None:
    assert cli.main(["predict", "folder=run", *NPZ]) == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["run"] == "train"
    assert cli.main(["evaluate", "model=run/trained.onnx", *NPZ, "folder=out"]) == 0
    assert yaml.safe_load(Path("out/config.yaml").read_text())["run"] == "evaluate"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["run", "checkpoint"])
@pytest.mark.parametrize("kind", ["compile", "hosts"])
def test_an_exported_step_has_the_state_of_the_run(kind: str, source: str) -> None:
    resume = "run" if source == "run" else str(max(Path("run/checkpoints").glob("step-*")))
    assert cli.main([kind, f"resume={resume}", "folder=out"]) == 0
    weights = {x.name: onnx.numpy_helper.to_array(x) for x in onnx.load("run/trained.onnx").graph.initializer}
    if kind == "compile":
        step = onnx.load("out/step.onnx")
        found = {x.name: onnx.numpy_helper.to_array(x) for x in step.graph.initializer}
        assert found["step"] == 3 * 3
        assert any(np.any(x) for name, x in found.items() if name.endswith("exp_sum_sq"))
    else:
        found = safetensors.numpy.load_file("out/state.safetensors")
    assert weights
    for name, x in weights.items():
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.parametrize("kind", ["artifacts", "report", "compare"])
def test_what_uses_no_state_refuses_a_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([kind, "resume=run", "folder=out"]) == 1
    assert f"graphopt: error: {kind}: expected no resume, found resume=run" in capsys.readouterr().err
    assert not Path("out/report.txt").exists()


def test_a_run_to_export_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["my.onnx", "run=hosts", "resume=true", "folder=out"]) == 1
    assert "hosts: expected resume=RUN, the folder of a run, found resume=true" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_says_if_another_epoch_was_better(capsys: pytest.CaptureFixture[str]) -> None:
    were_better = set()
    for rate in (0.01, 100.0):
        capsys.readouterr()
        given = ["optimizer=sgd", f"optimizer.learning_rate={rate}", f"folder=rate_{rate}"]
        given += ["fit.epochs=6", "fit.export=last"]
        assert cli.main(["my.onnx", *NPZ, *QUICK, *given]) == 0
        lines = Path(f"rate_{rate}/metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if "validation_loss" in record]
        best = min(records, key=lambda record: record["validation_loss"])
        is_other = best["epoch"] != records[-1]["epoch"]
        said = capsys.readouterr().out
        assert (f"epoch {best['epoch']} had validation loss {best['validation_loss']:.4g}" in said) == is_other
        were_better.add(is_other)
    assert were_better == {False, True}
    given = ["optimizer=sgd", "optimizer.learning_rate=100", "folder=stopped", "fit.epochs=6"]
    assert cli.main(["my.onnx", *NPZ, *QUICK, *given, "callbacks.early_stopping={patience: 3}"]) == 0
    assert "had validation" not in capsys.readouterr().out
