"""The command: what it writes, what it says, what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import builders
import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from builders import mlp
from omegaconf import OmegaConf

import graphopt
from graphopt import cli
from graphopt.cli.comparison import SweepTable
from graphopt.targets.native import toolchain
from passes.gradients.registry import RULES

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 4)).astype(np.float32)
LABELS = (X @ RNG.standard_normal((4, 3))).argmax(axis=1)
MINE = (
    "model=my.onnx",
    "data=npz",
    "data.path=train.npz",
    "folder=out",
    "fit.epochs=2",
    "executor.threads=1",
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and data, and a command line to restore."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["graphopt"])
    onnx.save(mlp((4, 8, 3)), "my.onnx")
    np.savez("train.npz", x=X, target=LABELS)
    return tmp_path


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.slow
def test_a_bare_run_trains_on_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["folder=out", "executor.threads=1"]) == 0
    assert lines("out/metrics.jsonl")[-1]["accuracy"] > 0.95
    said = capsys.readouterr().out
    assert "epoch 20/20  loss" in said
    assert "\x1b" not in said


@pytest.mark.slow
def test_a_run_s_folder() -> None:
    assert cli.main([*MINE, "optimizer.learning_rate=3e-4", "fit.batch_size=16", "fit.shuffle=false"]) == 0
    assert sorted(os.listdir("out")) == [
        *(".hydra", ".lock", "checkpoints", "config.yaml", "graphopt.log", "metrics.jsonl"),
        *("report.html", "result.json", "step.onnx", "trained.onnx"),
    ]
    assert [record["step"] for record in lines("out/metrics.jsonl")] == [3, 6]
    config = yaml.safe_load(Path("out/config.yaml").read_text())
    assert config["pipeline"]["optimizer"]["learning_rate"] == 3e-4
    graphopt.Executor("out/step.onnx")
    trained = onnxruntime.InferenceSession("out/trained.onnx")
    assert trained.run(None, {"x": X})[0].shape == (60, 3)


def test_a_line_a_step() -> None:
    assert cli.main([*MINE, "fit.log_steps=true", "fit.batch_size=16"]) == 0
    assert [record["step"] for record in lines("out/metrics.jsonl")] == [1, 2, 3, 3, 4, 5, 6, 6]


@pytest.mark.slow
def test_a_private_run_records_epsilon() -> None:
    pytest.importorskip("dp_accounting")
    private = ["gradient=private", "clip=gaussian_noise", "fit.sampling=poisson", "fit.batch_size=32"]
    assert cli.main([*MINE, *private, "fit.validation=null"]) == 0
    assert 0 < lines("out/metrics.jsonl")[-1]["epsilon"] < 100


@pytest.mark.slow
def test_compile_needs_neither_data_nor_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert cli.main(["run=compile", "model=my.onnx", "folder=out"]) == 0
    onnx.checker.check_model(onnx.load("out/step.onnx"))
    assert not Path("out/trained.onnx").exists()


@pytest.mark.slow
def test_hosts_get_the_recipe_s_training_graph(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["hosts", "my.onnx", "folder=out", "optimizer=sgd", "optimizer.momentum=0.9"]
    assert cli.main([*arguments, "hosts.batch=8"]) == 0
    out = capsys.readouterr().out
    assert "host.json, state.safetensors, evaluate.onnx" in out and " MB, which a host holds twice" in out
    contract = json.loads(Path("out/host.json").read_text())
    assert [x["shape"][0] for x in contract["feeds"]] == [8, 8]
    assert [x["name"] for x in contract["state"] if x["role"] == "slot"] == [
        f"fc{i}.{part}.momentum" for i in range(2) for part in ("bias", "weight")
    ]
    assert cli.main([*arguments, "hosts.bach=8"]) == 1
    assert (
        "hosts: unknown field 'bach', nearest: 'batch'; known: batch, language, target, unroll"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_artifacts_have_the_recipe_s_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model=my.onnx", "run=artifacts", "folder=out"]
    assert cli.main([*arguments, "optimizer=sgd", "optimizer.momentum=0.9", "clip=global_norm"]) == 0
    assert "optimizer_model.onnx, checkpoint" in capsys.readouterr().out
    operators = {node.op_type for node in onnx.load("out/optimizer_model.onnx").graph.node}
    assert {"InplaceClipGradNorm", "SGDOptimizerV2"} <= operators
    assert sorted(graphopt.on_device.artifacts.parameters("out")) == [
        "fc0.bias",
        "fc0.weight",
        "fc1.bias",
        "fc1.weight",
    ]
    assert cli.main([*arguments, "schedule=linear", "schedule.steps=10"]) == 1
    assert "expected none on a device, whose program sets the rate" in capsys.readouterr().err


@pytest.mark.slow
def test_a_schedule_lasts_as_long_as_the_run() -> None:
    assert cli.main([*MINE, "schedule=cosine"]) == 0
    config = yaml.safe_load(Path("out/config.yaml").read_text())
    assert config["schedule"]["steps"] == lines("out/metrics.jsonl")[-1]["step"]


@pytest.mark.slow
def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run=report", "model=my.onnx", "folder=out", "time=true"]) == 0
    said = capsys.readouterr().out
    assert "trains     4 tensors of 67 numbers" in said
    assert "blocked    by nothing" in said
    assert ("ms without: " in said) == (toolchain.compiler() is not None)
    written = Path("out/report.txt").read_text()
    assert "== before the first pass ==" in written
    assert "== after gradient: Gradient(loss_scale=None) ==" in written


def test_wrong_data_is_refused_before_an_executor_opens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        pytest.fail("kernels are compiled for data that does not fit")

    monkeypatch.setattr("graphopt.cli.composition.recipe.Recipe.executor", fails)
    assert cli.main(["model=mlp", "data=diabetes", "loss=cross_entropy", "folder=out"]) == 1
    assert "data 'target': expected int64, found float32" in capsys.readouterr().err


def test_report_compiles_and_runs_nothing_and_says_first_whether_a_model_trains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        pytest.fail("a report opens no executor and plans no kernels")

    monkeypatch.setattr("graphopt.inspection.report.plan", fails)
    monkeypatch.setattr("graphopt.cli.command.saved_by_kernels", fails)
    onnx.save(mlp([4] * 9), "deep.onnx")
    assert cli.main(["report", "deep.onnx", "folder=out"]) == 0
    said = capsys.readouterr().out.splitlines()
    first = ["model", "takes", "gives", "blocked", "trains"]
    assert [line.split()[0] for line in said[: len(first)]] == first
    assert said[1:3] == ["takes      x float[N,4]", "gives      y float[N,4]"]
    rows = said[said.index("trains:") + 1 : said.index("  and 6 more, in report.txt")]
    assert len(rows) == 10 and len(re.findall(r"^  fc\d", Path("out/report.txt").read_text(), re.M)) == 16


def test_report_times_no_step_that_takes_gigabytes(capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(mlp((4, 50_000, 3)), "wide.onnx")
    assert cli.main(["run=report", "model=wide.onnx", "folder=out", "fit.batch_size=10000", "time=true"]) == 0
    assert "a step     not timed: it takes " in capsys.readouterr().out


@pytest.mark.slow
def test_report_uses_sizes_that_the_network_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """With 32 samples, the convolution has a negative size, at which ONNX's inference of a Slice ends the process."""
    waves = builders.model(
        "g (float[N,S] x) => (float[N,2,F] y) { u = Unsqueeze(x, one) c = Conv<strides = [4]>(u, w) "
        "y = Slice(c, one, most, two) }",
        w=np.ones((2, 1, 40)), one=np.array([1]), two=np.array([2]), most=np.array([2**40]),
    )  # fmt: skip
    onnx.save(waves, "waves.onnx")
    assert cli.main(["run=report", "model=waves.onnx", "loss=mean_squared_error", "folder=out"]) == 0
    assert "at batch size 32 and size 64 of other open axes, estimated" in capsys.readouterr().out


def test_report_says_all_that_blocks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for operator in ("Gemm", "Tanh"):
        monkeypatch.delitem(RULES, ("", operator))
    assert cli.main(["run=report", "model=my.onnx", "folder=out"]) == 0
    said = capsys.readouterr().out
    blocked = said[said.index("blocked    at gradient") : said.index("\ntrains")].splitlines()
    assert [line.split()[0] for line in blocked[2:]] == ["Gemm", "Tanh"]
    assert "fc0.weight" in blocked[2]
    assert "== after loss" in Path("out/report.txt").read_text()


@pytest.mark.slow
def test_a_comparison_shows_the_epoch_whose_weights_the_file_has(capsys: pytest.CaptureFixture[str]) -> None:
    """With a rate of 0, no epoch is better than the first."""
    options = ["fit.epochs=3", "fit.validation=0.5", "fit.checkpoint=null", "optimizer.learning_rate=0"]
    assert cli.main([*MINE, *options]) == 0
    assert json.loads(Path("out/result.json").read_text())["epoch"] == 1
    assert cli.main(["compare", "folder=out"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^ out .* 1 *$", table, re.MULTILINE) and len(lines("out/metrics.jsonl")) == 3


@pytest.mark.slow
def test_a_run_without_epochs_is_resumed_without_a_second_record(capsys: pytest.CaptureFixture[str]) -> None:
    """Without held-out rows it has no number, which is not one that is not finite."""
    for validation in ("0.5", "null"):
        folder = f"folder=out/{validation}"
        assert cli.main([*MINE, "fit.epochs=0", f"fit.validation={validation}", folder]) == 0
        assert cli.main([f"resume=out/{validation}"]) == 0
        assert len(lines(f"out/{validation}/metrics.jsonl")) == 1
    capsys.readouterr()
    assert cli.main(["compare", "folder=out"]) == 0
    said = capsys.readouterr().out
    assert "no epoch" in said and "not finite" not in said


@pytest.mark.slow
def test_a_full_disk_names_the_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "chmod", full)
        assert cli.main(MINE) == 1
    assert re.search(r"error: out/\S+: No space left on device$", capsys.readouterr().err)


def test_a_table_in_a_pipe_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"optimizer.groups_of_a_long_name_{i}" for i in range(30)]
    for run in range(2):
        Path(f"out/{run}/.hydra").mkdir(parents=True)
        Path(f"out/{run}/.hydra/overrides.yaml").write_text(yaml.safe_dump([f"{one}={run}" for one in options]))
    SweepTable().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": "out"}}}))
    said = capsys.readouterr().out
    assert all(one in said for one in options) and "…" not in said


@pytest.mark.slow
def test_a_diverged_run_does_not_end_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", *MINE, "optimizer=sgd", "optimizer.learning_rate=1e38,1e-3"]) == 0
    said = capsys.readouterr()
    assert "expected a finite loss" in said.err
    assert Path("out/1/trained.onnx").exists()


@pytest.mark.slow
def test_a_run_that_diverges_late_leaves_the_last_good_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """The rate grows a thousandfold a step until a loss overflows: trained.onnx has the weights of the step before."""
    schedule = ["schedule=exponential", "schedule.factor=1e4", "optimizer.learning_rate=1e-12"]
    loss = ["loss=mean_squared_error", "optimizer=sgd", "model=linear", "data.path=numbers.npz"]
    np.savez("numbers.npz", x=X, target=X)
    assert cli.main([*MINE, *schedule, *loss, "fit.epochs=20", "fit.log_steps=true"]) == 3
    said = capsys.readouterr()
    done = int(re.findall(r"stopped +after step (\d+): .*trained.onnx", said.out)[0])
    assert done > 2 and f"error: step {done}: expected " in said.err
    weights = [onnx.numpy_helper.to_array(x) for x in onnx.load("out/trained.onnx").graph.initializer]
    assert all(np.isfinite(array).all() for array in weights)
    assert [line["step"] for line in lines("out/metrics.jsonl") if "rows" in line][-1] == done


@pytest.mark.slow
def test_none_leaves_out_what_an_experiment_sets() -> None:
    arguments = ["experiment=text_transformer", "schedule=none", "run=compile", "folder=out"]
    assert cli.main([*arguments, "data.characters=2000"]) == 0


@pytest.mark.parametrize(("chosen", "ranks"), [([], True), (["adapter=none"], False)])
def test_a_recipe_that_names_a_class_needs_no_option(chosen: list[str], ranks: bool) -> None:
    Path("mine/experiment").mkdir(parents=True)
    text = "# @package _global_\nadapter: {_target_: passes.LoRA, rank: 2}\n"
    Path("mine/experiment/own.yaml").write_text(text)
    arguments = ["--config-dir", "mine", "experiment=own", "model=mlp", "data=digits", "run=compile"]
    assert cli.main([*arguments, "folder=out", *chosen]) == 0
    names = {x.name for x in onnx.load("out/step.onnx").graph.input}
    assert any("lora" in name for name in names) == ranks


@pytest.mark.slow
def test_too_little_memory_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        np.empty(2**46)

    monkeypatch.setattr("graphopt.cli.train.fit", full)
    assert cli.main(MINE) == 1
    assert capfd.readouterr().err.startswith("graphopt: error: out of memory: Unable to allocate")


@pytest.mark.slow
def test_help_names_the_groups_and_what_each_field_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help", "optimizer=sgd"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "optimizer: adafactor, adagrad, adam, adamw" in said
    assert "optimizer.momentum=0.0 the decay of the velocity. 0 turns it off." in said
    assert "--config-dir FOLDER" in said


def test_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("graphopt ")


WORDS = {
    "a file": ["my.onnx"],
    "a verb and a file": ["compile", "my.onnx"],
    "a file and a verb": ["my.onnx", "report"],
    "a verb and a field": ["train", "model=my.onnx"],
    "a file with a name of its own": ["it's (1).onnx"],
    "options between fields": ["data=npz", "--cfg", "job", "my.onnx"],
}


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.slow
def test_a_file_and_a_verb_stand_for_fields(words: str) -> None:
    onnx.save(mlp((4, 8, 3)), "it's (1).onnx")
    assert cli.main([*WORDS[words], *MINE[1:]]) == 0
    if "options" not in words:
        config = yaml.safe_load(Path("out/config.yaml").read_text())
        assert config["model"] == next(word for word in WORDS[words] if ".onnx" in word).removeprefix("model=")
        verbs = {word for word in WORDS[words] if word in ("compile", "report")} or {"train"}
        assert config["run"] in verbs


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.slow
def test_ctrl_c_leaves_a_trained_model() -> None:
    command = [sys.executable, "-c", "import sys; from graphopt.cli import main; sys.exit(main())", *MINE]
    environment = {**os.environ, "PYTHONPATH": str(Path(graphopt.__file__).parents[1])}
    process = subprocess.Popen(
        [*command, "fit.epochs=1000000"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch"):
            break
    process.send_signal(signal.SIGINT)
    said = process.stdout.read()
    assert process.wait(60) == cli.INTERRUPTED
    assert "stopped   after step" in said
    onnx.checker.check_model(onnx.load("out/trained.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["validation_loss", pytest.param("accuracy", marks=pytest.mark.exhaustive)])
def test_trained_onnx_has_the_weights_of_the_best_epoch(measure: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = [
        "fit.epochs=12",
        "optimizer.learning_rate=0.1",
        "executor.threads=1",
        "executor.native=false",
        f"fit.checkpoint.best={measure}",
    ]
    assert cli.main([*run, "folder=best"]) == cli.main([*run, "folder=last", "fit.export=last"]) == 0
    said = capsys.readouterr().out
    records = lines("best/metrics.jsonl")
    assert [r["loss"] for r in records] == [r["loss"] for r in lines("last/metrics.jsonl")]  # the steps are the same
    best = min(records, key=lambda r: r["validation_loss"] if measure == "validation_loss" else -r["accuracy"])
    assert best["epoch"] < 12, "the case tells nothing"
    assert said.count(f"restored  the weights of epoch {best['epoch']}\n") == 1
    assert said.count("the weights are those of the last epoch: fit.export=best keeps the best") == 1
    for folder, record in (("best", best), ("last", records[-1])):
        assert cli.main(["evaluate", f"folder={folder}"]) == 0
        found = json.loads(Path(folder, "metrics.json").read_text())
        assert (found["loss"], found["accuracy"]) == pytest.approx((record["validation_loss"], record["accuracy"]))


def test_a_head_has_as_many_outputs_as_the_data_has_classes() -> None:
    np.savez("train.npz", x=X, target=np.arange(60) % 7)
    assert cli.main([*MINE, "adapter=head"]) == 0
    assert onnxruntime.InferenceSession("out/trained.onnx").get_outputs()[0].shape[1] == 7
    np.savez("train.npz", x=X, target=X[:, :2])  # columns of numbers
    assert cli.main([*MINE, "adapter=head", "loss=mean_squared_error", "folder=other"]) == 0
    assert onnxruntime.InferenceSession("other/trained.onnx").get_outputs()[0].shape[1] == 2
